"""The protocol of one socket: cuts what comes into frames (RFC 9113, section 4), opens streams and ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol, cast

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.http2 import frames
from headrace.http2.frames import (
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
    ErrorCode,
    Http2ConnectionError,
    Http2StreamError,
    Setting,
)
from headrace.http2.hpack import HeaderCache, HeaderField
from headrace.http2.stream import FrameBudget, Http2Limits, Http2Stream, WindowGrants, WriteBuffer

logger = logging.getLogger(__name__)

_unpack_head = FRAME_HEADER.unpack_from
_COMPLETE_HEADERS = (END_HEADERS, END_HEADERS | END_STREAM)
# What a stream that ends as it should earns for the frames around it (see `FrameBudget`).
_STREAM_CREDIT = 8
# A header block may come in this many CONTINUATION frames; more of them only cost.
_MAX_CONTINUATIONS = 32
_FRAME_COSTS = {frames.SETTINGS: 4}
_KEEPALIVE_PING = b"alive?  "
_SHUTDOWN_PING = b"draining"
# From the reset of a stream to the end of its task: the completion's wake-up, the task's step, its callback; and one to spare.
MAX_PAUSED_ITERATIONS = 4


class MalformedHeadersError(Exception):
    """Header fields that RFC 9113, section 8, does not allow; the stream is reset with PROTOCOL_ERROR."""


class Application(Protocol):
    """What is served; a "head" is whatever it makes of a request's header fields."""

    def parse_head(self, fields: Sequence[HeaderField] | None) -> Any:
        """The head, from nothing but the fields (None: they are too large); raises MalformedHeadersError."""

    def open_stream(self, connection: Http2Connection, stream_id: int, head: Any, end: bool) -> Http2Stream | None:
        """A request begins (and has no body if `end`); None if it was answered, with END_STREAM, right here."""

    def connection_opened(self, connection: Http2Connection) -> bool:
        """A peer has connected; False: it is to be turned away."""

    def connection_closed(self, connection: Http2Connection) -> None:
        """It is gone, with all its streams."""


