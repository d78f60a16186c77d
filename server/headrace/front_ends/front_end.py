"""A front-end process: serves connections that the supervisor accepts, with the engine process behind it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, cast

from headrace.accept import PassedConnections
from headrace.core.access import AccessControl, RemoteBucket
from headrace.core.clock import monotonic_ns
from headrace.core.threads import start_pool
from headrace.front_ends.access_records import ForwardingObserver
from headrace.front_ends.channel import Start, SupervisorChannel, close_all
from headrace.front_ends.grpc_proxy import FrontEndGrpcServer, GrpcProxy
from headrace.front_ends.inference import FrontEndHttp, FrontEndInference, ServedModels, StreamForwarder
from headrace.front_ends.meeting import EngineFacts, Hello
from headrace.front_ends.proxy import EngineLink, HttpProxy
from headrace.front_ends.remote_regions import RemoteRegions
from headrace.front_ends.shared_page import PageState, SharedPage
from headrace.front_ends.sharing import shared_arrays, shared_limits
from headrace.front_ends.table import sticky_headers
from headrace.grpc.infer import InferStreams
from headrace.inference.codec_threads import CodecThreads
from headrace.inference.load_report import LoadReports
from headrace.inference.services import Services
from headrace.listen import GrpcListener, UvicornServer, origin_policy, raise_file_limit, run_server
from headrace.observability.logs import LogSettings
from headrace.tls import ServerTls
from headrace.wiring import Reloads, open_access, open_keys, options_reader

logger = logging.getLogger("headrace")

_POOL_THREADS = 2
# Time in which a new connection without TLS is counted.
_COUNTED_S = 0.005


class PassedHttpServer(UvicornServer):
    """uvicorn for connections that another process accepts. Ownership: the event loop.

    Attributes:
        connections: takes accepted sockets; exists once the server has opened.
        opened: set from then on.
    """

    connections: PassedConnections

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.opened = asyncio.Event()
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open for `connections.take`."""
        self.connections = self.open_passed()
        self.servers = [self.connections]  # type: ignore[list-item]
        self.started = True
        await self.on_tick(0)
        self.opened.set()

    async def main_loop(self) -> None:
        """Wait for `stop`, without a timer."""
        await self._stopping.wait()

    def stop(self) -> None:
        """Begin to drain."""
        self.should_exit = True
        self._stopping.set()


