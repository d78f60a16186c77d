"""The fast gRPC engine: HTTP/2 and gRPC in Python, on the event loop that serves HTTP.

It does what inference clients need and no more: unary methods and streams of messages in both directions, deadlines,
cancellation, compressed requests, flow control, TLS, a shutdown without a lost call. Answers are never compressed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from weakref import ref

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import BadRequest, Cancelled, DeadlineExceeded, HeadraceError, Unavailable, forget_frames
from headrace.core.limits import Door
from headrace.grpc.fast_wire import (
    PREFIX,
    PREFIX_BYTES,
    MessageReader,
    RequestHead,
    Status,
    ok_trailers,
    opening,
    understand,
    unpack_prefix,
    whole_answer,
)
from headrace.grpc.methods import Message, Methods
from headrace.http2.connection import Http2Connection
from headrace.http2.frames import DATA, FRAME_HEAD, ErrorCode, rst_stream
from headrace.http2.hpack import Field
from headrace.http2.stream import Limits, Stream
from headrace.inference.request_options import Asked
from headrace.tls import TlsFiles

_BACKLOG = 4096
# Smaller messages are joined to one piece; larger ones go out part by part.
_JOIN_BELOW_BYTES = 16384
# A stream's writer waits while more than this is on its way.
_WRITE_AHEAD_BYTES = 64 << 10
# What a message earns for the frames around it, and a DATA frame for each 256 bytes (see `Allowance`).
_MESSAGE_WORK = 4
_CRUMB_SHIFT = 8


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


class FastCall(Stream):
    """What both kinds of calls have in common.

    Attributes:
        deadline_ns: see `grpc_methods.Call`.
        caller: see `grpc_methods.Call`.
        held: what the call has of the room for bodies, from the first byte of a message on.
    """

    __slots__ = (
        "__weakref__",
        "_body_bytes",
        "_door",
        "_head",
        "_lingers",
        "_opened",
        "_task",
        "caller",
        "deadline_ns",
        "held",
    )

    connection: Http2Connection

    def __init__(
        self, connection: Http2Connection, stream_id: int, head: RequestHead, door: Door, deadlines: Deadlines
    ) -> None:
        super().__init__(connection, stream_id)
        self._head = head
        self._door = door
        self.held = door.hold()
        self._body_bytes = 0
        self._opened = self._lingers = False
        self._task: asyncio.Task[None] | None = None
        self.caller: LoopCompletion | None = None
        self.deadline_ns = 0
        if head.timeout_ns >= 0:
            self.deadline_ns = monotonic_ns() + head.timeout_ns
            deadlines.add(self)

    @property
    def asked(self) -> Asked:
        """See `grpc_methods.Call`."""
        return self._head.asked

    def lost(self) -> None:
        """The client has gone: nobody waits for the answer any more."""
        self._abandon(Cancelled("the caller has gone"))

    def too_slow(self) -> None:
        """The client takes too long to send its message."""
        self.fail(DeadlineExceeded("the request did not arrive in time"))

    def expire(self) -> None:
        """The deadline has passed."""
        if not self.gone:
            self.fail(DeadlineExceeded("the call's deadline has passed"))

    def fail(self, error: HeadraceError) -> None:
        """End the call from outside of its method, and the method with it."""
        self._end(Status.of(error))
        self._abandon(error)

    def _end(self, status: Status) -> None:
        if not self.gone:
            outbox = self.connection.outbox
            if self.pending:
                outbox.drop(self)
            outbox.finish(self, status.frame(self.stream_id, self._opened))

    def _abandon(self, error: HeadraceError) -> None:
        """The stream is gone; if its method still runs, it counts against the connection until it has ended."""
        task = self._task
        if task is None:
            self.held.end()
        elif not task.done() and not self._lingers:
            self._lingers = True
            self.connection.lingering += 1
            task.add_done_callback(self._ended)
            if self.caller is not None:
                self.caller.settle(error)  # which resumes the method, with a better error than a cancellation
            else:
                task.cancel()

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._task = (
            None  # it keeps its CancelledError, whose traceback keeps this call: a cycle until the collector comes
        )
        self.held.end()  # of a task that was cancelled before it had begun
        self.connection.lingering -= 1

    def _wrong_length(self, size_bytes: int, end: bool) -> bool:
        """Count a part of the body; True, and the stream is reset, if it is at odds with content-length."""
        self._body_bytes += size_bytes
        announced = self._head.content_length
        if announced >= 0 and (self._body_bytes > announced or (end and self._body_bytes != announced)):
            self.connection.stream_fault(self.stream_id, ErrorCode.PROTOCOL_ERROR)  # RFC 9113, section 8.1.1
            return True
        return False

    def _feed(self, reader: MessageReader, data: bytes, start: int, stop: int) -> None:
        """Read a part of the body, if there is room; crumbs use up the allowance, messages and large parts earn it."""
        self.held.grow(stop - start)
        before = reader.waiting
        reader.feed(data, start, stop)
        work = ((stop - start) >> _CRUMB_SHIFT) + _MESSAGE_WORK * (reader.waiting - before)
        self.connection.allowance.spend(1 - work)


class UnaryCall(FastCall):
    """One message in, one out; see `grpc_methods.Call`."""

    __slots__ = ("_reader", "received_ns")

    def __init__(
        self, connection: Http2Connection, stream_id: int, head: RequestHead, door: Door, deadlines: Deadlines
    ) -> None:
        super().__init__(connection, stream_id, head, door, deadlines)
        self._reader: MessageReader | None = None
        self.received_ns = 0

    def received(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """A part of the message; mostly all of it."""
        size_bytes = stop - start
        try:
            if end and self._reader is None and size_bytes >= PREFIX_BYTES:
                flag, length = unpack_prefix(data, start)
                if (
                    not flag
                    and length == size_bytes - PREFIX_BYTES
                    and length <= self._door.limits.max_body_bytes
                    and self._head.content_length in (-1, size_bytes)
                ):
                    self.held.grow(size_bytes)
                    self._begin(data[start + PREFIX_BYTES : stop])
                    return
            if self._wrong_length(size_bytes, end):
                return
            message = self._gather(data, start, stop, end)
        except HeadraceError as error:
            self._end(Status.of(error))
            self.held.end()
            return
        if message is not None:
            self._begin(message)

    def _gather(self, data: bytes, start: int, stop: int, end: bool) -> bytes | None:
        """The message once it is whole and alone; raises BadRequest and TooLarge."""
        reader = self._reader
        if reader is None:
            reader = self._reader = MessageReader(self._head.encoding, self._door)
        self._feed(reader, data, start, stop)
        whole, partial = reader.waiting, reader.partial
        if whole > 1 or (whole and partial):
            raise BadRequest("more than one message for a unary method")
        if not end:
            self.receiving = True
            if partial:
                self.expect(reader.missing_bytes)
            return None
        if partial:
            raise BadRequest("the client closed the stream in the middle of a message")
        if not whole:
            raise BadRequest("no message for a unary method")
        message, came_bytes = reader.take()
        self.held.shrink(came_bytes)
        self.held.grow(len(message))
        return message

    def _begin(self, message: bytes) -> None:
        self.receiving = False
        self._reader = None
        self.received_ns = monotonic_ns()
        self._task = self.connection.loop.create_task(self._serve(message))

    async def _serve(self, message: bytes) -> None:
        method = self._head.unary
        assert method is not None
        try:
            answer = await method(message, self)
            del message
            self._answer(answer)
        except asyncio.CancelledError as error:
            self._end(Status("CANCELLED", "the server has cancelled the call"))
            forget_frames(error)
            raise
        except Exception as error:
            self._end(Status.of(error))
            forget_frames(error)
        finally:
            self.held.end()

    def _answer(self, message: Message) -> None:
        if self.gone:
            return
        connection = self.connection
        outbox = connection.outbox
        if sum(map(len, message)) < _JOIN_BELOW_BYTES:
            whole = message[0] if len(message) == 1 and type(message[0]) is bytes else b"".join(message)
            if outbox.admit(self, len(whole) + PREFIX_BYTES):
                outbox.write(whole_answer(self.stream_id, bytes(whole)))
                connection.finished(self)
                if not connection.streams:
                    outbox.flush()  # nothing else is about to be written with it
                return
        self._opened = True
        outbox.control(opening(self.stream_id))
        outbox.queue(self, _framed(message))
        outbox.finish(self, ok_trailers(self.stream_id))


class StreamingCall(FastCall):
    """Messages in, messages out; see `grpc_methods.StreamCall`."""

    __slots__ = ("_drained", "_reader", "_waiter", "stopping")

    def __init__(
        self, connection: Http2Connection, stream_id: int, head: RequestHead, door: Door, deadlines: Deadlines
    ) -> None:
        super().__init__(connection, stream_id, head, door, deadlines)
        self._reader = MessageReader(head.encoding, door)
        self._waiter: asyncio.Future[None] | None = None
        self._drained = asyncio.Event()
        self.receiving = False
        self.stopping = False
        self._task = connection.loop.create_task(self._serve())

    def received(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """A part of a message, or many messages."""
        if self._wrong_length(stop - start, end):
            return
        reader = self._reader
        try:
            self._feed(reader, data, start, stop)
            if end and reader.partial:
                raise BadRequest("the client closed the stream in the middle of a message")
        except HeadraceError as error:
            self.fail(error)
            return
        if reader.partial:
            if not self.receiving:
                self.since = self.connection.epoch
            if not reader.waiting:
                self.expect(reader.missing_bytes)
        self.receiving = reader.partial
        self._wake()

    def flushed(self) -> None:
        """Something went out: the writers may go on."""
        if self.pending_bytes <= _WRITE_AHEAD_BYTES:
            self._drained.set()

    async def read(self) -> bytes | None:
        """See `StreamCall`."""
        while True:
            if self.gone:
                raise Cancelled("the client has left")
            if self.stopping:
                raise Unavailable("the server is shutting down")
            if self._reader.waiting:
                message, came_bytes = self._reader.take()
                self.held.shrink(came_bytes)
                if not self._reader.waiting:
                    self._open_again()
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
        if self.gone:
            raise Cancelled("the client has left")
        outbox = self.connection.outbox
        if not self._opened:
            self._opened = True
            outbox.control(opening(self.stream_id))
        if sum(map(len, message)) < _JOIN_BELOW_BYTES:
            whole = b"".join(message)
            size_bytes = len(whole) + PREFIX_BYTES
            if outbox.admit(self, size_bytes):
                head = FRAME_HEAD.pack(size_bytes << 8 | DATA, 0, self.stream_id)
                outbox.write((head, PREFIX.pack(0, len(whole)), whole))
                self.connection.allowance.left += _MESSAGE_WORK
                return
        outbox.queue(self, _framed(message))
        while self.pending_bytes > _WRITE_AHEAD_BYTES and not self.gone:
            self._drained.clear()
            await self._drained.wait()
        if self.gone:
            raise Cancelled("the client has left")

    def tell_stopping(self) -> None:
        """The server stops: whoever reads learns it now."""
        self.stopping = True
        self._wake()

    def _abandon(self, error: HeadraceError) -> None:
        self._drained.set()
        self._wake()
        super()._abandon(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _open_again(self) -> None:
        """All that had come was read: the client may send as much again."""
        self.connection.grants.give_back(self)
        window_bytes = self.connection.limits.stream_window_bytes
        if self.receive_window < window_bytes >> 1:
            self.open_window(window_bytes - self.receive_window)
        if self._reader.partial:
            self.expect(self._reader.missing_bytes)

    async def _serve(self) -> None:
        method = self._head.stream
        assert method is not None
        try:
            await method(self)
            self._finish()
        except asyncio.CancelledError as error:
            self._end(Status("CANCELLED", "the server has cancelled the call"))
            forget_frames(error)
            raise
        except Exception as error:
            self._end(Status.of(error))
            forget_frames(error)
        finally:
            self.held.end()

    def _finish(self) -> None:
        if not self.gone:
            if not self._opened:
                self._opened = True
                self.connection.outbox.control(opening(self.stream_id))
            self.connection.outbox.finish(self, ok_trailers(self.stream_id))


def _framed(message: Message) -> Message:
    """A message with its prefix, for the parts' size in bytes whatever their items are."""
    return [PREFIX.pack(0, sum(memoryview(part).nbytes for part in message)), *message]


