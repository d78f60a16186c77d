"""An event loop in virtual time: it runs due callbacks in order and never waits."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.core.clock import NS_PER_S


class Timer:
    """Cancellable callback, in place of `asyncio.TimerHandle`."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Cancel the callback."""
        self._callback = None

    def fire(self) -> None:
        """Run the callback if it is not cancelled."""
        if self._callback is not None:
            self._callback()


class VirtualLoop:
    """Event loop and clock of a simulation, with the methods of asyncio's loop that the data plane uses.

    It never waits, and only one thread may call. Callbacks due at the same time run in the order of scheduling.

    Attributes:
        now_ns: virtual nanoseconds since the start of the simulation.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def clock(self) -> int:
        """Return `now_ns`; see `headrace.core.clock.Clock`."""
        return self.now_ns

    def time(self) -> float:
        """Return seconds since the start of the simulation."""
        return self.now_ns / NS_PER_S

    def at(self, time_ns: int, callback: Callable[[], object]) -> None:
        """Schedule a callback at a time that has not passed."""
        heapq.heappush(self._due, (time_ns, next(self._order), callback))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Schedule a callback after `delay` seconds."""
        timer = Timer(partial(callback, *args))
        self.at(self.now_ns + round(delay * NS_PER_S), timer.fire)
        return timer

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Schedule a callback before every other event."""
        self._ready.append((callback, args))

    call_soon_threadsafe = call_soon

    def advance(self, until_ns: int) -> None:
        """Run the callbacks due up to and including `until_ns`, and set the time to it."""
        due, ready = self._due, self._ready
        self.settle()
        while due and due[0][0] <= until_ns:
            self.now_ns, _, callback = heapq.heappop(due)
            callback()
            if ready:
                self.settle()
        self.now_ns = until_ns

    def finish(self) -> None:
        """Run callbacks, and those that they schedule, until none is left."""
        while self._ready or self._due:
            self.settle()
            if self._due:
                self.advance(self._due[0][0])

    def settle(self) -> None:
        """Run the callbacks of `call_soon`."""
        ready = self._ready
        while ready:
            callback, arguments = ready.popleft()
            callback(*arguments)
