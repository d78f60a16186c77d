"""HTTP/2 streams and flow control (RFC 9113, section 5): limits of a connection, receive windows, write buffer.

Receiving. Memory is bounded by the windows of the streams. Each stream starts with a small window. The application requests the
rest of a body as soon as the size is read (`Http2Stream.request_window`). A connection has one budget for all such grants. A
grant covers the rest of a whole body, so every body with a grant completes, and the waiting ones follow. The window of the
connection is always kept open: it would only be a second bound over the same bytes, and a way to deadlock.

Sending. A connection makes one write per event loop iteration, with all frames that became ready in it. A response that fits
into all windows goes directly into the next write (`reserve_window`, then `write`). Other data waits in its stream; streams that
may send take turns, one frame each. While the transport's buffer is full, nothing is written to it. So unread responses stay in
streams, where they count against the number of streams.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.wire.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    FRAME_HEADER,
    MAX_WINDOW,
    ErrorCode,
    Http2ConnectionError,
    window_update,
)

# Largest DATA frame of a stream in one round, and all DATA of one round. The transport gets a round in one write.
_MAX_DATA_FRAME_BYTES = 64 << 10
_MAX_ROUND_BYTES = 256 << 10
# The transport pauses the writer above this.
_TRANSPORT_BUFFER_BYTES = 512 << 10
# Frame budget: a stream costs `OPEN_COST` when it opens. An answered stream gets it back; a successful one adds `STREAM_CREDIT`.
# So cancelled and reset calls use up the budget, and refused calls earn nothing.
OPEN_COST = 3
STREAM_CREDIT = 8
# DATA adds one frame for each 256 bytes: a peer that opens its window in single bytes earns nothing.
DATA_CREDIT_SHIFT = 8


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Limits and timeouts of one connection.

    Attributes:
        streams: open streams. A stream that was reset counts until its method has ended.
        stream_window_bytes: initial receive window of a stream.
        connection_window_bytes: receive window of the connection, for all streams together.
        frame_bytes: payload of one DATA frame.
        header_bytes: one header block as received.
        header_list_bytes: one header block after decoding, with 32 bytes per field.
        max_granted_bytes: all window grants of a connection at a time; at least the largest body.
        max_unsent_bytes: response bytes that the peer has not read; above, new streams are refused.
        control_bytes: frames other than DATA that wait while the peer reads nothing; above, the connection is aborted.
        frame_burst: size of the frame budget.
        frames_per_s: refill rate of the frame budget.
        handshake_s: timeout from the connection to the first SETTINGS frame; the TLS handshake has the same timeout before that.
        frame_s: timeout to complete a frame, or a header block with its CONTINUATION frames.
        message_s: timeout to complete a request body.
        stall_s: timeout without progress while the peer has response bytes to read.
        keepalive_s: silence of the peer after which the server sends a PING.
        keepalive_timeout_s: timeout for any bytes after that PING.
        idle_s: time without a stream after which the connection is shut down.
        max_age_s: age of a connection at which it is shut down gracefully, within one part in ten; 0 for never.
        drain_s: timeout for the PING between the two GOAWAY frames of a shutdown.
        linger_s: time for the peer to read the last bytes of a closed connection.
        on_limit_reached: called with the name of a limit that the peer has reached (see `headrace.core.limits`), for metrics.
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
    max_age_s: float = 0.0
    drain_s: float = 1.0
    linger_s: float = 2.0
    on_limit_reached: Callable[[str], None] = lambda limit: None


class FrameBudget:
    """Rate limiter for frames that carry no work: PING, RST_STREAM, very small DATA frames and the like.

    Successful requests and time refill the budget. So a connection may stay open for any time and serve any number of calls,
    while a flood of cheap frames (CVE-2019-9511 to 9518, CVE-2023-44487, CVE-2025-8671) uses up the budget. Frames whose cost
    depends on their content spend by it: SETTINGS by entries and by streams whose windows change, header blocks by fields
    and Huffman code. One unit is up to about 5 microseconds of the event loop.

    Args:
        burst: size of the budget, in frames.
        per_s: refill rate, in frames per second.

    Attributes:
        available: frames left. Code that handles a request adds to it.
    """

    __slots__ = ("_burst", "_filled_ns", "_per_s", "available")

    def __init__(self, burst: int, per_s: int) -> None:
        self._burst, self._per_s = burst, per_s
        self._filled_ns = monotonic_ns()
        self.available = burst

    def spend(self, cost: int) -> None:
        """Subtract `cost`; raises Http2ConnectionError if the budget is used up."""
        self.available -= cost
        if self.available < 0:
            now_ns = monotonic_ns()
            refill = (now_ns - self._filled_ns) * self._per_s // NS_PER_S
            self.available, self._filled_ns = min(self.available + refill, self._burst), now_ns
            if self.available < 0:
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a flood of frames that carry no work")

    def cap(self) -> None:
        """Limit the budget to `burst`; called on each tick of the connection."""
        self.available = min(self.available, self._burst)


class WindowGrants:
    """Budget of a connection for bodies larger than the initial window of a stream; requests are granted in order.

    Args:
        size_bytes: the budget.

    Attributes:
        waiting: bytes requested and not granted, by stream. A closed stream is removed at once: behind a request that waits for
            long, streams that the peer resets would keep their memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes
        self.waiting: OrderedDict[Http2Stream, int] = OrderedDict()

    def request(self, stream: Http2Stream, size_bytes: int) -> None:
        """Increase the window of a stream now or when earlier requests are granted.

        Args:
            stream: that receives the body.
            size_bytes: the increase; at most the budget.
        """
        self.waiting[stream] = self.waiting.get(stream, 0) + size_bytes
        self._grant_waiting()

    def release(self, stream: Http2Stream) -> None:
        """Return the grant of a stream to the budget, after its body is read or the stream is closed."""
        if stream.granted_bytes:
            self._free_bytes += stream.granted_bytes
            stream.granted_bytes = 0
        if self.waiting:
            if stream.closed:
                self.waiting.pop(stream, None)
            self._grant_waiting()

    def _grant_waiting(self) -> None:
        waiting = self.waiting
        while waiting:
            stream, size_bytes = next(iter(waiting.items()))
            if size_bytes > self._free_bytes:
                return
            waiting.popitem(last=False)
            self._free_bytes -= size_bytes
            stream.granted_bytes += size_bytes
            stream.increase_window(size_bytes)


