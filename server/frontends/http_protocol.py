"""uvicorn's HTTP/1.1 protocol, with one thing added: a waiting request learns at once that its client has gone.

ASGI tells a disconnect only to who asks `receive` for it, which costs a task per request. Here the connection itself abandons
the completion that its request waits for.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.core.completion import LoopCompletion


class HeadraceHttpProtocol(HttpToolsProtocol):
    """Adds `headrace.connection` to the scope; see `server.frontends.http_infer.Connection`."""

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
