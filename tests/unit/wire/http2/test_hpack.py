"""HPACK: the examples of RFC 7541, comparison with the `hpack` package, invalid blocks."""

from __future__ import annotations

import hpack
import pytest
from headrace.wire.http2.frames import ErrorCode, HeaderCache, HeaderField, HpackDecoder, Http2ConnectionError, encode
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

_LIMIT = 16384


@pytest.mark.parametrize(
    "blocks",
    [
        # RFC 7541, appendix C.3: requests without Huffman coding, one connection.
        [
            "828684410f7777772e6578616d706c652e636f6d",
            "828684be58086e6f2d6361636865",
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        ],
        # Appendix C.4: the same with Huffman coding.
        [
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            "828684be5886a8eb10649cbf",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        ],
    ],
)
def test_the_examples_of_the_rfc(blocks: list[str]) -> None:
    decoder = HpackDecoder(_LIMIT)
    common: list[HeaderField] = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")]
    site = (b":authority", b"www.example.com")
    assert decoder.decode(bytes.fromhex(blocks[0])) == [*common, site]
    assert decoder.decode(bytes.fromhex(blocks[1])) == [*common, site, (b"cache-control", b"no-cache")]
    assert decoder.decode(bytes.fromhex(blocks[2])) == [
        (b":method", b"GET"),
        (b":scheme", b"https"),
        (b":path", b"/index.html"),
        site,
        (b"custom-key", b"custom-value"),
    ]
    assert decoder.changes == 3


_names = st.sampled_from([b":path", b"te", b"content-type", b"grpc-timeout", b"x-a", b"x-b"])
_values = st.one_of(st.binary(max_size=40), st.sampled_from([b"trailers", b"/", b"application/grpc", b"x" * 1500]))
_lists = st.lists(st.lists(st.tuples(_names, _values, st.booleans()), max_size=6), max_size=12)


@settings(max_examples=examples(150), deadline=None)
@given(_lists, st.booleans(), st.lists(st.integers(0, 4096), max_size=3))
def test_headers_of_another_encoder_are_decoded(
    lists: list[list[tuple[bytes, bytes, bool]]], huffman: bool, sizes: list[int]
) -> None:
    encoder, decoder = hpack.Encoder(), HpackDecoder(1 << 20)
    for number, fields in enumerate(lists):
        if number < len(sizes):
            encoder.header_table_size = sizes[number]
        block = encoder.encode(fields, huffman=huffman)
        assert decoder.decode(block) == [(name, value) for name, value, _ in fields]


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=300))))
def test_encoded_headers_are_decoded_by_others(fields: list[HeaderField]) -> None:
    block = encode(fields)
    assert [(bytes(n), bytes(v)) for n, v in hpack.Decoder(1 << 22).decode(block, raw=True)] == fields
    decoder = HpackDecoder(1 << 22)
    assert decoder.decode(block) == fields
    assert decoder.changes == 0


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=4))
def test_arbitrary_bytes_are_a_compression_error_or_fields(blocks: list[bytes]) -> None:
    decoder, judge = HpackDecoder(_LIMIT), hpack.Decoder(_LIMIT)
    for block in blocks:
        try:
            expected = [(bytes(n), bytes(v)) for n, v in judge.decode(block, raw=True)]
        except (hpack.HPACKError, UnicodeDecodeError, IndexError):
            expected = None
        try:
            result = decoder.decode(block)
        except Http2ConnectionError as fault:
            assert fault.code == ErrorCode.COMPRESSION_ERROR
            return  # the connection would end here
        if expected is None:
            return
        assert result == expected


def _refused(block: str) -> None:
    with pytest.raises(Http2ConnectionError) as caught:
        HpackDecoder(_LIMIT).decode(bytes.fromhex(block))
    assert caught.value.code == ErrorCode.COMPRESSION_ERROR


