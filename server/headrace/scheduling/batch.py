"""Rows together, rows apart: the inputs of a batch in one array each, and every caller's rows of the outputs."""

from __future__ import annotations

import numpy as np

from headrace.core.resident import is_resident
from headrace.core.tensor import Array
from headrace.scheduling.output_check import OutputCheck
from headrace.scheduling.queue import Entry

# Staging buffers for this many different row shapes are kept; a model with wilder inputs allocates.
_MAX_BUFFERS = 16


class Staging:
    """Buffers in which an instance assembles its batches, allocated once and reused for ever.

    Ownership: one instance, one batch at a time. An array that `stack` returns is valid until the next call.

    Args:
        max_rows: rows in the largest batch.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: dict[tuple[str, tuple[int, ...]], Array] = {}

    def stack(self, entries: list[Entry]) -> dict[str, Array]:
        """Inputs of all entries, one below the other.

        A single entry's arrays are handed on without a copy if they are aligned (those cut out of a request's body behind a
        header of any length may not be, and kernels may rely on it). Rows that are resident elsewhere are copied.
        """
        first = entries[0].inputs
        if len(entries) == 1:
            return {name: _aligned(array) for name, array in first.items()}
        rows = sum(entry.rows for entry in entries)
        stacked: dict[str, Array] = {}
        for name, array in first.items():
            parts = [entry.inputs[name] for entry in entries]
            buffer = self._buffer(name, array, rows)
            stacked[name] = np.concatenate(parts) if buffer is None else np.concatenate(parts, out=buffer)
        return stacked

    def _buffer(self, name: str, like: Array, rows: int) -> Array | None:
        if like.dtype.hasobject or rows > self._max_rows:
            return None
        key = (name, like.shape[1:])
        buffer = self._buffers.get(key)
        if buffer is None:
            if len(self._buffers) >= _MAX_BUFFERS:
                return None
            buffer = self._buffers[key] = np.empty((self._max_rows, *like.shape[1:]), like.dtype)
        return buffer[:rows]


def _aligned(array: Array) -> Array:
    if is_resident(array):
        return np.asarray(array)
    return array if array.flags.aligned and array.flags.c_contiguous else array.copy()


def split(outputs: dict[str, Array], entries: list[Entry], check: OutputCheck) -> list[dict[str, Array]]:
    """Cut the outputs of a batch into every entry's rows, as views.

    Args:
        outputs: by name, as the execution returned them.
        entries: the members of the batch, in the order of their rows.
        check: of the model; a batch of one entry is checked, too.

    Raises:
        OutputMismatch: an output does not have one row per row of the input, or differs from its declaration.
    """
    if len(entries) == 1:
        check.check(outputs, entries[0].rows)
        return [outputs]
    check.check(outputs, sum([entry.rows for entry in entries]))
    results: list[dict[str, Array]] = []
    start = 0
    # An output that the configuration leaves out may have no batch dimension.
    named = [(name, outputs[name]) for name in check.names]
    for entry in entries:
        stop = start + entry.rows
        results.append({name: array[start:stop] for name, array in named})
        start = stop
    return results


def cut(inputs: dict[str, Array], rows: int, max_rows: int) -> list[dict[str, Array]]:
    """The parts of an oversized request as views: full batches, and a rest that others may join."""
    return [
        {name: array[start : start + max_rows] for name, array in inputs.items()} for start in range(0, rows, max_rows)
    ]


def join(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """The outputs of the parts of one request, one below the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
