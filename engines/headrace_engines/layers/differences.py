"""Difference of a tensor between an engine and the FP32 model, over several batches.

    cosine      cosine similarity of a sample's values, mean over samples
    max abs     largest absolute difference of a value
    mean abs    mean absolute difference of the values
    relative    root of the error's energy over the energy of the FP32 values; 0.01 is one percent

Values that are NaN or infinite in FP32 are left out. Values that are so only in the engine give cosine 0 and infinite errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace_engines.accuracy import cosines, rows_of_output
from headrace_engines.onnx_graph import Array


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Difference of one tensor; see the module for the figures.

    Attributes:
        cosine: -1..1.
        max_abs: in the unit of the tensor.
        mean_abs: in the unit of the tensor.
        relative: 0 for equal tensors.
    """

    cosine: float
    max_abs: float
    mean_abs: float
    relative: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; infinite figures become None."""
        figures = {name: getattr(self, name) for name in ("cosine", "max_abs", "mean_abs", "relative")}
        return {name: value if math.isfinite(value) else None for name, value in figures.items()}


class DifferenceSums:
    """Running sums of one tensor over batches.

    Attributes:
        batches: number of added batches.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._cosines = self._error = self._signal = self._absolute = 0.0
        self._samples = self._values = 0
        self._max_abs = 0.0
        self._is_broken = False

    def add(self, expected: Array, actual: Array, count: int) -> None:
        """Add a batch.

        Args:
            expected: values of the FP32 model, of any shape.
            actual: values of the engine, of the same shape.
            count: samples of the batch.

        Raises:
            ValueError: the shapes differ.
        """
        if expected.shape != actual.shape:
            raise ValueError(f"{list(actual.shape)} is compared with {list(expected.shape)}")
        self.batches += 1
        finite = np.isfinite(expected)
        self._is_broken |= bool((~np.isfinite(actual) & finite).any())
        rows = rows_of_output(np.where(finite, expected, 0).astype(np.float64), count)
        rows = rows.reshape(len(rows), -1)
        others = np.where(finite & np.isfinite(actual), actual, 0).astype(np.float64).reshape(rows.shape)
        error = np.abs(rows - others)
        self._cosines += float(cosines(rows, others).sum())
        self._samples += len(rows)
        self._values += int(np.count_nonzero(finite))
        self._absolute += float(error.sum())
        self._error += float(np.square(error).sum())
        self._signal += float(np.square(rows).sum())
        self._max_abs = max(self._max_abs, float(error.max(initial=0.0)))

    def result(self) -> TensorDifference:
        """Return the difference over all batches, of which there must be at least one."""
        assert self.batches
        if self._is_broken:
            return TensorDifference(0.0, math.inf, math.inf, math.inf)
        relative = math.sqrt(self._error / self._signal) if self._signal else math.inf if self._error else 0.0
        cosine = self._cosines / max(self._samples, 1)
        return TensorDifference(cosine, self._max_abs, self._absolute / max(self._values, 1), relative)
