"""Attacks by many: requests that are each within the limits, and too much together (line 25 of the table in docs/security.md)."""

from __future__ import annotations

import gzip
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from headrace.wire.http2 import frames
from tritonclient.grpc import service_pb2

from tests.support.attacks import SERVICE, Attacked, Wire, attack, busy_request, grpc_request, head, http_body, is_idle
from tests.support.http2_peer import RawPeer, grpc_head, message, request
from tests.support.http2_peer import data as data_frame
from tests.support.waiting import until

pb: Any = service_pb2
INFER = SERVICE + "ModelInfer"
LOAD_PATH = "/v2/repository/models/affine/load"
LIMIT = "max_total_body_bytes"
TOTAL_BYTES = 4 << 20
BODY_BYTES = 900 << 10
HOGS = 4  # leave less room than one more of them needs
NAP_STEPS = 2_000


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server with room for four and a half of the bodies that are sent here."""
    options = ("--max-body-bytes", str(1 << 20), "--max-total-body-bytes", str(TOTAL_BYTES))
    with attack(tmp_path_factory.mktemp("small"), *options) as server:
        yield server
        until(lambda: held_bytes(server) == 0)


def held_bytes(server: Attacked) -> float:
    """Of all bodies, by the metrics."""
    (size,) = server.samples("headrace_body_bytes")
    return size


@contextmanager
def hogs(server: Attacked, path: str = "/v2/models/affine/infer", chunked: bool = False) -> Iterator[list[Wire]]:
    """Connections that send all of a body but its last byte; then everything must be given back."""
    body = bytes(BODY_BYTES - 1)
    with ExitStack() as stack:
        wires = [stack.enter_context(server.connect()) for _ in range(HOGS)]
        for wire in wires:
            if chunked:
                wire.pour([head(path, "Transfer-Encoding: chunked"), b"%x\r\n" % (len(body) + 1), body])
            else:
                wire.pour([head(path, f"Content-Length: {BODY_BYTES}"), body])
        until(lambda: held_bytes(server) == HOGS * len(body))
        yield wires
    until(lambda: held_bytes(server) == 0)


@contextmanager
def counted(server: Attacked, protocol: str, times: int) -> Iterator[None]:
    """The limit is met so often."""
    before = server.reached(LIMIT, protocol)
    yield
    assert server.reached(LIMIT, protocol) - before == times


def large_message(request_id: str = "") -> bytes:
    """A good request for `row_sums`, of the size of a hog."""
    created = pb.ModelInferRequest(model_name="row_sums", id=request_id, raw_input_contents=[bytes(BODY_BYTES)])
    created.inputs.add(name="X", datatype="FP32", shape=[1, BODY_BYTES // 4])
    return bytes(created.SerializeToString())


@pytest.mark.parametrize("path", ["/v2/models/affine/infer", LOAD_PATH])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_bodies_that_are_too_much_together(small: Attacked, path: str, chunked: bool) -> None:
    with hogs(small, path, chunked) as wires:
        small.still_serves()  # what is small has room
        with counted(small, "http", 2):
            status, headers, content = small.server.request("POST", "/v2/models/affine/infer", bytes(BODY_BYTES))
            assert (status, headers["retry-after"]) == (503, "1")
            assert b"together" in content
            with small.connect() as wire:
                wire.pour([head(path, "Transfer-Encoding: chunked"), b"%x\r\n" % BODY_BYTES, bytes(BODY_BYTES)])
                assert wire.answer()[0] == 503
        wires[0].pour([b"x\r\n0\r\n\r\n" if chunked else b"x"])
        assert wires[0].answer()[0] == 400  # it is no request after all
        until(lambda: held_bytes(small) == (HOGS - 1) * (BODY_BYTES - 1))
        assert small.infer(bytes(BODY_BYTES))[0] == 400
        assert held_bytes(small) == (HOGS - 1) * (BODY_BYTES - 1)
    small.still_serves()


def test_a_large_body_that_would_not_fit_is_refused_before_it_is_sent(small: Attacked) -> None:
    with hogs(small), counted(small, "http", 1), small.connect() as wire:
        wire.pour([head("/v2/models/affine/infer", f"Content-Length: {BODY_BYTES}")])
        status, text = wire.answer()
        assert (status, "together" in text) == (503, True)
        assert wire.closed()


def test_a_packed_body_that_has_no_room_unpacked(small: Attacked) -> None:
    with hogs(small), counted(small, "http", 1):
        status, text = small.infer(gzip.compress(bytes(BODY_BYTES)), Content_Encoding="gzip")
        assert (status, "together" in text) == (503, True)


def test_the_rest_of_a_refused_body_is_not_stored(small: Attacked) -> None:
    """The answer comes with the headers; what is sent all the same is read away, and the connection goes on."""
    with small.connect() as wire:
        for _ in range(3):
            wire.pour([head("/v2/models/nobody/infer", f"Content-Length: {BODY_BYTES}")])
            assert wire.answer()[0] == 404
            wire.pour([bytes(BODY_BYTES // 2)])
            assert held_bytes(small) == 0
            wire.pour([bytes(BODY_BYTES - BODY_BYTES // 2)])
        body = http_body()
        wire.pour([head("/v2/models/affine/infer", f"Content-Length: {len(body)}") + body])
        assert wire.answer() == (200, "")
    with small.flat_memory(24 << 20), ExitStack() as stack:
        wires = [stack.enter_context(small.connect()) for _ in range(60)]
        for wire in wires:
            wire.pour([head("/v2/models/nobody/infer", f"Content-Length: {BODY_BYTES}")])
            assert wire.answer()[0] == 404
            wire.pour([bytes(BODY_BYTES - 1)])


def test_pipelined_requests_of_a_disconnecting_client(small: Attacked) -> None:
    """One computes, the others wait behind it on the same connection: none will ever be served."""
    first = http_body({"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [20 * NAP_STEPS]})
    second = http_body()
    row = [head("/v2/models/busy/infer", f"Content-Length: {len(first)}") + first]
    row += [head("/v2/models/affine/infer", f"Content-Length: {len(second)}") + second] * 7  # more would not be parsed
    with small.connect() as wire:
        wire.pour([b"".join(row)])
        until(lambda: held_bytes(small) == len(first) + 7 * len(second))
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
    until(lambda: held_bytes(small) == 0 and is_idle(small, "busy"))


def test_calls_that_have_no_room(small: Attacked) -> None:
    """The room is one for both protocols; what is small has room, and calls have it again when others have left."""
    with small.channel() as channel:
        infer = channel.unary_unary(INFER)
        with hogs(small), counted(small, "grpc", 1):
            with pytest.raises(grpc.RpcError) as caught:
                infer(large_message(), timeout=30)
            assert (caught.value.code(), "together" in caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, True)
            assert dict(caught.value.trailing_metadata())["retry-after"] == "1"
            infer(grpc_request().SerializeToString(), timeout=30)
        infer(large_message(), timeout=30)
        infer(large_message(), timeout=30, compression=grpc.Compression.Gzip)
    until(lambda: held_bytes(small) == 0)


def test_a_message_of_a_stream_that_has_no_room(small: Attacked) -> None:
    """The stream ends where the room does."""
    with small.channel() as channel:
        stream = channel.stream_stream(SERVICE + "ModelStreamInfer")
        with hogs(small), counted(small, "grpc", 1):
            answers = stream(iter([large_message("large"), grpc_request(id="small").SerializeToString()]), timeout=30)
            with pytest.raises(grpc.RpcError) as caught:
                list(answers)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        served = [_answer(each) for each in stream(iter([large_message("a"), large_message("b")]), timeout=30)]
        assert {each.infer_response.id for each in served if not each.error_message} == {"a", "b"}
    until(lambda: held_bytes(small) == 0)


def _answer(content: bytes) -> Any:
    return pb.ModelStreamInferResponse.FromString(content)


def test_disconnecting_callers_release_their_memory(small: Attacked) -> None:
    """Calls and streams that are cancelled on the way, in the queue and in execution."""
    # Without the cancellation all of them would take 14 s.
    content = busy_request(10 * NAP_STEPS).SerializeToString()
    with small.channel() as channel:
        infer = channel.unary_unary(INFER)
        for _ in range(5):
            until(lambda: held_bytes(small) == 0)  # else all calls may be refused, and none holds any
            futures = [infer.future(content, timeout=30) for _ in range(20)]
            streams = [
                channel.stream_stream(SERVICE + "ModelStreamInfer")(iter([content, large_message(), content]))
                for _ in range(3)
            ]
            until(lambda: held_bytes(small) > len(content))
            for call in (*futures, *streams):
                call.cancel()
    until(lambda: held_bytes(small) == 0)
    until(lambda: is_idle(small, "busy"))
    small.still_serves()


def test_messages_that_are_started_and_reset(small: Attacked) -> None:
    """Before a method has begun there is only the stream of HTTP/2 to give them back."""
    part = bytes(BODY_BYTES - 1)
    for method in ("ModelInfer", "ModelStreamInfer"):
        with RawPeer(small.server.grpc_port) as peer:
            start = request(1, end=False, fields=grpc_head(SERVICE + method))
            peer.send(start + data_frame(1, struct.pack(">BI", 0, BODY_BYTES)))
            peer.pour(1, part)
            until(lambda: held_bytes(small) >= len(part))
        until(lambda: held_bytes(small) == 0)
        with RawPeer(small.server.grpc_port) as peer:  # whole, and called off in the same breath
            start = request(1, end=False, fields=grpc_head(SERVICE + method))
            whole = data_frame(1, message(grpc_request().SerializeToString()), end=True)
            peer.send(start + whole + frames.rst_stream(1, frames.ErrorCode.CANCEL))
            ping = frames.FRAME_HEADER.pack(8 << 8 | frames.PING, 0, 0) + bytes(8)
            peer.send(ping)
            peer.until(frames.PING)
        until(lambda: held_bytes(small) == 0)
