"""Bytes from the socket: headers and small bodies to the HTTP parser, large bodies straight into the array of their tensors.

Through the parser a body is copied four times (socket buffer, parser, request cycle, joined chunks); with 600 KB a request
that is a large part of what a picture costs. Once the headers are read, the rest of a body with a Content-Length needs no
parser: `recv` writes it where it stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Smaller bodies go through the parser: its copies cost less than the detour.
MIN_DIRECT_BYTES = 65536

BodyBytes = npt.NDArray[np.uint8]

# Where `recv` writes what the parser is to see; small, so that little of a large body takes that way. One is enough for all
# connections of a process: it is read out before the loop goes on.
READ_BYTES = 16384
_SCRATCH = memoryview(bytearray(READ_BYTES))


@dataclass(slots=True)
class _Body:
    array: BodyBytes | None
    missing_bytes: int
    complete: asyncio.Future[BodyBytes | None]
    on_complete: Callable[[BodyBytes | None], None]


class SocketReader(asyncio.BufferedProtocol):
    """The transport's protocol in front of the HTTP protocol: decides where the next bytes go.

    Args:
        http: the HTTP protocol of the connection; everything but data is its business.
        on_body_data: called with their size whenever data of a direct body have arrived; it may forget or drop the body.
    """

    def __init__(self, http: asyncio.Protocol, on_body_data: Callable[[int], None]) -> None:
        self._http = http
        self._on_body_data = on_body_data
        self._body: _Body | None = None

    def receive_body(
        self, size_bytes: int, start: bytes | bytearray, on_complete: Callable[[BodyBytes | None], None]
    ) -> asyncio.Future[BodyBytes | None]:
        """Receive a body directly from here on.

        Memory: the array is not touched before data arrive, so that a large Content-Length alone commits nothing.

        Args:
            size_bytes: of the whole body, more than `start`.
            start: what has arrived of it already.
            on_complete: called with the whole body, or None if it was dropped, before the next byte is read.

        Returns:
            The whole body, or None if the client leaves before it is complete, or it was dropped.
        """
        array: BodyBytes = np.empty(size_bytes, np.uint8)
        array.data[: len(start)] = start
        complete: asyncio.Future[BodyBytes | None] = asyncio.get_running_loop().create_future()
        self._body = _Body(array, size_bytes - len(start), complete, on_complete)
        return complete

    def drop_body(self) -> None:
        """Keep nothing of the body, and read the rest of it away."""
        if self._body is not None:
            self._body.array = None

    def end_body(self) -> None:
        """What comes from here on is no body any more."""
        body, self._body = self._body, None
        if body is not None and not body.complete.done():
            body.complete.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: never more room than the body has, so that the next request is not swallowed."""
        body = self._body
        if body is None:
            return _SCRATCH
        return _SCRATCH[: body.missing_bytes] if body.array is None else body.array.data[-body.missing_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` have arrived."""
        body = self._body
        if body is None:
            self._http.data_received(bytes(_SCRATCH[:nbytes]))
            return
        body.missing_bytes -= nbytes
        self._on_body_data(nbytes)
        if self._body is body and not body.missing_bytes:
            self._body = None
            body.on_complete(body.array)
            if not body.complete.done():
                body.complete.set_result(body.array)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, maybe in the middle of its body."""
        self.end_body()
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
