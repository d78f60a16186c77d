"""Timers of an HTTP/2 connection: timeouts, keep-alive, graceful shutdown, pauses in reading."""

from __future__ import annotations

import asyncio
from random import random
from typing import Protocol

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import MAX_WINDOW, ErrorCode, Http2ConnectionError
from headrace.wire.http2.stream import Http2Stream, StreamConnection

_KEEPALIVE_PING = b"alive?  "
_SHUTDOWN_PING, _LAST_PING = b"draining", b"drained?"
# The final GOAWAY waits at most this many times `drain_s` for the PINGs of a peer that still sends.
_MOST_DRAINS = 30
# A connection that leaves is observed for the first time. Then it leaves when as many streams are open as ever since; that number
# is halved each time that the second has passed.
_OBSERVED_NS, _HALVED_NS = NS_PER_S // 20, NS_PER_S // 2
# Event loop iterations from the reset of a stream to the end of its task: the completion's wake-up, the task's step, the task's
# callback, and one spare.
MAX_PAUSED_ITERATIONS = 4
# Part of the maximum age of a connection by which it varies.
_AGE_JITTER = 0.1


class TimedConnection(StreamConnection, Protocol):
    """The part of `Http2Connection` that its timers use; see there."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    streams: dict[int, Http2Stream]
    cancelled_running: int
    last_stream_id: int
    partial_frame_since_ns: int
    received_since_tick: bool
    settings_received: bool
    closing: bool
    leaving: bool

    def data_received(self, data: bytes) -> None:
        """Read all complete frames; keep the rest until more bytes arrive."""

    def close_with_error(self, error: Http2ConnectionError) -> None:
        """Send GOAWAY with a connection error, and close."""

    def close(self) -> None:
        """Close all streams, and the transport once its buffer is sent."""


class ConnectionTimers:
    """Timeouts, keep-alive PINGs and graceful shutdown of one connection.

    Each connection has one timer, which ticks a few times within the shortest timeout. Streams and frames have no timer of their
    own: their age is counted in ticks.

    Ownership: the event loop.

    Attributes:
        last_active_ns: monotonic time of the last tick with an open stream, or of the connection.
    """

    def __init__(self, connection: TimedConnection) -> None:
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
        self._drains = 0
        self._leaving_from_ns = self._most_streams = 0
        self._last_received_ns = self.last_active_ns = monotonic_ns()
        self._keepalive_sent = False
        self._last_stream_id = 0
        # With jitter: connections that were opened together must not return together.
        age_s = limits.max_age_s * (1 + _AGE_JITTER * (2 * random() - 1))
        self._old_from_ns = self.last_active_ns + round(age_s * NS_PER_S) if limits.max_age_s else 0

    def start(self) -> None:
        """Schedule the next tick."""
        self._timer = self._connection.loop.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        """Cancel all timers."""
        for timer in (self._timer, self._drain_timer):
            if timer is not None:
                timer.cancel()

    def abort_after_linger(self) -> None:
        """Abort the closed transport after `linger_s`, in which the peer can read the last bytes."""
        self.stop()
        connection = self._connection
        self._timer = connection.loop.call_later(connection.limits.linger_s, connection.transport.abort)

    @property
    def is_shutting_down(self) -> bool:
        """True from `start_graceful_shutdown` or `leave` on."""
        return self._drain_timer is not None or self._connection.closing or self._connection.leaving

    def leave(self) -> None:
        """Shut down gracefully while the peer begins no call: once as many streams are open as it keeps open.

        A call that gRPC's C core begins while GOAWAY arrives is cancelled by the client. It repeats the call, unless the
        request is larger than 256 KiB: then its caller gets UNAVAILABLE. A caller that waits for a response begins none.
        """
        if not self.is_shutting_down:
            self._leaving_from_ns, self._connection.leaving = monotonic_ns(), True

    def on_stream_opened(self) -> None:
        """Begin the shutdown of a connection that leaves if this is the moment."""
        if self._drain_timer is not None:
            return
        count, passed_ns = len(self._connection.streams), monotonic_ns() - self._leaving_from_ns
        self._most_streams = max(self._most_streams, count)
        if passed_ns >= _OBSERVED_NS and count >= self._most_streams >> passed_ns // _HALVED_NS:
            self.start_graceful_shutdown()

    def start_graceful_shutdown(self) -> None:
        """Shut down without losing a call (RFC 9113, section 6.8).

        First a GOAWAY that announces the shutdown and a PING. After two round trips, a final GOAWAY with the last stream that is
        served. The connection is closed when that stream has ended. After one round trip a stream may still arrive: gRPC's C
        core acknowledges a PING before it writes the headers of a call that it has begun, and does not repeat a large call.

        The same is done before the peer's preface has arrived: the peer has our SETTINGS, so its first calls may be on the way.
        """
        connection = self._connection
        if self._drain_timer is not None or connection.closing:
            return
        connection.write_buffer.write_control(
            frames.goaway(MAX_WINDOW, ErrorCode.NO_ERROR) + frames.ping(_SHUTDOWN_PING, ack=False)
        )
        self._drain_timer = connection.loop.call_later(connection.limits.drain_s, self._on_drain_timeout)

    def on_ping_ack(self, payload: bytes) -> None:
        """Handle the acknowledgement of a PING of ours: the second one of the shutdown is followed by the final GOAWAY."""
        if self._drain_timer is None:
            return
        if payload == _SHUTDOWN_PING:
            self._connection.write_buffer.write_control(frames.ping(_LAST_PING, ack=False))
        elif payload == _LAST_PING:
            self.send_final_goaway()

    def _on_drain_timeout(self) -> None:
        """End the wait for a peer that is silent. One that sends may have its answer to the PING behind a large body."""
        connection, drain_s = self._connection, self._connection.limits.drain_s
        silent_ns = 0 if connection.received_since_tick else monotonic_ns() - self._last_received_ns
        self._drains += 1
        if silent_ns < drain_s * NS_PER_S and self._drains < _MOST_DRAINS:
            self._drain_timer = connection.loop.call_later(drain_s, self._on_drain_timeout)
        else:
            self.send_final_goaway()

    def send_final_goaway(self) -> None:
        """Send GOAWAY with the last stream that is served, and close once it has ended; streams opened later are ignored."""
        connection = self._connection
        if not connection.closing:
            connection.closing = True
            connection.write_buffer.write_control(frames.goaway(connection.last_stream_id, ErrorCode.NO_ERROR))
            if not connection.streams:
                connection.close()

    def _tick(self) -> None:
        connection, limits, now_ns = self._connection, self._connection.limits, monotonic_ns()
        connection.ticks += 1
        connection.frame_budget.cap()
        connection.write_buffer.report_unread()
        if connection.received_since_tick:
            connection.received_since_tick, self._last_received_ns, self._keepalive_sent = False, now_ns, False
        silent_s = (now_ns - self._last_received_ns) / NS_PER_S
        unfinished_s = (
            (now_ns - connection.partial_frame_since_ns) / NS_PER_S if connection.partial_frame_since_ns else 0.0
        )
        if not connection.settings_received and connection.ticks * self._tick_s >= limits.handshake_s:
            limits.on_limit_reached("header_timeout_s")
            connection.close_with_error(Http2ConnectionError(ErrorCode.SETTINGS_TIMEOUT, "no SETTINGS frame in time"))
        elif unfinished_s > limits.frame_s:
            limits.on_limit_reached("header_timeout_s")
            connection.close_with_error(
                Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a frame or header block was not finished in time")
            )
        elif silent_s > limits.keepalive_s + limits.keepalive_timeout_s:
            connection.transport.abort()  # without GOAWAY: the peer does not answer PINGs
        else:
            if silent_s > limits.keepalive_s and not self._keepalive_sent:
                self._keepalive_sent = True
                connection.write_buffer.write_control(frames.ping(_KEEPALIVE_PING, ack=False))
            self._check_streams(now_ns)
            if self._old_from_ns and now_ns >= self._old_from_ns:
                self.leave()
            if not connection.transport.is_closing():
                self.start()

    def _check_streams(self, now_ns: int) -> None:
        connection = self._connection
        if connection.streams or connection.cancelled_running or connection.last_stream_id != self._last_stream_id:
            self._last_stream_id, self.last_active_ns = connection.last_stream_id, now_ns
        elif (now_ns - self.last_active_ns) / NS_PER_S > connection.limits.idle_s:
            self.start_graceful_shutdown()
        for stream in list(connection.streams.values()):
            age_ticks = connection.ticks - stream.progress_tick
            if stream.pending:
                if age_ticks > self._stall_ticks:
                    connection.limits.on_limit_reached("stall_timeout_s")
                    stream.reset(ErrorCode.CANCEL)
            elif stream.awaiting_body:
                if age_ticks > self._message_ticks:
                    connection.limits.on_limit_reached("body_timeout_s")
                    stream.on_timeout()
                elif stream.on_tick(now_ns):
                    connection.limits.on_limit_reached("min_body_bytes_per_s")
                    stream.on_timeout()


class ReadPause:
    """Pauses reading for one iteration of the event loop.

    Two causes. The frames of one iteration have used up its share of the frame budget, or its time: other connections go first.
    Or cancelled streams still count against max_streams: a peer may cancel thousands of calls at once and then open the next
    one. The protocol allows that: by the peer's count no stream is open. In the server the methods of the cancelled calls need a
    few iterations of the event loop to end. Reading pauses until they have ended, instead of refusing the next stream. Methods
    that do not end delay the connection by at most `MAX_PAUSED_ITERATIONS` iterations.

    Args:
        connection: whose transport is paused.
    """

    __slots__ = ("_cancelled_running", "_connection", "_iterations")

    def __init__(self, connection: TimedConnection) -> None:
        self._connection = connection
        self._cancelled_running = 0
        self._iterations = 0

    def pause_if_full(self) -> bool:
        """Pause reading if there is no free stream; True if the next frame must stay unread until reading resumes."""
        connection = self._connection
        if len(connection.streams) + connection.cancelled_running < connection.limits.streams:
            return False
        if self._cancelled_running and connection.cancelled_running >= self._cancelled_running:
            self._iterations += 1
        else:
            self._iterations = 0
        self._cancelled_running = connection.cancelled_running
        if self._iterations >= MAX_PAUSED_ITERATIONS or connection.closing or connection.transport.is_closing():
            self._cancelled_running = self._iterations = 0
            return False
        self.pause()
        return True

    def pause(self) -> None:
        """Pause reading until the next iteration of the event loop. A no-op if the transport is closed."""
        if self._connection.transport.is_closing():
            return
        self._connection.transport.pause_reading()
        self._connection.loop.call_soon(self._resume)

    def _resume(self) -> None:
        connection = self._connection
        if not connection.transport.is_closing():
            connection.transport.resume_reading()
            connection.data_received(b"")
