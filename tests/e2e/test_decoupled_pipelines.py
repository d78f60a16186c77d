"""Ensembles and pipelines with a decoupled step over real sockets: order, final flags, errors, cancellation, slow readers."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from tests.e2e.test_decoupled_streams import (
    PAD_BYTES,
    SERVERS,
    TICKER,
    TICKER_CONFIG,
    open_stream,
    read_until,
    settled,
    stream_of,
)
from tests.support.decoupled_models import REPEAT, REPEAT_CONFIG, SQUARE, SQUARE_CONFIG
from tests.support.event_streams import answers
from tests.support.grpc_requests import STREAM, message
from tests.support.models import add_pipeline, ensemble_config
from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving
from tests.support.waiting import until

pb: Any = service_pb2
INT32, STRING, UINT32 = "TYPE_INT32", "TYPE_STRING", "TYPE_UINT32"
# Doubles a number; 13 is refused, and a request with the parameter `slow_ms` takes that long.
DOUBLE = """
import json, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            number = request.inputs()[0].as_numpy()
            time.sleep(json.loads(request.parameters() or "{}").get("slow_ms", 0) / 1000)
            if 13 in number:
                error = pb_utils.TritonError("no 13", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", number * 2)]))
        return responses
"""
DOUBLE_CONFIG = """
backend: "python"
max_batch_size: 0
instance_group [ { count: 3 kind: KIND_CPU } ]
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
# Stalled readers: the bound of the model's responses, twice the pads (the model's and the pipeline's), and what sockets buffer.
STALLED_RESPONSES = 64 + (24 << 20) // PAD_BYTES
Tensors = Mapping[str, tuple[str, Sequence[int]]]
NUMBER: Tensors = {"NUMBER": (INT32, (1,))}
COUNT: Tensors = {"COUNT": (INT32, (1,))}


def add_models(folder: Path) -> None:
    add_python_model(folder, "ticker", TICKER, TICKER_CONFIG)
    add_python_model(folder, "double", DOUBLE, DOUBLE_CONFIG)
    add_python_model(folder, "repeat", REPEAT, REPEAT_CONFIG)
    add_python_model(folder, "square", SQUARE, SQUARE_CONFIG)
    ticks = ("ticker", {"COUNT": "COUNT"}, {"NUMBER": "tick", "PAD": "PAD"})
    doubled = ("double", {"IN": "tick"}, {"OUT": "NUMBER"})
    padded = {**NUMBER, "PAD": (STRING, (1,))}
    add_pipeline(folder, "behind", ensemble_config([ticks, doubled], COUNT, padded, ""))
    before = ("double", {"IN": "COUNT"}, {"OUT": "count"})
    add_pipeline(
        folder,
        "before",
        ensemble_config(
            [before, ("ticker", {"COUNT": "count"}, {"NUMBER": "NUMBER", "PAD": "PAD"})], COUNT, padded, ""
        ),
    )
    # The decoupled step is an ensemble; its configuration says what the server finds out by itself in the others.
    nested = ensemble_config(
        [("behind", {"COUNT": "COUNT"}, {"NUMBER": "tick", "PAD": "PAD"}), doubled], COUNT, padded, ""
    )
    add_pipeline(folder, "nested", nested + " model_transaction_policy { decoupled: true }")
    fan = [
        ("repeat", {"IN": "IN", "DELAY": "DELAY", "WAIT": "WAIT"}, {"OUT": "out", "IDX": "IDX"}),
        ("double", {"IN": "out"}, {"OUT": "LEFT"}),
        ("double", {"IN": "out"}, {"OUT": "RIGHT"}),
    ]
    inputs: Tensors = {"IN": (INT32, (-1,)), "DELAY": (UINT32, (-1,)), "WAIT": (UINT32, (1,))}
    outputs: Tensors = {"LEFT": (INT32, (1,)), "RIGHT": (INT32, (1,)), "IDX": (UINT32, (1,))}
    add_pipeline(folder, "fan", ensemble_config(fan, inputs, outputs, ""))
    conditional = """
input: [{name: COUNT, data_type: int32, dims: [1]}]
output: [{name: NUMBER, data_type: int32, dims: [1]}, {name: BIG, data_type: int32, dims: [-1]}]
pipeline:
  steps:
    ticks: {model: ticker, inputs: {COUNT: COUNT}, outputs: {NUMBER: NUMBER}}
    doubled: {model: double, when: NUMBER.max > 1, inputs: {IN: NUMBER}, outputs: {OUT: BIG}}
"""
    add_pipeline(folder, "conditional", "", files={"config.yaml": conditional})


@pytest.fixture(scope="module", params=list(SERVERS))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("streams")
    add_models(folder / "repository")
    options = ("--stream-heartbeat-s", "0.2")
    with serving(folder / "repository", folder, *options, *SERVERS[request.param]) as server:
        yield server


def post(server: Server, model: str, document: object, route: str = "generate_stream") -> tuple[int, list[Any]]:
    """Status and events, or the JSON of an answer with another type."""
    return answers(server.request("POST", f"/v2/models/{model}/{route}", json.dumps(document).encode()))


def cancelled(server: Server) -> list[int]:
    """Responses that each cancelled request of `ticker` has sent."""
    return [int(number) for number in re.findall(r"ticker: cancelled after (\d+)", server.text)]


def request(model: str, count: int, **parameters: str | bool | int) -> Any:
    parsed = pb.ModelInferRequest.FromString(message(model, "a", np.array([count], np.int32), "INT32", "COUNT"))
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(parsed.parameters[name], kind, value)
    return parsed


def test_responses_run_through_the_steps_behind(running: Server) -> None:
    status, events = post(running, "behind", {"COUNT": 40, "id": "7"})
    assert (status, [event["NUMBER"] for event in events[:13]]) == (200, [2 * n for n in range(13)])
    assert {event["id"] for event in events[:13]} == {"7"}
    assert events[13:] == [{"error": "in ensemble 'behind', step 'double' (model double/1): no 13"}]
    status, events = post(running, "behind", {"COUNT": 12})
    assert (status, [event["NUMBER"] for event in events]) == (200, [2 * n for n in range(12)])
    assert post(running, "behind", {"COUNT": 0}) == (200, [])


def test_steps_before_run_once(running: Server) -> None:
    assert [event["NUMBER"] for event in post(running, "before", {"COUNT": 3})[1]] == [0, 1, 2, 3, 4, 5]
    status, (document,) = post(running, "before", {"COUNT": 13})
    assert (status, document["error"]) == (400, "in ensemble 'before', step 'double' (model double/1): no 13")


def test_nested_fanned_out_and_conditional(running: Server) -> None:
    assert [event["NUMBER"] for event in post(running, "nested", {"COUNT": 4})[1]] == [0, 4, 8, 12]
    events = post(running, "fan", {"IN": [3, 1, 4], "DELAY": [0, 0, 0], "WAIT": 0})[1]
    assert [(event["LEFT"], event["RIGHT"], event["IDX"]) for event in events] == [(6, 6, 0), (2, 2, 1), (8, 8, 2)]
    events = post(running, "conditional", {"COUNT": 3})[1]
    assert [(event["NUMBER"], event["BIG"]) for event in events] == [(0, []), (1, []), (2, 4)]


def test_one_response_by_the_routes_for_one(running: Server) -> None:
    status, (document,) = post(running, "behind", {"COUNT": 1}, "generate")
    assert (status, document["NUMBER"]) == (200, 0)
    status, (document,) = post(running, "behind", {"COUNT": 2}, "generate")
    assert (status, "more than one response" in document["error"]) == (400, True)
    body = {"inputs": [{"name": "COUNT", "datatype": "INT32", "shape": [1], "data": [1]}]}
    status, _, content = running.request("POST", "/v2/models/behind/infer", json.dumps(body).encode())
    assert (status, "decoupled" in json.loads(content)["error"]) == (400, True)


def test_the_configuration_says_that_the_models_are_decoupled(running: Server) -> None:
    for name, expected in (("behind", True), ("nested", True), ("double", False)):
        config = json.loads(running.request("GET", f"/v2/models/{name}/config")[2])
        assert config.get("model_transaction_policy", {}).get("decoupled", False) is expected
    with triton.InferenceServerClient(running.grpc_address) as client:
        assert client.get_model_config("behind").config.model_transaction_policy.decoupled


def test_final_flags(running: Server) -> None:
    assert stream_of(running, request("behind", 3)) == [("a", 0, False), ("a", 2, False), ("a", 4, True)]
    enabled = {"triton_enable_empty_final_response": True}
    expected = [("a", 0, False), ("a", 2, False), ("a", None, True)]
    assert stream_of(running, request("behind", 2, flag="alone", **enabled)) == expected
    assert stream_of(running, request("behind", 0, **enabled)) == [("a", None, True)]
    error = "in ensemble 'behind', step 'ticker' (model ticker/1): number 1 failed"
    assert stream_of(running, request("behind", 3, fail_at=1)) == [("a", 0, False), ("a", error, True)]


def test_a_client_that_leaves_cancels_the_model(running: Server) -> None:
    for model in ("behind", "nested", "before"):
        before = len(cancelled(running))
        with open_stream(
            running, {"COUNT": 6, "delay_ms": 60_000}, f"/v2/models/{model}/generate_stream"
        ) as connection:
            read_until(connection, b'"NUMBER":0')
            assert len(cancelled(running)) == before
        until(lambda before=before: len(cancelled(running)) == before + 1)
    with grpc.insecure_channel(running.grpc_address) as channel:
        before = len(cancelled(running))
        sent = request("behind", 6, delay_ms=60_000).SerializeToString()
        call = channel.stream_stream(STREAM)(iter([sent]), timeout=60)
        next(call)
        call.cancel()
        until(lambda: len(cancelled(running)) == before + 1)


def test_a_failed_step_cancels_the_model(running: Server) -> None:
    before = len(cancelled(running))
    events = post(running, "behind", {"COUNT": 1_000_000, "delay_ms": 2})[1]
    assert [event["NUMBER"] for event in events[:-1]] == [2 * n for n in range(13)]
    assert events[-1]["error"].endswith("no 13")
    until(lambda: len(cancelled(running)) == before + 1)


@pytest.mark.parametrize("model", ["before", "nested"])
def test_a_reader_that_stalls_holds_up_the_model(running: Server, model: str) -> None:
    """`nested` has steps behind the model, two pipelines deep; 13 is never reached: its request waits behind the stalled ones."""
    before = len(cancelled(running))
    document = {"COUNT": 12 if model == "nested" else 10_000, "pad": 2 << 20 if model == "nested" else PAD_BYTES}
    with open_stream(running, document, f"/v2/models/{model}/generate_stream") as connection:
        read_until(connection, b'"NUMBER":0')
        settled(lambda: running.request("GET", "/v2/models/ticker/stats")[2] + responses(running))
    until(lambda: len(cancelled(running)) == before + 1)
    assert cancelled(running)[-1] < (12 if model == "nested" else STALLED_RESPONSES)


def responses(server: Server) -> bytes:
    """Figures of `ticker` that change with each response."""
    lines = server.request("GET", "/metrics")[2].splitlines()
    return b"".join(line for line in lines if b"response" in line and b"ticker" in line)


def test_statistics_and_steps(running: Server) -> None:
    def stats(model: str) -> tuple[int, int]:
        status = json.loads(running.request("GET", f"/v2/models/{model}/stats")[2])["model_stats"][0]
        return status["inference_stats"]["success"]["count"], status["inference_stats"]["fail"]["count"]

    def steps() -> dict[tuple[str, str], float]:
        lines = running.request("GET", "/metrics")[2].decode().splitlines()
        found = [
            re.match(r'headrace_step_requests_total\{model="fan".*step="(.*?)".*outcome="(.*?)".*\} (.*)', line)
            or re.match(r'headrace_step_requests_total\{.*model="fan".*outcome="(.*?)".*step="(.*?)".*\} (.*)', line)
            for line in lines
        ]
        return {(match[1], match[2]): float(match[3]) for match in found if match is not None}

    before, counted = stats("fan"), steps()
    post(running, "fan", {"IN": [3, 1, 4], "DELAY": [0, 0, 0], "WAIT": 0})
    until(lambda: stats("fan") == (before[0] + 1, before[1]))
    added = {key: value - counted.get(key, 0) for key, value in steps().items() if value != counted.get(key, 0)}
    assert sorted(added.values()) == [1, 3, 3]


def test_open_connections_of_the_test_are_closed(running: Server) -> None:
    """The server still serves after all of the above, and no request is left open."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=30):
        assert post(running, "behind", {"COUNT": 2})[0] == 200
    text = running.request("GET", "/metrics")[2].decode()
    open_requests = [
        line for line in text.splitlines() if line.startswith("headrace_in_flight") and 'model="ticker"' in line
    ]
    assert all(line.endswith((" 0", " 0.0")) for line in open_requests)
    assert "Traceback" not in running.text
