"""Assembles the inputs of a batch: the buffers in which rows are stacked, and the contract of batches of different shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from headrace.core.scattered_rows import ScatteredRows, in_pieces, is_scattered
from headrace.core.tensor import Array, ipc_memory, is_resident
from headrace.inference.scheduling.queue import Entry
from headrace.runtimes.base import Execution, HasBatchMemory

# Number of row shapes with a staging buffer; further shapes allocate for each batch.
_MAX_BUFFERS = 16


class Staging:
    """Reusable buffers in which an instance assembles its batches.

    Ownership: one instance, one batch at a time. An array that `stack` returns is valid until the next call.

    Args:
        max_rows: rows of the largest batch.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: dict[tuple[str, tuple[int, ...]], Array] = {}

    def stack(self, entries: list[Entry], rows: int) -> dict[str, Array]:
        """Return the inputs of all entries, `rows` in all, concatenated along the batch dimension.

        The arrays of a single entry are not copied if they are aligned. Views of a request's body may be unaligned, since the
        header before them has any length, and kernels may rely on alignment. Resident and scattered rows are copied.
        """
        first = entries[0].inputs
        if len(entries) == 1:
            inputs: dict[str, Array] = {}
            for name, array in first.items():
                if type(array) is not np.ndarray:
                    if is_scattered(array):
                        array = self.join(name, array.pieces(), rows)
                    elif is_resident(array):
                        array = np.asarray(array)
                inputs[name] = array if array.flags.num & _READY == _READY else array.copy()
            return inputs
        stacked: dict[str, Array] = {}
        for name, array in first.items():
            parts = [entry.inputs[name] for entry in entries]
            if ScatteredRows in set(map(type, parts)):
                parts = in_pieces(parts)
            buffer = self._buffer(name, array, rows)
            stacked[name] = np.concatenate(parts) if buffer is None else np.concatenate(parts, out=buffer)
        return stacked

    def stack_into(
        self, memory: HasBatchMemory, entries: list[Entry], rows: int, separate: Collection[str] = ()
    ) -> dict[str, Array]:
        """Return the inputs of all entries as `stack` does, copied into memory of the execution where it provides some.

        Args:
            memory: the execution.
            entries: requests of the batch.
            rows: rows of all entries.
            separate: names of inputs to leave out.
        """
        first = entries[0].inputs
        if separate:
            first = {name: array for name, array in first.items() if name not in separate}
        arrays = memory.batch_arrays(first, rows)
        stacked: dict[str, Array] = {}
        for name, array in first.items():
            target = arrays.get(name)
            if len(entries) == 1:
                if target is not None:
                    np.copyto(target, array)
                stacked[name] = array if target is None else target
            else:
                parts = [entry.inputs[name] for entry in entries]
                stacked[name] = np.concatenate(parts) if target is None else np.concatenate(parts, out=target)
        return stacked

    def join(self, name: str, parts: list[Array], rows: int) -> Array:
        """Return the rows of an input of several requests, concatenated in a buffer.

        Args:
            name: name of the input.
            parts: of shape (rows of a request, ...), with equal row shapes.
            rows: rows of all parts.
        """
        buffer = self._buffer(name, parts[0], rows)
        return np.concatenate(parts) if buffer is None else np.concatenate(parts, out=buffer)

    def pad(self, name: str, parts: list[Array], rows: int, padding: tuple[int, int, float]) -> Array:
        """Return the rows of an input of several requests, padded to one length in a buffer.

        Args:
            name: name of the input.
            parts: of shape (rows of a request, ...); the sizes of the padded axis may differ.
            rows: rows of all parts.
            padding: the axis, its size, and the value of the added elements.
        """
        axis, length, value = padding
        like = parts[0]
        shape = (*like.shape[:axis], length, *like.shape[axis + 1 :])
        padded = self._buffer(name, np.broadcast_to(like.dtype.type(0), shape), rows)
        if padded is None:
            padded = np.empty((rows, *shape[1:]), like.dtype)
        pad_rows(padded, parts, axis, value)
        return padded

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


def inputs_on_gpus(entries: list[Entry]) -> tuple[str, ...]:
    """Return the names of the inputs that lie in the memory of a GPU, for other processes, in any of the entries."""
    names = entries[0].inputs
    return tuple(name for name in names if any(ipc_memory(entry.inputs[name]) is not None for entry in entries))


def aligned(array: Array) -> Array:
    """Return an input of a lone request: itself if it is an aligned host array, else a copy.

    Views of a request's body may be unaligned, since the header before them has any length, and kernels may rely on alignment.
    """
    if type(array) is not np.ndarray and is_resident(array):
        array = np.asarray(array)
    return array if array.flags.num & _READY == _READY else array.copy()


def pad_rows(buffer: Array, parts: list[Array], axis: int, value: float) -> None:
    """Copy rows into a buffer, and fill the rest of the padded axis.

    Args:
        buffer: of shape (rows of all parts, ...).
        parts: of shape (rows of a request, ...), at most as long as the buffer in the padded axis.
        axis: the padded axis.
        value: value of the added elements.
    """
    before: tuple[slice, ...] = (slice(None),) * (axis - 1)
    start = 0
    for part in parts:
        stop, size = start + part.shape[0], part.shape[axis]
        buffer[(slice(start, stop), *before, slice(size))] = part
        buffer[(slice(start, stop), *before, slice(size, None))] = value
        start = stop


class Arrangement(Protocol):
    """Inputs of one batch of requests of different shapes, and the way back from its outputs to the requests."""

    def stack(self, staging: Staging) -> dict[str, Array]:
        """Return the inputs of the batch for the execution."""

    def split(
        self, outputs: dict[str, Array], check: Callable[[Mapping[str, Array], int], None]
    ) -> list[dict[str, Array]]:
        """Return the outputs of each request.

        Args:
            outputs: arrays by name, as the execution returned them.
            check: checks the shapes of all outputs for a number of rows.

        Raises:
            OutputMismatch: an output does not have the size that follows from the inputs.
        """

    def record(self, outputs: Mapping[str, Array], compute_ns: int, overhead_ns: int) -> None:
        """Record a run: the shapes of its outputs, its compute time, and the time of assembly and split."""


class Division(NamedTuple):
    """Groups of the entries of a batch; each group runs as one batch.

    Attributes:
        groups: in the order in which they run.
        apart_ns: estimated time of each shape alone, one after the other; 0 if the time of the groups is not recorded.
        is_searched: True if the groups are the cheapest of several divisions.
        check: checks on an execution, after the groups have run, that the requests may share a batch; None if no check is due.
    """

    groups: list[list[Entry]]
    apart_ns: float = 0.0
    is_searched: bool = False
    check: Callable[[Execution], None] | None = None


class BatchLayout(Protocol):
    """Assembles batches of requests of different shapes; any thread may call."""

    def queue_key(self, shape_key: object) -> object:
        """Return the key by which the queue groups a request, for `InferRequest.shape_key`."""

    def is_plain(self, entries: list[Entry], now_ns: int) -> bool:
        """Return True if the entries of a batch have equal shapes and need no arrangement."""

    def divide(self, entries: list[Entry]) -> Division:
        """Divide the entries of a batch into those that run together."""

    def record_division(self, division: Division, elapsed_ns: int, cpu_ns: int) -> None:
        """Record elapsed and processor time from the first to the last group of a batch, in nanoseconds."""

    def arrange(self, requests: Sequence[Mapping[str, Array]]) -> Arrangement:
        """Return the arrangement of the requests of one batch, by their inputs."""


_READY = 0x101  # NumPy's flags ALIGNED and C_CONTIGUOUS, to read an array's flags once instead of twice
