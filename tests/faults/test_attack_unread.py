"""Large messages of gRPC: responses that are not read, typed contents, compressed requests (S4 and S7 in docs/security.md)."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from headrace.wire.grpc.large_contents import varint
from headrace.wire.http2 import frames
from onnx import TensorProto, helper
from tritonclient.grpc import service_pb2

from loadtest.onnx_models import onnx_model
from tests.support.attacks import SERVICE, Attacked, Wire, attack, head, http_body, watched
from tests.support.http2_peer import RawPeer, data, grpc_head, message, request
from tests.support.models import add_model
from tests.support.processes import children
from tests.support.serving import HOST, INTERPRETER
from tests.support.waiting import at_rest, until

pb: Any = service_pb2
INFER, STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"
ELEMENTS = 4 << 20  # 16 MiB
CALLS = 40
# The responses of all calls together have 640 MiB. Those up to the bound of a connection may be held, and those of the first
# batches, whose size is not known before.
MOST_BYTES = 300 << 20


def zeros() -> onnx.ModelProto:
    """Y FP32: as many zeros as SIZE INT64 (1) says."""
    node = helper.make_node("ConstantOfShape", ["SIZE"], ["Y"])
    return onnx_model([node], {"SIZE": (TensorProto.INT64, (1,))}, {"Y": (TensorProto.FLOAT, ("n",))})


def count_of_texts() -> onnx.ModelProto:
    """COUNT INT64 (1): the number of texts in X BYTES (1, n)."""
    node = helper.make_node("Size", ["X"], ["size"])
    shaped = helper.make_node("Unsqueeze", ["size", "axes"], ["COUNT"])
    shapes = {"X": (TensorProto.STRING, (1, "n"))}, {"COUNT": (TensorProto.INT64, (1,))}
    return onnx_model([node, shaped], *shapes, {"axes": np.array([0], np.int64)})


def zeros_request(elements: int = ELEMENTS, request_id: str = "") -> bytes:
    created = pb.ModelInferRequest(model_name="zeros", id=request_id, raw_input_contents=[struct.pack("<q", elements)])
    created.inputs.add(name="SIZE", datatype="INT64", shape=[1])
    return bytes(created.SerializeToString())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("unread")
    add_model(folder / "models", "zeros", zeros())
    add_model(folder / "models", "texts", count_of_texts())
    with attack(folder, command=INTERPRETER) as running:
        yield running


def open_calls(peer: RawPeer, calls: int, content: bytes) -> None:
    """Open calls on one connection, all at once."""
    for stream_id in range(1, 2 * calls, 2):
        peer.send(request(stream_id, end=False, fields=grpc_head(INFER)), data(stream_id, message(content), end=True))


def unread_bytes(server: Attacked) -> float:
    (size,) = server.samples("headrace_unread_bytes")
    return size


def grown_within(server: Attacked, before_bytes: int, more_bytes: int = 0) -> None:
    """Let the calls run for some time; fail if the server's memory grows beyond the bound."""
    bound_bytes = MOST_BYTES + more_bytes
    at_rest(lambda: server.peak_bytes() >> 20, readings=50)
    grown = server.peak_bytes() - before_bytes
    assert grown < bound_bytes, f"the server's memory grew by {grown >> 20} MiB"


@pytest.mark.parametrize("connections", [1, 4])
def test_calls_that_are_opened_at_once_and_not_read(server: Attacked, connections: int) -> None:
    """630 MB for a connection, 2.6 GB for four: the bound was looked at only when a stream opened."""
    with watched(server, f"S7 answers unread on {connections} connections") as watch, ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(server.server.grpc_port)) for _ in range(connections)]
        for peer in peers:
            open_calls(peer, CALLS, zeros_request())
        until(lambda: unread_bytes(server) > 0)
        grown_within(server, watch.before_bytes, (connections - 1) * (96 << 20))
        server.still_serves()
    watch.check()
    until(lambda: unread_bytes(server) == 0)
    server.still_serves()


