"""Counters and latency histograms of one model version, and counters of the whole server.

The data plane pays for a lock and a few additions for each batch. Latencies are kept as raw nanoseconds. NumPy sorts them into
histogram buckets, many at a time: when a few thousand are pending, or when Prometheus scrapes.

A classic histogram has a handful of bounds. A native one has many, which grow by a constant factor. Both are sums over the same
fine buckets, whose bounds include all of theirs, so each duration is sorted once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from headrace.core.request import BatchTimes
from headrace.core.telemetry import PHASES

# Seconds. The same for every model and phase, so that histograms add up over replicas.
BUCKETS_S: tuple[float, ...] = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
# Prometheus calls it the schema: 2 ** SCHEMA native buckets for each doubling, so each is 9 % wider than the one before.
SCHEMA = 3
_PER_DOUBLING = 1 << SCHEMA
# Native bucket i ends at 2 ** (i / 8) s. What ends before the first, about a microsecond, counts as zero.
FIRST_NATIVE = -20 * _PER_DOUBLING + 1
ZERO_S = 2.0**-20
_LAST_NATIVE = 10 * _PER_DOUBLING + 1  # beyond 17 minutes all is one

_CLASSIC_NS = np.rint(np.array(BUCKETS_S) * NS_PER_S)
_NATIVE_NS = 2.0 ** (np.arange(FIRST_NATIVE - 1, _LAST_NATIVE) / _PER_DOUBLING) * NS_PER_S
_BOUNDS_NS = np.union1d(_CLASSIC_NS, _NATIVE_NS)
_FINE = len(_BOUNDS_NS) + 1
_LOWER_NS = np.insert(_BOUNDS_NS, 0, 0.0)
_UPPER_NS = np.append(_BOUNDS_NS, np.inf)
# For each fine bucket, the classic and the native one that it lies in.
_CLASSIC_OF = np.searchsorted(_CLASSIC_NS, _UPPER_NS)
_NATIVE_OF = np.searchsorted(_NATIVE_NS, _UPPER_NS)

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One traced request, as an example of a bucket.

    Attributes:
        trace_id: 32 hexadecimal digits.
        value_ns: how long it took.
        time_s: when, in seconds since 1970.
    """

    trace_id: str
    value_ns: int
    time_s: float


class Histogram:
    """Durations in buckets.

    Not thread-safe: its owner's lock guards it.

    Attributes:
        fine: number of durations in each fine bucket.
        sum_ns: sum of all durations.
        exemplars: the last one of each classic bucket.
    """

    __slots__ = ("exemplars", "fine", "sum_ns")

    def __init__(self) -> None:
        self.fine: Counts = np.zeros(_FINE, dtype=np.int64)
        self.sum_ns = 0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, values_ns: ArrayLike, weights: ArrayLike = 1) -> None:
        """Sort durations into the buckets (upper bounds included, as Prometheus counts): cheap for many at a time.

        Args:
            values_ns: the durations.
            weights: number of requests with each of them.
        """
        values = np.asarray(values_ns, dtype=np.int64)
        counts = np.broadcast_to(np.asarray(weights, dtype=np.int64), values.shape)
        places = np.searchsorted(_BOUNDS_NS, values, side="left")
        self.fine += np.bincount(places, weights=counts, minlength=_FINE).astype(np.int64)
        self.sum_ns += int((values * counts).sum())

    def exemplify(self, value_ns: int, trace_id: str) -> None:
        """A request that took `value_ns`, and is observed besides, was traced."""
        place = int(np.searchsorted(_CLASSIC_NS, value_ns))
        self.exemplars[place] = Exemplar(trace_id, value_ns, time.time())

    def add(self, other: Histogram) -> None:
        """Add the durations of another histogram."""
        self.fine += other.fine
        self.sum_ns += other.sum_ns
        self.exemplars |= other.exemplars

    @property
    def count(self) -> int:
        """Number of durations."""
        return int(self.fine.sum())

    @property
    def counts(self) -> Counts:
        """By classic bucket, the last one without an upper bound."""
        return _summed(_CLASSIC_OF, self.fine, len(BUCKETS_S) + 1)

    @property
    def native(self) -> Counts:
        """By native bucket: the first holds what counts as zero, the second is number FIRST_NATIVE."""
        return _summed(_NATIVE_OF, self.fine, len(_NATIVE_NS) + 1)

    def count_to(self, bound_ns: int) -> int:
        """How many durations are at most `bound_ns`, which must be the bound of a fine bucket: a classic or a native one.

        Raises:
            ValueError: it is no bound.
        """
        place = int(np.searchsorted(_BOUNDS_NS, bound_ns))
        if place == len(_BOUNDS_NS) or _BOUNDS_NS[place] != bound_ns:
            raise ValueError(f"{bound_ns} ns is not the bound of a bucket")
        return int(self.fine[: place + 1].sum())

    def quantile_s(self, quantile: float) -> float | None:
        """What the share `quantile` of all durations keeps to, within 9 %; None if there are none."""
        total = self.count
        if not total:
            return None
        place = int(np.searchsorted(self.fine.cumsum(), max(quantile * total, 1), side="left"))
        return float(_BOUNDS_NS[min(place, len(_BOUNDS_NS) - 1)]) / NS_PER_S


