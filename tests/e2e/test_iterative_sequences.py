"""Iterative sequences behind a real server: requests that the model schedules again, in batches, with their cases."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from tests.support.event_streams import answers
from tests.support.grpc_requests import Collector, tensor
from tests.support.iterative_models import add_counter
from tests.support.python_models import add_python_model
from tests.support.serving import HOST, Server, serving
from tests.support.waiting import at_rest, until

SERVERS = {"one process": (), "front end": ("--front-ends", "1")}
# A decoupled model with sequences that is not iterative: two numbers for each request, from the sum of its sequence.
SUMS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        for request in requests:
            sequence, sender = request.correlation_id(), request.get_response_sender()
            value = int(request.inputs()[0].as_numpy()[0, 0])
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
            if value == 99:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            is_start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            self.sums[sequence] = value + (0 if is_start else self.sums[sequence])
            for sign in (1, -1):
                tensor = pb_utils.Tensor("NUMBER", np.array([[sign * self.sums[sequence]]], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]), flags=int(sign == -1))
"""
SUMS_CONFIG = """
backend: "python"
max_batch_size: 4
model_transaction_policy { decoupled: true }
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { oldest { max_candidate_sequences: 4 } }
"""
ONE_SLOT = "oldest { max_candidate_sequences: 1 }"


@pytest.fixture(scope="module", params=list(SERVERS))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("iterative")
    repository = folder / "repository"
    add_counter(repository, "counter")
    add_counter(repository, "direct", strategy="direct { }", batch=4)
    add_counter(repository, "texts", id_type="TYPE_STRING")
    add_counter(repository, "one_slot", strategy=ONE_SLOT)
    add_counter(repository, "killed")
    add_counter(repository, "single", is_decoupled=False)
    add_python_model(repository, "sums", SUMS, SUMS_CONFIG)
    with serving(repository, folder, "--stream-heartbeat-s", "0.2", *SERVERS[request.param]) as server:
        yield server


def stream(server: Server, model: str, count: int, **options: object) -> tuple[int, list[Any]]:
    """Status and events of a generate stream, or the JSON of an answer with another type."""
    body = json.dumps({"COUNT": count, **options}).encode()
    return answers(server.request("POST", f"/v2/models/{model}/generate_stream", body))


def numbers(events: list[Any]) -> list[Any]:
    return [event.get("NUMBER", event.get("error")) for event in events]


def opened(server: Server, model: str, count: int, **options: object) -> socket.socket:
    """Send a request and return its connection."""
    body = json.dumps({"COUNT": count, **options}).encode()
    connection = socket.create_connection((HOST, server.port), timeout=60)
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_until(connection: socket.socket, text: bytes) -> bytes:
    answer = b""
    while text not in answer:
        part = connection.recv(65536)
        assert part, f"the connection ended: {answer!r}"
        answer += part
    return answer


@pytest.mark.parametrize("model", ["counter", "direct", "texts"])
def test_a_request_without_an_id_runs_step_by_step(running: Server, model: str) -> None:
    status, events = stream(running, model, 5)
    assert (status, numbers(events)) == (200, [4, 3, 2, 1, 0])


@pytest.mark.parametrize(("model", "most"), [("counter", 8), ("direct", 4)])
def test_requests_share_the_batches_of_their_steps(running: Server, model: str, most: int) -> None:
    def largest_batch() -> int:
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda n: stream(running, model, 10 + n, step_ms=10, id=str(n)), range(12)))
        for number, (status, events) in enumerate(answers):
            assert (status, numbers(events)) == (200, list(range(9 + number, -1, -1)))
            assert {event["id"] for event in events} == {str(number)}
        return max(event["BATCH"] for _, events in answers for event in events)

    until(lambda: largest_batch() == most)


def test_a_model_with_one_response(running: Server) -> None:
    for path in ("generate", "generate_stream"):
        status, (document,) = answers(running.request("POST", f"/v2/models/single/{path}", b'{"COUNT": 4}'))
        assert (status, document["NUMBER"]) == (200, 0)
    with triton_http.InferenceServerClient(running.address) as client:
        count = triton_http.InferInput("COUNT", [1, 1], "INT32").set_data_from_numpy(np.array([[3]], np.int32))
        assert client.infer("single", [count]).as_numpy("NUMBER").tolist() == [[0]]
        assert client.infer("single", [count], sequence_id=7, sequence_start=True).as_numpy("NUMBER").tolist() == [[0]]
        with pytest.raises(Exception, match="must specify the START flag") as raised:
            client.infer("single", [count], sequence_id=7)
        assert "or without sequence_id" in str(raised.value)


