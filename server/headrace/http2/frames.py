"""HTTP/2 frames (RFC 9113, sections 4 and 6): layout, encoding, decoding, and the errors of a peer."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

# Flags.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
DEFAULT_WINDOW = 65535
DEFAULT_FRAME_BYTES = 16384
MAX_FRAME_BYTES = 2**24 - 1
MAX_WINDOW = 2**31 - 1

# Header of a frame: length and kind in one 32-bit number (length << 8 | kind), flags, stream id.
FRAME_HEADER = Struct(">IBI")
UINT32 = Struct(">I")
_TWO_UINT32 = Struct(">II")
_SETTING = Struct(">HI")


class Setting(IntEnum):
    """Names of settings (RFC 9113, section 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Http2ConnectionError(Exception):
    """Connection error (RFC 9113, section 5.4.1): the connection is closed with GOAWAY.

    Args:
        code: of the GOAWAY frame.
        text: debug data of the GOAWAY frame.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Http2StreamError(Exception):
    """Stream error (RFC 9113, section 5.4.2): one stream is reset.

    Args:
        stream_id: of the stream to reset.
        code: of the RST_STREAM frame.
        text: for logs.
    """

    def __init__(self, stream_id: int, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.stream_id = stream_id
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Encode a frame of any kind."""
    return FRAME_HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[Setting, int]) -> bytes:
    """Encode a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


SETTINGS_ACK = frame(SETTINGS, ACK, 0)


def ping(payload: bytes, ack: bool) -> bytes:
    """Encode a PING frame; `payload` has 8 bytes."""
    return frame(PING, ACK if ack else 0, 0, payload)


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Encode a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, UINT32.pack(code))


def window_update(stream_id: int, increment_bytes: int) -> bytes:
    """Encode a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, UINT32.pack(increment_bytes))


def goaway(last_stream_id: int, code: ErrorCode, text: str = "") -> bytes:
    """Encode a GOAWAY frame."""
    return frame(GOAWAY, 0, 0, _TWO_UINT32.pack(last_stream_id, code) + text.encode())


def parse_uint32(payload: bytes, frame_name: str) -> int:
    """Decode a payload of one 32-bit number; raises Http2ConnectionError if its size is not 4 bytes."""
    if len(payload) != 4:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"a {frame_name} of {len(payload)} bytes instead of 4")
    number: int = UINT32.unpack(payload)[0]
    return number


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Decode the (name, value) pairs of a SETTINGS frame, unknown names included; raises Http2ConnectionError."""
    if len(payload) % _SETTING.size:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes, not a multiple of 6")
    pairs: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
    for name, value in pairs:
        if name == Setting.ENABLE_PUSH and value > 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value} instead of 0 or 1")
        if name == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")
        if name == Setting.MAX_FRAME_SIZE and not DEFAULT_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
    return pairs


def unpad(payload: bytes, flags: int) -> bytes:
    """Strip padding and priority fields from a HEADERS payload (RFC 9113, section 6.2); raises Http2ConnectionError."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without a padding length")
        start, end = 1, end - payload[0]
    if flags & WITH_PRIORITY:
        start += 5
    if end < start:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "padding or priority fields longer than their frame")
    return payload[start:end]
