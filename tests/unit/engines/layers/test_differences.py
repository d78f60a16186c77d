"""Differences of one tensor: against their definitions, and of values that are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
from headrace_engines.layers.differences import DifferenceSums, TensorDifference

from tests.support import networks


def difference(expected: np.ndarray, actual: np.ndarray, count: int = 0) -> TensorDifference:
    sums = DifferenceSums()
    sums.add(expected, actual, count or len(expected))
    return sums.result()


def test_figures_are_those_of_the_definition() -> None:
    random = np.random.default_rng(0)
    a = random.normal(size=(6, 3, 4)).astype("f4")
    b = (a + random.normal(size=a.shape) * 0.1).astype("f4")
    sums = DifferenceSums()
    for start in (0, 4):
        sums.add(a[start : start + 4], b[start : start + 4], len(a[start : start + 4]))
    result = sums.result()
    error = a.astype("f8") - b
    assert result.cosine == pytest.approx(np.mean([networks.cosine(x, y) for x, y in zip(a, b, strict=True)]))
    assert result.max_abs == pytest.approx(np.abs(error).max())
    assert result.mean_abs == pytest.approx(np.abs(error).mean())
    assert result.relative == pytest.approx(np.linalg.norm(error) / np.linalg.norm(a))


def test_equal_tensors_do_not_differ() -> None:
    assert difference(np.ones((2, 3), "f4"), np.ones((2, 3), "f2")) == TensorDifference(1.0, 0.0, 0.0, 0.0)
    assert difference(np.zeros((2, 3)), np.zeros((2, 3))).relative == 0


def test_rows_are_compared_one_by_one() -> None:
    a, b = np.array([[1.0, 0], [100, 0]]), np.array([[0.0, 1], [100, 0]])
    assert difference(a, b).cosine == pytest.approx(0.5)
    # Without rows in front it is one sample.
    assert difference(a, b, count=3).cosine == pytest.approx(networks.cosine(a, b))


def test_new_infinities_are_a_failure_and_those_of_fp32_are_left_out() -> None:
    a = np.array([[1.0, 2.0], [3.0, 4.0]])
    broken = difference(a, np.array([[1.0, np.nan], [3.0, 4.0]]))
    assert (broken.cosine, broken.max_abs, broken.relative) == (0.0, math.inf, math.inf)
    assert broken.to_json()["max_abs"] is None
    expected = np.array([[1.0, -np.inf], [3.0, 4.0]])
    assert difference(expected, np.array([[1.0, -7.0], [3.0, 4.0]])).relative == 0


def test_an_error_where_fp32_is_zero_is_infinite() -> None:
    assert difference(np.zeros((1, 2)), np.ones((1, 2))) == TensorDifference(0.0, 1.0, 1.0, math.inf)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2\] is compared with \[3\]"):
        difference(np.ones(3), np.ones(2))
