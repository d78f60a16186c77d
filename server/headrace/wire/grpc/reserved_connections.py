"""gRPC connections over `max_connections`: see `ConnectionReserve`. Health checks are served on them."""

from __future__ import annotations

from headrace.core.errors import Overloaded
from headrace.core.limits import ClientLimits, ConnectionReserve
from headrace.wire.grpc.call import ServerCall
from headrace.wire.grpc.framing import RequestHead, rejected
from headrace.wire.grpc.response_room import ResponseRoom
from headrace.wire.grpc.status import error_status
from headrace.wire.http2.connection import Http2Connection
from headrace.wire.http2.frames import ErrorCode
from headrace.wire.http2.stream import Http2Stream


class LimitedGrpcConnection:
    """A gRPC connection that takes part in the limit of connections; see `LimitedConnection`.

    Ownership: the event loop.

    Args:
        connection: the connection.
        room: its unread responses.
    """

    __slots__ = ("_connection", "_room")

    def __init__(self, connection: Http2Connection, room: ResponseRoom) -> None:
        self._connection, self._room = connection, room

    def idle_rank(self) -> tuple[int, float] | None:
        """Return the rank in which idle connections, and those of slow clients, are closed, lowest first; None for others. The
        time has the precision of the connection's ticks.

        A connection without a stream is idle in the middle of a frame or header block too: GOAWAY says that the call which it
        would open is not served, so clients send it again.
        """
        connection = self._connection
        if connection.cancelled_running or connection.closing or connection.transport.is_closing():
            return None
        if connection.streams or connection.transport.get_write_buffer_size():
            return (2, 0) if all(map(self._is_slow, connection.streams.values() or [None])) else None
        return connection.last_stream_id > 0, connection.timers.last_active_ns

    def _is_slow(self, stream: Http2Stream | None) -> bool:
        """Return True if a stream waits for a client that has been too slow; None for what the transport holds."""
        if stream is None or stream.pending:
            return self._room.is_slow
        if not stream.awaiting_body or not isinstance(stream, ServerCall):  # a rejected request only reads the rest
            return stream.awaiting_body
        return self._room.bodies.is_slow(stream.reservation)

    def close_idle(self) -> None:
        """Close the connection, which is idle. GOAWAY, after which the client sends its next call on another connection."""
        connection = self._connection
        for stream in list(connection.streams.values()):
            if stream.awaiting_body and not stream.pending:
                stream.on_timeout()
            else:
                stream.reset(ErrorCode.CANCEL)
        connection.timers.send_final_goaway()

    def refuse_connection(self, with_response: bool) -> None:
        """Close a connection over the limit that has sent no complete request."""
        connection = self._connection
        connection.timers.send_final_goaway()
        if not with_response and not connection.transport.is_closing():
            connection.transport.close()


class GrpcReserve:
    """All gRPC connections; decides on the first call of those over the limit.

    Ownership: the event loop.

    Args:
        client_limits: the limit; counts the connections.

    Attributes:
        over: connections over the limit that have no place.
    """

    def __init__(self, client_limits: ClientLimits) -> None:
        self._client_limits = client_limits
        self._reserve = ConnectionReserve(client_limits)
        self._connections: dict[Http2Connection, LimitedGrpcConnection] = {}
        self.over: set[Http2Connection] = set()

    def add(self, connection: Http2Connection, room: ResponseRoom) -> None:
        """Count and add a new connection with the room for its responses."""
        limited = self._connections[connection] = LimitedGrpcConnection(connection, room)
        if self._client_limits.enter():
            self._reserve.add(limited)
        else:
            self.over.add(connection)
            self._reserve.add_over(limited)

    def discard(self, connection: Http2Connection) -> None:
        """Remove a closed connection."""
        self._client_limits.leave()
        self._reserve.discard(self._connections.pop(connection))
        self.over.discard(connection)

    def admit(self, connection: Http2Connection, head: RequestHead) -> RequestHead:
        """Apply the limit to a call on a connection over it.

        Args:
            connection: in `over`.
            head: of the call.

        Returns:
            `head` for a health check, and if the connection gets a place; else a rejection. After a health check and a
            rejection the connection is closed.
        """
        is_health_check = head.method is not None and not head.needs_key and not head.is_stream
        if not is_health_check:
            if self._reserve.admit(self._connections[connection]):
                self.over.discard(connection)
                return head
            text = f"the server has {self._client_limits.limits.max_connections} connections, its limit: retry later"
            head = rejected(error_status(Overloaded(text)))
        connection.loop.call_soon(connection.timers.send_final_goaway)  # after this call has opened its stream
        return head
