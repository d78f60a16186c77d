"""Number of front ends: as many as the load needs, and none while the engine process alone serves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.core.clock import NS_PER_S

LOOK_S = 0.1
"""Interval of the looks at the load."""

# Share of a core that an event loop uses, from which on it is full; and the looks in a row that see it so.
_FULL, _FULL_LOOKS = 0.7, 2
# Fewer connections than `_CROWD` in the middle of a request are served as fast by one process; so few as `_FEW` are so faster.
_CROWD, _FEW = 4, 2
# All event loops together use less than this, or few connections are busy, for so long: one process serves the load.
_QUIET, _QUIET_S = 0.4, 10.0


def loop_time_ns(pid: int) -> int:
    """Return the processor time of the event loop of a process, which is its main thread; 0 once it has ended."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


class Scaling:
    """Decides the number of front ends by the processor time of the event loops.

    Args:
        most: front ends that may run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: dict[int, int] = {}  # processor time at the last look, by process id
        self._last_ns = 0
        self._full_looks = self._last_busy = 0
        self._quiet_from_ns = 0

    def wanted(self, engine: int, front_ends: Sequence[int], busy: int, now_ns: int) -> int:
        """Return the number of front ends that should run now.

        Args:
            engine: process id of the engine process; 0 if there is none.
            front_ends: process ids of the front ends that run.
            busy: connections in the middle of a request.
            now_ns: monotonic time.
        """
        times = {pid: loop_time_ns(pid) for pid in (engine, *front_ends) if pid}
        passed_ns, last = now_ns - self._last_ns, self._last
        self._last, self._last_ns = times, now_ns
        running = len(front_ends)
        if times.keys() != last.keys() or passed_ns <= 0:
            return running
        shares = {pid: (time - last[pid]) / passed_ns for pid, time in times.items()}
        return self.decide(shares.get(engine, 0.0), [shares[pid] for pid in front_ends], busy, now_ns)

    def decide(self, engine: float, front_ends: Sequence[float], busy: int, now_ns: int) -> int:
        """Return the number of front ends that should run, from the shares of a core that the event loops use."""
        running = len(front_ends)
        busy, self._last_busy = max(busy, self._last_busy), busy  # one look may fall between two batches
        is_full = sum(front_ends) >= _FULL * running
        if not running:
            is_full = engine >= _FULL and busy >= _CROWD
        self._full_looks = self._full_looks + 1 if is_full else 0
        if self._full_looks >= _FULL_LOOKS:
            self._full_looks = 0
            return min(self._most, 2 * max(1, running))
        if not running or (engine + sum(front_ends) >= _QUIET and busy > _FEW):
            self._quiet_from_ns = now_ns
        return 0 if now_ns - self._quiet_from_ns >= _QUIET_S * NS_PER_S else running
