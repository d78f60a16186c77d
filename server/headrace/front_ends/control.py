"""Control stream between a front-end process and the engine process: notices on a Unix stream socket.

A frame is its size as u32, little-endian, and one msgpack array: a notice is its number, name and content, its acknowledgement
the number alone. A notice with the number 0 is not acknowledged. Notices of one iteration of the event loop are written together.

From the engine: "table" of versions, "flush" counts, "logs" settings, "keys" have changed. From a front end: "records" of
requests, "stopping" when it drains, "cancel" when its drain timeout has passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from struct import Struct
from typing import Any, cast

import msgspec

SIZE = Struct("<I")
MAX_FRAME_BYTES = 32 << 20

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


class Client(msgspec.Struct, array_like=True, frozen=True):
    """Client of a front end, whose requests a connection to the engine passes on.

    Attributes:
        address: host and port of the client.
        server: host and port on which the front end serves it.
        scheme: "http" or "https".
        names: names in the client certificate; empty without one.
    """

    address: tuple[str, int] | None = None
    server: tuple[str, int] | None = None
    scheme: str = "http"
    names: tuple[str, ...] = ()


class Hello(msgspec.Struct, array_like=True):
    """First message of a front end on each of its connections to the engine.

    Attributes:
        token: of the server, from the supervisor.
        role: "control" or "data" for a stream of the front end; "http", "metrics" or "grpc" for the requests of a client of that
            port, which follow in that protocol.
        number: of the front end, from 1.
        incarnation: number of times that this front end was started, from 1.
        pid: of the front end.
        client: of the requests.
    """

    token: bytes
    role: str
    number: int
    incarnation: int
    pid: int
    client: Client = Client()


class ControlStream(asyncio.Protocol):
    """One end of a control stream.

    Ownership: the event loop.

    Args:
        on_notice: called with name and content of each notice, before it is acknowledged.
        on_closed: called once after the stream is closed.
        on_opened: called once when the stream is open, before its first notice.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        on_notice: Callable[[str, Any], None],
        on_closed: Callable[[], None],
        on_opened: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_notice = on_notice
        self._on_closed = on_closed
        self._on_opened = on_opened
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._frames: list[bytes] = []
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._last = 0
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.is_open = True
        self._on_opened()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the stream; an end counts as the acknowledgement of all notices."""
        self.is_open = False
        self._frames.clear()
        for number in list(self._waiting):
            self._acknowledge(number)
        self._on_closed()

    def send(self, name: str, content: object = None) -> None:
        """Send a notice that is not acknowledged; a no-op on a closed stream."""
        self._send((0, name, content))

    async def notify(self, name: str, content: object = None) -> None:
        """Send a notice and wait until the other process has applied it, or has ended."""
        if not self.is_open:
            return
        self._last += 1
        waiter = self._waiting[self._last] = self._loop.create_future()
        self._send((self._last, name, content))
        await waiter

    def close(self) -> None:
        """Close the stream, after everything is sent."""
        if self.is_open:
            self._flush()
            self.transport.close()

    def _send(self, message: tuple[object, ...]) -> None:
        if self.is_open:
            if not self._frames:
                self._loop.call_soon(self._flush)
            content = encode(message)
            self._frames += (SIZE.pack(len(content)), content)

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
            message = decode(bytes(received[position + SIZE.size : stop]))
            position = stop
            self._receive(*message)
        if position:
            del received[:position]

    def _receive(self, number: int, *notice: Any) -> None:
        if not notice:
            self._acknowledge(number)
            return
        try:
            self._on_notice(*notice)
        finally:
            if number:
                self._send((number,))

    def _acknowledge(self, number: int) -> None:
        waiter = self._waiting.pop(number, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