class FrontEndProcess:
    """Serves HTTP and gRPC until the supervisor sends "drain", or ends.

    Ownership: the event loop.

    Args:
        start: first message of the supervisor.
        sock: channel to the supervisor.
    """

    def __init__(self, start: Start, sock: socket.socket) -> None:
        self._start = start
        self._socket = sock
        settings = start.settings
        limits = settings.limits
        limits = replace(limits, max_connections=raise_file_limit(limits.max_connections, passes_on=True))
        self._settings = replace(settings, limits=limits)
        self._arrays = shared_arrays(start)
        self._limits = shared_limits(self._arrays, self._settings)
        self._logs = LogSettings(logging.getLogger("headrace"))
        self._uncounted = 0
        self._models = ServedModels(start.settings.allow_client_shm)
        self._http: FrontEndHttp | None = None
        self._servers: dict[str, PassedHttpServer] = {}
        self._grpc: GrpcListener | None = None
        self._takers: dict[str, PassedConnections] = {}
        self._reloads = Reloads(is_silent=True)

    def run(self) -> int:
        """Serve until the supervisor sends "drain"; returns the exit status."""
        return run_server(self._settings, self._open_keys, self._serve)

    def _open_keys(self) -> None:
        self._keys = open_keys(self._settings, RemoteBucket)

    async def _serve(self, tls: ServerTls | None) -> int:
        loop, start = asyncio.get_running_loop(), self._start
        loop.set_default_executor(start_pool(_POOL_THREADS, "headrace-pool"))
        self._threads = CodecThreads()
        self._threads.start()
        access: AccessControl = self._keys or open_access(self._settings)
        self._reader = options_reader(self._settings, access)
        if tls is not None:
            self._reloads.callbacks.append(tls.reload)
        if self._keys is not None:
            self._keys.start(loop)
            self._reloads.callbacks.append(self._keys.reload)
        self._tls = tls
        self._is_open = asyncio.Event()
        self._ending = asyncio.Event()
        hello, begin = Hello(start.token, "stream", start.number), self._models.begin
        self._link = EngineLink(start.engine, hello, begin, self._on_open, self._on_lost, self._on_notice)
        self._observer = ForwardingObserver(partial(self._link.send, "records"), loop.call_soon)
        lag = self._arrays.loop_lag()
        if self._settings.metrics:
            lag.start(loop)
        self._channel = SupervisorChannel(self._socket, self._on_message, self._on_orphaned)
        self._link.start()
        await _either(self._is_open, self._ending)
        if not self._ending.is_set():
            await self._run_servers()
        lag.stop()
        self._observer.flush()
        self._link.close()
        if self._keys is not None:
            self._keys.stop()
        await asyncio.to_thread(self._threads.close)
        return 0

    async def _run_servers(self) -> None:
        settings = self._settings
        self._services = self._create_services()
        limits, proxy = self._limits, HttpProxy(self._link, "http")
        origins = origin_policy(settings, self._reader.names)
        application = self._http = FrontEndHttp(self._services, self._models, limits.http, origins, proxy)
        limits.bodies.allocate = self._models.allocate_body
        self._servers["http"] = PassedHttpServer(application, settings, limits.http, self._tls)
        if settings.metrics and limits.metrics is not None:
            scrapes = HttpProxy(self._link, "metrics")
            self._servers["metrics"] = PassedHttpServer(scrapes, settings, limits.metrics, self._tls)
        opened = [server.opened for server in self._servers.values()]
        serving = [asyncio.ensure_future(server.serve()) for server in self._servers.values()]
        if settings.grpc:
            serving.append(asyncio.ensure_future(self._open_grpc(self._answer)))
        for each in opened:
            await each.wait()
        self._takers |= {port: server.connections for port, server in self._servers.items()}
        self._channel.send("ready")
        if self._ending.is_set():
            self._drain()
        await asyncio.gather(*serving)

    def _open_grpc(self, answer: EngineFacts) -> Coroutine[Any, Any, None]:
        """Open the gRPC server; returns the coroutine that serves until the drain."""
        settings = self._settings
        proxy = GrpcProxy(self._link, self._reader)
        methods = proxy.methods(answer, self._threads)
        path, stream_path = (f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer"))
        max_bytes = settings.limits.max_body_bytes
        infer = FrontEndInference(self._services, self._models, max_bytes, proxy, path)
        forwarder = StreamForwarder(self._models, proxy, stream_path)
        streams = InferStreams(infer.inference, max_bytes, forwarder=forwarder)
        methods = replace(
            methods,
            unary={**methods.unary, path: infer.infer},
            direct={path: infer},
            streams={**methods.streams, stream_path: streams.serve},
        )
        max_age_s = settings.grpc_max_connection_age_s
        server = FrontEndGrpcServer(proxy, methods, self._limits.grpc, self._tls, max_age_s=max_age_s)
        self._takers["grpc"] = server.open()
        self._grpc = GrpcListener(server, settings.drain_timeout_s)
        return self._grpc.serve()

    # --- Engine -------------------------------------------------------------------------------------------------------

    def _on_open(self, answer: EngineFacts, descriptors: Sequence[int]) -> PageState:
        """Use an engine process. Until its table has arrived, all requests are passed on."""
        self._answer = answer
        self._is_open.set()
        page = self._observer.needs = SharedPage(descriptors[0])
        return PageState(page, self._arrays.own)

    def _create_services(self) -> Services:
        """Create the services of inference; all others are those of the engine."""
        absent: Any = None
        allows_regions = self._settings.allow_client_shm
        return Services(
            models=cast(Any, self._models),
            repository=absent,
            regions=cast(Any, RemoteRegions()) if allows_regions else absent,
            traces=absent,
            observer=cast(Any, self._observer),
            logs=absent,
            overview=absent,
            version=version("headrace"),
            extensions=("system_shared_memory",) if allows_regions else (),
            explain=absent,
            name=self._settings.id,
            options_reader=self._reader,
            codec_threads=self._threads,
            quotas=self._models,
            load_reports=LoadReports(self._settings.orca, self._models.server_figures, self._arrays.own.requests),
        )

    def _forget_heads(self) -> None:
        """Look up the models of repeated requests again."""
        if self._http is not None:
            self._http.endpoint.forget_heads()

    def _on_lost(self) -> None:
        self._observer.needs = None
        self._models.detach()
        self._forget_heads()
        logger.warning("the engine process has ended: requests are refused until the next one answers")

    def _on_notice(self, name: str, content: Any) -> None:
        if name == "table":
            self._models.apply_table(content)
            self._reader.set_routing_headers(sticky_headers(content))
            self._forget_heads()
        elif name == "flush":
            self._models.flush_counts()
            self._observer.flush()
        elif name == "logs":
            self._logs.apply(content)
        elif name == "keys" and self._keys is not None:
            self._keys.reload()

    # --- Supervisor ---------------------------------------------------------------------------------------------------

    def _on_message(self, name: str, content: Any, descriptors: Sequence[int]) -> None:
        if name == "connection":
            self._take(content, descriptors)
            return
        close_all(descriptors)
        if name == "ping":
            self._channel.send("pong", content)
            self._limits.bodies.give_way_to_all(monotonic_ns())
        elif name == "reload":
            self._reloads.start()
        elif name == "drain":
            self._ending.set()
            self._drain()
        elif name == "force":
            for server in self._servers.values():
                server.force_exit = True
            if self._grpc is not None:
                self._grpc.stop(now=True)

    def _take(self, port: str, descriptors: Sequence[int]) -> None:
        taker = self._takers.get(port)
        for descriptor in descriptors:
            sock = socket.socket(fileno=descriptor)
            if taker is None:
                sock.close()
            else:
                taker.take(sock)
        if not self._uncounted:
            asyncio.get_running_loop().call_later(_COUNTED_S, self._report_counted)
        self._uncounted += len(descriptors)

    def _report_counted(self) -> None:
        """Report connections to the supervisor that the counters have now."""
        self._channel.send("counted", self._uncounted)
        self._uncounted = 0

    def _drain(self) -> None:
        self._link.send("stopping")
        for server in self._servers.values():
            if server.started:
                server.stop()
        if self._grpc is not None:
            self._grpc.stop()

    def _on_orphaned(self) -> None:
        """The supervisor has ended: so does this process."""
        os._exit(1)


async def _either(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
