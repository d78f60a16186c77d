"""The metrics of models, out of their recorders and queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.core.clock import NS_PER_S, NS_PER_US
from headrace.core.load import Load
from headrace.core.telemetry import TritonMetrics
from headrace.core.tensor import ModelSpec
from headrace.observability import metrics_table as table
from headrace.observability.metrics_triton import Row, TritonModels
from headrace.observability.recorder import Recorder
from headrace.observability.totals import PHASES, Totals


class Profile(Protocol):
    """See `headrace.scheduling.latency_table.Profile`."""

    def summary(self) -> Iterable[tuple[int, int, int]]:
        """Rows, expected nanoseconds, and what 95 of 100 batches keep to; a bounded number of sizes."""


class Standing(Protocol):
    """See `headrace.backends.base.Standing`."""

    @property
    def up(self) -> bool:
        """There is a process that serves."""

    @property
    def restarts(self) -> int:
        """How many have died while they served."""


class Batching(Protocol):
    """See `headrace.scheduling.policy.BatchPolicy`."""

    @property
    def objective_ns(self) -> int:
        """How long after its arrival a request should be answered, 0 if nothing is promised."""


class Policy(Protocol):
    """See `headrace.scheduling.policy.HandlePolicy`."""

    @property
    def instances(self) -> int:
        """How many run at the same time."""

    @property
    def batch(self) -> Batching:
        """How requests may be merged."""


class Life(Protocol):
    """Who runs a version; see `headrace.scheduling.handle.ModelHandle`."""

    @property
    def policy(self) -> Policy:
        """How requests are treated."""

    @property
    def alive(self) -> int:
        """Instances that live."""

    @property
    def restarts(self) -> int:
        """Instances that died and were started anew."""

    @property
    def parked(self) -> bool:
        """It is out of memory, and loaded when a request asks for it."""

    @property
    def standing(self) -> Standing | None:
        """How the model's own process fares; None if it has none."""


class Source(Life, Protocol):
    """A loaded model version; see `headrace.scheduling.handle.ModelHandle`."""

    recorder: Recorder
    spec: ModelSpec

    @property
    def profile(self) -> Profile:
        """How long its batches compute."""

    def load(self) -> Load:
        """How busy it is."""


Sources = Callable[[], Iterable[tuple[str, str, Source]]]


class ModelCollector(Collector):
    """Makes the metrics of all loaded models.

    Args:
        sources: gives (model, version, source) of everything loaded.
        triton: which metrics under Triton's names there are.
    """

    def __init__(self, sources: Sources, triton: TritonMetrics) -> None:
        self._sources = sources
        self._triton = TritonModels(triton)

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: the models may change."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        sources = [([model, version], source) for model, version, source in self._sources()]
        totals = [(labels, source.recorder.totals()) for labels, source in sources]
        yield from _latencies(totals)
        yield from _counts(totals)
        yield _batch_sizes(totals)
        yield from _load(sources)
        yield from _lives(sources)
        yield from _processes(sources)
        yield _profiles(sources)
        yield from _engines(sources)
        yield from self._triton.collect(
            [Row(labels, source.recorder, of) for (labels, source), (_, of) in zip(sources, totals, strict=True)]
        )


# Shown before they are counted: what is not there cannot be seen to rise.
_NO_FAILURES = dict.fromkeys(
    (
        "bad_request",
        "cancelled",
        "deadline",
        "model_failed",
        "overloaded",
        "queue_timeout",
        "quota",
        "unavailable",
        "would_miss",
    ),
    0,
)
_Rows = list[tuple[list[str], Totals]]
_Sources = list[tuple[list[str], Source]]


def _latencies(rows: _Rows) -> Iterator[Metric]:
    for phase in PHASES:
        family = table.PHASE_SECONDS[phase].durations()
        for labels, totals in rows:
            family.add(labels, totals.phases[phase])
        yield family


def _counts(rows: _Rows) -> Iterator[Metric]:
    requests, inferred = table.REQUESTS.counter(), table.ROWS.counter()
    failures, batches, busy = table.FAILURES.counter(), table.BATCHES.counter(), table.BUSY.counter()
    for labels, totals in rows:
        requests.add_metric(labels, totals.requests)
        inferred.add_metric(labels, totals.rows)
        busy.add_metric(labels, totals.busy_ns / NS_PER_S)
        for reason, count in sorted({**_NO_FAILURES, **totals.failures}.items()):
            failures.add_metric([*labels, reason], count)
        for reason, count in sorted(totals.reasons.items()):
            batches.add_metric([*labels, reason], count)
    yield from (requests, inferred, failures, batches, busy)


def _batch_sizes(rows: _Rows) -> Metric:
    family = table.BATCH_ROWS.histogram()
    for labels, totals in rows:
        sizes = sorted(totals.sizes.items())
        buckets: list[tuple[str, float]] = []
        for power in range(11):
            bound = 1 << power
            buckets.append((f"{float(bound)}", sum(size.count for value, size in sizes if value <= bound)))
        buckets.append(("+Inf", sum(size.count for _, size in sizes)))
        family.add_metric(labels, buckets, sum(value * size.count for value, size in sizes))
    return family


def _load(sources: _Sources) -> Iterator[Metric]:
    depth, in_flight, pending = table.QUEUE_DEPTH.gauge(), table.IN_FLIGHT.gauge(), table.TRITON_PENDING.gauge()
    wait, drain, capacity = table.PREDICTED_WAIT.gauge(), table.DRAIN.gauge(), table.CAPACITY.gauge()
    objective, late = table.OBJECTIVE.gauge(), table.LATE.counter()
    for labels, source in sources:
        load = source.load()
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
    yield from (depth, in_flight, wait, drain, capacity, objective, late, pending)


def _lives(sources: _Sources) -> Iterator[Metric]:
    alive, wanted, restarts = table.INSTANCES.gauge(), table.INSTANCES_WANTED.gauge(), table.RESTARTS.counter()
    for labels, source in sources:
        alive.add_metric(labels, source.alive)
        wanted.add_metric(labels, 0 if source.parked else source.policy.instances)
        restarts.add_metric(labels, source.restarts)
    yield from (alive, wanted, restarts)


def _processes(sources: _Sources) -> Iterator[Metric]:
    up, restarts = table.PROCESS_UP.gauge(), table.PROCESS_RESTARTS.counter()
    for labels, source in sources:
        standing = source.standing
        if standing is not None:
            up.add_metric(labels, standing.up)
            restarts.add_metric(labels, standing.restarts)
    yield from (up, restarts)


def _profiles(sources: _Sources) -> Metric:
    family = table.PROFILE.gauge()
    for labels, source in sources:
        for size, median_ns, p95_ns in source.profile.summary():
            family.add_metric([*labels, str(size), "0.5"], median_ns / NS_PER_US)
            family.add_metric([*labels, str(size), "0.95"], p95_ns / NS_PER_US)
    return family


def _engines(sources: _Sources) -> Iterator[Metric]:
    info, accuracy = table.ENGINE_INFO.gauge(), table.ENGINE_ACCURACY.gauge()
    for labels, source in sources:
        told = source.spec.parameters
        if "engine.file" not in told:
            continue
        marked = "true" if told["engine.below_accuracy_bar"] else "false"
        info.add_metric([*labels, str(told["engine.precision"]), str(told["engine.file"]), marked], 1)
        for name, value in told.items():
            if name.startswith("engine.") and isinstance(value, float | int) and not isinstance(value, bool):
                accuracy.add_metric([*labels, name.removeprefix("engine.")], value)
    yield from (info, accuracy)
