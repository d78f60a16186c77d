"""Creates a running server from settings: data plane, front ends, shared memory, tracer, span exporter and request log."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from headrace.accept import bind
from headrace.access.control import KeyAccess
from headrace.access.tokens import TokenVerifier
from headrace.banner import Addresses, describe_access
from headrace.config.documents import refuse
from headrace.core.access import NETWORK_CURE, NETWORK_SCOPES, AccessControl, Grant, OpenAccess, Principal
from headrace.core.errors import ConfigError, HeadraceError, Unavailable
from headrace.core.heap import HeapTrimmer
from headrace.core.limits import BodyMemory, ClientLimits
from headrace.core.telemetry import Telemetry
from headrace.core.threads import start_pool
from headrace.cuda.devices import Nvml
from headrace.cuda.shared_memory import find_client_memory
from headrace.data_plane import DataPlane
from headrace.http.application import HttpApplication
from headrace.inference.request_options import RequestOptionsReader
from headrace.inference.services import Services
from headrace.listen import (
    METRICS_CONNECTIONS,
    GrpcListener,
    UvicornServer,
    format_address,
    grpc_engine,
    is_loopback,
    metrics_application,
    origin_policy,
    raise_file_limit,
    server_tls,
)
from headrace.observability.access_log import RequestLog, open_stream
from headrace.observability.logs import LogSettings, is_secret, redact
from headrace.observability.metrics import MetricsPage
from headrace.observability.metrics_server import LoopLag, ServerFacts
from headrace.observability.output import end_output
from headrace.observability.tracing import RequestObserver, Spans, Tracer
from headrace.repository.overview import ServerOverview
from headrace.repository.reconciler import Reconciler
from headrace.repository.registry import Registry, explain
from headrace.repository.shared_memory import SharedMemoryRegions
from headrace.settings import Settings
from headrace.tls import ServerTls

# Threads for metrics, pages and reloads; they start with the server.
_POOL_THREADS = 4
_EXTRA = "pip install 'headrace[otel]'"


def open_observer(settings: Settings, has_keys: bool = False) -> tuple[Tracer, RequestObserver]:
    """Create the tracer and the observer that front ends report requests to.

    Args:
        settings: settings of the server.
        has_keys: names of clients are those of keys, and no secrets.

    Raises:
        ConfigError: an option has an invalid value, or its file cannot be written.
    """
    telemetry = settings.telemetry
    tracer = Tracer(settings.trace_file, spans=_spans(telemetry), rate=telemetry.trace_rate)
    return tracer, RequestObserver(tracer, _request_log(settings), not has_keys and is_secret(settings.client_header))


def open_keys(settings: Settings) -> KeyAccess | None:
    """Create the access control of a server with keys; None for a server without keys.

    Args:
        settings: settings of the server.

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
    return KeyAccess(Path(settings.api_keys_file).expanduser() if settings.api_keys_file else None, tokens)


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
    text = not telemetry.request_log_file and settings.log_format == "text" and sys.stderr.isatty()
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


logger = logging.getLogger("headrace")


