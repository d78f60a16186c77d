"""Large request bodies straight from the socket into the array that the tensors will be views of.

Through the HTTP parser a body is copied four times (socket buffer, parser, request cycle, joined chunks); with 600 KB a
request that is a large part of what a picture costs. Once the headers are read, the rest of a body with a Content-Length
needs no parser: the transport is handed a protocol that offers the array itself to `recv`, and gets the HTTP protocol back
when it is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

# Below this the parser's copies cost less than changing protocols.
MIN_DIRECT_BYTES = 65536

BodyBytes = npt.NDArray[np.uint8]


class BodyReceiver(asyncio.BufferedProtocol):
    """Receives the rest of one body; everything else is the HTTP protocol's business.

    Memory: the array is not touched before data arrive, so that a large Content-Length alone commits nothing.

    Args:
        http: the HTTP protocol of the connection.
        transport: of the connection; handed back to `http` when the body is complete.
        size_bytes: of the whole body.
        start: what has arrived of it already.
        on_progress: called whenever data arrive.
        on_complete: called once with the whole body, maybe before anybody has asked for it.
    """

    def __init__(
        self,
        http: asyncio.Protocol,
        transport: asyncio.Transport,
        size_bytes: int,
        start: bytes | bytearray | memoryview,
        on_progress: Callable[[], None],
        on_complete: Callable[[BodyBytes], None],
    ) -> None:
        self._http = http
        self._transport = transport
        self._body: BodyBytes = np.empty(size_bytes, np.uint8)
        self._view = self._body.data
        self._view[: len(start)] = start
        self._filled = len(start)
        self._on_progress = on_progress
        self._on_complete = on_complete
        self._whole: asyncio.Future[BodyBytes | None] = asyncio.get_running_loop().create_future()

    def take_over(self) -> None:
        """Become the transport's protocol."""
        self._transport.pause_reading()
        self._transport.set_protocol(self)
        self._transport.resume_reading()

    async def body(self) -> BodyBytes | None:
        """The whole body; None if the client left before it was complete."""
        return await self._whole

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: never more room than the body has, so that the next request stays in the socket."""
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` have arrived."""
        self._filled += nbytes
        self._on_progress()
        if self._filled == len(self._body):
            self._transport.pause_reading()
            self._transport.set_protocol(self._http)
            self._transport.resume_reading()
            self._on_complete(self._body)
            if not self._whole.done():
                self._whole.set_result(self._body)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left in the middle of its body."""
        if not self._whole.done():
            self._whole.set_result(None)
        self._http.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """The client will send no more."""
        return self._http.eof_received()

    def pause_writing(self) -> None:
        """Pass on."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self._http.resume_writing()
