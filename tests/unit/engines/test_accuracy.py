"""Accuracy of an artefact against the FP32 model, and its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from headrace_engines.accuracy import Accuracy, judge, measure
from headrace_engines.errors import BuildError
from headrace_engines.progress import silent
from headrace_engines.project import AccuracyLimits
from headrace_engines.quantization.samples import Samples

from tests.support.networks import samples_of

Array = np.ndarray[Any, Any]
LOGITS = np.float32([[3, 1, 0], [0, 2, 1], [1, 0, 4], [5, 4, 0]])


class Recorded:
    """Answers with rows of arrays, by the index that it is sent."""

    def __init__(self, **outputs: Array) -> None:
        self._outputs = outputs
        self.batches: list[int] = []

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.batches.append(len(inputs["index"]))
        return {name: array[inputs["index"]] for name, array in self._outputs.items()}


def indexes(count: int = 4, labels: list[int] | None = None) -> Samples:
    return samples_of({"index": np.arange(count)}, None if labels is None else np.int64(labels))


def compare(expected: Any, given: Any, samples: Samples | None = None, rows: int = 3) -> Accuracy:
    return measure(Recorded(**expected), Recorded(**given), indexes() if samples is None else samples, rows, silent)


def test_equal_answers() -> None:
    engine, shares = Recorded(logits=LOGITS), list[float]()
    accuracy = measure(Recorded(logits=LOGITS), engine, indexes(), 3, lambda done, _note: shares.append(done))
    assert accuracy == Accuracy(4, "arrays (4 samples)", 1.0, pytest.approx(1.0), 0.0, output="logits")
    assert engine.batches == [3, 1]
    assert shares == [0.75, 1.0]


def test_agreement_cosine_and_difference() -> None:
    given = LOGITS.copy()
    given[3] = [4, 5, 0]
    accuracy = compare({"logits": LOGITS}, {"logits": given})
    assert accuracy.top1_agreement == 0.75
    assert accuracy.max_abs == 1
    assert accuracy.cosine == pytest.approx((3 + 40 / 41) / 4)
    assert accuracy.accuracy is accuracy.reference_accuracy is accuracy.drop is None


def test_labels_are_held_against_both() -> None:
    given = LOGITS.copy()
    given[3] = [4, 5, 0]
    accuracy = compare({"logits": LOGITS}, {"logits": given}, indexes(labels=[0, 1, 0, 0]))
    assert accuracy.reference_accuracy == 0.75
    assert accuracy.accuracy == 0.5
    assert accuracy.drop == 0.25


def test_the_first_output_with_classes_is_looked_at_and_the_worst_output_counts() -> None:
    expected = {
        "score": np.ones(4, np.float32),
        "sequence": np.eye(4, dtype=np.float32)[None].repeat(4, 0),
        "other": LOGITS,
    }
    given = {**expected, "sequence": expected["sequence"][:, ::-1].copy()}
    given["sequence"][:, :2] = expected["sequence"][:, :2]
    accuracy = compare(expected, given, indexes(labels=[0] * 4))
    assert accuracy.output == "sequence"
    assert accuracy.top1_agreement == 0.5
    assert accuracy.cosine == pytest.approx(0.5)
    # Four answers a sample, one label: that is no accuracy.
    assert accuracy.accuracy is None


def test_outputs_of_whole_numbers_agree_or_not() -> None:
    accuracy = compare({"ids": np.int64([1, 2, 3, 4])}, {"ids": np.int64([1, 2, 3, 5])})
    assert (accuracy.output, accuracy.top1_agreement, accuracy.cosine) == ("ids", 0.75, 1.0)


def test_pictures_have_no_classes() -> None:
    picture = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    accuracy = compare({"mask": picture}, {"mask": picture + np.float32(0.5)})
    assert (accuracy.output, accuracy.top1_agreement) == ("", None)
    assert accuracy.max_abs == pytest.approx(0.5, rel=1e-5)
    assert judge(accuracy, AccuracyLimits(1.0, 0.5, None)) == []


def test_zeros_match_zeros_only() -> None:
    zeros, ones = np.zeros((4, 2), np.float32), np.ones((4, 2), np.float32)
    assert compare({"x": zeros}, {"x": zeros}).cosine == 1.0
    assert compare({"x": zeros}, {"x": ones}).cosine == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_outputs_are_failures(bad: float) -> None:
    given = LOGITS.copy()
    given[2, 1] = bad
    accuracy = compare({"logits": LOGITS}, {"logits": given}, indexes(labels=[0, 1, 2, 0]))
    assert (accuracy.cosine, accuracy.top1_agreement, accuracy.accuracy) == (0.0, 0.0, None)
    missed = judge(accuracy, AccuracyLimits(0.9, 0.95, None))
    assert missed[0] == "output logits has 1 values that are NaN or infinite, FP32's has none there"


def test_infinities_of_the_fp32_model_are_excluded() -> None:
    expected = LOGITS.copy()
    expected[:, 2] = -np.inf
    accuracy = compare({"logits": expected}, {"logits": np.where(np.isinf(expected), -65504, expected)})
    assert (accuracy.problem, accuracy.max_abs, accuracy.cosine) == ("", 0.0, pytest.approx(1.0))
    accuracy = compare({"logits": LOGITS * np.float32(np.nan)}, {"logits": LOGITS})
    assert "the FP32 model itself" in accuracy.problem


@pytest.mark.parametrize("given", [{}, {"logits": LOGITS[:, :2]}])
def test_other_outputs_are_a_failure(given: dict[str, Array]) -> None:
    accuracy = compare({"logits": LOGITS}, given)
    assert accuracy.cosine == 0.0
    assert "output logits" in judge(accuracy, AccuracyLimits(0.0, -1.0, None))[0]


def test_a_model_without_a_batch_dimension_is_compared_sample_by_sample() -> None:
    samples = Samples(lambda number: {"index": np.arange(4)}, [b"", b""], "data", batched=False)
    accuracy = compare({"logits": LOGITS}, {"logits": LOGITS}, samples)
    assert (accuracy.samples, accuracy.top1_agreement) == (2, 1.0)


def test_no_samples_are_refused() -> None:
    with pytest.raises(BuildError, match=r"optimization\.accuracy\.data"):
        compare({"logits": LOGITS}, {"logits": LOGITS}, indexes().head(0))


def test_missed_limits_have_both_values_and_a_remedy() -> None:
    accuracy = Accuracy(200, "data", 0.895, 0.94, 1.0, 0.96, 0.97)
    missed = judge(accuracy, AccuracyLimits(0.9, 0.95, 0.005))
    assert missed[0] == "its top-1 agreement with FP32 is 89.50%, 90.00% is required"
    assert missed[1] == "the cosine with FP32's outputs is 0.94000, 0.95000 is required"
    assert missed[2].startswith(
        "its accuracy is 96.00%, that of FP32 is 97.00%: 1.00% lost, 0.50% allowed: keep the layers"
    )
    assert judge(accuracy, AccuracyLimits(0.895, 0.94, 0.01)) == []
    assert judge(accuracy, AccuracyLimits(0.895, 0.94, None)) == []


def test_a_drop_without_labels_is_a_missed_limit() -> None:
    assert "max_drop" in judge(Accuracy(2, "data", 1.0, 1.0, 0.0), AccuracyLimits(0.9, 0.9, 0.01))[0]


def test_json_and_back() -> None:
    accuracy = compare({"logits": LOGITS}, {"logits": LOGITS}, indexes(labels=[0, 1, 2, 0]))
    document = json.loads(json.dumps(accuracy.to_json()))
    assert Accuracy.from_json({**document, "later": 1}) == accuracy
    with pytest.raises(BuildError, match="build it again"):
        Accuracy.from_json({"cosine": 1.0})


def test_labels_count_without_a_batch_dimension() -> None:
    """The model's own first dimension is 1: [1, classes] is the answer to one sample."""
    samples = Samples(
        lambda number: {"index": np.array([number])}, [b""] * 4, "data", labels=np.array([0, 1, 0, 0]), batched=False
    )
    accuracy = compare({"logits": LOGITS}, {"logits": LOGITS}, samples)
    assert (accuracy.top1_agreement, accuracy.reference_accuracy) == (1.0, 0.75)


