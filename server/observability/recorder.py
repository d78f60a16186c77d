"""What one model version has done, counted where it happens and added up when somebody asks.

The data plane pays for a lock and a few additions a batch. Latencies are kept as raw nanoseconds and sorted into histogram
buckets by NumPy, many at a time: when a few thousand have gathered, or when Prometheus scrapes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from server.core.clock import NS_PER_MS
from server.core.request import BatchTimes
from server.observability.histogram import Histogram

_FOLD_AT = 2048  # few enough that nobody notices the pause

PHASES = ("queue", "assembly", "compute", "split", "total")
_TOTAL = PHASES.index("total")


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
                queue, assembly, compute, split, total = self._phases
                queue.observe_each(queue_ns)
                total.observe_each(total_ns)
                assembly.observe(assembly_ns, members)
                compute.observe(compute_ns, members)
                split.observe(split_ns, members)
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

    def exemplar(self, total_ns: int, trace_id: str) -> None:
        """A request that took `total_ns` from arrival to answer was traced: it stands as an example of its bucket.

        Args:
            total_ns: as it was, or will be, counted with its batch.
            trace_id: 32 hexadecimal digits.
        """
        with self._lock:
            self._phases[_TOTAL].exemplify(total_ns, trace_id)

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
