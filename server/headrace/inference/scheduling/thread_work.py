"""Processor time of batches on the threads of their instances, by rows: the basis on which batch sizes are compared.

The duration of a batch includes the time for which other threads had its core: the event loop, other models, other processes. On
a full core that is a fifth of it and more, differs between sizes by chance, and sizes differ by a few percent. Processor time
counts from one batch to the next, so it includes everything that the thread does for a batch.

It is the cost of a batch only if the thread computes. Backends that use a GPU or another process use little of it.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from headrace.core.clock import NS_PER_US

WAKE_UP_NS = 100 * NS_PER_US
"""Added for each batch: its end wakes the event loop, which interrupts the next batch and replaces the contents of its caches."""

_WINDOW = 15
_MIN_TIMES = 5
# Smallest share of the duration of a batch that its thread computes; below, durations are compared.
_MIN_SHARE = 0.3


class ThreadWork:
    """Recent processor times by rows.

    Ownership: the instances of one version write, any thread reads. Without a lock: a deque is changed in single steps of the
    interpreter, and a time that is lost while another thread reads does no harm.
    """

    __slots__ = ("_times_ns",)

    def __init__(self) -> None:
        self._times_ns: dict[int, deque[int]] = {}

    def observe(self, rows: int, time_ns: int) -> None:
        """Record the processor time of a batch."""
        times_ns = self._times_ns.get(rows)
        if times_ns is None:
            times_ns = self._times_ns[rows] = deque(maxlen=_WINDOW)
        times_ns.append(time_ns)

    def costs_ns(self, estimates_ns: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the cost of a batch by rows, None if durations must be compared.

        Args:
            estimates_ns: int64, usual duration by rows, from 0 rows to the largest batch.

        Returns:
            Nanoseconds by rows, int64, as long as `estimates_ns`. Sizes without enough times have their duration, scaled by the
            median share of the sizes that have.
        """
        measured: dict[int, int] = {}
        for rows, times_ns in list(self._times_ns.items()):
            recent = sorted(times_ns.copy())
            if len(recent) >= _MIN_TIMES and rows < len(estimates_ns):
                measured[rows] = recent[len(recent) // 2]
        if not measured:
            return None
        shares = sorted(time_ns / max(int(estimates_ns[rows]), 1) for rows, time_ns in measured.items())
        share = shares[len(shares) // 2]
        if share < _MIN_SHARE:
            return None
        costs_ns = (estimates_ns * share).astype(np.int64)
        for rows, time_ns in measured.items():
            costs_ns[rows] = time_ns or costs_ns[rows]
        return costs_ns + WAKE_UP_NS
