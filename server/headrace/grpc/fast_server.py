"""The fast gRPC engine: HTTP/2 and gRPC in Python, on the event loop that serves HTTP.

It does what inference clients need and no more: unary methods and streams of messages in both directions, deadlines,
cancellation, compressed requests, flow control, TLS, a shutdown without a lost call. Answers are never compressed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import Unavailable
from headrace.core.limits import Door
from headrace.grpc.fast_calls import FastCall, StreamingCall, UnaryCall
from headrace.grpc.fast_deadlines import Deadlines
from headrace.grpc.fast_wire import PREFIX_BYTES, RequestHead, understand
from headrace.grpc.methods import Methods
from headrace.http2.connection import Http2Connection
from headrace.http2.flow import Limits
from headrace.http2.frames import ErrorCode, rst_stream
from headrace.http2.headers import Field
from headrace.http2.stream import Stream
from headrace.tls import TlsFiles

_BACKLOG = 4096


class FastGrpcServer:
    """A `grpc_methods.GrpcEngine`. Ownership: the event loop it was started on.

    Args:
        methods: what is answered.
        door: the limits on clients.
        tls: files for TLS, None for HTTP/2 with prior knowledge.
        limits: of one connection, None for those of `door`.
    """

    def __init__(self, methods: Methods, door: Door, tls: TlsFiles | None, limits: Limits | None = None) -> None:
        self._methods = methods
        self._door = door
        door.connections = 0
        self._tls = tls
        limits = limits or _of_connections(door)
        max_message_bytes = door.limits.max_body_bytes
        self._limits = replace(
            limits,
            grant_bytes=max(limits.grant_bytes, max_message_bytes + PREFIX_BYTES),
            held_bytes=max(limits.held_bytes, 2 * max_message_bytes),
        )
        self._connections: set[Http2Connection] = set()
        self._server: asyncio.Server | None = None
        self._deadlines: Deadlines
        self._stopping = False
        self._empty = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        """Listen, and give the port; raises OSError."""
        loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(loop)
        self._server = await loop.create_server(
            lambda: Http2Connection(self, self._limits, loop),
            host,
            port,
            backlog=_BACKLOG,
            reuse_address=True,
            ssl=self._tls.ssl_context(("h2",)) if self._tls else None,
            ssl_handshake_timeout=self._limits.handshake_s if self._tls else None,
        )
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls at once, wait at most `grace_s` for those that run, then end them with UNAVAILABLE."""
        if self._server is None:
            return
        end_ns = monotonic_ns() + int(grace_s * NS_PER_S)
        self._stopping = True
        self._server.close()
        for connection in list(self._connections):
            for stream in list(connection.streams.values()):
                if isinstance(stream, StreamingCall):
                    stream.tell_stopping()
            connection.lifetime.drain()
        await self._wait_until_empty((end_ns - monotonic_ns()) / NS_PER_S)
        late = Unavailable("the server is shutting down and could not wait for this request")
        for connection in list(self._connections):
            for stream in list(connection.streams.values()):
                if isinstance(stream, FastCall):
                    stream.fail(late)
            connection.shut()
        await self._wait_until_empty(self._limits.linger_s + 0.5)
        self._deadlines.close()

    async def _wait_until_empty(self, timeout_s: float) -> None:
        if self._connections:
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), max(0.0, timeout_s))
            except TimeoutError:
                return

    # --- http2.connection.Application ---------------------------------------------------------------------------------

    def understand(self, fields: Sequence[Field] | None) -> RequestHead:
        """See `Application`."""
        return understand(self._methods, fields)

    def open(self, connection: Http2Connection, stream_id: int, head: RequestHead, end: bool) -> Stream | None:
        """See `Application`."""
        if head.unary is not None:
            return UnaryCall(connection, stream_id, head, self._door, self._deadlines)
        if head.stream is not None:
            call = StreamingCall(connection, stream_id, head, self._door, self._deadlines)
            if self._stopping:
                call.tell_stopping()
            return call
        if head.limit:
            self._door.hit(head.limit)
        answer = head.refuse(stream_id)
        if not end:
            answer += rst_stream(stream_id, ErrorCode.NO_ERROR)  # RFC 9113, section 8.1: the body is not wanted
        connection.outbox.control(answer)
        return None

    def connected(self, connection: Http2Connection) -> bool:
        """See `Application`."""
        self._connections.add(connection)
        return self._door.enter() and not self._stopping

    def disconnected(self, connection: Http2Connection) -> None:
        """See `Application`."""
        self._connections.discard(connection)
        self._door.leave()
        if not self._connections:
            self._empty.set()


def _of_connections(door: Door) -> Limits:
    """The limits of one connection that the operator sets."""
    limits = door.limits
    return Limits(
        streams=limits.max_streams,
        header_bytes=2 * limits.max_header_bytes,
        header_list_bytes=limits.max_header_bytes,
        handshake_s=min(Limits().handshake_s, limits.header_timeout_s),
        frame_s=limits.header_timeout_s,
        message_s=limits.body_timeout_s,
        stall_s=limits.stall_timeout_s,
        reached=door.hit,
    )
