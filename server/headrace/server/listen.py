"""Sockets and their servers: HTTP (uvicorn with Headrace's protocol), metrics on their own port, gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headrace.config.documents import refuse
from headrace.core.errors import ConfigError, HeadraceError, Unavailable
from headrace.core.limits import RESERVED_CONNECTIONS, ClientLimits, ConnectionReserve
from headrace.observability.metrics import canonical_accept
from headrace.server.settings import Settings
from headrace.wire.accept import BACKLOG, PassedConnections, TlsListener
from headrace.wire.http.connection import HeadraceHttpProtocol
from headrace.wire.http.infer_endpoint import error_response, request_principal
from headrace.wire.http.origins import ORIGIN, HostPolicy, OriginPolicy, allowed_names
from headrace.wire.http.repeated_request import RepeatedHeads
from headrace.wire.http.reserved_connections import LimitedHttpProtocol
from headrace.wire.http.timeouts import ConnectionTimeouts
from headrace.wire.requests.operations import http_operation
from headrace.wire.requests.request_options import RequestOptionsReader
from headrace.wire.requests.shared_runs import SharedRuns
from headrace.wire.tls import ServerTls, TlsFiles

if TYPE_CHECKING:
    from headrace.wire.grpc.server import GrpcServer

logger = logging.getLogger("headrace")

_ALPN = "http/1.1"
# Connections to the metrics port: that many Prometheus servers scrape none.
METRICS_CONNECTIONS = 64

MetricsRender = Callable[[str], tuple[str, bytes]]


def uvicorn_config(application: object, settings: Settings, protocol: object = None) -> uvicorn.Config:
    """Create the configuration of uvicorn, which adds nothing to responses and logs nothing.

    Args:
        application: an ASGI callable.
        settings: timeouts.
        protocol: makes the protocol of a connection; None for a caller that makes its own.
    """
    return uvicorn.Config(
        application,  # type: ignore[arg-type]
        http=protocol or HeadraceHttpProtocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
        timeout_keep_alive=settings.keep_alive_timeout_s,  # type: ignore[arg-type]
        backlog=BACKLOG,
    )


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handling: two servers share a process, and a drained server exits with 0.

    Args:
        application: an ASGI callable.
        settings: timeouts.
        client_limits: limits on clients.
        tls: TLS of the server, or None.
    """

    def __init__(
        self, application: object, settings: Settings, client_limits: ClientLimits, tls: ServerTls | None = None
    ) -> None:
        names = allowed_names(settings.host, is_open(settings), settings.allowed_host)
        protocol = partial(
            LimitedHttpProtocol,
            client_limits=client_limits,
            timeouts=ConnectionTimeouts(client_limits),
            reserve=ConnectionReserve(client_limits),
            hosts=HostPolicy(names),
            repeated_heads=RepeatedHeads(),
        )
        self._tls = tls
        self._client_limits = client_limits
        config = uvicorn_config(application, settings, protocol)
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on bound sockets."""
        if self._tls is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        limits = self._client_limits
        listeners = [
            TlsListener(sock, self._factory(), self._tls, _ALPN, limits, reserved=limits.reserved_connections)
            for sock in sockets or []
        ]
        self.servers = listeners  # type: ignore[assignment]
        self.started = True

    def open_passed(self) -> PassedConnections:
        """Return what serves connections that another process has accepted."""
        limits = self._client_limits
        return PassedConnections(self._factory(), self._tls, _ALPN, limits, reserved=limits.reserved_connections)

    def _factory(self) -> Callable[[], asyncio.Protocol]:
        """Return the function that makes the protocol of a connection."""
        protocol: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: `HeadraceServer` handles the signals."""
        yield


class GrpcListener:
    """Runs a gRPC server until `stop`.

    Args:
        server: the server; it listens already.
        drain_timeout_s: maximum time in seconds for calls in flight after `stop`.
    """

    def __init__(self, server: GrpcServer, drain_timeout_s: float) -> None:
        self._server = server
        self._drain_timeout_s = drain_timeout_s
        self._ending = asyncio.Event()

    async def serve(self) -> None:
        """Serve until `stop`, then drain."""
        await self._ending.wait()
        await self._server.stop(self._drain_timeout_s)

    def stop(self, now: bool = False) -> None:
        """Begin to drain, or with `now` end all calls."""
        if now:
            self._drain_timeout_s = 0.0
        self._ending.set()


def server_tls(settings: Settings) -> ServerTls | None:
    """Return the TLS of the listeners, None if TLS is off.

    Raises:
        ConfigError: certificate or key is missing, or the files are invalid.
    """
    if not settings.tls_cert and not settings.tls_key:
        if settings.tls_client_ca:
            message = "--tls-client-ca needs --tls-cert and --tls-key"
            raise refuse("command line", None, message, "name the server's certificate and key too")
        return None
    if not settings.tls_cert or not settings.tls_key:
        raise refuse("command line", None, "--tls-cert and --tls-key come together", "name both, or none")
    tls = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    try:
        tls.ssl_context(())
    except (OSError, ValueError) as error:  # SSLError is an OSError
        message, cure = f"the files for TLS cannot be used: {error}", "check that they are PEM, and belong together"
        raise refuse("command line", None, message, cure) from None
    return ServerTls(tls)


