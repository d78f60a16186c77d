"""Timeouts of HTTP connections: headers, body, and a client that does not read its response.

One timer serves all connections and ticks a few times within the shortest timeout, so that no request sets a timer. Each
connection stores its stage and the tick at which that stage began.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Protocol

from headrace.core.limits import ClientLimits

# Time for a client to read the error on a connection that the server has ended, seconds.
LINGER_S = 2.0


class Stage(IntEnum):
    """Stage of an HTTP connection: the event it waits for."""

    BETWEEN = 0
    """The next request; nothing has arrived."""
    HEADERS = 1
    """The end of the headers, since the connection was made or since their first byte."""
    BODY = 2
    """The end of the request body."""
    ENDING = 3
    """The client's close: the server has sent its last response."""


class TimedConnection(Protocol):
    """A connection with timeouts; see `headrace.http.connection.HeadraceHttpProtocol`.

    Attributes:
        stage: the event it waits for.
        since: tick (`ConnectionTimeouts.epoch`) at which the stage began.
    """

    stage: Stage
    since: int

    def unread_bytes(self) -> int:
        """Bytes of responses in the write buffer that the client has not read; 0 for none."""

    def is_idle_without_timer(self) -> bool:
        """True between two requests if no keep-alive timer is set."""

    def is_waiting_for_server(self) -> bool:
        """True if the server itself delays the body: an earlier request on the connection is still running."""

    def time_out(self, text: str) -> None:
        """Respond 408 with a text and end the connection."""

    def abort(self) -> None:
        """Close the connection immediately, without a response."""


class ConnectionTimeouts:
    """Enforces the timeouts of all connections of one listener.

    Ownership: the event loop.

    Args:
        client_limits: `header_timeout_s`, `body_timeout_s` and `stall_timeout_s`; counts the connections that reach one.

    Attributes:
        epoch: ticks of the timer since the start.
    """

    def __init__(self, client_limits: ClientLimits) -> None:
        limits = client_limits.limits
        shortest_s = min(limits.header_timeout_s, limits.body_timeout_s, limits.stall_timeout_s)
        self._tick_s = min(5.0, max(0.02, shortest_s / 4))
        self._header_ticks = round(limits.header_timeout_s / self._tick_s)
        self._body_ticks = round(limits.body_timeout_s / self._tick_s)
        self._stall_ticks = round(limits.stall_timeout_s / self._tick_s)
        self._linger_ticks = max(1, round(LINGER_S / self._tick_s))
        self._client_limits = client_limits
        self._timer: asyncio.TimerHandle | None = None
        # For each connection: its unread bytes when they last changed, and the epoch of that change.
        self._connections: dict[TimedConnection, tuple[int, int]] = {}
        self.epoch = 0

    def add(self, connection: TimedConnection) -> None:
        """Add a new connection."""
        self._connections[connection] = (0, self.epoch)
        if self._timer is None:
            self._arm()

    def discard(self, connection: TimedConnection) -> None:
        """Remove a closed connection; the timer stops with the last one."""
        self._connections.pop(connection, None)
        if not self._connections and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self.epoch += 1
        self._timer = None
        for connection, unread in list(self._connections.items()):
            self._check(connection, *unread)
        if self._connections:
            self._arm()

    def _check(self, connection: TimedConnection, unread_before: int, since: int) -> None:
        unread, epoch = connection.unread_bytes(), self.epoch
        if not unread or unread != unread_before:
            self._connections[connection] = (unread, epoch)
        elif epoch - since > self._stall_ticks:
            self._client_limits.hit("stall_timeout_s")
            connection.abort()
            return
        stage, age = connection.stage, epoch - connection.since
        if stage is Stage.BETWEEN:
            if connection.is_idle_without_timer():
                connection.stage, connection.since = Stage.HEADERS, epoch
        elif stage is Stage.HEADERS:
            if age > self._header_ticks:
                self._client_limits.hit("header_timeout_s")
                connection.time_out("the headers of a request did not arrive in time")
        elif stage is Stage.BODY:
            if connection.is_waiting_for_server():
                connection.since = epoch
            elif age > self._body_ticks:
                self._client_limits.hit("body_timeout_s")
                connection.time_out("the body of the request did not arrive in time")
        elif age > self._linger_ticks:
            connection.abort()
