"""Faults of production on a real server over real sockets; other requests must not be affected."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.attacks import UNBOUNDED_WAITS
from tests.support.models import add_model, affine, busy, row_sums, table_lookup
from tests.support.python_models import GATE_BODY, Gate
from tests.support.serving import HOST, Server, accepts, look_quick, serving
from tests.support.waiting import until

BATCHING = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 20000 }"
GATES = {
    "gate": "",
    "small_queue": "dynamic_batching { default_queue_policy { max_queue_size: 2 } }",
    "impatient": "dynamic_batching { default_queue_policy { default_timeout_microseconds: 50000 } }",
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "models"


@pytest.fixture(scope="module")
def gates(repository: Path) -> dict[str, Gate]:
    return {name: Gate(repository, name, config) for name, config in GATES.items()}


@pytest.fixture(scope="module")
def server(repository: Path, gates: dict[str, Gate]) -> Iterator[Server]:
    add_model(repository, "busy", busy())
    add_model(repository, "lookup", table_lookup(), config=BATCHING)
    add_model(repository, "affine", affine(), config="max_batch_size: 64\ndynamic_batching { }")
    add_model(repository, "wide", row_sums(), config="max_batch_size: 8\ndynamic_batching { }\n" + UNBOUNDED_WAITS)
    with serving(repository, repository.parent) as running:
        yield running


def steps_body(steps: int, **parameters: int) -> bytes:
    tensor = {"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [steps]}
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()


def lookup_body(value: int) -> bytes:
    return json.dumps({"inputs": [{"name": "X", "datatype": "INT64", "shape": [1, 1], "data": [value]}]}).encode()


def affine_body() -> bytes:
    return json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}]}).encode()


def infer(server: Server, model: str, body: bytes, timeout_s: float = 60) -> tuple[int, dict[str, object]]:
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", body, timeout_s=timeout_s)
    return status, json.loads(answer)


def raw(server: Server, model: str, body: bytes) -> socket.socket:
    """A connection on which a request was sent and nothing is read yet."""
    sock = socket.create_connection((HOST, server.port))
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def statistics(server: Server, model: str) -> dict[str, int]:
    _, _, body = server.request("GET", f"/v2/models/{model}/stats")
    shown = json.loads(body)["model_stats"][0]
    return {
        "executions": shown["execution_count"],
        "success": shown["inference_stats"]["success"]["count"],
        "fail": shown["inference_stats"]["fail"]["count"],
    }


def gauge(server: Server, name: str, model: str) -> float:
    _, _, page = server.request("GET", "/metrics")
    prefix = f'{name}{{model="{model}"'
    return sum(float(line.split()[-1]) for line in page.decode().splitlines() if line.startswith(prefix))


@pytest.mark.parametrize("cancelled", [0, 1, 2, 3])
def test_queued_requests_of_disconnected_clients_never_run(
    server: Server, gates: dict[str, Gate], cancelled: int
) -> None:
    before = statistics(server, "gate")
    gates["gate"].close()
    first = raw(server, "gate", GATE_BODY)
    until(lambda: gauge(server, "headrace_in_flight", "gate") == 1)
    waiting = []
    for index in range(4):
        waiting.append(raw(server, "gate", GATE_BODY))
        until(lambda index=index: gauge(server, "headrace_queue_depth", "gate") == index + 1)
    waiting[cancelled].close()
    until(lambda: gauge(server, "headrace_queue_depth", "gate") == 3)
    gates["gate"].open()
    for sock in (first, *(sock for index, sock in enumerate(waiting) if index != cancelled)):
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
        sock.close()
    after = statistics(server, "gate")
    assert after["executions"] - before["executions"] == 4
    assert after["fail"] - before["fail"] == 1
    assert gauge(server, "headrace_in_flight", "gate") == 0


def test_a_client_that_disconnects_in_flight_does_not_affect_its_batch(server: Server, gates: dict[str, Gate]) -> None:
    gates["gate"].close()
    leaver = raw(server, "gate", GATE_BODY)
    until(lambda: gauge(server, "headrace_in_flight", "gate") == 1)
    leaver.close()
    until(lambda: gauge(server, "headrace_in_flight", "gate") == 0)
    gates["gate"].open()
    assert infer(server, "gate", GATE_BODY)[0] == 200


def test_clients_that_disconnect_at_any_moment_leak_nothing(server: Server) -> None:
    rng = random.Random(7)
    before = statistics(server, "affine")

    def leave(_: int) -> None:
        sock = raw(server, "affine", affine_body())
        time.sleep(rng.random() * 0.004)  # about when the answer comes
        sock.close()

    def stay(_: int) -> int:
        return infer(server, "affine", affine_body())[0]

    with ThreadPoolExecutor(16) as pool:
        leaving = pool.map(leave, range(1500))
        staying = list(pool.map(stay, range(300)))
        list(leaving)
    assert staying == [200] * 300
    until(lambda: gauge(server, "headrace_in_flight", "affine") == 0)
    until(lambda: gauge(server, "headrace_queue_depth", "affine") == 0)
    after = statistics(server, "affine")
    assert after["success"] - before["success"] + after["fail"] - before["fail"] <= 1800
    assert after["success"] - before["success"] >= 300
    assert "Traceback" not in server.text


def test_a_client_that_disconnects_while_sending_is_no_error(server: Server) -> None:
    body = affine_body()
    for cut in (1, len(body) // 2, len(body) - 1):
        sock = socket.create_connection((HOST, server.port))
        head = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body[:cut])
        sock.close()
    until(lambda: gauge(server, "headrace_in_flight", "affine") == 0)
    assert infer(server, "affine", body)[0] == 200


def test_a_model_that_refuses_one_row_serves_the_others_of_the_batch(server: Server) -> None:
    values = [3, 99, -2, 1, 77, 0, 2, -4]  # the table has -4 to 3
    with ThreadPoolExecutor(len(values)) as pool:
        answers = list(pool.map(lambda value: infer(server, "lookup", lookup_body(value)), values))
    for value, (status, answer) in zip(values, answers, strict=True):
        if value in (99, 77):
            assert status == 400, answer
            assert "refused the values" in str(answer["error"])
        else:
            assert (status, answer["outputs"][0]["data"]) == (200, [value % 4 * 10])  # type: ignore[index]


def test_a_stalled_model_misses_deadlines_and_holds_no_other_model_up(server: Server) -> None:
    stalled = raw(server, "busy", steps_body(4 * look_quick(server)))
    until(lambda: gauge(server, "headrace_in_flight", "busy") == 1)
    started = time.monotonic()
    status, answer = infer(server, "busy", steps_body(1, headrace_deadline_us=1_000_000))
    waited_s = time.monotonic() - started
    assert (status, "deadline" in str(answer["error"])) == (504, True), answer
    assert waited_s >= 1
    assert infer(server, "affine", affine_body())[0] == 200, "while the other one is stalled"
    assert gauge(server, "headrace_in_flight", "busy") == 1
    assert stalled.recv(65536).startswith(b"HTTP/1.1 200 ")
    stalled.close()


def test_a_deadline_covers_execution_too(server: Server) -> None:
    steps = 3 * look_quick(server)
    started = time.monotonic()
    status, _ = infer(server, "busy", steps_body(steps, headrace_deadline_us=500_000))
    assert status == 504
    answered_s = time.monotonic() - started
    assert infer(server, "busy", steps_body(1))[0] == 200
    assert answered_s < (time.monotonic() - started) / 2, "the next request waits for the execution to end"


def test_a_full_queue_refuses_with_503_and_retry_after(server: Server, gates: dict[str, Gate]) -> None:
    gates["small_queue"].close()
    sockets = [raw(server, "small_queue", GATE_BODY)]
    until(lambda: gauge(server, "headrace_in_flight", "small_queue") == 1)
    for index in range(2):
        sockets.append(raw(server, "small_queue", GATE_BODY))
        until(lambda index=index: gauge(server, "headrace_queue_depth", "small_queue") == index + 1)
    status, headers, body = server.request("POST", "/v2/models/small_queue/infer", GATE_BODY)
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert "queue is full" in json.loads(body)["error"]
    gates["small_queue"].open()
    for sock in sockets:
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 "), "those in the queue are served"
        sock.close()


def test_a_queue_policy_s_timeout_is_503_and_not_the_request_s_deadline(server: Server, gates: dict[str, Gate]) -> None:
    gates["impatient"].close()
    running = raw(server, "impatient", GATE_BODY)
    until(lambda: gauge(server, "headrace_in_flight", "impatient") == 1)
    status, headers, body = server.request("POST", "/v2/models/impatient/infer", GATE_BODY)
    assert status == 503
    assert "retry-after" in headers
    assert "queue policy" in json.loads(body)["error"]
    gates["impatient"].open()
    assert running.recv(65536).startswith(b"HTTP/1.1 200 ")
    running.close()


def test_a_client_that_reads_nothing_does_not_block_others(server: Server) -> None:
    numbers = [1.5] * 400_000
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, len(numbers)], "data": numbers}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lazy = [raw(server, "wide", body) for _ in range(4)]
    for _ in range(50):
        assert infer(server, "affine", affine_body())[0] == 200
    for sock in lazy:
        received = 0
        while received < 4 * len(numbers):
            part = sock.recv(1 << 20)
            assert part, "the answer was cut"
            received += len(part)
        sock.close()


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    sock = socket.create_connection((HOST, server.port))
    wire = b""
    for value in range(4):
        body = lookup_body(value)
        head = f"POST /v2/models/lookup/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        wire += head.encode() + body
    sock.sendall(wire)
    received = b""
    while received.count(b'"data":[') < 4:
        part = sock.recv(65536)
        assert part
        received += part
    assert [piece.split(b"]")[0] for piece in received.split(b'"data":[')[1:]] == [b"0", b"10", b"20", b"30"]
    sock.close()


def test_ten_thousand_shapes_do_not_pile_up(server: Server) -> None:
    def one(width: int) -> int:
        tensor = {"name": "X", "datatype": "FP32", "shape": [1, width], "data": [1.0] * width}
        return infer(server, "wide", json.dumps({"inputs": [tensor]}).encode())[0]

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(one, range(1, 600))) == {200}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopping_server_answers_accepted_requests(tmp_path: Path, number: int) -> None:
    gate = Gate(tmp_path / "models")
    gate.close()
    with serving(gate.repository, tmp_path) as running:
        answers: list[int] = []

        def send() -> None:
            answers.append(infer(running, "gate", GATE_BODY)[0])

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: gauge(running, "headrace_in_flight", "gate") == 4)
        running.signal(number)
        running.signal(signal.SIGTERM)  # supervisors like to repeat themselves
        until(lambda: not accepts(running.port))
        gate.open()
        for thread in threads:
            thread.join()
        assert answers == [200] * 4
        assert running.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, running.port))


def test_a_hanging_model_does_not_block_the_shutdown(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    add_model(repository, "busy", busy())
    with serving(repository, tmp_path, "--drain-timeout-s", "1") as running:
        sock = raw(running, "busy", steps_body(10_000_000))
        until(lambda: gauge(running, "headrace_in_flight", "busy") == 1)
        running.signal(signal.SIGTERM)
        started = time.monotonic()
        assert running.wait() == 1, "it says that something was lost"
        assert time.monotonic() - started < 60  # computing it would take minutes
        assert "did not stop within" in running.text
        sock.close()
        running.process.returncode = 0
