"""Requests that front ends pass to the engine process: HTTP and gRPC on Unix connections, each for one client of a front end.

Application and methods are those of one process. Address and certificate of the client are those of the connection's first
message. The front end enforces the limits on clients; the engine counts no connections, and no bodies for a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from headrace.core.limits import ClientLimits
from headrace.server.front_ends.frame_stream import FrameStream
from headrace.server.front_ends.grpc_proxy import UNLIMITED
from headrace.server.front_ends.handshake import Client, Greeting
from headrace.wire.grpc.call import DeadlineTimer, ServerCall
from headrace.wire.grpc.framing import RequestHead
from headrace.wire.grpc.methods import Methods
from headrace.wire.grpc.server import GrpcServer
from headrace.wire.grpc.streaming_call import StreamingCall
from headrace.wire.http.connection import HeadraceHttpProtocol
from headrace.wire.http.origins import HostPolicy, RawHeaders
from headrace.wire.http.repeated_request import RepeatedHeads
from headrace.wire.http.timeouts import ConnectionTimeouts
from headrace.wire.http2.connection import Http2Connection
from headrace.wire.http2.stream import Http2Stream

_NO_LIMIT = 1 << 40
# Bytes of a head beyond those that the client has sent: the request for "100 Continue".
_ADDED_HEADER_BYTES = 64


class _PortLimits(ClientLimits):
    """Limits and counters of hits of a port whose connections the front ends count."""

    __slots__ = ()

    def __init__(self, port: ClientLimits) -> None:
        limits = replace(port.limits, max_header_bytes=port.limits.max_header_bytes + _ADDED_HEADER_BYTES)
        super().__init__(limits, port.protocol, port.bodies, port._cells, port._others)

    def enter(self) -> bool:
        """Count nothing."""
        return True

    def leave(self) -> None:
        """Count nothing."""


class _CheckedHosts(HostPolicy):
    """The front end has checked the host, which a request of HTTP/1.0 need not have."""

    def refusal(self, target: bytes, headers: RawHeaders, http_version: str) -> tuple[int, str] | None:
        """Refuse nothing."""
        return None


class PassedHttpConnection(HeadraceHttpProtocol):
    """HTTP requests of one client of a front end. Ownership: the event loop."""

    receives_directly = False  # without a second reservation

    def __init__(self, *args: Any, client: Client, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._client = client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Use the certificate of the client."""
        super().connection_made(transport)
        self.peer_names = self._client.names

    def on_message_begin(self) -> None:
        """Use the address of the client."""
        super().on_message_begin()
        client = self._client
        self.scope["client"], self.scope["server"] = client.address, client.server
        self.scope["scheme"] = client.scheme

    def eof_received(self) -> bool:  # type: ignore[override]
        """Close: the front end has closed the connection, in both directions."""
        return False

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, whose memory the front end has reserved until the response is complete."""
        self._body_bytes += len(body)
        HttpToolsProtocol.on_body(self, body)

    def observe_body(self, now_ns: int) -> bool:
        """Observe nothing: the front end does."""
        return False


class ProxiedHttpServer:
    """Serves the HTTP requests that all front ends pass on for one port.

    Args:
        config: of uvicorn, with the application of the port.
        port: limits of the port.
    """

    def __init__(self, config: uvicorn.Config, port: ClientLimits) -> None:
        limits = _PortLimits(port)
        self._make = partial(
            PassedHttpConnection,
            config=config,
            app_state={},
            client_limits=limits,
            timeouts=ConnectionTimeouts(limits),
            hosts=_CheckedHosts(None),
            repeated_heads=RepeatedHeads(),
        )

    def connection(self, state: ServerState, client: Client) -> asyncio.Protocol:
        """Return the protocol of a connection; `state` has the connections and tasks of the front end."""
        return self._make(server_state=state, client=client)


class _NoDeadlines(DeadlineTimer):
    """Ends no calls: the front end does, at the same deadline."""

    def add(self, call: ServerCall) -> None:
        """Do nothing."""


class ProxiedGrpcServer(GrpcServer):
    """Serves the gRPC calls that all front ends pass on.

    Args:
        methods: served methods.
        port: limits of the port.
    """

    def __init__(self, methods: Methods, port: ClientLimits) -> None:
        limits = replace(
            port.limits,
            max_total_body_bytes=_NO_LIMIT,
            max_connections=_NO_LIMIT,
            min_body_bytes_per_s=0,
            max_header_bytes=UNLIMITED.header_bytes,
        )
        super().__init__(methods, ClientLimits(limits, port.protocol), None, UNLIMITED)
        self.deadline_timer = _NoDeadlines(asyncio.get_running_loop())
        self._opened: dict[Http2Connection, tuple[FrontEndPeer, Client]] = {}

    def connection(self, peer: FrontEndPeer, client: Client) -> asyncio.Protocol:
        """Return the protocol of a connection for a client of a front end."""
        connection = Http2Connection(self, UNLIMITED, asyncio.get_running_loop())
        self._opened[connection] = peer, client
        return connection

    def connection_opened(self, connection: Http2Connection) -> bool:
        """Accept or refuse a new connection; False refuses it."""
        peer, client = self._opened[connection]
        peer.grpc_connections.add(connection)
        accepted = super().connection_opened(connection)
        if client.names:
            self.peer_names[connection] = client.names
        return accepted

    def connection_closed(self, connection: Http2Connection) -> None:
        """Called once after the connection and all its streams are closed."""
        peer, _ = self._opened.pop(connection)
        peer.grpc_connections.discard(connection)
        super().connection_closed(connection)

    def open_stream(
        self, connection: Http2Connection, stream_id: int, head: RequestHead, end: bool
    ) -> Http2Stream | None:
        """Create the stream of a new request; None if the request was answered here, with END_STREAM."""
        stream = super().open_stream(connection, stream_id, head, end)
        if isinstance(stream, StreamingCall) and self._opened[connection][0].is_stopping:
            stream.notify_stopping()
        return stream

    def peer(self, connection: Http2Connection) -> tuple[str, int] | None:
        """Return host and port of the client of a connection; None if the system does not report it."""
        return self._opened[connection][1].address


class FrontEndPeer:
    """The engine's end of the connections of one front end.

    Ownership: the event loop.

    Args:
        http: servers of the ports "http" and "metrics".
        grpc: server of gRPC; None without gRPC.
        on_record: takes records of requests that the front end has served.

    Attributes:
        stream: of the front end, set by its creator.
        grpc_connections: for gRPC calls of clients.
        is_stopping: the front end drains.
    """

    stream: FrameStream

    def __init__(
        self, http: Mapping[str, ProxiedHttpServer], grpc: ProxiedGrpcServer | None, on_record: Callable[[bytes], None]
    ) -> None:
        self._http, self._grpc = http, grpc
        self._on_record = on_record
        self._state = ServerState()
        self.grpc_connections: set[Http2Connection] = set()
        self.is_stopping = False

    async def serve(self, greeting: Greeting) -> None:
        """Serve a connection with requests of a client; closes it if the server has no such port."""
        hello, http = greeting.hello, self._http.get(greeting.hello.role)
        make: Callable[[], asyncio.Protocol]
        if http is not None:
            make = partial(http.connection, self._state, hello.client)
        elif self._grpc is not None and hello.role == "grpc":
            make = partial(self._grpc.connection, self, hello.client)
        else:
            greeting.sock.close()
            return
        await asyncio.get_running_loop().connect_accepted_socket(make, greeting.sock)

    def close(self) -> None:
        """Abandon all requests, and close the stream."""
        self.abort()
        self.stream.close()

    def abort(self) -> None:
        """Abandon all requests."""
        for each in [*self._state.connections, *self.grpc_connections]:
            each.transport.abort()

    def on_notice(self, name: str, content: Any) -> None:
        """Apply a notice of the front end."""
        if name == "records":
            self._on_record(content)
        elif name == "cancel":  # the requests respond with an error
            for task in list(self._state.tasks):
                task.cancel()
        elif name == "stopping":
            self.is_stopping = True
            for connection in self.grpc_connections:
                for stream in list(connection.streams.values()):
                    if isinstance(stream, StreamingCall):
                        stream.notify_stopping()
