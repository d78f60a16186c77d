"""HTTP/2 frames: exact bytes, and rejection of invalid payloads."""

from __future__ import annotations

import pytest
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import ErrorCode, Http2ConnectionError, Setting


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (frames.SETTINGS_ACK, "000000 04 01 00000000"),
        (frames.settings({Setting.MAX_CONCURRENT_STREAMS: 100}), "000006 04 00 00000000 0003 00000064"),
        (frames.ping(b"12345678", ack=True), "000008 06 01 00000000 3132333435363738"),
        (frames.ping(b"12345678", ack=False), "000008 06 00 00000000 3132333435363738"),
        (frames.rst_stream(5, ErrorCode.CANCEL), "000004 03 00 00000005 00000008"),
        (frames.window_update(0, 65536), "000004 08 00 00000000 00010000"),
        (frames.goaway(7, ErrorCode.ENHANCE_YOUR_CALM, "no"), "00000a 07 00 00000000 00000007 0000000b 6e6f"),
        (frames.frame(frames.DATA, 1, 2**31 - 1, b"ab"), "000002 00 01 7fffffff 6162"),
    ],
)
def test_frames_are_built_as_the_rfc_draws_them(built: bytes, expected: str) -> None:
    assert built == bytes.fromhex(expected)


def test_settings_are_read_back_with_unknown_ones() -> None:
    payload = bytes.fromhex("0003 00000064 0004 00100000 fe03 00000001")
    assert frames.read_settings(payload) == [(3, 100), (4, 1 << 20), (0xFE03, 1)]
    assert frames.read_settings(b"") == []


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        ("0003 000000", ErrorCode.FRAME_SIZE_ERROR),
        ("0002 00000002", ErrorCode.PROTOCOL_ERROR),
        ("0004 80000000", ErrorCode.FLOW_CONTROL_ERROR),
        ("0005 00003fff", ErrorCode.PROTOCOL_ERROR),
        ("0005 01000000", ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_settings_out_of_range_are_refused(payload: str, code: ErrorCode) -> None:
    with pytest.raises(Http2ConnectionError) as caught:
        frames.read_settings(bytes.fromhex(payload))
    assert caught.value.code == code


def test_padding_and_priority_are_removed() -> None:
    assert frames.unpad(b"abc", 0) == b"abc"
    assert frames.unpad(b"\x02abc\0\0", frames.PADDED) == b"abc"
    assert frames.unpad(b"\0\0\0\0\x10abc", frames.WITH_PRIORITY) == b"abc"
    assert frames.unpad(b"\x01\0\0\0\0\x10abc\0", frames.PADDED | frames.WITH_PRIORITY) == b"abc"
    assert frames.unpad(b"\x02\0\0", frames.PADDED) == b""


@pytest.mark.parametrize(
    ("payload", "flags", "code"),
    [
        (b"", frames.PADDED, ErrorCode.FRAME_SIZE_ERROR),
        (b"\x03\0\0", frames.PADDED, ErrorCode.PROTOCOL_ERROR),
        (b"\0\0\0\0", frames.WITH_PRIORITY, ErrorCode.PROTOCOL_ERROR),
        (b"\x01\0\0\0\0\0", frames.PADDED | frames.WITH_PRIORITY, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_padding_longer_than_its_frame_is_refused(payload: bytes, flags: int, code: ErrorCode) -> None:
    with pytest.raises(Http2ConnectionError) as caught:
        frames.unpad(payload, flags)
    assert caught.value.code == code


def test_a_number_is_alone_in_its_frame() -> None:
    assert frames.parse_uint32(b"\0\0\1\0", "X") == 256
    for payload in (b"", b"\0\0\1", b"\0\0\1\0\0"):
        with pytest.raises(Http2ConnectionError, match="instead of 4"):
            frames.parse_uint32(payload, "X")
