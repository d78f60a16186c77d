"""The engine process: data plane, applications and gRPC methods without sockets; front ends connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import uvloop

from headrace.banner import Addresses, announce, describe_access, log_announcement
from headrace.core.errors import ConfigError, Unavailable
from headrace.core.limits import BodyMemory, ClientLimits
from headrace.front_ends.channel import Start, SupervisorChannel, close_all, repository_filter
from headrace.front_ends.exchanges import FrontEndPeer
from headrace.front_ends.meeting import Answer, Greeting, Listener, answer
from headrace.grpc.methods import Methods
from headrace.listen import METRICS_CONNECTIONS, has_metrics_port, is_loopback, metrics_application, server_tls
from headrace.observability.output import end_output
from headrace.tls import ServerTls
from headrace.wiring import Reloads, ServerLimits, Wiring

logger = logging.getLogger("headrace")


class EngineProcess:
    """Loads the models and answers the front ends until the supervisor sends "stop", or ends.

    Ownership: the event loop.

    Args:
        start: first message of the supervisor.
        sock: channel to the supervisor.
    """

    def __init__(self, start: Start, sock: socket.socket) -> None:
        self._start = start
        self._socket = sock
        self._settings = settings = start.settings
        limits = settings.limits
        bodies = BodyMemory(limits)
        metrics_limits = replace(limits, max_connections=min(METRICS_CONNECTIONS, limits.max_connections))
        self._limits = ServerLimits(
            bodies,
            ClientLimits(limits, "http", bodies),
            ClientLimits(limits, "grpc", bodies),
            ClientLimits(metrics_limits, "metrics", bodies) if has_metrics_port(settings) else None,
        )
        self._wiring = Wiring(settings, self._limits, repository_filter(start))
        self._reloads = Reloads()
        self._peers: dict[int, FrontEndPeer] = {}
        self._methods: Methods | None = None
        self._exit_status = 0

    def run(self) -> int:
        """Serve until the supervisor sends "stop"; returns the exit status."""
        try:
            tls = server_tls(self._settings)
            self._wiring.open()
        except (ConfigError, Unavailable) as error:
            logger.error("%s", error)
            return 1
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        try:
            return runner.run(self._serve(tls))
        except Unavailable as error:
            logger.error("%s", error)
            return 1
        finally:
            with contextlib.suppress(RuntimeError):
                runner.close()

    async def _serve(self, tls: ServerTls | None) -> int:
        wiring, loop = self._wiring, asyncio.get_running_loop()
        self._ending = asyncio.Event()
        if tls is not None:
            self._reloads.callbacks.append(tls.reload)
        wiring.start(loop, self._on_loaded)
        if wiring.keys is not None:
            self._reloads.callbacks.append(wiring.keys.reload)
        self._applications = self._create_applications(tls)
        if self._settings.grpc:
            from headrace.grpc.service import grpc_methods

            self._methods = grpc_methods(wiring.services, self._settings.limits.max_body_bytes)
        self._channel = SupervisorChannel(self._socket, self._on_message, self._on_orphaned)
        wiring.data_plane.reconciler.start()
        wiring.start_timers(loop)
        listener = Listener(socket.socket(fileno=self._start.listener), self._start.token, self._on_greeting)
        self._channel.send("ready")
        try:
            await self._ending.wait()
        finally:
            listener.close()
            for peer in list(self._peers.values()):
                peer.cancel()
                peer.stream.close()
            clean = await wiring.stop()
        if not clean:
            # See `HeadraceServer`.
            logging.shutdown()
            end_output()
            os._exit(1)
        return self._exit_status

    def _create_applications(self, tls: ServerTls | None) -> Mapping[str, Callable[..., Any]]:
        settings, wiring = self._settings, self._wiring
        page = wiring.metrics_page(tls) if settings.metrics else None
        applications: dict[str, Callable[..., Any]] = {
            "http": wiring.http_application(None if has_metrics_port(settings) else page)
        }
        if page is not None and has_metrics_port(settings):
            applications["metrics"] = metrics_application(page.render, wiring.services.options_reader)
        return applications

    # --- Front ends ---------------------------------------------------------------------------------------------------

    def _on_greeting(self, greeting: Greeting) -> None:
        """Open a stream of a front end."""
        if greeting.hello.role != "control":
            close_all(greeting.descriptors)
            greeting.sock.close()
            return
        close_all(greeting.descriptors)
        asyncio.get_running_loop().create_task(self._open_control(greeting))

    async def _open_control(self, greeting: Greeting) -> None:
        methods, number = self._methods, greeting.hello.number
        limits = self._limits
        peer = FrontEndPeer(
            self._applications, methods, limits.http, limits.grpc, partial(self._on_peer_closed, number)
        )
        facts = Answer(os.getpid())
        if methods is not None:
            facts = Answer(os.getpid(), list(methods.unary), list(methods.streams), list(methods.open_paths))
        try:
            answer(greeting.sock, facts)
        except OSError:  # the front end has ended
            greeting.sock.close()
            return
        await asyncio.get_running_loop().connect_accepted_socket(lambda: peer.stream, greeting.sock)
        self._peers[number] = peer

    def _on_peer_closed(self, number: int, peer: FrontEndPeer) -> None:
        if self._peers.get(number) is peer:
            del self._peers[number]

    # --- Supervisor ---------------------------------------------------------------------------------------------------

    def _on_message(self, name: str, content: Any, descriptors: Sequence[int]) -> None:
        close_all(descriptors)
        registry = self._wiring.data_plane.registry
        if name == "ping":
            self._channel.send("pong", content)
        elif name == "announce":
            self._announce()
        elif name == "reload":
            self._reloads.start()
        elif name == "drain":  # front ends still pass on the requests in flight
            registry.set_complete(False)
        elif name == "stop":
            registry.set_complete(False)
            self._ending.set()

    def _on_orphaned(self) -> None:
        """The supervisor has ended: so does this process."""
        os._exit(1)

    def _on_loaded(self, error: BaseException | None) -> None:
        if self._wiring.refuses_load(error):
            self._exit_status = 1
            self._wiring.data_plane.registry.set_complete(False)
            self._channel.send("refused")
            return
        self._channel.send("loaded")

    def _announce(self) -> None:
        settings, ports = self._settings, self._start.ports
        access = describe_access(settings, is_loopback(settings.host))
        addresses = Addresses(ports.url, ports.grpc, ports.metrics, access, self._wiring.keys is not None)
        if settings.log_format == "json":
            log_announcement(addresses, self._wiring.data_plane.registry)
        else:
            announce(addresses, self._wiring.data_plane.registry, self._start.first_model)
