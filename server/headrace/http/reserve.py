"""Connections over `max_connections`: idle connections give way, and a reserve serves liveness, readiness and metrics.

A connection over the limit is accepted. The limit takes effect at its first request:

- Liveness, readiness and metrics are answered, then the connection is closed.
- For any other request the connection that has been idle for longest is closed: first connections that never sent a byte, then
  those between two requests. The new connection takes its place.
- If no connection is idle, the request is refused with 503.

At most `ClientLimits.reserved_connections` connections over the limit wait for their first request; the oldest gives way to
the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from heapq import nsmallest
from typing import Any

from headrace.core.limits import ClientLimits
from headrace.http.connection import HeadraceHttpProtocol
from headrace.http.timeouts import Stage

RESERVED_PATHS = frozenset((b"/v2/health/live", b"/v2/health/ready", b"/metrics"))
# One search of idle connections finds at most this many; a search takes some hundred microseconds.
_CANDIDATES = 64
# Shortest time between two searches that find nothing, seconds.
_SEARCH_S = 0.05


class ConnectionReserve:
    """The connections of one listener, and those over its limit.

    Ownership: the event loop.

    Args:
        client_limits: the limit; counts the connections.
    """

    def __init__(self, client_limits: ClientLimits) -> None:
        self._limits = client_limits
        self._connections: dict[LimitedHttpProtocol, None] = {}
        self._over: dict[LimitedHttpProtocol, None] = {}
        self._candidates: deque[tuple[tuple[bool, float], LimitedHttpProtocol]] = deque()
        self._next_search_s = 0.0

    def add(self, connection: LimitedHttpProtocol) -> None:
        """Add a new connection within the limit."""
        self._connections[connection] = None

    def add_over(self, connection: LimitedHttpProtocol) -> None:
        """Add a new connection over the limit; closes the oldest such connection if there are too many."""
        self._over[connection] = None
        if len(self._over) > self._limits.reserved_connections:
            oldest = next(iter(self._over))
            del self._over[oldest]
            # A refused connection stays open until its client has read the response: that must be bounded too.
            over = (self._limits.connections or 0) - self._limits.limits.max_connections
            oldest.refuse_connection(with_response=over <= 2 * self._limits.reserved_connections)

    def discard(self, connection: LimitedHttpProtocol) -> None:
        """Remove a closed connection."""
        self._connections.pop(connection, None)
        self._over.pop(connection, None)

    def admit(self, connection: LimitedHttpProtocol) -> bool:
        """Give a connection over the limit a place; returns False if there is none."""
        if (self._limits.connections or 0) > self._limits.limits.max_connections and not self._close_idle():
            return False
        self._over.pop(connection, None)
        self._connections[connection] = None
        return True

    def _close_idle(self) -> bool:
        """Close the connection that has been idle for longest; returns False if none is idle."""
        while True:
            while self._candidates:
                rank, connection = self._candidates.popleft()
                if connection in self._connections and connection.idle_rank() == rank:
                    del self._connections[connection]
                    connection.transport.close()
                    return True
            now_s = asyncio.get_running_loop().time()
            if now_s < self._next_search_s:
                return False
            idle = (
                (found_rank, number, each)
                for number, each in enumerate(self._connections)
                if (found_rank := each.idle_rank()) is not None
            )
            self._candidates.extend((found_rank, each) for found_rank, _, each in nsmallest(_CANDIDATES, idle))
            if not self._candidates:
                self._next_search_s = now_s + _SEARCH_S
                return False


class LimitedHttpProtocol(HeadraceHttpProtocol):
    """An HTTP connection that takes part in the limit of connections; see the module.

    Ownership: the event loop.

    Args:
        reserve: connections of the listener.
    """

    def __init__(self, *args: Any, reserve: ConnectionReserve, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reserve = reserve
        self._is_over, self._over_text = False, ""
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
        if self._is_over and not self._downgraded_head:
            self.cycle.keep_alive = False

    def refuse_connection(self, with_response: bool) -> None:
        """Close a connection over the limit that has sent no complete headers, with or without a response."""
        if with_response:
            self._refuse(503, self._over_text)
        else:
            self.abort()

    def idle_rank(self) -> tuple[bool, float] | None:
        """Return the rank in which idle connections are closed, lowest first; None for a connection that is not idle."""
        transport = self.transport
        if transport.is_closing() or self.stage is Stage.ENDING or self._is_over:
            return None
        if not self._has_received:
            return False, self._connected_s
        cycle = self.cycle
        if self.stage is not Stage.BETWEEN or cycle is None or not cycle.response_complete or self.pipeline:
            return None
        if transport.get_write_buffer_size():
            return None
        timer = self.timeout_keep_alive_task
        return True, max(self._idle_since_s, timer.when() - self.timeout_keep_alive if timer is not None else 0.0)
