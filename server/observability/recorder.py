"""What one model version has done, counted where it happens and added up when somebody asks.

The data plane pays for a lock and a few additions a batch. Latencies are kept as raw nanoseconds and sorted into histogram
buckets by NumPy, many at a time: when a few thousand have gathered, or when Prometheus scrapes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from server.core.clock import NS_PER_MS, NS_PER_S
from server.core.request import BatchTimes

# Seconds. The same for every model and phase, so that histograms add up over replicas.
BUCKETS_S: tuple[float, ...] = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_BOUNDS_NS = np.array([bound * NS_PER_S for bound in BUCKETS_S], dtype=np.int64)
_FOLD_AT = 2048  # few enough that nobody notices the pause

PHASES = ("queue", "assembly", "compute", "total")


class Histogram:
    """Latencies in buckets; `observe` is cheap, `fold` does the work.

    Not thread-safe: the recorder's lock guards it.
    """

    __slots__ = ("_pending_ns", "_pending_weights", "counts", "sum_ns")

    def __init__(self) -> None:
        self._pending_ns: list[int] = []
        self._pending_weights: list[int] = []
        self.counts: npt.NDArray[np.int64] = np.zeros(len(BUCKETS_S) + 1, dtype=np.int64)
        self.sum_ns = 0

    def observe(self, value_ns: int, weight: int) -> None:
        """`weight` requests took `value_ns` each."""
        self._pending_ns.append(value_ns)
        self._pending_weights.append(weight)

    def observe_each(self, values_ns: list[int]) -> None:
        """One request each."""
        self._pending_ns.extend(values_ns)
        self._pending_weights.extend([1] * len(values_ns))

    @property
    def pending(self) -> int:
        """Observations that are not folded yet."""
        return len(self._pending_ns)

    def fold(self) -> None:
        """Sort what was observed into the buckets (upper bounds included, as Prometheus counts)."""
        if not self._pending_ns:
            return
        values = np.array(self._pending_ns, dtype=np.int64)
        weights = np.array(self._pending_weights, dtype=np.int64)
        places = np.searchsorted(_BOUNDS_NS, values, side="left")
        self.counts += np.bincount(places, weights=weights, minlength=len(self.counts)).astype(np.int64)
        self.sum_ns += int((values * weights).sum())
        self._pending_ns.clear()
        self._pending_weights.clear()

    def add(self, other: Histogram) -> None:
        """Take in what another one has folded."""
        self.counts += other.counts
        self.sum_ns += other.sum_ns


@dataclass(slots=True)
class SizeTotals:
    """Executions of one batch size.

    Attributes:
        count: executions.
        assembly_ns, compute_ns, split_ns: their time, summed.
    """

    count: int = 0
    assembly_ns: int = 0
    compute_ns: int = 0
    split_ns: int = 0


@dataclass(slots=True)
class Totals:
    """Everything counted since the version was loaded.

    Attributes:
        requests: answered with success.
        request_ns: their time from arrival to settled answer, summed.
        failures: requests that got an error, by reason.
        failure_ns: their time, summed.
        rows: rows of the successful requests.
        executions: batches run, whatever became of them.
        queue_ns, assembly_ns, compute_ns, split_ns: per successful request, summed (a batch's time counts for each member).
        last_ms: wall clock of the last batch, milliseconds since 1970, 0 if there was none.
        sizes: per batch size in rows.
        reasons: batches by the reason why they were closed.
        phases: histograms by phase.
    """

    requests: int = 0
    request_ns: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    failure_ns: int = 0
    rows: int = 0
    executions: int = 0
    queue_ns: int = 0
    assembly_ns: int = 0
    compute_ns: int = 0
    split_ns: int = 0
    last_ms: int = 0
    sizes: dict[int, SizeTotals] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    phases: dict[str, Histogram] = field(default_factory=lambda: {phase: Histogram() for phase in PHASES})


class Recorder:
    """Counts for one model version; any thread may call any method.

    Args:
        histograms: keep latency histograms; the exact totals are kept in any case.
    """

    def __init__(self, histograms: bool = True) -> None:
        self._lock = threading.Lock()
        self._histograms = histograms
        self._totals = Totals()
        self._phases = tuple(self._totals.phases.values())  # in the order of PHASES

    def batch(
        self,
        rows: int,
        batch_rows: int,
        reason: str,
        times: BatchTimes,
        queue_ns: list[int],
        total_ns: list[int],
    ) -> None:
        """A batch was run and answered.

        Args:
            rows: rows of the requests that were answered.
            batch_rows: rows in the batch, those of callers who left included.
            reason: why it was closed.
            times: its stations.
            queue_ns: per successful request, how long it waited.
            total_ns: per successful request, from arrival to answer.
        """
        members = len(queue_ns)
        assembly_ns = times.assembled_ns - times.taken_ns
        compute_ns = times.computed_ns - times.assembled_ns
        split_ns = times.split_ns - times.computed_ns
        with self._lock:
            totals = self._totals
            totals.requests += members
            totals.rows += rows
            totals.executions += 1
            totals.queue_ns += sum(queue_ns)
            totals.request_ns += sum(total_ns)
            totals.assembly_ns += assembly_ns * members
            totals.compute_ns += compute_ns * members
            totals.split_ns += split_ns * members
            totals.last_ms = time.time_ns() // NS_PER_MS
            totals.reasons[reason] += 1
            size = totals.sizes.get(batch_rows)
            if size is None:
                size = totals.sizes[batch_rows] = SizeTotals()
            size.count += 1
            size.assembly_ns += assembly_ns
            size.compute_ns += compute_ns
            size.split_ns += split_ns
            if self._histograms:
                queue, assembly, compute, total = self._phases
                queue.observe_each(queue_ns)
                total.observe_each(total_ns)
                assembly.observe(assembly_ns, members)
                compute.observe(compute_ns, members)
                if queue.pending >= _FOLD_AT or compute.pending >= _FOLD_AT:
                    for histogram in self._phases:
                        histogram.fold()

    def failed_batch(self, reason: str) -> None:
        """A batch was run and raised."""
        with self._lock:
            self._totals.executions += 1
            self._totals.reasons[reason] += 1

    def failure(self, reason: str, time_ns: int) -> None:
        """A request got an error `time_ns` after it had arrived."""
        with self._lock:
            self._totals.failures[reason] += 1
            self._totals.failure_ns += time_ns

    def totals(self) -> Totals:
        """A consistent copy of everything counted so far."""
        with self._lock:
            live = self._totals
            copy = Totals(
                requests=live.requests,
                request_ns=live.request_ns,
                failures=Counter(live.failures),
                failure_ns=live.failure_ns,
                rows=live.rows,
                executions=live.executions,
                queue_ns=live.queue_ns,
                assembly_ns=live.assembly_ns,
                compute_ns=live.compute_ns,
                split_ns=live.split_ns,
                last_ms=live.last_ms,
                sizes={
                    rows: SizeTotals(size.count, size.assembly_ns, size.compute_ns, size.split_ns)
                    for rows, size in live.sizes.items()
                },
                reasons=Counter(live.reasons),
            )
            for phase, histogram in live.phases.items():
                histogram.fold()
                copy.phases[phase].add(histogram)
        return copy
