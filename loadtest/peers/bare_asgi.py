"""The floor of any Python front end: an ASGI callable that reads the body and sends a fixed answer of the right size.

python -m loadtest.peers.bare_asgi --port 8001 --answer-bytes 220
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from loadtest.peers import port_parser, serve

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class BareAsgi:
    """Answer every request with the same bytes, after the whole body was read."""

    def __init__(self, answer: bytes) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(len(answer)).encode()),
        ]
        self._start = {"type": "http.response.start", "status": 200, "headers": headers}
        self._body = {"type": "http.response.body", "body": answer}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await send(self._start)
        await send(self._body)


def main() -> None:
    """Start from the command line."""
    parser = port_parser()
    parser.add_argument("--answer-bytes", type=int, required=True)
    options = parser.parse_args()
    # Headrace sends neither header; the floor shall not pay for what we do not.
    serve(BareAsgi(b"o" * options.answer_bytes), options.port, server_headers=False)


if __name__ == "__main__":
    main()
