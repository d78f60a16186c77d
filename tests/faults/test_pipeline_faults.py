"""Ensembles whose models die or hang: the error names the step, and everything else is served."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models import add_model, add_pipeline, affine, ensemble_config, scores
from tests.support.processes import isolated_children, stop
from tests.support.serving import Server, serving
from tests.support.waiting import until

FP32 = "TYPE_FP32"
ISOLATED = "isolation: process\nisolation_timeout_s: 1.5\nmax_batch_size: 8\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    repository = folder / "repository"
    add_model(repository, "apart", affine(seed=1), files={"config.yaml": ISOLATED})
    add_model(repository, "rank", scores(4), config="max_batch_size: 8")
    io: Any = {"x": (FP32, (16,))}, {"y": (FP32, (4,))}
    for name, first in (("pair", "apart"), ("safe", "within")):
        steps = [(first, {"X": "x"}, {"Y": "l"}), ("rank", {"X": "l"}, {"SCORES": "y"})]
        add_pipeline(repository, name, ensemble_config(steps, *io))
    add_model(repository, "within", affine(seed=1), config="max_batch_size: 8")
    with serving(repository, folder) as started:
        yield started


def infer(server: Server, model: str, **parameters: int) -> tuple[int, dict[str, Any]]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    status, _, content = server.request("POST", f"/v2/models/{model}/infer", body)
    return status, json.loads(content)


def is_ready(server: Server, model: str) -> bool:
    return server.request("GET", f"/v2/models/{model}/ready")[0] == 200


def test_a_killed_process_fails_its_step_and_comes_back(server: Server) -> None:
    assert infer(server, "pair")[1]["outputs"] == infer(server, "safe")[1]["outputs"]
    (child,) = isolated_children(server.process.pid)
    os.kill(child, signal.SIGKILL)
    outcomes = [infer(server, "pair") for _ in range(20)]
    for status, response in outcomes:
        assert status == 200 or response["error"].startswith("in ensemble 'pair', step 'apart' (model apart/1): "), (
            response
        )
        assert status in (200, 500, 503)
    assert infer(server, "safe")[0] == 200
    until(lambda: infer(server, "pair")[0] == 200)
    until(lambda: is_ready(server, "pair"))


@pytest.mark.timing
def test_a_hanging_step_ends_at_the_deadline_or_at_its_own_limit(server: Server) -> None:
    until(lambda: infer(server, "pair")[0] == 200)
    (child,) = isolated_children(server.process.pid)
    stop(child)
    begun_s = time.monotonic()
    status, response = infer(server, "pair", headrace_deadline_us=300_000)
    assert (status in (503, 504), time.monotonic() - begun_s < 1.4) == (True, True), response
    status, response = infer(server, "pair")
    assert status in (200, 500, 503)
    assert status == 200 or response["error"].startswith("in ensemble 'pair', step 'apart'"), response
    assert infer(server, "safe")[0] == 200
    until(lambda: infer(server, "pair")[0] == 200)


def test_no_request_is_left_in_flight(server: Server) -> None:
    until(lambda: infer(server, "pair")[0] == 200)

    def idle() -> bool:
        lines = server.request("GET", "/metrics")[2].decode().splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith("headrace_in_flight{")]
        return len(values) == 5 and set(values) == {"0.0"}

    until(idle)
