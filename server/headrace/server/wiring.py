"""Parts of a server behind its sockets: data plane, services, access control, observers, threads, metrics page.

One process has them beside its sockets (`headrace.server.app`). With front-end processes they are the engine process
(`headrace.server.front_ends.engine_process`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import process_time_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from headrace.config.documents import refuse
from headrace.core.access import (
    NETWORK_CURE,
    NETWORK_SCOPES,
    AccessControl,
    Grant,
    OpenAccess,
    Principal,
    QuotaBucket,
)
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.heap import HeapTrimmer
from headrace.core.limits import BodyMemory, Cells, ClientLimits, Limits
from headrace.core.response_bodies import ProcessFigures
from headrace.core.telemetry import Telemetry
from headrace.core.threads import start_pool
from headrace.models.explanation import explain
from headrace.models.overview import ServerOverview
from headrace.models.shared_memory import SharedMemoryRegions
from headrace.models.traffic.router import TrafficRouter
from headrace.observability.access_log import RequestLog, open_stream
from headrace.observability.logs import LogSettings, is_secret, redact
from headrace.observability.metrics import MetricsPage
from headrace.observability.metrics_server import LoopLag, ServerFacts
from headrace.observability.processor import ProcessorMeter
from headrace.observability.tracing import RequestObserver, Spans, Tracer
from headrace.runtimes.cuda.devices import Nvml
from headrace.runtimes.cuda.shared_memory import find_client_memory
from headrace.server.data_plane import DataPlane
from headrace.server.front_ends.counter_array import CounterArrays
from headrace.server.front_ends.process_count import available_cores
from headrace.server.listen import (
    METRICS_CONNECTIONS,
    has_metrics_port,
    is_loopback,
    metrics_application,
    origin_policy,
)
from headrace.server.settings import Settings, header_matcher
from headrace.wire.access.access_control import KeyAccess
from headrace.wire.access.tokens import TokenVerifier
from headrace.wire.http.application import HttpApplication
from headrace.wire.http.origins import OriginPolicy
from headrace.wire.requests.forwarded_headers import ForwardedHeaders
from headrace.wire.requests.load_report import COUNT_CELLS, LoadMeter, LoadReports
from headrace.wire.requests.request_options import RequestOptionsReader
from headrace.wire.requests.services import ControlServices
from headrace.wire.tls import ServerTls

if TYPE_CHECKING:
    from headrace.wire.grpc.server import GrpcServer

logger = logging.getLogger("headrace")

# Threads for metrics, pages and reloads; they start with the server.
_POOL_THREADS = 4
_EXTRA = "pip install '.[otel]' in a checkout of Headrace"


def open_observer(settings: Settings, has_keys: bool = False) -> tuple[Tracer, RequestObserver]:
    """Create the tracer and the observer that protocols report requests to.

    Args:
        settings: settings of the server.
        has_keys: names of clients are those of keys, and no secrets.

    Raises:
        ConfigError: an option has an invalid value, or its file cannot be written.
    """
    telemetry = settings.telemetry
    tracer = Tracer(settings.trace_file, spans=_spans(telemetry), rate=telemetry.trace_rate)
    return tracer, RequestObserver(tracer, _request_log(settings), not has_keys and is_secret(settings.client_header))


def open_keys(settings: Settings, bucket: type[QuotaBucket] = QuotaBucket) -> KeyAccess | None:
    """Create the access control of a server with keys; None for a server without keys.

    Args:
        settings: settings of the server.
        bucket: class of the quotas.

    Raises:
        ConfigError: the keys file or the key set of tokens is invalid.
    """
    tokens = None
    if settings.jwks:
        tokens = TokenVerifier(settings.jwks, settings.jwt_issuer, settings.jwt_audience)
    elif settings.jwt_issuer or settings.jwt_audience:
        raise refuse("--jwt-issuer and --jwt-audience", None, "need --jwks", "name the key set of the issuer")
    if not settings.api_keys_file and tokens is None:
        return None
    path = Path(settings.api_keys_file).expanduser() if settings.api_keys_file else None
    return KeyAccess(path, tokens, bucket)


def options_reader(settings: Settings, access: AccessControl) -> RequestOptionsReader:
    """Create the parser of request options."""
    patterns = settings.http_header_forward_pattern, settings.grpc_header_forward_pattern
    forwarded = [ForwardedHeaders(*header_matcher(pattern)) if pattern else None for pattern in patterns]
    return RequestOptionsReader(settings.client_header, access, settings.orca != "never", *forwarded)


def open_access(settings: Settings) -> OpenAccess:
    """Create the access control of a server without keys: on a network address, callers may not change the server."""
    if settings.insecure_control or is_loopback(settings.host):
        return OpenAccess()
    return OpenAccess(Principal("", Grant(NETWORK_SCOPES, cure=NETWORK_CURE)))


def _request_log(settings: Settings) -> RequestLog:
    telemetry = settings.telemetry
    try:
        stream = open_stream(telemetry.request_log_file)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise refuse(f"--request-log-file {telemetry.request_log_file}", None, reason, "name another file") from error
    text = not telemetry.request_log_file and settings.log_format == "text"
    return RequestLog(telemetry.request_log, stream, text=text)


def _spans(telemetry: Telemetry) -> Spans | None:
    endpoint, redacted = telemetry.otlp_endpoint, redact(telemetry.otlp_endpoint)
    if not endpoint:
        return None
    option = f"--otlp-endpoint {redacted}"
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise refuse(
            option, None, "is not a URL of a receiver", "write http://host:4317, or http://host:4318 over HTTP"
        )
    try:
        from headrace.observability.spans import SpanWriter, otlp_exporter

        return SpanWriter(otlp_exporter(endpoint, telemetry.otlp_protocol), version("headrace"), redacted)
    except ImportError as error:
        raise refuse(option, None, f"needs a package that is not installed ({error.name})", _EXTRA) from error
    except Exception as error:  # the exporter's own variables (OTEL_EXPORTER_OTLP_...) can be wrong in many ways
        cure = "check the OTEL_ environment variables"
        raise refuse(option, None, f"cannot be used: {redact(str(error))}", cure) from error


class ServerLimits(NamedTuple):
    """Limits on the clients of a process, with their counters.

    Attributes:
        bodies: body memory of all protocols.
        http: of the HTTP port.
        grpc: of the gRPC port.
        metrics: of the metrics port; None without one.
    """

    bodies: BodyMemory
    http: ClientLimits
    grpc: ClientLimits
    metrics: ClientLimits | None

    @classmethod
    def create(
        cls, settings: Settings, bodies: BodyMemory, client_limits: Callable[[Limits, str], ClientLimits]
    ) -> Self:
        """Return the limits of a process; `client_limits` makes those of a protocol."""
        limits, metrics = settings.limits, None
        if has_metrics_port(settings):
            # Connections of its own: clients of the HTTP port cannot use them up.
            max_connections = min(METRICS_CONNECTIONS, limits.max_connections)
            metrics = client_limits(replace(limits, max_connections=max_connections), "metrics")
        return cls(bodies, client_limits(limits, "http"), client_limits(limits, "grpc"), metrics)

    @property
    def protocols(self) -> Sequence[ClientLimits]:
        """Limits of each port."""
        return tuple(each for each in (self.http, self.grpc, self.metrics) if each is not None)


class Wiring:
    """Connects the parts of a server that need no socket.

    `open` reads the files that the options name, `start` creates the data plane and the threads, `stop` ends them. An embedded
    server has a data plane already: `open_embedded` and `connect` take their place, and `stop_timers` and `close` that of `stop`.

    Ownership: the event loop.

    Args:
        settings: settings of the server.
        limits: limits on clients.
        model_filter: names of the served models, for each repository that is served in part; None for none.
        counts: cells in which the protocols count requests for the load meter; None for cells of its own.

    Attributes:
        settings: see Args.
        keys: keys of callers; None for a server without keys.
        origins: checks requests of browsers.
        services: what protocols call; exists from `start` on.
        data_plane: registry and models; exists from `start` on.
        traffic: distributes requests over the versions of models; exists from `start` on.
        lag: delay of the event loop.
        processes: returns the figures of each process; None for one process. Set before `start`.
        arrays: counters of all processes; None for one process. Set before `start`.
        load_meter: measures the load of the server; exists from `start` on.
        observer: samples, logs and traces requests; exists from `open` on.
    """

    services: ControlServices
    data_plane: DataPlane
    load_meter: LoadMeter
    traffic: TrafficRouter
    observer: RequestObserver

    def __init__(
        self,
        settings: Settings,
        limits: ServerLimits,
        model_filter: Mapping[Path, frozenset[str]] | None = None,
        counts: Cells | None = None,
    ) -> None:
        self.settings = settings
        self._limits = limits
        self._model_filter = model_filter or {}
        self._counts: Cells = [0] * COUNT_CELLS if counts is None else counts
        self.lag = LoopLag()
        self.processes: Callable[[], Sequence[ProcessFigures]] | None = None
        self.arrays: CounterArrays | None = None
        self._heap_trimmer = HeapTrimmer(_resident_bytes)
        self._processor = ProcessorMeter(available_cores(), self._processor_ns)
        self.keys: KeyAccess | None = None
        self._access: AccessControl = OpenAccess()

    def open(self) -> None:
        """Read keys and open the outputs of requests; raises ConfigError and Unavailable."""
        settings = self.settings
        self.origins = origin_policy(settings, RequestOptionsReader(settings.client_header).names)
        self.keys = open_keys(settings)
        self._access = self.keys or open_access(settings)
        self._tracer, self.observer = open_observer(settings, self.keys is not None)
        _configure_garbage_collector()

    def open_embedded(self, access: AccessControl) -> None:
        """Use the rights of an embedded server, instead of `open`; raises ConfigError."""
        self.origins, self._access = OriginPolicy(), access
        self._tracer, self.observer = open_observer(self.settings)

    def start(self, loop: asyncio.AbstractEventLoop, on_loaded: Callable[[BaseException | None], None]) -> None:
        """Create the data plane and start all threads that requests need later; its reconciler is started by the caller.

        Args:
            loop: event loop of the server.
            on_loaded: called on the loop after the initial load, with the error if it failed as a whole.

        Raises:
            Unavailable: the system starts no further thread.
        """
        self.connect(DataPlane(self.settings, loop, on_loaded, self._model_filter, self._limits.bodies), loop)
        loop.set_default_executor(start_pool(_POOL_THREADS, "headrace-pool"))
        if self.keys is not None:
            self.keys.start(loop)

    def connect(self, data_plane: DataPlane, loop: asyncio.AbstractEventLoop) -> None:
        """Create the services over the models of a data plane, which may have loaded some, and start their threads."""
        self.data_plane = data_plane
        registry, reader = data_plane.registry, options_reader(self.settings, self._access)
        self.traffic = traffic = TrafficRouter(registry, loop, reader.set_routing_headers)
        registry.on_traffic, registry.traffic_report = traffic.publish, traffic.report
        for name in {name for name, _, _ in registry.sources()}:  # published before there was a router
            traffic.publish(name, registry.traffic(name))
        self.services = self._create_services(reader)
        self._overview.start(loop)
        self._processor.start(loop)
        self.services.codec_threads.start()

    def _processor_ns(self) -> int:
        """Return the processor time of all processes of the server."""
        if self.processes is None:
            return process_time_ns()
        return int(sum(each.cpu_s for each in self.processes()) * NS_PER_S)

    def start_timers(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the timers that watch the event loop and the heap."""
        if self.settings.metrics:
            self.lag.start(loop)
        if sys.platform == "linux":
            self._heap_trimmer.start(loop)

    async def stop(self) -> bool:
        """End all threads and close every model; returns False if a backend still computes after the drain timeout."""
        self.stop_timers()
        self._heap_trimmer.stop()
        if self.keys is not None:
            self.keys.stop()
        clean = await asyncio.to_thread(self.data_plane.stop, self.settings.drain_timeout_s)
        await asyncio.to_thread(self.close)
        return clean

    def stop_timers(self) -> None:
        """Stop the timers on the event loop, and end shadow requests."""
        self._overview.stop()
        self._processor.stop()
        self.traffic.close()
        self.lag.stop()

    def close(self) -> None:
        """End the threads of `connect`, after the models are closed; blocks."""
        self.services.codec_threads.close()
        self.observer.close()

    def refuses_load(self, error: BaseException | None) -> bool:
        """Log why the server may not serve after the initial load; returns False if it may.

        Args:
            error: the initial load failed as a whole; None if it did not.
        """
        registry, settings = self.data_plane.registry, self.settings
        failures = registry.failures()
        if isinstance(error, ConfigError):
            logger.error("%s", error)
        elif error is not None:
            logger.error("loading the models failed", exc_info=error)
        substitutes = registry.substitutes()
        empty = [] if error or registry.index() or settings.model_control != "none" else settings.model_repository
        for folder in empty:
            cure = "put NAME/1/model.onnx there, or name the folder above"
            logger.log(logging.ERROR if settings.strict else logging.WARNING, "%s has no models: %s", folder, cure)
        if error is None and not ((failures or substitutes or empty) and settings.strict):
            return False
        if failures and error is None:
            logger.error("--strict: %d of the models cannot be served, the server stops", len(failures))
        for name, number, reason in substitutes if settings.strict else ():
            cure = "write fallback: onnxruntime, or remove KIND_GPU and backend: tensorrt"
            logger.error("--strict: model %s version %s requires a GPU: %s (%s)", name, number, reason, cure)
        return True

    def http_applications(self, tls: ServerTls | None) -> dict[str, tuple[Callable[..., Any], ClientLimits]]:
        """Create application and limits of the port "http", and of "metrics" if /metrics has a port of its own.

        Args:
            tls: of the server; None without TLS.
        """
        limits, page = self._limits, self.metrics_page(tls) if self.settings.metrics else None
        if page is None or limits.metrics is None:
            return {"http": (self.http_application(page), limits.http)}
        scrapes = metrics_application(page.render, self.services.options_reader)
        return {"http": (self.http_application(None), limits.http), "metrics": (scrapes, limits.metrics)}

    def grpc_server(self, tls: ServerTls | None) -> GrpcServer:
        """Create the gRPC server, which does not listen yet; `tls` is that of the server."""
        # Imported only if gRPC is on: the library takes time and memory.
        from headrace.wire.grpc.server import GrpcServer
        from headrace.wire.grpc.service import grpc_methods

        return GrpcServer(grpc_methods(self.services, self.settings.limits.max_body_bytes), self._limits.grpc, tls)

    def http_application(self, page: MetricsPage | None) -> HttpApplication:
        """Create the application of the HTTP port; `page` is None if it has no metrics."""
        return HttpApplication(self.services, self._limits.http, None if page is None else page.render, self.origins)

    def metrics_page(self, tls: ServerTls | None) -> MetricsPage:
        """Create the metrics page; `tls` is that of the server."""
        arrays = self.arrays
        data_plane, protocols = self.data_plane, self._limits.protocols
        client_limits = protocols
        if arrays is not None:
            names = [each.protocol for each in protocols]
            client_limits = arrays.summed_limits(self.settings.limits, names)
        facts = ServerFacts(
            states=data_plane.registry,
            version=version("headrace"),
            lag=self.lag if arrays is None else arrays,
            client_limits=client_limits,
            certificate_expiry_s=None if tls is None else lambda: tls.expiry_s,
            processes=self.processes,
            utilization=lambda: self.load_meter.figures(monotonic_ns()).utilization,
            stores=None if data_plane.stores is None else data_plane.stores.status,
        )
        return MetricsPage(
            data_plane.registry.used_sources,
            data_plane.gpu_model_cache,
            facts,
            Nvml(),
            self.settings.metrics_config,
            data_plane.custom_metrics,
            self.traffic,
        )

    def _create_services(self, reader: RequestOptionsReader) -> ControlServices:
        settings, registry = self.settings, self.data_plane.registry
        stores = self.data_plane.stores
        self._overview = ServerOverview(
            registry,
            settings.model_repository,
            processes=self.processes,
            stores=None if stores is None else stores.status,
        )
        # The CUDA driver is started only if clients may register GPU memory.
        memory = find_client_memory() if settings.allow_client_shm else None
        cuda, pin = (None, None) if memory is None else (memory.open_ipc, memory.pin)
        return ControlServices(
            models=registry,
            repository=self.data_plane.reconciler,
            regions=SharedMemoryRegions(settings.allow_client_shm, cuda, pin=pin),
            traces=self._tracer,
            observer=self.observer,
            logs=LogSettings(logging.getLogger("headrace")),
            overview=self._overview,
            version=version("headrace"),
            extensions=extensions(settings, cuda is not None),
            heartbeat_s=settings.stream_heartbeat_s,
            explain=partial(explain, registry, meter=self._processor),
            name=settings.id,
            options_reader=reader,
            load_reports=self._create_load_reports(),
            traffic=self.traffic,
        )

    def _create_load_reports(self) -> LoadReports:
        arrays = self.arrays
        counts: Cells = self._counts if arrays is None else arrays.own.requests
        every: Cells = counts if arrays is None else arrays.summed_requests()
        self.load_meter = LoadMeter(self.data_plane.registry.used_sources, every)
        return LoadReports(self.settings.orca, self.load_meter.figures, counts)


