"""Execution that runs proven numbers of rows only: batches are cut, and padded with their last row."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from headrace.core.errors import ModelFailed
from headrace.core.tensor import Array
from headrace.inference.scheduling.batch_proof import BatchVerdict
from headrace.runtimes.base import Execution
from headrace.runtimes.wrapped_execution import WrappedExecution


class ProvenSizes(WrappedExecution):
    """Runs one batch at a time; see `headrace.runtimes.base.Execution`. Only models with a batch dimension.

    Args:
        inner: the wrapped execution.
        verdict: returns which batches may run; more of them may be proven while the execution is open. A batch of another size
            is cut and padded, or refused if requests run alone.
        by_row: True if each row is a request, as with sequences: a batch of requests that run alone is cut.

    Attributes:
        inner: as in the argument.
    """

    def __init__(self, inner: Execution, verdict: Callable[[], BatchVerdict], by_row: bool = False) -> None:
        super().__init__(inner)
        self.depth, self.prompt, self.any_thread = 1, False, False
        self._verdict, self._by_row = verdict, by_row

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return all outputs; see `headrace.runtimes.base.Execution.run`.

        Raises:
            ModelFailed: the batch would have to be cut, and must not be.
        """
        rows, verdict = next(iter(inputs.values())).shape[0], self._verdict()
        if rows in verdict.allowed or not verdict.allowed:
            return self.inner.run(inputs)
        if verdict.alone and not self._by_row:
            raise ModelFailed(
                f"the request has {rows} rows, of which no batch is proven: send one row. {verdict.reason}"
            )
        parts = [self._run_part(inputs, start, used, size) for start, used, size in _parts(rows, verdict.allowed)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _run_part(self, inputs: dict[str, Array], start: int, used: int, size: int) -> dict[str, Array]:
        part = {name: values[start : start + used] for name, values in inputs.items()}
        if used < size:
            part = {name: np.concatenate([rows, rows[-1:].repeat(size - used, axis=0)]) for name, rows in part.items()}
        return {name: values[:used] for name, values in self.inner.run(part).items()}


def size_at(place: int, rows: int, allowed: Sequence[int]) -> int:
    """Return the number of rows with which the row at a place of a batch has run.

    Args:
        place: index of the row.
        rows: rows of the batch.
        allowed: numbers of rows that may run; () for all.
    """
    if not allowed or rows in allowed:
        return rows
    return next(size for start, used, size in _parts(rows, allowed) if place < start + used)


def _parts(rows: int, allowed: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield first row, rows and proven size of each part."""
    start = 0
    while start < rows:
        left = rows - start
        index = bisect_left(allowed, left)
        size = allowed[index] if index < len(allowed) else allowed[-1]
        used = min(left, size)
        yield start, used, size
        start += used
