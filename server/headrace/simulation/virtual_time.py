"""Virtual time, and an event loop that lives in it: what is due is called in order, and nothing is waited for."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.core.clock import NS_PER_S


class Timer:
    """Stands for `asyncio.TimerHandle`."""

    __slots__ = ("_arguments", "_callback")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._callback: Callable[..., object] | None = callback
        self._arguments = arguments

    def cancel(self) -> None:
        """Call it off."""
        self._callback = None
        self._arguments = ()

    def fire(self) -> None:
        """Its time has come."""
        if self._callback is not None:
            self._callback(*self._arguments)


class VirtualLoop:
    """The event loop of a simulation: as much of asyncio's as the data plane uses, and the clock.

    Nothing waits, and no other thread calls. What is due at the same time is called in the order in which it was asked for.

    Attributes:
        now_ns: virtual nanoseconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def clock(self) -> int:
        """`headrace.core.clock.Clock`."""
        return self.now_ns

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self.now_ns / NS_PER_S

    def at(self, time_ns: int, callback: Callable[[], object]) -> None:
        """Call back at a time that has not passed."""
        heapq.heappush(self._due, (time_ns, next(self._order), callback))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Call back after so many seconds."""
        timer = Timer(callback, args)
        self.at(self.now_ns + round(delay * NS_PER_S), timer.fire)
        return timer

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call back before anything else happens."""
        self._ready.append((callback, args))

    call_soon_threadsafe = call_soon

    def advance(self, until_ns: int) -> None:
        """Call all that is due up to and including `until_ns`, which is the time from then on."""
        due, ready = self._due, self._ready
        self.settle()
        while due and due[0][0] <= until_ns:
            self.now_ns, _, callback = heapq.heappop(due)
            callback()
            if ready:
                self.settle()
        self.now_ns = until_ns

    def finish(self) -> None:
        """Call all that is due, and what that leads to, until there is nothing more."""
        while self._ready or self._due:
            self.settle()
            if self._due:
                self.advance(self._due[0][0])

    def settle(self) -> None:
        """Call what `call_soon` has been given."""
        ready = self._ready
        while ready:
            callback, arguments = ready.popleft()
            callback(*arguments)
