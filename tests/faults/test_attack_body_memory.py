"""Attacks on the memory of bodies: responses that are never read, and bodies that stop before their end (S6, S12)."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.wire.http2 import frames
from onnx import TensorProto, helper
from tritonclient.grpc import service_pb2

from loadtest.onnx_models import onnx_model
from tests.support.attacks import SERVICE, Attacked, attack, grpc_request, head, http_body, watched
from tests.support.certificates import Certificates
from tests.support.http2_peer import RawPeer, data, grpc_head, message, request
from tests.support.models import add_model
from tests.support.serving import HOST, INTERPRETER, Server, serving
from tests.support.waiting import at_rest, until

pb: Any = service_pb2
INFER, STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"
ANSWER_BYTES = 16 << 20
TOTAL_BYTES = 64 << 20
BODY_BYTES = 15 << 20
# Memory for responses in execution and for what allocators keep; before the fix it was 2 GB.
ROOM_BYTES = 160 << 20


def zeros() -> onnx.ModelProto:
    """Y FP32: as many zeros as SIZE INT64 (1) says."""
    node = helper.make_node("ConstantOfShape", ["SIZE"], ["Y"])
    return onnx_model([node], {"SIZE": (TensorProto.INT64, (1,))}, {"Y": (TensorProto.FLOAT, ("n",))})


def zeros_request(size_bytes: int) -> bytes:
    """Some 210 bytes for a response of `size_bytes`."""
    tensor = {"name": "SIZE", "datatype": "INT64", "shape": [1], "data": [size_bytes // 4]}
    body = http_body(tensor, outputs=[{"name": "Y", "parameters": {"binary_data": True}}])
    return head("/v2/models/zeros/infer", f"Content-Length: {len(body)}") + body


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server with 64 MiB for all bodies and unread responses."""
    folder = tmp_path_factory.mktemp("bounded")
    add_model(folder / "models", "zeros", zeros())
    options = ("--max-body-bytes", str(16 << 20), "--max-total-body-bytes", str(TOTAL_BYTES))
    with attack(folder, *options, command=INTERPRETER) as server:
        yield server
        until(lambda: server.samples("headrace_body_bytes") == [0.0])


