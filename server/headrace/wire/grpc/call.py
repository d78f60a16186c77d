"""Calls of the gRPC server: one object is the HTTP/2 stream and the call that its method sees."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol
from weakref import ref

from headrace.core.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    forget_frames,
)
from headrace.core.limits import BodyReservation, ClientLimits
from headrace.wire.grpc.framing import (
    MESSAGE_OVERHEAD_BYTES,
    PREFIX,
    PREFIX_BYTES,
    MessageReader,
    RequestHead,
    error_trailers,
    initial_headers,
    ok_trailers,
    unary_response,
    unpack_prefix,
)
from headrace.wire.grpc.message_memory import message_allocator
from headrace.wire.grpc.methods import GrpcCall, Message, RequestMessage, StartedRequest
from headrace.wire.grpc.response_room import ResponseRoom
from headrace.wire.grpc.status import ErrorStatus, error_status
from headrace.wire.http2.connection import Http2Connection
from headrace.wire.http2.frames import DATA, END_STREAM, FRAME_HEADER, ErrorCode
from headrace.wire.http2.stream import DATA_CREDIT_SHIFT, STREAM_CREDIT, Http2Stream
from headrace.wire.requests.codec_threads import CodecThreads

# Smaller messages are joined and sent in one piece; larger ones are sent part by part.
JOIN_BELOW_BYTES = 16384
# Frames that a message adds to the frame budget.
MESSAGE_CREDIT = 4
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


class CallServer(Protocol):
    """The part of `GrpcServer` that calls use; see there."""

    client_limits: ClientLimits
    codec_threads: CodecThreads
    deadline_timer: DeadlineTimer
    rooms: dict[Http2Connection, ResponseRoom]
    peer_names: dict[Http2Connection, tuple[str, ...]]
    stopping: bool

    def peer(self, connection: Http2Connection) -> tuple[str, int] | None:
        """Return host and port of the client of a connection; None if the system does not report it."""


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
        """Called after the stream is closed before its end: the peer has reset it or disconnected, or the server has reset it."""

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


class ServerCall(Http2Stream):
    """Common part of unary and streaming calls: one object is the HTTP/2 stream and the call that its method sees.

    Args:
        connection: of the stream.
        stream_id: its id in HTTP/2.
        head: parsed request headers.
        server: of the call.

    Attributes:
        deadline_ns: see `GrpcCall`.
        completion: see `GrpcCall`.
        load_report: see `GrpcCall`.
        options: see `GrpcCall`.
        received_ns: see `GrpcCall`.
        reservation: reservation of the call's bytes in the budget for all bodies, from the first byte of a message on.
        room: see `GrpcCall`.
    """

    __slots__ = (
        "__weakref__", "_body_bytes", "_client_limits", "_counted_cancelled", "_head", "_headers_sent", "_reader",
        "_request", "_server", "_task", "completion", "deadline_ns", "load_report", "options", "received_ns",
        "reservation",
    )  # fmt: skip

    connection: Http2Connection

    def __init__(self, connection: Http2Connection, stream_id: int, head: RequestHead, server: CallServer) -> None:
        Http2Stream.__init__(self, connection, stream_id)  # `super` would cost another call for each request
        self._head = head
        self._server = server
        self._client_limits = server.client_limits
        self.reservation = BodyReservation(server.client_limits)
        self.options = head.options
        self.received_ns = 0
        self.load_report = b""
        self._reader: MessageReader | None = None
        self._body_bytes = 0
        self._headers_sent = self._counted_cancelled = False
        self._task: asyncio.Task[None] | None = None
        self._request: StartedRequest | None = None
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
        """Frames that the frame budget gets back when the peer resets the stream; read before `on_closed`. All of its cost for
        a call that the client has waited for, nothing for a rapid reset.
        """
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
        if self in self.connection.window_grants.waiting:
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
        """Room for responses of the connection."""
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
        self._send_error(error_status(error, self.deadline_ns))
        self._cancel_method(error)

    async def _serve(self, method: Callable[..., Awaitable[Message | None]], *message: RequestMessage) -> None:
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
            self._send_error(error_status(error, self.deadline_ns))
            forget_frames(error)
        finally:
            self.reservation.end()

    @property
    def option_headers(self) -> Mapping[str, str]:
        """Metadata of the call with the request options, by name."""
        return self._head.option_headers

    @property
    def peer_names(self) -> tuple[str, ...]:
        """Names in the client certificate; empty without one."""
        return self._server.peer_names.get(self.connection, ())

    @property
    def peer(self) -> str:
        """Address of the client, host:port."""
        host, port = self._server.peer(self.connection) or ("", 0)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def admit(self, size_bytes: int) -> None:
        """Check that a response of this size may be written; raises Overloaded if memory for unread responses is full. A closed
        call has no response.
        """
        if not self.closed:
            self.room.admit(size_bytes + PREFIX_BYTES)

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
                message = with_prefix(message)
                self.room.admit(sum(map(len, message)))
            self._send_headers()
            if message:
                write_buffer.queue_data(self, message)
            write_buffer.end_stream(self, ok_trailers(self.stream_id, self.load_report))

    def _send_error(self, status: ErrorStatus) -> None:
        if not self.closed:
            self.frame_credit -= STREAM_CREDIT  # it returns its cost, that of its header block too, and earns nothing
            write_buffer = self.connection.write_buffer
            if self.pending:
                write_buffer.discard(self)
            trailers = error_trailers(status, self.stream_id, self._headers_sent, self.load_report)
            write_buffer.end_stream(self, trailers)

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
        before = reader.complete
        reader.feed(data, start, stop)
        messages = reader.complete - before
        self.reservation.grow(stop - start + messages * MESSAGE_OVERHEAD_BYTES)
        credit = ((stop - start) >> DATA_CREDIT_SHIFT) + MESSAGE_CREDIT * messages
        self.connection.frame_budget.spend(1 - credit)


class UnaryCall(ServerCall):
    """A call with one request and one response message; see `GrpcCall`. It has no task if its method is a `DirectMethod`."""

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
            self._send_error(error_status(error, self.deadline_ns))
            self.reservation.end()
            return
        if message is not None:
            self._start_method(message)

    def _assemble_message(self, data: bytes, start: int, stop: int, end: bool) -> RequestMessage | None:
        """Read a part of the message; returns the message when it is complete. Raises as `_read_data`."""
        reader = self._reader
        if reader is None:
            allocate = None if self._head.direct is None else message_allocator(self._client_limits)
            reader = self._reader = MessageReader(self._head.encoding, self._client_limits, allocate)
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
        if reader.is_large_compressed:
            self.awaiting_body = False
            self._task = self.connection.loop.create_task(self._serve(self._serve_compressed))
            return None
        message, wire_bytes = reader.pop()
        self.reservation.shrink(wire_bytes)
        self.reservation.grow(len(message))
        return message

    async def _serve_compressed(self, _call: ServerCall) -> Message | None:
        """Decompress a large message on a codec thread and run the method."""
        reader = self._reader
        method: Callable[[bytes, GrpcCall], Awaitable[Message]] | None = self._head.method  # type: ignore[assignment]
        assert reader is not None
        assert method is not None
        message, wire_bytes = await reader.pop_large(self._server.codec_threads)
        self._reader = None
        self.reservation.shrink(wire_bytes)
        self.reservation.grow(len(message))
        self.received_ns = monotonic_ns()
        return await method(message, self)

    def _start_method(self, message: RequestMessage) -> None:
        self.awaiting_body = False
        self._reader = None
        self.received_ns = monotonic_ns()
        direct, request = self._head.direct, None
        if direct is not None:
            try:
                request = direct.start(message, self)
            except Exception as error:
                self._fail_method(error)
                return
        if request is None:  # it needs a task
            method = self._head.method
            assert method is not None
            self._task = self.connection.loop.create_task(self._serve(method, message))
            return
        self._request, completion = request, request.completion
        self.completion = completion
        if completion.woken:  # the request ran on the event loop
            self._end_request()
        else:
            completion.then(self._end_request)

    def _end_request(self) -> None:
        """End the call after the completion of its request is settled; never raises."""
        request, direct = self._request, self._head.direct
        self._request = self.completion = None
        if self._counted_cancelled:
            self.connection.cancelled_running -= 1
        assert direct is not None
        try:
            response = direct.end(request, self)
            if isinstance(response, list):
                self._send_response(response)
                self.reservation.end()
            else:
                self._task = self.connection.loop.create_task(self._serve(lambda _call: response))
        except Exception as error:
            self._fail_method(error)

    def _fail_method(self, error: Exception) -> None:
        self._send_error(error_status(error, self.deadline_ns))
        forget_frames(error)
        self.reservation.end()

    @property
    def is_running(self) -> bool:
        """True while the method runs, and no part of the response is written."""
        return self._request is not None or super().is_running

    def _cancel_method(self, error: HeadraceError) -> None:
        completion = self.completion
        if self._request is None or completion is None:
            super()._cancel_method(error)
        elif not self._counted_cancelled:
            self._counted_cancelled = True
            self.connection.cancelled_running += 1
            completion.settle(error)

    def _send_response(self, message: Message) -> None:
        if not self.closed and sum(map(len, message)) < JOIN_BELOW_BYTES:
            content = b"".join(message)
            connection, write_buffer = self.connection, self.connection.write_buffer
            if write_buffer.reserve_window(self, len(content) + PREFIX_BYTES):
                frames = unary_response(self.stream_id, content)
                if self.load_report:
                    frames = (*frames[:2], ok_trailers(self.stream_id, self.load_report))
                if len(connection.streams) > 1:
                    write_buffer.write(frames)
                else:
                    write_buffer.flush(frames)  # no other stream is open whose frames could join this write
                connection.stream_finished(self)
                return
        super()._send_response(message)


def with_prefix(message: Message) -> Message:
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
        self._heap: list[tuple[int, int, ref[ServerCall]]] = []
        self._numbers = count()
        self._purge_at = 1024
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns = 0

    def add(self, call: ServerCall) -> None:
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


def _is_open(call: ref[ServerCall]) -> bool:
    target = call()
    return target is not None and not target.closed
