"""Support for tests of the HTTP/2 server: a transport without a socket, a plain application, a client that sends frames."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from headrace.wire.http2 import frames
from headrace.wire.http2.connection import Http2Connection, MalformedHeadersError
from headrace.wire.http2.frames import END_HEADERS, END_STREAM, ErrorCode, HeaderField, HpackDecoder, encode
from headrace.wire.http2.stream import Http2Limits, Http2Stream

HELLO = frames.PREFACE + frames.settings({})
POST: list[HeaderField] = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"here")]


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> ErrorCode:
        """Of RST_STREAM and GOAWAY."""
        start = 4 if self.kind == frames.GOAWAY else 0
        return ErrorCode(struct.unpack_from(">I", self.payload, start)[0])


def read_frames(data: bytes) -> list[Frame]:
    """Parse the frames that a server wrote; fails if one is incomplete."""
    result, position = [], 0
    while position < len(data):
        word, flags, stream_id = frames.FRAME_HEADER.unpack_from(data, position)
        end = position + 9 + (word >> 8)
        assert end <= len(data), "the server wrote half a frame"
        result.append(Frame(word & 0xFF, flags, stream_id, data[position + 9 : end]))
        position = end
    return result


class WireTransport(asyncio.Transport):
    """Transport that collects written bytes; `fill` and `empty` simulate a peer that does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Http2Connection
        self.written = bytearray()
        self.closed = self.aborted = self.full = False
        self.reading = True

    def write(self, data: Any) -> None:
        assert not self.closed, "a write on a closed transport"
        self.written += data

    def writelines(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.write(part)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if not self.full:
                self.protocol.loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.aborted = True
        if not self.closed or self.full:
            self.closed, self.full = True, False
            self.protocol.loop.call_soon(self.protocol.connection_lost, None)

    def fill(self) -> None:
        self.full = True
        self.protocol.pause_writing()

    def empty(self) -> None:
        self.full = False
        self.protocol.resume_writing()


class PlainStream(Http2Stream):
    """Responds with the request body, or with `application.answer` if there is one."""

    def __init__(self, connection: Http2Connection, stream_id: int, application: PlainApplication) -> None:
        super().__init__(connection, stream_id)
        self.application = application
        self.body = bytearray()
        self.ended = False

    def on_data(self, data: bytes, start: int, stop: int, end: bool) -> None:
        self.body += data[start:stop]
        if end:
            self.awaiting_body = False
            self.ended = True
            if self.application.answers:
                self.answer(self.application.answer if self.application.answer is not None else bytes(self.body))

    def answer(self, body: bytes) -> None:
        write_buffer = self.connection.write_buffer
        write_buffer.write_control(
            frames.frame(frames.HEADERS, END_HEADERS, self.stream_id, encode([(b":status", b"200")]))
        )
        write_buffer.queue_data(self, [body])
        tail = encode([(b"x-tail", b"1")])
        write_buffer.end_stream(self, frames.frame(frames.HEADERS, END_HEADERS | END_STREAM, self.stream_id, tail))

    def on_closed(self) -> None:
        self.application.lost.append(self.stream_id)

    def on_timeout(self) -> None:
        self.reset(ErrorCode.CANCEL)


class PlainApplication:
    """HTTP/2 without gRPC; `answers` can be switched off to keep streams open."""

    def __init__(self) -> None:
        self.answers = True
        self.answer: bytes | None = None
        self.opened: list[list[HeaderField] | None] = []
        self.streams: dict[int, PlainStream] = {}
        self.lost: list[int] = []
        self.connections = 0
        self.most_connections = 1 << 20

    def parse_head(self, fields: Any) -> Any:
        if fields is not None and not any(name == b":path" for name, _ in fields):
            raise MalformedHeadersError("no path")
        return fields or [(b"too", b"large")]

    def open_stream(self, connection: Http2Connection, stream_id: int, head: Any, end: bool) -> Http2Stream | None:
        self.opened.append(head)
        stream = self.streams[stream_id] = PlainStream(connection, stream_id, self)
        return stream

    def connection_opened(self, connection: Http2Connection) -> bool:
        self.connections += 1
        return self.connections <= self.most_connections

    def connection_closed(self, connection: Http2Connection) -> None:
        self.connections -= 1


class Wire:
    """A connection without a socket, after the handshake."""

    def __init__(self, application: Any = None, limits: Http2Limits | None = None, hello: bytes = HELLO) -> None:
        self.application = application or PlainApplication()
        self.connection = Http2Connection(self.application, limits or Http2Limits(), asyncio.get_running_loop())
        self.transport = WireTransport()
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)
        self.connection.data_received(hello)

    async def send(self, *data: bytes) -> list[Frame]:
        """Send bytes, run the loop, and return the frames of the response."""
        for part in data:
            if not self.transport.closed:
                self.connection.data_received(part)
        return await self.frames()

    async def frames(self) -> list[Frame]:
        """Frames written since the last call."""
        for _ in range(12):
            await asyncio.sleep(0)
        written, self.transport.written = bytes(self.transport.written), bytearray()
        return read_frames(written)

    async def drop(self) -> None:
        """Disconnect the peer."""
        self.transport.abort()
        await asyncio.sleep(0.001)


