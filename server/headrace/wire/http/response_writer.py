"""Writes complete responses of an HTTP/1.1 connection, over TLS in pieces, and counts their unread bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.core.errors import Overloaded
from headrace.core.limits import UNREAD_FULL, ClientLimits, UnreadResponses
from headrace.wire.http.infer_endpoint import error_response
from headrace.wire.http.repeated_request import RepeatedRequest
from headrace.wire.requests.response_metadata import header_lines

# Larger responses are written in parts: joining them costs more than another entry in the write queue.
_JOIN_BELOW_BYTES = 65536
# Larger responses are written in pieces over TLS: its transport encrypts all that it gets at once, without flow control.
_TLS_PIECE_BYTES = 256 << 10
# Pieces after which other tasks of the event loop run.
_TLS_PIECES_AT_ONCE = 8


class ResponseWriter(HttpToolsProtocol):
    """Uvicorn's protocol with responses that are written in one call, without its checks of headers.

    Args:
        client_limits: limits of all connections and requests.
    """

    def __init__(self, *args: Any, client_limits: ClientLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread = UnreadResponses(client_limits)
        self._unwritten_bytes = 0  # of the response that `write_later` writes in pieces

    def _update_unread(self) -> int:
        unread = self.transport.get_write_buffer_size() + self._unwritten_bytes
        if unread != self._unread.held_bytes:
            self._unread.update(unread)
        return unread

    def write_response(self, send: Any, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Write a complete response; returns False if it must be written by `write_response_later`."""
        return self.write(send.__self__, head, parts)

    async def write_response_later(self, send: Any, head: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Write a complete response after the client has read earlier ones."""
        await self.write_later(send.__self__, head, parts)

    def write(
        self, cycle: RequestResponseCycle | RepeatedRequest, head: bytes, parts: Sequence[bytes | memoryview]
    ) -> bool:
        """Write a complete response; returns False if it must be written by `write_later`.

        Args:
            cycle: of the request.
            head: status line and headers, each with its line end, without the empty line.
            parts: of the body.
        """
        if cycle.disconnected:
            return True
        if self.flow.write_paused or cycle.response_started:
            return False
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        size_bytes = sum(map(len, parts))
        if size_bytes < _JOIN_BELOW_BYTES:
            self.transport.write(b"".join((head, end, *parts)))
        elif not self._unread.admits(size_bytes):
            self.transport.write(_unread_error(end))
        elif self.scheme == "https" and size_bytes > _TLS_PIECE_BYTES:
            return False
        else:
            self.transport.writelines([head + end, *parts])
        self._complete(cycle)
        return True

    def _complete(self, cycle: RequestResponseCycle | RepeatedRequest) -> None:
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    async def write_later(
        self, cycle: RequestResponseCycle | RepeatedRequest, head: bytes, parts: Sequence[bytes | memoryview]
    ) -> None:
        """Write a complete response after the write buffer has room again; over TLS piece by piece. See `write`."""
        while self.flow.write_paused:
            await self.flow.drain()
        if self.write(cycle, head, parts):
            return
        cycle.response_started = True
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        self._unwritten_bytes = sum(map(len, parts))
        try:
            self.transport.write(head + end)
            for number, piece in enumerate(_pieces(parts)):
                if number % _TLS_PIECES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if self.flow.write_paused:
                    self._update_unread()
                    await self.flow.drain()
                if cycle.disconnected:
                    return
                self._unwritten_bytes -= len(piece)
                self.transport.write(piece)
            self._complete(cycle)
        except BaseException:  # the drain timeout of the shutdown has passed: half a response is no response
            cycle.disconnected = True
            self.transport.abort()
            raise
        finally:
            self._unwritten_bytes = 0


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """Yield the parts of a body in pieces for TLS."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _TLS_PIECE_BYTES):
            yield view[start : start + _TLS_PIECE_BYTES]


def _unread_error(end: bytes) -> bytes:
    """Response in place of one that does not fit into the memory of unread responses."""
    status, headers, body = error_response(Overloaded(UNREAD_FULL))
    return b"".join((STATUS_LINE[status], header_lines(headers), end, body))
