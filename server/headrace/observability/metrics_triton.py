"""Metrics under the names, types, labels and units of Triton, so that dashboards and alerts made for it keep working.

Everything is computed from the recorders' totals when Prometheus scrapes. Requests pay nothing for it: in Triton, summaries
are off by default because every request pays for them (triton-inference-server/server#8561).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.telemetry import TritonMetrics
from headrace.observability import metrics_table as table
from headrace.observability.histogram import Counts, Histogram, quantiles_ns
from headrace.observability.recorder import Recorder
from headrace.observability.totals import Totals

# Upper bounds in milliseconds, Triton's defaults.
FIRST_RESPONSE_MS = (100.0, 500.0, 2000.0, 5000.0)
# Quantiles are those of the last minute, as in Triton (prometheus-cpp's default).
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
}
"""Triton's reason for each reason of `headrace_failures_total`; every other one is OTHER."""

_ALL_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


@dataclass(frozen=True, slots=True)
class Row:
    """One loaded version.

    Attributes:
        labels: model and version.
        recorder: of the version; a version that is loaded again has another one.
        totals: a copy of what it counted.
    """

    labels: Sequence[str]
    recorder: Recorder
    totals: Totals


class TritonModels:
    """Makes Triton's metrics of models.

    Not thread-safe: one scrape at a time.

    Args:
        options: which of them.
        clock: monotonic nanoseconds.
    """

    def __init__(self, options: TritonMetrics, clock: Clock = monotonic_ns) -> None:
        self._options = options
        self._windows = Windows(clock)

    def collect(self, rows: Sequence[Row]) -> Iterator[Metric]:
        """All families of the versions."""
        for name, read in _COUNTERS.items():
            if name.endswith("_us") and not self._options.counter_latencies:
                continue
            counter = table.TRITON[name].unknown()
            for row in rows:
                counter.add_sample(counter.name, _labels(row), read(row.totals))
            yield counter
        yield _failures(rows)
        if self._options.summary_latencies:
            yield from self._summaries(rows)
        if self._options.histogram_latencies:
            yield _first_response(rows)

    def _summaries(self, rows: Sequence[Row]) -> Iterator[Metric]:
        recent = [self._windows.recent(row.recorder, row.totals.phases) for row in rows]
        for phase, family in table.TRITON_SUMMARY.items():
            summary = family.any_summary()
            for row, fine in zip(rows, recent, strict=True):
                labels, histogram = _labels(row), row.totals.phases[phase]
                quantiles = self._options.summary_quantiles
                for quantile, value_ns in zip(quantiles, quantiles_ns(fine[phase], quantiles), strict=True):
                    summary.add_sample(summary.name, {**labels, "quantile": f"{quantile:g}"}, value_ns / NS_PER_US)
                summary.add_sample(f"{summary.name}_count", labels, histogram.count)
                summary.add_sample(f"{summary.name}_sum", labels, histogram.sum_ns // NS_PER_US)
            yield summary


class Windows:
    """What was observed over the last minute, as differences of what the histograms held at earlier scrapes.

    Not thread-safe: one scrape at a time.

    Args:
        clock: monotonic nanoseconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._snapshots: WeakKeyDictionary[Recorder, deque[tuple[int, dict[str, Counts]]]] = WeakKeyDictionary()

    def recent(self, recorder: Recorder, phases: Mapping[str, Histogram]) -> dict[str, Counts]:
        """Counts by fine bucket of each phase: of the last minute, or since the scrape before where that is longer ago.

        Args:
            recorder: of the version.
            phases: its folded histograms now; kept, so they must not change.

        Returns:
            By phase. Everything since the version was loaded, as long as that is less than a minute ago or at the first scrape.
        """
        now_ns = self._clock()
        now = {phase: phases[phase].fine for phase in table.TRITON_SUMMARY}
        kept = self._snapshots.setdefault(recorder, deque())
        while len(kept) > 1 and now_ns - kept[1][0] >= WINDOW_S * NS_PER_S:
            kept.popleft()
        before = kept[0][1] if kept and now_ns - kept[0][0] >= WINDOW_S * NS_PER_S else None
        if not kept or now_ns - kept[-1][0] >= _SNAPSHOT_S * NS_PER_S:
            kept.append((now_ns, now))
        return now if before is None else {phase: fine - before[phase] for phase, fine in now.items()}


class CpuCollector(Collector):
    """Makes the metrics of the machine's processors and memory out of /proc; without /proc they have no series.

    Args:
        proc: in place of /proc.
        clock: monotonic nanoseconds.
    """

    def __init__(self, proc: Path = Path("/proc"), clock: Clock = monotonic_ns) -> None:
        self._proc = proc
        self._clock = clock
        self._ticks = self._read_ticks()
        self._read_ns = clock()
        self._utilization = 0.0

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        utilization, total, used = (family.gauge() for family in table.TRITON_CPU.values())
        if (share := self._share()) is not None:
            utilization.add_metric([], share)
        memory = self._read_memory()
        if memory is not None:
            total.add_metric([], memory[0])
            used.add_metric([], memory[0] - memory[1])
        yield from (utilization, total, used)

    def _share(self) -> float | None:
        """Share of time in which the processors were busy since the last reading, 0 to 1; readings are a second apart."""
        ticks, now_ns = self._read_ticks(), self._clock()
        if ticks is None or self._ticks is None:
            return None
        busy, everything = (now - before for now, before in zip(ticks, self._ticks, strict=True))
        if everything > 0 and now_ns - self._read_ns >= NS_PER_S:
            self._utilization = min(max(busy / everything, 0.0), 1.0)
            self._ticks, self._read_ns = ticks, now_ns
        return self._utilization

    def _read_ticks(self) -> tuple[int, int] | None:
        """Ticks in which the processors were busy, and all ticks."""
        try:
            with Path(self._proc, "stat").open(encoding="ascii") as file:
                name, *numbers = file.readline().split()
            # user, nice, system, idle, iowait, irq, softirq, steal; guests are counted as user already.
            ticks = [int(number) for number in numbers[:8]]
            return (sum(ticks) - ticks[3] - ticks[4], sum(ticks)) if name == "cpu" else None
        except (OSError, ValueError, IndexError):
            return None

    def _read_memory(self) -> tuple[int, int] | None:
        """Bytes of memory, and those that are available."""
        found: dict[str, int] = {}
        try:
            with Path(self._proc, "meminfo").open(encoding="ascii") as file:
                for line in file:
                    name, value = line.split(":", 1)
                    if name in ("MemTotal", "MemAvailable"):
                        found[name] = int(value.split()[0]) * 1024
                    if len(found) == 2:
                        return found["MemTotal"], found["MemAvailable"]
        except (OSError, ValueError, IndexError):
            pass
        return None


def _labels(row: Row) -> dict[str, str]:
    return dict(zip(table.MODEL, row.labels, strict=True))


def _failures(rows: Sequence[Row]) -> Metric:
    family = table.TRITON_FAILURE.unknown()
    for row in rows:
        counts = dict.fromkeys(_ALL_REASONS, 0)
        for reason, count in row.totals.failures.items():
            counts[REASONS.get(reason, "OTHER")] += count
        for reason, count in counts.items():
            family.add_sample(family.name, {**_labels(row), "reason": reason}, count)
    return family


def _first_response(rows: Sequence[Row]) -> Metric:
    """Every answer has one response, so that the first one comes with the whole."""
    family = table.TRITON_FIRST_RESPONSE.histogram()
    for row in rows:
        histogram = row.totals.phases["total"]
        buckets: list[tuple[str, float]] = [
            (str(bound), histogram.count_to(int(bound * NS_PER_MS))) for bound in FIRST_RESPONSE_MS
        ]
        family.add_metric(list(row.labels), [*buckets, ("+Inf", histogram.count)], histogram.sum_ns / NS_PER_MS)
    return family


def _us(time_ns: int) -> float:
    return time_ns // NS_PER_US


_COUNTERS: dict[str, Callable[[Totals], float]] = {
    "request_success": lambda t: t.requests,
    "count": lambda t: t.rows,
    "exec_count": lambda t: t.executions,
    "request_duration_us": lambda t: _us(t.request_ns),
    "queue_duration_us": lambda t: _us(t.queue_ns),
    "compute_input_duration_us": lambda t: _us(t.assembly_ns),
    "compute_infer_duration_us": lambda t: _us(t.compute_ns),
    "compute_output_duration_us": lambda t: _us(t.split_ns),
}