class StreamConnection(Protocol):
    """The part of `Http2Connection` that streams and the write buffer use; see there."""

    limits: Http2Limits
    frame_budget: FrameBudget
    window_grants: WindowGrants
    write_buffer: WriteBuffer
    ticks: int

    def stream_finished(self, stream: Http2Stream) -> None:
        """Close a stream whose response is written, END_STREAM included."""

    def reset_stream(self, stream_id: int, code: ErrorCode) -> None:
        """Send RST_STREAM and close a stream."""


class Http2Stream(ABC):
    """One request and its response. The application subclasses it; the connection calls the `on_` methods.

    Ownership: the event loop. A stream is in `connection.streams` until both sides have ended it or one has reset it. After that
    it is `closed`, and frames for it are dropped.

    Args:
        connection: of the stream.
        stream_id: its id in HTTP/2.

    Attributes:
        connection: see Args.
        stream_id: see Args.
        send_window: bytes that may be sent to the peer.
        receive_window: bytes that the peer may send.
        remote_open: False once the peer has sent END_STREAM.
        closed: True once nothing more can be sent.
        awaiting_body: True while the application waits for the rest of a body.
        progress_tick: tick of the connection at which `awaiting_body` began or, while a response is blocked by flow control, at
            which its last part was sent.
        granted_bytes: see `WindowGrants`.
        frame_credit: frames that the end of the response adds to the frame budget.
        pending: parts of the response that are blocked by flow control; None if there never were any.
        pending_bytes: their size.
        final_frames: frames that end the stream after `pending`; b"" while the response is incomplete.
    """

    __slots__ = (
        "awaiting_body", "closed", "connection", "final_frames", "frame_credit", "granted_bytes", "pending",
        "pending_bytes", "progress_tick", "receive_window", "remote_open", "send_window", "stream_id",
    )  # fmt: skip

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
        self.frame_credit = OPEN_COST + STREAM_CREDIT
        self.pending: deque[memoryview] | None = None
        self.pending_bytes = 0
        self.final_frames = b""

    @abstractmethod
    def on_data(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """Receive a part of the request body.

        Args:
            data: bytes received from the socket.
            start: first byte of the part in `data`.
            stop: end of the part in `data`.
            end: True for the last part.
        """

    @abstractmethod
    def on_closed(self) -> None:
        """Called after the stream is closed before its end: the peer has reset it or disconnected, or the server has reset it."""

    @property
    def reset_credit(self) -> int:
        """Frames that the frame budget gets back when the peer resets the stream; read before `on_closed`."""
        return 0

    def on_tick(self, now_ns: int) -> bool:
        """Called now and then while `awaiting_body`; True if the body arrives too slowly, and `on_timeout` follows."""
        return False

    @abstractmethod
    def on_timeout(self) -> None:
        """Called when the body has not arrived within `message_s`."""

    def on_flushed(self) -> None:  # noqa: B027 - only streams that wait for it override it
        """Called when a part of `pending` was sent."""

    def request_window(self, size_bytes: int) -> None:
        """Request a receive window for the rest of a body.

        Args:
            size_bytes: bytes that have not arrived.
        """
        missing = size_bytes - self.receive_window
        if missing > 0:
            self.connection.window_grants.request(self, missing)

    def increase_window(self, size_bytes: int) -> None:
        """Increase the receive window: send WINDOW_UPDATE."""
        if self.remote_open and not self.closed:
            self.receive_window += size_bytes
            self.connection.write_buffer.write_control(window_update(self.stream_id, size_bytes))

    def reset(self, code: ErrorCode) -> None:
        """Send RST_STREAM, close the stream and discard `pending`. A no-op if it is closed."""
        if not self.closed:
            self.connection.reset_stream(self.stream_id, code)


def _ignore(_unread_bytes: int) -> None:
    pass


class WriteBuffer:
    """Frames to send on a connection, under flow control: one write per event loop iteration.

    Ownership: the event loop.

    Args:
        loop: event loop of the transport.
        transport: of the connection.
        limits: of the connection.

    Attributes:
        window: bytes of DATA that may be sent on the connection.
        initial_window: send window of a new stream, from the peer's SETTINGS.
        frame_bytes: largest payload of a frame, from the peer's SETTINGS.
        paused: True while the transport's buffer is full.
        unsent_bytes: pending bytes of all streams. Above `max_unsent_bytes` new streams are refused.
        on_unread: called with the bytes that streams and transport hold for the peer, when they change; set by the application.
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
        self._send_queue: OrderedDict[Http2Stream, None] = OrderedDict()  # in the order of their turns
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.frame_bytes = DEFAULT_FRAME_BYTES
        self.paused = False
        self.unsent_bytes = self._reported_bytes = 0
        self.on_unread: Callable[[int], None] = _ignore

    def reserve_window(self, stream: Http2Stream, size_bytes: int) -> bool:
        """Subtract one DATA frame from the windows of stream and connection.

        Args:
            stream: that sends the frame.
            size_bytes: its payload.

        Returns:
            False, with nothing subtracted, if the data must be sent by `queue_data`.
        """
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
        """Add frames to the next write."""
        self._chunks += chunks
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def write_control(self, frames: bytes) -> None:
        """Add frames other than DATA to the next write; abort the connection if too many wait for a peer that does not read."""
        if self.paused:
            self._control_bytes += len(frames)
            if self._control_bytes > self._limits.control_bytes:
                self._transport.abort()
                return
        self._chunks.append(frames)
        self.schedule_flush()

    def queue_data(self, stream: Http2Stream, parts: Iterable[bytes | memoryview]) -> None:
        """Send a body as DATA frames as soon as flow control allows it."""
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
        self.report_unread()

    def end_stream(self, stream: Http2Stream, frames: bytes) -> None:
        """Send the frames that end a stream, after its pending data."""
        if stream.pending:
            stream.final_frames = frames
        else:
            self.write_control(frames)
            stream.connection.stream_finished(stream)

    def schedule_stream(self, stream: Http2Stream) -> None:
        """Add a stream with pending data to the send queue, if its window is open."""
        if stream.pending and stream.send_window > 0:
            self._send_queue[stream] = None
            self.schedule_flush()

    def discard(self, stream: Http2Stream) -> None:
        """Discard the pending data of a stream."""
        self._send_queue.pop(stream, None)
        self.unsent_bytes -= stream.pending_bytes
        stream.pending, stream.pending_bytes, stream.final_frames = None, 0, b""
        self.report_unread()

    def report_unread(self) -> None:
        """Report the bytes that the peer has not read, unless there were none before either."""
        unread_bytes = 0 if self._closed else self.unsent_bytes + self._transport.get_write_buffer_size()
        if unread_bytes or self._reported_bytes:
            self._reported_bytes = unread_bytes
            self.on_unread(unread_bytes)

    def increase_window(self, increment: int) -> None:
        """Increase the send window of the connection; raises Http2ConnectionError if it overflows."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection overflows")
        if self._send_queue:
            self.schedule_flush()

    def resume(self) -> None:
        """Write again after the transport's buffer was full."""
        if not self._closed:
            self.paused = False
            self._control_bytes = 0
            self.schedule_flush()
            self.report_unread()

    def close(self, flush: bool = False) -> None:
        """Stop writing, after a last write of the frames that are ready if `flush`."""
        if flush:
            self.flush()
        self._closed = self.paused = True
        self._chunks.clear()
        self._send_queue.clear()

    def schedule_flush(self) -> None:
        """Flush in the next iteration of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self, last_frames: Iterable[bytes | memoryview] = ()) -> None:
        """Write all frames that flow control allows to the transport.

        Args:
            last_frames: to add to this write, whose windows are reserved.
        """
        self._scheduled = False
        if last_frames:
            self._chunks += last_frames
        if self.paused:
            return
        if self._send_queue:
            self._send_round()
        chunks = self._chunks
        if not chunks:
            return
        self._chunks = []
        if self._transport.is_closing():
            return  # the peer has disconnected; `connection_lost` follows
        if self._use_writelines:
            self._use_writelines = False
            self._transport.writelines(chunks)
        else:
            self._transport.write(b"".join(chunks))
        if self._send_queue and self.window > 0:
            self.schedule_flush()
        if self._reported_bytes:
            self.report_unread()

    def _send_round(self) -> None:
        send_queue, round_bytes = self._send_queue, _MAX_ROUND_BYTES
        max_frame_bytes = min(self.frame_bytes, _MAX_DATA_FRAME_BYTES)
        while send_queue and self.window > 0 and round_bytes > 0:
            stream, _ = send_queue.popitem(last=False)
            size = min(self.window, stream.send_window, max_frame_bytes, stream.pending_bytes)
            if not stream.pending or size <= 0:
                continue  # waiting for a WINDOW_UPDATE
            round_bytes -= size
            self._write_data_frame(stream, size)
            if stream.pending:
                send_queue[stream] = None
            elif stream.final_frames:
                self._chunks.append(stream.final_frames)
                stream.connection.stream_finished(stream)

    def _write_data_frame(self, stream: Http2Stream, size: int) -> None:
        """Write one DATA frame with `size` bytes of a stream's pending data."""
        pending = stream.pending
        assert pending is not None
        self._use_writelines = self._use_writelines or size > 4096
        self.window -= size
        stream.send_window -= size
        stream.pending_bytes -= size
        self.unsent_bytes -= size
        stream.progress_tick = stream.connection.ticks
        stream.connection.frame_budget.available += size >> DATA_CREDIT_SHIFT
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
