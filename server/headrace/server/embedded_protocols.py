"""Protocols of an embedded `headrace.Server`: the Open Inference Protocol V2 as an ASGI application, and a gRPC port."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from headrace.core.access import NETWORK_SCOPES, Grant, OpenAccess, Principal
from headrace.core.limits import BodyMemory, Cells, ClientLimits
from headrace.server.data_plane import DataPlane
from headrace.server.settings import Settings
from headrace.server.wiring import ServerLimits, Wiring
from headrace.wire.http.application import HttpApplication
from headrace.wire.http.infer_endpoint import Receive, Scope, Send

if TYPE_CHECKING:
    from headrace.wire.grpc.server import GrpcServer

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
        counts: cells in which the protocols count requests for the load of the server.
        loop: its event loop.

    Attributes:
        application: ASGI application of the HTTP routes.
    """

    def __init__(
        self,
        settings: Settings,
        data_plane: DataPlane,
        bodies: BodyMemory,
        counts: Cells,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # The embedding program configures its own logging.
        settings = replace(settings, telemetry=replace(settings.telemetry, request_log="off"))
        http_limits, grpc_limits = (ClientLimits(settings.limits, protocol, bodies) for protocol in ("http", "grpc"))
        self._wiring = wiring = Wiring(settings, ServerLimits(bodies, http_limits, grpc_limits, None), counts=counts)
        wiring.open_embedded(OpenAccess(Principal("", Grant(NETWORK_SCOPES, cure=_CURE))))
        wiring.connect(data_plane, loop)
        wiring.lag.start(loop)
        self.application = MountedApplication(wiring.http_application(wiring.metrics_page(None)))
        self._grpc_servers: list[GrpcServer] = []

    async def listen_grpc(self, host: str, port: int) -> int:
        """Listen for gRPC on one more address; returns the port. Raises OSError if the address is not available."""
        server = self._wiring.grpc_server(None)
        chosen = await server.start(host, port)
        self._grpc_servers.append(server)
        return chosen

    async def drain(self, timeout_s: float) -> None:
        """Close the gRPC ports: refuse new calls, wait for running calls, then end the rest with UNAVAILABLE."""
        servers, self._grpc_servers = self._grpc_servers, []
        await asyncio.gather(*(server.stop(timeout_s) for server in servers))

    def stop_timers(self) -> None:
        """Stop the timers on the event loop, and end shadow requests."""
        self._wiring.stop_timers()

    def close(self) -> None:
        """End the threads, after the models are closed; blocks."""
        self._wiring.close()
