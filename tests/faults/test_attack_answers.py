"""Small requests for responses that take long to encode: JSON, compression, classification (attacks S18 and S20)."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.support.attacks import Attacked, attack, watched
from tests.support.models import add_model, identity, ramp
from tests.support.waiting import until

pb: Any = service_pb2
NUMBERS = 6_000_000


@pytest.fixture(scope="module")
def ramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server with `ramp`, whose responses are as large as a request says."""
    folder = tmp_path_factory.mktemp("ramped")
    add_model(folder / "models", "ramp", ramp())
    add_model(folder / "models", "identity_fp64", identity("FP64"))
    with attack(folder) as server:
        yield server


def body(count: int, **output: object) -> bytes:
    """A request of some 130 bytes for `count` numbers."""
    tensor = {"name": "COUNT", "datatype": "INT64", "shape": [1], "data": [count]}
    return json.dumps({"inputs": [tensor], "outputs": [{"name": "Y", "parameters": output}]}).encode()


def post(server: Attacked, content: bytes, **headers: str) -> bytes:
    status, _, answer = server.server.request("POST", "/v2/models/ramp/infer", content, headers, timeout_s=100)
    assert status == 200, answer[:500]
    return answer


def numbers(answer: bytes) -> np.ndarray:
    (output,) = json.loads(answer)["outputs"]
    assert output["shape"] == [len(output["data"])]
    return np.array(output["data"], np.float32)


def grpc_request(count: int, classes: int) -> Any:
    request = pb.ModelInferRequest(model_name="ramp", id=f"{count} and {classes}")
    request.inputs.add(name="COUNT", datatype="INT64", shape=[1])
    request.raw_input_contents.append(count.to_bytes(8, "little"))
    request.outputs.add(name="Y").parameters["classification"].int64_param = classes
    return request


def test_large_json_answers_do_not_stall_the_server(ramped: Attacked) -> None:
    with watched(ramped, "S20 large JSON answers") as watch, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: post(ramped, body(NUMBERS)), range(3)))
    watch.check(liveness_s=0.5)
    for answer in answers:
        assert np.array_equal(numbers(answer), np.arange(NUMBERS, dtype=np.float32) + np.float32(0.5))
    ramped.still_serves()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_large_compressed_answers_do_not_stall_the_server(ramped: Attacked, encoding: str) -> None:
    with watched(ramped, f"S20 large {encoding} answers") as watch:
        answer = post(ramped, body(4 * NUMBERS, binary_data=True), **{"accept-encoding": encoding})
    watch.check(liveness_s=0.5)
    content = (gzip.decompress if encoding == "gzip" else zlib.decompress)(answer)
    assert content.endswith(np.float32(4 * NUMBERS - 0.5).tobytes())
    ramped.still_serves()


def test_clients_that_do_not_wait_for_large_answers(ramped: Attacked) -> None:
    """They disconnect while their answer is encoded."""
    with watched(ramped, "S20 large JSON answers abandoned") as watch:
        for _ in range(6):
            with ramped.connect() as wire:
                content = body(NUMBERS // 4)
                head = (
                    f"POST /v2/models/ramp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
                )
                wire.pour([head.encode() + content])
        until(lambda: not ramped.samples("headrace_in_flight", model="ramp")[0])
    watch.check()
    ramped.still_serves()


def test_pipelined_requests_get_large_and_small_answers_in_order(ramped: Attacked) -> None:
    counts = [100_000, 1, 50_000, 2, 70_000, 3]
    with ramped.connect() as wire:
        for count in counts:
            content = body(count)
            head = f"POST /v2/models/ramp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            wire.pour([head.encode() + content])
        data = b""
        for count in counts:
            while b"\r\n\r\n" not in data:
                data += wire.socket.recv(1 << 20)
            head_bytes, _, data = data.partition(b"\r\n\r\n")
            size = int(head_bytes.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(data) < size:
                data += wire.socket.recv(1 << 20)
            assert len(numbers(data[:size])) == count
            data = data[size:]


def test_repeated_requests_get_their_large_answers(ramped: Attacked) -> None:
    """A repeated head takes the fast path, and its large answer leaves that path."""
    content = body(60_000)
    request = (
        f"POST /v2/models/ramp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    )
    with ramped.connect() as wire:
        for _ in range(5):
            wire.pour([request + content])
            assert wire.answer() == (200, "")


def test_shutdown_waits_for_large_answers(tmp_path: Any) -> None:
    add_model(tmp_path / "models", "ramp", ramp())
    with attack(tmp_path) as server:
        answers: list[bytes] = []
        thread = threading.Thread(target=lambda: answers.append(post(server, body(NUMBERS))))
        thread.start()
        until(lambda: server.samples("headrace_in_flight", model="ramp")[0])
        server.server.signal()
        thread.join(60)
        assert server.server.wait() == 0
        assert len(numbers(answers[0])) == NUMBERS


def test_the_best_of_a_large_output(ramped: Attacked) -> None:
    with watched(ramped, "S18 classification over HTTP") as watch:
        few = post(ramped, body(4_000_000, classification=3))
        many = post(ramped, body(4_000_000, classification=65_536))
        status, text = ramped.infer(body(4_000_000, classification=4_000_000), "ramp")
    watch.check(liveness_s=0.5)
    assert json.loads(few)["outputs"][0]["data"] == [
        f"{n - 0.5:.6f}:{n - 1}" for n in (4_000_000, 3_999_999, 3_999_998)
    ]
    (output,) = json.loads(many)["outputs"]
    assert output["shape"] == [65_536]
    assert output["data"][-1] == f"{4_000_000 - 65_536 + 0.5:.6f}:{4_000_000 - 65_536}"
    assert (status, "4000000 classes in 1 rows, at most 65536" in text) == (400, True), text
    ramped.still_serves()


def test_the_best_of_a_large_output_over_grpc(ramped: Attacked) -> None:
    with watched(ramped, "S18 classification over gRPC") as watch, ramped.channel() as channel:
        assert ramped.call(grpc_request(4_000_000, 65_536)) == ("OK", "")
        code, text = ramped.call(grpc_request(4_000_000, 4_000_000))
        requests = iter([grpc_request(4_000_000, 10), grpc_request(4, 2), grpc_request(500_000, 60_000)])
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        ids = [answer.infer_response.id for answer in stream(requests, timeout=60)]
    watch.check(liveness_s=0.5)
    assert (code, "at most 65536" in text) == ("INVALID_ARGUMENT", True), text
    assert ids == ["4000000 and 10", "4 and 2", "500000 and 60000"]
    ramped.still_serves()


@pytest.mark.parametrize("count", [4, 2_000, 100_000])
def test_nan_and_infinities_are_no_nulls(ramped: Attacked, count: int) -> None:
    """Attack S24: in small answers, in answers of one step and in those of a codec thread; the request has them too."""
    values = [float("nan"), float("inf"), float("-inf"), 0.5] * (count // 4)
    tensor = {"name": "X", "datatype": "FP64", "shape": [1, count], "data": values}
    content = json.dumps({"inputs": [tensor]}).encode()
    status, _, answer = ramped.server.request("POST", "/v2/models/identity_fp64/infer", content)
    assert status == 200, answer[:500]
    assert b"null" not in answer
    assert np.array_equal(json.loads(answer)["outputs"][0]["data"], values, equal_nan=True)
