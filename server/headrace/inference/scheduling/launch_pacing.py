"""Delays the next pull of an instance that overlaps batches while the device has work.

A batch that is pulled as soon as a slot is free is small, and requests that arrive a moment later wait for the next one. A
batch that is pulled just before the device runs out of work holds all requests that have arrived by then, at no loss. Service
times are learned by number of rows. An estimate that is too long costs at most the overlap, because a finished batch ends the
wait. One that is too short costs at most a smaller batch. A batch that cannot grow is never delayed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

from headrace.core.clock import NS_PER_US

# Time from pull to the first row on the device, without filling: thread wake-up, launch, start of the copy.
_LEAD_NS = 150 * NS_PER_US
_SMOOTHING = 4  # a new measurement has a weight of 1/4


class LaunchPacing:
    """Predicts when the device runs out of work, to delay the next pull until then. Belongs to the instance's thread.

    Args:
        full_rows: queued rows from which a batch is launched at once.
    """

    def __init__(self, full_rows: int) -> None:
        self._full_rows = full_rows
        self._open: deque[tuple[int, int]] = deque()  # (launch time, rows) of the batches in flight, oldest first
        self._done_ns = 0
        self._service_ns: dict[int, int] = {}  # by rows: smoothed device time, without the wait for the batch before
        self._measured_rows: list[int] = []  # its keys, ascending
        self._fill_ns = 0.0  # smoothed fill time of a row

    def launched(self, rows: int, taken_ns: int, launched_ns: int) -> None:
        """Record the launch of a batch.

        Args:
            rows: rows of the batch.
            taken_ns: monotonic time of the pull.
            launched_ns: monotonic time at which it was filled.
        """
        self._open.append((launched_ns, rows))
        fill_ns = (launched_ns - taken_ns) / rows
        self._fill_ns += (fill_ns - self._fill_ns) / _SMOOTHING if self._fill_ns else fill_ns

    def completed(self, done_ns: int) -> None:
        """Record the end of the oldest batch in flight at `done_ns` (monotonic), or 0 if it failed."""
        launched_ns, rows = self._open.popleft()
        if not done_ns:
            return
        service_ns = done_ns - max(launched_ns, self._done_ns)
        self._done_ns = done_ns
        smoothed_ns = self._service_ns.get(rows)
        if smoothed_ns is None:
            insort(self._measured_rows, rows)
            self._service_ns[rows] = service_ns
        else:
            self._service_ns[rows] = smoothed_ns + (service_ns - smoothed_ns) // _SMOOTHING

    @property
    def free_ns(self) -> int:
        """Monotonic time at which the device finishes its batches; in the past if it is idle."""
        done_ns = self._done_ns
        for launched_ns, rows in self._open:
            done_ns = max(launched_ns, done_ns) + self._estimate_ns(rows)
        return done_ns

    def pull_ns(self, waiting_rows: int) -> int:
        """Return the monotonic time of the next pull; in the past to pull at once.

        Args:
            waiting_rows: queued rows.
        """
        if not self._open or waiting_rows >= self._full_rows:
            return 0
        return self.free_ns - _LEAD_NS - int(self._fill_ns * waiting_rows)

    def _estimate_ns(self, rows: int) -> int:
        """Return the device time of the largest measured batch of at most `rows`: an underestimate if `rows` is unmeasured."""
        index = bisect_right(self._measured_rows, rows)
        return self._service_ns[self._measured_rows[index - 1]] if index else 0
