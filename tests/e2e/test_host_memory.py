"""`--host-memory-budget` on a real server: models answer before they are loaded, and evicted ones give their memory back."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.models import add_model
from tests.support.processes import children
from tests.support.serving import Server, serving
from tests.support.waiting import until

WIDTH = 2048
MIB = 1 << 20
MODEL_MIB = WIDTH * WIDTH * 4 // MIB
COUNT = 6


def model(factor: float) -> onnx.ModelProto:
    """Y = factor * X, with 16 MiB of weights."""
    weight = onnx.numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32) * factor, "W")
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in ("X", "Y")]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["X", "W"], ["Y"])], "scale", tensors[:1], tensors[1:], [weight]
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host-memory") / "repository"
    for number in range(COUNT):
        add_model(folder, f"m{number}", model(number + 1.0))
    return folder


def infer(server: Server, number: int) -> None:
    body = np.arange(WIDTH, dtype=np.float32)
    head = json.dumps(
        {
            "inputs": [
                {"name": "X", "shape": [1, WIDTH], "datatype": "FP32", "parameters": {"binary_data_size": body.nbytes}}
            ],
            "outputs": [{"name": "Y", "parameters": {"binary_data": False}}],
        }
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    status, _, answer = server.request("POST", f"/v2/models/m{number}/infer", head + body.tobytes(), headers)
    assert status == 200, answer
    assert json.loads(answer)["outputs"][0]["data"] == pytest.approx((body * (number + 1)).tolist())


def get(server: Server, path: str) -> dict[str, object]:
    status, _, answer = server.request("GET", path)
    assert status == 200, answer
    document: dict[str, object] = json.loads(answer)
    return document


def metric(server: Server, name: str) -> float:
    """Sum of all series of a metric."""
    page = server.request("GET", "/metrics")[2].decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.M))


def resident_mib(server: Server) -> int:
    """Resident memory of the server with its child processes."""
    total_kib = 0
    for pid in (server.process.pid, *children(server.process.pid)):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total_kib += int(line.split()[1])
    return total_kib // 1024


@pytest.mark.parametrize("options", [(), ("--front-ends", "2")], ids=["one process", "front ends"])
def test_models_are_loaded_on_demand_and_evicted_by_use(
    repository: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    budget = f"{5 * MODEL_MIB // 2}MiB"  # room for two
    with serving(repository, tmp_path, "--host-memory-budget", budget, *options) as server:
        for path in ("/v2/health/ready", "/v2/models/m0", "/v2/models/m0/ready", "/v2/models/m0/config"):
            assert get(server, path)
        assert get(server, "/v2/models/m0/explain")["limit"] == "parked"
        assert metric(server, "headrace_host_resident_versions") == 0
        assert metric(server, "headrace_host_memory_limit_bytes") == 5 * MODEL_MIB // 2 * MIB
        assert not metric(server, "headrace_instances_wanted"), "models without a request have no series of their own"
        infer(server, 0)
        infer(server, 1)
        assert metric(server, "headrace_host_resident_versions") == 2
        two_models_mib = resident_mib(server)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: infer(server, number), [*range(COUNT)] * 2))
        assert metric(server, "headrace_host_resident_versions") <= 2
        assert metric(server, "headrace_host_memory_bytes") <= 5 * MODEL_MIB // 2 * MIB
        assert metric(server, "headrace_evictions_total") >= COUNT - 2
        assert metric(server, "headrace_on_demand_loads_total") >= COUNT
        # Of six models two are left: what the others had is back with the system once the heap is quiet.
        until(lambda: resident_mib(server) < two_models_mib + 2 * MODEL_MIB)


def test_explicit_loads_and_unloads_under_a_budget(repository: Path, tmp_path: Path) -> None:
    options = ("--host-memory-budget", "40MiB", "--model-control", "explicit", "--load-model", "m0")
    with serving(repository, tmp_path, *options) as server:
        assert metric(server, "headrace_host_resident_versions") == 0
        assert server.request("POST", "/v2/repository/models/m1/load", b"{}")[0] == 200
        assert metric(server, "headrace_host_resident_versions") == 1
        infer(server, 0)
        infer(server, 1)
        assert server.request("POST", "/v2/repository/models/m1/unload", b"{}")[0] == 200
        until(lambda: metric(server, "headrace_host_resident_versions") == 1)
        assert server.request("GET", "/v2/models/m1/ready")[0] != 200


def test_pages_of_the_list_have_each_model_once(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path, "--host-memory-budget", "1GiB", "--model-control", "explicit") as server:
        names: list[object] = []
        path = "/v2/models?limit=4"
        for _ in range(2):
            page = get(server, path)
            models = page["models"]
            assert isinstance(models, list)
            names += [model["name"] for model in models]
            if "next" in page:
                path = f"/v2/models?limit=4&after={page['next']}"
                # A model that is gone by the next page, even the last of this one, moves no other.
                assert server.request("POST", "/v2/repository/models/m3/unload", b"{}")[0] == 200
        assert names == [f"m{number}" for number in range(COUNT)]
        assert "next" not in page
        everything = get(server, "/v2/models")["models"]
        assert isinstance(everything, list)
        assert everything[:4] == get(server, "/v2/models?limit=4")["models"]
        assert len(get(server, "/v2/models?after=m4")["models"]) == 1  # type: ignore[arg-type]
        for limit in ("0", "-1", "1001", "ten", "1e3"):
            status, _, answer = server.request("GET", f"/v2/models?limit={limit}")
            assert status == 400
            assert b"send 1 to 1000" in answer
