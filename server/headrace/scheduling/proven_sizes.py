"""Execution that runs proven numbers of rows only: batches are cut, and padded with their last row."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from headrace.backends.base import Execution
from headrace.core.errors import ModelFailed
from headrace.core.tensor import Array


class ProvenSizes:
    """Runs one batch at a time; see `headrace.backends.base.Execution`. Only models with a batch dimension.

    Args:
        inner: the wrapped execution.
        allowed: numbers of rows that run, ascending; includes 1.
        refusal: reason why a batch of another size is refused; "" to cut and pad it.
    """

    def __init__(self, inner: Execution, allowed: Sequence[int], refusal: str = "") -> None:
        self._inner, self._allowed, self._refusal = inner, tuple(allowed), refusal

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return all outputs; see `headrace.backends.base.Execution.run`.

        Raises:
            ModelFailed: the batch would have to be cut, and must not be.
        """
        rows = next(iter(inputs.values())).shape[0]
        if rows in self._allowed:
            return self._inner.run(inputs)
        if self._refusal:
            raise ModelFailed(
                f"the request has {rows} rows, of which no batch is proven: send one row. {self._refusal}"
            )
        parts = [self._run_part(inputs, start, used, size) for start, used, size in self._parts(rows)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def close(self) -> None:
        """Close the wrapped execution."""
        self._inner.close()

    def _parts(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield first row, rows and proven size of each part."""
        start = 0
        while start < rows:
            left = rows - start
            index = bisect_left(self._allowed, left)
            size = self._allowed[index] if index < len(self._allowed) else self._allowed[-1]
            used = min(left, size)
            yield start, used, size
            start += used

    def _run_part(self, inputs: dict[str, Array], start: int, used: int, size: int) -> dict[str, Array]:
        part = {name: values[start : start + used] for name, values in inputs.items()}
        if used < size:
            part = {name: np.concatenate([rows, rows[-1:].repeat(size - used, axis=0)]) for name, rows in part.items()}
        return {name: values[:used] for name, values in self._inner.run(part).items()}
