"""Attacks by frames of HTTP/2 whose cost depends on their content (attacks 8 and 9 of the second table in docs/security.md)."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack

import pytest
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import ErrorCode, Setting, encode, encode_integer

from tests.support.attacks import FLAT_BYTES, SERVICE, Attacked, watched
from tests.support.http2_peer import RawPeer, data, grpc_head, message, request

INFER = SERVICE + "ModelInfer"
IDLE_STREAMS = 1000
# The server may close before all is sent.
CLOSED = (BrokenPipeError, ConnectionResetError)


def flood(peer: RawPeer, parts: Iterable[bytes], most_s: float = 3.0) -> ErrorCode | None:
    """Send all parts, or as many as the server takes in a time; returns the code of its GOAWAY, None for none."""
    end_s = time.monotonic() + most_s
    peer.socket.settimeout(most_s)
    try:
        for part in parts:
            peer.send(part)
            if time.monotonic() > end_s:
                break
    except (*CLOSED, TimeoutError):
        pass
    try:
        return peer.end()
    except (*CLOSED, TimeoutError):
        return None


def settings_flood() -> bytes:
    """A SETTINGS frame of 5,400 entries that change the windows of all streams."""
    entries = b"".join(struct.pack(">HI", Setting.INITIAL_WINDOW_SIZE, 1000 + number) for number in range(5400))
    return frames.frame(frames.SETTINGS, 0, 0, entries)


def test_settings_that_change_the_windows_of_idle_streams(attacked: Attacked) -> None:
    """One frame stalled the event loop for 0.58 s, ten for 4.5 s."""
    with watched(attacked, "S8 SETTINGS entries") as watch, RawPeer(attacked.server.grpc_port) as peer:
        head = grpc_head(INFER)
        peer.send(*[request(2 * number + 1, end=False, fields=head) for number in range(IDLE_STREAMS)])
        code = flood(peer, [settings_flood()] * 100, most_s=60.0)  # eight would do, but time refills the budget
        assert code == ErrorCode.ENHANCE_YOUR_CALM
    watch.check()
    attacked.still_serves()


BLOCKS = {
    "references": b"\x82" * 32_000,
    "references to a large entry": b"\xbe" * 16_000,
    "references below the bound": b"\x82" * 1500,
    "empty fields": b"\0\0\0" * 10_000,
    "Huffman code": encode(grpc_head(INFER)) + b"\0\x01x" + encode_integer(30_000, 0x80, 0x7F) + b"\x1c\x64" * 15_000,
    "changes of the table size": b"\x20" * 16_000,
    "a long value": encode([*grpc_head(INFER), (b"x", b"y" * 15_000)]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_header_blocks_that_are_expensive_to_decode(attacked: Attacked, name: str) -> None:
    """32,000 references in one byte each kept the event loop busy at no cost: the median of liveness was 2.3 s."""
    block = BLOCKS[name]

    def blocks() -> Iterable[bytes]:
        if "entry" in name:  # into the dynamic table
            entry = b"\x40\x01x" + encode_integer(4000, 0, 0x7F) + b"v" * 4000
            yield headers(1, encode(grpc_head(INFER)) + entry)
        for stream_id in range(3, 40_001, 2):
            yield headers(stream_id, block)

    with watched(attacked, f"S9 header blocks: {name}") as watch, RawPeer(attacked.server.grpc_port) as peer:
        code = flood(peer, blocks())
        table = name == "changes of the table size"
        assert code in (ErrorCode.COMPRESSION_ERROR if table else ErrorCode.ENHANCE_YOUR_CALM, None)
    watch.check(FLAT_BYTES)
    attacked.still_serves()


def headers(stream_id: int, block: bytes) -> bytes:
    """A header block that ends its request, in frames of the size that every server takes."""
    parts = [block[at : at + 16_384] for at in range(0, len(block), 16_384)]
    result = b""
    for number, part in enumerate(parts):
        kind = frames.CONTINUATION if number else frames.HEADERS
        flags = (0 if number else frames.END_STREAM) | (frames.END_HEADERS if number == len(parts) - 1 else 0)
        result += frames.frame(kind, flags, stream_id, part)
    return result


FLOODS = {
    "PING": frames.ping(b"\0" * 8, ack=False),
    "SETTINGS": frames.settings({}),
    "PRIORITY": frames.frame(frames.PRIORITY, 0, 1, b"\0" * 5),
    "WINDOW_UPDATE": frames.window_update(1, 1),
    "empty DATA": data(1, b""),
    "padded DATA": frames.frame(frames.DATA, frames.PADDED, 1, b"\x02\0\0"),
    "GOAWAY": frames.goaway(0, ErrorCode.NO_ERROR),
    "RST_STREAM": frames.rst_stream(3, ErrorCode.CANCEL),
    "unknown": frames.frame(0x77, 0, 0, b"x"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_of_frames_without_work(attacked: Attacked, name: str) -> None:
    with watched(attacked, f"S8 flood of {name}") as watch, RawPeer(attacked.server.grpc_port) as peer:
        peer.send(*[request(stream_id, end=False, fields=grpc_head(INFER)) for stream_id in (1, 3)])
        code = flood(peer, (FLOODS[name] * 1000 for _ in range(400)))
        assert code in (ErrorCode.ENHANCE_YOUR_CALM, None)  # None: cut before it was read
    watch.check()
    attacked.still_serves()


def test_rapid_resets(attacked: Attacked) -> None:
    """CVE-2023-44487, with whole calls: each starts its method."""
    call = message(b"")

    def calls() -> Iterable[bytes]:
        for first in range(1, 100_000, 200):
            yield b"".join(
                request(stream_id, end=False, fields=grpc_head(INFER))
                + data(stream_id, call, end=True)
                + frames.rst_stream(stream_id, ErrorCode.CANCEL)
                for stream_id in range(first, first + 200, 2)
            )

    with watched(attacked, "S8 rapid resets") as watch, RawPeer(attacked.server.grpc_port) as peer:
        flood(peer, calls())
    watch.check()
    attacked.still_serves()


def test_thousands_of_calls_with_one_deadline(attacked: Attacked) -> None:
    """They end in several iterations of the event loop."""
    fields = grpc_head(INFER, (b"grpc-timeout", b"1S"))
    with watched(attacked, "S8 calls with one deadline") as watch, ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(attacked.server.grpc_port)) for _ in range(8)]
        for peer in peers:
            peer.send(*[request(2 * number + 1, end=False, fields=fields) for number in range(IDLE_STREAMS)])
        for peer in peers:
            assert peer.trailers(1)["grpc-status"] == "4"  # DEADLINE_EXCEEDED
    watch.check(FLAT_BYTES)
    attacked.still_serves()
