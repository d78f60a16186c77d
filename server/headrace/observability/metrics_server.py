"""Collects the metrics of the server: readiness, model states, limits, the event loop, the process, and GPUs.

The GPU memory of models comes from the ledger, all other values of a GPU from the driver.
"""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns, stepwise
from headrace.core.ledger import CPU, HOST, Ledger
from headrace.core.limits import ClientLimits
from headrace.core.response_bodies import ProcessFigures
from headrace.core.telemetry import GpuReading, LoadCounts, StoreStatus
from headrace.observability import metrics_table as table
from headrace.observability.histograms import FINE_BUCKETS, Counts, Histogram
from headrace.observability.labelled_counter import (
    BUILDS,
    DROPPED,
    ERRORS,
    LOADS,
    STORE_BYTES,
    STORE_SYNCS,
)

_INTERVAL_S = 0.25


class States(Protocol):
    """States of all models; see `headrace.models.registry.Registry`."""

    def states(self) -> Sequence[tuple[str, str, str, bool]]:
        """Return model, version ("" while the versions are unknown), state, and whether it serves but was never used."""

    def ready(self) -> bool:
        """Return True if every model that should be served is ready."""


class LagSource(Protocol):
    """Delays of event loops; see `LoopLag`."""

    def histogram(self) -> Histogram:
        """Return a copy of the delays so far."""


class LoopLag:
    """Measures the delay of a timer on the event loop, four times a second. Its cost is too small to measure.

    `start` and `stop` are called on the event loop, `histogram` on any thread.

    Args:
        clock: returns monotonic nanoseconds.
        cells: int64[CELLS], the sum of the delays in nanoseconds and their number in each fine bucket; None for zeros. Delays
            are added to what is there.
    """

    CELLS: ClassVar[int] = 1 + FINE_BUCKETS

    def __init__(self, clock: Clock = monotonic_ns, cells: Counts | None = None) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cells = np.zeros(self.CELLS, np.int64) if cells is None else cells
        self._histogram = Histogram(self._cells[1:])
        self._histogram.sum_ns = int(self._cells[0])
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to measure."""
        self._due_ns = self._clock() + int(_INTERVAL_S * NS_PER_S)
        self._timer = loop.call_later(_INTERVAL_S, self._observe, loop)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def histogram(self) -> Histogram:
        """Return a copy of the delays so far."""
        copy = Histogram()
        with self._lock:
            copy.add(self._histogram)
        return copy

    def _observe(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._histogram.observe([max(self._clock() - self._due_ns, 0)])
            self._cells[0] = self._histogram.sum_ns
        self.start(loop)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Sources of the metrics of the server.

    Attributes:
        states: of the models.
        version: of Headrace.
        lag: delays of the event loop.
        client_limits: limits on clients and their counters, one for each protocol.
        certificate_expiry_s: returns seconds since 1970, None if they are unknown; None without TLS.
        processes: returns the figures of each process; None for a server of one process.
        utilization: returns the work of the server over what it can do; None if it is not measured.
        stores: returns the state of each repository that mirrors a store; None without any.
    """

    states: States
    version: str
    lag: LagSource
    client_limits: Sequence[ClientLimits] = ()
    certificate_expiry_s: Callable[[], float | None] | None = None
    processes: Callable[[], Sequence[ProcessFigures]] | None = None
    utilization: Callable[[], float] | None = None
    stores: Callable[[], Sequence[StoreStatus]] | None = None


class ServerCollector(table.ScrapeCollector):
    """Collects the metrics of the server."""

    def __init__(self, facts: ServerFacts) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        facts = self._facts
        ready, build, threads = table.gauges("headrace_ready", "headrace_build_info", "headrace_threads")
        ready.add_metric([], facts.states.ready())
        build.add_metric([facts.version, platform.python_version()], 1)
        threads.add_metric([], threading.active_count())
        yield from (ready, build, threads)
        yield from _states(facts.states.states())
        utilization = table.FAMILIES["headrace_server_utilization_ratio"].gauge()
        if facts.utilization is not None:
            utilization.add_metric([], facts.utilization())
        yield utilization
        lag = table.FAMILIES["headrace_event_loop_lag_seconds"].durations()
        lag.add([], facts.lag.histogram())
        yield lag
        yield from _limit_metrics(facts.client_limits)
        expiry = table.FAMILIES["headrace_tls_certificate_expiry_timestamp_seconds"].gauge()
        expiry_s = None if facts.certificate_expiry_s is None else facts.certificate_expiry_s()
        if expiry_s is not None:
            expiry.add_metric([], expiry_s)
        yield expiry
        reachable = table.FAMILIES["headrace_repository_reachable"].gauge()
        for store in () if facts.stores is None else facts.stores():
            reachable.add_metric([store.url], not store.error)
        yield reachable
        yield from _process_metrics([] if facts.processes is None else facts.processes())
        for name, labelled_counter in _LABELLED_COUNTERS.items():
            counter = table.FAMILIES[name].counter()
            for values, count in labelled_counter.items():
                counter.add_metric(values, count)
            yield counter


