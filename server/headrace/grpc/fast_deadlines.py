"""Ends calls on time, whatever their methods do."""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol
from weakref import ref

from headrace.core.clock import NS_PER_S, monotonic_ns


class Mortal(Protocol):
    """A call with a deadline.

    Attributes:
        deadline_ns: monotonic.
        gone: True once it has ended.
    """

    deadline_ns: int
    gone: bool

    def expire(self) -> None:
        """The deadline has passed; a no-op if the call is gone."""


class Deadlines:
    """Ends calls whose time is over: one heap and one timer for all of them. Ownership: the event loop.

    Calls that are gone are not kept: what a client has sent of one must not stay until a deadline that it chose.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[int, int, ref[Mortal]]] = []
        self._numbers = count()
        self._purge_at = 1024
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns = 0

    def add(self, call: Mortal) -> None:
        """Call `call.expire` at its deadline, unless it is gone by then."""
        heap = self._heap
        heappush(heap, (call.deadline_ns, next(self._numbers), ref(call)))
        if len(heap) >= self._purge_at:
            # Most calls end long before: without this, a second of calls would stay for as long as their deadlines.
            heap[:] = [entry for entry in heap if _lives(entry[2])]
            heapify(heap)
            self._purge_at = max(1024, 2 * len(heap))
        if not self._armed_ns or call.deadline_ns < self._armed_ns:
            self._arm(call.deadline_ns)

    def close(self) -> None:
        """No deadline is kept any more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, deadline_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_ns = deadline_ns
        self._timer = self._loop.call_later(max(0, deadline_ns - monotonic_ns()) / NS_PER_S, self._fire)

    def _fire(self) -> None:
        heap, now_ns = self._heap, monotonic_ns()
        while heap and (heap[0][0] <= now_ns or not _lives(heap[0][2])):
            call = heappop(heap)[2]()
            if call is not None:
                call.expire()
        self._timer, self._armed_ns = None, 0
        if heap:
            self._arm(heap[0][0])


def _lives(call: ref[Mortal]) -> bool:
    found = call()
    return found is not None and not found.gone
