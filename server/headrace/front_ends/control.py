"""Control stream between a front-end process and the engine process: framed messages on a Unix stream socket.

A frame is its size as u32, little-endian, and one msgpack array: kind, id of the exchange, fields of the kind. Messages of one
iteration of the event loop are written together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Any, cast

import msgspec

SIZE = Struct("<I")
# Largest frame; larger messages are sent in parts of PIECE_BYTES.
MAX_FRAME_BYTES = 32 << 20
PIECE_BYTES = 256 << 10
# Bytes of one direction of an exchange that may wait at the receiver, before it returns credit.
WINDOW_BYTES = 1 << 20

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


class MessageKind(IntEnum):
    """Kind of a message.

    Attributes:
        HELLO: first message of either side; see `Hello`.
        HTTP: head of an HTTP request, and its body if that is complete and small: fields, body or None.
        BODY: part of a body, of a response or of a message: bytes, flag "more".
        CREDIT: the receiver has read this many bytes of the exchange.
        GONE: the client has disconnected, or its call has ended; from the engine: the request was cancelled without a response.
        HEAD: head of an HTTP response: status, headers.
        RAW: head of an HTTP response as bytes, without the empty line; BODY has the rest.
        CALL: unary gRPC call: `CallHead` as a list. BODY has the message.
        STREAM: gRPC call with streams: `CallHead` as a list. BODY has the messages.
        HALF_CLOSE: the client sends no further message.
        STOPPING: the front end drains.
        STATUS: end of a gRPC call: code, text, metadata. "OK" for a success.
        NOTICE: a change that the receiver acknowledges: name, content.
        ACK: answers NOTICE with the id of it.
        CANCEL: the front end waits no longer for the end of the request: the drain timeout has passed.
        RECORD: one record of the access log or the trace: bytes.
    """

    HELLO = 0
    HTTP = 1
    BODY = 2
    CREDIT = 3
    GONE = 4
    HEAD = 5
    RAW = 6
    CALL = 7
    STREAM = 8
    HALF_CLOSE = 9
    STOPPING = 10
    STATUS = 11
    NOTICE = 12
    ACK = 13
    RECORD = 14
    CANCEL = 15


class Hello(msgspec.Struct, array_like=True):
    """First message of a front end on each of its streams.

    Attributes:
        token: of the server, from the supervisor.
        role: "control" or "data".
        number: of the front end, from 1.
        incarnation: number of times that this front end was started, from 1.
        pid: of the front end.
    """

    token: bytes
    role: str
    number: int
    incarnation: int
    pid: int


class CallHead(msgspec.Struct, array_like=True):
    """Head of a gRPC call.

    Attributes:
        path: of the method.
        options: request options in the metadata, by name.
        peer: address of the client, host:port.
        peer_names: names in the client certificate.
        deadline_ns: monotonic time at which the client stops waiting; 0 for none. All processes have one clock.
    """

    path: str
    options: dict[str, str]
    peer: str
    peer_names: tuple[str, ...]
    deadline_ns: int


class ControlStream(asyncio.Protocol):
    """One end of a control stream.

    Ownership: the event loop.

    Args:
        on_message: called with kind, id and fields of each message.
        on_closed: called once after the stream is closed.
        on_opened: called once when the stream is open, before its first message.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        on_message: Callable[[int, int, list[Any]], None],
        on_closed: Callable[[], None],
        on_opened: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_opened = on_opened
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._frames: list[bytes] = []
        self._paused: asyncio.Future[None] | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.is_open = True
        self._on_opened()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the stream."""
        self.is_open = False
        self._frames.clear()
        self.resume_writing()
        self._on_closed()

    def pause_writing(self) -> None:
        """Make `drain` wait."""
        if self._paused is None:
            self._paused = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let `drain` continue."""
        paused, self._paused = self._paused, None
        if paused is not None and not paused.done():
            paused.set_result(None)

    async def drain(self) -> None:
        """Wait until the peer has read most of what was sent."""
        self._flush()
        while self._paused is not None:
            await asyncio.shield(self._paused)

    def send(self, kind: MessageKind, exchange: int, *fields: object) -> None:
        """Send a message; a no-op on a closed stream."""
        if not self.is_open:
            return
        content = encode((int(kind), exchange, *fields))
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(SIZE.pack(len(content)))
        self._frames.append(content)

    def close(self) -> None:
        """Close the stream, after everything is sent."""
        if self.is_open:
            self._flush()
            self.transport.close()

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames and self.is_open:
            self.transport.writelines(frames)

    def data_received(self, data: bytes) -> None:
        """Read all complete messages."""
        received = self._received
        received += data
        position, end = 0, len(received)
        while end - position >= SIZE.size:
            (size,) = SIZE.unpack_from(received, position)
            if size > MAX_FRAME_BYTES:
                self.transport.abort()
                return
            stop = position + SIZE.size + size
            if stop > end:
                break
            kind, exchange, *fields = decode(bytes(received[position + SIZE.size : stop]))
            position = stop
            self._on_message(kind, exchange, fields)
        if position:
            del received[:position]
