"""Totals of one model version and their snapshots, from which recent rates and Triton's statistics are computed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar

from headrace.core.clock import NS_PER_S
from headrace.core.response_bodies import Duration, TritonStatistics
from headrace.core.telemetry import PHASES
from headrace.observability.histograms import Counts, Histogram

TIMES = (*PHASES, "total")
"""Times of a request that have a histogram."""


@dataclass(slots=True)
class StepTotal:
    """Requests of one step since the pipeline was loaded.

    Attributes:
        requests: requests with a result, of the step's model, its fallback or the response cache.
        fallbacks, cached: those of them that the fallback answered, and those that the response cache did.
        skipped: requests that did not run the step: its condition did not hold, or there were no rows.
        failures: requests that the step ended with an error.
        wasted_ns: compute time of `requests` of pipeline requests that got an error later, summed.
        latency: times of `requests` from the step's queue to its result.
    """

    requests: int = 0
    fallbacks: int = 0
    skipped: int = 0
    failures: int = 0
    cached: int = 0
    wasted_ns: int = 0
    latency: Histogram = field(default_factory=Histogram)

    def copy(self) -> StepTotal:
        """Return an independent copy."""
        copy = StepTotal(self.requests, self.fallbacks, self.skipped, self.failures, self.cached, self.wasted_ns)
        copy.latency.add(self.latency)
        return copy


@dataclass(slots=True)
class SizeTotals:
    """Executions of one batch size.

    Attributes:
        count: executions.
        assemble_ns, compute_ns, split_ns: their time, summed.
    """

    count: int = 0
    assemble_ns: int = 0
    compute_ns: int = 0
    split_ns: int = 0


@dataclass(slots=True)
class Totals:
    """Counts since the version was loaded.

    Attributes:
        requests: those that the model answered.
        undelivered: requests that the model or the response cache answered, and that ended with an error all the same: the
            response could not be encoded or joined, the deadline passed, or the client disconnected. They count in `failures`
            too; their times stay in the sums below.
        undelivered_ns: the part of `request_ns` and `cached_ns` that is theirs.
        request_ns: their time from arrival to the end of split, summed.
        failures: requests that got an error, by reason.
        failure_ns: their time, summed.
        rows: rows of the answered requests.
        executions: executed batches, failed ones included.
        queue_ns, assemble_ns, compute_ns, split_ns: summed over answered requests; a batch's time counts for each of them.
        busy_ns: time in which instances were busy with successful batches, summed.
        in_flight, in_flight_squares: requests in the server as each successful batch ended, summed, and their squares.
        shape_changes: batches whose shape differs from that of the batch before.
        inline_runs: requests that ran on the event loop, failed ones included.
        inline_disabled: runs on the event loop that took too long, each of which disabled them for a while.
        positions: rows times length of batches of a model with `pad`, padding included.
        padding_positions: those of `positions` that were padding.
        wasted_ns: compute time of steps whose pipeline request got an error later, summed.
        cache_hits, cache_misses: requests that the response cache answered, and those that it did not.
        cache_hit_ns, cache_miss_ns: their time in the cache, summed: lookup, and for a miss insertion.
        cached_ns: time of the requests that the response cache answered, from arrival to response. Neither they nor this time
            are in `requests` and `request_ns`, so that averages over these describe computed requests.
        last_ms: wall clock of the last batch, milliseconds since 1970, 0 if there was none.
        sizes: executions by batch size in rows.
        reasons: batches by the reason why they were closed.
        phases: histograms by phase.
        first_response: times from arrival to the first response, of requests of a decoupled model.
        inter_response: times between responses of one request.
    """

    requests: int = 0
    undelivered: int = 0
    undelivered_ns: int = 0
    request_ns: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    failure_ns: int = 0
    rows: int = 0
    executions: int = 0
    queue_ns: int = 0
    assemble_ns: int = 0
    compute_ns: int = 0
    split_ns: int = 0
    busy_ns: int = 0
    in_flight: int = 0
    in_flight_squares: int = 0
    shape_changes: int = 0
    inline_runs: int = 0
    inline_disabled: int = 0
    positions: int = 0
    padding_positions: int = 0
    wasted_ns: int = 0
    cache_hits: int = 0
    cache_hit_ns: int = 0
    cache_misses: int = 0
    cache_miss_ns: int = 0
    cached_ns: int = 0
    last_ms: int = 0
    sizes: dict[int, SizeTotals] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    phases: dict[str, Histogram] = field(default_factory=lambda: {phase: Histogram() for phase in TIMES})
    first_response: Histogram = field(default_factory=Histogram)
    inter_response: Histogram = field(default_factory=Histogram)

    SUMS: ClassVar[tuple[str, ...]] = (
        "requests", "undelivered", "undelivered_ns", "request_ns", "failure_ns", "rows", "executions", "queue_ns", "assemble_ns",
        "compute_ns", "split_ns", "busy_ns", "in_flight", "in_flight_squares", "shape_changes", "inline_runs",
        "inline_disabled", "positions", "padding_positions", "wasted_ns", "cache_hits", "cache_hit_ns", "cache_misses",
        "cache_miss_ns", "cached_ns",
    )  # fmt: skip
    """Names of the attributes that are plain sums."""

    @property
    def successes(self) -> int:
        """Number of requests whose client got a response; those of the response cache included."""
        return self.requests + self.cache_hits - self.undelivered

    @property
    def success_ns(self) -> int:
        """Time of the requests of `successes` from arrival to response, summed."""
        return max(self.request_ns + self.cached_ns - self.undelivered_ns, 0)

    def copy(self) -> Totals:
        """Return an independent copy."""
        copy = Totals(
            failures=Counter(self.failures),
            last_ms=self.last_ms,
            sizes={
                rows: SizeTotals(size.count, size.assemble_ns, size.compute_ns, size.split_ns)
                for rows, size in self.sizes.items()
            },
            reasons=Counter(self.reasons),
        )
        for name in self.SUMS:
            setattr(copy, name, getattr(self, name))
        for phase, histogram in self.phases.items():
            copy.phases[phase].add(histogram)
        copy.first_response.add(self.first_response)
        copy.inter_response.add(self.inter_response)
        return copy


SECONDS = 10
"""Maximum length of the window of recent totals."""


@dataclass(frozen=True, slots=True)
class RecentTotals:
    """Totals of the last seconds.

    Attributes:
        seconds: length of the window, from its first event on; `SECONDS` without events.
        totals: counted within the window, without the histograms other than that of `total`; `last_ms` counts from the load of
            the version on.
    """

    seconds: float
    totals: Totals


@dataclass(slots=True)  # not frozen: its constructor runs for the first request of every second
class _Snapshot:
    """Totals at a time, in a form that is made in a few microseconds."""

    second: int  # on the monotonic clock
    sums: tuple[int, ...]  # of `Totals.SUMS`
    failures: dict[str, int]  # failures, reasons, sizes: as in `Totals`
    reasons: dict[str, int]
    sizes: dict[int, tuple[int, int, int, int]]
    total: Counts  # counts of the histogram `total` by fine bucket
    total_sum_ns: int
    pending_ns: list[int]  # durations that the histogram lacks


class TotalsSnapshots:
    """The totals before the first event of each of the last seconds.

    Figures of the last seconds are differences of totals: no event is counted twice, and a batch pays one comparison. A model
    with a request a second pays for a snapshot with each of them.

    Not thread-safe: its owner's lock guards it.

    Attributes:
        second: of the last snapshot, on the monotonic clock.
    """

    __slots__ = ("_snapshots", "second")

    def __init__(self) -> None:
        self._snapshots: deque[_Snapshot] = deque(maxlen=SECONDS)
        self.second = -1

    def put(self, second: int, totals: Totals, pending_ns: list[int]) -> None:
        """Store the totals before the first event of a second.

        Args:
            second: on the monotonic clock.
            totals: the totals, which are copied.
            pending_ns: times of requests that its histogram `total` lacks; copied too.
        """
        total = totals.phases["total"]
        snapshot = _Snapshot(
            second,
            _sums(totals),
            dict(totals.failures),
            dict(totals.reasons),
            {
                rows: (size.count, size.assemble_ns, size.compute_ns, size.split_ns)
                for rows, size in totals.sizes.items()
            },
            total.fine.copy(),
            total.sum_ns,
            pending_ns.copy(),
        )
        self._snapshots.append(snapshot)
        self.second = second

    def recent(self, now_ns: int, totals: Totals) -> RecentTotals:
        """Return the totals of the window that ends now.

        Args:
            now_ns: monotonic.
            totals: present totals; a copy, which must not change.
        """
        now_s = now_ns / NS_PER_S
        for snapshot in self._snapshots:
            if snapshot.second > now_s - SECONDS:
                return RecentTotals(max(now_s - snapshot.second, 1e-3), _difference(totals, snapshot))
        return RecentTotals(float(SECONDS), Totals(last_ms=totals.last_ms))


_sums: Callable[[Totals], tuple[int, ...]] = attrgetter(*Totals.SUMS)


def _difference(now: Totals, earlier: _Snapshot) -> Totals:
    sizes: dict[int, SizeTotals] = {}
    for rows, size in now.sizes.items():
        count, assemble_ns, compute_ns, split_ns = earlier.sizes.get(rows, (0, 0, 0, 0))
        if size.count > count:
            sizes[rows] = SizeTotals(
                size.count - count,
                size.assemble_ns - assemble_ns,
                size.compute_ns - compute_ns,
                size.split_ns - split_ns,
            )
    difference = Totals(
        failures=Counter(now.failures) - Counter(earlier.failures),
        last_ms=now.last_ms,
        sizes=sizes,
        reasons=Counter(now.reasons) - Counter(earlier.reasons),
    )
    for name, value, before in zip(Totals.SUMS, _sums(now), earlier.sums, strict=True):
        setattr(difference, name, value - before)
    before_total = Histogram(earlier.total.copy())
    before_total.sum_ns = earlier.total_sum_ns
    before_total.observe(earlier.pending_ns)
    total = difference.phases["total"]
    total.fine, total.sum_ns = (
        now.phases["total"].fine - before_total.fine, now.phases["total"].sum_ns - before_total.sum_ns
    )  # fmt: skip
    return difference


def to_triton(name: str, version: str, totals: Totals) -> TritonStatistics:
    """Return the statistics of one model version under Triton's names.

    As in Triton, `inference_count` counts rows, `execution_count` batches, and all others requests; `batch_stats` has one entry
    for each batch size that occurred. Requests that the response cache answered count in `success` and `queue` only. A
    request that failed after its answer counts in `fail`, with its time, and in the phases that it ran through.
    """
    requests = totals.requests
    failed = sum(totals.failures.values())
    return {
        "name": name,
        "version": version,
        "last_inference": totals.last_ms,
        "inference_count": totals.rows,
        "execution_count": totals.executions,
        "inference_stats": {
            "success": _duration(totals.successes, totals.success_ns),
            "fail": _duration(failed, totals.failure_ns),
            "queue": _duration(requests + totals.cache_hits, totals.queue_ns),
            "compute_input": _duration(requests, totals.assemble_ns),
            "compute_infer": _duration(requests, totals.compute_ns),
            "compute_output": _duration(requests, totals.split_ns),
            "cache_hit": _duration(totals.cache_hits, totals.cache_hit_ns),
            "cache_miss": _duration(totals.cache_misses, totals.cache_miss_ns),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _duration(size.count, size.assemble_ns),
                "compute_infer": _duration(size.count, size.compute_ns),
                "compute_output": _duration(size.count, size.split_ns),
            }
            for rows, size in sorted(totals.sizes.items())
        ],
    }


def _duration(count: int, time_ns: int) -> Duration:
    return {"count": count, "ns": time_ns}
