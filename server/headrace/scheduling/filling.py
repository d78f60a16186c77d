"""Rows into a flight: copied, by several threads where they are many, or noted for the flight's GPU to fetch by itself.

One thread does not use the memory that a server has (measured: 6 GB/s of pictures into pinned memory on a machine of 16 cores,
where four threads copy 31 and eight no more), and a GPU takes 50.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np

from headrace.backends.base import Flight
from headrace.core.resident import PINNED, ResidentRows, is_resident
from headrace.core.tensor import Array
from headrace.scheduling.queue import Entry

logger = logging.getLogger("headrace.instance")

# A smaller share is copied by the time that another thread has woken up.
_SHARE_BYTES = 1 << 19

# Where to, and what, one below the other.
_Copy = tuple[Array, list[Array]]


class Filler:
    """Fills an instance's flights, large ones with helpers: daemon threads, which are started for the first of them.

    Ownership: the instance's thread makes every call. A helper has work only during `fill`, which waits for it; whatever it
    raises is raised there.

    Args:
        name: of the instance.
        threads: that copy at the same time at most, the instance's included.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self._helpers: list[_Helper] = []

    def fill(self, flight: Flight, entries: list[Entry]) -> None:
        """Copy the rows of all entries, one below the other, straight from where they lie into the flight.

        Rows that the flight's GPU reads by itself are not copied but noted in `flight.residents`. NumPy releases the
        interpreter's lock while it copies a part of some 500 elements or more, aligned or not; smaller ones are copied faster
        than the lock changes hands.

        Args:
            flight: of exactly as many rows as the entries have together.
            entries: all with the same inputs, of the same row shape.

        Raises:
            ValueError, TypeError: the flight's inputs are of another shape or dtype.
            KeyError: an entry lacks an input.
            HeadraceError: rows on a GPU that is not the flight's cannot be copied.
        """
        copies = _copies(flight, entries)
        shares = 1
        if self._threads > 1:
            shares = min(sum([buffer.nbytes for buffer, _ in copies]) // _SHARE_BYTES, self._threads)
        if shares > 1 and all(_fits(*copy) for copy in copies):
            self._fill_together(copies, shares)
        else:
            _run(copies)

    def close(self) -> None:
        """End the helpers."""
        for helper in self._helpers:
            helper.todo.put(None)
        self._helpers.clear()

    def _fill_together(self, copies: list[_Copy], shares: int) -> None:
        # A share has none of an input that is a few numbers.
        cut = zip(*(_shares(*copy, shares) for copy in copies), strict=True)
        work = [[copy for copy in share if copy[1]] for share in cut]
        helpers = self._hired(shares - 1)
        for helper, share in zip(helpers, work, strict=False):
            helper.todo.put(share)
        outcomes: list[BaseException | None] = []
        for share in work[len(helpers) :]:
            try:
                _run(share)
            except BaseException as error:  # raised below: nobody may leave while others write into the flight
                outcomes.append(error)
        outcomes += [helper.done.get() for helper in helpers]
        try:
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        finally:
            outcome = None  # an error and its frames in a circle would keep the arrays
            outcomes.clear()

    def _hired(self, number: int) -> list[_Helper]:
        """So many helpers, or as many as there can be."""
        while len(self._helpers) < number:
            try:
                self._helpers.append(_Helper(f"{self._name} filler {len(self._helpers)}"))
            except RuntimeError as error:
                logger.warning("%s copies with %d threads: %s", self._name, len(self._helpers) + 1, error)
                self._threads = len(self._helpers) + 1
                break
        return self._helpers[:number]


class _Helper:
    """A thread that copies what it finds in `todo`, and puts the error, or None, into `done`; None in `todo` ends it."""

    def __init__(self, name: str) -> None:
        self.todo: SimpleQueue[list[_Copy] | None] = SimpleQueue()
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (copies := self.todo.get()) is not None:
            failure: BaseException | None = None
            try:
                _run(copies)
            except BaseException as error:  # whoever waits for it must hear of it, whatever it is
                failure = error
            del copies  # the arrays may be large, and the next may be long in coming
            self.done.put(failure)
            del failure


def _run(copies: list[_Copy]) -> None:
    for buffer, parts in copies:
        np.concatenate(parts, out=buffer, casting="equiv")


def _copies(flight: Flight, entries: list[Entry]) -> list[_Copy]:
    """What is to be copied, once that is noted which is not."""
    takes_residents = flight.device is not None
    copies: list[_Copy] = []
    for name, buffer in flight.inputs.items():
        parts = [entry.inputs[name] for entry in entries]
        if takes_residents and ResidentRows in set(map(type, parts)):
            copies += _around(flight, name, buffer, parts)
        elif not buffer.ndim:  # a single number, of a model without a batch dimension
            copies.append((buffer.reshape(1), [part.reshape(1) for part in parts]))
        else:
            copies.append((buffer, parts))
    return copies


def _around(flight: Flight, name: str, buffer: Array, parts: list[Array]) -> list[_Copy]:
    """Note the parts that the flight's GPU reads by itself; the others between them are copied, neighbours together."""
    dtype, row_shape, places = buffer.dtype, buffer.shape[1:], (PINNED, flight.device)
    start = row = 0  # where the parts to be copied begin, and how far we are
    copied: list[Array] = []
    copies: list[_Copy] = []
    for part in parts:
        stop = row + part.shape[0]
        if is_resident(part) and part.device in places and part.dtype == dtype and part.shape[1:] == row_shape:
            flight.residents.append((name, row, part))
            if copied:
                copies.append((buffer[start:row], copied))
                copied = []
            start = stop
        else:
            copied.append(part)
        row = stop
    if row != buffer.shape[0]:
        raise ValueError(f"input '{name}' has {row} rows for a flight of {buffer.shape[0]}")
    if copied:
        copies.append((buffer[start:], copied))
    return copies


def _fits(buffer: Array, parts: list[Array]) -> bool:
    """True if the parts are just the buffer's rows; if they are not, NumPy finds the words."""
    row_shape = buffer.shape[1:]
    return all(part.shape[1:] == row_shape for part in parts) and sum(len(part) for part in parts) == len(buffer)


def _shares(buffer: Array, parts: list[Array], number: int) -> Iterator[_Copy]:
    """A copy cut into so many of about the same size: between rows, or within them where they are fewer."""
    if len(buffer) < number:
        buffer, parts = buffer.reshape(-1), [part.reshape(-1) for part in parts]
    total = len(buffer)
    rest = iter(parts)
    part, first, last = buffer[:0], 0, 0  # the part we are in, and the rows of the buffer that it fills
    for share in range(number):
        start, stop = total * share // number, total * (share + 1) // number
        taken: list[Array] = []
        row = start
        while row < stop:
            if row == last:
                part = next(rest)
                first, last = last, last + len(part)
            end = min(stop, last)
            taken.append(part if end - row == last - first else part[row - first : end - first])
            row = end
        yield buffer[start:stop], taken
