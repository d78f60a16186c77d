"""Inputs that follow from the requests of a ragged batch: their shapes and values, and the batches that fit an engine.

The rules are those of the field `batch_input` in Triton's published message `ModelConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.core.tensor import Array

Shape = tuple[int, ...]
ShapeRanges = Mapping[str, tuple[Shape, Shape]]
"""Smallest and largest shape of each input of a model."""


class SourceSizes(NamedTuple):
    """Sizes of one input of clients over the requests of a batch.

    Attributes:
        requests: number of requests.
        rows: rows of all requests.
        elements: elements of all requests.
        largest: most elements of one request.
        item: shape of a row of the last request.
    """

    requests: int = 0
    rows: int = 0
    elements: int = 0
    largest: int = 0
    item: Shape = ()

    def plus(self, shape: Shape) -> SourceSizes:
        """Return the sizes with another request, whose input has this shape."""
        count = math.prod(shape)
        largest = max(self.largest, count)
        return SourceSizes(self.requests + 1, self.rows + shape[0], self.elements + count, largest, shape[1:])

    def computed_shape(self, kind: str) -> Shape:
        """Return the shape of an input that is computed by a rule.

        Args:
            kind: Triton's name of the rule.
        """
        match kind:
            case "BATCH_ELEMENT_COUNT" | "BATCH_ACCUMULATED_ELEMENT_COUNT":
                return (self.requests,)
            case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
                return (self.requests + 1,)
            case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
                return (self.largest,)
            case "BATCH_ITEM_SHAPE":
                return (self.rows, len(self.item))
            case "BATCH_ITEM_SHAPE_FLATTEN":
                return (self.rows * len(self.item),)
        raise AssertionError(f"unknown kind of batch_input: {kind}")


def computed_values(kind: str, shapes: Sequence[Shape], dtype: np.dtype[Any]) -> Array:
    """Return the values of an input that is computed from the requests of a batch.

    Args:
        kind: Triton's name of the rule.
        shapes: shape of the source input in each request, of shape (rows, ...).
        dtype: dtype of the values.
    """
    counts = [math.prod(shape) for shape in shapes]
    match kind:
        case "BATCH_ELEMENT_COUNT":
            values = np.array(counts, dtype)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT":
            values = np.cumsum(counts).astype(dtype)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            values = np.cumsum([0, *counts]).astype(dtype)
        case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
            values = np.zeros(max(counts), dtype)  # only the shape counts
        case "BATCH_ITEM_SHAPE" | "BATCH_ITEM_SHAPE_FLATTEN":
            values = np.array([shape[1:] for shape in shapes for _ in range(shape[0])], dtype)
            if kind == "BATCH_ITEM_SHAPE_FLATTEN":
                values = values.reshape(-1)
        case _:
            raise AssertionError(f"unknown kind of batch_input: {kind}")
    return values


def fits_ranges(shapes: Mapping[str, Shape], ranges: Iterable[ShapeRanges]) -> bool:
    """Return True if shapes lie in one of several ranges.

    Args:
        shapes: by input.
        ranges: one for each optimisation profile; inputs that a range does not name are not compared.
    """
    return any(
        all(name not in shapes or _within(shapes[name], *limits) for name, limits in profile.items())
        for profile in ranges
    )


def _within(shape: Shape, smallest: Shape, largest: Shape) -> bool:
    return len(shape) == len(largest) and all(
        low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
    )
