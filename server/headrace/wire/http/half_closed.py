"""Detects that a half-closed client is gone; see docs/decisions/0011-half-closed-clients.md.

A client that has closed its socket completely sends the same FIN as one that still reads, and a reset only in response to bytes.
So the server writes bytes that clients skip: an interim response (RFC 9110, section 15.2), or a comment between two events.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.wire.http.event_stream import COMMENT, Http10Cycle
from headrace.wire.http.repeated_request import RepeatedRequest

# Seconds from the end of a half-closed client's stream to the first probe, between two probes, and to the reset that answers one.
_FIRST_PROBE_S, _PROBE_S, _RESET_S = 0.2, 2.0, 0.05
# Requests that may run for long: their clients are probed at once.
_LONG_REQUESTS = ("/generate", "/generate_stream")
_TCP_CLOSE = 7  # state of a Linux TCP socket that the peer has reset


class DisconnectProbe:
    """Probes one half-closed client. Ownership: the event loop.

    Args:
        transport: of the connection.
        loop: event loop.
        cycle: request whose response is written next.
        check: calls `is_gone` and aborts the connection if that is true.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        cycle: RequestResponseCycle | RepeatedRequest | None,
        check: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._check = check
        is_long = isinstance(cycle, RequestResponseCycle) and cycle.scope["path"].endswith(_LONG_REQUESTS)
        first_s = 0.0 if is_long else _FIRST_PROBE_S
        self._next_s = loop.time() + first_s
        loop.call_later(first_s if is_long else first_s + _RESET_S, check)

    def is_gone(self, active: RequestResponseCycle | RepeatedRequest | None) -> bool:
        """Return True if the client has reset the connection; else probe it if it is time for that.

        Args:
            active: request whose response is written now, None for none.
        """
        if active is None or active.response_complete or self._transport.is_closing():
            return False
        if _is_reset(self._transport):
            return True
        now_s = self._loop.time()
        text = _probe(active) if now_s >= self._next_s else b""
        if text:
            self._next_s = now_s + _PROBE_S
            self._transport.write(text)
            self._loop.call_later(_RESET_S, self._check)
        return False


def _probe(active: RequestResponseCycle | RepeatedRequest) -> bytes:
    """Return bytes that the client of a request skips; b"" if there are none now."""
    if not isinstance(active, RequestResponseCycle):
        return b"" if active.response_started else b"HTTP/1.1 100 Continue\r\n\r\n"
    if not active.response_started:
        return b"" if active.scope["http_version"] == "1.0" else b"HTTP/1.1 100 Continue\r\n\r\n"
    if not active.scope["path"].endswith("/generate_stream"):
        return b""
    if active.chunked_encoding:
        return b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT)
    return COMMENT if isinstance(active, Http10Cycle) and active.is_unsized else b""


def _is_reset(transport: asyncio.BaseTransport) -> bool:
    """Return True if the peer has reset the connection; False where the system does not say so."""
    sock = transport.get_extra_info("socket")
    try:
        return sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
    except (OSError, AttributeError):
        return False
