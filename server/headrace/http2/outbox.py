"""What we may still send on a connection, and how: one write an iteration of the loop, whatever became ready in it.

An answer that fits into all windows goes straight into the list of the next write (`admit`, then `write`). What does not fit
waits in its stream, and the streams that may send take turns, a frame each. While the transport is full nothing new is handed
to it, so that what is not read by the peer lies in streams, where it counts against their number.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from headrace.http2.flow import Limits
from headrace.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    FRAME_HEAD,
    LARGEST_WINDOW,
    ConnectionFault,
    ErrorCode,
)
from headrace.http2.stream import Stream

# One turn of one stream, and one round of all of them before the transport gets it.
_TURN_BYTES = 64 << 10
_ROUND_BYTES = 256 << 10
# What the transport may hold before it says that it is full.
_TRANSPORT_BYTES = 512 << 10


class Outbox:
    """Ownership: the event loop.

    Attributes:
        window: bytes of DATA that the peer still takes on the connection.
        initial_window: of a new stream; the peer's setting.
        frame_bytes: of the largest payload; the peer's setting.
        paused: True while the transport is full.
        held_bytes: pending in all streams.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport, limits: Limits) -> None:
        transport.set_write_buffer_limits(high=_TRANSPORT_BYTES)
        self._loop = loop
        self._transport = transport
        self._limits = limits
        self._out: list[bytes | memoryview] = []
        self._large = False
        self._scheduled = False
        self._waiting_bytes = 0
        self._closed = False
        self._ready: deque[Stream] = deque()
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.frame_bytes = DEFAULT_FRAME_BYTES
        self.paused = False
        self.held_bytes = 0

    @property
    def overfull(self) -> bool:
        """True if the peer reads so little of its answers that it gets no new stream."""
        return self.held_bytes > self._limits.held_bytes

    def admit(self, stream: Stream, size_bytes: int) -> bool:
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
        self._out += chunks
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def control(self, frames: bytes) -> None:
        """Frames without DATA; if too many of them wait for a peer that does not read, the connection is cut."""
        if self.paused:
            self._waiting_bytes += len(frames)
            if self._waiting_bytes > self._limits.control_bytes:
                self._transport.abort()
                return
        self._out.append(frames)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def queue(self, stream: Stream, parts: Iterable[bytes | memoryview]) -> None:
        """DATA for when the windows let it through."""
        pending = stream.pending
        if pending is None:
            pending = stream.pending = deque()
        if not pending:
            stream.since = stream.connection.epoch
        for part in parts:
            view = memoryview(part).cast("B")
            if view.nbytes:
                pending.append(view)
                stream.pending_bytes += view.nbytes
                self.held_bytes += view.nbytes
        self.wake(stream)

    def finish(self, stream: Stream, frames: bytes) -> None:
        """The frames that end a stream, behind whatever is pending."""
        if stream.pending:
            stream.ending = frames
        else:
            self.control(frames)
            stream.connection.finished(stream)

    def wake(self, stream: Stream) -> None:
        """Put a stream with something pending into the round, if its window lets it send."""
        if stream.pending and not stream.queued and stream.send_window > 0:
            stream.queued = True
            self._ready.append(stream)
            self.schedule()

    def drop(self, stream: Stream) -> None:
        """The stream is gone: forget what was pending."""
        self.held_bytes -= stream.pending_bytes
        stream.pending, stream.pending_bytes, stream.ending = None, 0, b""

    def open_window(self, increment: int) -> None:
        """The peer takes more on the connection; raises ConnectionFault."""
        self.window += increment
        if self.window > LARGEST_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection overflows")
        if self._ready:
            self.schedule()

    def resume(self) -> None:
        """The transport has room again."""
        if not self._closed:
            self.paused = False
            self._waiting_bytes = 0
            self.schedule()

    def close(self, flush: bool = False) -> None:
        """Nothing goes out any more, but for what is ready if `flush`."""
        if flush:
            self.flush()
        self._closed = self.paused = True
        self._out.clear()
        self._ready.clear()

    def schedule(self) -> None:
        """See to a flush in the loop's next iteration."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand everything that may go out to the transport."""
        self._scheduled = False
        if self.paused:
            return
        if self._ready:
            self._take_turns()
        out = self._out
        if not out:
            return
        self._out = []
        if self._transport.is_closing():
            return  # the peer has gone, of which the protocol will hear in a moment
        if self._large:
            self._large = False
            self._transport.writelines(out)
        else:
            self._transport.write(b"".join(out))
        if self._ready and self.window > 0:
            self.schedule()

    def _take_turns(self) -> None:
        ready, round_bytes = self._ready, _ROUND_BYTES
        turn_bytes = min(self.frame_bytes, _TURN_BYTES)
        while ready and self.window > 0 and round_bytes > 0:
            stream = ready.popleft()
            size = min(self.window, stream.send_window, turn_bytes, stream.pending_bytes)
            if not stream.pending or size <= 0:
                stream.queued = False  # it is gone, or waits for its window
                continue
            round_bytes -= size
            self._emit(stream, size)
            if stream.pending:
                ready.append(stream)
                continue
            stream.queued = False
            if stream.ending:
                self._out.append(stream.ending)
                stream.connection.finished(stream)

    def _emit(self, stream: Stream, size: int) -> None:
        """One DATA frame of `size` bytes out of what is pending."""
        pending = stream.pending
        assert pending is not None
        self._large = self._large or size > 4096
        self.window -= size
        stream.send_window -= size
        stream.pending_bytes -= size
        self.held_bytes -= size
        stream.since = stream.connection.epoch
        stream.connection.allowance.left += 4
        self._out.append(FRAME_HEAD.pack(size << 8 | DATA, 0, stream.stream_id))
        while size:
            part = pending[0]
            if part.nbytes > size:
                self._out.append(part[:size])
                pending[0] = part[size:]
                break
            self._out.append(pending.popleft())
            size -= part.nbytes
        stream.flushed()
