"""The gRPC server: HTTP/2 and gRPC in Python, on the event loop that serves HTTP.

It supports what inference clients use: unary and bidirectional streaming methods, deadlines, cancellation, compressed requests,
flow control, TLS, graceful shutdown. Responses are never compressed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from headrace.core.access import certificate_names
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import (
    HeadraceError,
    Unavailable,
)
from headrace.core.limits import ClientLimits
from headrace.wire.accept import BACKLOG, PassedConnections, TlsListener, bind
from headrace.wire.grpc.call import DeadlineTimer, RejectedRequest, ServerCall, UnaryCall
from headrace.wire.grpc.framing import (
    PREFIX_BYTES,
    RequestHead,
    parse_request_head,
    rejected,
)
from headrace.wire.grpc.methods import Methods
from headrace.wire.grpc.reserved_connections import GrpcReserve
from headrace.wire.grpc.response_room import ResponseRoom, max_held_bytes, unread_error
from headrace.wire.grpc.status import error_status
from headrace.wire.grpc.streaming_call import StreamingCall
from headrace.wire.http2.connection import Http2Connection
from headrace.wire.http2.frames import ErrorCode, HeaderField
from headrace.wire.http2.stream import Http2Limits, Http2Stream
from headrace.wire.tls import ServerTls


class GrpcServer:
    """Serves `Methods` over gRPC on our HTTP/2.

    Ownership: the event loop on which it was started.

    Args:
        methods: served methods.
        client_limits: limits of all connections and requests.
        tls: TLS of the server, None for HTTP/2 with prior knowledge.
        limits: of one connection; None: from `client_limits`.
        max_age_s: age of a connection at which it is shut down gracefully; 0 for never.

    Attributes:
        client_limits: see Args.
        codec_threads: decompress large messages.
        deadline_timer: ends calls at their deadlines; exists from `start` on.
        rooms: room for responses of each open connection.
        peer_names: names in the client certificate of each open connection that has one.
        stopping: True from `stop` on.
    """

    deadline_timer: DeadlineTimer

    def __init__(
        self,
        methods: Methods,
        client_limits: ClientLimits,
        tls: ServerTls | None,
        limits: Http2Limits | None = None,
        max_age_s: float = 0.0,
    ) -> None:
        self._methods = methods
        self.client_limits = client_limits
        self.codec_threads = methods.codec_threads
        client_limits.connections = 0
        self._tls = tls
        self._listener: TlsListener | PassedConnections | None = None
        limits = limits or _http2_limits(client_limits)
        max_message_bytes = client_limits.limits.max_body_bytes
        self._limits = replace(
            limits,
            max_age_s=max_age_s or limits.max_age_s,
            max_granted_bytes=max(limits.max_granted_bytes, max_message_bytes + PREFIX_BYTES),
            max_unsent_bytes=max(limits.max_unsent_bytes, max_held_bytes(max_message_bytes)),
        )
        self._connections: set[Http2Connection] = set()
        self._reserve = GrpcReserve(client_limits)
        self.rooms: dict[Http2Connection, ResponseRoom] = {}
        self._access = methods.options_reader.access
        self._access.on_change(self._forget_heads)
        methods.options_reader.on_change(self._forget_heads)
        self.peer_names: dict[Http2Connection, tuple[str, ...]] = {}
        self._server: asyncio.Server | None = None
        self.stopping = False
        self._disconnected = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        """Listen on an address.

        Args:
            host: address or name.
            port: 0 for a free one.

        Returns:
            The port.

        Raises:
            OSError: the address is not available, or a TLS file is invalid.
        """
        loop = asyncio.get_running_loop()
        self.deadline_timer = DeadlineTimer(loop)
        if self._tls is not None:
            sock = bind(host, port)
            limits = self.client_limits
            reserved, timeout_s = limits.reserved_connections, self._limits.handshake_s
            self._listener = TlsListener(sock, self._connection, self._tls, "h2", limits, timeout_s, reserved)
            return int(sock.getsockname()[1])
        self._server = await loop.create_server(self._connection, host, port, backlog=BACKLOG, reuse_address=True)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def open(self) -> PassedConnections:
        """Serve connections that another process accepts, instead of `start`; returns what takes their sockets."""
        self.deadline_timer = DeadlineTimer(asyncio.get_running_loop())
        limits = self.client_limits
        reserved, timeout_s = limits.reserved_connections, self._limits.handshake_s
        listener = PassedConnections(self._connection, self._tls, "h2", limits, timeout_s, reserved)
        self._listener = listener
        return listener

    def _connection(self) -> asyncio.Protocol:
        return Http2Connection(self, self._limits, asyncio.get_running_loop())

    async def stop(self, grace_s: float) -> None:
        """Shut down gracefully: refuse new calls (GOAWAY), wait for running calls, then end the rest with UNAVAILABLE.

        Args:
            grace_s: longest wait for running calls, in seconds.
        """
        listener = self._server or self._listener
        if listener is None:
            return
        end_ns = monotonic_ns() + int(grace_s * NS_PER_S)
        self.stopping = True
        listener.close()
        for connection in list(self._connections):
            for stream in list(connection.streams.values()):
                if isinstance(stream, StreamingCall):
                    stream.notify_stopping()
            connection.timers.start_graceful_shutdown()
        await self._wait_until_disconnected((end_ns - monotonic_ns()) / NS_PER_S)
        rejection = Unavailable("the server is shutting down and could not wait for this request")
        for connection in list(self._connections):
            for stream in list(connection.streams.values()):
                if isinstance(stream, ServerCall):
                    stream.fail(rejection)
            connection.close()
        await self._wait_until_disconnected(self._limits.linger_s + 0.5)
        self.deadline_timer.close()

    def give_up(self, most: int) -> None:
        """Send GOAWAY to clients with their next calls, after which they connect anew: no call is lost, and streams go on.

        Args:
            most: connections that get it, those that have it already included.
        """
        rest = sorted(self._connections, key=lambda connection: not connection.timers.is_shutting_down)[: max(most, 0)]
        for connection in rest:
            connection.timers.leave()

    @property
    def running_calls(self) -> int:
        """Number of calls that have begun and not ended."""
        return sum([len(connection.streams) for connection in self._connections])

    async def _wait_until_disconnected(self, timeout_s: float) -> None:
        if self._connections:
            self._disconnected.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._disconnected.wait(), max(0.0, timeout_s))

    # --- http2.connection.Application ---------------------------------------------------------------------------------

    def parse_head(self, fields: Sequence[HeaderField] | None) -> RequestHead:
        """Parse header fields into a head."""
        return parse_request_head(self._methods, fields)

    def open_stream(
        self, connection: Http2Connection, stream_id: int, head: RequestHead, end: bool
    ) -> Http2Stream | None:
        """Create the stream of a new request; None if the request was answered here, with END_STREAM."""
        if self._reserve.over and connection in self._reserve.over:
            head = self._reserve.admit(connection, head)
        if self._access.has_keys and head.method is not None:
            head = self._check_principal(connection, head)
        if head.method is not None:
            return (StreamingCall if head.is_stream else UnaryCall)(connection, stream_id, head, self)
        if not head.rejection:
            return RejectedRequest(connection, stream_id, head)
        if head.exceeded_limit:
            self.client_limits.hit(head.exceeded_limit)
        connection.write_buffer.write_control(head.rejection_frame(stream_id))
        if not end:
            connection.leave_rest(stream_id)
        return None

    def _check_principal(self, connection: Http2Connection, head: RequestHead) -> RequestHead:
        """Return the head with the principal of its key or of the client certificate, or a rejection if it has no rights.

        A head without a key has the anonymous principal. It is cached by its bytes, for the connection; the principal of the
        certificate belongs to the connection.
        """
        principal = head.options.principal
        names = self.peer_names.get(connection)
        if names and principal is self._access.anonymous:
            peer = self._access.certificate_principal(names)
            if peer is not None:
                principal = peer
                head = replace(head, options=replace(head.options, principal=peer, client=peer.name))
        if principal is not None and not principal.is_authenticated:
            if principal is not self._access.anonymous:
                connection.forget_heads()  # the same token may be valid later (`nbf`, new keys of the issuer)
            if head.needs_key:
                try:
                    principal.authenticate()
                except HeadraceError as error:
                    return rejected(error_status(error))
        return head

    def _forget_heads(self) -> None:
        """Empty the caches of heads: their principals, or the headers that are read, have changed."""
        for connection in self._connections:
            connection.forget_heads()

    def connection_opened(self, connection: Http2Connection) -> bool:
        """Accept or refuse a new connection; False refuses it."""
        self._connections.add(connection)
        room = self.rooms[connection] = ResponseRoom(self.client_limits, partial(_drop_unread, connection))
        connection.write_buffer.on_unread = partial(self._on_unread, connection, room)
        names = certificate_names(connection.transport.get_extra_info("peercert"))
        if names:
            self.peer_names[connection] = names
        self._reserve.add(connection, room)
        return not self.stopping

    def connection_closed(self, connection: Http2Connection) -> None:
        """Called once after the connection and all its streams are closed."""
        self._connections.discard(connection)
        self.rooms.pop(connection).close()
        self.peer_names.pop(connection, None)
        self._reserve.discard(connection)
        if not self._connections:
            self._disconnected.set()

    def peer(self, connection: Http2Connection) -> tuple[str, int] | None:
        """Return host and port of the client of a connection; None if the system does not report it."""
        name = connection.transport.get_extra_info("peername")
        return name[:2] if name else None

    def _on_unread(self, connection: Http2Connection, room: ResponseRoom, unread_bytes: int) -> None:
        """Account the unread responses of a connection. Above `max_unsent_bytes` the calls that still run are refused.

        That many are unread only if the responses are larger than those that the model has sent before.
        """
        room.update(unread_bytes)
        if unread_bytes > self._limits.max_unsent_bytes:
            error = unread_error()
            for stream in list(connection.streams.values()):
                if isinstance(stream, UnaryCall) and stream.is_running:
                    stream.fail(error)


def _drop_unread(connection: Http2Connection) -> bool:
    """Reset the streams whose responses the client does not read; False if there is nothing to drop."""
    blocked = [stream for stream in connection.streams.values() if stream.pending]
    for stream in blocked:
        stream.reset(ErrorCode.CANCEL)
    if not blocked and connection.transport.get_write_buffer_size():
        connection.transport.abort()
        return True
    return bool(blocked)


def _http2_limits(client_limits: ClientLimits) -> Http2Limits:
    """Limits of one connection, from the options of the server."""
    limits = client_limits.limits
    return Http2Limits(
        streams=limits.max_streams,
        header_bytes=2 * limits.max_header_bytes,
        header_list_bytes=limits.max_header_bytes,
        handshake_s=min(Http2Limits().handshake_s, limits.header_timeout_s),
        frame_s=limits.header_timeout_s,
        message_s=limits.body_timeout_s,
        stall_s=limits.stall_timeout_s,
        on_limit_reached=client_limits.hit,
    )