def unread_socket(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect((HOST, port))
    return sock


def unread_bytes(server: Attacked) -> float:
    (size,) = server.samples("headrace_unread_bytes")
    return size


# --- S6: responses that are never read -----------------------------------------------------------------------------------


def test_responses_that_are_never_read_are_bounded(bounded: Attacked) -> None:
    """150 requests of 210 bytes for 16 MB each: the responses stay within the bound, and honest requests are served."""
    with watched(bounded, "S6 unread responses over HTTP") as watch, ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(unread_socket(bounded.server.port)).sendall(zeros_request(ANSWER_BYTES))
        until(lambda: unread_bytes(bounded) > TOTAL_BYTES // 2)
        end_s = time.monotonic() + 2
        while time.monotonic() < end_s:
            assert unread_bytes(bounded) <= TOTAL_BYTES + (1 << 20)
            assert bounded.infer(http_body()) == (200, "")
            assert bounded.call(grpc_request()) == ("OK", "")
        until(lambda: large_answer(bounded) == 200, timeout_s=20)
    watch.check()
    assert watch.peak_bytes - watch.before_bytes < TOTAL_BYTES + ROOM_BYTES
    until(lambda: unread_bytes(bounded) == 0)
    bounded.still_serves()


def large_answer(server: Attacked) -> int:
    """Status of a request for a large response, which is read."""
    _, _, body = zeros_request(ANSWER_BYTES).partition(b"\r\n\r\n")
    return server.server.request("POST", "/v2/models/zeros/infer", body)[0]


def test_a_connection_with_unread_responses_starts_no_inference(bounded: Attacked) -> None:
    def answered() -> float:
        return sum(bounded.samples("headrace_requests_total", model="zeros"))

    before = answered()
    with watched(bounded, "S6 pipelined unread responses") as watch, unread_socket(bounded.server.port) as sock:
        sock.sendall(zeros_request(ANSWER_BYTES) * 100)
        until(lambda: unread_bytes(bounded) > 1 << 20)
        assert at_rest(answered) - before == 1
        received = 0
        while received < 3 * ANSWER_BYTES:
            received += len(sock.recv(1 << 20))
        assert 3 <= answered() - before <= 4
    watch.check()
    until(lambda: unread_bytes(bounded) == 0)
    bounded.still_serves()


def test_unread_responses_over_tls_are_bounded(tmp_path: Path) -> None:
    """The transport of TLS encrypts all that it gets at once, whatever the client reads."""
    certificates = Certificates(tmp_path)
    add_model(tmp_path / "models", "zeros", zeros())
    files = ("--tls-cert", str(certificates.server.certificate), "--tls-key", str(certificates.server.key))
    limits = ("--max-body-bytes", str(16 << 20), "--max-total-body-bytes", str(TOTAL_BYTES))
    context = ssl.create_default_context(cafile=str(certificates.authority))

    def secure(server: Server) -> ssl.SSLSocket:
        return context.wrap_socket(unread_socket(server.port), server_hostname=HOST)

    with serving(
        tmp_path / "models", tmp_path, *files, *limits, "--no-grpc", "--stall-timeout-s", "3", command=INTERPRETER
    ) as server:
        attacked = Attacked(server, tmp_path / "models")
        with secure(server) as sock:
            assert read_answer(sock) == ANSWER_BYTES
        before = attacked.forget_peak()
        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(secure(server)).sendall(zeros_request(ANSWER_BYTES))
            time.sleep(3)
            with secure(server) as sock:
                assert read_answer(sock) == ANSWER_BYTES, "a client that reads is served"
            grown = attacked.peak_bytes() - before
            assert grown < TOTAL_BYTES + ROOM_BYTES, f"{grown >> 20} MiB"
            closed = stack.enter_context(secure(server))
            closed.sendall(zeros_request(ANSWER_BYTES))
            time.sleep(6)  # the time-out of a client that reads nothing
            assert read_size(closed) < ANSWER_BYTES


def read_answer(sock: ssl.SSLSocket) -> int:
    sock.sendall(zeros_request(ANSWER_BYTES))
    return read_size(sock)


def read_size(sock: ssl.SSLSocket) -> int:
    """Size of the binary output of a response; smaller if the server closes before its end."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(65536)
        assert received, "no response"
    head_part, _, rest = received.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head_part.split(b"\r\n")[1:])
    missing = int(lines[b"content-length"]) - len(rest)
    while missing > 0:
        try:
            part = sock.recv(1 << 20)
        except OSError:
            break
        if not part:
            break
        missing -= len(part)
    return int(lines[b"content-length"]) - int(lines[b"inference-header-content-length"]) - max(0, missing)


# --- S12: bodies that stop before their end ------------------------------------------------------------------------------


def row_sums_body(columns: int) -> tuple[tuple[str, ...], bytes]:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, columns], "parameters": {"binary_data_size": 4 * columns}}
    header = http_body(tensor, outputs=[{"name": "SUM"}])
    data = np.zeros(columns, np.float32).tobytes()
    sizes = (f"Content-Length: {len(header) + len(data)}", f"Inference-Header-Content-Length: {len(header)}")
    return sizes, header + data


@pytest.mark.parametrize("path", ["/v2/models/affine/infer", "/v2/repository/models/affine/load"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_bodies_that_stop_before_their_end(bounded: Attacked, path: str, chunked: bool) -> None:
    """Four bodies fill the memory and stop 10 bytes before their end. Small requests are served at once, large ones soon."""
    body = bytes(BODY_BYTES - 10)
    columns = 500_000
    sizes, large = row_sums_body(columns)
    large_request = head("/v2/models/row_sums/infer", *sizes) + large
    with watched(bounded, "S12 bodies that stop before their end") as watch, ExitStack() as stack:
        wires = [stack.enter_context(bounded.connect()) for _ in range(4)]
        for wire in wires:
            if chunked:
                wire.pour([head(path, "Transfer-Encoding: chunked"), b"%x\r\n" % BODY_BYTES, body])
            else:
                wire.pour([head(path, f"Content-Length: {BODY_BYTES}"), body])
        until(lambda: bounded.samples("headrace_body_bytes")[0] >= 4 * len(body))
        seen = set()

        def is_served() -> bool:
            serves_small_requests(bounded)
            with bounded.connect() as wire:
                wire.pour([large_request])
                seen.add(wire.answer()[0])
            return 200 in seen

        until(is_served, timeout_s=20, pause_s=0.1)  # the slowest body gives way
        assert seen <= {200, 503}
        assert bounded.reached("min_body_bytes_per_s") >= 1
        given_way = [wire for wire in wires if has_data(wire.socket)]
        assert given_way
        assert all(wire.answer()[0] == 408 for wire in given_way)
    watch.check()
    until(lambda: bounded.samples("headrace_body_bytes") == [0.0])
    bounded.still_serves()


def serves_small_requests(server: Attacked) -> None:
    """Fail unless small requests of both protocols are answered."""
    assert server.infer(http_body()) == (200, "")
    assert server.call(grpc_request()) == ("OK", "")
    assert server.server.request("GET", "/v2/health/ready")[0] == 200


def has_data(sock: socket.socket) -> bool:
    """Return True if bytes have arrived."""
    sock.settimeout(0.2)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_a_slow_body_is_refused_and_a_steady_one_is_not(bounded: Attacked) -> None:
    """Without any pressure on memory: 20 s below the minimum rate end a request."""
    sizes, large = row_sums_body(30_000)
    request = head("/v2/models/row_sums/infer", *sizes) + large
    with bounded.reaches("min_body_bytes_per_s"), bounded.connect() as slow, bounded.connect() as steady:
        slow.pour([request[:-5000]])
        steady.pour([request[:-100_000]])
        rest, begun_s = request[-100_000:], time.monotonic()
        while rest:
            steady.pour([rest[:2_000]])
            rest = rest[2_000:]
            if not has_data(slow.socket):
                slow.pour([b"\0"] if time.monotonic() < begun_s + 5 else [])
            time.sleep(0.3)
        assert steady.answer() == (200, "")
        slow.socket.settimeout(20)
        status, text = slow.answer()
        assert (status, "more slowly than 1024 bytes per second" in text) == (408, True)
        assert time.monotonic() - begun_s > 15
    bounded.still_serves()


# --- S12 over gRPC -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bounded_grpc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server with 64 MiB for all bodies and unread responses."""
    options = ("--max-body-bytes", str(16 << 20), "--max-total-body-bytes", str(TOTAL_BYTES))
    with attack(tmp_path_factory.mktemp("bounded_grpc"), *options, command=INTERPRETER) as server:
        yield server
        until(lambda: server.samples("headrace_body_bytes") == [0.0])


def incomplete_call(stack: ExitStack, server: Attacked, method: str, size_bytes: int) -> RawPeer:
    """A connection with a call whose message lacks the last 10 bytes."""
    peer = stack.enter_context(RawPeer(server.server.grpc_port))
    peer.send(request(1, end=False, fields=grpc_head(SERVICE + method)), data(1, struct.pack(">BI", 0, size_bytes)))
    peer.pour(1, bytes(size_bytes - 10))
    return peer


def grpc_status(peer: RawPeer) -> str:
    """Status of the call of a connection; "" if it has not ended."""
    peer.socket.settimeout(0.3)
    try:
        return peer.trailers(1)["grpc-status"]
    except TimeoutError:
        return ""


def large_message(columns: int = 500_000) -> Any:
    created = pb.ModelInferRequest(model_name="row_sums", raw_input_contents=[bytes(4 * columns)])
    created.inputs.add(name="X", datatype="FP32", shape=[1, columns])
    created.outputs.add(name="SUM")
    return created


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"])
def test_messages_that_stop_before_their_end(bounded_grpc: Attacked, method: str) -> None:
    """Four messages fill the memory and stop 10 bytes before their end. Small calls are served at once, large ones soon."""
    server = bounded_grpc
    with watched(server, f"S12 messages that stop before their end, {method}") as watch, ExitStack() as stack:
        hits = server.reached("min_body_bytes_per_s", "grpc")
        peers = [incomplete_call(stack, server, method, BODY_BYTES) for _ in range(4)]
        until(lambda: server.samples("headrace_body_bytes")[0] >= 4 * (BODY_BYTES - 10))
        seen, large = set(), large_message()

        def is_served() -> bool:
            serves_small_requests(server)
            seen.add(server.call(large)[0])
            return "OK" in seen

        until(is_served, timeout_s=20, pause_s=0.1)  # the slowest message gives way
        assert seen == {"OK", "UNAVAILABLE"}
        assert server.reached("min_body_bytes_per_s", "grpc") > hits
        assert {grpc_status(peer) for peer in peers} - {""} == {"4"}  # DEADLINE_EXCEEDED
    watch.check(room_bytes=ROOM_BYTES)
    until(lambda: server.samples("headrace_body_bytes") == [0.0])
    server.still_serves()


@pytest.mark.slow
def test_slow_messages_are_refused_and_steady_ones_are_not(bounded: Attacked) -> None:
    """Without any pressure on memory: 20 s below the minimum rate end a unary call and a stream."""
    content = large_message(30_000).SerializeToString()
    body = struct.pack(">BI", 0, len(content)) + content
    port, before = bounded.server.grpc_port, bounded.reached("min_body_bytes_per_s", "grpc")
    with RawPeer(port) as slow_call, RawPeer(port) as slow_stream, RawPeer(port) as steady:
        for peer, method, size in ((slow_call, INFER, 50_000), (slow_stream, STREAM, 50_000), (steady, INFER, 20_000)):
            peer.send(request(1, end=False, fields=grpc_head(method)), *pieces(body[:size]))
        rest, begun_s = body[20_000:], time.monotonic()
        while rest:
            steady.send(data(1, rest[:1_200], end=len(rest) <= 1_200))
            rest = rest[1_200:]
            if time.monotonic() < begun_s + 5:
                slow_call.send(data(1, b"\0"))
                slow_stream.send(data(1, b"\0"))
            time.sleep(0.3)
        assert steady.trailers(1)["grpc-status"] == "0"
        for slow in (slow_call, slow_stream):
            assert slow.trailers(1)["grpc-status"] == "4"
        assert time.monotonic() - begun_s > 20
    assert bounded.reached("min_body_bytes_per_s", "grpc") == before + 2
    bounded.still_serves()


def pieces(content: bytes) -> list[bytes]:
    """DATA frames of the default frame size on stream 1."""
    return [data(1, content[start : start + 16384]) for start in range(0, len(content), 16384)]


# --- Messages without content --------------------------------------------------------------------------------------------

EMPTY_MESSAGES = message(b"") * 24_000


def open_stream(peer: RawPeer, stream_id: int, path: str) -> None:
    """Open a stream and send 24,000 empty messages, in 120 KB."""
    parts = [EMPTY_MESSAGES[start : start + 16384] for start in range(0, len(EMPTY_MESSAGES), 16384)]
    peer.send(request(stream_id, end=False, fields=grpc_head(path)), *(data(stream_id, part) for part in parts))


def test_messages_without_content_count_with_their_memory(bounded: Attacked) -> None:
    """An empty message has 5 bytes on the wire and some 64 in memory: 240 streams were counted as 28 MB and held 500."""
    with watched(bounded, "S28 messages without content that are not read") as watch, ExitStack() as stack:
        counted = []
        for _ in range(4):
            peer = stack.enter_context(RawPeer(bounded.server.grpc_port))
            for stream_id in range(1, 121, 2):
                open_stream(peer, stream_id, STREAM)
            counted += bounded.samples("headrace_body_bytes")  # later, slow streams have given way
        until(lambda: max(counted + bounded.samples("headrace_body_bytes")) > TOTAL_BYTES // 2)
        at_rest(bounded.peak_bytes)
        assert bounded.infer(http_body()) == (200, "")
    watch.check(room_bytes=ROOM_BYTES)
    assert watch.peak_bytes - watch.before_bytes < TOTAL_BYTES + (96 << 20)
    until(lambda: bounded.samples("headrace_body_bytes") == [0.0])
    bounded.still_serves()


@pytest.mark.timing
@pytest.mark.parametrize("path", [STREAM, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"])
def test_thousands_of_messages_without_content_in_one_segment(bounded: Attacked, path: str) -> None:
    """Each costs an error response. A stream yields between two: one segment held the event loop for 0.3 s."""
    with watched(bounded, "S28 messages without content") as watch, ExitStack() as stack:
        end_s = time.monotonic() + 3
        while time.monotonic() < end_s:
            peer = stack.enter_context(RawPeer(bounded.server.grpc_port))
            peer.send(frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1 << 30}), frames.window_update(0, 1 << 30))
            for stream_id in range(1, 9, 2):
                open_stream(peer, stream_id, path)
            time.sleep(0.3)
            peer.socket.close()
    watch.check(room_bytes=ROOM_BYTES)
    assert watch.probe.quantile_s(0.5) < 0.1
    bounded.still_serves()
