"""Response of server-sent events (WHATWG HTML, section 9.2): a body without a known length, written event by event."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.core.errors import HeadraceError
from headrace.observability.labelled_counter import ERRORS
from headrace.wire.http.infer_endpoint import Send
from headrace.wire.requests.response_metadata import Header

MEDIA_TYPE = "text/event-stream; charset=utf-8"
COMMENT = b":\n\n"
"""A comment, which clients skip: a heartbeat."""

# No proxy may store, compress or collect the events (nginx reads the last one).
_HEADERS = (
    (b"content-type", MEDIA_TYPE.encode()),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
)
# Larger than any response.
_ANY_LENGTH = 1 << 62


def encode_event(data: bytes) -> bytes:
    """Return an event; `data` has no line ends."""
    return b"data: %b\n\n" % data


def error_data(error: HeadraceError) -> bytes:
    """Encode and count an error that is an event."""
    ERRORS.count("http", error.reason)
    return orjson.dumps({"error": str(error).encode("utf-8", "replace").decode()})


class EventStream:
    """Writes the events of one response. The head is written with the first event. Ownership: the event loop.

    Every write waits while the client does not read, so that at most one event is in memory beside the write buffer.

    Args:
        send: of ASGI.

    Attributes:
        headers: of the response, before it has started.
        has_started: the head is written: the status is 200.
    """

    __slots__ = ("_send", "has_started", "headers")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: Sequence[Header] = ()
        self.has_started = False

    async def event(self, data: bytes) -> None:
        """Write an event; `data` has no line ends."""
        await self._write(encode_event(data))

    async def comment(self) -> None:
        """Write a heartbeat."""
        await self._write(COMMENT)

    async def end(self) -> None:
        """End the response."""
        await self._start()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, text: bytes) -> None:
        await self._start()
        await self._send({"type": "http.response.body", "body": text, "more_body": True})

    async def _start(self) -> None:
        if not self.has_started:
            self.has_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *self.headers]})


class Http10Cycle(RequestResponseCycle):
    """Request and response of HTTP/1.0, which has no chunks: the close of the connection ends a body of unknown length."""

    is_unsized = False

    async def send(self, message: MutableMapping[str, Any]) -> None:  # type: ignore[override]
        """Send a message of the response, without the chunks of uvicorn's class."""
        if message["type"] == "http.response.start":
            if not any(name in (b"content-length", b"transfer-encoding") for name, _ in message.get("headers", ())):
                self.is_unsized, self.chunked_encoding, self.keep_alive = True, False, False
        elif self.is_unsized:
            self.expected_content_length = _ANY_LENGTH if message.get("more_body") else len(message.get("body", b""))
        await super().send(message)  # type: ignore[arg-type]