def test_the_output_with_the_label_file_classifies() -> None:
    outputs = {"embedding": LOGITS[:, ::-1].copy(), "logits": LOGITS}
    samples = indexes(labels=[0, 1, 0, 0])
    accuracy = measure(Recorded(**outputs), Recorded(**outputs), samples, 3, silent, output="logits")
    assert (accuracy.output, accuracy.reference_accuracy) == ("logits", 0.75)
    accuracy = measure(Recorded(**outputs), Recorded(**outputs), samples, 3, silent, output="gone")
    assert accuracy.output == "embedding"


@pytest.mark.parametrize("values", [[True, True, False, False], ["a", "b", "c", "d"]])
def test_truth_values_and_text_agree_or_not(values: list[Any]) -> None:
    expected = np.array(values, bool if isinstance(values[0], bool) else object)
    accuracy = compare({"out": expected}, {"out": np.array([*values[:3], values[0]], expected.dtype)})
    assert (accuracy.output, accuracy.top1_agreement) == ("out", 0.75)


def test_a_cosine_that_is_no_number_is_missed() -> None:
    assert judge(Accuracy(2, "data", 1.0, float("nan"), 0.0), AccuracyLimits(0.9, 0.9, None))


def test_only_quantised_models_can_exclude_layers() -> None:
    missed = Accuracy(2, "data", 0.5, 1.0, 0.0)
    assert "calibration.keep" in judge(missed, AccuracyLimits(0.9, 0.9, None))[0]
    assert "calibration.keep" not in judge(missed, AccuracyLimits(0.9, 0.9, None), quantized=False)[0]
    assert "higher precision" in judge(missed, AccuracyLimits(0.9, 0.9, None), quantized=False)[0]
