"""What ends a connection: a handshake or a frame that does not get done, a dead or idle peer, a shutdown without a lost call.

One timer a connection, which ticks a few times in the shortest of its limits; nothing is armed for a stream or a frame.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.http2 import frames
from headrace.http2.frames import LARGEST_WINDOW, ConnectionFault, ErrorCode

if TYPE_CHECKING:
    from headrace.http2.connection import Http2Connection

_ALIVE = b"alive?  "
_DRAIN = b"draining"


class Lifetime:
    """Ownership: the event loop."""

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        limits = connection.limits
        shortest_s = min(
            limits.handshake_s, limits.frame_s, limits.keepalive_s, limits.keepalive_timeout_s, limits.stall_s
        )
        self._tick_s = max(0.02, shortest_s / 4)
        self._stall_ticks = round(limits.stall_s / self._tick_s)
        self._message_ticks = round(limits.message_s / self._tick_s)
        self._timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._heard_ns = self._busy_ns = monotonic_ns()
        self._asked = False
        self._last_id = 0

    def begin(self) -> None:
        """The connection is made."""
        self._arm()

    def end(self) -> None:
        """The connection is lost."""
        for timer in (self._timer, self._drain_timer):
            if timer is not None:
                timer.cancel()

    def linger(self) -> None:
        """The transport was closed: give the peer a moment to read what it still holds."""
        self.end()
        connection = self._connection
        self._timer = connection.loop.call_later(connection.limits.linger_s, connection.transport.abort)

    def drain(self) -> None:
        """Shut down gracefully (RFC 9113, section 6.8): a warning, one round trip, the last stream that is served, its end.

        So, too, where the peer's preface has not come: its first calls may be under way already, since it has our SETTINGS.
        """
        connection = self._connection
        if self._drain_timer is not None or connection.closing:
            return
        connection.outbox.control(frames.goaway(LARGEST_WINDOW, ErrorCode.NO_ERROR) + frames.ping(_DRAIN, ack=False))
        self._drain_timer = connection.loop.call_later(connection.limits.drain_s, self._refuse)

    def answered(self, payload: bytes) -> None:
        """A PING of ours came back."""
        if payload == _DRAIN and self._drain_timer is not None:
            self._refuse()

    def _refuse(self) -> None:
        """Whatever the peer opens from now on, it knows that it will not be served."""
        connection = self._connection
        if not connection.closing:
            connection.closing = True
            connection.outbox.control(frames.goaway(connection.last_id, ErrorCode.NO_ERROR))
            if not connection.streams:
                connection.shut()

    def _arm(self) -> None:
        self._timer = self._connection.loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        connection, limits, now_ns = self._connection, self._connection.limits, monotonic_ns()
        connection.epoch += 1
        connection.allowance.cap()
        if connection.heard:
            connection.heard, self._heard_ns, self._asked = False, now_ns, False
        silent_s = (now_ns - self._heard_ns) / NS_PER_S
        unfinished_s = (now_ns - connection.unfinished_ns) / NS_PER_S if connection.unfinished_ns else 0.0
        if not connection.greeted and connection.epoch * self._tick_s >= limits.handshake_s:
            limits.reached("header_timeout_s")
            connection.fail(ConnectionFault(ErrorCode.SETTINGS_TIMEOUT, "no SETTINGS in time"))
        elif unfinished_s > limits.frame_s:
            limits.reached("header_timeout_s")
            connection.fail(
                ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a frame or header block was not finished in time")
            )
        elif silent_s > limits.keepalive_s + limits.keepalive_timeout_s:
            connection.transport.abort()  # a dead peer reads no GOAWAY
        else:
            if silent_s > limits.keepalive_s and not self._asked:
                self._asked = True
                connection.outbox.control(frames.ping(_ALIVE, ack=False))
            self._look_at_streams(now_ns)
            if not connection.transport.is_closing():
                self._arm()

    def _look_at_streams(self, now_ns: int) -> None:
        connection = self._connection
        if connection.streams or connection.lingering or connection.last_id != self._last_id:
            self._last_id, self._busy_ns = connection.last_id, now_ns
        elif (now_ns - self._busy_ns) / NS_PER_S > connection.limits.idle_s:
            self.drain()
        for stream in list(connection.streams.values()):
            age_ticks = connection.epoch - stream.since
            if stream.pending:
                if age_ticks > self._stall_ticks:
                    connection.limits.reached("stall_timeout_s")
                    stream.reset(ErrorCode.CANCEL)
            elif stream.receiving and age_ticks > self._message_ticks:
                connection.limits.reached("body_timeout_s")
                stream.too_slow()