class Http2Connection(asyncio.Protocol):
    """One peer.

    Ownership: the event loop.

    Args:
        application: what is served.
        limits: of this connection.
        loop: on which it lives.

    Attributes:
        streams: open ones by their id.
        lingering: streams that are gone while their work is not.
        epoch: counts the ticks of `lifetime`.
        last_id: of the newest stream of the peer.
        heard: True if anything came since it was last set to False.
        greeted: True once the preface and the first SETTINGS have come.
        closing: True once nothing new is accepted: after the last GOAWAY of a shutdown, or on a closed transport.
        unfinished_ns: monotonic, when the frame or header block that is incomplete began; 0 if none is.
    """

    write_buffer: WriteBuffer
    transport: asyncio.Transport

    def __init__(self, application: Application, limits: Http2Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.limits = limits
        self.loop = loop
        self.frame_budget = FrameBudget(limits.frame_burst, limits.frames_per_s)
        self.window_grants = WindowGrants(limits.max_granted_bytes)
        self.timers, self.streams = ConnectionTimers(self), dict[int, Http2Stream]()
        self.cancelled_running = self.ticks = self.last_stream_id = self.partial_frame_since_ns = 0
        self.received_since_tick = self.settings_received = self.closing = False
        self._application = application
        self._control = ControlFrames(self)
        self._header_cache: HeaderCache[Any] = HeaderCache(limits.header_list_bytes, application.parse_head)
        self._read_pause = ReadPause(self)
        self._receive_window, self._preface_received, self._unparsed = frames.DEFAULT_WINDOW, False, b""
        # A DATA frame of which a part is still to come: its stream (None: nobody wants it), end flag, bytes, padding.
        self._partial_body: tuple[Http2Stream | None, bool] = (None, False)
        self._partial_body_bytes = self._skip_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet: the server's preface is its SETTINGS frame."""
        self.transport = cast(asyncio.Transport, transport)
        self.write_buffer = WriteBuffer(self.loop, self.transport, self.limits)
        welcome, tls = self._application.connection_opened(self), transport.get_extra_info("ssl_object")
        # RFC 9113, section 3.2: HTTP/2 over TLS is agreed on by ALPN.
        if not welcome or (tls is not None and tls.selected_alpn_protocol() != "h2"):
            self.close()  # without SETTINGS, at which a client believes that it is served, and begins its calls
            return
        self.timers.start()
        self.write_buffer.write_control(self._control.server_settings())
        self._restore_window()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone, and so are its streams."""
        self.closing, self._partial_body, self._unparsed = True, (None, False), b""
        self.write_buffer.close()
        self.timers.stop()
        self._close_streams()
        self._application.connection_closed(self)

    def pause_writing(self) -> None:
        """The transport is full."""
        self.write_buffer.paused = True

    def resume_writing(self) -> None:
        """It has room again."""
        self.write_buffer.resume()

    def data_received(self, data: bytes) -> None:
        """Bytes of any number of frames."""
        self.received_since_tick = True
        if self._unparsed:
            data = self._unparsed + data
        try:
            position = self._read_frames(data, 0) if self._preface_received else self._read_preface(data)
        except Http2ConnectionError as error:
            self.close_with_error(error)
            return
        except Exception:
            logger.exception("an HTTP/2 connection failed")
            self.close_with_error(
                Http2ConnectionError(ErrorCode.INTERNAL_ERROR, "the server failed; its log has the cause")
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
        """Take all whole frames and parts of DATA; the position of the first byte that was not taken."""
        size = len(data)
        if self._partial_body_bytes or self._skip_bytes:
            position = self._read_body(data, position)
        known, streams = self._header_cache.entries, self.streams
        largest_word = self.limits.frame_bytes << 8 | 0xFF
        plain = self.settings_received and not self._control.in_header_block
        while size - position >= FRAME_HEADER_BYTES:
            word, flags, stream_id = _unpack_head(data, position)
            start = position + FRAME_HEADER_BYTES
            end = start + (word >> 8)
            kind = word & 0xFF
            if self.cancelled_running and kind == HEADERS and self._read_pause.pause_if_full():
                break
            # The two frames of nearly every call, whole and without extras; all else goes the long way.
            if plain and end <= size and word <= largest_word:
                if kind == DATA:
                    stream = streams.get(stream_id)
                    if stream is not None and stream.remote_open and not flags & PADDED and end > start:
                        self._count_data(end - start)
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
                    head = known.get(data[start:end])
                    if head is not None:
                        self._open_stream(stream_id, head, flags & END_STREAM != 0)
                        position = end
                        continue
            after = self._read_any_frame(data, position, word, flags, stream_id & 0x7FFFFFFF)
            if after < 0:
                break
            plain = self.settings_received and not self._control.in_header_block
            position = after
        return position

    def _read_any_frame(self, data: bytes, position: int, word: int, flags: int, stream_id: int) -> int:
        """Any frame; the position behind what was taken of it, or -1 to wait for more."""
        kind, length = word & 0xFF, word >> 8
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
        try:
            self._control.handle(kind, data[start:end], flags, stream_id)
        except Http2StreamError as error:
            self.stream_error(error.stream_id, error.code)
        return end

    def _count_data(self, size_bytes: int) -> None:
        """DATA came: count it, padding included, and keep the connection's window open."""
        self._receive_window -= size_bytes
        if self._receive_window < self.limits.connection_window_bytes >> 1:
            if self._receive_window < 0:
                raise Http2ConnectionError(
                    ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window allows"
                )
            self._restore_window()

    def _restore_window(self) -> None:
        increment = self.limits.connection_window_bytes - self._receive_window
        self._receive_window += increment
        self.write_buffer.write_control(frames.window_update(0, increment))

    def _begin_body(self, data: bytes, position: int, length: int, flags: int, stream_id: int) -> int:
        """A DATA frame that is padded, empty, incomplete or for no open stream."""
        start, padding = position + FRAME_HEADER_BYTES, 0
        if not stream_id & 1 or (stream_id > self.last_stream_id and not self.closing):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which was never opened")
        if flags & PADDED:
            if not length:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the padding's length")
            if start == len(data):
                return -1
            padding = data[start] + 1
            start += 1
            if padding > length:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
        self._count_data(length)
        self.frame_budget.spend(1)
        end = flags & END_STREAM != 0
        stream = self.streams.get(stream_id)
        if stream is None:
            if not self.closing:
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
        """Take what has come of the frame that was begun; the position behind it."""
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
        """A whole header block has come."""
        head = self._header_cache.entries.get(block)
        if head is None:
            try:
                head = self._header_cache.decode(block)
            except MalformedHeadersError:
                head = None
        self._open_stream(stream_id, head, end)

    def _open_stream(self, stream_id: int, head: Any, end: bool) -> None:
        if not self.last_stream_id < stream_id <= frames.MAX_WINDOW or not stream_id & 1:
            self._on_trailers(stream_id & 0x7FFFFFFF, end)
            return
        if self.closing:
            return  # the GOAWAY has told the peer that this one is not served
        self.last_stream_id = stream_id
        if head is None:
            self.stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif len(self.streams) + self.cancelled_running >= self.limits.streams or self.write_buffer.is_full:
            self.limits.on_limit_reached("max_streams")
            self.stream_error(stream_id, ErrorCode.REFUSED_STREAM)
        else:
            stream = self._application.open_stream(self, stream_id, head, end)
            if stream is not None:
                self.streams[stream_id] = stream
                if end:
                    stream.remote_open = False
                    stream.on_data(b"", 0, 0, True)

    def _on_trailers(self, stream_id: int, end: bool) -> None:
        """A second header block of a stream, or one that may not be."""
        stream = self.streams.get(stream_id)
        if stream is None:
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
        """All of an answer is on its way, END_STREAM included."""
        stream.closed = True
        del self.streams[stream.stream_id]
        if stream.remote_open:
            # RFC 9113, section 8.1: the rest of the request is not wanted.
            self.write_buffer.write_control(frames.rst_stream(stream.stream_id, ErrorCode.NO_ERROR))
        self.frame_budget.available += _STREAM_CREDIT
        self.window_grants.release(stream)
        if self.closing and not self.streams:
            self.loop.call_soon(self.close)

    def stream_error(self, stream_id: int, code: ErrorCode) -> None:
        """The peer broke a rule on one stream; raises Http2ConnectionError if it does that all the time."""
        self.frame_budget.spend(1)
        self.reset_stream(stream_id, code)

    def reset_stream(self, stream_id: int, code: ErrorCode) -> None:
        """End one stream at once."""
        self.write_buffer.write_control(frames.rst_stream(stream_id, code))
        self.close_stream(stream_id)

    def close_stream(self, stream_id: int) -> None:
        """One stream is over, whatever it was doing."""
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

    # --- The end ------------------------------------------------------------------------------------------------------

    def close_with_error(self, error: Http2ConnectionError) -> None:
        """The peer broke the protocol: tell it why, and close."""
        if not self.transport.is_closing():
            logger.debug("HTTP/2 connection closed: %s: %s", error.code.name, error)
            self.write_buffer.write_control(frames.goaway(self.last_stream_id, error.code, str(error)))
            self.close()

    def close(self) -> None:
        """Close the transport once it has sent what it holds."""
        if self.transport.is_closing():
            return
        self.closing = True
        self.write_buffer.close(flush=True)
        self.transport.close()
        self.timers.abort_after_linger()
        self._close_streams()


class ControlFrames:
    """Everything but DATA and plain HEADERS: frames that steer a connection (RFC 9113, section 6), and those that flood it.

    Holds the state between frames of one connection.

    Attributes:
        in_header_block: True while CONTINUATION frames of a header block are to come.
    """

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self.in_header_block = False
        self._block = b""
        self._block_stream_id = self._block_frames = 0
        self._block_end = False

    def server_settings(self) -> bytes:
        """The SETTINGS frame that tells our limits."""
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
        """Raises Http2ConnectionError if a frame may not come now."""
        if self.in_header_block and (kind != frames.CONTINUATION or stream_id != self._block_stream_id):
            raise _protocol_error("a header block was interrupted by another frame")
        if not self._connection.settings_received and (kind != frames.SETTINGS or flags & frames.ACK):
            raise _protocol_error("the first frame is no SETTINGS frame")

    def handle(self, kind: int, payload: bytes, flags: int, stream_id: int) -> None:
        """One whole frame that is not DATA; raises Http2ConnectionError and Http2StreamError."""
        if kind == frames.HEADERS:
            self._headers(payload, flags, stream_id)
            return
        self._connection.frame_budget.spend(_FRAME_COSTS.get(kind, 1))
        if kind == frames.CONTINUATION:
            self._continuation(payload, flags)
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(payload, stream_id)
        elif kind == frames.RST_STREAM:
            self._rst_stream(payload, stream_id)
        elif kind == frames.PRIORITY:
            if not stream_id:
                raise _protocol_error("PRIORITY on stream 0")
            if len(payload) != 5:
                raise Http2StreamError(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has 5 bytes")
        elif kind == frames.PUSH_PROMISE:
            raise _protocol_error("a client cannot push")
        elif stream_id:
            raise _protocol_error(f"a frame of kind {kind} on stream {stream_id}")
        elif kind == frames.SETTINGS:
            self._settings(payload, flags)
        elif kind == frames.PING:
            self._ping(payload, flags)
        elif kind == frames.GOAWAY and len(payload) < 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has 8 bytes at least")

    # --- Header blocks ------------------------------------------------------------------------------------------------

    def _headers(self, payload: bytes, flags: int, stream_id: int) -> None:
        if not stream_id:
            raise _protocol_error("HEADERS on stream 0")
        block = frames.unpad(payload, flags)
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
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM, "a header block that does not end"
            )  # CVE-2024-27316
        if flags & frames.END_HEADERS:
            self.in_header_block = False
            block, self._block = self._block, b""
            self._connection.on_header_block(self._block_stream_id, block, self._block_end)

    # --- Windows and streams ------------------------------------------------------------------------------------------

    def _window_update(self, payload: bytes, stream_id: int) -> None:
        connection = self._connection
        increment = frames.parse_uint31(payload, "WINDOW_UPDATE") & 0x7FFFFFFF
        if not stream_id:
            if not increment:
                raise _protocol_error("WINDOW_UPDATE by 0")
            connection.write_buffer.increase_window(increment)
            return
        self._check_not_idle(stream_id, "WINDOW_UPDATE")
        stream = connection.streams.get(stream_id)
        if stream is None:
            return
        if not increment:
            raise Http2StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        stream.send_window += increment
        if stream.send_window > frames.MAX_WINDOW:
            raise Http2StreamError(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "the window of the stream overflows")
        connection.write_buffer.schedule_stream(stream)

    def _rst_stream(self, payload: bytes, stream_id: int) -> None:
        frames.parse_uint31(payload, "RST_STREAM")
        self._check_not_idle(stream_id, "RST_STREAM")
        self._connection.close_stream(stream_id)

    def _check_not_idle(self, stream_id: int, what: str) -> None:
        if not stream_id & 1 or (stream_id > self._connection.last_stream_id and not self._connection.closing):
            raise _protocol_error(f"{what} on stream {stream_id}, which was never opened")

    # --- The connection -----------------------------------------------------------------------------------------------

    def _settings(self, payload: bytes, flags: int) -> None:
        connection = self._connection
        if flags & frames.ACK:
            if payload:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS is empty")
            return
        write_buffer = connection.write_buffer
        for name, value in frames.read_settings(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                change, write_buffer.initial_window = value - write_buffer.initial_window, value
                for stream in connection.streams.values():
                    stream.send_window += change
                    if stream.send_window > frames.MAX_WINDOW:
                        raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream overflows")
                    write_buffer.schedule_stream(stream)
            elif name == Setting.MAX_FRAME_SIZE:
                write_buffer.frame_bytes = value
        connection.settings_received = True
        write_buffer.write_control(frames.SETTINGS_ACK)

    def _ping(self, payload: bytes, flags: int) -> None:
        if len(payload) != 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"a PING of {len(payload)} bytes instead of 8")
        if flags & frames.ACK:
            self._connection.timers.on_ping_ack(payload)
        else:
            self._connection.write_buffer.write_control(frames.ping(payload, ack=True))


def _protocol_error(text: str) -> Http2ConnectionError:
    return Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, text)


