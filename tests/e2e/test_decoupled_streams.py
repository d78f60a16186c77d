"""Decoupled models over real sockets: events and gRPC streams, one by one, final flags, cancellation, readers that stall."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from tests.support.attacks import UNBOUNDED_WAITS
from tests.support.event_streams import answers
from tests.support.grpc_requests import STREAM, message, tensor
from tests.support.python_models import add_python_model
from tests.support.serving import HOST, Server, serving
from tests.support.waiting import until

pb: Any = service_pb2
# Sends 0, 1, 2 ... up to COUNT, each with `pad` bytes; waits `delay_ms` between two. An error comes in place of number `fail_at`.
# `flag: alone` sends the final flag by itself, else it comes with the last number.
TICKER_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
instance_group [ { count: 4 kind: KIND_CPU } ]
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "PAD" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
TICKER_CONFIG += UNBOUNDED_WAITS  # of a thousand requests at once
TICKER = """
import json
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.run, args=(request, request.get_response_sender()), daemon=True).start()

    def run(self, request, sender):
        count = int(request.inputs()[0].as_numpy()[0])
        options = json.loads(request.parameters() or "{}")
        pad = b"x" * options.get("pad", 0)
        is_alone = options.get("flag") == "alone"
        for number in range(count):
            if sender.is_cancelled():
                print("ticker: cancelled after %d" % number, flush=True)
                return sender.send(flags=FINAL)
            if number == options.get("fail_at"):
                error = pb_utils.TritonError("number %d failed" % number, pb_utils.TritonError.INVALID_ARG)
                return sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            tensors = [pb_utils.Tensor("NUMBER", np.array([number], np.int32)), pb_utils.Tensor("PAD", np.array([pad], object))]
            is_last = number == count - 1 and not is_alone
            sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if is_last else 0)
            if is_last:
                return
            until_s = time.monotonic() + options.get("delay_ms", 0) / 1000
            while time.monotonic() < until_s and not sender.is_cancelled():
                time.sleep(options.get("poll_ms", 5) / 1000)
        sender.send(flags=FINAL)
"""
SERVERS = {"one process": (), "front ends": ("--front-ends", "2")}
PATH = "/v2/models/ticker/generate"
# Most responses that a reader that stalls costs: those of the server's bound, of its write buffers and of the kernel's.
PAD_BYTES = 64 << 10
STALLED_RESPONSES = 64 + (24 << 20) // PAD_BYTES


@pytest.fixture(scope="module", params=list(SERVERS))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("streams")
    add_python_model(folder / "repository", "ticker", TICKER, TICKER_CONFIG)
    add_python_model(folder / "repository", "counted", TICKER, TICKER_CONFIG.replace("count: 4", "count: 1"))
    with serving(folder / "repository", folder, "--stream-heartbeat-s", "0.2", *SERVERS[request.param]) as server:
        yield server


def open_stream(server: Server, document: object, path: str = f"{PATH}_stream") -> socket.socket:
    """Send a request and return its connection."""
    body = json.dumps(document).encode()
    connection = socket.create_connection((HOST, server.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_until(connection: socket.socket, text: bytes) -> bytes:
    """Read until the answer has a text."""
    answer = b""
    while text not in answer:
        part = connection.recv(65536)
        assert part, f"the connection ended: {answer!r}"
        answer += part
    return answer


def post(server: Server, document: object, path: str = f"{PATH}_stream") -> tuple[int, list[Any]]:
    """Status and events, or the JSON of an answer with another type."""
    return answers(server.request("POST", path, json.dumps(document).encode()))


def cancelled(server: Server) -> list[int]:
    """Responses that each cancelled request of `ticker` has sent."""
    return [int(number) for number in re.findall(r"ticker: cancelled after (\d+)", server.text)]


def request(request_id: str, count: int, **parameters: str | bool | int) -> Any:
    """A request for a stream of gRPC."""
    parsed = pb.ModelInferRequest.FromString(
        message("ticker", request_id, np.array([count], np.int32), "INT32", "COUNT")
    )
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(parsed.parameters[name], kind, value)
    return parsed


def brief(answer: Any) -> tuple[str, int | str | None, bool]:
    """Id, number (None for no outputs, the text of an error) and final flag of an answer of gRPC."""
    inner = answer.infer_response
    contents = inner.raw_output_contents
    number = int(np.frombuffer(contents[0], np.int32)[0]) if contents else None
    return inner.id, answer.error_message or number, inner.parameters["triton_final_response"].bool_param


def stream_of(server: Server, *requests: Any) -> list[tuple[str, int | str | None, bool]]:
    """Answers of a stream that the client half-closes after its requests."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        answers = channel.stream_stream(STREAM)(iter([r.SerializeToString() for r in requests]), timeout=60)
        return [brief(pb.ModelStreamInferResponse.FromString(answer)) for answer in answers]


