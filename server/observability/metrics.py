"""Every Prometheus metric of the server, declared here and made when Prometheus asks.

Nothing on the data plane knows Prometheus: a scrape reads the recorders' totals. Triton's counter names stand beside ours, so
that dashboards made for it keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from server.core.clock import NS_PER_S, NS_PER_US
from server.core.ledger import HOST, Ledger
from server.core.tensor import ModelSpec
from server.observability.histogram import BUCKETS_S, Histogram
from server.observability.recorder import Recorder
from server.observability.totals import PHASES, Totals

_LABELS = ("model", "version")
_PHASE_DOCS = {
    "queue": "Time a request waited for an instance.",
    "assembly": "Time to put a batch together, once per request in it.",
    "compute": "Time the backend ran a batch, once per request in it.",
    "split": "Time to give every request of a batch its part of the answer, once per request in it.",
    "total": "Time from the arrival of a request to its settled answer.",
}


class Profile(Protocol):
    """See `server.dataplane.profile.Profile`."""

    def summary(self) -> Iterable[tuple[int, int, int]]:
        """Rows, expected nanoseconds, and what 95 of 100 batches keep to; a bounded number of sizes."""


class Source(Protocol):
    """A loaded model version; see `server.dataplane.handle.ModelHandle`."""

    recorder: Recorder
    spec: ModelSpec

    @property
    def profile(self) -> Profile:
        """How long its batches compute."""

    @property
    def depth(self) -> int:
        """Requests in the queue."""

    @property
    def in_flight(self) -> int:
        """Requests being served."""

    @property
    def alive(self) -> int:
        """Instances that live."""

    @property
    def restarts(self) -> int:
        """Instances that died and were started anew."""

    @property
    def standing(self) -> Standing | None:
        """How the model's own process fares; None if it has none."""


class Standing(Protocol):
    """See `server.backends.base.Standing`."""

    @property
    def up(self) -> bool:
        """There is a process that serves."""

    @property
    def restarts(self) -> int:
        """How many have died while they served."""


class Loads(Protocol):
    """How often a version was loaded; see `server.control.residency.Loads`."""

    count: int
    time_ns: int
    on_demand: int
    evictions: int


class Memory(Protocol):
    """Who holds the memory of GPUs; see `server.control.residency.Residency`."""

    ledger: Ledger

    def loads(self) -> Iterable[tuple[str, str, Loads]]:
        """Model, version and how often it was loaded."""


Sources = Callable[[], Iterable[tuple[str, str, Source]]]


class MetricsPage:
    """The page that Prometheus scrapes.

    Args:
        sources: gives (model, version, source) of everything loaded.
        memory: of the GPUs; None: nobody tells.
    """

    def __init__(self, sources: Sources, memory: Memory | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(ModelCollector(sources))
        if memory is not None:
            self._registry.register(MemoryCollector(memory))
        ProcessCollector(registry=self._registry)

    def render(self) -> tuple[str, bytes]:
        """Content type and body."""
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)


class ModelCollector(Collector):
    """Makes the metrics of all loaded models out of their recorders."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: the models may change."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        rows = [([model, version], source, source.recorder.totals()) for model, version, source in self._sources()]
        totals = [(labels, total) for labels, _, total in rows]
        yield from _latencies(totals)
        yield from _counts(totals)
        yield _batch_sizes(totals)
        yield from _gauges([(labels, source) for labels, source, _ in rows])
        yield from _processes([(labels, source) for labels, source, _ in rows])
        yield _profiles([(labels, source) for labels, source, _ in rows])
        yield _engines([(labels, source) for labels, source, _ in rows])
        yield from _triton_counters(totals)


class MemoryCollector(Collector):
    """Makes the metrics of GPU memory out of the ledger."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: the GPUs are known once something is loaded."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        held = GaugeMetricFamily(
            "headrace_gpu_memory_bytes",
            "Memory booked for models; gpu is a number, or host for pinned memory.",
            labels=("gpu", *_LABELS, "kind"),
        )
        for gpu, model, version, kind, size_bytes in self._memory.ledger.holdings():
            held.add_metric(["host" if gpu == HOST else str(gpu), model, version, kind], size_bytes)
        yield held
        limit = GaugeMetricFamily(
            "headrace_gpu_memory_limit_bytes", "What all models together may take of a GPU.", labels=("gpu",)
        )
        for gpu, size_bytes in sorted(self._memory.ledger.limits.items()):
            limit.add_metric([str(gpu)], size_bytes)
        yield limit
        yield from self._moves()

    def _moves(self) -> Iterator[Metric]:
        seconds = SummaryMetricFamily("headrace_load_seconds", "Time to load a version.", labels=_LABELS)
        on_demand = CounterMetricFamily(
            "headrace_on_demand_loads", "Loads because a request waited for a parked version.", labels=_LABELS
        )
        evictions = CounterMetricFamily(
            "headrace_evictions", "How often a version was parked to make room for another.", labels=_LABELS
        )
        for model, version, loads in self._memory.loads():
            labels = [model, version]
            seconds.add_metric(labels, loads.count, loads.time_ns / NS_PER_S)
            on_demand.add_metric(labels, loads.on_demand)
            evictions.add_metric(labels, loads.evictions)
        yield from (seconds, on_demand, evictions)


_Rows = list[tuple[list[str], Totals]]


def _latencies(rows: _Rows) -> Iterator[Metric]:
    for phase in PHASES:
        family = HistogramMetricFamily(f"headrace_{phase}_seconds", _PHASE_DOCS[phase], labels=_LABELS)
        for labels, totals in rows:
            histogram = totals.phases[phase]
            family.add_metric(labels, _buckets(histogram), histogram.sum_ns / NS_PER_S)
        yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    cumulative = histogram.counts.cumsum().tolist()
    bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
    return list(zip(bounds, cumulative, strict=True))


