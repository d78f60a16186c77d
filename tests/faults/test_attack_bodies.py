"""Attacks by what is sent: bodies in crumbs, too large, packed (lines 1 to 3 of the table in docs/security.md)."""

from __future__ import annotations

import gzip
import itertools
import os
import struct
import zlib
from collections.abc import Iterator

import grpc
import pytest
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import ErrorCode

from tests.support.attacks import MAX_BODY_BYTES, SERVICE, Attacked, grpc_request, head, http_body
from tests.support.http2_peer import RawPeer, data, grpc_head, message, request

INFER = SERVICE + "ModelInfer"
INFER_PATH = "/v2/models/affine/infer"
CHUNKED = "Transfer-Encoding: chunked"
MILLION = 1_000_000
CRUMBS = b"1\r\nx\r\n" * 10_000


# --- 1: a million chunks of one byte -------------------------------------------------------------------------------------


def test_a_million_chunks_of_one_byte(attacked: Attacked) -> None:
    with attacked.flat_memory(), attacked.reaches("max_chunks"), attacked.connect() as wire:
        wire.pour(itertools.chain([head(INFER_PATH, CHUNKED)], itertools.repeat(CRUMBS, MILLION // 10_000)))
        status, text = wire.answer()
        assert (status, "65536 chunks" in text) == (413, True)
        assert wire.closed()
    attacked.still_serves()


@pytest.mark.parametrize("path", ["/v2/models/nothing/infer", "/v2/repository/index", "/nothing"])
def test_a_million_chunks_for_an_unknown_route(attacked: Attacked, path: str) -> None:
    with attacked.flat_memory(), attacked.connect() as wire:
        wire.pour(itertools.chain([head(path, CHUNKED)], itertools.repeat(CRUMBS, MILLION // 10_000)))
        assert wire.answer()[0] in (404, 413)
        assert wire.closed()
    attacked.still_serves()


def test_as_many_chunks_as_are_allowed(attacked: Attacked) -> None:
    body = http_body()
    crumbs = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with attacked.connect() as wire:
        assert wire.pour([head(INFER_PATH, CHUNKED), crumbs, b"0\r\n\r\n"])
        assert wire.answer() == (200, "")


@pytest.mark.parametrize(
    ("before", "crumb"),
    [(b"", b"1;" + b"x" * 8000 + b"\r\ny\r\n"), (b"1;", b"x" * 8000), (b"0\r\n", b"X: " + b"y" * 8000 + b"\r\n")],
    ids=["extensions of many chunks", "an extension without end", "trailers without end"],
)
def test_chunk_framing_is_bounded_too(attacked: Attacked, before: bytes, crumb: bytes) -> None:
    with attacked.flat_memory(), attacked.reaches("max_header_bytes"), attacked.connect() as wire:
        wire.pour([head(INFER_PATH, CHUNKED) + before, *[crumb] * 8])
        assert wire.answer()[0] == 431
        assert wire.closed()
    attacked.still_serves()


def test_trailers_are_no_headers(attacked: Attacked) -> None:
    body = http_body()
    trailers = b"Inference-Header-Content-Length: 3\r\nContent-Encoding: gzip\r\n"
    with attacked.connect() as wire:
        wire.pour([head(INFER_PATH, CHUNKED), b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers)])
        assert wire.answer() == (200, "")


def test_a_million_frames_of_one_byte(attacked: Attacked) -> None:
    """gRPC's chunks are DATA frames; either the peer is shown the client_limits, or the message is too large."""
    with attacked.flat_memory(), RawPeer(attacked.server.grpc_port) as peer:
        peer.send(request(1, end=False, fields=grpc_head(INFER)), data(1, struct.pack(">BI", 0, MILLION)))
        crumbs = data(1, b"x") * 10_000
        try:
            for _ in range(MILLION // 10_000):
                peer.send(crumbs)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass  # the client_limits, or no more reading
        assert peer.end() in (ErrorCode.ENHANCE_YOUR_CALM, None)
    attacked.still_serves()


# --- 2: bodies over the limit --------------------------------------------------------------------------------------------


def test_a_declared_body_over_the_limit_is_refused_before_it_is_sent(attacked: Attacked) -> None:
    for size in (MAX_BODY_BYTES + 1, 2**62, 2**63):
        with attacked.flat_memory(), attacked.reaches("max_body_bytes"), attacked.connect() as wire:
            wire.pour([head(INFER_PATH, f"Content-Length: {size}")])
            assert wire.answer()[0] == 413, "nothing of the body was sent"
    attacked.still_serves()


def test_an_undeclared_body_over_the_limit(attacked: Attacked) -> None:
    chunk = b"%x\r\n%s\r\n" % (1 << 20, bytes(1 << 20))
    with attacked.flat_memory(), attacked.reaches("max_body_bytes"), attacked.connect() as wire:
        wire.pour([head(INFER_PATH, CHUNKED), *[chunk] * 13])
        assert wire.answer()[0] == 413
    attacked.still_serves()


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/logging", "/v2/repository/models/affine/load"])
def test_the_control_plane_has_its_own_limits(attacked: Attacked, path: str) -> None:
    body = b'{"x": "' + b"x" * (MAX_BODY_BYTES + 1) + b'"}'
    assert attacked.post(path, body)[0] == 413
    attacked.still_serves()


@pytest.mark.parametrize("method", ["ModelInfer", "RepositoryModelLoad", "ModelConfig"])
def test_a_message_over_the_limit(attacked: Attacked, method: str) -> None:
    with attacked.flat_memory(), attacked.reaches("max_body_bytes", "grpc"):
        code, text = attacked.call(bytes(MAX_BODY_BYTES + 1), method)
        assert (code, str(MAX_BODY_BYTES) in text) == ("RESOURCE_EXHAUSTED", True)


def test_a_message_over_the_limit_in_a_stream(attacked: Attacked) -> None:
    with attacked.flat_memory(), attacked.channel() as channel:
        call = channel.stream_stream(SERVICE + "ModelStreamInfer")(iter([bytes(MAX_BODY_BYTES + 1)]), timeout=20)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    attacked.still_serves()


def test_a_message_that_is_only_announced(attacked: Attacked) -> None:
    """Four gigabytes promised by five bytes, on a hundred streams at once."""
    with attacked.flat_memory(), RawPeer(attacked.server.grpc_port) as peer:
        for stream in range(1, 200, 2):
            peer.send(
                request(stream, end=False, fields=grpc_head(INFER)), data(stream, struct.pack(">BI", 0, 2**32 - 1))
            )
        assert peer.trailers(1)["grpc-status"] == "8"  # RESOURCE_EXHAUSTED
    attacked.still_serves()


def test_messages_that_are_started_and_reset(attacked: Attacked) -> None:
    """Most of a large message, with an hour's deadline, then a reset: half a gigabyte one after the other."""
    part = bytes(6 << 20)
    with attacked.flat_memory():
        for _ in range(80):
            with RawPeer(attacked.server.grpc_port) as peer:
                fields = grpc_head(INFER, (b"grpc-timeout", b"1H"))
                start = request(1, end=False, fields=fields) + data(1, struct.pack(">BI", 0, len(part) + 1))
                peer.send(start)
                peer.pour(1, part)
                peer.send(frames.rst_stream(1, ErrorCode.CANCEL))
    attacked.still_serves()


# --- 3: bombs, and packed bodies that are damaged ------------------------------------------------------------------------


def bombs() -> Iterator[tuple[str, bytes]]:
    zeros = bytes(256 << 20)
    yield "gzip", gzip.compress(zeros, 9)
    yield "deflate", zlib.compress(zeros, 9)


def test_a_bomb(attacked: Attacked) -> None:
    for encoding, bomb in bombs():
        assert len(bomb) < 300_000
        with attacked.flat_memory(), attacked.reaches("max_body_bytes", times=20):
            for _ in range(20):
                status, text = attacked.infer(bomb, Content_Encoding=encoding)
                assert status == 413, text
    attacked.still_serves()


def test_a_body_that_unpacks_to_far_more_than_it_is(attacked: Attacked) -> None:
    small_bomb = gzip.compress(bytes(4 << 20), 9)
    with attacked.reaches("max_unpack_ratio"):
        status, text = attacked.infer(small_bomb, Content_Encoding="gzip")
    assert (status, "200 times" in text) == (413, True)


def test_a_valid_body_of_zeros_is_accepted(attacked: Attacked) -> None:
    columns = 200_000
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, columns], "parameters": {"binary_data_size": 4 * columns}}
    header = http_body(tensor)
    body = gzip.compress(header + bytes(4 * columns))
    lengths = {"Content_Encoding": "gzip", "Inference_Header_Content_Length": str(len(header))}
    assert attacked.infer(body, "row_sums", **lengths) == (200, "")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_damaged_compressed_bodies_leak_nothing(attacked: Attacked, encoding: str) -> None:
    plain = http_body(id=os.urandom(1 << 20).hex())
    whole = gzip.compress(plain, 1) if encoding == "gzip" else zlib.compress(plain, 1)
    middle = len(whole) // 2
    damaged = [
        whole[:-1],
        whole[:middle],
        whole[:middle] + b"\xff" * 64 + whole[middle + 64 :],
        whole + b"x",
        b"",
        b"x",
    ]
    with attacked.flat_memory():
        for turn in range(300):
            status, text = attacked.infer(damaged[turn % len(damaged)], Content_Encoding=encoding)
            assert status == 400, text
    attacked.still_serves()


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_bomb_over_grpc(attacked: Attacked, kind: grpc.Compression) -> None:
    bomb = bytes(256 << 20)
    with attacked.flat_memory():
        code, _ = attacked.call(bomb, compression=kind)
        assert code == "RESOURCE_EXHAUSTED"
    attacked.still_serves()


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_damaged_compressed_messages_leak_nothing(attacked: Attacked, encoding: bytes) -> None:
    plain = grpc_request().SerializeToString() * 1000
    whole = gzip.compress(plain) if encoding == b"gzip" else zlib.compress(plain)
    fields = grpc_head(INFER, (b"grpc-encoding", encoding))
    with attacked.flat_memory(), RawPeer(attacked.server.grpc_port) as peer:
        for turn in range(300):
            stream = 2 * turn + 1
            damaged = (whole[:-5], whole[:9], b"\xff" + whole[1:])[turn % 3]
            peer.send(request(stream, end=False, fields=fields), data(stream, message(damaged, 1), end=True))
            assert peer.trailers(stream)["grpc-status"] in ("3", "8", "13")  # never an answer, never a hang
            if turn % 50 == 49:
                peer.send(frames.ping(b"still ok", ack=False))
    attacked.still_serves()
