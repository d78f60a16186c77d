"""Readiness checks of a Python model (`is_ready`), which the process of an instance runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from headrace.core.clock import NS_PER_MS, Clock
from headrace.core.request import Probe

# An answer serves all callers for this time.
_FRESH_NS = 100 * NS_PER_MS


class ReadinessProbes:
    """Checks of one process, one at a time; all callers share the answer. Thread-safe: `_lock` guards all attributes.

    Args:
        send: sends the number of a check to the process; raises OSError if it is gone. The socket is never full, because the
            process has at most one open check.
        clock: returns monotonic nanoseconds.
    """

    def __init__(self, send: Callable[[int], None], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._lock = threading.Lock()
        self._number = 0
        self._probe: Probe | None = None
        self._answered_ns = 0

    def start(self) -> Probe:
        """Return the probe that is running, the last one if it is fresh, or a new one; never blocks."""
        with self._lock:
            now_ns, probe = self._clock(), self._probe
            if probe is not None and (not probe.answer.done() or now_ns - self._answered_ns < _FRESH_NS):
                return probe
            self._number += 1
            self._probe = probe = Probe(Future(), now_ns)
            try:
                self._send(self._number)
            except OSError:
                self._settle(probe, False)
            return probe

    def answered(self, number: object, is_ready: bool) -> None:
        """Record the answer of the process."""
        with self._lock:
            probe = self._probe
            if probe is not None and number == self._number:
                self._settle(probe, is_ready)

    def close(self) -> None:
        """Answer a running probe with no: the process is gone."""
        with self._lock:
            if self._probe is not None:
                self._settle(self._probe, False)

    def _settle(self, probe: Probe, is_ready: bool) -> None:
        if not probe.answer.done():
            self._answered_ns = self._clock()
            probe.answer.set_result(is_ready)