def _counts(rows: _Rows) -> Iterator[Metric]:
    requests = CounterMetricFamily("headrace_requests", "Requests answered with success.", labels=_LABELS)
    inferred = CounterMetricFamily("headrace_rows", "Rows of the requests answered with success.", labels=_LABELS)
    failures = CounterMetricFamily(
        "headrace_failures", "Requests answered with an error, or whose caller left.", labels=(*_LABELS, "reason")
    )
    batches = CounterMetricFamily(
        "headrace_batches", "Batches run, by the reason why they were closed.", labels=(*_LABELS, "closed_by")
    )
    for labels, totals in rows:
        requests.add_metric(labels, totals.requests)
        inferred.add_metric(labels, totals.rows)
        for reason, count in sorted(totals.failures.items()):
            failures.add_metric([*labels, reason], count)
        for reason, count in sorted(totals.reasons.items()):
            batches.add_metric([*labels, reason], count)
    yield from (requests, inferred, failures, batches)


def _batch_sizes(rows: _Rows) -> Metric:
    family = HistogramMetricFamily("headrace_batch_rows", "Rows of each batch that was run.", labels=_LABELS)
    for labels, totals in rows:
        sizes = sorted(totals.sizes.items())
        buckets: list[tuple[str, float]] = []
        for power in range(11):
            bound = 1 << power
            buckets.append((f"{float(bound)}", sum(size.count for value, size in sizes if value <= bound)))
        buckets.append(("+Inf", sum(size.count for _, size in sizes)))
        family.add_metric(labels, buckets, sum(value * size.count for value, size in sizes))
    return family


def _gauges(rows: list[tuple[list[str], Source]]) -> Iterator[Metric]:
    depth = GaugeMetricFamily("headrace_queue_depth", "Requests in the queue.", labels=_LABELS)
    in_flight = GaugeMetricFamily("headrace_in_flight", "Requests between arrival and answer.", labels=_LABELS)
    instances = GaugeMetricFamily("headrace_instances", "Instances that live.", labels=_LABELS)
    restarts = CounterMetricFamily(
        "headrace_instance_restarts", "Instances that died and were started anew.", labels=_LABELS
    )
    pending = GaugeMetricFamily("nv_inference_pending_request_count", "Requests in the queue.", labels=_LABELS)
    for labels, source in rows:
        depth.add_metric(labels, source.depth)
        in_flight.add_metric(labels, source.in_flight)
        instances.add_metric(labels, source.alive)
        restarts.add_metric(labels, source.restarts)
        pending.add_metric(labels, source.depth)
    yield from (depth, in_flight, instances, restarts, pending)


def _processes(rows: list[tuple[list[str], Source]]) -> Iterator[Metric]:
    up = GaugeMetricFamily("headrace_model_process_up", "1 while an isolated model's process serves.", labels=_LABELS)
    restarts = CounterMetricFamily(
        "headrace_model_process_restarts", "Processes of an isolated model that died and were replaced.", labels=_LABELS
    )
    for labels, source in rows:
        standing = source.standing
        if standing is not None:
            up.add_metric(labels, standing.up)
            restarts.add_metric(labels, standing.restarts)
    yield from (up, restarts)


def _profiles(rows: list[tuple[list[str], Source]]) -> Metric:
    family = GaugeMetricFamily(
        "headrace_profile_microseconds",
        "How long the backend is expected to run a batch of so many rows.",
        labels=(*_LABELS, "rows", "quantile"),
    )
    for labels, source in rows:
        for size, median_ns, p95_ns in source.profile.summary():
            family.add_metric([*labels, str(size), "0.5"], median_ns / NS_PER_US)
            family.add_metric([*labels, str(size), "0.95"], p95_ns / NS_PER_US)
    return family


def _engines(rows: list[tuple[list[str], Source]]) -> Metric:
    family = GaugeMetricFamily(
        "headrace_engine_info",
        "1 for a model that a built engine serves.",
        labels=(*_LABELS, "precision", "file", "below_accuracy_bar"),
    )
    for labels, source in rows:
        told = source.spec.parameters
        if "engine.file" in told:
            marked = "true" if told["engine.below_accuracy_bar"] else "false"
            family.add_metric([*labels, str(told["engine.precision"]), str(told["engine.file"]), marked], 1)
    return family


def _triton_counters(rows: _Rows) -> Iterator[Metric]:
    for name, text, read in _TRITON:
        # Triton's counters lack the suffix that a counter family would force on them, hence the type "unknown".
        family = Metric(name, text, "unknown")
        for (model, version), totals in rows:
            family.add_sample(name, {"model": model, "version": version}, read(totals))
        yield family


def _us(time_ns: int) -> float:
    return time_ns // NS_PER_US


_TRITON: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("nv_inference_request_success", "Requests answered with success.", lambda t: t.requests),
    ("nv_inference_request_failure", "Requests answered with an error.", lambda t: sum(t.failures.values())),
    ("nv_inference_count", "Rows inferred.", lambda t: t.rows),
    ("nv_inference_exec_count", "Batches run.", lambda t: t.executions),
    ("nv_inference_request_duration_us", "Time of successful requests.", lambda t: _us(t.request_ns)),
    ("nv_inference_queue_duration_us", "Time in the queue.", lambda t: _us(t.queue_ns)),
    ("nv_inference_compute_input_duration_us", "Time to assemble batches.", lambda t: _us(t.assembly_ns)),
    ("nv_inference_compute_infer_duration_us", "Time of the backend.", lambda t: _us(t.compute_ns)),
    ("nv_inference_compute_output_duration_us", "Time to split batches.", lambda t: _us(t.split_ns)),
)
