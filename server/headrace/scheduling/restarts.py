"""Instances that died come back: each after a pause of its own, which grows while they keep dying, and by a timer."""

from __future__ import annotations

import threading
from collections.abc import Callable

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Restarts:
    """The timers of the instances that are to be started anew.

    Ownership: `_lock` guards everything, and nothing is called under it.

    Args:
        restart: called on a timer's thread with the instance's number, and must not raise.
    """

    def __init__(self, restart: Callable[[int], None]) -> None:
        self._restart = restart
        self._lock = threading.Lock()
        self._pauses_s: dict[int, float] = {}
        self._timers: dict[int, threading.Timer] = {}
        self._stopped = False

    def later(self, name: str, index: int, lived_s: float) -> float | None:
        """Start a timer for an instance that has died; each pause is twice the one before, up to `LONGEST_PAUSE_S`.

        Args:
            name: of the instance, for its timer's thread.
            index: its number.
            lived_s: how long it served; longer than the longest pause, and the pauses begin anew.

        Returns:
            The pause in seconds; None once `stop` was called.
        """
        with self._lock:
            if self._stopped:
                return None
            before_s = 0.0 if lived_s > LONGEST_PAUSE_S else self._pauses_s.get(index, 0.0)
            pause_s = self._pauses_s[index] = min(2 * before_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            timer = self._timers[index] = threading.Timer(pause_s, self._restart, (index,))
            timer.name = f"restart of {name}"
            timer.daemon = True
            timer.start()
            return pause_s

    def stop(self) -> None:
        """Start no instance any more; one that is being started now is the owner's to see to."""
        with self._lock:
            self._stopped = True
            timers = list(self._timers.values())
            self._timers.clear()
        for timer in timers:
            timer.cancel()
