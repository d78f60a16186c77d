"""Number of front ends: as many as the load needs, and none while the engine process alone serves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.core.clock import NS_PER_S
from headrace.server.front_ends.process_figures import process_usage

LOOK_S = 0.1
"""Interval of the looks at the load."""

# Shares of a core that the event loop of the engine process, and those of front ends on average, use when they are full; and the
# looks in a row that see it so. Front ends wait for each other's batches: eight of them serve most with half a core each.
_FULL, _FULL_FRONT_ENDS, _FULL_LOOKS = 0.7, 0.5, 2
# With GPUs the threads that launch and finish batches take turns with the event loop for the interpreter's lock, and compute
# nothing: from these shares of the loop and of all threads on, the interpreter is full, if so many connections are busy.
_SHARED, _ALL_THREADS, _MANY = 0.4, 1.0, 16
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
        has_gpus: models run on GPUs.
    """

    def __init__(self, most: int, has_gpus: bool = False) -> None:
        self._most, self._has_gpus = most, has_gpus
        self._last_all_ns = 0  # processor time of all threads of the engine process at the last look
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
        all_ns = process_usage(engine).cpu_ns if engine and self._has_gpus and not front_ends else 0
        passed_ns, last, last_all_ns = now_ns - self._last_ns, self._last, self._last_all_ns
        self._last, self._last_ns, self._last_all_ns = times, now_ns, all_ns
        running = len(front_ends)
        if times.keys() != last.keys() or passed_ns <= 0:
            return running
        shares = {pid: (time - last[pid]) / passed_ns for pid, time in times.items()}
        all_threads = (all_ns - last_all_ns) / passed_ns if all_ns and last_all_ns else 0.0
        return self.decide(shares.get(engine, 0.0), [shares[pid] for pid in front_ends], busy, now_ns, all_threads)

    def decide(
        self, engine: float, front_ends: Sequence[float], busy: int, now_ns: int, all_threads: float = 0.0
    ) -> int:
        """Return the number of front ends that should run, from the shares of a core that the event loops use.

        Args:
            engine: share of the engine process's event loop.
            front_ends: those of the front ends.
            busy: connections in the middle of a request.
            now_ns: monotonic time.
            all_threads: cores that the engine process uses, if its models run on GPUs.
        """
        running = len(front_ends)
        busy, self._last_busy = max(busy, self._last_busy), busy  # one look may fall between two batches
        is_full = sum(front_ends) >= _FULL_FRONT_ENDS * running
        if not running:
            is_shared = engine >= _SHARED and all_threads >= _ALL_THREADS and busy >= _MANY
            is_full = is_shared or (engine >= _FULL and busy >= _CROWD)
        self._full_looks = self._full_looks + 1 if is_full else 0
        if self._full_looks >= _FULL_LOOKS:
            self._full_looks = 0
            return min(self._most, 2 * max(1, running))
        if not running or (engine + sum(front_ends) >= _QUIET and busy > _FEW):
            self._quiet_from_ns = now_ns
        return 0 if now_ns - self._quiet_from_ns >= _QUIET_S * NS_PER_S else running
