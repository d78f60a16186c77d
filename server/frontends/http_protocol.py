"""uvicorn's HTTP/1.1 protocol with three short cuts for the inference route, offered as `headrace.connection` in the scope.

- A waiting request learns at once that its client has gone. ASGI tells a disconnect only to who asks `receive` for it, which
  costs a task per request; here the connection itself abandons the completion that its request waits for.
- A body that has arrived whole is handed over without a round through `receive`.
- An answer is written in one piece, without a round of checks on headers that are ours.

The short cuts read attributes of uvicorn's request cycle; the locked version has them, and tests run over both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.core.completion import LoopCompletion

# Larger answers are written in parts: joining them would cost more than another entry in the write queue.
_JOIN_BELOW_BYTES = 65536


class HeadraceHttpProtocol(HttpToolsProtocol):
    """One connection; see `server.frontends.http_infer.Connection`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caller: LoopCompletion | None = None

    def on_message_begin(self) -> None:
        """A request begins: its scope gets a way back to this connection."""
        super().on_message_begin()
        self.scope["headrace.connection"] = self  # type: ignore[typeddict-unknown-key]

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: nobody waits for the answer any more."""
        super().connection_lost(exc)
        if self.caller is not None:
            self.caller.abandon()

    def whole_body(self, send: Any) -> bytes | None:
        """The body of the request that `send` answers if all of it is here, else None: then `receive` has it."""
        cycle: RequestResponseCycle = send.__self__
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
