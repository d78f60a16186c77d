"""Socket reader of an HTTP/1.1 connection: small bodies go through the HTTP parser, large ones directly into one array.

The parser copies a body four times (socket buffer, parser, request cycle, joined chunks), which is a large part of the cost of a
600 KB image. After the headers, the rest of a body with Content-Length needs no parser: `recv` writes into its final array.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headrace.wire.requests.tensor_codec import BodyBytes

# Smaller bodies go through the parser: its copies cost less than the switch to direct reading.
MIN_DIRECT_BYTES = 65536

# `recv` writes bytes for the parser here. The buffer is small, so that little of a large body goes through the parser. All
# connections of a process share one: it is emptied before the event loop continues.
READ_BYTES = 16384
# Of a connection whose listener has seen repeated requests with bodies between these sizes: one read has all of such a request.
# Not more than uvicorn's limit of 64 KiB: behind a part of a body above it, uvicorn stops reading until `receive` is called.
WIDE_READ_BYTES = MIN_DIRECT_BYTES
_WIDE = memoryview(bytearray(WIDE_READ_BYTES))
_SCRATCH = _WIDE[:READ_BYTES]


@dataclass(slots=True)
class _Body:
    array: BodyBytes | None
    missing_bytes: int
    on_complete: Callable[[BodyBytes | None], None]
    on_end: Callable[[], None]


class SocketReader(asyncio.BufferedProtocol):
    """Transport protocol in front of the HTTP protocol: selects the buffer for the next bytes.

    Args:
        http: HTTP protocol of the connection; receives all other events.
        on_body_data: called with the number of bytes when a part of a direct body has arrived; may call `end_body` or
            `drop_body`.
    """

    def __init__(self, http: asyncio.Protocol, on_body_data: Callable[[int], None]) -> None:
        self._http = http
        self._on_body_data = on_body_data
        self._body: _Body | None = None
        self._scratch = _SCRATCH

    def widen(self) -> None:
        """Read up to `WIDE_READ_BYTES` at once."""
        self._scratch = _WIDE

    def receive_body(
        self,
        size_bytes: int,
        start: bytes | bytearray,
        on_complete: Callable[[BodyBytes | None], None],
        on_end: Callable[[], None],
        memory: BodyBytes,
    ) -> None:
        """Receive the rest of a body directly into one array.

        The array is not touched before data arrive, so that a large Content-Length alone commits no memory.

        Args:
            size_bytes: of the complete body, larger than `start`.
            start: first part of the body, already received.
            on_complete: called with the complete body as uint8[size_bytes], or None if it was dropped, before further bytes
                are read.
            on_end: called in place of `on_complete` if the body ends before: the client disconnects, or is refused.
            memory: receives the body, uint8[size_bytes].
        """
        memory.data[: len(start)] = start
        self._body = _Body(memory, size_bytes - len(start), on_complete, on_end)

    def drop_body(self) -> None:
        """Free the array; the rest of the body is read and discarded."""
        if self._body is not None:
            self._body.array = None

    def end_body(self) -> None:
        """End the direct body: the next bytes go to the HTTP parser."""
        body, self._body = self._body, None
        if body is not None:
            body.on_end()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes; it ends with the body, so that bytes of the next request stay out of it."""
        body = self._body
        if body is None:
            return self._scratch
        return _SCRATCH[: body.missing_bytes] if body.array is None else body.array.data[-body.missing_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        """Process `nbytes` that were written into the buffer."""
        body = self._body
        if body is None:
            self._http.data_received(bytes(_WIDE[:nbytes]))
            return
        body.missing_bytes -= nbytes
        self._on_body_data(nbytes)
        if self._body is body and not body.missing_bytes:
            self._body = None
            body.on_complete(body.array)

    def connection_lost(self, exc: Exception | None) -> None:
        """End an incomplete body and pass the event on."""
        self.end_body()
        self._http.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Pass the event on: the client has half-closed."""
        return self._http.eof_received()

    def pause_writing(self) -> None:
        """Pass the event on."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass the event on."""
        self._http.resume_writing()
