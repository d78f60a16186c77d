"""What one model version has done, counted where it happens and added up when somebody asks.

The data plane pays for a lock and a few additions a batch. Latencies are kept as raw nanoseconds and sorted into histogram
buckets by NumPy, many at a time: when a few thousand have gathered, or when Prometheus scrapes.
"""

from __future__ import annotations

import threading
import time

from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from headrace.core.request import BatchTimes
from headrace.observability.recent import Marks, Recent
from headrace.observability.totals import SizeTotals, Totals

_FOLD_AT = 2048  # few enough that nobody notices the pause


class Recorder:
    """Counts for one model version; any thread may call any method.

    Args:
        histograms: keep latency histograms; the exact totals are kept in any case.
        clock: monotonic nanoseconds.
    """

    def __init__(self, histograms: bool = True, clock: Clock = monotonic_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._marks = Marks()
        self._shape: object = None  # of the last batch
        self._histograms = histograms
        self._totals = Totals()
        # The same histograms as in the totals, without a look-up: those of batches, and those of bytes.
        phases = self._totals.phases
        self._of_batches = tuple(phases[name] for name in ("queue", "assembly", "compute", "split", "total"))
        self._decode, self._encode = phases["decode"], phases["encode"]

    def batch(
        self,
        rows: int,
        batch_rows: int,
        reason: str,
        times: BatchTimes,
        queue_ns: list[int],
        total_ns: list[int],
        busy_ns: int = 0,
        shape: object = None,
    ) -> None:
        """A batch was run and answered.

        Args:
            rows: rows of the requests that were answered.
            batch_rows: rows in the batch, those of callers who left included.
            reason: why it was closed.
            times: its stations.
            queue_ns: per successful request, how long it waited.
            total_ns: per successful request, from arrival to answer.
            busy_ns: how long an instance was kept by it.
            shape: equal for batches whose requests could have shared one.
        """
        members = len(queue_ns)
        assembly_ns = times.assembled_ns - times.taken_ns
        compute_ns = times.computed_ns - times.assembled_ns
        split_ns = times.split_ns - times.computed_ns
        second = times.split_ns // NS_PER_S
        with self._lock:
            totals = self._totals
            if second > self._marks.second:
                self._marks.put(second, totals.copy())
            totals.busy_ns += busy_ns
            totals.shape_changes += shape != self._shape
            self._shape = shape
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
            size.add(assembly_ns, compute_ns, split_ns)
            if self._histograms:
                queue, assembly, compute, split, total = self._of_batches
                queue.observe_each(queue_ns)
                total.observe_each(total_ns)
                assembly.observe(assembly_ns, members)
                compute.observe(compute_ns, members)
                split.observe(split_ns, members)
                if queue.pending >= _FOLD_AT or compute.pending >= _FOLD_AT:
                    for histogram in self._totals.phases.values():
                        histogram.fold()

    def coded(self, decode_ns: int, encode_ns: int) -> None:
        """An answer was written to a request that came as bytes, and is counted with its batch besides.

        On the event loop, once a request; what gathers is folded with the batches.

        Args:
            decode_ns: from the request's arrival until it was handed to the queue.
            encode_ns: from its outcome to the bytes of its answer.
        """
        if self._histograms:
            with self._lock:
                self._decode.observe(decode_ns)
                self._encode.observe(encode_ns)

    def failed_batch(self, reason: str) -> None:
        """A batch was run and raised."""
        with self._lock:
            self._totals.executions += 1
            self._totals.reasons[reason] += 1

    def failure(self, reason: str, time_ns: int) -> None:
        """A request got an error `time_ns` after it had arrived."""
        second = self._clock() // NS_PER_S
        with self._lock:
            if second > self._marks.second:
                self._marks.put(second, self._totals.copy())
            self._totals.failures[reason] += 1
            self._totals.failure_ns += time_ns

    def exemplar(self, total_ns: int, trace_id: str) -> None:
        """A request that took `total_ns` from arrival to answer was traced: it stands as an example of its bucket.

        Args:
            total_ns: as it was, or will be, counted with its batch.
            trace_id: 32 hexadecimal digits.
        """
        with self._lock:
            self._totals.phases["total"].exemplify(total_ns, trace_id)

    def totals(self) -> Totals:
        """A consistent copy of everything counted so far."""
        with self._lock:
            return self._totals.copy()

    def recent(self) -> Recent:
        """What was counted over the last seconds."""
        now_ns = self._clock()
        with self._lock:
            return self._marks.recent(now_ns, self._totals.copy())
