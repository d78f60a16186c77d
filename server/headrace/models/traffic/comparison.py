"""Compares the outputs of a shadow request with those of the stable version."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.tensor import Array

# Numbers without classes agree within this relative difference, or this absolute one around zero.
_RELATIVE, _ABSOLUTE = 0.01, 1e-6


class OutputComparison(NamedTuple):
    """Result of a comparison.

    Attributes:
        rows: compared rows.
        agreeing: rows in which all outputs agree.
        difference: largest absolute difference of two numbers; infinite if shapes or types differ, or only one is NaN.
    """

    rows: int
    agreeing: int
    difference: float


def compare(expected: Mapping[str, Array], actual: Mapping[str, Array], rows: int) -> OutputComparison:
    """Compare two sets of outputs row by row.

    Floating-point outputs with two or more elements in the last dimension are scores: they agree where the largest score (top 1)
    is at the same place. Other floating-point outputs agree within 1 %. Integers, booleans and BYTES agree if they are equal.

    Args:
        expected: outputs of the stable version by name, of shape (rows, ...) unless `rows` is 1.
        actual: outputs of the shadow.
        rows: rows of the request; 1 for a model without a batch dimension.
    """
    agree, difference = np.ones(rows, np.bool_), 0.0
    for name, first in expected.items():
        second = actual.get(name)
        if second is None or first.shape != second.shape or first.dtype != second.dtype or first.size % rows:
            return OutputComparison(rows, 0, math.inf)
        if first.size:
            agree &= _agreeing(first, second).reshape(rows, -1).all(axis=1)
            difference = max(difference, _difference(first, second))
    return OutputComparison(rows, int(agree.sum()), difference)


def _agreeing(first: Array, second: Array) -> npt.NDArray[np.bool_]:
    """Return where the parts of two outputs agree; the result keeps the first dimension."""
    if first.dtype.kind in "iubO":
        return np.asarray(first == second)
    left, right = first.astype(np.float64), second.astype(np.float64)
    if left.ndim and left.shape[-1] > 1:
        return np.asarray(left.argmax(axis=-1) == right.argmax(axis=-1))
    return np.isclose(left, right, _RELATIVE, _ABSOLUTE, equal_nan=True)


def _difference(first: Array, second: Array) -> float:
    if first.dtype.kind == "O":
        return 0.0
    left, right = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differences = np.abs(left - right)
    differences[(left == right) | (np.isnan(left) & np.isnan(right))] = 0.0
    return float(np.where(np.isnan(differences), math.inf, differences).max())
