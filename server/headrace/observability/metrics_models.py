"""Collects the metrics of models from their recorders and queues, under our names and under Triton's.

Triton's names, types, labels and units keep dashboards and alerts made for it working. Their values are computed from the
recorders' totals when Prometheus scrapes. Requests pay nothing for them: in Triton, summaries are off by default because every
request pays for them (triton-inference-server/server#8561).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from prometheus_client.metrics_core import Metric

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US, Clock, monotonic_ns, stepwise
from headrace.core.request import ModelLoad
from headrace.core.response_bodies import SequenceFigures
from headrace.core.telemetry import TritonMetrics
from headrace.core.tensor import ModelSpec
from headrace.observability import metrics_table as table
from headrace.observability.counters import Recorder
from headrace.observability.histograms import Counts, Histogram, quantiles_ns
from headrace.observability.processor import read_ticks
from headrace.observability.totals import TIMES, StepTotal, Totals

# Upper bounds in milliseconds, Triton's defaults.
FIRST_RESPONSE_MS = (100.0, 500.0, 2000.0, 5000.0)
# Window of the quantiles, as in Triton (prometheus-cpp's default).
WINDOW_S = 60.0
_SNAPSHOT_S = 5.0

REASONS: Mapping[str, str] = {
    "overloaded": "REJECTED",
    "would_miss": "REJECTED",
    "queue_timeout": "REJECTED",
    "deadline": "REJECTED",
    "quota": "REJECTED",
    "cancelled": "CANCELED",
    "model_failed": "BACKEND",
    "process_died": "BACKEND",
}
"""Triton's reason for each reason of `headrace_failures_total`; every other one is OTHER."""

_ALL_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


@dataclass(frozen=True, slots=True)
class Row:
    """One loaded version.

    Attributes:
        labels: model and version.
        recorder: of the version; a version has a new one after each load.
        totals: a copy of its counts.
        has_cache: True if a response cache is in front of it.
        is_padded: True if its requests may be padded.
        is_decoupled: True if a request has any number of responses.
        first_response_ms: buckets of Triton's histogram; () for its own.
    """

    labels: list[str]
    recorder: Recorder
    totals: Totals
    has_cache: bool = False
    is_padded: bool = False
    is_decoupled: bool = False
    first_response_ms: tuple[float, ...] = ()


# Triton's name of each phase that has a summary.
_SUMMARIES = {
    "total": "request",
    "queue": "queue",
    "assemble": "compute_input",
    "compute": "compute_infer",
    "split": "compute_output",
}


