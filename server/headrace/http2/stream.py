"""Streams and flow control (RFC 9113, section 5): what a peer may still send, and what we may still send, and how.

What a peer may still send: grants for bodies larger than a stream's window, and the allowance for frames that carry no work.

Memory is bounded by the streams' windows. Each stream starts with a small one; the application tells how much more a body
needs as soon as it knows (`request_window`), and a connection has one budget for all grants. A
grant covers the rest of a whole body, so granted bodies always get finished and the waiting ones come to their turn. The
window of the connection is kept open: it would only add a second bound over the same bytes, and a way to deadlock.

What we may still send on a connection, and how: one write an iteration of the loop, whatever became ready in it.

An answer that fits into all windows goes straight into the list of the next write (`admit`, then `write`). What does not fit
waits in its stream, and the streams that may send take turns, a frame each. While the transport is full nothing new is handed
to it, so that what is not read by the peer lies in streams, where it counts against their number.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    FRAME_HEADER,
    MAX_WINDOW,
    ErrorCode,
    Http2ConnectionError,
    window_update,
)

# One turn of one stream, and one round of all of them before the transport gets it.
_MAX_DATA_FRAME_BYTES = 64 << 10
_MAX_ROUND_BYTES = 256 << 10
# What the transport may hold before it says that it is full.
_TRANSPORT_BUFFER_BYTES = 512 << 10


def _ignore_limit(_limit: str) -> None:
    """Counts nothing."""


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """What one connection may take.

    Attributes:
        streams: open at once; a stream that was reset counts until its work has ended.
        stream_window_bytes: what a stream may send before anything was granted.
        connection_window_bytes: in flight to us, all streams together.
        frame_bytes: of one DATA frame.
        header_bytes: of one header block as it comes.
        header_list_bytes: of one header block, decoded.
        max_granted_bytes: all grants of a connection at once; at least the largest body.
        max_unsent_bytes: answers that the peer does not read; above, new streams are refused.
        control_bytes: of frames other than DATA while the peer does not read at all; above, the connection is cut.
        frame_burst: frames without work at once, and `per_s` more each second.
        frames_per_s: see `burst`.
        handshake_s: from the connection to the first SETTINGS frame (and, before that, for TLS).
        frame_s: to complete a frame, or a header block with its CONTINUATIONs.
        message_s: to complete a body that is wanted.
        stall_s: without progress while there is something to read for the peer.
        keepalive_s: silence after which a PING asks whether the peer lives.
        keepalive_timeout_s: for anything to come after that.
        idle_s: without a stream until the connection is shut down.
        drain_s: for the PING that parts the two GOAWAYs of a shutdown.
        linger_s: for a peer to read the last bytes of a closed connection.
        on_limit_reached: called with the name in `headrace.core.limits.Limits` of one that a peer has reached, for the metrics.
    """

    streams: int = 1024
    stream_window_bytes: int = 128 << 10
    connection_window_bytes: int = 16 << 20
    frame_bytes: int = 1 << 20
    header_bytes: int = 32 << 10
    header_list_bytes: int = 16 << 10
    max_granted_bytes: int = 64 << 20
    max_unsent_bytes: int = 64 << 20
    control_bytes: int = 1 << 20
    frame_burst: int = 50_000
    frames_per_s: int = 10_000
    handshake_s: float = 10.0
    frame_s: float = 20.0
    message_s: float = 300.0
    stall_s: float = 120.0
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    idle_s: float = 3600.0
    drain_s: float = 1.0
    linger_s: float = 2.0
    on_limit_reached: Callable[[str], None] = _ignore_limit


class FrameBudget:
    """How many frames without work a peer may still send: PING, RST_STREAM, crumbs of DATA and the like.

    Work earns allowance and so does time, so a connection may live for ever and do any number of calls, while a flood of
    cheap frames (CVE-2019-9511 to 9518, CVE-2023-44487, CVE-2025-8671) uses it up.

    Attributes:
        left: what is left; whoever does work adds to it.
    """

    __slots__ = ("_burst", "_filled_ns", "_per_s", "available")

    def __init__(self, burst: int, per_s: int) -> None:
        self._burst, self._per_s = burst, per_s
        self._filled_ns = monotonic_ns()
        self.available = burst

    def spend(self, cost: int) -> None:
        """Take `cost` off; raises Http2ConnectionError when nothing is left."""
        self.available -= cost
        if self.available < 0:
            now_ns = monotonic_ns()
            self.available += (now_ns - self._filled_ns) * self._per_s // NS_PER_S
            self._filled_ns = now_ns
            if self.available < 0:
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a flood of frames that carry no work")

    def cap(self) -> None:
        """Forget what was saved up beyond a burst; to be called now and then."""
        self.available = min(self.available, self._burst)


class WindowGrants:
    """The budget of a connection for bodies larger than a stream's first window.

    Args:
        size_bytes: of the budget.
    """

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes
        self._waiting: deque[tuple[Http2Stream, int]] = deque()

    def request(self, stream: Http2Stream, size_bytes: int) -> None:
        """Open the window of `stream` by `size_bytes` (at most the budget), now or when its turn comes."""
        self._waiting.append((stream, size_bytes))
        self._grant_waiting()

    def release(self, stream: Http2Stream) -> None:
        """Whatever `stream` was granted has been used up, or will never be."""
        if stream.granted_bytes:
            self._free_bytes += stream.granted_bytes
            stream.granted_bytes = 0
        if self._waiting:
            self._grant_waiting()

    def _grant_waiting(self) -> None:
        waiting = self._waiting
        while waiting:
            stream, size_bytes = waiting[0]
            if stream.closed:
                waiting.popleft()
            elif size_bytes <= self._free_bytes:
                waiting.popleft()
                self._free_bytes -= size_bytes
                stream.granted_bytes += size_bytes
                stream.increase_window(size_bytes)
            else:
                return


class StreamConnection(Protocol):
    """What a stream uses of its connection.

    Attributes:
        limits: of the connection.
        frame_budget: for frames that carry no work.
        grants: for large bodies.
        write_buffer: what is sent.
        ticks: see `Http2Connection`.
    """

    limits: Http2Limits
    frame_budget: FrameBudget
    window_grants: WindowGrants
    write_buffer: WriteBuffer
    ticks: int

    def stream_finished(self, stream: Http2Stream) -> None:
        """All of an answer is on its way, END_STREAM included."""

    def reset_stream(self, stream_id: int, code: ErrorCode) -> None:
        """End one stream at once."""


class Http2Stream(ABC):
    """To be subclassed by the application: `received`, `lost` and `too_slow` are called by the connection.

    Ownership: the event loop. A stream is in `connection.streams` until both sides are done or one has reset it; afterwards it
    is `gone`, and nothing it sends gets anywhere.

    Attributes:
        stream_id: of HTTP/2.
        send_window: bytes that the peer still takes of this stream.
        receive_window: bytes that the peer may still send.
        remote_open: False once the peer has sent END_STREAM.
        gone: True once nothing more can be sent.
        receiving: True while the application lacks a part of a body that it needs.
        since: the connection's epoch when `receiving` began or, if answers are blocked, when last a part of them went out.
        granted_bytes: see `WindowGrants`.
        pending: parts of the answer that the windows hold back, None if there never were any.
        pending_bytes: their size.
        ending: the frames that end the stream, to go out behind `pending`; b"" if it goes on.
        queued: True while the write buffer has this stream in its round.
    """

    __slots__ = (
        "awaiting_body",
        "closed",
        "connection",
        "final_frames",
        "granted_bytes",
        "in_send_queue",
        "pending",
        "pending_bytes",
        "progress_tick",
        "receive_window",
        "remote_open",
        "send_window",
        "stream_id",
    )

    def __init__(self, connection: StreamConnection, stream_id: int) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.send_window = connection.write_buffer.initial_window
        self.receive_window = connection.limits.stream_window_bytes
        self.remote_open = True
        self.closed = False
        self.awaiting_body = True
        self.progress_tick = connection.ticks
        self.granted_bytes = 0
        self.pending: deque[memoryview] | None = None
        self.pending_bytes = 0
        self.final_frames = b""
        self.in_send_queue = False

    @abstractmethod
    def on_data(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """Bytes `start` to `stop` of `data` came as a part of the body; `end` with the last of them."""

    @abstractmethod
    def on_closed(self) -> None:
        """The peer has reset the stream or is gone; the stream is `gone` already."""

    @abstractmethod
    def on_timeout(self) -> None:
        """The peer has not sent, or not read, what it should have in time."""

    def on_flushed(self) -> None:  # noqa: B027 - to be overridden by who waits for it, not by all
        """Something pending went out."""

    def request_window(self, size_bytes: int) -> None:
        """The body needs `size_bytes` more than have come: see that the peer may send them."""
        missing = size_bytes - self.receive_window
        if missing > 0:
            self.connection.window_grants.request(self, missing)

    def increase_window(self, size_bytes: int) -> None:
        """Let the peer send `size_bytes` more."""
        if self.remote_open and not self.closed:
            self.receive_window += size_bytes
            self.connection.write_buffer.write_control(window_update(self.stream_id, size_bytes))

    def reset(self, code: ErrorCode) -> None:
        """End the stream at once, whatever is pending."""
        if not self.closed:
            self.connection.reset_stream(self.stream_id, code)


class WriteBuffer:
    """Ownership: the event loop.

    Attributes:
        window: bytes of DATA that the peer still takes on the connection.
        initial_window: of a new stream; the peer's setting.
        frame_bytes: of the largest payload; the peer's setting.
        paused: True while the transport is full.
        held_bytes: pending in all streams.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport, limits: Http2Limits) -> None:
        transport.set_write_buffer_limits(high=_TRANSPORT_BUFFER_BYTES)
        self._loop = loop
        self._transport = transport
        self._limits = limits
        self._chunks: list[bytes | memoryview] = []
        self._use_writelines = False
        self._scheduled = False
        self._control_bytes = 0
        self._closed = False
        self._send_queue: deque[Http2Stream] = deque()
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.frame_bytes = DEFAULT_FRAME_BYTES
        self.paused = False
        self.unsent_bytes = 0

    @property
    def is_full(self) -> bool:
        """True if the peer reads so little of its answers that it gets no new stream."""
        return self.unsent_bytes > self._limits.max_unsent_bytes

    def reserve_window(self, stream: Http2Stream, size_bytes: int) -> bool:
        """Take one DATA frame off the windows; False, and nothing done, if it must go through `queue`."""
        if (
            size_bytes > self.window
            or size_bytes > stream.send_window
            or size_bytes > self.frame_bytes
            or self.paused
            or stream.pending
        ):
            return False
        self.window -= size_bytes
        stream.send_window -= size_bytes
        return True

    def write(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Frames for the next write."""
        self._chunks += chunks
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def write_control(self, frames: bytes) -> None:
        """Frames without DATA; if too many of them wait for a peer that does not read, the connection is cut."""
        if self.paused:
            self._control_bytes += len(frames)
            if self._control_bytes > self._limits.control_bytes:
                self._transport.abort()
                return
        self._chunks.append(frames)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def queue_data(self, stream: Http2Stream, parts: Iterable[bytes | memoryview]) -> None:
        """DATA for when the windows let it through."""
        pending = stream.pending
        if pending is None:
            pending = stream.pending = deque()
        if not pending:
            stream.progress_tick = stream.connection.ticks
        for part in parts:
            view = memoryview(part).cast("B")
            if view.nbytes:
                pending.append(view)
                stream.pending_bytes += view.nbytes
                self.unsent_bytes += view.nbytes
        self.schedule_stream(stream)

    def end_stream(self, stream: Http2Stream, frames: bytes) -> None:
        """The frames that end a stream, behind whatever is pending."""
        if stream.pending:
            stream.final_frames = frames
        else:
            self.write_control(frames)
            stream.connection.stream_finished(stream)

    def schedule_stream(self, stream: Http2Stream) -> None:
        """Put a stream with something pending into the round, if its window lets it send."""
        if stream.pending and not stream.in_send_queue and stream.send_window > 0:
            stream.in_send_queue = True
            self._send_queue.append(stream)
            self.schedule_flush()

    def discard(self, stream: Http2Stream) -> None:
        """The stream is gone: forget what was pending."""
        self.unsent_bytes -= stream.pending_bytes
        stream.pending, stream.pending_bytes, stream.final_frames = None, 0, b""

    def increase_window(self, increment: int) -> None:
        """The peer takes more on the connection; raises Http2ConnectionError."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection overflows")
        if self._send_queue:
            self.schedule_flush()

    def resume(self) -> None:
        """The transport has room again."""
        if not self._closed:
            self.paused = False
            self._control_bytes = 0
            self.schedule_flush()

    def close(self, flush: bool = False) -> None:
        """Nothing goes out any more, but for what is ready if `flush`."""
        if flush:
            self.flush()
        self._closed = self.paused = True
        self._chunks.clear()
        self._send_queue.clear()

    def schedule_flush(self) -> None:
        """See to a flush in the loop's next iteration."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand everything that may go out to the transport."""
        self._scheduled = False
        if self.paused:
            return
        if self._send_queue:
            self._send_round()
        out = self._chunks
        if not out:
            return
        self._chunks = []
        if self._transport.is_closing():
            return  # the peer has gone, of which the protocol will hear in a moment
        if self._use_writelines:
            self._use_writelines = False
            self._transport.writelines(out)
        else:
            self._transport.write(b"".join(out))
        if self._send_queue and self.window > 0:
            self.schedule_flush()

    def _send_round(self) -> None:
        ready, round_bytes = self._send_queue, _MAX_ROUND_BYTES
        turn_bytes = min(self.frame_bytes, _MAX_DATA_FRAME_BYTES)
        while ready and self.window > 0 and round_bytes > 0:
            stream = ready.popleft()
            size = min(self.window, stream.send_window, turn_bytes, stream.pending_bytes)
            if not stream.pending or size <= 0:
                stream.in_send_queue = False  # it is gone, or waits for its window
                continue
            round_bytes -= size
            self._write_data_frame(stream, size)
            if stream.pending:
                ready.append(stream)
                continue
            stream.in_send_queue = False
            if stream.final_frames:
                self._chunks.append(stream.final_frames)
                stream.connection.stream_finished(stream)

    def _write_data_frame(self, stream: Http2Stream, size: int) -> None:
        """One DATA frame of `size` bytes out of what is pending."""
        pending = stream.pending
        assert pending is not None
        self._use_writelines = self._use_writelines or size > 4096
        self.window -= size
        stream.send_window -= size
        stream.pending_bytes -= size
        self.unsent_bytes -= size
        stream.progress_tick = stream.connection.ticks
        stream.connection.frame_budget.available += 4
        self._chunks.append(FRAME_HEADER.pack(size << 8 | DATA, 0, stream.stream_id))
        while size:
            part = pending[0]
            if part.nbytes > size:
                self._chunks.append(part[:size])
                pending[0] = part[size:]
                break
            self._chunks.append(pending.popleft())
            size -= part.nbytes
        stream.on_flushed()