@pytest.mark.parametrize(
    "block",
    [
        "80",  # index 0
        "be",  # beyond the static table while the dynamic one is empty
        "ffffffffff0f",  # an integer beyond all tables
        "ff" + "80" * 200 + "01",  # an integer that never ends
        "3fe21f",  # a table of 4097 bytes
        "8220",  # a change of the table's size behind a field
        "202020",  # three changes of the table's size
        "40",  # literal that ends at once
        "4003616263",  # no value
        "40036162630a61",  # value shorter than its declared length
        "0082ffff00",  # Huffman padding longer than 7 bits
    ],
)
def test_broken_blocks_are_refused(block: str) -> None:
    _refused(block)


def test_a_list_beyond_the_limit_is_none_and_updates_the_table() -> None:
    decoder = HpackDecoder(4096)
    large = b"v" * 3000
    first = b"\x40\x01a\x7f" + bytes((0x80 | (3000 - 127) & 0x7F, (3000 - 127) >> 7)) + large
    assert decoder.decode(first) == [(b"a", large)]
    assert decoder.decode(b"\xbe" * 5) is None
    assert decoder.decode(b"\xbe") == [(b"a", large)]


def test_a_list_far_beyond_the_limit_ends_the_connection_early() -> None:
    decoder = HpackDecoder(4096)
    large = b"v" * 3000
    decoder.decode(b"\x40\x01a\x7f" + bytes((0x80 | (3000 - 127) & 0x7F, (3000 - 127) >> 7)) + large)
    for bomb in (b"\xbe" * 16000, b"\x82" * 16000, b"\0\0\0" * 5000):  # 16 kB that mean 48 MB; 5,000 empty fields
        with pytest.raises(Http2ConnectionError) as caught:
            decoder.decode(bomb)
        assert caught.value.code == ErrorCode.ENHANCE_YOUR_CALM


def test_decoding_costs_by_fields_and_huffman_code() -> None:
    decoder = HpackDecoder(1 << 14)
    decoder.decode(encode([(b":method", b"POST"), (b"te", b"trailers"), (b"x", b"y" * 800)]))
    assert decoder.cost == 0  # of usual size
    decoder.decode(encode([(b"x", b"y" * 10_000)]))
    assert decoder.cost == 0  # literal bytes are copied
    decoder.decode(b"\x82" * 300)
    assert decoder.cost == 300 - 32
    code = bytes.fromhex("1c64") * 2000  # "aaa..." in Huffman code takes longer than plain bytes
    decoder.decode(b"\x00\x01x" + b"\xff" + bytes((0x80 | (4000 - 127) & 0x7F, (4000 - 127) >> 7)) + code)
    assert decoder.cost == 1 + 4000 // 16 - 32


def test_equal_blocks_are_cached_until_the_table_changes() -> None:
    calls: list[list[HeaderField] | None] = []

    def parse(fields: list[HeaderField] | None) -> int:
        calls.append(fields)
        return len(calls)

    cache = HeaderCache(_LIMIT, parse)
    insert_a, insert_b, newest = b"\x40\x01a\x011", b"\x40\x01b\x012", b"\xbe"
    assert cache.decode(insert_a) == 1
    assert insert_a not in cache.entries  # decoding it again would change the table again
    assert cache.decode(newest) == 2
    assert cache.entries[newest] == 2
    assert calls[-1] == [(b"a", b"1")]
    cache.decode(insert_b)
    assert newest not in cache.entries  # the same byte means another field now
    assert cache.decode(newest) == 4
    assert calls[-1] == [(b"b", b"2")]
    cache.decode(b"\x20")  # an empty table
    assert not cache.entries


def test_the_memory_is_bounded() -> None:
    cache = HeaderCache(_LIMIT, lambda fields: fields)
    for number in range(3000):
        cache.decode(encode([(b"x", b"%d" % number)]))
    assert len(cache.entries) <= 128
    cache.decode(encode([(b"x", b"y" * 6000)]))
    assert max(map(len, cache.entries)) > 6000, "a token of kilobytes is decoded once"
    cache.decode(encode([(b"x", b"y" * _LIMIT)]))
    assert max(map(len, cache.entries)) <= _LIMIT
    for number in range(100):
        cache.decode(encode([(b"x", b"%d" % number * 1500)]))
        assert sum(map(len, cache.entries)) <= cache.size_bytes <= 64 << 10
