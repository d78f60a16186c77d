"""Measures one model at a time, and as far as possible while no other model is being loaded.

Models are loaded side by side. Batch times that are measured beside other loads are too long, so measurements take turns: each
waits for the loads that work, and loads that begin meanwhile wait for it. Both waits are short, since a load may hang. Times of
a measurement beside another load are used, and not stored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns

# A measurement waits for the loads that have worked for less than this time: others may hang.
_RECENT_S = 1.0
# Longest wait of a load for measurements, and of a measurement for those before it.
_PAUSE_S, _TURN_S = 2.0, 10.0


class Measurement:
    """One measurement.

    Attributes:
        is_quiet: no load has worked meanwhile; known at its end.
    """

    def __init__(self) -> None:
        self.is_quiet = False


class MeasuringTurns:
    """Turns of measurements, and the loads that work meanwhile. Thread-safe: `_changed` guards all attributes.

    Args:
        clock: monotonic nanoseconds.
    """

    def __init__(self, clock: Clock = monotonic_ns) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._working: dict[object, int] = {}  # loads that work, with the time at which each began
        self._work = 0  # number of loads that have begun to work
        self._waiting = 0  # measurements that wait or run
        self._is_busy = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a load as working within the block."""
        load = object()
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, _PAUSE_S)
            self._working[load] = self._clock()
            self._work += 1
        try:
            yield
        finally:
            with self._changed:
                del self._working[load]
                self._changed.notify_all()

    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        """Wait for the turn of a measurement, which the block runs."""
        measurement = Measurement()
        with self._changed:
            self._waiting += 1
            has_turn = self._changed.wait_for(lambda: not self._is_busy, _TURN_S)
            self._is_busy = True
            self._changed.wait_for(lambda: not self._is_recent(), _RECENT_S)
            is_quiet, work = has_turn and not self._working, self._work
        try:
            yield measurement
        finally:
            with self._changed:
                measurement.is_quiet = is_quiet and work == self._work
                self._waiting -= 1
                self._is_busy = False
                self._changed.notify_all()

    def _is_recent(self) -> bool:
        """Return True while a load works that is not known to take long; with the lock held."""
        begun_ns = self._clock() - int(_RECENT_S * NS_PER_S)
        return any(since_ns > begun_ns for since_ns in self._working.values())
