"""uvicorn's HTTP/1.1 protocol with four short cuts for the inference route, offered as `headrace.connection` in the scope.

- A waiting request learns at once that its client has gone. ASGI tells a disconnect only to who asks `receive` for it, which
  costs a task per request; here the connection itself abandons the completion that its request waits for.
- A body that has arrived whole is handed over without a round through `receive`.
- A large body is received without the parser, straight into the array of its tensors (`http_body`).
- An answer is written in one piece, without a round of checks on headers that are ours.

And with a bound on the size of the headers. The short cuts read attributes of uvicorn's request cycle; the locked version has
them, and tests run over both ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.core.completion import LoopCompletion
from server.frontends.http_body import MIN_DIRECT_BYTES, BodyBytes, SocketReader

# Larger answers are written in parts: joining them would cost more than another entry in the write queue.
_JOIN_BELOW_BYTES = 65536
# Request line and headers of one request, as they came; within one read of the socket it may be a little more.
_MAX_HEADER_BYTES = 65536


class HeadraceHttpProtocol(HttpToolsProtocol):
    """One connection; see `server.frontends.http_infer.Connection`.

    Args:
        max_direct_bytes: a larger Content-Length is left to the parser, and to the endpoint to refuse.
    """

    def __init__(self, *args: Any, max_direct_bytes: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caller: LoopCompletion | None = None
        self._max_direct_bytes = max_direct_bytes
        self._reader = SocketReader(self, self._unset_keepalive_if_required)
        self._large: tuple[RequestResponseCycle, asyncio.Future[BodyBytes | None]] | None = None
        self._seen: RequestResponseCycle | None = None
        self._in_headers = False
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """From here on the reader decides where bytes go."""
        super().connection_made(transport)
        transport.set_protocol(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: nobody waits for the answer any more."""
        super().connection_lost(exc)
        if self.caller is not None:
            self.caller.abandon()

    def on_message_begin(self) -> None:
        """A request begins: its scope gets a way back to this connection."""
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        self.scope["headrace.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """The headers are in."""
        self._in_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes for the parser; if they leave a large body incomplete, the rest of it takes the short way."""
        if self.parser is None:
            return
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the headers are larger than {_MAX_HEADER_BYTES} bytes")
            return
        cycle = self.cycle
        if cycle is not None and cycle.more_body and cycle is not self._seen:
            # Only now, right after its headers: once its task has run, the body is the business of `receive`.
            self._seen = cycle
            if not self.pipeline:
                self._receive_directly(cycle)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP."""
        self._refuse(400, msg)

    async def whole_body(self, send: Any) -> bytes | BodyBytes | None:
        """The body of the request that `send` answers, or None if `receive` has it (or the client's leaving)."""
        cycle: RequestResponseCycle = send.__self__
        if self._large is not None and self._large[0] is cycle:
            whole = await self._large[1]
            self._large = None
            return whole
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        return bytes(cycle.body)

    def answer(self, send: Any, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Write a whole answer; False if the client reads slowly and the answer must wait its turn through `send`.

        Args:
            send: of the request that is answered.
            head: status line and headers, each with its line end, without the empty line.
            parts: of the body.
        """
        cycle: RequestResponseCycle = send.__self__
        if self.flow.write_paused or cycle.response_started:
            return False
        if cycle.disconnected:
            return True
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        if sum(map(len, parts)) < _JOIN_BELOW_BYTES:
            self.transport.write(b"".join((head, end, *parts)))
        else:
            self.transport.writelines([head + end, *parts])
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def _receive_directly(self, cycle: RequestResponseCycle) -> None:
        """Take the rest of a body past the parser, if it is an inference request's and large enough to be worth it."""
        if cycle.response_complete or cycle.waiting_for_100_continue or not self.scope["path"].endswith("/infer"):
            return
        size_bytes = _content_length(self.headers)
        if not MIN_DIRECT_BYTES <= size_bytes <= self._max_direct_bytes:
            return

        def complete(body: BodyBytes) -> None:
            cycle.body = body  # type: ignore[assignment]
            cycle.more_body = False
            cycle.message_event.set()
            # The parser still waits for that body: a fresh one takes the next request.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

        self._large = cycle, self._reader.expect(size_bytes, cycle.body, complete)

    def _refuse(self, status: int, text: str) -> None:
        body = orjson.dumps({"error": text})
        head = (
            STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        )
        self.transport.write(head % len(body) + body)
        self.transport.close()


def _content_length(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """The declared size of the body, 0 if there is none (a chunked one)."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
