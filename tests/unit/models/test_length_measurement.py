"""The check of a padded model and the measurement by length, before it serves."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.core.tensor import BY_CONFIG_NAME, Array, ModelSpec, PaddedInputs, TensorSpec
from headrace.inference.scheduling.policy import PaddingPolicy
from headrace.inference.scheduling.ragged import PaddedLayout
from headrace.models.length_measurement import LengthMeasurement
from headrace.runtimes.base import Execution

INT64, FP32, STRING = (BY_CONFIG_NAME[f"TYPE_{name}"] for name in ("INT64", "FP32", "STRING"))


class Mean(Execution):
    """The mean over the length, of the positions in the mask or of all; an error beyond `longest`."""

    def __init__(self, is_masked: bool = True, longest: int = 1000) -> None:
        self.is_masked = is_masked
        self.longest = longest
        self.runs = 0

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.runs += 1
        if inputs["x"].shape[1] > self.longest:
            raise ValueError("too long")
        mask = inputs["mask"] if self.is_masked else np.ones_like(inputs["mask"])
        mean = (inputs["x"] * mask).sum(axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True)
        return {"mean": mean.astype(np.float32)}


def layout_of(extra: TensorSpec | None = None) -> tuple[ModelSpec, PaddedLayout]:
    padding = PaddedInputs(frozenset({"x", "mask"}), 1, 8)
    inputs = [TensorSpec("x", FP32, (-1, -1)), TensorSpec("mask", INT64, (-1, -1)), *([extra] if extra else [])]
    spec = ModelSpec(
        "m", "1", "", {t.name: t for t in inputs}, {"mean": TensorSpec("mean", FP32, (-1, 1))}, 4, padded=padding
    )
    return spec, PaddedLayout(PaddingPolicy({"x": 0.0, "mask": 0}, padding), spec)


def test_a_masked_model_is_measured_once() -> None:
    spec, layout = layout_of()
    measurement, model = LengthMeasurement(spec, layout, 4, 10**9), Mean()
    measurement(model)  # type: ignore[arg-type]
    assert layout.output_lengths.is_known
    assert not layout.problem
    assert layout.lengths.estimate_ns(4, 64) > 0
    runs = model.runs
    measurement(model)  # type: ignore[arg-type]
    assert model.runs == runs


def test_a_model_without_a_mask_is_not_padded(caplog: pytest.LogCaptureFixture) -> None:
    spec, layout = layout_of()
    LengthMeasurement(spec, layout, 4, 10**9)(Mean(is_masked=False))  # type: ignore[arg-type]
    assert "output 'mean' of a request changes when it is padded" in layout.problem
    assert "its requests are not padded" in caplog.text
    assert not layout.lengths


@pytest.mark.parametrize("extra", [TensorSpec("t", STRING, (-1, 1)), TensorSpec("free", FP32, (-1, -1))])
def test_some_models_are_not_measured(extra: TensorSpec) -> None:
    spec, layout = layout_of(extra)
    model = Mean()
    LengthMeasurement(spec, layout, 4, 10**9)(model)  # type: ignore[arg-type]
    assert model.runs == 0
    assert not layout.output_lengths.is_known


def test_an_error_of_the_model_does_not_prevent_serving() -> None:
    spec, layout = layout_of()
    LengthMeasurement(spec, layout, 4, 10**9)(Mean(longest=8))  # type: ignore[arg-type]
    assert not layout.problem
    assert layout.output_lengths.is_known
    assert layout.lengths.estimate_ns(1, 8) > 0


def test_without_a_time_limit_nothing_is_run() -> None:
    spec, layout = layout_of()
    model = Mean()
    LengthMeasurement(spec, layout, 4, 0)(model)  # type: ignore[arg-type]
    assert model.runs == 0