# --- Events --------------------------------------------------------------------------------------------------------------


def test_each_response_is_an_event(running: Server) -> None:
    for flag in ("alone", "with"):
        status, events = post(running, {"COUNT": 5, "flag": flag, "id": "7"})
        assert (status, [event["NUMBER"] for event in events]) == (200, [0, 1, 2, 3, 4])
        assert {event["id"] for event in events} == {"7"}
    assert post(running, {"COUNT": 0}) == (200, [])


def test_events_come_before_the_model_has_ended_and_a_disconnect_cancels_it(running: Server) -> None:
    before = len(cancelled(running))
    with open_stream(running, {"COUNT": 1_000_000, "delay_ms": 5}) as connection:
        read_until(connection, b'"NUMBER":3,')
        assert len(cancelled(running)) == before
    until(lambda: len(cancelled(running)) == before + 1)
    assert post(running, {"COUNT": 1})[0] == 200


def test_a_client_that_has_read_everything_and_closes_cancels_too(running: Server) -> None:
    """All is read: the kernel sends no reset with the close, only an end, as of a client that half-closes."""
    before = len(cancelled(running))
    connection = open_stream(running, {"COUNT": 100, "delay_ms": 1000})
    read_until(connection, b"\n\n\r\n3\r\n:\n\n")  # the first event, then a heartbeat
    connection.close()
    until(lambda: len(cancelled(running)) == before + 1)
    assert cancelled(running)[-1] < 60


def test_heartbeats_keep_a_silent_stream_alive(running: Server) -> None:
    with open_stream(running, {"COUNT": 2, "delay_ms": 60_000}) as connection:
        answer = read_until(connection, b":\n\n\r\n3\r\n:\n\n")
    assert b'"NUMBER":0' in answer


def test_exactly_one_response(running: Server) -> None:
    status, (document,) = post(running, {"COUNT": 1}, PATH)
    assert (status, document["NUMBER"]) == (200, 0)
    for count, words in ((0, "sent no response"), (2, "sent more than one response")):
        status, (document,) = post(running, {"COUNT": count}, PATH)
        assert status == 400
        assert words in document["error"]


def test_errors_of_the_model(running: Server) -> None:
    status, (document,) = post(running, {"COUNT": 3, "fail_at": 0})
    assert (status, document) == (400, {"error": "number 0 failed"})
    status, events = post(running, {"COUNT": 3, "fail_at": 1})
    assert (status, [event.get("NUMBER", event) for event in events]) == (200, [0, {"error": "number 1 failed"}])


def test_other_routes_refuse_a_decoupled_model(running: Server) -> None:
    body = {"inputs": [{"name": "COUNT", "datatype": "INT32", "shape": [1], "data": [1]}]}
    status, _, content = running.request("POST", "/v2/models/ticker/infer", json.dumps(body).encode())
    assert (status, "decoupled" in json.loads(content)["error"]) == (400, True)
    with triton.InferenceServerClient(running.grpc_address) as client:
        with pytest.raises(triton.InferenceServerException, match="decoupled") as raised:
            client.infer("ticker", [tensor("COUNT", np.array([1], np.int32), "INT32")])
        assert "UNIMPLEMENTED" in str(raised.value.status())