class HeadraceServer:
    """One server process: an event loop with the front ends, a control thread and the models' instances.

    Args:
        settings: settings of the server.
        announce: called on the event loop with the addresses and the registry after the initial load.
        model_filter: names of the served models, for each repository that is served in part.

    Attributes:
        reload_callbacks: called on SIGHUP, on a thread. Each returns what it has reloaded, None if it logs that by itself, and
            raises an error that says why all stays as it was.
    """

    def __init__(
        self,
        settings: Settings,
        announce: Callable[[Addresses, Registry], None],
        model_filter: Mapping[Path, frozenset[str]] | None = None,
    ) -> None:
        limits = settings.limits
        limits = replace(limits, max_connections=raise_file_limit(limits.max_connections))
        self._settings = settings = replace(settings, limits=limits)
        self._announce = announce
        self._model_filter = model_filter or {}
        self._servers: list[UvicornServer] = []
        self._grpc: GrpcListener | None = None
        self._lag = LoopLag()
        self._heap_trimmer = HeapTrimmer(_resident_bytes)
        self._bodies = bodies = BodyMemory(limits)
        self._http_limits = ClientLimits(limits, "http", bodies)
        self._grpc_limits = ClientLimits(limits, "grpc", bodies)
        self._has_metrics_port = settings.metrics_port is not None and settings.metrics_port != settings.http_port
        # The metrics port has connections of its own: clients of the HTTP port cannot use them up.
        metrics_limits = replace(limits, max_connections=min(METRICS_CONNECTIONS, limits.max_connections))
        self._metrics_limits = ClientLimits(metrics_limits, "metrics", bodies)
        self._keys: KeyAccess | None = None
        self._access: AccessControl = OpenAccess()
        self._exit_status = 0
        self.reload_callbacks: list[Callable[[], str | None]] = []
        self._reloading: asyncio.Task[None] | None = None
        self._reload_again = False

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM; returns the exit status."""
        try:
            tls = server_tls(self._settings)
            self._origins = origin_policy(self._settings, RequestOptionsReader(self._settings.client_header).names)
            self._keys = open_keys(self._settings)
            self._access = self._keys or open_access(self._settings)
            self._tracer, self._observer = open_observer(self._settings, self._keys is not None)
        except (ConfigError, Unavailable) as error:
            logger.error("%s", error)
            return 1
        _configure_garbage_collector()
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        try:
            return runner.run(self._serve(tls))
        except Unavailable as error:
            logger.error("%s", error)
            return 1
        finally:
            with suppress(RuntimeError):  # asyncio starts a thread to end its pool, and the system may start no more
                runner.close()

    async def _serve(self, tls: ServerTls | None) -> int:
        settings, loop = self._settings, asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        if tls is not None:
            self.reload_callbacks.append(tls.reload)
        self._data_plane = DataPlane(settings, loop, self._on_loaded, self._model_filter, self._bodies)
        self._registry, reconciler = self._data_plane.registry, self._data_plane.reconciler
        services = self._services(reconciler)
        self._start_threads(services, loop)
        try:
            sockets = self._listen(services, tls)
            port = await self._listen_grpc(services, tls)
        except OSError as error:
            cure = "choose another --host, --http-port, --grpc-port or --metrics-port"
            logger.error("cannot listen: %s (%s)", error.strerror or error, cure)
            return 1
        urls = [f"{'https' if tls else 'http'}://{format_address(*sock.getsockname()[:2])}" for sock in sockets]
        # The last URL is that of the metrics, which have their own port or that of HTTP.
        self._addresses = Addresses(
            urls[0],
            format_address(settings.host, port) if self._grpc else "",
            f"{urls[-1]}/metrics",
            describe_access(settings, is_loopback(settings.host)),
            self._keys is not None,
        )
        try:
            reconciler.start()
        except Unavailable:
            if self._grpc is not None:
                self._grpc.stop(now=True)
                await self._grpc.serve()
            raise
        if settings.metrics:
            self._lag.start(loop)
        if sys.platform == "linux":
            self._heap_trimmer.start(loop)
        serving = [server.serve([sock]) for server, sock in zip(self._servers, sockets, strict=True)]
        if self._grpc is not None:
            serving.append(self._grpc.serve())
        try:
            await asyncio.gather(*serving)
        finally:
            self._overview.stop()
            self._lag.stop()
            self._heap_trimmer.stop()
            if self._keys is not None:
                self._keys.stop()
            clean = await asyncio.to_thread(self._data_plane.stop, settings.drain_timeout_s)
            await asyncio.to_thread(services.codec_threads.close)
            await asyncio.to_thread(self._observer.close)
        if not clean:
            # A backend still computes on one of the server's threads: an orderly exit would unload its library during the
            # computation.
            logging.shutdown()
            end_output()
            os._exit(1)
        return self._exit_status

    def _start_threads(self, services: Services, loop: asyncio.AbstractEventLoop) -> None:
        """Start all threads that requests need later; raises Unavailable."""
        self._overview.start(loop)
        loop.set_default_executor(start_pool(_POOL_THREADS, "headrace-pool"))
        services.codec_threads.start()
        if self._keys is not None:
            self._keys.start(loop)
            self.reload_callbacks.append(self._keys.reload)

    def _services(self, reconciler: Reconciler) -> Services:
        settings = self._settings
        # The CUDA driver is started only if clients may register GPU memory.
        memory = find_client_memory() if settings.allow_client_shm else None
        cuda, pin = (None, None) if memory is None else (memory.open_ipc, memory.pin)
        self._overview = ServerOverview(self._registry, settings.model_repository)
        return Services(
            models=self._registry,
            repository=reconciler,
            regions=SharedMemoryRegions(settings.allow_client_shm, cuda, pin=pin),
            traces=self._tracer,
            observer=self._observer,
            logs=LogSettings(logging.getLogger("headrace")),
            overview=self._overview,
            version=version("headrace"),
            extensions=extensions(settings, cuda is not None),
            explain=partial(explain, self._registry),
            name=settings.id,
            options_reader=RequestOptionsReader(settings.client_header, self._access),
        )

    def _listen(self, services: Services, tls: ServerTls | None) -> list[socket.socket]:
        settings = self._settings
        page = self._metrics(tls).render if settings.metrics else None
        application = HttpApplication(
            services, self._http_limits, None if self._has_metrics_port else page, self._origins
        )
        sockets = [bind(settings.host, settings.http_port)]
        self._servers.append(UvicornServer(application, settings, self._http_limits, tls))
        if self._has_metrics_port and page is not None and settings.metrics_port is not None:
            sockets.append(bind(settings.host, settings.metrics_port))
            self._servers.append(
                UvicornServer(metrics_application(page, services.options_reader), settings, self._metrics_limits, tls)
            )
        return sockets

    def _metrics(self, tls: ServerTls | None) -> MetricsPage:
        facts = ServerFacts(
            states=self._registry,
            version=version("headrace"),
            lag=self._lag,
            client_limits=(
                self._http_limits,
                self._grpc_limits,
                *([self._metrics_limits] if self._has_metrics_port else []),
            ),
            certificate_expiry_s=None if tls is None else lambda: tls.expiry_s,
        )
        return MetricsPage(
            self._registry.sources,
            self._data_plane.gpu_model_cache,
            facts,
            Nvml(),
            self._settings.metrics_config,
            self._data_plane.custom_metrics,
        )

    async def _listen_grpc(self, services: Services, tls: ServerTls | None) -> int:
        settings = self._settings
        if not settings.grpc:
            return 0
        # Imported only if gRPC is on: the library takes time and memory.
        from headrace.grpc.service import grpc_methods

        methods = grpc_methods(services, settings.limits.max_body_bytes)
        engine = grpc_engine(settings, methods, self._grpc_limits, tls)
        port = await engine.start(settings.host, settings.grpc_port)
        self._grpc = GrpcListener(engine, settings.drain_timeout_s)
        return port

    def _on_loaded(self, error: BaseException | None) -> None:
        failures = self._registry.failures()
        if isinstance(error, ConfigError):
            logger.error("%s", error)
        elif error is not None:
            logger.error("loading the models failed", exc_info=error)
        substitutes = self._registry.substitutes()
        if error is not None or ((failures or substitutes) and self._settings.strict):
            if failures and error is None:
                logger.error("--strict: %d of the models cannot be served, the server stops", len(failures))
            for name, number, reason in substitutes if self._settings.strict else ():
                cure = "write fallback: onnxruntime, or remove KIND_GPU and backend: tensorrt"
                logger.error("--strict: model %s version %s requires a GPU: %s (%s)", name, number, reason, cure)
            self._exit_status = 1
            self._stop()
            return
        self._announce(self._addresses, self._registry)

    def _hang_up(self) -> None:
        """SIGHUP: reload certificates and keys. A server whose terminal is gone goes on."""
        self._reload_again = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        while self._reload_again:
            self._reload_again = False
            if not self.reload_callbacks:
                logger.info("SIGHUP: there are no certificates or keys to reload")
            for reload in self.reload_callbacks:
                try:
                    reloaded = await asyncio.to_thread(reload)  # reads files, which may hang
                except (OSError, HeadraceError) as error:
                    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                    logger.error("SIGHUP: nothing is changed, the reload failed: %s", reason)
                except Exception:
                    logger.exception("SIGHUP: nothing is changed, the reload failed")
                else:
                    if reloaded:
                        logger.info("SIGHUP: reloaded %s", reloaded)

    def _interrupt(self) -> None:
        # Only a second Ctrl-C aborts: supervisors repeat SIGTERM.
        if self._servers and self._servers[0].should_exit:
            logger.warning("Ctrl-C again: exiting without waiting for requests in flight")
            for server in self._servers:
                server.force_exit = True
            if self._grpc is not None:
                self._grpc.stop(now=True)
        self._stop()

    def _stop(self) -> None:
        self._registry.set_complete(False)
        for server in self._servers:
            server.should_exit = True
        if self._grpc is not None:
            self._grpc.stop()


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
    names = ["binary_tensor_data", "classification", "logging", "model_configuration", "model_repository"]
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
