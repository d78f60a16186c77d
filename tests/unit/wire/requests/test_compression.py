"""Content-Encoding both ways: golden bytes, limits, and what is refused."""

from __future__ import annotations

import gzip
import zlib

import numpy as np
import pytest
from headrace.core.errors import BadRequest, TooLarge
from headrace.core.limits import ClientLimits, Limits
from headrace.wire.requests import compression
from hypothesis import given
from hypothesis import strategies as st

# "headrace" as other tools pack it (stored blocks, so that no compressor's choices matter).
GZIP = bytes.fromhex("1f8b0800000000000003 01 0800 f7ff 6865616472616365 e46e93eb 08000000".replace(" ", ""))
ZLIB = bytes.fromhex("7801 01 0800 f7ff 6865616472616365 0e5b032e".replace(" ", ""))
PLAIN = b"headrace"
LIMIT = 1 << 20
LIMITS = ClientLimits(Limits(max_body_bytes=LIMIT))


def test_the_golden_bytes_match_the_standard_library() -> None:
    # The checksums in them, above all.
    assert gzip.decompress(GZIP) == PLAIN
    assert zlib.decompress(ZLIB) == PLAIN


@pytest.mark.parametrize(
    ("body", "encoding"),
    [(PLAIN, ""), (PLAIN, "identity"), (GZIP, "gzip"), (GZIP, "x-gzip"), (ZLIB, "deflate")],
    ids=str,
)
def test_golden_bodies(body: bytes, encoding: str) -> None:
    assert compression.decompress(body, encoding, LIMITS) == PLAIN


@given(st.binary(max_size=2_000), st.sampled_from(["gzip", "deflate"]))
def test_compressed_bodies_are_read_by_other_decoders(body: bytes, encoding: str) -> None:
    packed = compression.compress([body], encoding)
    assert (gzip.decompress if encoding == "gzip" else zlib.decompress)(packed) == body
    assert compression.decompress(packed, encoding, LIMITS) == body


@given(st.lists(st.binary(max_size=500), min_size=1, max_size=8), st.sampled_from(["gzip", "x-gzip"]))
def test_members_of_gzip_are_one_body_as_for_pythons_reader(parts: list[bytes], encoding: str) -> None:
    packed = b"".join(map(gzip.compress, parts))
    assert compression.decompress(packed, encoding, LIMITS) == gzip.decompress(packed) == b"".join(parts)
    with pytest.raises(BadRequest, match="truncated"):
        compression.decompress(packed[:-1], encoding, LIMITS)
    with pytest.raises(BadRequest, match="2 bytes follow"):
        compression.decompress(packed + b"ab", encoding, LIMITS)


def test_the_limits_hold_for_all_members_together() -> None:
    half = compression.compress([np.random.default_rng(1).bytes(LIMIT // 2)], "gzip")
    assert len(compression.decompress(2 * half, "gzip", LIMITS)) == LIMIT
    with pytest.raises(TooLarge, match="when decompressed"):
        compression.decompress(2 * half + compression.compress([b"x"], "gzip"), "gzip", LIMITS)
    with pytest.raises(BadRequest, match="members of gzip"):
        compression.decompress(10_000 * compression.compress([b""], "gzip"), "gzip", LIMITS)


@pytest.mark.parametrize("encoding", ["br", "zstd", "x-deflate", "compress", "gzip, gzip", "x" * 10**6])
def test_an_unknown_encoding_is_refused(encoding: str) -> None:
    with pytest.raises(BadRequest, match="is not supported: send gzip, deflate or identity") as caught:
        compression.decompress(PLAIN, encoding, LIMITS)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda body: b"", "are truncated"),
        (lambda body: body[:-1], "are truncated"),
        (lambda body: body[:3], "are truncated"),
        (lambda body: b"\x00" + body, "is not valid"),
        (lambda body: body[:-8] + bytes(8), "is not valid"),
        (lambda body: body + b"more", "4 bytes follow"),
    ],
    ids=["empty", "last byte missing", "cut", "no header", "wrong checksum", "something behind"],
)
def test_damaged_bodies_are_refused(encoding: str, damage: object, message: str) -> None:
    assert callable(damage)
    body = damage(compression.compress([PLAIN * 20], encoding))
    with pytest.raises(BadRequest, match=message):
        compression.decompress(body, encoding, LIMITS)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_the_limit_is_of_the_unpacked_size(encoding: str) -> None:
    at_limit = compression.compress([bytes(LIMIT)], encoding)
    assert len(compression.decompress(at_limit, encoding, LIMITS)) == LIMIT
    with pytest.raises(TooLarge, match=f"larger than {LIMIT} bytes when decompressed"):
        compression.decompress(compression.compress([bytes(LIMIT + 1)], encoding), encoding, LIMITS)