def test_small_answers_do_not_hide_large_ones(server: Attacked) -> None:
    """The expected size decays; then the calls that still run are refused at the bound."""
    with watched(server, "S7 small answers first") as watch, server.channel() as channel:
        infer = channel.unary_unary(INFER)
        for _ in range(80):
            infer(zeros_request(1), timeout=30)
        with RawPeer(server.server.grpc_port) as peer:
            open_calls(peer, CALLS, zeros_request())
            grown_within(server, watch.before_bytes)
    watch.check()


def test_a_stream_that_is_not_read(server: Attacked) -> None:
    """Its requests in flight were bounded, and not their responses."""
    with watched(server, "S7 stream unread") as watch, RawPeer(server.server.grpc_port) as peer:
        peer.send(request(1, end=False, fields=grpc_head(STREAM)))
        for _ in range(CALLS):
            peer.send(data(1, message(zeros_request())))
        grown_within(server, watch.before_bytes)
        server.still_serves()
    watch.check()


def test_calls_wait_until_the_client_reads(server: Attacked) -> None:
    """Calls of an honest client that sends many at once are answered, all of them."""
    with server.channel() as channel, ThreadPoolExecutor(20) as pool:
        infer = channel.unary_unary(INFER)
        infer(zeros_request(), timeout=60)
        answers = pool.map(lambda _: infer(zeros_request(), timeout=60), range(20))
        assert {len(pb.ModelInferResponse.FromString(each).raw_output_contents[0]) for each in answers} == {
            4 * ELEMENTS
        }
        stream = channel.stream_stream(STREAM)
        names = [str(number) for number in range(20)]
        served = [
            pb.ModelStreamInferResponse.FromString(each).infer_response
            for each in stream(iter([zeros_request(request_id=name) for name in names]), timeout=60)
        ]
        assert [each.id for each in served] == names
        assert {len(each.raw_output_contents[0]) for each in served} == {4 * ELEMENTS}
    until(lambda: unread_bytes(server) == 0)
    server.still_serves()


def test_waiting_calls_of_a_client_that_disconnects(server: Attacked) -> None:
    with server.channel() as channel:
        channel.unary_unary(INFER)(zeros_request(), timeout=60)  # the size is known
    for _ in range(3):
        with RawPeer(server.server.grpc_port) as peer:
            open_calls(peer, CALLS, zeros_request())
            until(lambda: unread_bytes(server) > 0)
            peer.send(frames.rst_stream(2 * CALLS - 1, frames.ErrorCode.CANCEL))
    until(lambda: unread_bytes(server) == 0 and server.samples("headrace_body_bytes") == [0.0])
    server.still_serves()


# --- Requests that are expensive to decode -----------------------------------------------------------------------------


def typed(field: int, packed: bytes) -> bytes:
    """A request of one input with typed contents, serialized by hand: no client library sends so many."""
    tensor = bytes(pb.ModelInferRequest.InferInputTensor(name="SIZE", datatype="INT64", shape=[1]).SerializeToString())
    contents = bytes([field << 3 | 2]) + varint(len(packed)) + packed
    tensor += b"\x2a" + varint(len(contents)) + contents
    return bytes(pb.ModelInferRequest(model_name="zeros").SerializeToString()) + b"\x2a" + varint(len(tensor)) + tensor


def typed_texts(count: int) -> bytes:
    """The same, of empty texts."""
    tensor = bytes(pb.ModelInferRequest.InferInputTensor(name="X", datatype="BYTES", shape=[count]).SerializeToString())
    contents = b"\x42\x00" * count
    tensor += b"\x2a" + varint(len(contents)) + contents
    head = bytes(pb.ModelInferRequest(model_name="identity_bytes").SerializeToString())
    return head + b"\x2a" + varint(len(tensor)) + tensor


