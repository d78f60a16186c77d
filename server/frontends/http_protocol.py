"""uvicorn's HTTP/1.1 protocol with four short cuts for the inference route, offered as `headrace.connection` in the scope.

- A waiting request learns at once that its client has gone. ASGI tells a disconnect only to who asks `receive` for it, which
  costs a task per request; here the connection itself abandons the completion that its request waits for.
- A body that has arrived whole is handed over without a round through `receive`.
- A large body is received without the parser, straight into the array of its tensors (`http_body`).
- An answer is written in one piece, without a round of checks on headers that are ours.

The short cuts read attributes of uvicorn's request cycle; the locked version has them, and tests run over both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.core.completion import LoopCompletion
from server.frontends.http_body import MIN_DIRECT_BYTES, BodyBytes, BodyReceiver

# Larger answers are written in parts: joining them would cost more than another entry in the write queue.
_JOIN_BELOW_BYTES = 65536
_HEADERS_END = b"\r\n\r\n"


class HeadraceHttpProtocol(HttpToolsProtocol):
    """One connection; see `server.frontends.http_infer.Connection`.

    Args:
        max_direct_bytes: a larger Content-Length is left to the parser, and to the endpoint to refuse.
    """

    def __init__(self, *args: Any, max_direct_bytes: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_direct_bytes = max_direct_bytes
        self.caller: LoopCompletion | None = None
        self._receiver: BodyReceiver | None = None
        self._seen: RequestResponseCycle | None = None

    def on_message_begin(self) -> None:
        """A request begins: its scope gets a way back to this connection."""
        super().on_message_begin()
        self.scope["headrace.connection"] = self  # type: ignore[typeddict-unknown-key]

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: nobody waits for the answer any more."""
        super().connection_lost(exc)
        if self.caller is not None:
            self.caller.abandon()

    def data_received(self, data: bytes) -> None:
        """Bytes for the parser; if they leave a large body incomplete, the rest of it takes the short way."""
        rest: bytes | memoryview = b""
        if len(data) >= MIN_DIRECT_BYTES and (self.cycle is None or self.cycle.response_complete):
            # A request that begins with much of its body: the parser gets the headers alone, and copies no body.
            end = data.find(_HEADERS_END) + len(_HEADERS_END)
            if end >= len(_HEADERS_END):
                data, rest = data[:end], memoryview(data)[end:]
        super().data_received(data)
        cycle = self.cycle
        if cycle is not None and cycle.more_body and cycle is not self._seen:
            # Only now, right after its headers: once its task has run, the body is the business of `receive`.
            self._seen = cycle
            if not self.pipeline and self._receive_directly(cycle, rest or cycle.body):
                return
        if rest and not self.transport.is_closing():
            super().data_received(bytes(rest))

    async def whole_body(self, send: Any) -> bytes | BodyBytes | None:
        """The body of the request that `send` answers, or None if `receive` has it (or the client's leaving)."""
        cycle: RequestResponseCycle = send.__self__
        if self._receiver is not None and cycle is self.cycle:
            return await self._receiver.body()
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        return bytes(cycle.body) if isinstance(cycle.body, bytearray) else cycle.body

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

    def _receive_directly(self, cycle: RequestResponseCycle, start: bytes | bytearray | memoryview) -> bool:
        """Take the rest of a body past the parser, if it is an inference request's and large enough to be worth it.

        Args:
            cycle: whose body it is.
            start: what is here of it.
        """
        if cycle.response_complete or cycle.waiting_for_100_continue or not self.scope["path"].endswith("/infer"):
            return False
        size_bytes = _content_length(self.headers)
        if not MIN_DIRECT_BYTES <= size_bytes <= self._max_direct_bytes or len(start) >= size_bytes:
            return False

        def complete(body: BodyBytes) -> None:
            cycle.body = body  # type: ignore[assignment]
            cycle.more_body = False
            cycle.message_event.set()
            self._receiver = None
            # The parser still waits for that body: a fresh one takes the next request.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

        keep_open = self._unset_keepalive_if_required
        self._receiver = BodyReceiver(self, self.transport, size_bytes, start, keep_open, complete)
        self.flow.resume_reading()
        self._receiver.take_over()
        return True


def _content_length(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """The declared size of the body, 0 if there is none (a chunked one)."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
