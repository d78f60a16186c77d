"""Copies the rows of a batch into its memory, or records rows that the GPU fetches by itself.

Large batches are copied by several threads, since one thread does not use the memory bandwidth of a server. Measured on 16
cores, images into pinned memory: 6 GB/s with one thread, 31 GB/s with four, no more with eight. A GPU reads 50 GB/s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from headrace.core.scattered_rows import ScatteredRows, in_pieces, is_scattered
from headrace.core.tensor import NOWHERE, Array, ResidentRows, is_resident
from headrace.inference.scheduling.queue import Entry
from headrace.runtimes.overlapped import InFlightBatch

logger = logging.getLogger("headrace.instance")

# Waking another thread takes longer than copying less than this.
_SHARE_BYTES = 1 << 19

# Destination, and the arrays that are concatenated into it.
_Copy = tuple[Array, list[Array]]


@dataclass(eq=False, repr=False)
class Filler:
    """Fills the input buffers of an instance's batches; large ones with helper threads, which the first large batch starts.

    Ownership: the instance's thread makes every call. A helper has work only during `fill`, which waits for it and raises its
    errors.

    Attributes:
        name: name of the instance.
        threads: most threads that copy at the same time, including the instance's.
    """

    name: str
    threads: int = 1

    def __post_init__(self) -> None:
        self._helpers: list[_Helper] = []

    def fill(self, in_flight: InFlightBatch, entries: list[Entry]) -> None:
        """Copy the rows of all entries, in their order, from the request bodies into the batch's input buffers.

        Rows that the batch's GPU reads by itself, also those on another GPU, are recorded in `in_flight.resident_inputs` instead
        of copied. NumPy releases the interpreter's lock while it copies a part of some 500 elements or more, aligned or not.
        Smaller parts are copied faster than the lock changes threads.

        Args:
            in_flight: a batch with buffers of shape (sum of the entries' rows, ...).
            entries: entries with the same inputs, of the same row shape.

        Raises:
            ValueError, TypeError: an input of an entry has another shape or dtype than its buffer.
            KeyError: an entry lacks an input.
            HeadraceError: rows that are copied cannot be read.
        """
        copies = _copies(in_flight, entries)
        shares = 1
        if self.threads > 1:
            shares = min(sum([buffer.nbytes for buffer, _ in copies]) // _SHARE_BYTES, self.threads)
        if shares > 1 and all(_parts_fit(*copy) for copy in copies):
            self._fill_parallel(copies, shares)
        else:
            _copy_all(copies)

    def close(self) -> None:
        """End the helper threads."""
        for helper in self._helpers:
            helper.tasks.put(None)
        self._helpers.clear()

    def _fill_parallel(self, copies: list[_Copy], shares: int) -> None:
        # An input of a few elements has no part in some shares.
        cut = zip(*(_shares(*copy, shares) for copy in copies), strict=True)
        work = [[copy for copy in share if copy[1]] for share in cut]
        helpers = self._start_helpers(shares - 1)
        for helper, share in zip(helpers, work, strict=False):
            helper.tasks.put(share)
        outcomes: list[BaseException | None] = []
        for share in work[len(helpers) :]:
            try:
                _copy_all(share)
            except BaseException as error:  # raised below, once no helper writes into the buffers
                outcomes.append(error)
        outcomes += [helper.done.get() for helper in helpers]
        try:
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        finally:
            outcome = None  # breaks the reference cycle of error and frame, which would keep the arrays alive
            outcomes.clear()

    def _start_helpers(self, number: int) -> list[_Helper]:
        """Return `number` helpers, or fewer if the system starts no more threads."""
        while len(self._helpers) < number:
            try:
                self._helpers.append(_Helper(f"{self.name} filler {len(self._helpers)}"))
            except RuntimeError as error:
                logger.warning(
                    "%s: a copy thread could not be started (%s), continuing with %d of %d: raise the limit of threads",
                    self.name, error, len(self._helpers) + 1, self.threads,
                )  # fmt: skip
                self.threads = len(self._helpers) + 1
                break
        return self._helpers[:number]


class _Helper:
    """Thread that runs the copies in `tasks` and puts the error, or None, into `done`; None in `tasks` ends it."""

    def __init__(self, name: str) -> None:
        self.tasks: SimpleQueue[list[_Copy] | None] = SimpleQueue()
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (copies := self.tasks.get()) is not None:
            failure: BaseException | None = None
            try:
                _copy_all(copies)
            except BaseException as error:  # raised again by the thread that waits
                failure = error
            del copies  # the arrays may be large, and the next batch may come late
            self.done.put(failure)
            del failure


def _copy_all(copies: list[_Copy]) -> None:
    for buffer, parts in copies:
        np.concatenate(parts, out=buffer, casting="equiv")


def _copies(in_flight: InFlightBatch, entries: list[Entry]) -> list[_Copy]:
    """Return the copies of a batch, and record the rows that its GPU reads by itself."""
    accepts_residents = in_flight.device is not None
    copies: list[_Copy] = []
    for name, buffer in in_flight.inputs.items():
        parts = [entry.inputs[name] for entry in entries]
        kinds = set(map(type, parts))
        if accepts_residents and (ResidentRows in kinds or ScatteredRows in kinds):
            copies += _copies_around_residents(in_flight, name, buffer, parts)
        elif not buffer.ndim:  # a single number, of a model without a batch dimension
            copies.append((buffer.reshape(1), [part.reshape(1) for part in parts]))
        elif ScatteredRows in kinds:
            copies.append((buffer, in_pieces(parts)))
        else:
            copies.append((buffer, parts))
    return copies


def _copies_around_residents(in_flight: InFlightBatch, name: str, buffer: Array, parts: list[Array]) -> list[_Copy]:
    """Record the parts that the batch's GPU reads by itself, and return one copy for each run of other parts."""
    dtype, row_shape = buffer.dtype, buffer.shape[1:]
    start = row = 0  # first row of the present run, next row
    copied: list[Array] = []
    copies: list[_Copy] = []
    pieces: list[Array] = []  # those in several places that no kernel reads as a whole are apart
    for part in parts:
        pieces += part.pieces() if is_scattered(part) and part.device == NOWHERE else (part,)
    for part in pieces:
        stop = row + part.shape[0]
        if (
            (is_resident(part) or is_scattered(part))
            and part.device != NOWHERE
            and part.dtype == dtype
            and part.shape[1:] == row_shape
        ):
            in_flight.resident_inputs.append((name, row, part))
            if copied:
                copies.append((buffer[start:row], copied))
                copied = []
            start = stop
        else:
            copied += part.pieces() if is_scattered(part) else [part]
        row = stop
    if row != buffer.shape[0]:
        raise ValueError(f"input '{name}' has {row} rows for a batch of {buffer.shape[0]}")
    if copied:
        copies.append((buffer[start:], copied))
    return copies


def _parts_fit(buffer: Array, parts: list[Array]) -> bool:
    """Return True if the parts fill the buffer exactly; otherwise NumPy raises the error."""
    row_shape = buffer.shape[1:]
    return all(part.shape[1:] == row_shape for part in parts) and sum(len(part) for part in parts) == len(buffer)


def _shares(buffer: Array, parts: list[Array], number: int) -> Iterator[_Copy]:
    """Cut a copy into `number` copies of about the same size: between rows, or within them if there are fewer rows."""
    if len(buffer) < number:
        buffer, parts = buffer.reshape(-1), [part.reshape(-1) for part in parts]
    total = len(buffer)
    rest = iter(parts)
    part, first, last = buffer[:0], 0, 0  # the present part, and the rows of the buffer that it fills
    for share in range(number):
        start, stop = total * share // number, total * (share + 1) // number
        parts_of_share: list[Array] = []
        row = start
        while row < stop:
            if row == last:
                part = next(rest)
                first, last = last, last + len(part)
            end = min(stop, last)
            parts_of_share.append(part if end - row == last - first else part[row - first : end - first])
            row = end
        yield buffer[start:stop], parts_of_share