def test_a_stream_counts_once(running: Server) -> None:
    def counts() -> tuple[int, int]:
        status = json.loads(running.request("GET", "/v2/models/counted/stats")[2])["model_stats"][0]
        stats = status["inference_stats"]
        return stats["success"]["count"], stats["fail"]["count"]

    path = "/v2/models/counted/generate_stream"
    post(running, {"COUNT": 20}, path)
    until(lambda: counts() == (1, 0))
    post(running, {"COUNT": 20, "fail_at": 10}, path)
    until(lambda: counts() == (1, 1))


def settled(read: Any) -> None:
    """Wait until a number stays the same for a second: a stalled reader's model waits by then."""
    last, since = read(), time.monotonic()
    while time.monotonic() - since < 1:
        time.sleep(0.05)
        now = read()
        if now != last:
            last, since = now, time.monotonic()


def test_a_reader_that_stalls_costs_its_buffers(running: Server) -> None:
    before = len(cancelled(running))
    with open_stream(running, {"COUNT": 20_000, "pad": PAD_BYTES}) as connection:
        read_until(connection, b'"NUMBER":0')
        settled(lambda: _responses(running))
    until(lambda: len(cancelled(running)) == before + 1)
    assert cancelled(running)[-1] < STALLED_RESPONSES


def _responses(server: Server) -> str:
    """Figures of the model that change with each response."""
    text = server.request("GET", "/metrics")[2].decode()
    return "".join(line for line in text.splitlines(True) if "response" in line and "ticker" in line)


# --- gRPC streams ----------------------------------------------------------------------------------------------------------


def test_final_flags(running: Server) -> None:
    assert stream_of(running, request("a", 3)) == [("a", 0, False), ("a", 1, False), ("a", 2, True)]
    assert stream_of(running, request("a", 2, flag="alone")) == [("a", 0, False), ("a", 1, False)]
    assert stream_of(running, request("a", 0)) == []
    enabled = {"triton_enable_empty_final_response": True}
    expected = [("a", 0, False), ("a", 1, False), ("a", None, True)]
    assert stream_of(running, request("a", 2, flag="alone", **enabled)) == expected
    assert stream_of(running, request("a", 0, **enabled)) == [("a", None, True)]
    assert stream_of(running, request("a", 3, fail_at=1)) == [("a", 0, False), ("a", "number 1 failed", True)]


def test_the_end_of_the_call_cancels_its_requests(running: Server) -> None:
    before = len(cancelled(running))
    with grpc.insecure_channel(running.grpc_address) as channel:
        requests = [request(str(n), 1_000_000, delay_ms=5).SerializeToString() for n in range(2)]
        call = channel.stream_stream(STREAM)(iter(requests), timeout=60)
        for _ in range(6):
            next(call)
        call.cancel()
        until(lambda: len(cancelled(running)) == before + 2)
        # A model that sends nothing: no write of the server fails.
        call = channel.stream_stream(STREAM)(iter([request("a", 2, delay_ms=60_000).SerializeToString()]), timeout=60)
        next(call)
        call.cancel()
        until(lambda: len(cancelled(running)) == before + 3)


def test_a_grpc_client_that_stalls_costs_its_buffers(running: Server) -> None:
    before = len(cancelled(running))
    with grpc.insecure_channel(running.grpc_address) as channel:
        requests = [request("a", 20_000, pad=PAD_BYTES).SerializeToString()]
        call = channel.stream_stream(STREAM)(iter(requests), timeout=120)
        next(call)
        settled(lambda: _responses(running))
        call.cancel()
        until(lambda: len(cancelled(running)) == before + 1)
    assert cancelled(running)[-1] < STALLED_RESPONSES


@pytest.mark.slow
def test_a_thousand_open_streams(running: Server, tmp_path: Path) -> None:
    before = len(cancelled(running))
    connections = [
        open_stream(running, {"COUNT": 1_000_000, "delay_ms": 10_000, "poll_ms": 1_000}) for _ in range(1000)
    ]
    for connection in connections:
        read_until(connection, b'"NUMBER":0')
    assert post(running, {"COUNT": 3})[0] == 200
    for connection in connections:
        connection.close()
    until(lambda: len(cancelled(running)) == before + 1000, 120)
