"""A stream of frames over a Unix socket, on asyncio: one write for each turn of the event loop, many frames in one read.

The stream itself handles notices. From the engine: "table" of versions, "flush" counts, "logs" settings, "keys" have changed.
From a front end: "records" of requests, "stopping" when it drains, "cancel" when its drain timeout has passed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

from headrace.server.front_ends.frames import (
    ACKNOWLEDGED,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    NOTICE,
    SIZE,
    Buffer,
    FrameError,
    MessageFrame,
    frame_bytes,
    message_frame,
    parse_message,
)

logger = logging.getLogger("headrace.front_ends")

OnFrame = Callable[[bytes, int, int], None]
"""Handles the frame in `buffer[start:end]`; raises FrameError, which closes the stream. The buffer does not change later."""

# Parts up to this size are copied into one buffer, larger ones are written by reference.
_MAX_JOINED_BYTES = 16 << 10
# Above this size of unsent data a front end collects requests until the engine has read.
HIGH_WATER_BYTES = 1 << 20


class FrameStream(asyncio.Protocol):
    """One end of a stream. Ownership: the event loop.

    Args:
        on_frame: handles each frame.
        on_lost: called once when the stream ends, with the error, None for an orderly end.
        on_room: called when the peer has read enough for further writes.
        on_notice: called with name and content of each notice, before it is acknowledged.

    Attributes:
        is_full: the peer does not read: more writes would only grow the buffer.
        is_scheduled: `flush` will be called: by the event loop, or by the code that has set this.
        is_lost: the stream has ended.
    """

    def __init__(
        self,
        on_frame: OnFrame,
        on_lost: Callable[[Exception | None], None],
        on_room: Callable[[], None] = lambda: None,
        on_notice: Callable[[str, Any], None] = lambda *_: None,
    ) -> None:
        self._on_frame, self._on_lost, self._on_room, self._on_notice = on_frame, on_lost, on_room, on_notice
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.Transport | None = None
        self._chunks: list[bytes] = []  # the beginning of a frame
        self._size_bytes = self._needed_bytes = 0  # of the chunks, and of their frame
        self._parts: list[Buffer] = []
        self._has_large = self.is_scheduled = False
        self._notified: dict[int, asyncio.Future[None]] = {}  # notices without an acknowledgement
        self._last = 0
        self.is_full = self.is_lost = False

    async def open(self, sock: socket.socket) -> None:
        """Start on a connected socket, which the stream owns from now on."""
        self._loop = asyncio.get_running_loop()
        await self._loop.create_unix_connection(lambda: self, sock=sock)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Write the frames that were collected before the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have no common base class
        self._transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        if self._parts:
            self._schedule()

    def data_received(self, data: bytes) -> None:
        """Handle the complete frames of what has arrived, and keep the rest."""
        chunks = self._chunks
        if chunks:
            chunks.append(data)
            self._size_bytes += len(data)
            if self._size_bytes < self._needed_bytes:
                return
            data = b"".join(chunks)
            chunks.clear()
        size_bytes, offset = len(data), 0
        self.is_scheduled = True
        try:
            while size_bytes - offset >= HEADER_BYTES:
                (frame_size,) = SIZE.unpack_from(data, offset)
                if frame_size < HEADER_BYTES or frame_size > MAX_FRAME_BYTES or frame_size & 7:
                    frame_bytes(data, offset)  # raises
                end = offset + frame_size
                if end > size_bytes:
                    break
                if data[offset + 4] < NOTICE:
                    self._on_frame(data, offset, end)
                else:
                    self._receive(parse_message(data, offset, end))
                if self.is_lost:
                    return
                offset = end
            if offset < size_bytes:
                rest = data[offset:] if offset else data
                has_size = len(rest) >= HEADER_BYTES
                self._needed_bytes = frame_bytes(rest, 0) if has_size else HEADER_BYTES
                self._size_bytes = len(rest)
                chunks.append(rest)
            if self._parts:  # answers of requests that have run on this loop: sent before what the loop has deferred
                self.flush()
            else:
                self.is_scheduled = False
        except FrameError as error:
            logger.error("the stream of a process of this server is closed: %s", error)
            self._end(error)

    def write(self, parts: Sequence[Buffer]) -> None:
        """Append parts of a frame to what this turn of the loop writes."""
        self._parts += parts
        for part in parts:
            if len(part) > _MAX_JOINED_BYTES:
                self._has_large = True
        if not self.is_scheduled and self._transport is not None:
            self._schedule()

    def send(self, name: str, content: object = None, number: int = 0) -> None:
        """Send a notice, which is acknowledged if it has a number; a no-op on a stream that has ended."""
        if not self.is_lost:
            self.write((message_frame(NOTICE, (name, content), group=number),))

    async def notify(self, name: str, content: object = None) -> None:
        """Send a notice and wait until the other process has applied it, or has ended."""
        if not self.is_lost:
            self._last += 1
            waiter = self._notified[self._last] = asyncio.get_running_loop().create_future()
            self.send(name, content, self._last)
            await waiter

    def _receive(self, message: MessageFrame) -> None:
        if message.kind == ACKNOWLEDGED:
            self._acknowledge(message.group)
            return
        try:
            self._on_notice(*message.content)
        finally:
            if message.group:
                self.write((message_frame(ACKNOWLEDGED, group=message.group),))

    def _acknowledge(self, number: int) -> None:
        waiter = self._notified.pop(number, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def flush(self) -> None:
        """Write what has been collected."""
        self.is_scheduled = False
        parts, transport = self._parts, self._transport
        if not parts or transport is None or self.is_lost:
            return
        self._parts = []
        if self._has_large:
            self._has_large = False
            transport.writelines([part for part in parts if part])
        else:
            transport.write(b"".join(parts))

    def _schedule(self) -> None:
        assert self._loop is not None
        self.is_scheduled = True
        self._loop.call_soon(self.flush)

    def pause_writing(self) -> None:
        """Set `is_full`: the write buffer has reached its limit."""
        self.is_full = True

    def resume_writing(self) -> None:
        """Reset `is_full`, and report that there is room again."""
        self.is_full = False
        self._on_room()

    def eof_received(self) -> bool:
        """Close the connection: both directions end together."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream."""
        self._end(exc)

    def close(self) -> None:
        """Write what has been collected and end the stream; `on_lost` is called."""
        self.flush()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._parts, self._chunks = [], []
        if self._transport is not None:
            self._transport.close() if error is None else self._transport.abort()
        for number in list(self._notified):
            self._acknowledge(number)
        self._on_lost(error)