class Deadlines:
    """Ends calls whose time is over: one heap and one timer for all of them. Ownership: the event loop.

    Calls that are gone are not kept: what a client has sent of one must not stay until a deadline that it chose.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[int, int, ref[FastCall]]] = []
        self._numbers = count()
        self._purge_at = 1024
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns = 0

    def add(self, call: FastCall) -> None:
        """Call `call.expire` at its deadline, unless it is gone by then."""
        heap = self._heap
        heappush(heap, (call.deadline_ns, next(self._numbers), ref(call)))
        if len(heap) >= self._purge_at:
            # Most calls end long before: without this, a second of calls would stay for as long as their deadlines.
            heap[:] = [entry for entry in heap if _lives(entry[2])]
            heapify(heap)
            self._purge_at = max(1024, 2 * len(heap))
        if not self._armed_ns or call.deadline_ns < self._armed_ns:
            self._arm(call.deadline_ns)

    def close(self) -> None:
        """No deadline is kept any more."""
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
        while heap and (heap[0][0] <= now_ns or not _lives(heap[0][2])):
            call = heappop(heap)[2]()
            if call is not None:
                call.expire()
        self._timer, self._armed_ns = None, 0
        if heap:
            self._arm(heap[0][0])


def _lives(call: ref[FastCall]) -> bool:
    found = call()
    return found is not None and not found.gone
