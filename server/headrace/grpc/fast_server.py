"""The fast gRPC engine: HTTP/2 and gRPC in Python, on the event loop that serves HTTP.

It supports what inference clients use: unary and bidirectional streaming methods, deadlines, cancellation, compressed requests,
flow control, TLS, graceful shutdown. Responses are never compressed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from weakref import ref

from headrace.accept import BACKLOG, TlsListener, bind
from headrace.core.access import certificate_names
from headrace.core.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    Unavailable,
    forget_frames,
)
from headrace.core.limits import BodyReservation, ClientLimits
from headrace.grpc.fast_wire import (
    PREFIX,
    PREFIX_BYTES,
    MessageReader,
    RequestHead,
    error_trailers,
    initial_headers,
    ok_trailers,
    parse_request_head,
    rejected,
    unary_response,
    unpack_prefix,
)
from headrace.grpc.methods import Message, Methods
from headrace.grpc.response_room import ResponseRoom, max_held_bytes, unread_error
from headrace.grpc.status import ErrorStatus, error_status
from headrace.http2.connection import Http2Connection
from headrace.http2.frames import DATA, END_STREAM, FRAME_HEADER, ErrorCode, HeaderField, rst_stream
from headrace.http2.stream import DATA_CREDIT_SHIFT, STREAM_CREDIT, Http2Limits, Http2Stream
from headrace.tls import ServerTls

# Smaller messages are joined and sent in one piece; larger ones are sent part by part.
_JOIN_BELOW_BYTES = 16384
# Backpressure: `StreamingCall.write` waits while more than this is pending.
_WRITE_AHEAD_BYTES = 64 << 10
# Frames that a message adds to the frame budget.
_MESSAGE_CREDIT = 4
# Body bytes of a request that is not gRPC after which its response is sent; the rest is not read.
_REJECTED_BODY_BYTES = 65536
# Frames that such a request subtracts from the frame budget, beside the cost of its stream, which it does not get back.
_REJECTION_COST = 5
# A client resets its calls at their deadlines, before the server expires them, and when it has waited long enough. That is no
# rapid reset, and costs nothing: of a call of at least this age, or one of which this part of the timeout has passed.
_HONEST_RESET_NS = 20 * NS_PER_MS
_MIN_TIMEOUT_NS = 2 * NS_PER_MS  # clients choose the timeout: a shorter one would make rapid resets free
_HONEST_TIMEOUT_SHARE = 0.9
# Calls that end at their deadline in one iteration of the event loop: clients may choose one deadline for thousands of them.
_MAX_EXPIRED = 256


class FastGrpcServer:
    """`GrpcEngine` on our HTTP/2 server.

    Ownership: the event loop on which it was started.

    Args:
        methods: served methods.
        client_limits: limits of all connections and requests.
        tls: TLS of the server, None for HTTP/2 with prior knowledge.
        limits: of one connection; None: from `client_limits`.

    Attributes:
        client_limits: see Args.
        deadline_timer: ends calls at their deadlines; exists from `start` on.
        rooms: room for responses of each open connection.
        stopping: True from `stop` on.
    """

    deadline_timer: DeadlineTimer

    def __init__(
        self, methods: Methods, client_limits: ClientLimits, tls: ServerTls | None, limits: Http2Limits | None = None
    ) -> None:
        self._methods = methods
        self.client_limits = client_limits
        client_limits.connections = 0
        self._tls = tls
        self._tls_listener: TlsListener | None = None
        limits = limits or _http2_limits(client_limits)
        max_message_bytes = client_limits.limits.max_body_bytes
        self._limits = replace(
            limits,
            max_granted_bytes=max(limits.max_granted_bytes, max_message_bytes + PREFIX_BYTES),
            max_unsent_bytes=max(limits.max_unsent_bytes, max_held_bytes(max_message_bytes)),
        )
        self._connections: set[Http2Connection] = set()
        self.rooms: dict[Http2Connection, ResponseRoom] = {}
        self._access = methods.options_reader.access
        self._access.on_change(self._forget_heads)
        self._peer_names: dict[Http2Connection, tuple[str, ...]] = {}
        self._server: asyncio.Server | None = None
        self.stopping = False
        self._disconnected = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        """See `GrpcEngine.start`."""
        loop = asyncio.get_running_loop()
        self.deadline_timer = DeadlineTimer(loop)

        def connection() -> asyncio.Protocol:
            return Http2Connection(self, self._limits, loop)

        if self._tls is not None:
            sock = bind(host, port)
            self._tls_listener = TlsListener(
                sock, connection, self._tls, "h2", self.client_limits, self._limits.handshake_s
            )
            return int(sock.getsockname()[1])
        self._server = await loop.create_server(connection, host, port, backlog=BACKLOG, reuse_address=True)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self, grace_s: float) -> None:
        """See `GrpcEngine.stop`."""
        listener = self._server or self._tls_listener
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
                if isinstance(stream, FastCall):
                    stream.fail(rejection)
            connection.close()
        await self._wait_until_disconnected(self._limits.linger_s + 0.5)
        self.deadline_timer.close()

    async def _wait_until_disconnected(self, timeout_s: float) -> None:
        if self._connections:
            self._disconnected.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._disconnected.wait(), max(0.0, timeout_s))

    # --- http2.connection.Application ---------------------------------------------------------------------------------

    def parse_head(self, fields: Sequence[HeaderField] | None) -> RequestHead:
        """See `Application`."""
        return parse_request_head(self._methods, fields)

    def open_stream(
        self, connection: Http2Connection, stream_id: int, head: RequestHead, end: bool
    ) -> Http2Stream | None:
        """See `Application`."""
        if self._access.has_keys and head.method is not None:
            head = self._check_principal(connection, head)
        if head.method is not None:
            return (StreamingCall if head.is_stream else UnaryCall)(connection, stream_id, head, self)
        if not head.rejection:
            return RejectedRequest(connection, stream_id, head)
        if head.exceeded_limit:
            self.client_limits.hit(head.exceeded_limit)
        response = head.rejection_frame(stream_id)
        if not end:
            response += rst_stream(stream_id, ErrorCode.NO_ERROR)  # RFC 9113, section 8.1: the body is not read
        connection.write_buffer.write_control(response)
        return None

    def _check_principal(self, connection: Http2Connection, head: RequestHead) -> RequestHead:
        """Return the head with the principal of its key or of the client certificate, or a rejection if it has no rights.

        A head without a key has the anonymous principal. It is cached by its bytes, for the connection; the principal of the
        certificate belongs to the connection.
        """
        principal = head.options.principal
        names = self._peer_names.get(connection)
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
        """Empty the caches of heads: their principals have changed."""
        for connection in self._connections:
            connection.forget_heads()

    def connection_opened(self, connection: Http2Connection) -> bool:
        """See `Application`."""
        self._connections.add(connection)
        room = self.rooms[connection] = ResponseRoom(self.client_limits, partial(_drop_unread, connection))
        connection.write_buffer.on_unread = partial(self._on_unread, connection, room)
        names = certificate_names(connection.transport.get_extra_info("peercert"))
        if names:
            self._peer_names[connection] = names
        return self.client_limits.enter() and not self.stopping

    def connection_closed(self, connection: Http2Connection) -> None:
        """See `Application`."""
        self._connections.discard(connection)
        self.rooms.pop(connection).close()
        self._peer_names.pop(connection, None)
        self.client_limits.leave()
        if not self._connections:
            self._disconnected.set()

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


class RejectedRequest(Http2Stream):
    """A request that is not gRPC: its body is read and dropped, the response is an HTTP status with one line of text.

    Args:
        connection: of the stream.
        stream_id: its id in HTTP/2.
        head: parsed request headers, with an `http_status`.
    """

    __slots__ = ("_body_bytes", "_head")

    connection: Http2Connection

    def __init__(self, connection: Http2Connection, stream_id: int, head: RequestHead) -> None:
        super().__init__(connection, stream_id)
        self._head = head
        self._body_bytes = 0

    def on_data(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """Respond at the end of the body, or before it if the body is large."""
        if not self.awaiting_body:
            return
        self._body_bytes += stop - start
        content_length = self._head.content_length
        if content_length >= 0 and (self._body_bytes > content_length or (end and self._body_bytes != content_length)):
            self.connection.stream_error(self.stream_id, ErrorCode.PROTOCOL_ERROR)  # RFC 9113, section 8.1.1
        elif end or self._body_bytes > _REJECTED_BODY_BYTES:
            self.connection.frame_budget.spend(_REJECTION_COST)
            self._respond()

    def on_closed(self) -> None:
        """See `Http2Stream`."""

    def on_timeout(self) -> None:
        """Respond without the rest of the body."""
        self._respond()

    def _respond(self) -> None:
        self.awaiting_body = False
        self.frame_credit = 0
        write_buffer = self.connection.write_buffer
        write_buffer.write_control(self._head.http_headers(self.stream_id))
        write_buffer.queue_data(self, [self._head.http_body])
        write_buffer.end_stream(self, FRAME_HEADER.pack(DATA, END_STREAM, self.stream_id))


class FastCall(Http2Stream):
    """Common part of unary and streaming calls: one object is the HTTP/2 stream and the call that its method sees.

    Args:
        connection: of the stream.
        stream_id: its id in HTTP/2.
        head: parsed request headers.
        server: of the call.

    Attributes:
        deadline_ns: see `GrpcCall`.
        completion: see `GrpcCall`.
        options: see `GrpcCall`.
        received_ns: see `GrpcCall`.
        reservation: reservation of the call's bytes in the budget for all bodies, from the first byte of a message on.
        room: see `GrpcCall`.
    """

    __slots__ = (
        "__weakref__",
        "_body_bytes",
        "_client_limits",
        "_counted_cancelled",
        "_head",
        "_headers_sent",
        "_reader",
        "_server",
        "_task",
        "completion",
        "deadline_ns",
        "options",
        "received_ns",
        "reservation",
    )

    connection: Http2Connection

    def __init__(self, connection: Http2Connection, stream_id: int, head: RequestHead, server: FastGrpcServer) -> None:
        super().__init__(connection, stream_id)
        self._head = head
        self._server = server
        self._client_limits = server.client_limits
        self.reservation = BodyReservation(server.client_limits)
        self.options = head.options
        self.received_ns = 0
        self._reader: MessageReader | None = None
        self._body_bytes = 0
        self._headers_sent = self._counted_cancelled = False
        self._task: asyncio.Task[None] | None = None
        self.completion: LoopCompletion | None = None
        self.deadline_ns = 0
        if head.timeout_ns >= 0:
            self.deadline_ns = monotonic_ns() + head.timeout_ns
            server.deadline_timer.add(self)

    def on_closed(self) -> None:
        """Cancel the method: the client has reset the stream or disconnected."""
        self._cancel_method(Cancelled("the client disconnected"))

    @property
    def reset_credit(self) -> int:
        """See `Http2Stream`: all of its cost for a call that the client has waited for, nothing for a rapid reset."""
        now_ns, timeout_ns = monotonic_ns(), self._head.timeout_ns
        is_honest = self.received_ns and now_ns - self.received_ns >= _HONEST_RESET_NS
        if timeout_ns >= _MIN_TIMEOUT_NS and not is_honest:
            is_honest = self.deadline_ns - now_ns <= timeout_ns * (1 - _HONEST_TIMEOUT_SHARE)
        return self.frame_credit - STREAM_CREDIT + 1 if is_honest else 0

    def on_timeout(self) -> None:
        """Fail the call: the message has not arrived in time."""
        self.fail(DeadlineExceeded("the request did not arrive in time"))

    def on_tick(self, now_ns: int) -> bool:
        """Observe the rate of an incomplete message; see `Http2Stream`."""
        if not self.reservation.held_bytes or self in self.connection.window_grants.waiting:
            self.reservation.pause()
            return False
        return self.reservation.observe(self._body_bytes, now_ns, self._give_way)

    def _give_way(self) -> bool:
        """Refuse an incomplete message that arrives slowly while memory for bodies is full; False if it is complete."""
        if self.closed or not self.awaiting_body:
            return False
        self._client_limits.hit("min_body_bytes_per_s")
        self.fail(DeadlineExceeded("the request arrives too slowly, and memory for request bodies is full"))
        return True

    @property
    def room(self) -> ResponseRoom:
        """See the class."""
        return self._server.rooms[self.connection]

    @property
    def is_running(self) -> bool:
        """True while the method runs, and no part of the response is written."""
        return self._task is not None and not self._task.done() and not self.pending

    def expire(self) -> None:
        """Fail the call at its deadline. A no-op if it has ended."""
        if not self.closed:
            self.fail(DeadlineExceeded("the call's deadline has passed"))

    def fail(self, error: HeadraceError) -> None:
        """End the call with an error, and cancel its method."""
        self._send_error(error_status(error))
        self._cancel_method(error)

    async def _serve(self, method: Callable[..., Awaitable[Message | None]], *message: bytes) -> None:
        """Run the method with the message of a unary call, or with none, and end the call."""
        try:
            response = await method(*message, self)
            del message
            self._send_response(response or [])
        except asyncio.CancelledError as error:
            self._send_error(ErrorStatus("CANCELLED", "the server has cancelled the call"))
            forget_frames(error)
            raise
        except Exception as error:
            self._send_error(error_status(error))
            forget_frames(error)
        finally:
            self.reservation.end()

    @property
    def peer(self) -> str:
        """See `GrpcCall`."""
        name = self.connection.transport.get_extra_info("peername")
        host, port = name[:2] if name else ("", 0)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _send_headers(self) -> None:
        """Send the HEADERS frame before the first message, once."""
        if not self._headers_sent:
            self._headers_sent = True
            self.connection.write_buffer.write_control(initial_headers(self.stream_id))

    def _send_response(self, message: Message) -> None:
        """Send the response of a unary call, if any, and end the call with status OK."""
        if not self.closed:
            write_buffer = self.connection.write_buffer
            if message:
                message = _with_prefix(message)
                self.room.admit(sum(map(len, message)))
            self._send_headers()
            if message:
                write_buffer.queue_data(self, message)
            write_buffer.end_stream(self, ok_trailers(self.stream_id))

    def _send_error(self, status: ErrorStatus) -> None:
        if not self.closed:
            self.frame_credit -= STREAM_CREDIT  # it returns its cost, that of its header block too, and earns nothing
            write_buffer = self.connection.write_buffer
            if self.pending:
                write_buffer.discard(self)
            write_buffer.end_stream(self, error_trailers(status, self.stream_id, self._headers_sent))

    def _cancel_method(self, error: HeadraceError) -> None:
        """Cancel the method of a closed stream. It counts against the limit of the connection until it has ended."""
        task = self._task
        if task is None:
            self.reservation.end()
        elif not task.done() and not self._counted_cancelled:
            self._counted_cancelled = True
            self.connection.cancelled_running += 1
            task.add_done_callback(self._on_method_done)
            if self.completion is not None:
                self.completion.settle(error)  # resumes the method with a more precise error than a cancellation
            else:
                task.cancel()

    def _on_method_done(self, _task: asyncio.Task[None]) -> None:
        # The task holds its CancelledError, whose traceback holds this call: a reference cycle without this line.
        self._task = None
        self.reservation.end()  # for a task that was cancelled before its first step
        self.connection.cancelled_running -= 1

    def _violates_content_length(self, size_bytes: int, end: bool) -> bool:
        """Count a part of the body; reset the stream and return True if the body contradicts content-length."""
        self._body_bytes += size_bytes
        content_length = self._head.content_length
        if content_length >= 0 and (self._body_bytes > content_length or (end and self._body_bytes != content_length)):
            self.connection.stream_error(self.stream_id, ErrorCode.PROTOCOL_ERROR)  # RFC 9113, section 8.1.1
            return True
        return False

    def _read_data(self, reader: MessageReader, data: bytes, start: int, stop: int) -> None:
        """Read a part of the body into messages.

        Very small parts use up the frame budget of the connection; messages and large parts refill it.

        Raises:
            Overloaded: the budget for all bodies is used up.
            BadRequest: the part is not valid.
            TooLarge: a message exceeds the limit.
        """
        self.reservation.grow(stop - start)
        before = reader.complete
        reader.feed(data, start, stop)
        credit = ((stop - start) >> DATA_CREDIT_SHIFT) + _MESSAGE_CREDIT * (reader.complete - before)
        self.connection.frame_budget.spend(1 - credit)


class UnaryCall(FastCall):
    """A call with one request and one response message; see `GrpcCall`."""

    __slots__ = ()

    def on_data(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """Receive a part of the message, usually all of it, and start the method when it is complete."""
        size_bytes = stop - start
        try:
            if end and self._reader is None and size_bytes >= PREFIX_BYTES:
                flag, length = unpack_prefix(data, start)
                if (
                    not flag
                    and length == size_bytes - PREFIX_BYTES
                    and length <= self._client_limits.limits.max_body_bytes
                    and self._head.content_length in (-1, size_bytes)
                ):
                    self.reservation.grow(size_bytes)
                    self._start_method(data[start + PREFIX_BYTES : stop])
                    return
            if self._violates_content_length(size_bytes, end):
                return
            message = self._assemble_message(data, start, stop, end)
        except HeadraceError as error:
            self._send_error(error_status(error))
            self.reservation.end()
            return
        if message is not None:
            self._start_method(message)

    def _assemble_message(self, data: bytes, start: int, stop: int, end: bool) -> bytes | None:
        """Read a part of the message; returns the message when it is complete. Raises as `_read_data`."""
        reader = self._reader
        if reader is None:
            reader = self._reader = MessageReader(self._head.encoding, self._client_limits)
        self._read_data(reader, data, start, stop)
        complete, partial = reader.complete, reader.partial
        if complete > 1 or (complete and partial):
            raise BadRequest("more than one message for a unary method")
        if not end:
            self.awaiting_body = True
            if partial:
                self.request_window(reader.missing_bytes)
            return None
        if partial:
            raise BadRequest("the client closed the stream in the middle of a message")
        if not complete:
            raise BadRequest("no message for a unary method")
        message, wire_bytes = reader.pop()
        self.reservation.shrink(wire_bytes)
        self.reservation.grow(len(message))
        return message

    def _start_method(self, message: bytes) -> None:
        self.awaiting_body = False
        self._reader = None
        self.received_ns = monotonic_ns()
        method = self._head.method
        assert method is not None
        self._task = self.connection.loop.create_task(self._serve(method, message))

    def _send_response(self, message: Message) -> None:
        if not self.closed and sum(map(len, message)) < _JOIN_BELOW_BYTES:
            content = b"".join(message)
            connection, write_buffer = self.connection, self.connection.write_buffer
            if write_buffer.reserve_window(self, len(content) + PREFIX_BYTES):
                frames = unary_response(self.stream_id, content)
                if len(connection.streams) > 1:
                    write_buffer.write(frames)
                else:
                    write_buffer.flush(frames)  # no other stream is open whose frames could join this write
                connection.stream_finished(self)
                return
        super()._send_response(message)


class StreamingCall(FastCall):
    """A call with a stream of messages in both directions; see `StreamCall`."""

    __slots__ = ("_drained", "_waiter", "stopping")

    _reader: MessageReader

    def __init__(self, connection: Http2Connection, stream_id: int, head: RequestHead, server: FastGrpcServer) -> None:
        super().__init__(connection, stream_id, head, server)
        self._reader = MessageReader(head.encoding, server.client_limits)
        self._waiter: asyncio.Future[None] | None = None
        self._drained = asyncio.Event()
        self.awaiting_body = False
        self.stopping = server.stopping
        self.received_ns = monotonic_ns()
        assert head.method is not None
        self._task = connection.loop.create_task(self._serve(head.method))

    def on_data(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """Receive a part of a message, or many messages, and wake the reader."""
        if self._violates_content_length(stop - start, end):
            return
        reader = self._reader
        try:
            self._read_data(reader, data, start, stop)
            if end and reader.partial:
                raise BadRequest("the client closed the stream in the middle of a message")
        except HeadraceError as error:
            self.fail(error)
            return
        if reader.partial:
            if not self.awaiting_body:
                self.progress_tick = self.connection.ticks
            if not reader.complete:
                self.request_window(reader.missing_bytes)
        self.awaiting_body = reader.partial
        self._wake_reader()

    def on_tick(self, now_ns: int) -> bool:
        """Observe the rate of an incomplete message; see `Http2Stream`.

        While complete messages wait for the method, the receive window stays closed: the server delays the rest, not the client.
        """
        if self._reader.complete:
            self.progress_tick = self.connection.ticks
            self.reservation.pause()
            return False
        return super().on_tick(now_ns)

    def on_flushed(self) -> None:
        """Wake the writer when few enough bytes are pending."""
        if self.pending_bytes <= _WRITE_AHEAD_BYTES:
            self._drained.set()

    async def read(self) -> bytes | None:
        """See `StreamCall`."""
        while True:
            if self.closed:
                raise Cancelled("the client disconnected")
            if self.stopping:
                raise Unavailable("the server is shutting down")
            if self._reader.complete:
                message, wire_bytes = self._reader.pop()
                self.reservation.shrink(wire_bytes)
                if not self._reader.complete:
                    self._restore_window()
                return message
            if not self.remote_open:
                return None
            self._waiter = self.connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def write(self, message: Message) -> None:
        """See `StreamCall`."""
        if self.closed:
            raise Cancelled("the client disconnected")
        write_buffer = self.connection.write_buffer
        self._send_headers()
        if sum(map(len, message)) < _JOIN_BELOW_BYTES:
            content = b"".join(message)
            size_bytes = len(content) + PREFIX_BYTES
            if write_buffer.reserve_window(self, size_bytes):
                header = FRAME_HEADER.pack(size_bytes << 8 | DATA, 0, self.stream_id)
                write_buffer.write((header, PREFIX.pack(0, len(content)), content))
                self.connection.frame_budget.available += _MESSAGE_CREDIT
                return
        message = _with_prefix(message)
        self.room.admit(sum(map(len, message)))
        write_buffer.queue_data(self, message)
        while self.pending_bytes > _WRITE_AHEAD_BYTES and not self.closed:
            self._drained.clear()
            await self._drained.wait()
        if self.closed:
            raise Cancelled("the client disconnected")

    def notify_stopping(self) -> None:
        """Set `stopping`, and end a `read` in progress with Unavailable."""
        self.stopping = True
        self._wake_reader()

    def _cancel_method(self, error: HeadraceError) -> None:
        self._drained.set()
        self._wake_reader()
        super()._cancel_method(error)

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _restore_window(self) -> None:
        """Reopen the receive window after all received messages are read."""
        self.connection.window_grants.release(self)
        window_bytes = self.connection.limits.stream_window_bytes
        if self.receive_window < window_bytes >> 1:
            self.increase_window(window_bytes - self.receive_window)
        if self._reader.partial:
            self.request_window(self._reader.missing_bytes)


def _with_prefix(message: Message) -> Message:
    """Prepend the length prefix of a message. Sizes are in bytes, also for memoryviews of larger items."""
    return [PREFIX.pack(0, sum(memoryview(part).nbytes for part in message)), *message]


class DeadlineTimer:
    """Ends calls at their deadlines, with one heap and one event loop timer for all calls.

    The heap holds weak references: the memory of an ended call must not stay until a deadline that its client chose.

    Ownership: the event loop.

    Args:
        loop: event loop of the calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[int, int, ref[FastCall]]] = []
        self._numbers = count()
        self._purge_at = 1024
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns = 0

    def add(self, call: FastCall) -> None:
        """Call `call.expire` at its deadline if the call is still open."""
        heap = self._heap
        heappush(heap, (call.deadline_ns, next(self._numbers), ref(call)))
        if len(heap) >= self._purge_at:
            # Most calls end long before their deadline: without the purge their entries would stay until then.
            heap[:] = [entry for entry in heap if _is_open(entry[2])]
            heapify(heap)
            self._purge_at = max(1024, 2 * len(heap))
        if not self._armed_ns or call.deadline_ns < self._armed_ns:
            self._arm(call.deadline_ns)

    def close(self) -> None:
        """Forget all deadlines."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, deadline_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_ns = deadline_ns
        self._timer = self._loop.call_later(max(0, deadline_ns - monotonic_ns()) / NS_PER_S, self._fire)

    def _fire(self) -> None:
        heap, now_ns = self._heap, monotonic_ns()
        expired = 0
        try:
            while heap and (heap[0][0] <= now_ns or not _is_open(heap[0][2])) and expired < _MAX_EXPIRED:
                call = heappop(heap)[2]()
                expired += 1
                if call is not None:
                    call.expire()
        finally:  # an error of one call must not end the deadlines of all
            self._timer, self._armed_ns = None, 0
            if heap:
                self._arm(heap[0][0])


def _is_open(call: ref[FastCall]) -> bool:
    target = call()
    return target is not None and not target.closed