def run_server(
    settings: Settings, open_parts: Callable[[], None], serve: Callable[[ServerTls | None], Coroutine[Any, Any, int]]
) -> int:
    """Run a process of the server on an event loop; errors of its configuration are logged.

    Args:
        settings: settings of the server.
        open_parts: opens what the process needs before its event loop; raises ConfigError or Unavailable.
        serve: serves until the process ends, with the TLS of its listeners; returns the exit status.

    Returns:
        The exit status: 1 after an error.
    """
    try:
        tls = server_tls(settings)
        open_parts()
    except (ConfigError, Unavailable) as error:
        logger.error("%s", error)
        return 1
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        return runner.run(serve(tls))
    except Unavailable as error:
        logger.error("%s", error)
        return 1
    finally:
        with contextlib.suppress(RuntimeError):  # asyncio starts a thread to end its pool: the system may refuse it
            runner.close()


def metrics_application(page: MetricsRender, reader: RequestOptionsReader) -> FastAPI:
    """Create the application of the metrics port: /metrics and nothing else.

    Args:
        page: renders /metrics.
        reader: resolves the credentials of a request.
    """
    app = FastAPI(title="Headrace metrics", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    scope, scrapes = http_operation("GET", "/metrics").scope, SharedRuns(page)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        # With keys, an answer to one key must not be stored for others.
        private = {"cache-control": "no-store"} if reader.access.has_keys else {}
        try:
            if scope is not None:
                request_principal(request.scope, reader).require(scope)
        except HeadraceError as error:
            status, headers, content = error_response(error)
            return Response(content, status, {name.decode(): value.decode() for name, value in headers} | private)
        content_type, body = await scrapes.result(canonical_accept(request.headers.get("accept", "")))
        return Response(body, headers={"content-type": content_type, **private})

    return app


def raise_file_limit(connections: int, passes_on: bool = False) -> int:
    """Raise the process's limit of file descriptors to what connections of each protocol need, plus 512.

    Args:
        connections: maximum connections of each protocol, without the reserve.
        passes_on: each of them may have one more to another process, if the system has descriptors for that.

    Returns:
        `connections`, or fewer if the system gives this process fewer descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = 2 * (connections + 2 * RESERVED_CONNECTIONS) + 512
    wanted = 2 * required if passes_on else required
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit >= required:
        return connections
    share = (limit - min(512, limit // 2)) // 2
    # See `ClientLimits.reserved_connections`: connections over the limit take up to twice the reserve.
    affordable = min(connections, max(share - 2 * RESERVED_CONNECTIONS, share // 3, 1))
    text = (
        "the system gives this process %d file descriptors: --max-connections is %d in place of %d; raise its limit"
        " (ulimit -n)"
    )
    logger.warning(text, limit, affordable, connections)
    return affordable


def has_metrics_port(settings: Settings) -> bool:
    """Return True if /metrics has a port of its own."""
    return settings.metrics_port is not None and settings.metrics_port != settings.http_port


def is_open(settings: Settings) -> bool:
    """Return True if every program of this machine may use every operation: on a loopback address, without keys."""
    return not settings.api_keys_file and not settings.jwks and is_loopback(settings.host)


def origin_policy(settings: Settings, request_headers: Iterable[str]) -> OriginPolicy:
    """Create the check of requests from web pages.

    Inference requests of other origins are refused where a page can send one that the server accepts: to a loopback address
    without keys, and with the browser's client certificate. On a network address without keys any client may send them.

    Args:
        settings: settings of the server.
        request_headers: names of the headers of request options.

    Raises:
        ConfigError: --cors-origin has an invalid value.
    """
    for origin in settings.cors_origin:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            message, cure = "is not an origin", "write SCHEME://HOST[:PORT] in lower case, without a path, or *"
            raise refuse(f"--cors-origin {origin}", None, message, cure)
    if "*" in settings.cors_origin and settings.tls_client_ca:
        message = "would let every web page use the client certificates of its visitors"
        raise refuse("--cors-origin *", None, message, "name the origins, or remove --tls-client-ca")
    return OriginPolicy(settings.cors_origin, is_open(settings) or bool(settings.tls_client_ca), request_headers)


def is_loopback(host: str) -> bool:
    """Return True if an address to listen on is reached from this machine only.

    Args:
        host: address or name; a name counts only if it resolves and all its addresses are loopback addresses.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    addresses = [ipaddress.ip_address(str(address[0])) for *_, address in found]
    return all(address.is_loopback or _is_mapped_loopback(address) for address in addresses)


def _is_mapped_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    # ::ffff:127.0.0.1
    return isinstance(address, ipaddress.IPv6Address) and bool(address.ipv4_mapped and address.ipv4_mapped.is_loopback)


def format_address(host: str, port: int) -> str:
    """Return host:port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
