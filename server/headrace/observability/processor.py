"""Processor time of the machine and of the server in the last seconds."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import process_time_ns
from typing import NamedTuple

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.observability.totals import SECONDS

_FULL = 0.9  # share of busy cores from which threads wait for one


class ProcessorUse(NamedTuple):
    """Busy cores, as medians over the last seconds.

    Attributes:
        cores: that the server may use; a quota need not be a whole number.
        busy: of these cores, by any process.
        own: cores that the server's own processes kept busy.
    """

    cores: float
    busy: float
    own: float

    @property
    def is_full(self) -> bool:
        """True if nearly no processor time is left."""
        return max(self.busy, self.own) >= _FULL * self.cores


def read_ticks(proc: Path = Path("/proc"), only: frozenset[int] | None = None) -> tuple[int, int] | None:
    """Return busy ticks and all ticks of the processors since boot; None without /proc.

    Args:
        proc: folder to read in place of /proc.
        only: numbers of the cores to count; None for all.
    """
    busy = total = 0
    names = {"cpu"} if only is None else {f"cpu{number}" for number in only}
    try:
        with Path(proc, "stat").open(encoding="ascii") as file:
            for line in file:
                name, *numbers = line.split()
                if name in names:
                    # user, nice, system, idle, iowait, irq, softirq, steal; guests are counted as user already.
                    ticks = [int(number) for number in numbers[:8]]
                    busy, total = busy + sum(ticks) - ticks[3] - ticks[4], total + sum(ticks)
                if not name.startswith("cpu") or only is None:
                    break
    except (OSError, ValueError, IndexError):
        return None
    return (busy, total) if total else None


class ProcessorMeter:
    """Reads the processor time of machine and server once a second, on a thread: the kernel sums it over all cores.

    Args:
        cores: that the server may use.
        own_ns: returns the processor time of the server in nanoseconds.
        proc: folder to read in place of /proc.
        clock: returns monotonic nanoseconds.
    """

    def __init__(
        self,
        cores: float,
        own_ns: Callable[[], int] = process_time_ns,
        proc: Path = Path("/proc"),
        clock: Clock = monotonic_ns,
    ) -> None:
        self._cores, self._own_ns, self._proc, self._clock = cores, own_ns, proc, clock
        allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
        self._only = allowed if 0 < len(allowed) < (os.cpu_count() or 1) else None
        self._samples: deque[tuple[int, int, int, int]] = deque(maxlen=SECONDS + 1)
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sample every second, until `stop`."""
        self._timer = loop.call_later(1.0, self._tick, loop)

    def stop(self) -> None:
        """End the sampling."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_in_executor(None, self.sample)
        self.start(loop)

    def sample(self) -> None:
        """Read the times once."""
        ticks = read_ticks(self._proc, self._only)
        if ticks is not None:
            self._samples.append((self._clock(), self._own_ns(), *ticks))

    def use(self, seconds: float = SECONDS) -> ProcessorUse | None:
        """Return the use of the last `seconds`; None before there are two samples, and where there is no /proc."""
        samples = [each for each in self._samples.copy() if each[0] >= self._clock() - (seconds + 1) * NS_PER_S]
        busy, own = [], []
        for before, after in pairwise(samples):
            elapsed_ns, own_ns, busy_ticks, ticks = (now - earlier for now, earlier in zip(after, before, strict=True))
            if elapsed_ns > 0 and ticks > 0:
                busy.append(self._cores * busy_ticks / ticks)
                own.append(own_ns / elapsed_ns)
        return ProcessorUse(self._cores, median(busy), median(own)) if busy else None
