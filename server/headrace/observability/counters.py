"""Counters and latency histograms of one model version.

A batch costs the data plane one lock and a few additions. Latencies are kept as raw nanoseconds. NumPy sorts them into
histogram buckets, many at a time: when a few thousand are pending, or when Prometheus scrapes.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from headrace.core.request import BatchTimes
from headrace.observability.histograms import observe_each
from headrace.observability.totals import RecentTotals, SizeTotals, Totals, TotalsSnapshots

# Pending durations of a phase. Sorting them delays one request: 0.2 to 0.3 ms for 512 of them. With 2,048 and slower code it
# was 2 to 4 ms, which disabled runs on the event loop for a minute. The mean is 0.4 us a request, a third more with 256.
_FOLD_AT = 512


@dataclass(slots=True)  # not frozen: its constructor runs for every batch
class BatchRecord:
    """A successful batch.

    Attributes:
        rows: rows of its successful requests.
        batch_rows: rows of the batch, including those of cancelled requests.
        reason: close reason.
        times: ends of its phases.
        queue_ns: queue time of each successful request.
        total_ns: time from arrival to the end of split of each successful request.
        busy_ns: time for which the batch occupied its instance.
        shape: equal for batches whose requests could have shared a batch.
        in_flight: requests of the version in the server as the batch ended.
    """

    rows: int
    batch_rows: int
    reason: str
    times: BatchTimes
    queue_ns: list[int]
    total_ns: list[int]
    busy_ns: int = 0
    shape: object = None
    in_flight: int = 0


class Recorder:
    """Counts the requests and batches of one model version. Thread-safe.

    Args:
        histograms: keep latency histograms in addition to the totals.
        clock: monotonic nanoseconds.

    Attributes:
        collect_failures: returns reason, number and time in nanoseconds of the failures that other processes have counted since
            its last call; called under the lock. None in a server of one process.
    """

    def __init__(self, histograms: bool = True, clock: Clock = monotonic_ns) -> None:
        self._clock = clock
        self.collect_failures: Callable[[], Iterable[tuple[str, int, int]]] | None = None
        self._lock = threading.Lock()
        self._snapshots = TotalsSnapshots()
        self._shape: object = None  # of the last batch
        self._histograms = histograms
        self._totals = Totals()
        # Durations that are not in the histograms yet: of each request, of each batch with its number of requests, and of each
        # response (decode, encode). Appending to a list needs no lock: the event loop must not wait for `_fold`.
        self._queue_ns: list[int] = []
        self._total_ns: list[int] = []
        self._batches_ns: list[int] = []  # four of each batch: assemble, compute, split, and the number of its requests
        self._scraped_successes = self._scraped_ns = 0
        self._codecs_ns = array("q")  # two of each response: decode, encode
        self._responses_ns: deque[int] = deque()  # of each response of a decoupled model

    def record_batch(self, batch: BatchRecord) -> None:
        """Count a successful batch."""
        queue_ns, total_ns, shape = batch.queue_ns, batch.total_ns, batch.shape
        members = len(queue_ns)
        taken_ns, assembled_ns, computed_ns, done_ns = batch.times
        assemble_ns, compute_ns, split_ns = assembled_ns - taken_ns, computed_ns - assembled_ns, done_ns - computed_ns
        second = done_ns // NS_PER_S
        with self._lock:
            totals = self._totals
            if second > self._snapshots.second:
                self._snap(second)
            totals.busy_ns += batch.busy_ns
            totals.in_flight += batch.in_flight
            totals.in_flight_squares += batch.in_flight**2
            totals.shape_changes += shape != self._shape
            self._shape = shape
            totals.requests += members
            totals.rows += batch.rows
            totals.executions += 1
            totals.queue_ns += sum(queue_ns)
            totals.request_ns += sum(total_ns)
            totals.assemble_ns += assemble_ns * members
            totals.compute_ns += compute_ns * members
            totals.split_ns += split_ns * members
            totals.last_ms = time.time_ns() // NS_PER_MS
            totals.reasons[batch.reason] += 1
            size = totals.sizes.get(batch.batch_rows)
            if size is None:
                size = totals.sizes[batch.batch_rows] = SizeTotals()
            size.count += 1
            size.assemble_ns += assemble_ns
            size.compute_ns += compute_ns
            size.split_ns += split_ns
            if self._histograms:
                self._queue_ns += queue_ns
                self._total_ns += total_ns
                self._batches_ns += (assemble_ns, compute_ns, split_ns, members)
                if len(self._queue_ns) >= _FOLD_AT or len(self._batches_ns) >= 4 * _FOLD_AT:
                    self._fold()

    def record_pipeline(self, rows: int, total_ns: int, times: Sequence[BatchTimes]) -> None:
        """Count a successful request of a pipeline.

        As in Triton, its compute times are the sums over its steps, and the rest of its time counts as queue time.

        Args:
            rows: rows of the request.
            total_ns: time from arrival to the end of the last step.
            times: times of the batches of its steps.
        """
        sums_ns = [sum(column) for column in zip(*times, strict=True)] or [0, 0, 0, 0]
        parts_ns = [end - begin for begin, end in pairwise(sums_ns)]
        # Steps that run at the same time may add up to more than the whole request.
        queue_ns = max(total_ns - sum(parts_ns), 0)
        self._record_request(self._clock(), rows, queue_ns, total_ns, parts_ns, executions=1)

    def record_open_request(self, rows: int, queue_ns: int, total_ns: int, times: BatchTimes) -> None:
        """Count a successful request that ended after its batch, which `record_batch` has counted without it.

        Args:
            rows: rows of the request.
            queue_ns: its time in the queue.
            total_ns: time from arrival to its end.
            times: those of its batch up to the start of the computation, and the end of the request.
        """
        parts_ns = [end - begin for begin, end in pairwise(times)]
        self._record_request(times.split_ns, rows, queue_ns, total_ns, parts_ns, executions=0)

    def _record_request(
        self, now_ns: int, rows: int, queue_ns: int, total_ns: int, parts_ns: Sequence[int], executions: int
    ) -> None:
        """Count a successful request with times of its own: `parts_ns` to assemble, compute and split."""
        second = now_ns // NS_PER_S
        with self._lock:
            totals = self._totals
            if second > self._snapshots.second:
                self._snap(second)
            totals.requests += 1
            totals.rows += rows
            totals.executions += executions
            totals.queue_ns += queue_ns
            totals.request_ns += total_ns
            totals.assemble_ns += parts_ns[0]
            totals.compute_ns += parts_ns[1]
            totals.split_ns += parts_ns[2]
            totals.last_ms = time.time_ns() // NS_PER_MS
            if self._histograms:
                self._queue_ns.append(queue_ns)
                self._total_ns.append(total_ns)
                self._batches_ns += (*parts_ns, 1)
                if len(self._queue_ns) >= _FOLD_AT:
                    self._fold()

    def record_response(self, time_ns: int, is_first: bool) -> None:
        """Count a response of a decoupled model.

        Args:
            time_ns: from the arrival of the request, or from its response before.
            is_first: it is the first response of its request.
        """
        if self._histograms:
            # `append` needs no lock, as that of the codec times; the sign says which histogram.
            self._responses_ns.append(-time_ns - 1 if is_first else time_ns)
            if len(self._responses_ns) >= _FOLD_AT:
                with self._lock:
                    self._fold_responses()

    def record_wasted(self, wasted_ns: int) -> None:
        """Count the compute time of steps of a pipeline request that got an error later."""
        with self._lock:
            self._totals.wasted_ns += wasted_ns

    def record_cache_hit(self, received_ns: int, lookup_ns: int, now_ns: int) -> None:
        """Count a successful request that the response cache answered.

        As in Triton it counts as successful and as queued, for no time, but not as computed.

        Args:
            received_ns: monotonic time of its arrival.
            lookup_ns: its time in the cache.
            now_ns: monotonic time of its response.
        """
        total_ns, second = now_ns - received_ns, now_ns // NS_PER_S
        with self._lock:
            totals = self._totals
            if second > self._snapshots.second:
                self._snap(second)
            totals.cache_hits += 1
            totals.cache_hit_ns += lookup_ns
            totals.cached_ns += total_ns
            totals.last_ms = time.time_ns() // NS_PER_MS
            if self._histograms:
                self._queue_ns.append(0)
                self._total_ns.append(total_ns)
                if len(self._queue_ns) >= _FOLD_AT:
                    self._fold()

    def record_cache_miss(self, cache_ns: int) -> None:
        """Count a request that was looked up and computed, which `record_batch` counts too, with its time in the cache."""
        with self._lock:
            self._totals.cache_misses += 1
            self._totals.cache_miss_ns += cache_ns

    def record_codec_times(self, *times_ns: int) -> None:
        """Count the time to decode a request and to encode its response; `record_batch` counts the request itself.

        Called on the event loop, for each successful request over HTTP or gRPC.

        Args:
            times_ns: from the request's arrival until it was queued, and from the end of its batch's split to the bytes of its
                response; both of each request.
        """
        if self._histograms:
            self._codecs_ns.extend(times_ns)

    def add_codec_times(self, times_ns: bytes) -> None:
        """Count codec times of a front-end process: int64 of this machine, as the arguments of `record_codec_times`."""
        if self._histograms:
            self._codecs_ns.frombytes(times_ns)

    @property
    def has_histograms(self) -> bool:
        """True if latency histograms are kept."""
        return self._histograms

    def record_inline_run(self, disables: bool) -> None:
        """Count a request that ran on the event loop, and whether it `disables` such runs for a while."""
        with self._lock:
            self._totals.inline_runs += 1
            self._totals.inline_disabled += disables

    def record_padding(self, positions: int, request_positions: int) -> None:
        """Count a batch of a model with `pad`.

        Args:
            positions: rows times length of the batch.
            request_positions: the same of its requests, before padding.
        """
        with self._lock:
            self._totals.positions += positions
            self._totals.padding_positions += positions - request_positions

    def failed_batch(self, reason: str) -> None:
        """Count a batch whose execution raised an exception."""
        with self._lock:
            self._totals.executions += 1
            self._totals.reasons[reason] += 1

    def failure(self, reason: str, time_ns: int, answered_ns: int | None = None) -> None:
        """Count a request that failed.

        Args:
            reason: of its error.
            time_ns: from its arrival to the error.
            answered_ns: time with which it was counted as answered, by the model or the response cache; None if it was not.
        """
        second = self._clock() // NS_PER_S
        with self._lock:
            if second > self._snapshots.second:
                self._snap(second)
            self._totals.failures[reason] += 1
            self._totals.failure_ns += time_ns
            if answered_ns is not None:
                self._totals.undelivered += 1
                self._totals.undelivered_ns += answered_ns

    def record_undelivered(self, requests: int, time_ns: int) -> None:
        """Count requests that were counted as answered although an error had ended them before; `failure` counts the error.

        Args:
            requests: number of them.
            time_ns: time with which they were counted, summed.
        """
        with self._lock:
            self._totals.undelivered += requests
            self._totals.undelivered_ns += time_ns

    def add_exemplar(self, total_ns: int, trace_id: str) -> None:
        """Make a traced request the exemplar of its bucket of `total`.

        Args:
            total_ns: time from arrival to the end of split, as `record_batch` counts it.
            trace_id: 32 hexadecimal digits.
        """
        with self._lock:
            self._totals.phases["total"].exemplify(total_ns, trace_id)

    def totals(self) -> Totals:
        """Return a consistent copy of all counts."""
        with self._lock:
            return self._copy()

    def scraped_totals(self) -> Totals:
        """Return a copy of all counts for Prometheus, which takes smaller counters than before for a restart.

        A request that fails after its answer counts as a success between the two. If a scrape comes in between, the later ones
        return the same number and the same `success_ns` until other requests succeed.
        """
        with self._lock:
            totals = self._copy()
            self._scraped_successes = max(self._scraped_successes, totals.successes)
            self._scraped_ns = max(self._scraped_ns, totals.success_ns)
            totals.undelivered = totals.requests + totals.cache_hits - self._scraped_successes
            totals.undelivered_ns = totals.request_ns + totals.cached_ns - self._scraped_ns
            return totals

    def request_counts(self) -> tuple[int, int]:
        """Return the numbers of successful and of failed requests."""
        with self._lock:
            self._collect_failures()
            return self._totals.successes, sum(self._totals.failures.values())

    def work(self) -> tuple[int, int]:
        """Return the rows of the answered requests and the busy time in nanoseconds, without a wait for the lock."""
        totals = self._totals
        return totals.rows, totals.busy_ns

    def recent(self) -> RecentTotals:
        """Return the totals of the last seconds, at most `SECONDS`."""
        now_ns = self._clock()
        with self._lock:
            return self._snapshots.recent(now_ns, self._copy())

    def _snap(self, second: int) -> None:
        """Store the totals before the first event of a second."""
        self._collect_failures()
        self._snapshots.put(second, self._totals, self._total_ns)

    def _copy(self) -> Totals:
        """Copy the totals; pending durations are sorted into the histograms first."""
        self._collect_failures()
        self._fold()
        self._fold_responses()
        return self._totals.copy()

    def _collect_failures(self) -> None:
        if self.collect_failures is not None:
            for reason, count, time_ns in self.collect_failures():
                self._totals.failures[reason] += count
                self._totals.failure_ns += time_ns

    def _fold_responses(self) -> None:
        """Sort pending times of responses of a decoupled model into their histograms."""
        pending = [self._responses_ns.popleft() for _ in range(len(self._responses_ns))]
        if pending:
            self._totals.first_response.observe([-value - 1 for value in pending if value < 0])
            self._totals.inter_response.observe([value for value in pending if value >= 0])

    def _fold(self) -> None:
        """Sort pending durations into the histograms."""
        codecs_ns = self._codecs_ns[: len(self._codecs_ns) // 2 * 2]
        del self._codecs_ns[: len(codecs_ns)]  # of one array: what was appended meanwhile stays
        requests, batches, responses = len(self._queue_ns), len(self._batches_ns) // 4, len(codecs_ns) // 2
        if not (requests or batches or responses):
            return
        pending_ns = array("q", self._queue_ns + self._total_ns + self._batches_ns)
        pending = np.frombuffer(pending_ns + codecs_ns, np.int64)
        of_batches = pending[2 * requests : 2 * requests + 4 * batches].reshape(batches, 4).T
        of_responses = pending[2 * requests + 4 * batches :].reshape(responses, 2).T
        values_ns = np.concatenate((pending[: 2 * requests], of_batches[:3].ravel(), of_responses.ravel()))
        weights = np.ones(len(values_ns), np.int64)
        weights[2 * requests : 2 * requests + 3 * batches].reshape(3, batches)[:] = of_batches[3]
        phases = ("queue", "total", "assemble", "compute", "split", "decode", "encode")
        counts = (requests, requests, batches, batches, batches, responses, responses)
        observe_each([self._totals.phases[phase] for phase in phases], counts, values_ns, weights)
        self._queue_ns, self._total_ns, self._batches_ns = [], [], []


# Statistics of a model version under the names of Triton's statistics extension.
