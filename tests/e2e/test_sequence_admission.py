"""Objectives and deadlines of sequences behind a real server: admission at START, and none for later requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.python_models import add_python_model
from tests.support.sequence_models import ACCUMULATOR, accumulator_config, add_echo
from tests.support.serving import Server, serving

SLO = 'parameters { key: "headrace.slo.p99_ms" value: { string_value: "300" } }'


@pytest.fixture(scope="module", params=[(), ("--front-ends", "1")], ids=["one process", "front end"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("admission")
    one = accumulator_config(strategy="oldest { max_candidate_sequences: 1 }", idle_us=3_000_000)
    add_python_model(folder / "repository", "promised", ACCUMULATOR, one + SLO)
    direct = accumulator_config(strategy="direct { }", batch=1, idle_us=3_000_000)
    add_python_model(folder / "repository", "direct", ACCUMULATOR, direct + SLO)
    add_python_model(folder / "repository", "plain", ACCUMULATOR, one)
    echo = add_echo(folder / "repository", "echo", "direct { }")
    config = echo / "config.pbtxt"
    config.write_text(config.read_text() + SLO)
    with serving(folder / "repository", folder, *request.param) as server:
        yield server


def send(
    server: Server, model: str, identity: int, start: bool = False, end: bool = False, **more: int
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and document of the answer to a request of a sequence."""
    document = {
        "inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [1]}],
        "parameters": {"sequence_id": identity, "sequence_start": start, "sequence_end": end, **more},
    }
    status, headers, body = server.request("POST", f"/v2/models/{model}/infer", json.dumps(document).encode())
    return status, headers, json.loads(body)


@pytest.mark.parametrize("model", ["promised", "direct"])
def test_a_sequence_is_admitted_whole_or_refused_with_the_time_of_a_free_slot(running: Server, model: str) -> None:
    assert send(running, model, 1, start=True)[0] == 200
    status, headers, document = send(running, model, 2, start=True)
    assert (status, "no slot is free for the sequence" in document["error"]) == (503, True)
    assert 1 <= int(headers["retry-after"]) <= 4  # at the latest once the other one is idle for too long
    for _ in range(20):  # requests of a live sequence are not refused
        assert send(running, model, 1)[0] == 200
    assert send(running, model, 2)[0] == 400  # it was not started
    assert send(running, model, 1, start=True)[0] == 200  # takes over its own slot
    assert send(running, model, 1, end=True)[0] == 200
    assert send(running, model, 2, start=True, end=True)[0] == 200


def test_a_deadline_counts_as_an_objective(running: Server) -> None:
    assert send(running, "plain", 1, start=True)[0] == 200
    status, _, document = send(running, "plain", 2, start=True, headrace_deadline_us=200_000)
    assert (status, "no slot is free for the sequence" in document["error"]) == (503, True)
    begun_s = time.monotonic()
    assert send(running, "plain", 3, start=True, end=True)[0] == 200  # without one it waits until the other one is idle
    assert time.monotonic() - begun_s > 1


def test_reports_of_a_model_with_sequences_and_an_objective(running: Server) -> None:
    assert send(running, "promised", 9, start=True, end=True)[0] == 200
    for path in ("/v2/models/promised/explain", "/v2/models/promised/config", "/v2/status", "/metrics"):
        assert running.request("GET", path)[0] == 200, path


def test_an_onnx_model_with_a_measured_latency_table(running: Server) -> None:
    inputs = [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [3]}]
    for step in range(50):
        flags = {"sequence_id": 5, "sequence_start": step == 0, "sequence_end": step == 49}
        body = json.dumps({"inputs": inputs, "parameters": flags}).encode()
        status, _, content = running.request("POST", "/v2/models/echo/infer", body)
        assert status == 200, content
    late = json.dumps({"inputs": inputs, "parameters": {**flags, "sequence_start": True, "headrace_deadline_us": 1}})
    assert running.request("POST", "/v2/models/echo/infer", late.encode())[0] in (503, 504)
