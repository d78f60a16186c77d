"""Loads of one client process: closed loop and open loop, and the record of every request.

A latency of an open loop counts from the time at which the request was due, not from the time at which it was sent: a server that
stalls delays all requests that were due meanwhile (Gil Tene, "How NOT to Measure Latency": coordinated omission).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace_bench.pool import OK, Pool, now_s

Floats = npt.NDArray[np.float64]

# A spinning timer sleeps until so long before the due time: timers of event loops have a resolution of 1 ms.
_SPIN_S = 0.002
_STOP_S = 1.0


class Record:
    """Outcome of every request of a run.

    Attributes:
        due_s: due times on the monotonic clock.
        sent_s: sending times.
        done_s: times of the outcome.
        codes: index of each outcome in `statuses`.
        statuses: names of the outcomes; `OK` ("") is the first.
        errors: number of outcomes other than `OK`.
        examples: first error text of each status.
    """

    def __init__(self) -> None:
        self.due_s, self.sent_s, self.done_s = array("d"), array("d"), array("d")
        self.codes = array("H")
        self.statuses = [OK]
        self.examples: dict[str, str] = {}
        self.errors = 0
        self._numbers = {OK: 0}

    def __len__(self) -> int:
        return len(self.codes)

    def add(self, due_s: float, sent_s: float, done_s: float, status: str, text: str) -> None:
        """Add an outcome."""
        self.due_s.append(due_s)
        self.sent_s.append(sent_s)
        self.done_s.append(done_s)
        if not status:
            self.codes.append(0)
            return
        self.errors += 1
        number = self._numbers.get(status)
        if number is None:
            number = self._numbers[status] = len(self.statuses)
            self.statuses.append(status)
            self.examples[status] = text
        self.codes.append(number)


class Load(ABC):
    """Sends the prepared requests in turn and records their outcomes.

    Args:
        requests: number of prepared requests.
        first: number of the request that is sent first.

    Attributes:
        record: of all requests.
        in_flight: submitted requests without an outcome.
        end_s: end of sending; `stop` brings it forward.
    """

    def __init__(self, requests: int, first: int, end_s: float) -> None:
        self._requests = requests
        self._turn = first % requests
        self._done = asyncio.Event()
        self.pool: Pool
        self.record = Record()
        self.in_flight = 0
        self.end_s = end_s

    def submit(self, due_s: float) -> None:
        """Submit the next request."""
        index = self._turn
        self._turn = index + 1 if index + 1 < self._requests else 0
        self.in_flight += 1
        self.pool.submit(index, due_s)

    def finished(self, index: int, due_s: float, sent_s: float, status: str, text: str) -> None:
        """Record an outcome; see `headrace_bench.pool.Finished`."""
        self.in_flight -= 1
        self.record.add(due_s, sent_s, now_s(), status, text)
        if not self.in_flight and self.is_over():
            self._done.set()

    def is_over(self) -> bool:
        """Return True when no further request will be submitted."""
        return now_s() >= self.end_s

    def stop(self) -> None:
        """Submit no more requests, and wait no longer than a second for answers."""
        self.end_s = min(self.end_s, now_s())
        asyncio.get_running_loop().call_later(_STOP_S if self.in_flight else 0.0, self._done.set)

    @abstractmethod
    async def run(self) -> None:
        """Submit requests until `end_s`, and wait for their outcomes."""

    async def _drain(self) -> None:
        """Wait for the requests in flight; those without an answer end with the status `TIMEOUT` by the pool."""
        if self.in_flight:
            await self._done.wait()


class ClosedLoop(Load):
    """A number of callers, each of which sends its next request when its last one is answered.

    Args:
        requests, first, end_s: see `Load`.
        concurrency: number of callers.
    """

    def __init__(self, requests: int, first: int, end_s: float, concurrency: int) -> None:
        super().__init__(requests, first, end_s)
        self._concurrency = concurrency

    def finished(self, index: int, due_s: float, sent_s: float, status: str, text: str) -> None:
        """Record an outcome, and send the caller's next request."""
        at_s = now_s()
        self.record.add(due_s, sent_s, at_s, status, text)
        if at_s < self.end_s:
            index = self._turn
            self._turn = index + 1 if index + 1 < self._requests else 0
            self.pool.submit(index, at_s)
            return
        self.in_flight -= 1
        if not self.in_flight:
            self._done.set()

    async def run(self) -> None:
        """Submit requests until `end_s`, and wait for their outcomes."""
        for _ in range(self._concurrency):
            self.submit(now_s())
        await self._drain()


