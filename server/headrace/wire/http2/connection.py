"""HTTP/2 connection: parses frames (RFC 9113, section 4), opens and closes streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol, cast

from headrace.core.clock import NS_PER_MS, monotonic_ns
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PREFACE,
    WINDOW_UPDATE,
    ErrorCode,
    HeaderCache,
    HeaderField,
    Http2ConnectionError,
    Setting,
)
from headrace.wire.http2.stream import OPEN_COST, FrameBudget, Http2Limits, Http2Stream, WindowGrants, WriteBuffer
from headrace.wire.http2.timers import ConnectionTimers, ReadPause

logger = logging.getLogger("headrace.http2.connection")

_unpack_header = FRAME_HEADER.unpack_from
_unpack_uint32 = frames.UINT32.unpack_from
_COMPLETE_HEADERS = (END_HEADERS, END_HEADERS | END_STREAM)
# Length and kind of a WINDOW_UPDATE frame, as in its header.
_WINDOW_UPDATE_LENGTH_KIND = 4 << 8 | WINDOW_UPDATE
# Frame budget that one call of `data_received` may use up; the rest of the bytes is read in the next iteration of the event loop.
_SLICE_COST = 1024
# Time after which one call of `data_received` opens no further stream: calls that are refused or reset at once give their cost
# back, and 256 KiB hold thousands of them.
_SLICE_NS = 4 * NS_PER_MS
# Maximum CONTINUATION frames of one header block; more of them only cost processing time.
_MAX_CONTINUATIONS = 32
# Cost of a SETTINGS frame beside its entries and that of any frame: it is acknowledged.
_SETTINGS_COST = 1


class MalformedHeadersError(Exception):
    """Header fields that RFC 9113, section 8, does not allow. The stream is reset with PROTOCOL_ERROR."""


class Application(Protocol):
    """The application behind a connection, here the gRPC server. A "head" is its own type for parsed header fields."""

    def parse_head(self, fields: Sequence[HeaderField] | None) -> Any:
        """Parse header fields into a head.

        The result must depend on the fields only: it is cached by header block.

        Args:
            fields: names and values in order; None if they exceed `header_list_bytes`.

        Raises:
            MalformedHeadersError: the fields are no HTTP/2 request.
        """

    def open_stream(self, connection: Http2Connection, stream_id: int, head: Any, end: bool) -> Http2Stream | None:
        """Create the stream of a new request; None if the request was answered here, with END_STREAM.

        Args:
            connection: on which the request arrived.
            stream_id: of the request.
            head: from `parse_head`.
            end: True if the request has no body.
        """

    def connection_opened(self, connection: Http2Connection) -> bool:
        """Accept or refuse a new connection; False refuses it."""

    def connection_closed(self, connection: Http2Connection) -> None:
        """Called once after the connection and all its streams are closed."""


class Http2Connection(asyncio.Protocol):
    """Server side of one HTTP/2 connection.

    Ownership: the event loop.

    Args:
        application: opens streams and is notified of connections.
        limits: of this connection.
        loop: event loop of the transport.

    Attributes:
        limits: see Args.
        loop: see Args.
        streams: open streams by id.
        frame_budget: limits frames that carry no work.
        window_grants: receive windows for large bodies.
        write_buffer: frames to send.
        timers: timeouts, keep-alive, graceful shutdown.
        cancelled_running: closed streams whose method still runs. They count against `limits.streams`.
        ticks: ticks of `timers` since the connection was made.
        last_stream_id: largest stream id that the peer has opened.
        received_since_tick: True if bytes arrived since the last tick.
        settings_received: True after the preface and the first SETTINGS frame.
        closing: True once no new stream is accepted: after the final GOAWAY of a shutdown, or when the transport is closed.
        leaving: True once the connection ends in a moment that suits the peer, see `ConnectionTimers.leave`.
        partial_frame_since_ns: monotonic time at which the incomplete frame or header block began; 0 if there is none.
    """

    write_buffer: WriteBuffer
    transport: asyncio.Transport

    def __init__(self, application: Application, limits: Http2Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.limits = limits
        self.loop = loop
        self.frame_budget = FrameBudget(limits.frame_burst, limits.frames_per_s)
        self.window_grants = WindowGrants(limits.max_granted_bytes)
        self.timers, self.streams = ConnectionTimers(self), dict[int, Http2Stream]()
        self._unread: dict[int, None] = {}  # streams that were reset before their request was complete
        self.cancelled_running = self.ticks = self.last_stream_id = self.partial_frame_since_ns = 0
        self.received_since_tick = self.settings_received = self.closing = self.leaving = False
        self._application = application
        self._control = ControlFrames(self)
        self._header_cache: HeaderCache[Any] = HeaderCache(limits.header_list_bytes, application.parse_head)
        self._read_pause = ReadPause(self)
        self._receive_window, self._preface_received, self._unparsed = frames.DEFAULT_WINDOW, False, b""
        # An incomplete DATA frame: its stream (None: its bytes are dropped) and END_STREAM flag, missing body bytes, and bytes to
        # skip after them (padding, or the payload of an unknown frame).
        self._partial_body: tuple[Http2Stream | None, bool] = (None, False)
        self._partial_body_bytes = self._skip_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the server's connection preface, a SETTINGS frame, or refuse the connection."""
        self.transport = cast(asyncio.Transport, transport)
        self.write_buffer = WriteBuffer(self.loop, self.transport, self.limits)
        accepted, tls = self._application.connection_opened(self), transport.get_extra_info("ssl_object")
        # RFC 9113, section 3.2: HTTP/2 over TLS is negotiated by ALPN.
        if not accepted or (tls is not None and tls.selected_alpn_protocol() != "h2"):
            self.close()  # without SETTINGS: on SETTINGS a client considers the connection ready and sends its calls
            return
        self.timers.start()
        self.write_buffer.write_control(self._control.server_settings())
        self._restore_window()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close all streams."""
        self.closing, self._partial_body, self._unparsed = True, (None, False), b""
        self.write_buffer.close()
        self.timers.stop()
        self._close_streams()
        self._application.connection_closed(self)

    def forget_heads(self) -> None:
        """Empty the cache of parsed header blocks; the application calls it when heads would be parsed differently."""
        self._header_cache.clear()

    def pause_writing(self) -> None:
        """Stop writing: the transport's buffer is full."""
        self.write_buffer.paused = True
        self.write_buffer.report_unread()

    def resume_writing(self) -> None:
        """Write again: the transport's buffer has room."""
        self.write_buffer.resume()

    def data_received(self, data: bytes) -> None:
        """Read all complete frames; keep the rest until more bytes arrive."""
        self.received_since_tick = True
        if self._unparsed:
            data = self._unparsed + data
        try:
            position = self._read_frames(data, 0) if self._preface_received else self._read_preface(data)
        except Http2ConnectionError as error:
            self.close_with_error(error)
            return
        except Exception:
            logger.exception("HTTP/2 connection failed")
            self.close_with_error(
                Http2ConnectionError(ErrorCode.INTERNAL_ERROR, "internal error; see the server's log")
            )
            return
        self._unparsed = data[position:] if position < len(data) else b""
        if not self._unparsed and not self._control.in_header_block:
            self.partial_frame_since_ns = 0
        elif not self.partial_frame_since_ns or (position and not self._control.in_header_block):
            self.partial_frame_since_ns = monotonic_ns()

    # --- Frames -------------------------------------------------------------------------------------------------------

    def _read_preface(self, data: bytes) -> int:
        size = min(len(data), len(PREFACE))
        if data[:size] != PREFACE[:size]:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        if size < len(PREFACE):
            return 0
        self._preface_received = True
        return self._read_frames(data, size)

    def _read_frames(self, data: bytes, position: int) -> int:
        """Read all complete frames, and DATA as far as it has arrived; returns the position of the first unread byte."""
        size = len(data)
        if self._partial_body_bytes or self._skip_bytes:
            position = self._read_body(data, position)
        cached_heads, streams = self._header_cache.entries, self.streams
        max_length_kind, min_window = self.limits.frame_bytes << 8 | 0xFF, self.limits.connection_window_bytes >> 1
        fast_path = self.settings_received and not self._control.in_header_block
        frame_budget = self.frame_budget
        slice_end, slice_end_ns = frame_budget.available - _SLICE_COST, monotonic_ns() + _SLICE_NS
        while size - position >= FRAME_HEADER_BYTES:
            if frame_budget.available < slice_end:
                self._read_pause.pause()
                break
            length_kind, flags, stream_id = _unpack_header(data, position)
            start = position + FRAME_HEADER_BYTES
            end = start + (length_kind >> 8)
            kind = length_kind & 0xFF
            if kind == HEADERS:
                if monotonic_ns() > slice_end_ns:
                    self._read_pause.pause()
                    break
                if self.cancelled_running and self._read_pause.pause_if_full():
                    break
            # Fast path for the frames of nearly every call: a complete, unpadded DATA frame, a complete HEADERS frame with a
            # cached header block, and WINDOW_UPDATE.
            if fast_path and end <= size and length_kind <= max_length_kind:
                if kind == DATA:
                    stream = streams.get(stream_id)
                    if stream is not None and stream.remote_open and not flags & PADDED and end > start:
                        self._receive_window -= end - start
                        if self._receive_window < min_window:
                            self._restore_window()
                        stream.receive_window -= end - start
                        if stream.receive_window < 0:
                            self.stream_error(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
                        else:
                            if flags & END_STREAM:
                                stream.remote_open = False
                            stream.on_data(data, start, end, not stream.remote_open)
                        position = end
                        continue
                elif kind == HEADERS and flags in _COMPLETE_HEADERS:
                    head = cached_heads.get(data[start:end])
                    if head is not None:
                        self._open_stream(stream_id, head, flags & END_STREAM != 0)
                        position = end
                        continue
                elif length_kind == _WINDOW_UPDATE_LENGTH_KIND:
                    frame_budget.spend(1)
                    self.on_window_update(stream_id & 0x7FFFFFFF, _unpack_uint32(data, start)[0] & 0x7FFFFFFF)
                    position = end
                    continue
            after = self._read_any_frame(data, position, length_kind, flags, stream_id & 0x7FFFFFFF)
            if after < 0:
                break
            fast_path = self.settings_received and not self._control.in_header_block
            position = after
        return position

    def _read_any_frame(self, data: bytes, position: int, length_kind: int, flags: int, stream_id: int) -> int:
        """Read a frame of any kind; returns the position after the bytes read, or -1 if more bytes are needed."""
        kind, length = length_kind & 0xFF, length_kind >> 8
        if length > self.limits.frame_bytes:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        self._control.check_order(kind, flags, stream_id)
        if kind == DATA:
            return self._begin_body(data, position, length, flags, stream_id)
        start = position + FRAME_HEADER_BYTES
        if kind > CONTINUATION:
            self.frame_budget.spend(1)
            self._partial_body, self._skip_bytes = (None, False), length
            return self._read_body(data, start)
        if length > self.limits.header_bytes:
            self.limits.on_limit_reached("max_header_bytes")
            code = ErrorCode.ENHANCE_YOUR_CALM if kind == HEADERS else ErrorCode.FRAME_SIZE_ERROR
            raise Http2ConnectionError(code, f"a frame of kind {kind} with {length} bytes")
        end = start + length
        if end > len(data):
            return -1
        self._control.handle(kind, data[start:end], flags, stream_id)
        return end

    def _restore_window(self) -> None:
        """Reopen the connection's window, half of which is used; raises Http2ConnectionError if the peer has overrun it."""
        if self._receive_window < 0:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window allows")
        increment = self.limits.connection_window_bytes - self._receive_window
        self._receive_window += increment
        self.write_buffer.write_control(frames.window_update(0, increment))

    def _begin_body(self, data: bytes, position: int, length: int, flags: int, stream_id: int) -> int:
        """Read the header of a DATA frame that is padded, empty, incomplete or for no open stream."""
        start, padding = position + FRAME_HEADER_BYTES, 0
        if not stream_id & 1 or (stream_id > self.last_stream_id and not self.closing):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which was never opened")
        if flags & PADDED:
            if not length:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without a padding length")
            if start == len(data):
                return -1
            padding = data[start] + 1
            start += 1
            if padding > length:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
        self._receive_window -= length  # padding included
        if self._receive_window < self.limits.connection_window_bytes >> 1:
            self._restore_window()
        self.frame_budget.spend(1)
        end = flags & END_STREAM != 0
        stream = self.streams.get(stream_id)
        if stream is None:
            if not self.closing and not self._ignores(stream_id, end):
                self.stream_error(stream_id, ErrorCode.STREAM_CLOSED)
        else:
            stream.receive_window -= length
            if not stream.remote_open or stream.receive_window < 0:
                code = ErrorCode.FLOW_CONTROL_ERROR if stream.remote_open else ErrorCode.STREAM_CLOSED
                self.stream_error(stream_id, code)
                stream = None
            elif padding and not end:
                stream.increase_window(padding)
        self._partial_body = (stream, end)
        self._partial_body_bytes, self._skip_bytes = length - padding, max(0, padding - 1)
        if stream is not None and end and not self._partial_body_bytes:
            stream.remote_open = False
            stream.on_data(b"", 0, 0, True)
        return self._read_body(data, start)

    def _read_body(self, data: bytes, position: int) -> int:
        """Pass on the part of an incomplete frame that has arrived; returns the position after it."""
        if self._partial_body_bytes:
            stream, end = self._partial_body
            stop = min(len(data), position + self._partial_body_bytes)
            self._partial_body_bytes -= stop - position
            if stream is not None and not stream.closed and stop > position:
                end = end and not self._partial_body_bytes
                if end:
                    stream.remote_open = False
                stream.on_data(data, position, stop, end)
            position = stop
        if self._skip_bytes and not self._partial_body_bytes:
            skip = min(self._skip_bytes, len(data) - position)
            self._skip_bytes -= skip
            position += skip
        return position

    # --- Streams ------------------------------------------------------------------------------------------------------

    def on_header_block(self, stream_id: int, block: bytes, end: bool) -> None:
        """Open a stream, or end its request body, for a complete header block."""
        cache, cost = self._header_cache, 0
        head = cache.entries.get(block)
        if head is None:
            try:
                head = cache.decode(block)
            except MalformedHeadersError:
                head = None
            cost = cache.cost
            if cost:
                self.frame_budget.spend(cost)
        self._open_stream(stream_id, head, end, cost)

    def _open_stream(self, stream_id: int, head: Any, end: bool, cost: int = 0) -> None:
        """Open a stream; `cost` is that of its header block, which a successful call gets back."""
        if not self.last_stream_id < stream_id <= frames.MAX_WINDOW or not stream_id & 1:
            self._on_trailers(stream_id & 0x7FFFFFFF, end)
            return
        if self.closing:
            return  # the GOAWAY frame says that this stream is not served
        self.last_stream_id = stream_id
        frame_budget = self.frame_budget
        frame_budget.available -= OPEN_COST
        if frame_budget.available < 0:
            frame_budget.spend(0)
        if head is None:
            self._refuse(stream_id, ErrorCode.PROTOCOL_ERROR, end)
        elif len(self.streams) + self.cancelled_running >= self.limits.streams or (
            self.write_buffer.unsent_bytes > self.limits.max_unsent_bytes
        ):
            self.limits.on_limit_reached("max_streams")
            self._refuse(stream_id, ErrorCode.REFUSED_STREAM, end)
        else:
            stream = self._application.open_stream(self, stream_id, head, end)
            if stream is not None:
                self.streams[stream_id] = stream
                stream.frame_credit += cost
                if self.leaving:
                    self.timers.on_stream_opened()
                if end:
                    stream.remote_open = False
                    stream.on_data(b"", 0, 0, True)

    def _refuse(self, stream_id: int, code: ErrorCode, end: bool) -> None:
        """Reset a stream that was not opened; `end` if its request is complete."""
        if not end:
            self._ignore(stream_id)
        self.stream_error(stream_id, code)

    def _on_trailers(self, stream_id: int, end: bool) -> None:
        """Handle a second header block of a stream, and HEADERS on a stream id that cannot be opened."""
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._ignores(stream_id, end):
                return
            code = (
                ErrorCode.STREAM_CLOSED
                if stream_id & 1 and stream_id <= self.last_stream_id
                else ErrorCode.PROTOCOL_ERROR
            )
            raise Http2ConnectionError(code, f"HEADERS on stream {stream_id}, which cannot be opened")
        if not stream.remote_open:
            self.stream_error(stream_id, ErrorCode.STREAM_CLOSED)
        elif not end:
            self.stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.remote_open = False
            stream.on_data(b"", 0, 0, True)

    def stream_finished(self, stream: Http2Stream) -> None:
        """Close a stream whose response is written, END_STREAM included."""
        stream.closed = True
        del self.streams[stream.stream_id]
        if stream.remote_open:
            self.leave_rest(stream.stream_id)
        self.frame_budget.available += stream.frame_credit
        if stream.granted_bytes or self.window_grants.waiting:
            self.window_grants.release(stream)
        if self.closing and not self.streams:
            self.loop.call_soon(self.close)

    def on_window_update(self, stream_id: int, increment: int) -> None:
        """Increase the send window of a stream, or of the connection (stream 0); raises Http2ConnectionError."""
        if not stream_id:
            if not increment:
                raise _protocol_error("WINDOW_UPDATE by 0")
            self.write_buffer.increase_window(increment)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._control.check_not_idle(stream_id, "WINDOW_UPDATE")
        elif not increment:
            self.stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:
                self.stream_error(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            elif stream.pending:
                self.write_buffer.schedule_stream(stream)

    def stream_error(self, stream_id: int, code: ErrorCode) -> None:
        """Reset a stream for a protocol error of the peer.

        Raises:
            Http2ConnectionError: the frame budget is used up: the peer commits too many errors.
        """
        self.frame_budget.spend(1)
        self.reset_stream(stream_id, code)

    def reset_stream(self, stream_id: int, code: ErrorCode) -> None:
        """Send RST_STREAM and close a stream."""
        stream = self.streams.get(stream_id)
        if stream is not None and stream.remote_open:
            self._ignore(stream_id)
        self.write_buffer.write_control(frames.rst_stream(stream_id, code))
        self.close_stream(stream_id)

    def leave_rest(self, stream_id: int) -> None:
        """Send RST_STREAM: the response is complete, so the rest of the request is not read (RFC 9113, section 8.1)."""
        self._ignore(stream_id)
        self.write_buffer.write_control(frames.rst_stream(stream_id, ErrorCode.NO_ERROR))

    def _ignore(self, stream_id: int) -> None:
        """Ignore what the peer has sent on a stream before it sees the reset (RFC 9113, section 5.1).

        A second RST_STREAM would reach nginx after the response, when the connection serves the next request: that one fails.
        """
        self._unread[stream_id] = None
        if len(self._unread) > self.limits.streams:
            del self._unread[next(iter(self._unread))]

    def _ignores(self, stream_id: int, end: bool) -> bool:
        """Return True if a frame is on a stream that was reset; `end` if it is the last one."""
        if stream_id not in self._unread:
            return False
        if end:
            del self._unread[stream_id]
        return True

    def close_stream(self, stream_id: int) -> None:
        """Close a stream in any state, without a frame to the peer. A no-op if it is closed."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            stream.closed = True
            self.write_buffer.discard(stream)
            self.window_grants.release(stream)
            stream.on_closed()
            if self.closing and not self.streams:
                self.loop.call_soon(self.close)

    def _close_streams(self) -> None:
        for stream_id in list(self.streams):
            self.close_stream(stream_id)

    # --- Closing ------------------------------------------------------------------------------------------------------

    def close_with_error(self, error: Http2ConnectionError) -> None:
        """Send GOAWAY with a connection error, and close."""
        if not self.transport.is_closing():
            logger.debug("HTTP/2 connection closed: %s: %s", error.code.name, error)
            self.write_buffer.write_control(frames.goaway(self.last_stream_id, error.code, str(error)))
            self.close()

    def close(self) -> None:
        """Close all streams, and the transport once its buffer is sent."""
        if self.transport.is_closing():
            return
        self.closing = True
        self.write_buffer.close(flush=True)
        self.transport.close()
        self.timers.abort_after_linger()
        self._close_streams()


class ControlFrames:
    """Handles every frame except DATA and cached HEADERS (RFC 9113, section 6), and counts floods of them.

    Holds the state between frames of one connection.

    Attributes:
        in_header_block: True between a HEADERS frame without END_HEADERS and its last CONTINUATION frame.
    """

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self.in_header_block = False
        self._block = b""
        self._block_stream_id = self._block_frames = 0
        self._block_end = False

    def server_settings(self) -> bytes:
        """The server's SETTINGS frame, from the limits of the connection."""
        limits = self._connection.limits
        return frames.settings(
            {
                Setting.MAX_CONCURRENT_STREAMS: limits.streams,
                Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                Setting.MAX_FRAME_SIZE: limits.frame_bytes,
                Setting.MAX_HEADER_LIST_SIZE: limits.header_list_bytes,
            }
        )

    def check_order(self, kind: int, flags: int, stream_id: int) -> None:
        """Check that a frame is allowed at this point; raises Http2ConnectionError."""
        if self.in_header_block and (kind != frames.CONTINUATION or stream_id != self._block_stream_id):
            raise _protocol_error("a header block was interrupted by another frame")
        if not self._connection.settings_received and (kind != frames.SETTINGS or flags & frames.ACK):
            raise _protocol_error("the first frame is not a SETTINGS frame")

    def handle(self, kind: int, payload: bytes, flags: int, stream_id: int) -> None:
        """Handle one complete frame that is not DATA; raises Http2ConnectionError."""
        if kind == frames.HEADERS:
            self._headers(payload, flags, stream_id)
            return
        self._connection.frame_budget.spend(1)
        if kind == frames.CONTINUATION:
            self._continuation(payload, flags)
        elif kind == frames.WINDOW_UPDATE:
            increment = frames.parse_uint32(payload, "WINDOW_UPDATE") & 0x7FFFFFFF
            self._connection.on_window_update(stream_id, increment)
        elif kind == frames.RST_STREAM:
            self._rst_stream(payload, stream_id)
        elif kind == frames.PRIORITY:
            if not stream_id:
                raise _protocol_error("PRIORITY on stream 0")
            if len(payload) != 5:
                self._connection.stream_error(stream_id, ErrorCode.FRAME_SIZE_ERROR)
            elif frames.depends_on(payload, 0) == stream_id:  # RFC 7540, section 5.3.1
                raise _protocol_error(f"stream {stream_id} depends on itself")
        elif kind == frames.PUSH_PROMISE:
            raise _protocol_error("a client cannot push")
        elif stream_id:
            raise _protocol_error(f"a frame of kind {kind} on stream {stream_id}")
        elif kind == frames.SETTINGS:
            self._settings(payload, flags)
        elif kind == frames.PING:
            self._ping(payload, flags)
        elif kind == frames.GOAWAY and len(payload) < 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY has {len(payload)} bytes, fewer than 8")

    # --- Header blocks ------------------------------------------------------------------------------------------------

    def _headers(self, payload: bytes, flags: int, stream_id: int) -> None:
        if not stream_id:
            raise _protocol_error("HEADERS on stream 0")
        block = frames.unpad(payload, flags)
        if flags & frames.WITH_PRIORITY and frames.depends_on(payload, 1 if flags & PADDED else 0) == stream_id:
            raise _protocol_error(f"stream {stream_id} depends on itself")
        end = flags & frames.END_STREAM != 0
        if flags & frames.END_HEADERS:
            self._connection.on_header_block(stream_id, block, end)
            return
        self.in_header_block = True
        self._block, self._block_stream_id, self._block_end, self._block_frames = block, stream_id, end, 0

    def _continuation(self, payload: bytes, flags: int) -> None:
        if not self.in_header_block:
            raise _protocol_error("CONTINUATION without HEADERS before it")
        self._block += payload
        self._block_frames += 1
        if len(self._block) > self._connection.limits.header_bytes or self._block_frames > _MAX_CONTINUATIONS:
            self._connection.limits.on_limit_reached("max_header_bytes")
            # CVE-2024-27316
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a header block that is too long")
        if flags & frames.END_HEADERS:
            self.in_header_block = False
            block, self._block = self._block, b""
            self._connection.on_header_block(self._block_stream_id, block, self._block_end)

    # --- Resets -------------------------------------------------------------------------------------------------------

    def _rst_stream(self, payload: bytes, stream_id: int) -> None:
        frames.parse_uint32(payload, "RST_STREAM")
        self.check_not_idle(stream_id, "RST_STREAM")
        stream = self._connection.streams.get(stream_id)
        if stream is not None:
            self._connection.frame_budget.available += stream.reset_credit
            self._connection.close_stream(stream_id)

    def check_not_idle(self, stream_id: int, frame_name: str) -> None:
        """Raise Http2ConnectionError for a frame on a stream that was never opened."""
        if not stream_id & 1 or (stream_id > self._connection.last_stream_id and not self._connection.closing):
            raise _protocol_error(f"{frame_name} on stream {stream_id}, which was never opened")

    # --- Settings and PING --------------------------------------------------------------------------------------------

    def _settings(self, payload: bytes, flags: int) -> None:
        connection = self._connection
        if flags & frames.ACK:
            if payload:
                raise Http2ConnectionError(
                    ErrorCode.FRAME_SIZE_ERROR, f"an acknowledgement of SETTINGS with {len(payload)} bytes instead of 0"
                )
            return
        connection.frame_budget.spend(_SETTINGS_COST + len(payload) // frames.SETTING_BYTES)
        # Only the last entry of a kind counts: RFC 9113, section 6.5.3, allows no other frame to take effect between them.
        values = dict(frames.read_settings(payload))
        write_buffer = connection.write_buffer
        initial_window = values.get(Setting.INITIAL_WINDOW_SIZE, write_buffer.initial_window)
        if initial_window != write_buffer.initial_window:
            connection.frame_budget.spend(len(connection.streams))
            self._change_send_windows(initial_window - write_buffer.initial_window)
            write_buffer.initial_window = initial_window
        write_buffer.frame_bytes = values.get(Setting.MAX_FRAME_SIZE, write_buffer.frame_bytes)
        connection.settings_received = True
        write_buffer.write_control(frames.SETTINGS_ACK)

    def _change_send_windows(self, change: int) -> None:
        """Change the send windows of all open streams (RFC 9113, section 6.9.2); raises Http2ConnectionError."""
        connection = self._connection
        for stream in connection.streams.values():
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream overflows")
            if stream.pending:
                connection.write_buffer.schedule_stream(stream)

    def _ping(self, payload: bytes, flags: int) -> None:
        if len(payload) != 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"a PING of {len(payload)} bytes instead of 8")
        if flags & frames.ACK:
            self._connection.timers.on_ping_ack(payload)
        else:
            self._connection.write_buffer.write_control(frames.ping(payload, ack=True))


def _protocol_error(text: str) -> Http2ConnectionError:
    return Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, text)