class ConnectionTimers:
    """What ends a connection: a handshake or a frame that does not get done, a dead or idle peer, a shutdown without a lost call.

    One timer a connection, which ticks a few times in the shortest of its limits; nothing is armed for a stream or a frame.

    Ownership: the event loop.
    """

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
        self._last_received_ns = self._last_active_ns = monotonic_ns()
        self._keepalive_sent = False
        self._last_stream_id = 0

    def start(self) -> None:
        """The connection is made."""
        self._schedule_tick()

    def stop(self) -> None:
        """The connection is lost."""
        for timer in (self._timer, self._drain_timer):
            if timer is not None:
                timer.cancel()

    def abort_after_linger(self) -> None:
        """The transport was closed: give the peer a moment to read what it still holds."""
        self.stop()
        connection = self._connection
        self._timer = connection.loop.call_later(connection.limits.linger_s, connection.transport.abort)

    def start_graceful_shutdown(self) -> None:
        """Shut down gracefully (RFC 9113, section 6.8): a warning, one round trip, the last stream that is served, its end.

        So, too, where the peer's preface has not come: its first calls may be under way already, since it has our SETTINGS.
        """
        connection = self._connection
        if self._drain_timer is not None or connection.closing:
            return
        connection.write_buffer.write_control(
            frames.goaway(MAX_WINDOW, ErrorCode.NO_ERROR) + frames.ping(_SHUTDOWN_PING, ack=False)
        )
        self._drain_timer = connection.loop.call_later(connection.limits.drain_s, self._send_final_goaway)

    def on_ping_ack(self, payload: bytes) -> None:
        """A PING of ours came back."""
        if payload == _SHUTDOWN_PING and self._drain_timer is not None:
            self._send_final_goaway()

    def _send_final_goaway(self) -> None:
        """Whatever the peer opens from now on, it knows that it will not be served."""
        connection = self._connection
        if not connection.closing:
            connection.closing = True
            connection.write_buffer.write_control(frames.goaway(connection.last_stream_id, ErrorCode.NO_ERROR))
            if not connection.streams:
                connection.close()

    def _schedule_tick(self) -> None:
        self._timer = self._connection.loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        connection, limits, now_ns = self._connection, self._connection.limits, monotonic_ns()
        connection.ticks += 1
        connection.frame_budget.cap()
        if connection.received_since_tick:
            connection.received_since_tick, self._last_received_ns, self._keepalive_sent = False, now_ns, False
        silent_s = (now_ns - self._last_received_ns) / NS_PER_S
        unfinished_s = (
            (now_ns - connection.partial_frame_since_ns) / NS_PER_S if connection.partial_frame_since_ns else 0.0
        )
        if not connection.settings_received and connection.ticks * self._tick_s >= limits.handshake_s:
            limits.on_limit_reached("header_timeout_s")
            connection.close_with_error(Http2ConnectionError(ErrorCode.SETTINGS_TIMEOUT, "no SETTINGS in time"))
        elif unfinished_s > limits.frame_s:
            limits.on_limit_reached("header_timeout_s")
            connection.close_with_error(
                Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a frame or header block was not finished in time")
            )
        elif silent_s > limits.keepalive_s + limits.keepalive_timeout_s:
            connection.transport.abort()  # a dead peer reads no GOAWAY
        else:
            if silent_s > limits.keepalive_s and not self._keepalive_sent:
                self._keepalive_sent = True
                connection.write_buffer.write_control(frames.ping(_KEEPALIVE_PING, ack=False))
            self._check_streams(now_ns)
            if not connection.transport.is_closing():
                self._schedule_tick()

    def _check_streams(self, now_ns: int) -> None:
        connection = self._connection
        if connection.streams or connection.cancelled_running or connection.last_stream_id != self._last_stream_id:
            self._last_stream_id, self._last_active_ns = connection.last_stream_id, now_ns
        elif (now_ns - self._last_active_ns) / NS_PER_S > connection.limits.idle_s:
            self.start_graceful_shutdown()
        for stream in list(connection.streams.values()):
            age_ticks = connection.ticks - stream.progress_tick
            if stream.pending:
                if age_ticks > self._stall_ticks:
                    connection.limits.on_limit_reached("stall_timeout_s")
                    stream.reset(ErrorCode.CANCEL)
            elif stream.awaiting_body and age_ticks > self._message_ticks:
                connection.limits.on_limit_reached("body_timeout_s")
                stream.on_timeout()


class ReadPause:
    """Reading on later, where reading on now would refuse an honest peer.

    A peer may cancel thousands of calls in one breath and open the next within its rights: by its own count none is open. Here
    the methods of the cancelled ones need a few turns of the event loop to end. Until they have, the connection is not read,
    rather than the new call refused. Work that does not end keeps nobody waiting for more than `MAX_PAUSED_ITERATIONS` turns.

    Args:
        connection: whose reading is put off.
    """

    __slots__ = ("_cancelled_running", "_connection", "_iterations")

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._cancelled_running = 0
        self._iterations = 0

    def pause_if_full(self) -> bool:
        """True if a new stream must wait, its frame and all behind it unread; they are read again by and by."""
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
        connection.transport.pause_reading()
        connection.loop.call_soon(self._resume)
        return True

    def _resume(self) -> None:
        connection = self._connection
        if not connection.transport.is_closing():
            connection.transport.resume_reading()
            connection.data_received(b"")