def quantiles_ns(fine: Counts, quantiles: Sequence[float]) -> list[float]:
    """Estimate quantiles from counts by fine bucket, linear within a bucket, as Prometheus' `histogram_quantile` does.

    Args:
        fine: counts by fine bucket.
        quantiles: 0 to 1.

    Returns:
        Nanoseconds, within 9 %; NaN if there are no counts.
    """
    cumulative = fine.cumsum()
    total = int(cumulative[-1])
    if not total:
        return [float("nan")] * len(quantiles)
    ranks = np.asarray(quantiles) * total
    places = np.minimum(np.searchsorted(cumulative, ranks, side="left"), len(_BOUNDS_NS) - 1)
    upper, lower = _BOUNDS_NS[places], _LOWER_NS[places]
    share = (ranks - (cumulative[places] - fine[places])) / np.maximum(fine[places], 1)
    found: list[float] = (lower + (upper - lower) * share.clip(0, 1)).tolist()
    return found


def _summed(places: npt.NDArray[np.intp], fine: Counts, length: int) -> Counts:
    return np.bincount(places, weights=fine, minlength=length).astype(np.int64)


TIMES = (*PHASES, "total")
"""Times of a request that have a histogram."""


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
    """Everything counted since the version was loaded.

    Attributes:
        requests: answered with success.
        request_ns: their time from arrival to settled answer, summed.
        failures: requests that got an error, by reason.
        failure_ns: their time, summed.
        rows: rows of the successful requests.
        executions: batches run, whatever became of them.
        queue_ns, assemble_ns, compute_ns, split_ns: per successful request, summed (a batch's time counts for each member).
        busy_ns: how long instances were kept by the batches that were answered, summed.
        shape_changes: batches of another shape than the one before.
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
    assemble_ns: int = 0
    compute_ns: int = 0
    split_ns: int = 0
    busy_ns: int = 0
    shape_changes: int = 0
    last_ms: int = 0
    sizes: dict[int, SizeTotals] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    phases: dict[str, Histogram] = field(default_factory=lambda: {phase: Histogram() for phase in TIMES})

    SUMS: ClassVar[tuple[str, ...]] = (
        "requests", "request_ns", "failure_ns", "rows", "executions", "queue_ns", "assemble_ns", "compute_ns", "split_ns",
        "busy_ns", "shape_changes",
    )  # fmt: skip
    """The names of those that are plain sums."""

    def copy(self) -> Totals:
        """A copy that does not change."""
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
        return copy


SECONDS = 10
"""The length of the window, at the most."""


@dataclass(frozen=True, slots=True)
class RecentTotals:
    """The last seconds.

    Attributes:
        seconds: how many, from the first event within the window on; `SECONDS` if there was none.
        totals: of them; `last_ms` is that of the whole life.
    """

    seconds: float
    totals: Totals


class TotalsSnapshots:
    """What the totals were at the first event of each of the last seconds.

    Not thread-safe: its owner's lock guards it.

    Attributes:
        second: the last that was marked, on the monotonic clock.
    """

    __slots__ = ("_kept", "second")

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Totals]] = deque(maxlen=SECONDS)
        self.second = -1

    def put(self, second: int, totals: Totals) -> None:
        """Something is about to be counted in a second that has no mark yet.

        Args:
            second: on the monotonic clock.
            totals: a copy of what was counted before.
        """
        self._kept.append((second, totals))
        self.second = second

    def recent(self, now_ns: int, totals: Totals) -> RecentTotals:
        """The window that ends now.

        Args:
            now_ns: on the same clock.
            totals: what was counted until now; a copy, which the answer may hold.
        """
        now_s = now_ns / NS_PER_S
        for second, then in self._kept:
            if second > now_s - SECONDS:
                return RecentTotals(max(now_s - second, 1e-3), _difference(totals, then))
        return RecentTotals(float(SECONDS), Totals(last_ms=totals.last_ms))


def _difference(now: Totals, then: Totals) -> Totals:
    sizes: dict[int, SizeTotals] = {}
    for rows, size in now.sizes.items():
        before = then.sizes.get(rows, SizeTotals())
        if size.count > before.count:
            sizes[rows] = SizeTotals(
                size.count - before.count,
                size.assemble_ns - before.assemble_ns,
                size.compute_ns - before.compute_ns,
                size.split_ns - before.split_ns,
            )
    found = Totals(
        failures=Counter(now.failures) - then.failures,
        last_ms=now.last_ms,
        sizes=sizes,
        reasons=Counter(now.reasons) - then.reasons,
    )
    for name in Totals.SUMS:
        setattr(found, name, getattr(now, name) - getattr(then, name))
    for phase, histogram in found.phases.items():
        histogram.fine = now.phases[phase].fine - then.phases[phase].fine
        histogram.sum_ns = now.phases[phase].sum_ns - then.phases[phase].sum_ns
    return found


_FOLD_AT = 2048  # durations of a phase: few enough that sorting them makes no noticeable pause


class Recorder:
    """Counts for one model version; any thread may call any method.

    Args:
        histograms: keep latency histograms; the exact totals are kept in any case.
        clock: monotonic nanoseconds.
    """

    def __init__(self, histograms: bool = True, clock: Clock = monotonic_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshots = TotalsSnapshots()
        self._shape: object = None  # of the last batch
        self._histograms = histograms
        self._totals = Totals()
        # Durations that are not in the histograms yet: of each request, of each batch with its number of requests, and of each
        # response (decode, encode). Appending to a deque needs no lock: the event loop must not wait for `_fold`.
        self._queue_ns: list[int] = []
        self._total_ns: list[int] = []
        self._batches_ns: list[tuple[int, int, int, int]] = []
        self._codecs_ns: deque[tuple[int, int]] = deque()

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
        assemble_ns = times.assembled_ns - times.taken_ns
        compute_ns = times.computed_ns - times.assembled_ns
        split_ns = times.split_ns - times.computed_ns
        second = times.split_ns // NS_PER_S
        with self._lock:
            totals = self._totals
            if second > self._snapshots.second:
                self._snapshots.put(second, self._copy())
            totals.busy_ns += busy_ns
            totals.shape_changes += shape != self._shape
            self._shape = shape
            totals.requests += members
            totals.rows += rows
            totals.executions += 1
            totals.queue_ns += sum(queue_ns)
            totals.request_ns += sum(total_ns)
            totals.assemble_ns += assemble_ns * members
            totals.compute_ns += compute_ns * members
            totals.split_ns += split_ns * members
            totals.last_ms = time.time_ns() // NS_PER_MS
            totals.reasons[reason] += 1
            size = totals.sizes.get(batch_rows)
            if size is None:
                size = totals.sizes[batch_rows] = SizeTotals()
            size.count += 1
            size.assemble_ns += assemble_ns
            size.compute_ns += compute_ns
            size.split_ns += split_ns
            if self._histograms:
                self._queue_ns += queue_ns
                self._total_ns += total_ns
                self._batches_ns.append((assemble_ns, compute_ns, split_ns, members))
                if len(self._queue_ns) >= _FOLD_AT or len(self._batches_ns) >= _FOLD_AT:
                    self._fold()

    def record_codec_times(self, decode_ns: int, encode_ns: int) -> None:
        """A response to a request that came as bytes was encoded; the request is counted with its batch.

        On the event loop, once a request.

        Args:
            decode_ns: from the request's arrival until it was queued.
            encode_ns: from the end of its batch's split to the bytes of its response.
        """
        if self._histograms:
            self._codecs_ns.append((decode_ns, encode_ns))

    def failed_batch(self, reason: str) -> None:
        """A batch was run and raised."""
        with self._lock:
            self._totals.executions += 1
            self._totals.reasons[reason] += 1

    def failure(self, reason: str, time_ns: int) -> None:
        """A request got an error `time_ns` after it had arrived."""
        second = self._clock() // NS_PER_S
        with self._lock:
            if second > self._snapshots.second:
                self._snapshots.put(second, self._copy())
            self._totals.failures[reason] += 1
            self._totals.failure_ns += time_ns

    def add_exemplar(self, total_ns: int, trace_id: str) -> None:
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
            return self._copy()

    def recent(self) -> RecentTotals:
        """What was counted over the last seconds."""
        now_ns = self._clock()
        with self._lock:
            return self._snapshots.recent(now_ns, self._copy())

    def _copy(self) -> Totals:
        """A copy of the totals with everything counted so far."""
        self._fold()
        return self._totals.copy()

    def _fold(self) -> None:
        """Sort pending durations into the histograms."""
        phases = self._totals.phases
        if self._batches_ns:
            phases["queue"].observe(self._queue_ns)
            phases["total"].observe(self._total_ns)
            *columns, members = np.array(self._batches_ns, dtype=np.int64).T
            for phase, values_ns in zip(("assemble", "compute", "split"), columns, strict=True):
                phases[phase].observe(values_ns, members)
            self._queue_ns, self._total_ns, self._batches_ns = [], [], []
        codecs_ns = [self._codecs_ns.popleft() for _ in range(len(self._codecs_ns))]
        if codecs_ns:
            decode_ns, encode_ns = np.array(codecs_ns, dtype=np.int64).T
            phases["decode"].observe(decode_ns)
            phases["encode"].observe(encode_ns)


def to_triton(name: str, version: str, totals: Totals) -> dict[str, object]:
    """Statistics of one model version.

    Counts are of requests unless Triton counts otherwise: `inference_count` is rows, `execution_count` batches, `batch_stats`
    has one row per batch size seen.
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
            "success": _duration(requests, totals.request_ns),
            "fail": _duration(failed, totals.failure_ns),
            "queue": _duration(requests, totals.queue_ns),
            "compute_input": _duration(requests, totals.assemble_ns),
            "compute_infer": _duration(requests, totals.compute_ns),
            "compute_output": _duration(requests, totals.split_ns),
            "cache_hit": _duration(0, 0),
            "cache_miss": _duration(0, 0),
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


