"""Everything but DATA and plain HEADERS: the frames that steer a connection (RFC 9113, section 6) and those that flood it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.http2 import frames
from headrace.http2.frames import ConnectionFault, ErrorCode, Setting, StreamFault

if TYPE_CHECKING:
    from headrace.http2.connection import Http2Connection

# A header block may come in this many CONTINUATION frames; more of them only cost.
_CONTINUATIONS = 32
_BURDENS = {frames.SETTINGS: 4}


class ControlFrames:
    """The state between frames of one connection.

    Attributes:
        in_block: True while CONTINUATION frames of a header block are to come.
    """

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self.in_block = False
        self._block = b""
        self._block_id = self._block_frames = 0
        self._block_end = False

    def own_settings(self) -> bytes:
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
        """Raises ConnectionFault if a frame may not come now."""
        if self.in_block and (kind != frames.CONTINUATION or stream_id != self._block_id):
            raise _protocol_error("a header block was interrupted by another frame")
        if not self._connection.greeted and (kind != frames.SETTINGS or flags & frames.ACK):
            raise _protocol_error("the first frame is no SETTINGS frame")

    def take(self, kind: int, payload: bytes, flags: int, stream_id: int) -> None:
        """One whole frame that is not DATA; raises ConnectionFault and StreamFault."""
        if kind == frames.HEADERS:
            self._headers(payload, flags, stream_id)
            return
        self._connection.allowance.spend(_BURDENS.get(kind, 1))
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
                raise StreamFault(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has 5 bytes")
        elif kind == frames.PUSH_PROMISE:
            raise _protocol_error("a client cannot push")
        elif stream_id:
            raise _protocol_error(f"a frame of kind {kind} on stream {stream_id}")
        elif kind == frames.SETTINGS:
            self._settings(payload, flags)
        elif kind == frames.PING:
            self._ping(payload, flags)
        elif kind == frames.GOAWAY and len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has 8 bytes at least")

    # --- Header blocks ------------------------------------------------------------------------------------------------

    def _headers(self, payload: bytes, flags: int, stream_id: int) -> None:
        if not stream_id:
            raise _protocol_error("HEADERS on stream 0")
        block = frames.unpad(payload, flags)
        end = flags & frames.END_STREAM != 0
        if flags & frames.END_HEADERS:
            self._connection.headers(stream_id, block, end)
            return
        self.in_block = True
        self._block, self._block_id, self._block_end, self._block_frames = block, stream_id, end, 0

    def _continuation(self, payload: bytes, flags: int) -> None:
        if not self.in_block:
            raise _protocol_error("CONTINUATION without HEADERS before it")
        self._block += payload
        self._block_frames += 1
        if len(self._block) > self._connection.limits.header_bytes or self._block_frames > _CONTINUATIONS:
            self._connection.limits.reached("max_header_bytes")
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block that does not end")  # CVE-2024-27316
        if flags & frames.END_HEADERS:
            self.in_block = False
            block, self._block = self._block, b""
            self._connection.headers(self._block_id, block, self._block_end)

    # --- Windows and streams ------------------------------------------------------------------------------------------

    def _window_update(self, payload: bytes, stream_id: int) -> None:
        connection = self._connection
        increment = frames.word(payload, "WINDOW_UPDATE") & 0x7FFFFFFF
        if not stream_id:
            if not increment:
                raise _protocol_error("WINDOW_UPDATE by 0")
            connection.outbox.open_window(increment)
            return
        self._check_not_idle(stream_id, "WINDOW_UPDATE")
        stream = connection.streams.get(stream_id)
        if stream is None:
            return
        if not increment:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        stream.send_window += increment
        if stream.send_window > frames.LARGEST_WINDOW:
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "the window of the stream overflows")
        connection.outbox.wake(stream)

    def _rst_stream(self, payload: bytes, stream_id: int) -> None:
        frames.word(payload, "RST_STREAM")
        self._check_not_idle(stream_id, "RST_STREAM")
        self._connection.lose(stream_id)

    def _check_not_idle(self, stream_id: int, what: str) -> None:
        if not stream_id & 1 or (stream_id > self._connection.last_id and not self._connection.closing):
            raise _protocol_error(f"{what} on stream {stream_id}, which was never opened")

    # --- The connection -----------------------------------------------------------------------------------------------

    def _settings(self, payload: bytes, flags: int) -> None:
        connection = self._connection
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS is empty")
            return
        outbox = connection.outbox
        for name, value in frames.read_settings(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                change, outbox.initial_window = value - outbox.initial_window, value
                for stream in connection.streams.values():
                    stream.send_window += change
                    if stream.send_window > frames.LARGEST_WINDOW:
                        raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream overflows")
                    outbox.wake(stream)
            elif name == Setting.MAX_FRAME_SIZE:
                outbox.frame_bytes = value
        connection.greeted = True
        outbox.control(frames.SETTINGS_ACK)

    def _ping(self, payload: bytes, flags: int) -> None:
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a PING of {len(payload)} bytes instead of 8")
        if flags & frames.ACK:
            self._connection.lifetime.answered(payload)
        else:
            self._connection.outbox.control(frames.ping(payload, ack=True))


def _protocol_error(text: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.PROTOCOL_ERROR, text)
