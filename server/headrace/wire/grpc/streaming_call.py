"""Calls with streams of requests and responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from headrace.core.clock import monotonic_ns
from headrace.core.errors import (
    BadRequest,
    Cancelled,
    HeadraceError,
    Unavailable,
)
from headrace.wire.grpc.call import JOIN_BELOW_BYTES, MESSAGE_CREDIT, CallServer, ServerCall, with_prefix
from headrace.wire.grpc.framing import (
    PREFIX_BYTES,
    MessageReader,
    RequestHead,
    message_head,
    unpack_prefix,
)
from headrace.wire.grpc.methods import Message
from headrace.wire.http2.connection import Http2Connection
from headrace.wire.http2.stream import DATA_CREDIT_SHIFT

# Backpressure: `StreamingCall.write` waits while more than this is pending.
_WRITE_AHEAD_BYTES = 64 << 10


class StreamingCall(ServerCall):
    """A call with a stream of messages in both directions; see `StreamCall`."""

    __slots__ = ("_drained", "_waiter", "stopping", "take")

    _reader: MessageReader

    def __init__(self, connection: Http2Connection, stream_id: int, head: RequestHead, server: CallServer) -> None:
        super().__init__(connection, stream_id, head, server)
        self._reader = MessageReader(head.encoding, server.client_limits)
        self._waiter: asyncio.Future[bytes | None] | None = None
        self.take: Callable[[bytes], bool] | None = None
        self._drained = asyncio.Event()
        self.awaiting_body = False
        self.stopping = server.stopping
        self.received_ns = monotonic_ns()
        assert head.method is not None
        self._task = connection.loop.create_task(self._serve(head.method))

    def on_data(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """Receive a part of a message, or many messages, and pass on the complete ones."""
        if not end and self._take_whole(data, start, stop):
            return
        if self._violates_content_length(stop - start, end):
            return
        reader = self._reader
        try:
            self._read_data(reader, data, start, stop)
            if end and reader.partial:
                raise BadRequest("the client closed the stream in the middle of a message")
            self._pass_messages()
        except HeadraceError as error:
            self.fail(error)
            return
        if reader.partial:
            if not self.awaiting_body:
                self.progress_tick = self.connection.ticks
            if not reader.complete:
                self.request_window(reader.missing_bytes)
        self.awaiting_body = reader.partial
        if end or reader.complete:
            self._wake_reader()

    def _take_whole(self, data: bytes, start: int, stop: int) -> bool:
        """Pass a part that is exactly one message to the method that waits for it; False if it must be read as any other part."""
        take, waiter, reader = self.take, self._waiter, self._reader
        size_bytes = stop - start
        if (
            take is None
            or waiter is None
            or size_bytes < PREFIX_BYTES
            or self._head.content_length >= 0
            or not reader.is_empty
            or waiter.done()
        ):
            return False
        flag, length = unpack_prefix(data, start)
        if flag or length != size_bytes - PREFIX_BYTES or length > self._client_limits.limits.max_body_bytes:
            return False
        self.connection.frame_budget.available += (size_bytes >> DATA_CREDIT_SHIFT) + MESSAGE_CREDIT - 1
        if self.granted_bytes or self.receive_window < self.connection.limits.stream_window_bytes >> 1:
            self._restore_window()
        message = data[start + PREFIX_BYTES : stop]
        if not take(message):
            waiter.set_result(message)
        return True

    def _pass_messages(self) -> None:
        """Pass complete messages to the method if it waits for them; raises as `MessageReader.pop`."""
        take, waiter, reader = self.take, self._waiter, self._reader
        if take is None or waiter is None or waiter.done() or not reader.complete:
            return
        while reader.complete and not self.closed:
            if reader.is_large_compressed:
                waiter.set_result(None)  # `read` decompresses it
                return
            message = self._pop_message()
            if not take(message):
                waiter.set_result(message)
                return

    def _pop_message(self) -> bytes:
        message, wire_bytes = self._reader.pop()
        self._message_popped(wire_bytes)
        return cast(bytes, message)  # the reader of a stream has no allocator

    def _message_popped(self, wire_bytes: int) -> None:
        self.reservation.shrink(wire_bytes)
        if not self._reader.complete:
            self._restore_window()

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
        """Wait for the next message; None once the client has half-closed."""
        while True:
            if self.closed:
                raise Cancelled("the client disconnected")
            if self.stopping:
                raise Unavailable("the server is shutting down")
            if self._reader.is_large_compressed:
                decompressed, wire_bytes = await self._reader.pop_large(self._server.codec_threads)
                self._message_popped(wire_bytes)
                return decompressed
            if self._reader.complete:
                return self._pop_message()
            if not self.remote_open:
                return None
            self._waiter = self.connection.loop.create_future()
            try:
                message = await self._waiter
            finally:
                self._waiter = None
            if message is not None:
                return message

    def write_now(self, message: Message, *, last: bool) -> bool:
        """Send a message if that is possible without a wait; returns False, with nothing sent, if it needs `write`."""
        size_bytes, write_buffer = sum(map(len, message)), self.connection.write_buffer
        if (
            self.closed
            or size_bytes >= JOIN_BELOW_BYTES
            or not write_buffer.reserve_window(self, size_bytes + PREFIX_BYTES)
        ):
            return False
        if not self._headers_sent:
            self._send_headers()
        frames = (message_head(self.stream_id, size_bytes), *message)
        if last:
            write_buffer.flush(frames)
        else:
            write_buffer.write(frames)
        self.connection.frame_budget.available += MESSAGE_CREDIT
        return True

    async def write(self, message: Message) -> None:
        """Send a message, after a wait if the client reads slowly (backpressure)."""
        if self.closed:
            raise Cancelled("the client disconnected")
        if self.write_now(message, last=False):
            return
        self._send_headers()
        message = with_prefix(message)
        self.room.admit(sum(map(len, message)))
        self.connection.write_buffer.queue_data(self, message)
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