def _duration(count: int, time_ns: int) -> dict[str, int]:
    return {"count": count, "ns": time_ns}


class LabelledCounter:
    """Counts by labels; any thread may call any method.

    Labels come from the code or the operator, never from a client: each combination is kept for ever.

    Args:
        labels: their names, in the order in which `count` takes their values.
    """

    def __init__(self, *labels: str) -> None:
        self.labels = labels
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], int] = {}

    def declare(self, *values: str) -> None:
        """Show a combination before it is counted, as 0: what is not there cannot be seen to rise."""
        self.declare_each([values])

    def declare_each(self, combinations: Iterable[tuple[str, ...]]) -> None:
        """`declare` of several."""
        with self._lock:
            for values in combinations:
                self._counts.setdefault(values, 0)

    def count(self, *values: str, by: int = 1) -> None:
        """One more of these values, or `by`."""
        with self._lock:
            self._counts[values] = self._counts.get(values, 0) + by

    def items(self) -> list[tuple[tuple[str, ...], int]]:
        """Values and count of every combination."""
        with self._lock:
            return sorted(self._counts.items())


# One process is one server: these stand where what is counted is far from whoever could hand a counter in.
ERRORS = LabelledCounter("protocol", "reason")
"""Answers that were an error, by protocol (http, grpc) and the error's `reason`: headrace_errors_total."""
LOADS = LabelledCounter("model", "result")
"""Loads of models by result: loaded, reloaded, unloaded, failed: headrace_model_loads_total."""
BUILDS = LabelledCounter("model", "result")
"""Engines built while the server runs, by result: built, failed: headrace_engine_builds_total."""
DROPPED = LabelledCounter("kind")
"""Traces, spans and lines of the request log that were lost, by kind: headrace_telemetry_dropped_total."""