class TritonModels:
    """Collects the metrics of models under Triton's names.

    Not thread-safe: one scrape at a time.

    Args:
        options: selects the metrics.
        clock: monotonic nanoseconds.
    """

    def __init__(self, options: TritonMetrics, clock: Clock = monotonic_ns) -> None:
        self._options = options
        self._windows = Windows(clock)

    def collect(self, rows: Sequence[Row]) -> Iterator[Metric]:
        """Yield all families of the given versions."""
        for name, read in _COUNTERS.items():
            if name.endswith("_us") and not self._options.counter_latencies:
                continue
            counter = table.FAMILIES[f"nv_inference_{name}"].unknown()
            for row in stepwise(rows):
                counter.add_sample(counter.name, _labels(row), read(row.totals))
            yield counter
        yield _failures(rows)
        if self._options.summary_latencies:
            yield from self._summaries(rows)
        if self._options.histogram_latencies:
            yield _first_response(rows)
        yield from _triton_caches([row for row in rows if row.has_cache], self._options)

    def _summaries(self, rows: Sequence[Row]) -> Iterator[Metric]:
        recent = [self._windows.recent(row.recorder, row.totals.phases) for row in stepwise(rows)]
        for phase, name in _SUMMARIES.items():
            summary = table.FAMILIES[f"nv_inference_{name}_summary_us"].any_summary()
            for row, fine in stepwise(zip(rows, recent, strict=True)):
                labels, histogram = _labels(row), row.totals.phases[phase]
                quantiles = self._options.summary_quantiles
                for quantile, value_ns in zip(quantiles, quantiles_ns(fine[phase], quantiles), strict=True):
                    summary.add_sample(summary.name, {**labels, "quantile": f"{quantile:g}"}, value_ns / NS_PER_US)
                summary.add_sample(f"{summary.name}_count", labels, histogram.count)
                summary.add_sample(f"{summary.name}_sum", labels, histogram.sum_ns // NS_PER_US)
            yield summary


class Windows:
    """Durations of the last minute, as differences between histograms of two scrapes.

    Not thread-safe: one scrape at a time.

    Args:
        clock: monotonic nanoseconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._snapshots: WeakKeyDictionary[Recorder, deque[tuple[int, dict[str, Counts]]]] = WeakKeyDictionary()

    def recent(self, recorder: Recorder, phases: Mapping[str, Histogram]) -> dict[str, Counts]:
        """Return counts by fine bucket of each phase: of the last minute, or since the last scrape if that is longer ago.

        Args:
            recorder: of the version.
            phases: its present histograms; kept, so they must not change.

        Returns:
            Counts by phase. At the first scrape, and in the first minute, they cover all time since the version was loaded.
        """
        now_ns = self._clock()
        now = {phase: phases[phase].fine for phase in _SUMMARIES}
        snapshots = self._snapshots.setdefault(recorder, deque())
        while len(snapshots) > 1 and now_ns - snapshots[1][0] >= WINDOW_S * NS_PER_S:
            snapshots.popleft()
        before = snapshots[0][1] if snapshots and now_ns - snapshots[0][0] >= WINDOW_S * NS_PER_S else None
        if not snapshots or now_ns - snapshots[-1][0] >= _SNAPSHOT_S * NS_PER_S:
            snapshots.append((now_ns, now))
        return now if before is None else {phase: fine - before[phase] for phase, fine in now.items()}


class CpuCollector(table.ScrapeCollector):
    """Collects CPU and memory metrics of the machine from /proc; without /proc they have no series.

    Args:
        proc: folder to read in place of /proc.
        clock: monotonic nanoseconds.
    """

    def __init__(self, proc: Path = Path("/proc"), clock: Clock = monotonic_ns) -> None:
        self._proc = proc
        self._clock = clock
        self._ticks = read_ticks(proc)
        self._read_ns = clock()
        self._utilization = 0.0

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        utilization, total, used = table.gauges(
            "nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"
        )
        if (share := self._share()) is not None:
            utilization.add_metric([], share)
        memory = self._read_memory()
        if memory is not None:
            total.add_metric([], memory[0])
            used.add_metric([], memory[0] - memory[1])
        yield from (utilization, total, used)

    def _share(self) -> float | None:
        """Return the utilisation of the CPUs since the last reading, 0 to 1; readings are at least 1 s apart."""
        ticks, now_ns = read_ticks(self._proc), self._clock()
        if ticks is None or self._ticks is None:
            return None
        busy, elapsed = (now - before for now, before in zip(ticks, self._ticks, strict=True))
        if elapsed > 0 and now_ns - self._read_ns >= NS_PER_S:
            self._utilization = min(max(busy / elapsed, 0.0), 1.0)
            self._ticks, self._read_ns = ticks, now_ns
        return self._utilization

    def _read_memory(self) -> tuple[int, int] | None:
        """Return total and available memory in bytes."""
        sizes: dict[str, int] = {}
        try:
            with Path(self._proc, "meminfo").open(encoding="ascii") as file:
                for line in file:
                    name, value = line.split(":", 1)
                    if name in ("MemTotal", "MemAvailable"):
                        sizes[name] = int(value.split()[0]) * 1024
                    if len(sizes) == 2:
                        return sizes["MemTotal"], sizes["MemAvailable"]
        except (OSError, ValueError, IndexError):
            pass
        return None


def _labels(row: Row) -> dict[str, str]:
    return dict(zip(table.MODEL, row.labels, strict=True))


def _failures(rows: Sequence[Row]) -> Metric:
    family = table.FAMILIES["nv_inference_request_failure"].unknown()
    for row in stepwise(rows):
        counts = dict.fromkeys(_ALL_REASONS, 0)
        for reason, count in row.totals.failures.items():
            counts[REASONS.get(reason, "OTHER")] += count
        for reason, count in counts.items():
            family.add_sample(family.name, {**_labels(row), "reason": reason}, count)
    return family


def _first_response(rows: Sequence[Row]) -> Metric:
    """Collect the time to the first response. It is the total time of a request with one response."""
    family = table.FAMILIES["nv_inference_first_response_histogram_ms"].histogram()
    for row in stepwise(rows):
        histogram = row.totals.first_response if row.is_decoupled else row.totals.phases["total"]
        bounds = row.first_response_ms or FIRST_RESPONSE_MS
        buckets: list[tuple[str, float]] = [
            (str(bound), histogram.count_to(int(bound * NS_PER_MS))) for bound in bounds
        ]
        family.add_metric(row.labels, [*buckets, ("+Inf", histogram.count)], histogram.sum_ns / NS_PER_MS)
    return family


def _us(time_ns: int) -> float:
    return time_ns // NS_PER_US


_COUNTERS: dict[str, Callable[[Totals], float]] = {
    "request_success": lambda t: t.successes,
    "count": lambda t: t.rows,
    "exec_count": lambda t: t.executions,
    "request_duration_us": lambda t: _us(t.success_ns),
    "queue_duration_us": lambda t: _us(t.queue_ns),
    "compute_input_duration_us": lambda t: _us(t.assemble_ns),
    "compute_infer_duration_us": lambda t: _us(t.compute_ns),
    "compute_output_duration_us": lambda t: _us(t.split_ns),
}


class LatencySummary(Protocol):
    """The part of a `LatencyTable` that is scraped."""

    def summary(self) -> Iterable[tuple[int, int, int]]:
        """Return rows, expected time and 95th percentile in nanoseconds, for a bounded number of sizes."""


class ObservedProcess(Protocol):
    """The part of a `ProcessStatus` that is scraped."""

    @property
    def up(self) -> bool:
        """True if a process serves."""

    @property
    def restarts(self) -> int:
        """Number of processes that died while they served."""


class Batching(Protocol):
    """The part of a `BatchPolicy` that is scraped."""

    @property
    def objective_ns(self) -> int:
        """Latency objective in nanoseconds from the arrival of a request, 0 for none."""


class Policy(Protocol):
    """The part of a `HandlePolicy` that is scraped."""

    @property
    def instances(self) -> int:
        """Number of configured instances."""

    @property
    def batch(self) -> Batching:
        """Rules for merging requests into batches."""


class HandleStatus(Protocol):
    """State of a loaded version; see `headrace.inference.scheduling.version_handle.VersionHandle`."""

    @property
    def policy(self) -> Policy:
        """Queueing and batching policy."""

    @property
    def alive(self) -> int:
        """Number of live instances."""

    @property
    def restarts(self) -> int:
        """Number of instances that died and were restarted."""

    @property
    def evicted(self) -> bool:
        """True if the version is evicted from memory; the next request loads it."""

    @property
    def process_status(self) -> ObservedProcess | None:
        """Status of the process of an isolated model; None for others."""


class ScrapedCache(Protocol):
    """The part of a `RequestCache` that is scraped."""

    def report(self) -> Mapping[str, object]:
        """Return state, counts and memory."""


class ScrapedModel(HandleStatus, Protocol):
    """A loaded model version; see `headrace.inference.scheduling.version_handle.VersionHandle`."""

    recorder: Recorder
    spec: ModelSpec
    row_differences: int | None

    @property
    def cache(self) -> ScrapedCache | None:
        """Response cache; None without one."""

    @property
    def calls(self) -> frozenset[str]:
        """Names of the models that a pipeline calls; empty for a model."""

    @property
    def sequence_figures(self) -> SequenceFigures | None:
        """Figures of the sequences; None for a version without sequences."""

    @property
    def latency_table(self) -> LatencySummary:
        """Compute times by batch size."""

    def load(self) -> ModelLoad:
        """Return queue depth, requests in flight and predicted times."""

    def steps(self) -> Mapping[str, StepTotal]:
        """Return counts and times of the steps of a pipeline by name; empty for a model."""


ScrapedModels = Callable[[], Iterable[tuple[str, str, ScrapedModel]]]


class ModelCollector(table.ScrapeCollector):
    """Collects the metrics of all loaded models.

    Args:
        sources: returns (model, version, source) of every loaded version.
        triton: selects metrics under Triton's names.
    """

    def __init__(self, sources: ScrapedModels, triton: TritonMetrics) -> None:
        self._sources = sources
        self._triton = TritonModels(triton)
        self._is_lean = triton.preset == "lean"

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        sources = [([model, version], source) for model, version, source in self._sources()]
        rows = [
            Row(
                labels,
                source.recorder,
                source.recorder.scraped_totals(),
                source.cache is not None,
                source.spec.padded is not None,
                source.spec.decoupled,
                source.spec.first_response_ms,
            )
            for labels, source in stepwise(sources)
        ]
        yield from _latencies(rows, ("total",) if self._is_lean else TIMES)
        yield from _counts(rows)
        yield from _padding([row for row in rows if row.is_padded])
        yield from (each for each in _load(sources) if not (self._is_lean and each.name.startswith("nv_")))
        yield from _sequences(sources)
        yield from _lives(sources)
        yield from _processes(sources)
        yield from _steps(sources, self._is_lean)
        yield from _caches(sources)
        yield from _engines(sources)
        if not self._is_lean:
            yield _batch_sizes(rows)
            yield from _responses([row for row in rows if row.is_decoupled])
            yield _profiles(sources)
            yield from self._triton.collect(rows)


# Exported as 0 before the first failure, so that `rate()` sees its first increase.
_NO_FAILURES = dict.fromkeys((
    "bad_request", "cancelled", "deadline", "model_failed", "overloaded", "queue_timeout", "quota", "unavailable",
    "would_miss",
), 0)  # fmt: skip
_Sources = list[tuple[list[str], ScrapedModel]]


def _latencies(rows: Sequence[Row], phases: Sequence[str]) -> Iterator[Metric]:
    for phase in phases:
        family = table.FAMILIES[f"headrace_{phase}_seconds"].durations()
        for row in stepwise(rows):
            family.add(row.labels, row.totals.phases[phase])
        yield family


def _responses(rows: Sequence[Row]) -> Iterator[Metric]:
    """Collect the times of responses of decoupled models."""
    first = table.FAMILIES["headrace_first_response_seconds"].durations()
    inter = table.FAMILIES["headrace_inter_response_seconds"].durations()
    for row in stepwise(rows):
        first.add(row.labels, row.totals.first_response)
        inter.add(row.labels, row.totals.inter_response)
    yield from (first, inter)


def _counts(rows: Sequence[Row]) -> Iterator[Metric]:
    requests, inferred = table.counters("headrace_requests_total", "headrace_rows_total")
    failures, batches, busy = table.counters(
        "headrace_failures_total", "headrace_batches_total", "headrace_busy_seconds_total"
    )
    inline_runs, inline_disabled = table.counters("headrace_inline_runs_total", "headrace_inline_disabled_total")
    for labels, totals in ((row.labels, row.totals) for row in stepwise(rows)):
        requests.add_metric(labels, totals.successes)
        inferred.add_metric(labels, totals.rows)
        busy.add_metric(labels, totals.busy_ns / NS_PER_S)
        inline_runs.add_metric(labels, totals.inline_runs)
        inline_disabled.add_metric(labels, totals.inline_disabled)
        for reason, count in sorted({**_NO_FAILURES, **totals.failures}.items()):
            failures.add_metric([*labels, reason], count)
        for reason, count in sorted(totals.reasons.items()):
            batches.add_metric([*labels, reason], count)
    yield from (requests, inferred, failures, batches, busy, inline_runs, inline_disabled)


def _padding(rows: Sequence[Row]) -> Iterator[Metric]:
    positions, padding = table.counters("headrace_batch_positions_total", "headrace_padding_positions_total")
    for row in rows:
        positions.add_metric(row.labels, row.totals.positions)
        padding.add_metric(row.labels, row.totals.padding_positions)
    yield from (positions, padding)


def _batch_sizes(rows: Sequence[Row]) -> Metric:
    family = table.FAMILIES["headrace_batch_rows"].histogram()
    for row in stepwise(rows):
        sizes = sorted(row.totals.sizes.items())
        buckets: list[tuple[str, float]] = []
        for power in range(11):
            bound = 1 << power
            buckets.append((f"{float(bound)}", sum(size.count for value, size in sizes if value <= bound)))
        buckets.append(("+Inf", sum(size.count for _, size in sizes)))
        family.add_metric(row.labels, buckets, sum(value * size.count for value, size in sizes))
    return family


def _load(sources: _Sources) -> Iterator[Metric]:
    depth, in_flight, pending = table.gauges(
        "headrace_queue_depth", "headrace_in_flight", "nv_inference_pending_request_count"
    )
    wait, drain, capacity = table.gauges(
        "headrace_predicted_wait_seconds", "headrace_drain_seconds", "headrace_capacity_rows_per_second"
    )
    objective, unproven = table.gauges("headrace_objective_seconds", "headrace_unproven_batch_sizes")
    late, differences = table.counters("headrace_late_total", "headrace_row_differences_total")
    server_depth = server_in_flight = server_wait_ns = 0
    for labels, source in stepwise(sources):
        load = source.load()
        if not source.calls:  # the load of a pipeline is that of the models that it calls
            server_depth += load.depth
            server_in_flight += load.in_flight
            server_wait_ns = max(server_wait_ns, load.wait_ns)
        depth.add_metric(labels, load.depth)
        pending.add_metric(labels, load.depth)
        in_flight.add_metric(labels, load.in_flight)
        for level in load.levels:
            wait.add_metric([*labels, str(level.level)], level.wait_ns / NS_PER_S)
        drain.add_metric(labels, load.drain_ns / NS_PER_S)
        capacity.add_metric(labels, load.rows_hz)
        late.add_metric(labels, load.late)
        if source.policy.batch.objective_ns:
            objective.add_metric(labels, source.policy.batch.objective_ns / NS_PER_S)
        sizes = source.spec.parameters.get("headrace.unproven_batch_sizes")
        if isinstance(sizes, int | float):
            unproven.add_metric(labels, sizes)
        if source.row_differences is not None:
            differences.add_metric(labels, source.row_differences)
    yield from (depth, in_flight, wait, drain, capacity, objective, late, pending, unproven, differences)
    for name, value in (
        ("queue_depth", server_depth),
        ("in_flight", server_in_flight),
        ("predicted_wait_seconds", server_wait_ns / NS_PER_S),
    ):
        gauge = table.FAMILIES[f"headrace_server_{name}"].gauge()
        gauge.add_metric([], value)
        yield gauge


def _sequences(sources: _Sources) -> Iterator[Metric]:
    live, slots, used = table.gauges("headrace_sequences", "headrace_sequence_slots", "headrace_sequence_slots_used")
    backlog = table.FAMILIES["headrace_sequence_backlog"].gauge()
    ends, refusals = table.counters("headrace_sequence_ends_total", "headrace_sequence_refusals_total")
    for labels, source in stepwise(sources):
        figures = source.sequence_figures
        if figures is None:
            continue
        gauges = (live, figures.live), (slots, figures.slots), (used, figures.used), (backlog, figures.backlog)
        for gauge, value in gauges:
            gauge.add_metric(labels, value)
        for counter, counts in ((ends, figures.ends), (refusals, figures.refusals)):
            for reason, count in counts.items():
                counter.add_metric([*labels, reason], count)
    yield from (live, slots, used, backlog, ends, refusals)


def _lives(sources: _Sources) -> Iterator[Metric]:
    alive, configured = table.gauges("headrace_instances", "headrace_instances_wanted")
    restarts = table.FAMILIES["headrace_instance_restarts_total"].counter()
    for labels, source in stepwise(sources):
        alive.add_metric(labels, source.alive)
        configured.add_metric(labels, 0 if source.evicted else source.policy.instances)
        restarts.add_metric(labels, source.restarts)
    yield from (alive, configured, restarts)


def _processes(sources: _Sources) -> Iterator[Metric]:
    up = table.FAMILIES["headrace_model_process_up"].gauge()
    restarts = table.FAMILIES["headrace_model_process_restarts_total"].counter()
    for labels, source in stepwise(sources):
        process_status = source.process_status
        if process_status is not None:
            up.add_metric(labels, process_status.up)
            restarts.add_metric(labels, process_status.restarts)
    yield from (up, restarts)


def _profiles(sources: _Sources) -> Metric:
    family = table.FAMILIES["headrace_profile_seconds"].gauge()
    for labels, source in stepwise(sources):
        for size, median_ns, p95_ns in source.latency_table.summary():
            family.add_metric([*labels, str(size), "50"], median_ns / NS_PER_S)
            family.add_metric([*labels, str(size), "95"], p95_ns / NS_PER_S)
    return family


def _steps(sources: _Sources, is_lean: bool) -> Iterator[Metric]:
    requests, wasted = table.counters("headrace_step_requests_total", "headrace_step_wasted_seconds_total")
    seconds = table.FAMILIES["headrace_step_seconds"].durations()
    for labels, source in stepwise(sources):
        for name, total in source.steps().items():
            outcomes = {
                "ok": total.requests - total.cached - total.fallbacks,
                "cached": total.cached,
                "fallback": total.fallbacks,
                "skipped": total.skipped,
                "error": total.failures,
            }
            for outcome, count in outcomes.items():
                requests.add_metric([*labels, name, outcome], count)
            seconds.add([*labels, name], total.latency)
            wasted.add_metric([*labels, name], total.wasted_ns / NS_PER_S)
    yield from (requests, wasted) if is_lean else (requests, seconds, wasted)


_CACHE_REPORT = ("hits", "merged", "misses", "insertions", "evictions", "expirations")
_REDIS_LOOKUPS = {"hit": "hits", "miss": "misses", "late": "late", "refused": "refused", "skipped": "skipped"}
_REDIS_WRITES = {"stored": "stored", "dropped": "dropped"}


def _caches(sources: _Sources) -> Iterator[Metric]:
    counters = {name: table.FAMILIES[f"headrace_cache_{name}_total"].counter() for name in _CACHE_REPORT}
    size, entries, enabled = table.gauges("headrace_cache_bytes", "headrace_cache_entries", "headrace_cache_enabled")
    up = table.FAMILIES["headrace_cache_redis_up"].gauge()
    lookups, writes = table.counters("headrace_cache_redis_lookups_total", "headrace_cache_redis_writes_total")
    for labels, source in stepwise(sources):
        if source.cache is None:
            continue
        report: Mapping[str, Any] = source.cache.report()
        for name, counter in counters.items():
            counter.add_metric(labels, report[name])
        size.add_metric(labels, report["size_bytes"])
        entries.add_metric(labels, report["entries"])
        enabled.add_metric(labels, report["state"] != "off")
        redis = report.get("redis")
        if redis is not None:
            up.add_metric(labels, redis["is_up"])
            for results, counter in ((_REDIS_LOOKUPS, lookups), (_REDIS_WRITES, writes)):
                for result, name in results.items():
                    counter.add_metric([*labels, result], redis[name])
    yield from (*counters.values(), size, entries, enabled, up, lookups, writes)


def _triton_caches(rows: Sequence[Row], options: TritonMetrics) -> Iterator[Metric]:
    for name, read in _CACHE_COUNTERS.items():
        if name.endswith("_duration") and not options.counter_latencies:
            continue
        counter = table.FAMILIES[f"nv_cache_{name}_per_model"].unknown()
        for row in stepwise(rows):
            counter.add_sample(counter.name, _labels(row), read(row.totals))
        yield counter
    for name, number in (("hit", "num_hits"), ("miss", "num_misses")) if options.summary_latencies else ():
        summary, count = table.FAMILIES[f"nv_cache_{name}_summary_us"].any_summary(), _CACHE_COUNTERS[number]
        for row in stepwise(rows):
            labels = _labels(row)
            summary.add_sample(f"{summary.name}_count", labels, count(row.totals))
            summary.add_sample(f"{summary.name}_sum", labels, _CACHE_COUNTERS[f"{name}_duration"](row.totals))
        yield summary


_CACHE_COUNTERS: dict[str, Callable[[Totals], float]] = {
    "num_hits": lambda t: t.cache_hits,
    "num_misses": lambda t: t.cache_misses,
    "hit_duration": lambda t: _us(t.cache_hit_ns),
    "miss_duration": lambda t: _us(t.cache_miss_ns),
}


def _engines(sources: _Sources) -> Iterator[Metric]:
    info, accuracy = table.gauges("headrace_engine_info", "headrace_engine_accuracy")
    for labels, source in stepwise(sources):
        parameters = source.spec.parameters
        if "engine.file" not in parameters:
            continue
        below_bar = "true" if parameters["engine.below_accuracy_bar"] else "false"
        info.add_metric([*labels, str(parameters["engine.precision"]), str(parameters["engine.file"]), below_bar], 1)
        for name, value in parameters.items():
            if name.startswith("engine.") and isinstance(value, float | int) and not isinstance(value, bool):
                accuracy.add_metric([*labels, name.removeprefix("engine.")], value)
    yield from (info, accuracy)