def test_a_bomb_is_not_unpacked_beyond_the_limit() -> None:
    import tracemalloc

    bomb = compression.compress([bytes(200 << 20)], "gzip")
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            compression.decompress(bomb, "gzip", LIMITS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * LIMIT


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("", ""),
        ("identity", ""),
        ("br", ""),
        ("gzip", "gzip"),
        ("GZip", "gzip"),
        ("deflate", "deflate"),
        ("br, gzip;q=0.5", "gzip"),
        ("gzip;q=0, deflate", "deflate"),
        ("gzip; q=0.0", ""),
        ("gzip;q=0.000,deflate;q=0", ""),
        ("deflate, gzip", "deflate"),
        (",,;,", ""),
        ("gzip;q=0.2, deflate;q=0.9", "deflate"),
        ("gzip;q=0.2;x=1,deflate;q=0.1", "gzip"),
        ("gzip;q=0.5, identity;q=0.8", ""),
        ("identity;q=0.5, gzip; q = 0.5", "gzip"),
        ("identity, gzip", "gzip"),
        ("gzip;q=2, deflate;q=0.1", "deflate"),
        ("*", ""),
        ("*;q=0.5, gzip", "gzip"),
        ("gzip;q=0.1, *;q=0.9", ""),
        ("identity;q=0, *", "gzip"),
        ("identity;q=0, gzip;q=0, *;q=0.1", "deflate"),
        ("identity;q=0", ""),
        ("*;q=0", ""),
        ("*;q=0, deflate", "deflate"),
    ],
)
def test_choosing_an_encoding(accepted: str, encoding: str) -> None:
    assert compression.select_encoding(accepted) == encoding


@pytest.mark.parametrize(
    ("accepted", "encoding"), [("gzip", ""), ("gzip, identity;q=0", "gzip"), ("*;q=0, gzip", "gzip")]
)
def test_small_answers_are_compressed_for_clients_that_refuse_identity(accepted: str, encoding: str) -> None:
    assert compression.select_encoding(accepted, 10) == encoding


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("kind", ["random", "zeros", "both"])
def test_bodies_of_several_steps(encoding: str, kind: str) -> None:
    limits = ClientLimits(Limits(max_body_bytes=8 << 20, max_unpack_ratio=10_000))
    random = np.random.default_rng(1).integers(0, 256, 3_500_000, np.uint8).tobytes()
    plain = {"random": random, "zeros": bytes(8 << 20), "both": random + bytes(3 << 20) + random[:1_000_000]}[kind]
    packed = compression.compress([plain], encoding)
    assert compression.decompress(packed, encoding, limits) == plain
    assert compression.decompress(np.frombuffer(packed, np.uint8), encoding, limits) == plain
    with pytest.raises(BadRequest, match="truncated"):
        compression.decompress(packed[:-1], encoding, limits)
    with pytest.raises(BadRequest, match="3000001 bytes follow"):
        compression.decompress(packed + bytes(3_000_001), encoding, limits)
    with pytest.raises(TooLarge, match="larger than"):
        compression.decompress(compression.compress([plain + bytes(8 << 20)], encoding), encoding, limits)
