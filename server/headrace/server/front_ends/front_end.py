"""A front-end process: serves connections that the supervisor accepts, with the engine process behind it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from headrace.core.access import AccessControl, RemoteBucket
from headrace.core.threads import start_pool
from headrace.observability.logs import LogSettings
from headrace.server.front_ends.access_records import ForwardingObserver
from headrace.server.front_ends.channel import Start
from headrace.server.front_ends.child_program import ChildProgram
from headrace.server.front_ends.grpc_proxy import FrontEndGrpcServer, GrpcProxy
from headrace.server.front_ends.handshake import EngineProcessFacts, Hello
from headrace.server.front_ends.inference import FrontEndHttp, FrontEndInference, ServedModels, StreamForwarder
from headrace.server.front_ends.passed_servers import PassedHttpServer
from headrace.server.front_ends.proxy import EngineProcessLink, HttpProxy
from headrace.server.front_ends.remote_regions import RemoteRegions
from headrace.server.front_ends.shared_page import PageState, SharedPage
from headrace.server.front_ends.version_table import sticky_headers
from headrace.server.listen import origin_policy, run_server
from headrace.server.wiring import open_access, open_keys, options_reader
from headrace.wire.grpc.infer_streams import InferStreams
from headrace.wire.requests.codec_threads import CodecThreads
from headrace.wire.requests.load_report import LoadReports
from headrace.wire.requests.services import InferenceServices
from headrace.wire.tls import ServerTls

logger = logging.getLogger("headrace")

_POOL_THREADS = 2


class FrontEndProcess(ChildProgram):
    """Serves HTTP and gRPC until the supervisor sends "drain", or ends.

    Ownership: the event loop.

    Args:
        start: first message of the supervisor.
        sock: channel to the supervisor.
    """

    def __init__(self, start: Start, sock: socket.socket) -> None:
        super().__init__(start, sock, is_front_end=True)
        self._logs = LogSettings(logging.getLogger("headrace"))
        self._models = ServedModels(start.settings.allow_client_shm)
        self._http: FrontEndHttp | None = None

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
        self._link = EngineProcessLink(start.engine, hello, begin, self._on_open, self._on_lost, self._on_notice)
        self._observer = ForwardingObserver(partial(self._link.send, "records"), loop.call_soon)
        lag = self._arrays.loop_lag()
        if self._settings.metrics:
            lag.start(loop)
        self._open_channel()
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
        servers = {"http": PassedHttpServer(application, settings, limits.http, self._tls)}
        if settings.metrics and limits.metrics is not None:
            scrapes = HttpProxy(self._link, "metrics")
            servers["metrics"] = PassedHttpServer(scrapes, settings, limits.metrics, self._tls)
        await self._servers.open(servers, self._create_grpc(self._answer) if settings.grpc else None)
        if settings.front_ends_reason:
            self._servers.count_busy()
        self._channel.send("ready")
        await self._servers.wait()

    def _create_grpc(self, answer: EngineProcessFacts) -> FrontEndGrpcServer:
        """Create the gRPC server, which is not open yet."""
        settings = self._settings
        proxy = GrpcProxy(self._link, self._reader.grpc)
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
        return FrontEndGrpcServer(proxy, methods, self._limits.grpc, self._tls, max_age_s=max_age_s)

    # --- Engine -------------------------------------------------------------------------------------------------------

    def _on_open(self, answer: EngineProcessFacts, descriptors: Sequence[int]) -> PageState:
        """Use an engine process. Until its table has arrived, all requests are passed on."""
        self._answer = answer
        self._is_open.set()
        page = self._observer.needs = SharedPage(descriptors[0])
        return PageState(page, self._arrays.own)

    def _create_services(self) -> InferenceServices:
        """Create the services of inference; all others are those of the engine."""
        allows_regions = self._settings.allow_client_shm
        return InferenceServices(
            models=cast(Any, self._models),
            regions=cast(Any, RemoteRegions() if allows_regions else None),
            observer=cast(Any, self._observer),
            extensions=("system_shared_memory",) if allows_regions else (),
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

    def _on_command(self, name: str) -> None:
        if name == "drain":
            self._ending.set()
            self._link.send("stopping")
            self._servers.drain()
        elif name == "share":
            arrays = self._arrays.arrays[1:]
            number = sum(array.is_expected for array in arrays)
            self._servers.give_up(-(-sum([array.all_connections for array in arrays]) // max(1, number)))


async def _either(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
