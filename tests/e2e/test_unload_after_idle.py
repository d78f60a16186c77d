"""`unload_after_s` on a real server: models of all kinds leave the memory without requests, and the next ones load them."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.models import add_model, affine
from tests.support.processes import children
from tests.support.python_models import ADD_SUB, ADD_SUB_CONFIG, add_python_model
from tests.support.serving import Server, serving
from tests.support.waiting import until

IDLE = "unload_after_s: 1\n"
PIPELINE = """
max_batch_size: 4
input: [{name: X, data_type: fp32, dims: [16]}]
output: [{name: Y, data_type: fp32, dims: [4]}, {name: Z, data_type: fp32, dims: [4]}]
pipeline:
  steps:
    one: {model: plain, inputs: {X: X}, outputs: {Y: Y}}
    two: {model: apart, inputs: {X: X}, outputs: {Y: Z}}
"""
EVICTED = "evicted: loaded on demand"
X = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
PAIR = {
    "inputs": [
        {"name": name, "datatype": "FP32", "shape": [4], "data": [1.0, 2.0, 3.0, 4.0]} for name in ("INPUT0", "INPUT1")
    ]
}
BODIES = {"plain": X, "apart": X, "both": X, "stays": X, "code": PAIR}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    repository = tmp_path / "repository"
    add_model(repository, "plain", affine(seed=1), files={"config.yaml": IDLE})
    add_model(repository, "apart", affine(seed=1), files={"config.yaml": "isolation: process\n" + IDLE})
    add_model(repository, "stays", affine(seed=1))
    (repository / "both").mkdir()
    (repository / "both" / "config.yaml").write_text(PIPELINE)
    limit = 'parameters { key: "headrace.unload_after_s" value { string_value: "1" } }\n'
    add_python_model(repository, "code", ADD_SUB, ADD_SUB_CONFIG + limit)
    return repository


def infer(server: Server, model: str) -> object:
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", json.dumps(BODIES[model]).encode())
    assert status == 200, answer
    return json.loads(answer)["outputs"][0]["data"]


def processes(parent: int) -> int:
    """Number of live processes below one."""
    return sum(1 + processes(child) for child in children(parent))


def counter(server: Server, name: str, model: str) -> float:
    page = server.request("GET", "/metrics")[2].decode()
    (value,) = re.findall(rf'^headrace_{name}_total{{model="{model}",version="1"}} (\S+)$', page, re.M)
    return float(value)


def reasons(server: Server) -> dict[str, str]:
    """Reason of each model in the index, by name; polls all that describes a model, which is no use of it."""
    for model in BODIES:
        for path in ("", "/ready", "/config", "/stats", "/explain"):
            assert server.request("GET", f"/v2/models/{model}{path}")[0] == 200
    rows = json.loads(server.request("POST", "/v2/repository/index", b"{}")[2])
    assert {row["state"] for row in rows} == {"READY"}
    return {row["name"]: row["reason"] for row in rows}


@pytest.mark.parametrize("options", [("--front-ends", "0"), ("--front-ends", "2")], ids=["one process", "front ends"])
def test_idle_models_are_unloaded_and_the_next_requests_load_them(
    repository: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    away = {"plain": EVICTED, "apart": EVICTED, "both": "", "stays": "", "code": EVICTED}
    with serving(repository, tmp_path, *options) as server:
        before = processes(server.process.pid)
        outputs = {model: infer(server, model) for model in BODIES}
        for _ in range(2):
            until(lambda: reasons(server) == away)
            assert server.request("GET", "/v2/health/ready")[0] == 200
            assert json.loads(server.request("GET", "/v2/models/code/explain")[2])["limit"] == "parked"
            until(lambda: processes(server.process.pid) == before - 2)  # those of `apart` and `code` have ended
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda model: (model, infer(server, model)), [*BODIES] * 4))
            assert all(answer == outputs[model] for model, answer in answers)
        for model, reason in away.items():
            if model != "both":
                assert (counter(server, "evictions", model) >= 2) == bool(reason)
                assert (counter(server, "on_demand_loads", model) >= 2) == bool(reason)