class OpenLoop(Load):
    """Requests at given times, whether or not earlier ones are answered.

    Args:
        requests, first: see `Load`.
        due_s: due times on the monotonic clock in seconds, float64[n], ascending.
    """

    def __init__(self, requests: int, first: int, due_s: Floats) -> None:
        super().__init__(requests, first, float(due_s[-1]) if len(due_s) else now_s())
        self._due: list[float] = due_s.tolist()
        self._next = 0
        self._all_submitted = asyncio.Event()
        self._timer: DueTimer | None = None

    def is_over(self) -> bool:
        """Return True when no further request will be submitted."""
        return self._next >= len(self._due)

    def stop(self) -> None:
        """Submit no more requests, and wait no longer than a second for answers."""
        del self._due[self._next :]
        self._all_submitted.set()
        super().stop()

    async def run(self) -> None:
        """Submit requests until `end_s`, and wait for their outcomes."""
        self._timer = open_timer(self._submit_due)
        try:
            self._submit_due()
            await self._all_submitted.wait()
        finally:
            self._timer.close()
        await self._drain()

    def _submit_due(self) -> None:
        due, timer = self._due, self._timer
        while self._next < len(due):
            due_s = due[self._next]
            if due_s > now_s():
                if timer is not None:
                    timer.set(due_s)
                return
            self._next += 1
            self.submit(due_s)
        self._all_submitted.set()


class DueTimer:
    """Calls a function at times of the monotonic clock. It spins for the last 2 ms, so that it is exact.

    Args:
        callback: the function.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None
        self._due_s = 0.0

    def set(self, due_s: float) -> None:
        """Set the next time, in seconds."""
        self._due_s = due_s
        left_s = due_s - now_s()
        if left_s > _SPIN_S:
            self._handle = self._loop.call_later(left_s - _SPIN_S, self._spin)
        else:
            self._handle = self._loop.call_soon(self._spin)

    def close(self) -> None:
        """Cancel the timer."""
        if self._handle is not None:
            self._handle.cancel()

    def _spin(self) -> None:
        if now_s() >= self._due_s:
            self._callback()
        else:
            self._handle = self._loop.call_soon(self._spin)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class KernelTimer(DueTimer):
    """A `DueTimer` on a timerfd of Linux: exact to about 50 us without spinning.

    Raises:
        OSError: the system has no timerfd.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        super().__init__(callback)
        self._library = ctypes.CDLL(None, use_errno=True)
        clock_monotonic, is_absolute = 1, 1
        self._flags = is_absolute
        self._descriptor = self._library.timerfd_create(clock_monotonic, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = _TimerSpec()
        self._loop.add_reader(self._descriptor, self._fire)

    def set(self, due_s: float) -> None:
        """Set the next time, in seconds."""
        seconds = int(due_s)
        self._spec.value.seconds, self._spec.value.nanoseconds = seconds, max(1, int((due_s - seconds) * 1e9))
        self._library.timerfd_settime(self._descriptor, self._flags, ctypes.byref(self._spec), None)

    def close(self) -> None:
        """Cancel the timer."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _fire(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return
        self._callback()


def open_timer(callback: Callable[[], None]) -> DueTimer:
    """Return the most exact timer of this system."""
    if sys.platform == "linux":
        try:
            return KernelTimer(callback)
        except (OSError, AttributeError):
            pass
    return DueTimer(callback)


def poisson_times(rate_hz: float, seconds: float, random: np.random.Generator) -> Floats:
    """Draw arrivals of a Poisson process from 0 to `seconds`, float64[n], ascending."""
    count = random.poisson(rate_hz * seconds)
    return np.sort(random.uniform(0.0, seconds, count))


def constant_times(rate_hz: float, seconds: float) -> Floats:
    """Return arrivals at equal distances from 0 to `seconds`, float64[n]."""
    return np.arange(max(1, round(rate_hz * seconds))) / rate_hz
