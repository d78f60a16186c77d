"""HTTP connections over `max_connections`: see `ConnectionReserve`. Liveness, readiness and metrics are served on them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from headrace.core.clock import NS_PER_S
from headrace.core.limits import GIVE_WAY_NS, ConnectionReserve
from headrace.wire.http.connection import HeadraceHttpProtocol
from headrace.wire.http.infer_endpoint import InferEndpoint
from headrace.wire.http.timeouts import Stage

RESERVED_PATHS = frozenset((b"/v2/health/live", b"/v2/health/ready", b"/metrics"))


class LimitedHttpProtocol(HeadraceHttpProtocol):
    """An HTTP connection that takes part in the limit of connections; see `LimitedConnection`.

    Ownership: the event loop.

    Args:
        reserve: connections of the listener.
    """

    def __init__(self, *args: Any, reserve: ConnectionReserve, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reserve = reserve
        self._is_over, self._over_text = False, ""
        self._is_leaving = False  # it ends after the next answer
        self._connected_s = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Add the connection to those of the listener."""
        super().connection_made(transport)
        if not self._is_over:
            self._reserve.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from those of the listener."""
        self._reserve.discard(self)
        super().connection_lost(exc)

    def on_over_limit(self, text: str) -> None:
        """Wait for the first request of a new connection over the limit; `text` refuses it."""
        self._is_over, self._over_text = True, text
        self._reserve.add_over(self)

    def on_headers_complete(self) -> None:
        """Apply the limit of connections to the first request."""
        if self._is_over and self.url.partition(b"?")[0] not in RESERVED_PATHS:
            if not self._reserve.admit(self):
                self._refuse_from_parser(503, self._over_text)
            self._is_over = False
        super().on_headers_complete()
        if (self._is_over or self._is_leaving) and not self._downgraded_head:
            self.cycle.keep_alive = False

    def _join_endpoint(self) -> InferEndpoint | None:
        """Parse the first request of a connection over the limit, whatever its head."""
        return None if self._is_over else super()._join_endpoint()

    def give_up(self, move: Callable[[int], None]) -> bool:
        """Pass the connection on if it is between two requests; over TLS, end it after the next answer instead.

        Bytes that have arrived since the last read stay in the socket.

        Args:
            move: takes a new descriptor of the connection, which this protocol closes.

        Returns:
            True if it is passed on, or will end.
        """
        if not self.is_idle():
            return self._is_leaving
        if self.scheme == "https":
            self._is_leaving, self._heads = True, {}  # the parser reads the last request, whatever its head
            return True
        descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        self.transport.abort()
        move(descriptor)
        return True

    def is_idle(self) -> bool:
        """True if no request has begun since the last answer was sent."""
        if self.transport.is_closing() or self._is_over or self._probe is not None or self.is_ahead:
            return False
        if self.transport.get_write_buffer_size():
            return False
        if not self._has_received:
            return True
        return self.stage is Stage.BETWEEN and self.cycle is not None and self.cycle.response_complete

    def close_idle(self) -> None:
        """Close the connection, which is idle. The first request may be on its way: it gets a response."""
        if not self._has_received:
            self._refuse(
                503, "the server has closed a connection without a request in favour of another one: retry later"
            )
        elif self.stage in (Stage.HEADERS, Stage.BODY):
            self._refuse(
                408, "the request arrives too slowly while the server has as many connections as it may: retry later"
            )
        elif self._unread.held_bytes:
            self.abort()
        self.transport.close()

    def _is_slow(self) -> bool:
        """True if the client has been too slow for `GIVE_WAY_NS`: headers and bodies that do not arrive, responses unread."""
        bodies = self._client_limits.bodies
        if bodies.is_slow(self._reservation) or bodies.is_slow(self._unread):
            return True
        is_read = self.stage is Stage.HEADERS and not self.is_waiting_for_server()
        return is_read and self._timeouts.age_s(self.since) * NS_PER_S >= GIVE_WAY_NS

    def refuse_connection(self, with_response: bool) -> None:
        """Close a connection over the limit that has sent no complete request."""
        self._refuse(503, self._over_text)
        if not with_response and not self.transport.is_closing():
            self.transport.close()

    def idle_rank(self) -> tuple[int, float] | None:
        """Return the rank in which idle connections, and those of slow clients, are closed, lowest first; None for others."""
        transport = self.transport
        if transport.is_closing() or self.stage is Stage.ENDING or self._is_over:
            return None
        if not self._has_received:
            return 0, self._connected_s
        if self._is_slow():
            return 2, self._connected_s
        if not self.is_idle():
            return None
        timer = self.timeout_keep_alive_task
        return 1, max(self._idle_since_s, timer.when() - self.timeout_keep_alive if timer is not None else 0.0)