EXPENSIVE = {
    "integers of one byte": typed(3, b"\x01" * (11 << 20)),
    "numbers": typed(6, bytes(11 << 20)),
    "empty texts": typed_texts(5 << 20),
    "shapes": pb.ModelInferRequest(model_name="zeros").SerializeToString()
    + b"\x2a\x85\x80\xc0\x05\x1a\x80\x80\xc0\x05"
    + b"\x01" * (11 << 20),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_typed_contents_of_many_elements(server: Attacked, name: str) -> None:
    """Protobuf holds the interpreter lock while it parses: 11 MiB of one-byte integers stalled the server for 7 s."""
    with watched(server, f"S4 typed contents: {name}") as watch:
        for _ in range(3):
            code, _ = server.call(EXPENSIVE[name])
            assert code in ("INVALID_ARGUMENT", "OK")
    watch.check()
    server.still_serves()


def test_large_compressed_messages(server: Attacked) -> None:
    """They were decompressed on the event loop: 11 MiB took 20 ms each. Order and cancellation stay right."""
    # A repeated block: the client compresses it ten times as fast as random numbers.
    values = np.resize(np.random.default_rng(1).integers(0, 50, 1000).astype(np.float32), 2 << 20)

    def request_of(columns: int) -> bytes:
        part = values[:columns]
        created = pb.ModelInferRequest(model_name="row_sums", id=str(columns), raw_input_contents=[part.tobytes()])
        created.inputs.add(name="X", datatype="FP32", shape=[1, columns])
        created.outputs.add(name="SUM")
        return bytes(created.SerializeToString())

    columns = [2 << 20, 10, 1 << 20, 20, 2 << 20]
    expected = [float(values[:each].sum(dtype=np.float64)) for each in columns]
    with watched(server, "S20 compressed gRPC messages") as watch, server.channel() as channel:
        unary = channel.unary_unary(INFER, None, pb.ModelInferResponse.FromString)
        calls = [unary.future(request_of(2 << 20), timeout=30, compression=grpc.Compression.Gzip) for _ in range(6)]
        for call in calls[1:3]:
            call.cancel()
        sums = [struct.unpack("<f", call.result().raw_output_contents[0])[0] for call in (calls[0], *calls[3:])]
        stream = channel.stream_stream(STREAM, None, pb.ModelStreamInferResponse.FromString)
        answers = list(
            stream(iter([request_of(each) for each in columns]), timeout=30, compression=grpc.Compression.Gzip)
        )
    watch.check(liveness_s=0.5)
    assert sums == pytest.approx([expected[0]] * 4, rel=1e-3)
    assert [answer.infer_response.id for answer in answers] == [str(each) for each in columns]
    totals = [struct.unpack("<f", answer.infer_response.raw_output_contents[0])[0] for answer in answers]
    assert totals == pytest.approx(expected, rel=1e-3)
    server.still_serves()


TEXTS = 1 << 20  # the limit of a tensor


@pytest.fixture(scope="module")
def shared_texts() -> Iterator[tuple[str, int]]:
    """Key and size of shared memory with a million texts."""
    key = f"/headrace-test-{os.getpid()}-texts"
    content = b"\x01\0\0\0a" * TEXTS
    path = Path("/dev/shm") / key[1:]
    path.write_bytes(content)
    yield key, len(content)
    path.unlink()


@pytest.mark.parametrize("protocol", ["http", "grpc", "stream"])
def test_texts_in_shared_memory(server: Attacked, shared_texts: tuple[str, int], protocol: str) -> None:
    """They were split on the event loop: a request of some hundred bytes stalled the server for 0.3 s or more."""
    key, size = shared_texts
    server.post("/v2/systemsharedmemory/unregister", b"{}")
    registered = json.dumps({"key": key, "offset": 0, "byte_size": size}).encode()
    assert server.post("/v2/systemsharedmemory/region/texts/register", registered) == (200, "")
    place = {"shared_memory_region": "texts", "shared_memory_offset": 0, "shared_memory_byte_size": size}
    created = pb.ModelInferRequest(model_name="texts")
    tensor = created.inputs.add(name="X", datatype="BYTES", shape=[1, TEXTS])
    tensor.parameters["shared_memory_region"].string_param = "texts"
    tensor.parameters["shared_memory_byte_size"].int64_param = size
    with watched(server, f"S20 texts in shared memory, {protocol}") as watch, server.channel() as channel:
        for _ in range(3):
            if protocol == "http":
                described = {"name": "X", "datatype": "BYTES", "shape": [1, TEXTS], "parameters": place}
                body = json.dumps({"inputs": [described]}).replace("_region", "_regi\\u006fn")
                status, _, answer = server.server.request("POST", "/v2/models/texts/infer", body.encode(), timeout_s=60)
                assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [TEXTS])
            else:
                if protocol == "grpc":
                    answered = channel.unary_unary(INFER, None, pb.ModelInferResponse.FromString)(
                        created.SerializeToString(), timeout=60
                    )
                else:
                    stream = channel.stream_stream(STREAM, None, pb.ModelStreamInferResponse.FromString)
                    (only,) = stream(iter([created.SerializeToString()]), timeout=60)
                    answered = only.infer_response
                assert struct.unpack("<q", answered.raw_output_contents[0]) == (TEXTS,)
    watch.check(liveness_s=0.5)
    assert server.post("/v2/systemsharedmemory/unregister", b"{}") == (200, "")
    server.still_serves()


