"""Protocols of an embedded `headrace.Server`: the Open Inference Protocol V2 as an ASGI application, and a gRPC port."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.metadata import version
from urllib.parse import quote

from headrace.core.access import NETWORK_SCOPES, Grant, OpenAccess, Principal
from headrace.core.clock import monotonic_ns
from headrace.core.limits import BodyMemory, Cells, ClientLimits
from headrace.cuda.devices import Nvml
from headrace.data_plane import DataPlane
from headrace.grpc.methods import GrpcEngine
from headrace.http.application import HttpApplication
from headrace.http.infer_endpoint import Receive, Scope, Send
from headrace.http.origins import OriginPolicy
from headrace.inference.load_report import LoadMeter, LoadReports
from headrace.listen import grpc_engine
from headrace.observability.metrics import MetricsPage
from headrace.observability.metrics_server import LoopLag, ServerFacts
from headrace.repository.overview import ServerOverview
from headrace.settings import Settings
from headrace.traffic.router import TrafficRouter
from headrace.wiring import create_services, open_observer, options_reader

_CURE = "an embedded server lets no caller change its models or settings: change them in the program that embeds it"


class MountedApplication:
    """The HTTP application below the path at which another ASGI server or framework mounts it.

    Args:
        application: handles paths from the root.
    """

    def __init__(self, application: HttpApplication) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; scopes of other types ("lifespan", "websocket") are ignored.

        Args:
            scope: of ASGI; `raw_path` is optional there.
            receive, send: of ASGI.
        """
        if scope["type"] != "http":
            return
        path, root_path = scope["path"], scope.get("root_path", "").rstrip("/")
        if root_path and path.startswith(f"{root_path}/"):
            path = path[len(root_path) :]
        raw_path = scope.get("raw_path") or quote(path).encode()
        await self._application({**scope, "path": path, "raw_path": raw_path, "root_path": ""}, receive, send)


class EmbeddedProtocols:
    """Serves the models of a data plane over HTTP, through another ASGI server, and over gRPC on ports of its own.

    Callers may infer and read. They have no key, so they may not change models or settings.

    Ownership: the event loop of the data plane.

    Args:
        settings: settings of the embedded server.
        data_plane: its models.
        bodies: body memory of all protocols.
        load_meter: measures the load of the server.
        counts: cells in which the protocols count for the meter.
        loop: its event loop.

    Attributes:
        application: ASGI application of the HTTP routes.
    """

    def __init__(
        self,
        settings: Settings,
        data_plane: DataPlane,
        bodies: BodyMemory,
        load_meter: LoadMeter,
        counts: Cells,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # The embedding program configures its own logging.
        settings = replace(settings, telemetry=replace(settings.telemetry, request_log="off"))
        self._settings = settings
        self._data_plane, self._load_meter = data_plane, load_meter
        http_limits = ClientLimits(settings.limits, "http", bodies)
        self._grpc_limits = ClientLimits(settings.limits, "grpc", bodies)
        tracer, self._observer = open_observer(settings)
        reader = options_reader(settings, OpenAccess(Principal("", Grant(NETWORK_SCOPES, cure=_CURE))))
        registry, stores = data_plane.registry, data_plane.stores
        self._traffic = TrafficRouter(registry, loop, reader.set_routing_headers)
        self._overview = ServerOverview(
            registry, settings.model_repository, stores=None if stores is None else stores.status
        )
        reports = LoadReports(settings.orca, load_meter.figures, counts)
        self._services = create_services(
            settings, data_plane, reader, tracer, self._observer, self._overview, reports, self._traffic
        )
        self._lag = LoopLag()
        page = self._metrics_page(http_limits)
        self.application = MountedApplication(HttpApplication(self._services, http_limits, page.render, OriginPolicy()))
        self._engines: list[GrpcEngine] = []
        self._start(loop)

    def _metrics_page(self, http_limits: ClientLimits) -> MetricsPage:
        data_plane, meter = self._data_plane, self._load_meter
        facts = ServerFacts(
            states=data_plane.registry,
            version=version("headrace"),
            lag=self._lag,
            client_limits=(http_limits, self._grpc_limits),
            utilization=lambda: meter.figures(monotonic_ns()).utilization,
            stores=None if data_plane.stores is None else data_plane.stores.status,
        )
        return MetricsPage(
            data_plane.registry.used_sources,
            data_plane.gpu_model_cache,
            facts,
            Nvml(),
            self._settings.metrics_config,
            data_plane.custom_metrics,
            self._traffic,
        )

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        registry, traffic = self._data_plane.registry, self._traffic
        registry.on_traffic, registry.traffic_report = traffic.publish, traffic.report
        for name in {name for name, _, _ in registry.sources()}:  # published before the router was created
            traffic.publish(name, registry.traffic(name))
        self._services.codec_threads.start()
        self._overview.start(loop)
        self._lag.start(loop)

    async def listen_grpc(self, host: str, port: int) -> int:
        """Listen for gRPC on one more address; returns the port. Raises OSError if the address is not available."""
        from headrace.grpc.service import grpc_methods

        methods = grpc_methods(self._services, self._settings.limits.max_body_bytes)
        engine = grpc_engine(self._settings, methods, self._grpc_limits, None)
        chosen = await engine.start(host, port)
        self._engines.append(engine)
        return chosen

    async def drain(self, timeout_s: float) -> None:
        """Close the gRPC ports: refuse new calls, wait for running calls, then end the rest with UNAVAILABLE."""
        engines, self._engines = self._engines, []
        await asyncio.gather(*(engine.stop(timeout_s) for engine in engines))

    def stop_timers(self) -> None:
        """Stop the timers on the event loop, and end shadow requests."""
        self._overview.stop()
        self._traffic.close()
        self._lag.stop()

    def close(self) -> None:
        """End the threads, after the models are closed; blocks."""
        self._services.codec_threads.close()
        self._observer.close()