def _states(states: Sequence[tuple[str, str, str, bool]]) -> Iterator[Metric]:
    """Collect the states and loads of models; of unused ones their state and the failed loads, which alerts watch."""
    yield table.FAMILIES["headrace_model_state"].stream(
        ([model, version, label], label == state)
        for model, version, state, is_unused in states
        for label in ((state,) if is_unused else _STATES)
    )
    unused, used = set[str](), set[str]()
    for model, _, _, is_unused in stepwise(states):
        (unused if is_unused else used).add(model)
    yield table.FAMILIES["headrace_model_loads_total"].stream(
        ([model, result], count)
        for (model, result), count in LOADS.items()
        # The load with which an unused model began to serve is no news; all that follows it is.
        if result == "failed" or count > (result == "loaded") or model not in unused or model in used
    )


def _limit_metrics(client_limits: Sequence[ClientLimits]) -> Iterator[Metric]:
    connections, limits = table.gauges("headrace_connections", "headrace_limit")
    hits = table.FAMILIES["headrace_limit_hits_total"].counter()
    bodies, unread = table.gauges("headrace_body_bytes", "headrace_unread_bytes")
    for each in client_limits:
        for limit, count in each.hits.items():
            hits.add_metric([each.protocol, limit], count)
        if each.connections is not None:
            connections.add_metric([each.protocol], each.connections)
    for each in client_limits[:1]:  # all protocols share these
        bodies.add_metric([], each.bodies.reserved_bytes)
        unread.add_metric([], each.bodies.unread_bytes)
        for limit, value in each.limits.table().items():
            limits.add_metric([limit], value)
    yield from (hits, connections, bodies, unread, limits)


def _process_metrics(processes: Sequence[ProcessFigures]) -> Iterator[Metric]:
    up, memory, connections = table.gauges(
        "headrace_process_up", "headrace_process_resident_memory_bytes", "headrace_process_connections"
    )
    cpu, starts = table.counters("headrace_process_cpu_seconds_total", "headrace_process_starts_total")
    moved = table.FAMILIES["headrace_process_connections_moved_total"].counter()
    for each in processes:
        if each.expected or each.pid:  # a front end that the load does not need is not down
            up.add_metric([each.name], each.pid > 0)
        cpu.add_metric([each.name], each.cpu_s)
        memory.add_metric([each.name], each.memory_bytes)
        starts.add_metric([each.name], each.starts)
        if each.name != "supervisor":
            connections.add_metric([each.name], each.connections)
            moved.add_metric([each.name], each.moved)
    yield from (up, cpu, memory, starts, connections, moved)


# In the order in which a version passes them; see `headrace.models.registry.State`.
_STATES = ("UNKNOWN", "LOADING", "READY", "UNAVAILABLE", "UNLOADING", "UNLOADED")
_LABELLED_COUNTERS = {
    "headrace_errors_total": ERRORS,
    "headrace_engine_builds_total": BUILDS,
    "headrace_repository_syncs_total": STORE_SYNCS,
    "headrace_repository_downloaded_bytes_total": STORE_BYTES,
    "headrace_telemetry_dropped_total": DROPPED,
}


class GpuMemory(Protocol):
    """GPU memory by model; see `headrace.models.gpu_model_cache.GpuModelCache`."""

    ledger: Ledger

    def loads(self) -> Iterable[tuple[str, str, LoadCounts]]:
        """Yield model, version and its load statistics."""


class GpuReader(Protocol):
    """Reads the GPUs, as `headrace.runtimes.cuda.devices.Nvml` does."""

    def readings(self) -> Iterable[GpuReading]:
        """Return a reading of every GPU, none without a driver. Takes some milliseconds."""


