"""When a pipelined instance should pull its next batch while others are under way: as late as the device allows.

A batch that is pulled the moment a flight is free is small: it takes whoever asked first, and the rest waits for the next. Pulled
just before the device runs out of work, it has everybody who has asked by then, and nothing is lost. How long flights take is
learned per number of rows. An estimate that is too long costs no more than the overlap (a landing ends the wait), one that is too
short no more than a smaller batch. A batch that can get no larger is never held.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

from headrace.core.clock import NS_PER_US

# From pulling to the first row on the device, besides filling: a thread that wakes, a launch, the head of the copy.
_LEAD_NS = 150 * NS_PER_US
_SMOOTHING = 4  # a new measurement counts for one in so many


class Pace:
    """Belongs to the instance's thread.

    Args:
        full_rows: rows that make a batch worth launching at once.
    """

    def __init__(self, full_rows: int) -> None:
        self._full_rows = full_rows
        self._open: deque[tuple[int, int]] = deque()  # (launched, rows) of the flights under way, oldest first
        self._done_ns = 0
        self._service_ns: dict[
            int, int
        ] = {}  # by rows: smoothed time on the device, without waiting for the flight before
        self._known: list[int] = []  # its keys, ascending
        self._fill_ns = 0.0  # smoothed, a row

    def launched(self, rows: int, taken_ns: int, launched_ns: int) -> None:
        """A flight has begun.

        Args:
            rows: in its batch.
            taken_ns, launched_ns: monotonic, when it was pulled, and when it was filled.
        """
        self._open.append((launched_ns, rows))
        fill_ns = (launched_ns - taken_ns) / rows
        self._fill_ns += (fill_ns - self._fill_ns) / _SMOOTHING if self._fill_ns else fill_ns

    def landed(self, done_ns: int) -> None:
        """The oldest flight is over: at `done_ns`, or 0 if it failed and nothing can be learned from it."""
        launched_ns, rows = self._open.popleft()
        if not done_ns:
            return
        service_ns = done_ns - max(launched_ns, self._done_ns)
        self._done_ns = done_ns
        known_ns = self._service_ns.get(rows)
        if known_ns is None:
            insort(self._known, rows)
            self._service_ns[rows] = service_ns
        else:
            self._service_ns[rows] = known_ns + (service_ns - known_ns) // _SMOOTHING

    @property
    def free_ns(self) -> int:
        """When the device will have done what is open: monotonic, in the past if nothing is."""
        done_ns = self._done_ns
        for launched_ns, rows in self._open:
            done_ns = max(launched_ns, done_ns) + self._estimate_ns(rows)
        return done_ns

    def pull_ns(self, waiting_rows: int) -> int:
        """When to pull: monotonic, in the past if at once.

        Args:
            waiting_rows: rows in the queue.
        """
        if not self._open or waiting_rows >= self._full_rows:
            return 0
        return self.free_ns - _LEAD_NS - int(self._fill_ns * waiting_rows)

    def _estimate_ns(self, rows: int) -> int:
        """That of the next smaller batch known, if need be: rather too short than too long."""
        place = bisect_right(self._known, rows)
        return self._service_ns[self._known[place - 1]] if place else 0