class Reloads:
    """Runs the reloads of SIGHUP one after the other, on threads: they read files, which may hang.

    Ownership: the event loop.

    Attributes:
        callbacks: each returns what it has reloaded, None if it logs that by itself, and raises an error that says why all stays
            as it was.
        is_silent: successful reloads have no line in the log.
    """

    def __init__(self, is_silent: bool = False) -> None:
        self.callbacks: list[Callable[[], str | None]] = []
        self.is_silent = is_silent
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def start(self) -> None:
        """Run all callbacks, once more if they run already."""
        self._again = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._again:
            self._again = False
            if not self.callbacks and not self.is_silent:
                logger.info("SIGHUP: there are no certificates or keys to reload")
            for reload in self.callbacks:
                try:
                    reloaded = await asyncio.to_thread(reload)
                except (OSError, HeadraceError) as error:
                    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                    logger.error("SIGHUP: nothing is changed, the reload failed: %s", reason)
                except Exception:
                    logger.exception("SIGHUP: nothing is changed, the reload failed")
                else:
                    if reloaded and not self.is_silent:
                        logger.info("SIGHUP: reloaded %s", reloaded)


def _resident_bytes() -> int:
    """Return the resident memory of the process, on Linux."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def extensions(settings: Settings, cuda: bool) -> list[str]:
    """Return the protocol's extensions that are switched on, by Triton's names.

    Args:
        settings: settings of the server.
        cuda: clients can register GPU memory.
    """
    names = ["binary_tensor_data", "classification", "generate", "logging", "model_configuration", "model_repository"]
    names += ["model_repository(unload_dependents)", "parameters", "schedule_policy", "statistics"]
    if settings.allow_client_shm:
        names += ["system_shared_memory"]
        if cuda:
            names += ["cuda_shared_memory"]
    if settings.trace_file or settings.telemetry.otlp_endpoint:
        names += ["trace"]
    return sorted(names)


def _configure_garbage_collector() -> None:
    """Run the garbage collector rarely, and never on objects from startup: requests create no reference cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
