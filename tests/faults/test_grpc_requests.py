"""Requests that no gRPC client sends, as bytes to the server: each is answered, and its connection goes on."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import ErrorCode, HeaderField

from tests.support.grpc_echo import EchoServer, echo_server
from tests.support.http2_peer import RawPeer, data, grpc_head, message, request


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with echo_server() as running:
        yield running


ODD: dict[str, tuple[list[HeaderField], bytes, dict[str, str]]] = {
    "unknown encoding": (
        grpc_head("/test.Echo/Echo", (b"grpc-encoding", b"br")),
        message(b"x", 1),
        {"grpc-status": "12", "grpc-accept-encoding": "identity, deflate, gzip"},
    ),
    "compressed without an encoding": (grpc_head(), message(b"x", 1), {"grpc-status": "3"}),
    "an unknown flag": (grpc_head(), message(b"x", 2), {"grpc-status": "3"}),
    "no gzip": (
        grpc_head("/test.Echo/Echo", (b"grpc-encoding", b"gzip")),
        message(b"no gzip", 1),
        {"grpc-status": "3"},
    ),
    "no message": (grpc_head(), b"", {"grpc-status": "3"}),
    "half a prefix": (grpc_head(), b"\0\0\0", {"grpc-status": "3"}),
    "half a message": (grpc_head(), message(b"abcdef")[:-1], {"grpc-status": "3"}),
    "two messages": (grpc_head(), message(b"a") + message(b"b"), {"grpc-status": "3"}),
    "half a message on a stream": (grpc_head("/test.Echo/Chat"), message(b"abcdef")[:-1], {"grpc-status": "3"}),
    "too large": (grpc_head(), struct.pack(">BI", 0, 2**32 - 1), {"grpc-status": "8"}),
    "another content type": ([*grpc_head()[:4], (b"content-type", b"application/json")], b"{}", {":status": "415"}),
    "grpc-web": ([*grpc_head()[:4], (b"content-type", b"application/grpc-web")], b"", {":status": "415"}),
    "no content type": (grpc_head()[:-1], b"", {":status": "415"}),
    "GET": ([(b":method", b"GET"), *grpc_head()[1:]], b"", {":status": "405"}),
    "no te": ([field for field in grpc_head() if field[0] != b"te"], message(b""), {"grpc-status": "3"}),
    "a content type with a suffix": (
        [*grpc_head()[:-1], (b"content-type", b"application/grpc+proto")],
        message(b"x"),
        {"grpc-status": "0", ":status": "200", "content-type": "application/grpc"},
    ),
    "a time-out in bad form": (
        grpc_head("/test.Echo/Echo", (b"grpc-timeout", b"1e3S")),
        message(b""),
        {"grpc-status": "3"},
    ),
    "a time-out of nine digits": (
        grpc_head("/test.Echo/Echo", (b"grpc-timeout", b"123456789n")),
        message(b""),
        {"grpc-status": "3"},
    ),
    "a time-out of ages": (
        grpc_head("/test.Echo/Echo", (b"grpc-timeout", b"99999999H")),
        message(b""),
        {"grpc-status": "0"},
    ),
    "no time at all": (grpc_head("/test.Echo/Wait", (b"grpc-timeout", b"0n")), message(b""), {"grpc-status": "4"}),
    "a right content-length": (
        grpc_head("/test.Echo/Echo", (b"content-length", b"6")),
        message(b"x"),
        {"grpc-status": "0"},
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_are_answered_and_the_connection_stays_open(server: EchoServer, name: str) -> None:
    fields, body, expected = ODD[name]
    with RawPeer(server.port) as peer:
        for stream_id in (1, 3):
            peer.send(request(stream_id, end=False, fields=fields), data(stream_id, body, end=True))
            result = peer.trailers(stream_id)
            assert result | expected == result
        peer.send(request(5, end=False, fields=grpc_head()), data(5, message(b"fine"), end=True))
        assert peer.until(frames.DATA).payload == message(b"fine")


def test_a_request_that_is_not_grpc_is_answered_with_one_line_of_text(server: EchoServer) -> None:
    fields = [(b":method", b"GET"), *grpc_head()[1:]]
    with RawPeer(server.port) as peer:
        peer.send(request(1, fields=fields))
        assert b"this port serves gRPC" in peer.until(frames.DATA).payload
        assert peer.until(frames.DATA) == (frames.DATA, frames.END_STREAM, 1, b"")
        peer.send(request(3, fields=[(b":method", b"HEAD"), *grpc_head()[1:]]))
        assert peer.until(frames.DATA) == (frames.DATA, frames.END_STREAM, 3, b"")
        # A large body is not read to its end, and a wrong content-length is an error of the stream.
        peer.send(request(5, end=False, fields=grpc_head()[:-1]), *[data(5, b"x" * 16384)] * 5)
        assert peer.until(frames.HEADERS).stream_id == 5
        assert peer.until(frames.RST_STREAM) == (frames.RST_STREAM, 0, 5, struct.pack(">I", ErrorCode.NO_ERROR))
        peer.send(request(7, end=False, fields=[*fields, (b"content-length", b"3")]), data(7, b"four"))
        assert peer.until(frames.RST_STREAM).code == ErrorCode.PROTOCOL_ERROR
        peer.send(request(9, end=False, fields=grpc_head()), data(9, message(b"fine"), end=True))
        assert peer.until(frames.DATA).payload == message(b"fine")


MALFORMED: dict[str, list[HeaderField]] = {
    "upper case": [*grpc_head(), (b"Upper", b"x")],
    "a header of HTTP/1": [*grpc_head(), (b"connection", b"close")],
    "a te that is none": [*grpc_head()[:3], (b"te", b"gzip"), (b"content-type", b"application/grpc")],
    "a pseudo-header behind others": [*grpc_head(), (b":authority", b"x")],
    "a pseudo-header twice": [(b":path", b"/"), *grpc_head()],
    "an unknown pseudo-header": [(b":status", b"200"), *grpc_head()],
    "no path": [*grpc_head()[:2], *grpc_head()[3:]],
    "a value with a line end": [*grpc_head(), (b"x", b"a\r\nb: c")],
    "a path with a line end": grpc_head("/test\n/Echo"),
    "a name with a space": [*grpc_head(), (b"a b", b"c")],
    "a content-length that is none": [*grpc_head(), (b"content-length", b"-1")],
    "a wrong content-length": [*grpc_head(), (b"content-length", b"7")],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_reset_and_the_connection_stays_open(server: EchoServer, name: str) -> None:
    with RawPeer(server.port) as peer:
        peer.send(request(1, end=False, fields=MALFORMED[name]), data(1, message(b"x"), end=True))
        assert peer.until(frames.RST_STREAM).code == ErrorCode.PROTOCOL_ERROR
        peer.send(request(3, end=False, fields=grpc_head()), data(3, message(b"fine"), end=True))
        assert peer.until(frames.DATA).payload == message(b"fine")


def test_a_message_in_crumbs_and_messages_in_one_frame(server: EchoServer) -> None:
    with RawPeer(server.port) as peer:
        whole = message(b"hello, crumbs")
        peer.send(request(1, end=False, fields=grpc_head()), *(data(1, whole[n : n + 1]) for n in range(len(whole))))
        peer.send(frames.frame(frames.DATA, frames.PADDED, 1, b"\x05" + bytes(5)), data(1, b"", end=True))
        assert peer.until(frames.DATA).payload == whole
        many = b"".join(message(b"%d" % number) for number in range(100))
        peer.send(request(3, end=False, fields=grpc_head("/test.Echo/Chat")), data(3, many, end=True))
        got = b""
        while len(got) < len(many):
            got += peer.until(frames.DATA).payload
        assert got == many


def test_an_unused_body_is_stopped(server: EchoServer) -> None:
    with RawPeer(server.port) as peer:
        peer.send(request(1, end=False, fields=grpc_head("/test.Echo/None")), data(1, bytes(5000)))
        assert peer.trailers(1)["grpc-status"] == "12"
        assert peer.until(frames.RST_STREAM).code == ErrorCode.NO_ERROR
        peer.send(data(1, bytes(5000), end=True))
        peer.send(request(3, end=False, fields=grpc_head()), data(3, message(b"fine"), end=True))
        assert peer.until(frames.DATA).payload == message(b"fine")


def test_refusals_carry_a_retry_delay(server: EchoServer) -> None:
    with RawPeer(server.port) as peer:
        peer.send(request(1, end=False, fields=grpc_head("/test.Echo/Overloaded")), data(1, message(b""), end=True))
        result = peer.trailers(1)
        assert (result["grpc-status"], result["grpc-message"], result["retry-after"]) == ("14", "come back later", "3")
