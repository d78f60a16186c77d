"""Timeouts of HTTP/1.1 connections: headers, body, a client that does not read its response, a half-closed client that is gone.

One timer serves all connections and ticks once a second, or a few times within the shortest timeout, so that no request sets a
timer. Each connection stores its stage and the tick at which that stage began.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Protocol

from headrace.core.clock import monotonic_ns
from headrace.core.limits import ClientLimits

# Time for a client to read the error on a connection that the server has ended, seconds.
LINGER_S = 2.0
# Longest time between two ticks, seconds.
_MAX_TICK_S = 1.0


class Stage(IntEnum):
    """Stage of an HTTP connection: the event it waits for.

    Attributes:
        BETWEEN: the next request; nothing has arrived.
        HEADERS: the end of the headers, since the connection was made or since their first byte.
        BODY: the end of the request body.
        ENDING: the client's close: the server has sent its last response.
    """

    BETWEEN = 0
    HEADERS = 1
    BODY = 2
    ENDING = 3


class ObservedConnection(Protocol):
    """The part of `headrace.wire.http.connection.HeadraceHttpProtocol` that the timeouts use; see there."""

    stage: Stage
    since: int

    def observe_client(self, now_ns: int) -> int:
        """Observe how fast the client reads its responses, and whether it still exists; returns the unread bytes."""

    def observe_body(self, now_ns: int) -> bool:
        """Observe how fast the body arrives; returns True if it has been too slow for too long."""

    def is_idle_without_timer(self) -> bool:
        """Return True between two requests if no keep-alive timer is set."""

    def is_waiting_for_server(self) -> bool:
        """Return True if the server delays the rest of the request."""

    def time_out(self, text: str) -> None:
        """Respond 408 and end the connection."""

    def abort(self) -> None:
        """Close the connection immediately, without a response."""


class ConnectionTimeouts:
    """Enforces the timeouts of all connections of one listener.

    Ownership: the event loop.

    Args:
        client_limits: `header_timeout_s`, `body_timeout_s`, `stall_timeout_s` and `min_body_bytes_per_s`; counts the connections
            that reach one.

    Attributes:
        epoch: ticks of the timer since the start.
    """

    def __init__(self, client_limits: ClientLimits) -> None:
        limits = client_limits.limits
        shortest_s = min(limits.header_timeout_s, limits.body_timeout_s, limits.stall_timeout_s)
        self._tick_s = min(_MAX_TICK_S, max(0.02, shortest_s / 4))
        self._header_ticks = round(limits.header_timeout_s / self._tick_s)
        self._body_ticks = round(limits.body_timeout_s / self._tick_s)
        self._stall_ticks = round(limits.stall_timeout_s / self._tick_s)
        self._linger_ticks = max(1, round(LINGER_S / self._tick_s))
        self._client_limits = client_limits
        self._timer: asyncio.TimerHandle | None = None
        # For each connection: its unread bytes when they last changed, and the epoch of that change.
        self._connections: dict[ObservedConnection, tuple[int, int]] = {}
        self.epoch = 0

    def add(self, connection: ObservedConnection) -> None:
        """Add a new connection."""
        self._connections[connection] = (0, self.epoch)
        if self._timer is None:
            self._arm()

    def age_s(self, since: int) -> float:
        """Return the time since a tick, in seconds."""
        return (self.epoch - since) * self._tick_s

    def discard(self, connection: ObservedConnection) -> None:
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
        now_ns = monotonic_ns()
        for connection, unread in list(self._connections.items()):
            self._check(connection, now_ns, *unread)
        if self._connections:
            self._arm()

    def _check(self, connection: ObservedConnection, now_ns: int, unread_before: int, since: int) -> None:
        # Bytes of responses that the client has not read.
        unread, epoch = connection.observe_client(now_ns), self.epoch
        if unread != unread_before or not unread:
            if unread or unread_before:
                self._connections[connection] = (unread, epoch)
        elif epoch - since > self._stall_ticks:
            self._client_limits.hit("stall_timeout_s")
            connection.abort()
            return
        self._check_stage(connection, now_ns)

    def _check_stage(self, connection: ObservedConnection, now_ns: int) -> None:
        stage, age = connection.stage, self.epoch - connection.since
        if stage is Stage.BETWEEN:
            if connection.is_idle_without_timer():
                connection.stage, connection.since = Stage.HEADERS, self.epoch
        elif stage is Stage.ENDING:
            if age > self._linger_ticks:
                connection.abort()
        elif connection.is_waiting_for_server():
            connection.since = self.epoch
        elif stage is Stage.HEADERS:
            if age > self._header_ticks:
                self._client_limits.hit("header_timeout_s")
                connection.time_out("the headers of a request did not arrive in time")
        elif age > self._body_ticks:
            self._client_limits.hit("body_timeout_s")
            connection.time_out("the body of the request did not arrive in time")
        elif connection.observe_body(now_ns):
            self._client_limits.hit("min_body_bytes_per_s")
            minimum = self._client_limits.limits.min_body_bytes_per_s
            connection.time_out(f"the body of the request arrived more slowly than {minimum} bytes per second")
