"""Sensitivity of layers to quantisation, and the smallest number of layers in floating point."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace.config.optimization_config import Calibration
from headrace_engines.accuracy import measure
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.precision.lowering import min_float_layers, rank_layers
from headrace_engines.progress import silent
from headrace_engines.quantization.calibration import calibrate
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.quantization.samples import Samples
from headrace_engines.simplify import simplify
from onnx import numpy_helper

from tests.support.networks import samples_of
from tests.support.onnx_blocks import Network

TARGETS = ("tensorrt", "onnxruntime")


def chain(layers: int, harmed: int, channels: int = 8) -> onnx.ModelProto:
    """Convolutions of which one, by number, reads a channel a thousand times larger than the others."""
    net = Network(seed=4)
    x = net.input("x", ["N", channels, 8, 8])
    scale = np.ones(channels, np.float32)
    for number in range(layers):
        weight = net.random.standard_normal((channels, channels, 3, 3)) / np.sqrt(4.5 * channels) / scale[:, None, None]
        # What makes the large channel is scaled up, what reads it is scaled down: in floating point nothing changes.
        scale = np.ones(channels, np.float32)
        scale[2] = 1000 if number + 1 == harmed else 1
        kernel = net.constant(weight * scale[:, None, None, None])
        x = net.node("Relu", net.node("Conv", x, kernel, name=f"conv{number}", pads=[1] * 4))
    return simplify(net.model(net.node("Flatten", net.node("AveragePool", x, kernel_shape=[4, 4], strides=[4, 4]))))


def pictures(count: int = 12) -> Samples:
    return samples_of({"x": np.random.default_rng(5).standard_normal((count, 8, 8, 8)).astype(np.float32)})


def ranges_of(model: onnx.ModelProto) -> dict[str, tuple[float, float]]:
    calibration = Calibration(method="minmax")
    return calibrate(model, tensors_to_calibrate(model), pictures(), calibration, None, silent)


@pytest.mark.parametrize("target", TARGETS)
def test_the_sensitive_layer_ranks_first_and_only_it_is_excluded(target: str) -> None:
    model = chain(6, harmed=3)
    ranges, shares = ranges_of(model), list[float]()
    ranking = rank_layers(model, ranges, target, "int8", pictures(), lambda done, _note: shares.append(done))
    names, errors = [name for name, _ in ranking], [error for _, error in ranking]
    # ONNX Runtime stores what a layer makes in 8 bits, so there the one that makes the large channel harms as much.
    harmful = {"conv3"} if target == "tensorrt" else {"conv2", "conv3"}
    assert set(names[: len(harmful)]) == harmful
    assert sorted(names) == [f"conv{i}" for i in range(6)]
    assert errors == sorted(errors, reverse=True)
    assert errors[len(harmful) - 1] > 1000 * errors[len(harmful)] > 0
    assert shares == pytest.approx([(i + 1) / 6 for i in range(6)])

    def holds(keep: set[str]) -> bool:
        quantized = OnnxRunner(quantize(model, ranges, target, "int8", keep))
        return measure(OnnxRunner(model), quantized, pictures(), 8, silent).cosine > 0.998

    assert not holds(set())
    assert min_float_layers(names, holds) == harmful


def test_a_layer_that_produces_nan_ranks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: onnx.ModelProto, ranges: object, target: str, precision: str, keep: list[str]) -> onnx.ModelProto:
        created = quantize(model, ranges, target, precision, keep)  # type: ignore[arg-type]
        for tensor in [] if "conv2" in keep else created.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                tensor.CopyFrom(numpy_helper.from_array(np.full(tensor.dims, np.nan, np.float32), tensor.name))
        return created

    monkeypatch.setattr("headrace_engines.precision.lowering.quantize", broken)
    model = chain(3, harmed=1)
    ranking = rank_layers(model, ranges_of(model), "tensorrt", "int8", pictures(2), silent)
    assert ranking[0] == ("conv2", np.inf)
    assert 0 < ranking[1][1] < np.inf


def test_only_the_named_layers_are_looked_at() -> None:
    model = chain(4, harmed=2)
    ranking = rank_layers(model, ranges_of(model), "tensorrt", "int8", pictures(4), silent, ["conv1", "conv2"])
    assert [name for name, _ in ranking] == ["conv2", "conv1"]


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 21, 32, 53])
def test_the_search_finds_the_fewest_in_few_trials(needed: int) -> None:
    ranking = [f"layer{i}" for i in range(53)]
    trials: list[int] = []

    def holds(keep: set[str]) -> bool:
        trials.append(len(keep))
        assert keep == set(ranking[: len(keep)])
        return len(keep) >= needed

    assert min_float_layers(ranking, holds) == set(ranking[:needed])
    assert len(trials) == len(set(trials))
    assert len(trials) <= 2 * np.log2(53) + 1


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_search_without_a_result_is_reported(count: int) -> None:
    with pytest.raises(BuildError, match=f"even with all {count} layers"):
        min_float_layers([str(i) for i in range(count)], lambda _keep: False)
