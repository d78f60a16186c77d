"""HTTP/2 client of prepared gRPC calls: many unary calls in flight on each connection.

Follows RFC 9113 and the gRPC project's document "gRPC over HTTP2" (PROTOCOL-HTTP2.md). Frames and header compression are those of
the server's engine (`wire.http2.frames`). The header block of a call is the same each time, so that a server may cache it.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple, cast

from headrace.core.errors import GRPC_CODES
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    GOAWAY,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    UINT32,
    WINDOW_UPDATE,
    ErrorCode,
    HeaderCache,
    HeaderField,
    Http2ConnectionError,
    Setting,
)

from headrace_bench.pool import (
    BROKEN,
    CLOSED,
    ERROR_TEXT_BYTES,
    OK,
    TIMEOUT,
    WRONG,
    Answer,
    Pool,
    PoolOptions,
    now_s,
    timeout_text,
)

_PREFIX = Struct(">BI")
# Answers of any size come without window updates of single streams; the connection's window is renewed at half of it.
_RENEW_BYTES = MAX_WINDOW // 2
_MAX_LIST_BYTES = 1 << 16
_MAX_FRAME_BYTES = 1 << 20
# A message up to this size is copied into one write with its frame headers.
_COPY_BYTES = 1 << 16
# Concurrent calls on a connection whose server names no limit.
_UNLIMITED_STREAMS = 1 << 20
_LAST_STREAM_ID = (1 << 31) - 1
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_STATUSES = {number: name for name, number in GRPC_CODES.items()}


class ResponseFields(NamedTuple):
    """Fields of a header block that end a call.

    Attributes:
        status: name of the gRPC status, `OK` ("") for success, None in a block without one.
        text: grpc-message, decoded.
    """

    status: str | None
    text: str


def parse_fields(fields: list[HeaderField] | None) -> ResponseFields:
    """Parse a decoded header block of a response; None stands for fields that are too large."""
    if fields is None:
        return ResponseFields(BROKEN, "the response's metadata are too large")
    values = dict(fields)
    text = _ESCAPE.sub(lambda match: bytes((int(match[1], 16),)), values.get(b"grpc-message", b"")).decode(
        "utf-8", "replace"
    )
    code = values.get(b"grpc-status")
    if code is not None:
        number = int(code) if code.isdigit() else -1
        name = _STATUSES.get(number, f"status {code.decode('latin-1')}")
        return ResponseFields(OK if number == 0 else name, text[:ERROR_TEXT_BYTES])
    status = values.get(b":status", b"200")
    if status != b"200":
        return ResponseFields(f"HTTP {status.decode('latin-1')}", text[:ERROR_TEXT_BYTES])
    return ResponseFields(None, "")


class GrpcPool(Pool):
    """Connections of HTTP/2.

    Args:
        requests: serialized message of each prepared request.
        headers: encoded header block of every call.
        options: of the pool.
    """

    def __init__(self, requests: Sequence[bytes], headers: bytes, options: PoolOptions) -> None:
        super().__init__(requests, options)
        self.headers = headers
        data_at = FRAME_HEADER_BYTES + len(headers)
        self.second_id_at = data_at + 5
        # HEADERS and DATA frame of each small request, with stream id 0.
        self.templates = [
            frames.frame(HEADERS, END_HEADERS, 0, headers)
            + frames.frame(DATA, END_STREAM, 0, _PREFIX.pack(0, len(message)) + message)
            if len(message) <= _COPY_BYTES
            else b""
            for message in requests
        ]
        self.connections: list[GrpcConnection] = []

    def start(self, index: int, due_s: float) -> bool:
        """Send a request on a free connection; False if there is none. Connections are opened before calls share one, then the
        one with the fewest calls is next.
        """
        best: GrpcConnection | None = None
        for connection in self.connections:
            if connection.has_room and (best is None or len(connection.calls) < len(best.calls)):
                best = connection
        if best is None or (best.calls and self._count < self._max_connections):
            return False
        best.send(index, due_s)
        return True

    def protocol(self) -> asyncio.BufferedProtocol:
        """Return the protocol object of a new connection."""
        return GrpcConnection(self)

    def expire(self, oldest_s: float) -> None:
        """End requests that were sent before `oldest_s` with the status `TIMEOUT`."""
        for connection in self.connections:
            connection.expire(oldest_s)


class _Call:
    """A call in flight: number of its request, times, message of the answer, windows of its request."""

    __slots__ = ("due_s", "fields", "index", "message", "rest", "sent_s", "size", "window")

    def __init__(self, index: int, due_s: float, sent_s: float, window: int) -> None:
        self.index = index
        self.due_s = due_s
        self.sent_s = sent_s
        self.size = 0
        self.message: bytearray | None = None
        self.fields: ResponseFields | None = None
        self.window = window
        self.rest: memoryview | None = None


class GrpcConnection(asyncio.BufferedProtocol):
    """A connection with unary calls.

    Attributes:
        calls: calls in flight by stream id.
    """

    def __init__(self, pool: GrpcPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self.calls: dict[int, _Call] = {}
        self._next_id = 1
        # No call starts before the server's settings have come, as other gRPC clients do.
        self._is_ready = False
        self._max_streams = _UNLIMITED_STREAMS
        self._is_draining = False
        self._is_counted = True
        self._cache: HeaderCache[ResponseFields] = HeaderCache(_MAX_LIST_BYTES, parse_fields)
        self._held = bytearray()
        # Of the peer: windows of the connection and of new streams, largest frame.
        self._window = self._stream_window = frames.DEFAULT_WINDOW
        self._max_frame = frames.DEFAULT_FRAME_BYTES
        self._received = 0
        # Header block in parts, with the stream and flags of its HEADERS frame.
        self._block: tuple[int, int, bytearray] | None = None
        # Calls whose messages wait for the peer's windows.
        self._blocked: deque[int] = deque()

    @property
    def has_room(self) -> bool:
        """True if another call may start."""
        return len(self.calls) < self._max_streams and self._is_ready and not self._is_draining

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send preface and settings."""
        self._transport = cast(asyncio.Transport, transport)
        values = {
            Setting.ENABLE_PUSH: 0,
            Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW,
            Setting.MAX_FRAME_SIZE: _MAX_FRAME_BYTES,
        }
        update = frames.window_update(0, MAX_WINDOW - frames.DEFAULT_WINDOW)
        self._transport.write(PREFACE + frames.settings(values) + update)
        self._pool.connections.append(self)

    # --- Sending ---

    def send(self, index: int, due_s: float) -> None:
        """Start a call."""
        pool, stream_id = self._pool, self._next_id
        self._next_id = stream_id + 2
        if stream_id + 2 > _LAST_STREAM_ID:
            self._is_draining = True
        call = self.calls[stream_id] = _Call(index, due_s, now_s(), self._stream_window)
        template = pool.templates[index]
        size = len(template) - pool.second_id_at - 4
        if template and size <= self._window and size <= call.window and size <= self._max_frame and not self._blocked:
            self._window -= size
            data = bytearray(template)
            UINT32.pack_into(data, 5, stream_id)
            UINT32.pack_into(data, pool.second_id_at, stream_id)
            self._transport.write(data)
            return
        self._transport.write(frames.frame(HEADERS, END_HEADERS, stream_id, pool.headers))
        message = pool.requests[index]
        if len(message) <= _COPY_BYTES:
            call.rest = memoryview(_PREFIX.pack(0, len(message)) + message)
        else:
            prefix = _PREFIX.pack(0, len(message))
            if min(self._window, call.window) < len(prefix):
                call.rest = memoryview(prefix + message)
            else:
                self._transport.write(frames.frame(DATA, 0, stream_id, prefix))
                self._window -= len(prefix)
                call.window -= len(prefix)
                call.rest = memoryview(message)
        self._blocked.append(stream_id)
        self._send_blocked()

    def _send_blocked(self) -> None:
        """Send as much of the waiting messages as the windows allow, the oldest call first."""
        waiting: deque[int] = deque()
        while self._blocked:
            stream_id = self._blocked.popleft()
            call = self.calls.get(stream_id)
            if call is None or call.rest is None:
                continue
            self._send_rest(stream_id, call, call.rest)
            if call.rest is not None:
                waiting.append(stream_id)
        self._blocked = waiting

    def _send_rest(self, stream_id: int, call: _Call, rest: memoryview) -> None:
        while True:
            size = min(len(rest), self._window, call.window, self._max_frame)
            is_last = size == len(rest)
            if size <= 0 and not is_last:
                call.rest = rest
                return
            self._transport.write(FRAME_HEADER.pack(size << 8 | DATA, END_STREAM if is_last else 0, stream_id))
            self._transport.write(rest[:size])
            self._window -= size
            call.window -= size
            if is_last:
                call.rest = None
                return
            rest = rest[size:]

    # --- Receiving ---

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the pool's buffer."""
        return self._pool.view

    def buffer_updated(self, nbytes: int) -> None:
        """Read the complete frames of the received bytes."""
        pool = self._pool
        held = self._held
        data, end = pool.buffer, nbytes
        if held:
            held += pool.view[:nbytes]
            data, end = held, len(held)
        position = 0
        try:
            while end - position >= FRAME_HEADER_BYTES:
                word, flags, stream_id = FRAME_HEADER.unpack_from(data, position)
                start = position + FRAME_HEADER_BYTES
                stop = start + (word >> 8)
                if stop > end:
                    break
                position = stop
                kind = word & 0xFF
                if (
                    kind == HEADERS
                    and self._block is None
                    and flags & (END_HEADERS | PADDED | frames.WITH_PRIORITY) == 4
                ):
                    self._fields(stream_id, flags, bytes(data[start:stop]))
                elif kind == DATA and not flags & PADDED:
                    self._data(stream_id, flags, data, start, stop, stop - start)
                else:
                    self._other(kind, flags, stream_id, data, start, stop)
        except Http2ConnectionError as error:
            self._break(str(error))
            return
        if held:
            del held[:position]
        elif position < end:
            held += pool.view[position:end]

    def _fields(self, stream_id: int, flags: int, block: bytes) -> None:
        """Read the header block of a response, or of its trailers."""
        fields = self._cache.entries.get(block) or self._cache.decode(block)
        call = self.calls.get(stream_id)
        if call is None:
            return
        if fields.status is not None:
            call.fields = fields
        if flags & END_STREAM:
            self._end(stream_id, call)

    def _data(self, stream_id: int, flags: int, data: bytearray, start: int, stop: int, counted: int) -> None:
        """Count the bytes of a message, and keep them for the check of answers."""
        self._received += counted
        if self._received >= _RENEW_BYTES:
            self._transport.write(frames.window_update(0, self._received))
            self._received = 0
        call = self.calls.get(stream_id)
        if call is None:
            return
        call.size += stop - start
        if self._pool.check is not None:
            if call.message is None:
                call.message = bytearray()
            call.message += data[start:stop]
        if flags & END_STREAM:
            self._end(stream_id, call)

    def _other(self, kind: int, flags: int, stream_id: int, data: bytearray, start: int, stop: int) -> None:
        payload = bytes(data[start:stop])
        if kind == HEADERS:
            block = frames.unpad(payload, flags)
            if flags & END_HEADERS:
                self._fields(stream_id, flags, block)
            else:
                self._block = (stream_id, flags, bytearray(block))
        elif kind == CONTINUATION and self._block is not None:
            first_id, first_flags, parts = self._block
            parts += payload
            if len(parts) > 4 * _MAX_LIST_BYTES:
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the server's header block is too large")
            if flags & END_HEADERS:
                self._block = None
                self._fields(first_id, first_flags, bytes(parts))
        elif kind == DATA:
            padding = payload[0] + 1 if payload else 0
            if padding > len(payload):
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
            self._data(stream_id, flags, data, start + 1, stop - padding + 1, stop - start)
        elif kind == SETTINGS and not flags & ACK:
            self._settings(payload)
        elif kind == WINDOW_UPDATE:
            self._widen(stream_id, frames.parse_uint32(payload, "WINDOW_UPDATE") & MAX_WINDOW)
        elif kind == PING and not flags & ACK:
            self._transport.write(frames.ping(payload, ack=True))
        elif kind == RST_STREAM:
            call = self.calls.get(stream_id)
            if call is not None:
                code = frames.parse_uint32(payload, "RST_STREAM")
                call.fields = ResponseFields(f"RST_STREAM {_code_name(code)}", "the server reset the stream")
                self._end(stream_id, call)
        elif kind == GOAWAY:
            self._drain(payload)

    def _settings(self, payload: bytes) -> None:
        for name, value in frames.read_settings(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                for call in self.calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
            elif name == Setting.MAX_FRAME_SIZE:
                self._max_frame = value
            elif name == Setting.MAX_CONCURRENT_STREAMS:
                self._max_streams = value
        self._transport.write(SETTINGS_ACK)
        self._is_ready = True
        self._send_blocked()
        self._pool.start_next()

    def _widen(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            self._window += increment
        elif stream_id in self.calls:
            self.calls[stream_id].window += increment
        if self._blocked:
            self._send_blocked()

    def _drain(self, payload: bytes) -> None:
        """Start no more calls; calls that the server has not begun are sent on another connection (RFC 9113, section 6.8)."""
        last_id = UINT32.unpack_from(payload)[0] & MAX_WINDOW if len(payload) >= 8 else 0
        self._is_draining = True
        for stream_id in [each for each in self.calls if each > last_id]:
            call = self.calls.pop(stream_id)
            self._pool.backlog.appendleft((call.index, call.due_s))
        self._uncount()
        self._close_if_done()
        self._pool.start_next()

    # --- Ends ---

    def _end(self, stream_id: int, call: _Call) -> None:
        """End a call, and start waiting ones."""
        pool = self._pool
        del self.calls[stream_id]
        status, text = BROKEN, "the response has no grpc-status"
        if call.fields is not None and call.fields.status is not None:
            status, text = call.fields.status, call.fields.text
        if status == OK:
            if call.size < _PREFIX.size:
                status, text = BROKEN, "the response has no message"
            elif pool.check is not None and call.message is not None:
                answer = Answer(bytes(call.message[_PREFIX.size :]))
                if not pool.check(call.index, answer):
                    status, text = WRONG, "differs from the first answer"
        if call.rest is not None:  # answered before the request was complete
            self._transport.write(frames.rst_stream(stream_id, ErrorCode.CANCEL))
        if pool.backlog:
            pool.start_next()
        if self._is_draining:
            self._close_if_done()
        pool.finished(call.index, call.due_s, call.sent_s, status, text)

    def expire(self, oldest_s: float) -> None:
        """Cancel calls that were sent before `oldest_s`."""
        for stream_id, call in [each for each in self.calls.items() if each[1].sent_s < oldest_s]:
            del self.calls[stream_id]
            self._transport.write(frames.rst_stream(stream_id, ErrorCode.CANCEL))
            self._pool.finished(call.index, call.due_s, call.sent_s, TIMEOUT, timeout_text(self._pool.timeout_s))

    def eof_received(self) -> bool:
        """Let the transport close."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all calls in flight."""
        text = str(exc) if exc is not None else "the server closed the connection before it answered"
        self._fail_all(CLOSED, text)

    def abort(self) -> None:
        """Close the connection at once; calls in flight get no outcome."""
        self.calls.clear()
        self._leave()
        self._transport.abort()

    def _break(self, text: str) -> None:
        """Close a connection whose peer breaks the protocol."""
        self._transport.abort()
        self._fail_all(BROKEN, text)

    def _fail_all(self, status: str, text: str) -> None:
        """Fail the calls in flight; of a connection that has never been ready, the call that waits the longest."""
        pool = self._pool
        if self not in pool.connections:
            return
        failed = [(call.index, call.due_s, call.sent_s) for call in self.calls.values()]
        self.calls.clear()
        if not self._is_ready and pool.backlog:
            index, due_s = pool.backlog.popleft()
            failed.append((index, due_s, now_s()))
        self._leave()
        for index, due_s, sent_s in failed:
            pool.finished(index, due_s, sent_s, status, text)

    def _leave(self) -> None:
        if self in self._pool.connections:
            self._pool.connections.remove(self)
        self._uncount()

    def _uncount(self) -> None:
        """Let the pool open another connection in place of this one."""
        if self._is_counted:
            self._is_counted = False
            self._pool.lost()

    def _close_if_done(self) -> None:
        if self._is_draining and not self.calls:
            self._leave()
            self._transport.close()


def _code_name(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return str(code)
