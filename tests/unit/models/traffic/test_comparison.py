"""Agreement and difference of outputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from headrace.core.tensor import Array
from headrace.models.traffic.comparison import compare
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


def scores(*rows: list[float]) -> Array:
    return np.array(rows, np.float32)


def test_scores_agree_where_the_largest_is_at_the_same_place() -> None:
    expected = {"Y": scores([0.1, 0.9], [0.8, 0.2], [0.6, 0.4])}
    actual = {"Y": scores([0.2, 0.8], [0.3, 0.7], [0.51, 0.49])}
    result = compare(expected, actual, 3)
    assert (result.rows, result.agreeing) == (3, 2)
    assert result.difference == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("first", "second", "agreeing"),
    [
        (np.array([[1], [2]]), np.array([[1], [3]]), 1),  # classes
        (np.array([[100.0], [5.0]]), np.array([[100.9], [6.0]]), 1),  # numbers, within 1 %
        (np.array([[b"a"], [b"b"]], object), np.array([[b"a"], [b"c"]], object), 1),
        (np.array([[True], [False]]), np.array([[True], [False]]), 2),
        (np.zeros((2, 3, 2)), np.zeros((2, 3, 2)), 2),  # a class for each of three places
    ],
)
def test_other_outputs_agree_by_their_type(first: Array, second: Array, agreeing: int) -> None:
    assert compare({"Y": first}, {"Y": second}, 2).agreeing == agreeing


def test_a_row_agrees_if_all_outputs_do() -> None:
    expected = {"A": np.array([[1], [2]]), "B": np.array([[1], [2]])}
    assert compare(expected, {"A": np.array([[1], [0]]), "B": np.array([[0], [2]])}, 2).agreeing == 0


def test_other_shapes_types_or_names_never_agree() -> None:
    expected = {"Y": scores([1.0, 0.0])}
    for actual in ({}, {"Y": scores([1.0, 0.0, 0.0])}, {"Y": np.array([[1.0, 0.0]])}, {"Z": scores([1.0, 0.0])}):
        assert compare(expected, actual, 1) == (1, 0, math.inf)


def test_infinities_and_nan_are_compared() -> None:
    special = scores([math.inf, math.nan], [1.0, 2.0])
    assert compare({"Y": special}, {"Y": special.copy()}, 2) == (2, 2, 0.0)
    assert compare({"Y": scores([1.0, math.nan])}, {"Y": scores([1.0, 2.0])}, 1).difference == math.inf


def test_a_model_without_a_batch_dimension_has_one_row() -> None:
    values = np.array([0.1, 0.7, 0.2])
    assert compare({"Y": values}, {"Y": values + 0.01}, 1).agreeing == 1
    assert compare({"Y": np.zeros((0, 3))}, {"Y": np.zeros((0, 3))}, 1) == (1, 1, 0.0)


@settings(deadline=None)
@given(hnp.arrays(np.float32, (4, 3), elements=st.floats(width=32)))
def test_equal_outputs_always_agree(values: Array) -> None:
    assert compare({"Y": values}, {"Y": values.copy()}, 4) == (4, 4, 0.0)
