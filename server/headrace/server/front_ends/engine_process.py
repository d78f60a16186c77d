"""The engine process: data plane, applications and gRPC methods. Front ends connect to it; with `auto` clients do, too."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from headrace.core.limits import ClientLimits
from headrace.models.registry import Registry
from headrace.models.shared_memory import Pinned
from headrace.observability.counters import Recorder
from headrace.observability.output import end_output
from headrace.runtimes.cuda.driver import has_lost_all
from headrace.runtimes.cuda.shared_memory import ClientMemory, find_client_memory
from headrace.server.banner import Addresses, announce, describe_access, describe_processes, log_announcement
from headrace.server.front_ends.access_records import RecordSink, record_needs
from headrace.server.front_ends.channel import Start, close_all, repository_filter
from headrace.server.front_ends.child_program import ChildProgram
from headrace.server.front_ends.control_state import ControlState
from headrace.server.front_ends.front_end_requests import FrontEndRequests
from headrace.server.front_ends.handshake import EngineProcessFacts, Greeting, Listener, answer
from headrace.server.front_ends.passed_requests import FrontEndPeer, ProxiedGrpcServer, ProxiedHttpServer
from headrace.server.front_ends.passed_servers import PassedHttpServer
from headrace.server.front_ends.process_figures import ServerProcesses
from headrace.server.front_ends.shared_page import PageWriter, SharedPage
from headrace.server.front_ends.shared_state import TableSync
from headrace.server.listen import is_loopback, run_server, uvicorn_config
from headrace.server.wiring import Wiring
from headrace.wire.grpc.methods import Methods
from headrace.wire.grpc.server import GrpcServer
from headrace.wire.http.infer_endpoint import Receive, Scope, Send
from headrace.wire.tls import ServerTls

logger = logging.getLogger("headrace")

Result = TypeVar("Result")
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_FLUSH_S = 0.5
# The front ends close idle connections sooner.
_KEEP_ALIVE_S = 3600.0
# Ends of the paths of reports with counts of requests.
_REPORTS = ("/metrics", "/stats", "/status", "/explain", "/ModelStatistics")
# Ends of the paths that change regions and settings; loads and traffic have callbacks, as not only requests change them.
_CHANGES = ("register", "Register", "/logging", "/LogSettings", "/trace/setting", "/TraceSetting")


class EngineProcess(ChildProgram):
    """Loads the models and answers the front ends until the supervisor sends "stop", or ends.

    Ownership: the event loop.

    Args:
        start: first message of the supervisor.
        sock: channel to the supervisor.
    """

    def __init__(self, start: Start, sock: socket.socket) -> None:
        super().__init__(start, sock, is_front_end=False)
        self._wiring = Wiring(self._settings, self._limits, repository_filter(start))
        self._peers: dict[int, FrontEndPeer] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._methods: Methods | None = None
        self._grpc: ProxiedGrpcServer | None = None
        self._memory: ClientMemory | None = None  # pins arenas; created for the first model on a GPU
        self._exit_status = 0

    def run(self) -> int:
        """Serve until the supervisor sends "stop"; returns the exit status."""
        return run_server(self._settings, self._wiring.open, self._serve)

    async def _serve(self, tls: ServerTls | None) -> int:
        wiring, loop = self._wiring, asyncio.get_running_loop()
        self._ending = asyncio.Event()
        if tls is not None:
            self._reloads.callbacks.append(tls.reload)
        wiring.lag, wiring.arrays = self._arrays.loop_lag(), self._arrays
        wiring.processes = ServerProcesses(self._arrays.arrays, self._start.parent).figures
        wiring.start(loop, self._on_loaded)
        registry = wiring.data_plane.registry
        self._page = SharedPage.create(epoch=self._arrays.own.starts)
        figures = None if self._settings.orca == "never" else wiring.load_meter.figures
        self._writer = PageWriter(self._page, loop, self._arrays.arrays, server_figures=figures)
        charge = (lambda _name: None) if wiring.keys is None else wiring.keys.charge
        regions, writer = wiring.services.regions, self._writer
        self._requests = FrontEndRequests(registry, writer.touch, self._pin, regions, charge, writer.answered)
        self._records = RecordSink(wiring.observer, partial(_recorder, registry))
        self._log_settings = wiring.services.logs.settings()
        self._update_settings()
        wiring.observer.on_change(self._update_settings)
        wiring.services.access.on_change(lambda: self._broadcast("keys", None))
        self._tables = TableSync(loop, registry, self._requests, self._writer, self._peers)
        self._control_state = ControlState(self._start.control_state, wiring)
        wiring.data_plane.reconciler.on_requested = self._control_state.save
        registry.on_published = self._on_published
        if wiring.keys is not None:
            self._reloads.callbacks.append(wiring.keys.reload)
        applications = {
            port: (self._application(application), limits)
            for port, (application, limits) in wiring.http_applications(tls).items()
        }
        self._http = self._create_http(applications)
        if self._settings.grpc:
            self._methods = self._create_methods()
            self._grpc = ProxiedGrpcServer(self._methods, self._limits.grpc)
        self._open_channel()
        wiring.data_plane.reconciler.start()
        wiring.start_timers(loop)
        listener = Listener(socket.socket(fileno=self._start.listener), self._start.token, self._on_greeting)
        if self._start.sockets:
            await self._open_servers(applications, tls)
        self._channel.send("ready")
        try:
            await self._ending.wait()
            await self._servers.wait()
        finally:
            listener.close()
            for peer in list(self._peers.values()):
                peer.close()
            self._writer.close()
            clean = await wiring.stop()
        if not clean:
            # See `HeadraceServer`.
            logging.shutdown()
            end_output()
            os._exit(1)
        return self._exit_status

    def _pin(
        self, descriptor: int, start: int, size_bytes: int, device: int, done: Callable[[Pinned | None], None]
    ) -> None:
        """Pin the arena of a front end; see `headrace.models.shared_memory.Pin`."""
        if self._memory is None:
            self._memory = find_client_memory()
        if self._memory is None:
            done(None)
        else:
            self._memory.pin(descriptor, start, size_bytes, device, done)

    def _create_http(
        self, applications: Mapping[str, tuple[Application, ClientLimits]]
    ) -> dict[str, ProxiedHttpServer]:
        """Create the servers of what front ends pass on for the ports "http" and "metrics"."""
        settings = replace(self._settings, keep_alive_timeout_s=_KEEP_ALIVE_S)
        return {
            port: ProxiedHttpServer(uvicorn_config(application, settings), limits)
            for port, (application, limits) in applications.items()
        }

    def _create_methods(self) -> Methods:
        from headrace.wire.grpc.service import grpc_methods

        methods = grpc_methods(self._wiring.services, self._settings.limits.max_body_bytes)
        unary = {path: partial(self._run, path, method) for path, method in methods.unary.items()}
        return replace(methods, unary=unary)

    async def _open_servers(
        self, applications: Mapping[str, tuple[Application, ClientLimits]], tls: ServerTls | None
    ) -> None:
        """Serve clients that are connected to this process."""
        http = {
            port: PassedHttpServer(application, self._settings, limits, tls)
            for port, (application, limits) in applications.items()
        }
        grpc = None if self._methods is None else GrpcServer(self._methods, self._limits.grpc, tls)
        await self._servers.open(http, grpc, self._start.sockets)
        self._servers.count_busy()

    def _application(self, application: Callable[..., Any]) -> Application:
        """Return an application that reports the counts of all front ends, and passes settings on that it has changed."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            await self._run(scope["path"], application, scope, receive, send)

        return run

    async def _run(self, path: str, method: Callable[..., Awaitable[Result]], *args: object) -> Result:
        """Run a gRPC method or an application for a request of `path`."""
        if path.endswith(_REPORTS):
            await self._flush_counts()
        try:
            return await method(*args)
        finally:
            self._update_settings()
            if path.endswith(_CHANGES):
                self._control_state.save()

    # --- Front ends ---------------------------------------------------------------------------------------------------

    def _on_greeting(self, greeting: Greeting) -> None:
        """Open the stream of a front end, or serve a connection that it has opened for a client."""
        opens, peer = self._open_stream, self._peers.get(greeting.hello.number)
        if greeting.hello.role != "stream":
            close_all(greeting.descriptors)
            if peer is None:  # the front end has ended
                greeting.sock.close()
                return
            opens = peer.serve
        task = asyncio.get_running_loop().create_task(opens(greeting))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_stream(self, greeting: Greeting) -> None:
        """Open the stream of a front end, and send it the table."""
        number, descriptors, methods = greeting.hello.number, greeting.descriptors, self._methods
        facts = EngineProcessFacts()
        if methods is not None:
            facts = EngineProcessFacts(list(methods.unary), list(methods.streams), list(methods.open_paths))
        try:
            answer(greeting.sock, facts, (self._page.fd,))
        except OSError:  # the front end has ended
            close_all(descriptors)
            greeting.sock.close()
            return
        peer = FrontEndPeer(self._http, self._grpc, self._records.receive)
        arena, on_closed = descriptors[0] if descriptors else None, partial(self._on_peer_closed, number, peer)
        stream = peer.stream = self._requests.attach(number, arena, peer.on_notice, on_closed)
        self._peers[number] = peer  # before its next connection is accepted
        await stream.open(greeting.sock)
        stream.send("logs", self._log_settings)
        await self._tables.send(peer)

    def _on_published(self) -> None:
        """Save changes of the traffic, and update the front ends; on any thread."""
        self._control_state.save()
        self._tables.publish()

    def _update_settings(self) -> None:
        """Pass settings that a request has changed to the front ends."""
        self._page.set_record_needs(record_needs(self._wiring.observer))
        settings = self._wiring.services.logs.settings()
        if settings != self._log_settings:
            self._log_settings = settings
            self._broadcast("logs", settings)

    async def _flush_counts(self) -> None:
        """Wait until all front ends have sent their counts; a hanging one delays a report by `_FLUSH_S` only."""
        waiting = [asyncio.ensure_future(peer.stream.notify("flush")) for peer in self._peers.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=_FLUSH_S)
            for each in late:
                each.cancel()

    def _broadcast(self, name: str, content: object) -> None:
        """Send a change to all front ends, without a wait."""
        for peer in self._peers.values():
            peer.stream.send(name, content)

    def _on_peer_closed(self, number: int, peer: FrontEndPeer) -> None:
        peer.abort()
        if self._peers.get(number) is peer:
            del self._peers[number]

    # --- Supervisor ---------------------------------------------------------------------------------------------------

    def _on_command(self, name: str) -> None:
        if name == "ping":
            if has_lost_all() and not self._ending.is_set():
                logger.error("a GPU has failed, and with it all GPUs of this process: the next process uses them again")
                self._end()
        elif name == "announce":
            self._announce()
        elif name in ("accept", "pause"):
            self._servers.accept(name == "accept")
        elif name == "drain":  # front ends still pass on the requests in flight
            self._wiring.data_plane.drain()
            self._servers.drain()
        elif name == "stop":
            self._end()

    def _end(self) -> None:
        """Reject requests from now on, and end once those in flight have ended."""
        self._wiring.data_plane.drain()
        self._servers.drain()
        self._ending.set()

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
        has_keys, processes = self._wiring.keys is not None, describe_processes(settings)
        addresses = Addresses(ports.url, ports.grpc, ports.metrics, access, has_keys, processes)
        if settings.log_format == "json":
            log_announcement(addresses, self._wiring.data_plane.registry)
        else:
            announce(addresses, self._wiring.data_plane.registry, self._start.first_model)


def _recorder(registry: Registry, name: str, number: str) -> Recorder | None:
    """Return the counters of a version that serves; None for another."""
    for model, version, handle in registry.sources():
        if (model, version) == (name, number):
            return handle.recorder
    return None