def test_a_stream_of_gRPC(running: Server) -> None:  # noqa: N802
    collect = Collector()
    with triton.InferenceServerClient(running.grpc_address) as client:
        client.start_stream(collect)
        inputs = [tensor("COUNT", np.array([[2]], np.int32), "INT32")]
        for request_id in ("a", "b", "c"):
            client.async_stream_infer("counter", inputs, request_id=request_id)
        client.async_stream_infer("counter", inputs, request_id="d", sequence_id=2**63 - 1, sequence_start=True)
        results = collect.take(8)
        client.stop_stream()
    assert [error for _, error in results if error is not None] == []
    for request_id in "abcd":
        own = [result for result, _ in results if result.get_response().id == request_id]
        assert [int(result.as_numpy("NUMBER")[0, 0]) for result in own] == [1, 0]
        assert [result.get_response().parameters["triton_final_response"].bool_param for result in own] == [False, True]


def test_the_error_of_one_request_ends_it_alone(running: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(stream, running, "counter", 30, step_ms=10)
        assert numbers(stream(running, "counter", 6, step_ms=10, fail_at=3)[1]) == [5, 4, "number 3 failed"]
        assert numbers(other.result()[1]) == list(range(29, -1, -1))


def test_a_failed_batch_ends_its_requests_and_frees_their_slots(running: Server) -> None:
    for _ in range(3):
        assert numbers(stream(running, "one_slot", 6, raise_at=3)[1]) == [5, 4, "the batch failed"]
    assert numbers(stream(running, "one_slot", 3)[1]) == [2, 1, 0]


def test_a_disconnect_between_two_steps_frees_the_slot(running: Server) -> None:
    before = running.text.count("counter: cancelled")
    with opened(running, "one_slot", 1_000_000, step_ms=5) as connection:
        read_until(connection, b'"NUMBER":999990,')
    assert numbers(stream(running, "one_slot", 3)[1]) == [2, 1, 0]
    # The code of the model looks at its senders with each batch.
    until(lambda: stream(running, "one_slot", 1) and running.text.count("counter: cancelled") > before)


def test_a_deadline_between_two_steps_ends_the_request(running: Server) -> None:
    status, events = stream(running, "one_slot", 1_000_000, step_ms=5, headrace_deadline_us=300_000)
    assert status == 200
    assert "deadline" in events[-1]["error"]
    assert numbers(stream(running, "one_slot", 3)[1]) == [2, 1, 0]


def test_a_timeout_of_the_queue_does_not_count_between_steps(running: Server) -> None:
    status, events = stream(running, "one_slot", 60, step_ms=5, timeout=100_000)
    assert (status, numbers(events)) == (200, list(range(59, -1, -1)))


def metric(server: Server, series: str) -> str:
    lines = server.request("GET", "/metrics")[2].decode().splitlines()
    return next(line for line in lines if line.startswith(series)).rpartition(" ")[2]


def test_a_reader_that_stalls_holds_back_its_own_request_only(running: Server) -> None:
    with opened(running, "counter", 1_000_000, pad=64 << 10) as connection:
        read_until(connection, b'"NUMBER":999999,')
        at_rest(lambda: metric(running, "headrace_unread_bytes"))  # its buffers are full
        for _ in range(3):
            assert numbers(stream(running, "counter", 50)[1]) == list(range(49, -1, -1))
        read_until(connection, b'"NUMBER":999700,')  # it goes on once it is read


def test_a_process_that_dies_ends_its_requests(running: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(stream, running, "killed", 1000, step_ms=10) for _ in range(2)]
        until(lambda: metric(running, 'headrace_in_flight{model="killed",version="1"}') == "2.0")
        assert "the process of model 'killed'" in numbers(stream(running, "killed", 5, step_ms=10, kill_at=2)[1])[-1]
        for other in others:
            assert re.search("process of model 'killed'|has its state died", numbers(other.result()[1])[-1])
    until(lambda: stream(running, "killed", 2)[0] == 200)
    assert numbers(stream(running, "killed", 3)[1]) == [2, 1, 0]


def test_a_request_counts_once(running: Server) -> None:
    def counts() -> tuple[int, int]:
        status = json.loads(running.request("GET", "/v2/models/texts/stats")[2])["model_stats"][0]
        stats = status["inference_stats"]
        return stats["success"]["count"], stats["fail"]["count"]

    succeeded, failed = counts()
    stream(running, "texts", 20)
    until(lambda: counts() == (succeeded + 1, failed))
    stream(running, "texts", 20, fail_at=10)
    until(lambda: counts() == (succeeded + 1, failed + 1))


def test_sequences_of_a_decoupled_model(running: Server) -> None:
    steps = [(5, 3, True), (6, 4, True), (5, 10, False), (6, 20, False)]
    answers = [stream(running, "sums", value, sequence_id=i, sequence_start=start)[1] for i, value, start in steps]
    assert [numbers(events) for events in answers] == [[3, -3], [4, -4], [13, -13], [24, -24]]
    status, (document,) = stream(running, "sums", 1, sequence_id=7)
    assert (status, "must specify the START flag" in document["error"]) == (400, True)


def test_a_model_that_is_not_iterative_cannot_schedule_a_request_again(running: Server) -> None:
    events = stream(running, "sums", 99, sequence_id=8, sequence_start=True)[1]
    assert "RELEASE_RESCHEDULE, and the model is not iterative" in str(events[-1])