class MemoryCollector(table.ScrapeCollector):
    """Collects the metrics of memory that models hold, from the ledger."""

    def __init__(self, memory: GpuMemory) -> None:
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        held, limit = table.gauges("headrace_gpu_memory_bytes", "headrace_gpu_memory_limit_bytes")
        on_host, limits = table.FAMILIES["headrace_host_memory_bytes"].gauge(), self._memory.ledger.limits
        for gpu, model, version, kind, size_bytes in self._memory.ledger.holdings():
            if gpu == CPU:
                on_host.add_metric([model, version], size_bytes)
                continue
            held.add_metric(["host" if gpu == HOST else str(gpu), model, version, kind], size_bytes)
        host_limit, resident = table.gauges("headrace_host_memory_limit_bytes", "headrace_host_resident_versions")
        if CPU in limits:
            host_limit.add_metric([], limits.pop(CPU))
            resident.add_metric([], len(on_host.samples))
        for gpu, size_bytes in sorted(limits.items()):
            limit.add_metric([str(gpu)], size_bytes)
        yield from (held, limit, on_host, host_limit, resident)
        pinned_bytes = self._memory.ledger.reserved_bytes(HOST)
        for pinned in table.gauges("nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"):
            pinned.add_metric([], pinned_bytes)
            yield pinned
        yield from self._moves()

    def _moves(self) -> Iterator[Metric]:
        seconds = table.FAMILIES["headrace_load_seconds"].summary()
        on_demand, evictions = table.counters("headrace_on_demand_loads_total", "headrace_evictions_total")
        last = table.FAMILIES["nv_model_load_duration_secs"].gauge()
        for model, version, loads in self._memory.loads():
            labels = [model, version]
            last.add_metric(labels, loads.last_ns / NS_PER_S)
            seconds.add_metric(labels, loads.count, loads.time_ns / NS_PER_S)
            on_demand.add_metric(labels, loads.on_demand)
            evictions.add_metric(labels, loads.evictions)
        yield from (seconds, on_demand, evictions, last)


class GpuCollector(table.ScrapeCollector):
    """Collects the metrics of GPUs; reads the driver at each scrape."""

    def __init__(self, gpus: GpuReader) -> None:
        self._gpus = gpus
        self._first_j: dict[str, float] = {}  # energy at the first scrape, by UUID

    def collect(self) -> Iterator[Metric]:
        """Yield all families; without a driver they have no series."""
        readings = list(self._gpus.readings())
        for name, read in _PLAIN.items():
            family = table.FAMILIES[f"headrace_gpu_{name}"]
            metric = family.counter() if family.kind == "counter" else family.gauge()
            for reading in readings:
                if (value := getattr(reading, read)) is not None:
                    metric.add_metric([str(reading.gpu)], float(value))
            yield metric
        info = table.FAMILIES["headrace_gpu_info"].gauge()
        ecc = table.FAMILIES["headrace_gpu_ecc_errors_total"].counter()
        clocks, slowed = table.gauges("headrace_gpu_clock_hertz", "headrace_gpu_slowed")
        for reading in readings:
            gpu = str(reading.gpu)
            info.add_metric([gpu, reading.name, reading.uuid, reading.driver], 1)
            for clock, hertz in reading.clocks_hz.items():
                clocks.add_metric([gpu, clock], hertz)
            for kind, count in reading.ecc_errors.items():
                ecc.add_metric([gpu, kind], count)
            for reason, is_slowed in reading.slowed.items():
                slowed.add_metric([gpu, reason], is_slowed)
        yield from (info, clocks, ecc, slowed)
        yield from _triton(readings)
        yield self._energy(readings)

    def _energy(self, readings: list[GpuReading]) -> Metric:
        """Collect energy as Triton counts it: from the start of the server, not of the driver."""
        metric = table.FAMILIES["nv_energy_consumption"].unknown()
        for reading in readings:
            if reading.uuid and reading.energy_j is not None:
                first_j = self._first_j.setdefault(reading.uuid, reading.energy_j)
                metric.add_sample(metric.name, {"gpu_uuid": reading.uuid}, max(reading.energy_j - first_j, 0.0))
        return metric


def _triton(readings: list[GpuReading]) -> Iterator[GaugeMetricFamily]:
    for name, read in _TRITON.items():
        metric = table.FAMILIES[f"nv_{name}"].gauge()
        for reading in readings:
            if reading.uuid and (value := getattr(reading, read)) is not None:
                metric.add_metric([reading.uuid], float(value))
        yield metric


_PLAIN = {
    "up": "up",
    "utilization_ratio": "utilization",
    "device_memory_used_bytes": "memory_used_bytes",
    "device_memory_total_bytes": "memory_total_bytes",
    "power_watts": "power_w",
    "power_limit_watts": "power_limit_w",
    "energy_joules_total": "energy_j",
    "temperature_celsius": "temperature_c",
}
_TRITON = {
    "gpu_utilization": "utilization",
    "gpu_memory_total_bytes": "memory_total_bytes",
    "gpu_memory_used_bytes": "memory_used_bytes",
    "gpu_power_usage": "power_w",
    "gpu_power_limit": "power_limit_w",
}
