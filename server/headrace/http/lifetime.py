"""What ends an HTTP connection whose client takes too long: to say what it wants, to send it, or to read the answer.

One timer for all connections, which ticks a few times in the shortest of the limits; nothing is armed for a request. What a
connection is at and since which tick it writes down itself.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Protocol

from headrace.core.limits import ClientLimits

# For a client to read the last words on a connection that the server has ended.
LINGER_S = 2.0


class Stage(IntEnum):
    """What a connection waits for."""

    BETWEEN = 0
    """Nothing, or a next request."""
    HEADERS = 1
    """The headers of a request: from the connection on, or from their first byte."""
    BODY = 2
    """The body of a request."""
    ENDING = 3
    """Its client's leaving: the last words are said."""


class TimedConnection(Protocol):
    """A connection; see `headrace.http.connection.HeadraceHttpProtocol`.

    Attributes:
        stage: what it waits for.
        since: the epoch in which that began.
    """

    stage: Stage
    since: int

    def unread_bytes(self) -> int:
        """Of answers that the client does not read; 0 if it reads well."""

    def is_idle_without_timer(self) -> bool:
        """True between two requests if nothing will end the connection."""

    def is_waiting_for_server(self) -> bool:
        """True if the body waits for the server: an earlier request on the connection is being answered."""

    def time_out(self, text: str) -> None:
        """Tell the client that it took too long (408), and end."""

    def abort(self) -> None:
        """End at once."""


class ConnectionTimeouts:
    """Of all connections of one listener. Ownership: the event loop.

    Args:
        client_limits: the limits, and where it is counted that one was reached.

    Attributes:
        epoch: counts the ticks.
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
        # Connections, each with what its client had not read when that last became less, and in which epoch that was.
        self._connections: dict[TimedConnection, tuple[int, int]] = {}
        self.epoch = 0

    def add(self, connection: TimedConnection) -> None:
        """A connection was made."""
        self._connections[connection] = (0, self.epoch)
        if self._timer is None:
            self._arm()

    def discard(self, connection: TimedConnection) -> None:
        """It is lost."""
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
