"""Ensembles whose models die or hang: the error names the step, and everything else is served."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model
from tests.support.attacks import LIVENESS_S
from tests.support.liveness import LivenessProbe
from tests.support.models import add_model, add_pipeline, affine, ensemble_config, scores
from tests.support.processes import isolated_children, stop
from tests.support.serving import HOST, Server, serving
from tests.support.waiting import until

FP32 = "TYPE_FP32"
IO = (TensorProto.FLOAT, (1,))
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


def test_ensembles_that_double_at_each_level(tmp_path: Path) -> None:
    """Steps are counted before any runs: 512 doublings would take days, and hold the event loop and SIGTERM as long."""
    repository = tmp_path / "repository"
    add_model(repository, "e00", onnx_model([helper.make_node("Neg", ["x"], ["y"])], {"x": IO}, {"y": IO}))
    io: Any = {"x": (FP32, (1,))}, {"y": (FP32, (1,))}
    for level in range(1, 31):
        called = f"e{level - 1:02}"
        steps = [(called, {"x": "x"}, {"y": "m"}), (called, {"x": "m"}, {"y": "y"})]
        add_pipeline(repository, f"e{level:02}", ensemble_config(steps, *io, more=""))
    for level in range(1, 31):
        called = f"n{level - 1:02}" if level > 1 else "e00"
        add_pipeline(repository, f"n{level:02}", ensemble_config([(called, {"x": "x"}, {"y": "y"})], *io, more=""))
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [3.0]}
    with serving(repository, tmp_path, "--model-control", "explicit", "--load-model", "*") as server:
        _, _, content = server.request("POST", "/v2/repository/index", b"{}")
        rows = {row["name"]: row for row in json.loads(content)}
        for name, reason in (
            ("e10", "one request runs 2046 steps in 10 levels of pipelines, at most 1024 in 16 are allowed"),
            ("e30", "needs model 'e29', which is not served"),
            ("n17", "one request runs 17 steps in 17 levels of pipelines"),
        ):
            assert reason in rows[name]["reason"], rows[name]
        with LivenessProbe(HOST, server.port, server.process.pid) as probe:
            for name in ("e09", "n16", "e00"):
                status, _, content = server.request(
                    "POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}).encode()
                )
                assert (status, json.loads(content)["outputs"][0]["data"]) == (200, [3.0 if name == "e09" else -3.0])
        assert probe.quantile_s(1.0) < LIVENESS_S
        # A pipeline below others: what they would run is counted too.
        steps = [("e09", {"x": "x"}, {"y": "m"}), ("e00", {"x": "m"}, {"y": "y"})]
        add_pipeline(repository, "n01", ensemble_config(steps, *io, more=""))
        status, _, content = server.request("POST", "/v2/repository/models/n01/load", b"{}")
        assert (status, "one request of 'n02' runs 1025 steps" in content.decode()) == (400, True), content
