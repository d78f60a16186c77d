"""A server in one process: sockets, protocols and the data plane on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.core.errors import Unavailable
from headrace.core.limits import BodyMemory, ClientLimits
from headrace.models.registry import Registry
from headrace.observability.output import end_output
from headrace.server import listen
from headrace.server.banner import Addresses, describe_access, describe_processes
from headrace.server.settings import Settings
from headrace.server.wiring import Reloads, ServerLimits, Wiring
from headrace.wire.accept import bind
from headrace.wire.tls import ServerTls

logger = logging.getLogger("headrace")


class HeadraceServer:
    """One server process: an event loop with the protocols, a control thread and the models' instances.

    Args:
        settings: settings of the server.
        announce: called on the event loop with the addresses and the registry after the initial load.
        model_filter: names of the served models, for each repository that is served in part.

    Attributes:
        reloads: of SIGHUP.
    """

    def __init__(
        self,
        settings: Settings,
        announce: Callable[[Addresses, Registry], None],
        model_filter: Mapping[Path, frozenset[str]] | None = None,
    ) -> None:
        limits = settings.limits
        limits = replace(limits, max_connections=listen.raise_file_limit(limits.max_connections))
        self._settings = settings = replace(settings, limits=limits)
        self._announce = announce
        self._servers: list[listen.UvicornServer] = []
        self._grpc: listen.GrpcListener | None = None
        bodies = BodyMemory(limits)
        client_limits = ServerLimits.create(settings, bodies, partial(ClientLimits, bodies=bodies))
        self._wiring = Wiring(settings, client_limits, model_filter or {})
        self._exit_status = 0
        self.reloads = Reloads()

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM; returns the exit status."""
        return listen.run_server(self._settings, self._wiring.open, self._serve)

    async def _serve(self, tls: ServerTls | None) -> int:
        settings, wiring, loop = self._settings, self._wiring, asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGHUP, self.reloads.start)
        if tls is not None:
            self.reloads.callbacks.append(tls.reload)
        wiring.start(loop, self._on_loaded)
        if wiring.keys is not None:
            self.reloads.callbacks.append(wiring.keys.reload)
        try:
            sockets = self._listen(tls)
            port = await self._listen_grpc(tls)
        except OSError as error:
            cure = "choose another --host, --http-port, --grpc-port or --metrics-port"
            logger.error("cannot listen: %s (%s)", error.strerror or error, cure)
            return 1
        urls = [f"{'https' if tls else 'http'}://{listen.format_address(*sock.getsockname()[:2])}" for sock in sockets]
        # The last URL is that of the metrics, which have their own port or that of HTTP.
        self._addresses = Addresses(
            urls[0],
            listen.format_address(settings.host, port) if self._grpc else "",
            f"{urls[-1]}/metrics",
            describe_access(settings, listen.is_loopback(settings.host)),
            wiring.keys is not None,
            describe_processes(settings),
        )
        try:
            wiring.data_plane.reconciler.start()
        except Unavailable:
            if self._grpc is not None:
                self._grpc.stop(now=True)
                await self._grpc.serve()
            raise
        wiring.start_timers(loop)
        serving = [server.serve([sock]) for server, sock in zip(self._servers, sockets, strict=True)]
        if self._grpc is not None:
            serving.append(self._grpc.serve())
        try:
            await asyncio.gather(*serving)
        finally:
            clean = await wiring.stop()
        if not clean:
            # A backend still computes on one of the server's threads: an orderly exit would unload its library during the
            # computation.
            logging.shutdown()
            end_output()
            os._exit(1)
        return self._exit_status

    def _listen(self, tls: ServerTls | None) -> list[socket.socket]:
        settings, sockets = self._settings, []
        ports = {"http": settings.http_port, "metrics": settings.metrics_port or 0}
        for port, (application, limits) in self._wiring.http_applications(tls).items():
            sockets.append(bind(settings.host, ports[port]))
            self._servers.append(listen.UvicornServer(application, settings, limits, tls))
        return sockets

    async def _listen_grpc(self, tls: ServerTls | None) -> int:
        settings = self._settings
        if not settings.grpc:
            return 0
        server = self._wiring.grpc_server(tls)
        port = await server.start(settings.host, settings.grpc_port)
        self._grpc = listen.GrpcListener(server, settings.drain_timeout_s)
        return port

    def _on_loaded(self, error: BaseException | None) -> None:
        if self._wiring.refuses_load(error):
            self._exit_status = 1
            self._stop()
            return
        self._announce(self._addresses, self._wiring.data_plane.registry)

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
        self._wiring.data_plane.drain()
        for server in self._servers:
            server.should_exit = True
        if self._grpc is not None:
            self._grpc.stop()