def request(stream_id: int, end: bool = True, fields: list[HeaderField] | None = None) -> bytes:
    """HEADERS of a request."""
    return frames.frame(
        frames.HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_id, encode(POST if fields is None else fields)
    )


def data(stream_id: int, payload: bytes, end: bool = False) -> bytes:
    """A DATA frame."""
    return frames.frame(frames.DATA, END_STREAM if end else 0, stream_id, payload)


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test; an error that the loop would only log fails it."""

    def run() -> None:
        wrong: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
            await test()

        asyncio.run(main())
        assert not wrong, wrong

    run.__name__ = test.__name__
    return run


def grpc_head(path: str = "/test.Echo/Echo", *more: HeaderField) -> list[HeaderField]:
    """Header fields of a call."""
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"test")]
    return [*head, (b"te", b"trailers"), (b"content-type", b"application/grpc"), *more]


def message(payload: bytes, flag: int = 0) -> bytes:
    """A length-prefixed message."""
    return struct.pack(">BI", flag, len(payload)) + payload


class RawPeer:
    """Client on a socket that sends and reads frames."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.sendall(HELLO)
        self._decoder = HpackDecoder(1 << 16)
        self._data = b""
        self._window = self._stream_window = 65535

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def frame(self) -> Frame | None:
        """The next frame, None when the server has closed."""
        while len(self._data) < 9 or len(self._data) < 9 + (struct.unpack_from(">I", self._data)[0] >> 8):
            try:
                more = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not more:
                return None
            self._data += more
        word, flags, stream_id = frames.FRAME_HEADER.unpack_from(self._data)
        end = 9 + (word >> 8)
        payload, self._data = self._data[9:end], self._data[end:]
        return Frame(word & 0xFF, flags, stream_id, payload)

    def pour(self, stream_id: int, payload: bytes) -> None:
        """Send DATA as the server's windows allow, on the only stream that does; fails if the server ends it."""
        prefix_bytes = 5  # with which the stream was opened
        windows = {0: self._window - prefix_bytes, stream_id: self._stream_window - prefix_bytes}
        rest = memoryview(payload)
        while rest:
            size = min(len(rest), 16384, *windows.values())
            if size > 0:
                self.send(data(stream_id, bytes(rest[:size])))
                rest = rest[size:]
                windows = {each: left - size for each, left in windows.items()}
                continue
            got = self.frame()
            assert got is not None, "the server has closed"
            assert got.kind not in (frames.RST_STREAM, frames.GOAWAY), got
            if got.kind == frames.SETTINGS and not got.flags & frames.ACK:
                before = self._stream_window
                settings = dict(frames.read_settings(got.payload))
                self._stream_window = settings.get(frames.Setting.INITIAL_WINDOW_SIZE, before)
                windows[stream_id] += self._stream_window - before
                self.send(frames.SETTINGS_ACK)
            elif got.kind == frames.WINDOW_UPDATE and got.stream_id in windows:
                windows[got.stream_id] += struct.unpack(">I", got.payload)[0]
            elif got.kind == frames.PING and not got.flags & frames.ACK:
                self.send(frames.ping(got.payload, ack=True))
        self._window = windows[0]

    def until(self, kind: int) -> Frame:
        """The next frame of a kind."""
        while (frame := self.frame()) is not None:
            if frame.kind == kind:
                return frame
        raise AssertionError("the server has closed")

    def wait_until_read(self) -> None:
        """Wait until the server has read all that was sent: it acknowledges a PING behind it."""
        self.send(frames.ping(b"the last", ack=False))
        while not self.until(frames.PING).flags & frames.ACK:
            pass

    def trailers(self, stream_id: int) -> dict[str, str]:
        """All header fields of an answer; fails if the server resets the stream, or closes."""
        fields: dict[str, str] = {}
        while (frame := self.frame()) is not None:
            assert (frame.kind, frame.stream_id) != (frames.RST_STREAM, stream_id), "the server has reset the stream"
            if frame.kind == frames.HEADERS and frame.stream_id == stream_id:
                fields |= {name.decode(): value.decode() for name, value in self._decoder.decode(frame.payload) or []}
            ends = frame.kind in (frames.HEADERS, frames.DATA) and frame.flags & frames.END_STREAM
            if ends and frame.stream_id == stream_id:
                return fields
        raise AssertionError("the server has closed")

    def end(self) -> ErrorCode | None:
        """Read until the server closes; the code of its last GOAWAY."""
        code = None
        while (frame := self.frame()) is not None:
            if frame.kind == frames.GOAWAY:
                code = frame.code
        return code