@pytest.fixture(scope="module")
def shared_numbers() -> Iterator[tuple[str, int]]:
    """Key and size of shared memory with three million ones, the limit of this server."""
    key = f"/headrace-test-{os.getpid()}-numbers"
    content = np.ones(3 << 20, np.float32).tobytes()
    path = Path("/dev/shm") / key[1:]
    path.write_bytes(content)
    yield key, len(content)
    path.unlink()


def test_numbers_in_shared_memory(server: Attacked, shared_numbers: tuple[str, int]) -> None:
    """They were copied on the event loop: by default up to 128 MiB, for a request of some hundred bytes."""
    key, size = shared_numbers
    created = json.dumps({"key": key, "offset": 0, "byte_size": size}).encode()
    assert server.post("/v2/systemsharedmemory/region/numbers/register", created) == (200, "")
    place = {"shared_memory_region": "numbers", "shared_memory_offset": 0, "shared_memory_byte_size": size}
    described = {"name": "X", "datatype": "FP32", "shape": [1, size // 4], "parameters": place}
    body = json.dumps({"inputs": [described], "outputs": [{"name": "SUM"}]}).encode()
    with watched(server, "S20 numbers in shared memory") as watch:
        for _ in range(5):
            status, _, answer = server.server.request("POST", "/v2/models/row_sums/infer", body, timeout_s=60)
            assert status == 200, answer
            assert json.loads(answer)["outputs"][0]["data"] == pytest.approx([size // 4], rel=1e-3)
    watch.check(liveness_s=0.5)
    assert server.post("/v2/systemsharedmemory/unregister", b"{}") == (200, "")
    server.still_serves()


def test_one_large_answer_does_not_keep_others_out(tmp_path: Path) -> None:
    """An answer above the bound is refused. One below it that is read too slowly leaves a reserve, and gives way."""
    add_model(tmp_path / "models", "zeros", zeros())
    mib, rows = 1 << 20, 30 << 18
    limits = ("--max-total-body-bytes", str(64 * mib), "--max-body-bytes", str(32 * mib), "--body-timeout-s", "8")
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, rows], "parameters": {"binary_data_size": 4 * rows}}
    header = http_body(tensor, outputs=[{"name": "SUM"}])
    large = {"Inference_Header_Content_Length": str(len(header))}, header + bytes(4 * rows)

    def zeros_body(size_bytes: int) -> bytes:
        size = {"name": "SIZE", "datatype": "INT64", "shape": [1], "data": [size_bytes // 4]}
        return http_body(size, outputs=[{"name": "Y", "parameters": {"binary_data": True}}])

    with attack(tmp_path, *limits) as server, socket.socket() as sock:
        status, error = server.infer(zeros_body(80 * mib), "zeros")
        assert (status, "request less at once" in error) == (503, True), error
        code, error = server.call(zeros_request(20 * mib))
        assert (code, "request less at once" in error) == ("UNAVAILABLE", True), error
        assert server.infer(large[1], "row_sums", **large[0]) == (200, "")
        with watched(server, "one large answer that is read slowly") as watch:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            sock.connect((HOST, server.server.port))
            body = zeros_body(50 * mib)
            sock.sendall(head("/v2/models/zeros/infer", f"Content-Length: {len(body)}") + body)
            until(lambda: unread_bytes(server) > 31 * mib)
            assert server.infer(large[1], "row_sums", **large[0])[0] == 503
            ended = threading.Event()

            def read_slowly() -> None:
                try:
                    while not ended.wait(0.05) and sock.recv(64 << 10):
                        pass
                except ConnectionResetError:
                    pass

            def is_served() -> bool:
                assert server.infer(http_body()) == (200, "")
                return server.infer(large[1], "row_sums", **large[0]) == (200, "")

            reader = threading.Thread(target=read_slowly)
            reader.start()
            until(is_served, pause_s=0.1)
            ended.set()
            reader.join()
        watch.check()
        server.still_serves()


def sums_request(rows: int) -> tuple[bytes, bytes]:
    """Head and body of a request for the sum of zeros, over HTTP."""
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, rows], "parameters": {"binary_data_size": 4 * rows}}
    header = http_body(tensor, outputs=[{"name": "SUM"}])
    lengths = f"Content-Length: {len(header) + 4 * rows}", f"Inference-Header-Content-Length: {len(header)}"
    return head("/v2/models/row_sums/infer", *lengths), header + bytes(4 * rows)


@pytest.mark.parametrize("victim", ["http", "grpc"])
@pytest.mark.parametrize("slow", ["response", "gRPC response", "body"])
def test_slow_clients_give_way_to_those_of_other_front_ends(tmp_path: Path, slow: str, victim: str) -> None:
    """One client gave way to clients of its own front end only: those of the others were refused for minutes."""
    add_model(tmp_path / "models", "zeros", zeros())
    mib, rows = 1 << 20, 30 << 18
    options = ("--max-total-body-bytes", str(64 * mib), "--max-body-bytes", str(56 * mib), "--front-ends", "2")
    called = pb.ModelInferRequest(model_name="row_sums", raw_input_contents=[bytes(4 * rows)])
    called.inputs.add(name="X", datatype="FP32", shape=[1, rows])
    with attack(tmp_path, *options) as server, ExitStack() as stack:
        is_grpc = slow == "gRPC response"
        attacker = stack.enter_context(RawPeer(server.server.grpc_port) if is_grpc else server.connect())
        if isinstance(attacker, RawPeer):
            open_calls(attacker, 1, zeros_request(50 << 18))
        elif slow == "response":
            size = {"name": "SIZE", "datatype": "INT64", "shape": [1], "data": [50 << 18]}
            body = http_body(size, outputs=[{"name": "Y", "parameters": {"binary_data": True}}])
            attacker.pour([head("/v2/models/zeros/infer", f"Content-Length: {len(body)}") + body])
        else:
            attacker.pour([part[: 50 * mib] for part in sums_request(50 << 18)])

        def held_bytes() -> float:
            return unread_bytes(server) + sum(server.samples("headrace_body_bytes"))

        until(lambda: held_bytes() > 40 * mib)
        attacked = serving_process(server, attacker.socket)
        for wire in [server.connect() for _ in range(8)]:  # a new connection goes to the front end with the fewest
            if serving_process(server, wire.socket) == attacked:
                stack.enter_context(wire)
            else:
                wire.socket.close()
        until(lambda: sum(server.samples("headrace_connections")) <= 7)

        def is_served() -> bool:
            if victim == "grpc":
                return server.call(called) == ("OK", "")
            with server.connect() as wire:
                assert serving_process(server, wire.socket) != attacked
                return wire.pour(sums_request(rows)) and wire.answer() == (200, "")

        until(is_served, timeout_s=30, pause_s=0.1)
        assert held_bytes() == 0
        if slow == "body":  # after 20 s it would end in any case
            assert isinstance(attacker, Wire)
            status, error = attacker.answer()
            assert (status, "while the memory for bodies is full" in error) == (408, True), error
        server.still_serves()


def serving_process(server: Attacked, client: socket.socket) -> int:
    """Return the process id of the front end that serves a connection, once it has it."""
    end = f":{client.getpeername()[1]:04X}", f":{client.getsockname()[1]:04X}"

    def found() -> list[int]:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        names = {f"socket:[{row[9]}]" for row in rows if (row[1][-5:], row[2][-5:]) == end}
        pids = children(server.server.process.pid)
        return [pid for pid in pids if any(_link(each) in names for each in Path(f"/proc/{pid}/fd").iterdir())]

    until(found)
    (pid,) = found()
    return pid


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""
