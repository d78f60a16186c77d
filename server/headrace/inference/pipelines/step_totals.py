"""Counts and times of the steps of a pipeline: of the last seconds for `headrace explain`, and since the pipeline was loaded."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.core.clock import NS_PER_S
from headrace.core.request import PipelineStepTimes
from headrace.observability.totals import StepTotal

# The figures are of the last 5 to 10 seconds.
_PERIOD_NS = 5 * NS_PER_S
# Pending durations of a step. Sorting so many of them takes about 20 us.
_FOLD_AT = 256
# Outcomes of a step that has a result; see `PipelineStepTimes`.
_ANSWERED = frozenset({"ok", "cached", "fallback"})


@dataclass(slots=True)
class StepFigures:
    """Requests of one step.

    Attributes:
        count: requests that the step answered.
        total_ns: their time from the step's queue to its result, summed.
        compute_ns: compute time of their batches, summed.
    """

    count: int = 0
    total_ns: int = 0
    compute_ns: int = 0


class StepTotals:
    """Figures of the steps of one pipeline by name of the step. Thread-safe: `_lock` guards every attribute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures: dict[str, StepFigures] = {}
        self._earlier: dict[str, StepFigures] = {}
        self._since_ns = 0
        self._totals: dict[str, StepTotal] = {}
        self._pending_ns: dict[str, list[int]] = {}  # durations that are not in the histograms yet

    def record(self, steps: Sequence[PipelineStepTimes], now_ns: int, is_failed: bool = False) -> int:
        """Count the steps of one request.

        Args:
            steps: the steps that have ended.
            now_ns: monotonic.
            is_failed: True if the request got an error, or its caller gave up.

        Returns:
            The compute time in nanoseconds that a failed request has wasted: its share of the batches of its steps.
        """
        wasted_ns = 0
        with self._lock:
            self._turn(now_ns)
            for name, _, _, queued_ns, done_ns, times, batch_rows, outcome, rows in steps:
                total = self._totals.get(name)
                if total is None:
                    total, self._pending_ns[name] = self._totals.setdefault(name, StepTotal()), []
                if outcome == "skipped":
                    total.skipped += 1
                    continue
                if outcome not in _ANSWERED:
                    total.failures += 1
                    continue
                total.requests += 1
                total.fallbacks += outcome == "fallback"
                total.cached += outcome == "cached"
                pending_ns = self._pending_ns[name]
                pending_ns.append(done_ns - queued_ns)
                if len(pending_ns) >= _FOLD_AT:
                    self._fold(name)
                step = self._figures.get(name)
                if step is None:
                    step = self._figures[name] = StepFigures()
                step.count += 1
                step.total_ns += done_ns - queued_ns
                if times is not None:  # a pipeline as a step, and a response from the cache, have no batch
                    compute_ns = times.computed_ns - times.assembled_ns
                    step.compute_ns += compute_ns
                    if is_failed:
                        share_ns = compute_ns * rows // max(batch_rows, 1)
                        total.wasted_ns += share_ns
                        wasted_ns += share_ns
        return wasted_ns

    def recent(self, now_ns: int) -> dict[str, StepFigures]:
        """Return the figures of the last seconds."""
        with self._lock:
            self._turn(now_ns)
            result = {name: replace(step) for name, step in self._earlier.items()}
            for name, step in self._figures.items():
                total = result.setdefault(name, StepFigures())
                total.count += step.count
                total.total_ns += step.total_ns
                total.compute_ns += step.compute_ns
            return result

    def totals(self) -> dict[str, StepTotal]:
        """Return copies of the totals of every step that a request has reached."""
        result: dict[str, StepTotal] = {}
        for name in tuple(self._totals):
            # One lock for each step: the event loop waits for the copy of one histogram, not of all.
            with self._lock:
                self._fold(name)
                result[name] = self._totals[name].copy()
        return result

    def _fold(self, name: str) -> None:
        """Add the pending durations of a step to its histogram."""
        pending_ns = self._pending_ns[name]
        if pending_ns:
            self._totals[name].latency.observe(pending_ns)
            pending_ns.clear()

    def _turn(self, now_ns: int) -> None:
        """Begin a new period."""
        passed_ns = now_ns - self._since_ns
        if passed_ns >= _PERIOD_NS:
            self._earlier = self._figures if passed_ns < 2 * _PERIOD_NS else {}
            self._figures, self._since_ns = {}, now_ns


def slowest_step(recent: Mapping[str, StepFigures]) -> str:
    """Return the name of the step with the longest mean time, which limits the pipeline; "" without requests.

    Args:
        recent: figures of the last seconds.
    """
    counted = {name: step.total_ns / step.count for name, step in recent.items() if step.count}
    return max(counted, key=lambda name: counted[name], default="")
