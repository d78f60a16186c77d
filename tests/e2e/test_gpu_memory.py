"""Models that do not fit together into a GPU's memory, over real sockets; the GPU is a fake in the server's process."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from headrace.models.gpu_backend import tensorrt_machine

from tests.support.control_thread import X, expected
from tests.support.fake_gpu import install_gpu
from tests.support.gpu_servers import COMMAND
from tests.support.models import add_model, affine
from tests.support.serving import Server, start
from tests.support.serving import serving as support_serving
from tests.support.waiting import on_threads, until
from tests.unit.models.test_gpu_backend import plan_of

TENSORRT = "backend: tensorrt\nmax_batch_size: 8\n"
MEMORY = re.compile(r'^headrace_gpu_memory_bytes\{gpu="0",kind="\w+",model="(\w+)",version="1"\} (\S+)$', re.MULTILINE)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install_gpu(monkeypatch)
    for seed, name in enumerate("abc", 1):
        folder = add_model(tmp_path / "repository", name, affine(seed=seed))
        (folder / "config.yaml").write_text(TENSORRT)
        (folder / "1" / "model.plan").write_bytes(plan_of(tmp_path, seed))
    return tmp_path / "repository"


serving = partial(support_serving, command=COMMAND)


def check_inference(server: Server, name: str, seed: int) -> None:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 16], "data": X[0].tolist()}
    status, _, body = server.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}).encode())
    assert status == 200, body
    np.testing.assert_allclose(json.loads(body)["outputs"][0]["data"], expected(seed), rtol=1e-4)


def index(server: Server) -> dict[str, tuple[str, str]]:
    rows = json.loads(server.request("POST", "/v2/repository/index", b"{}")[2])
    return {row["name"]: (row["state"], row["reason"]) for row in rows}


def memory(server: Server) -> dict[str, float]:
    """Bytes of the GPU by model."""
    page = server.request("GET", "/metrics")[2].decode()
    total_bytes: dict[str, float] = {}
    for name, size in MEMORY.findall(page):
        total_bytes[name] = total_bytes.get(name, 0) + float(size)
    return total_bytes


def test_more_models_than_the_gpu_holds_are_served_in_turns(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path) as server:
        sizes = memory(server)
        assert len(set(sizes.values())) == 1, sizes
        assert set(sizes) == set("abc")
        check_inference(server, "a", 1)
    size = sizes["a"]
    fraction = repr((2 * size + 0.5) / (1 << 30))
    # One load at a time: the first model is the one that is evicted.
    options = ("--gpu-memory-fraction", fraction, "--model-load-thread-count", "1")
    with serving(repository, tmp_path, *options) as server:
        assert server.request("GET", "/v2/health/ready")[0] == 200
        assert index(server) == {"a": ("READY", "evicted: loaded on demand"), "b": ("READY", ""), "c": ("READY", "")}
        assert server.request("GET", "/v2/models/a/ready")[0] == 200
        assert set(memory(server)) == {"b", "c"}

        def client(model: tuple[int, str]) -> None:
            for _ in range(3):
                check_inference(server, model[1], model[0])

        on_threads(client, [*enumerate("abc", 1)] * 2)
        assert sum(memory(server).values()) <= 2 * size
        page = server.request("GET", "/metrics")[2].decode()
        assert re.search(r'^headrace_on_demand_loads_total\{model="a",version="1"\} [1-9]', page, re.MULTILINE)
        assert f'headrace_gpu_memory_limit_bytes{{gpu="0"}} {2 * size}' in page


def test_a_model_that_cannot_fit_is_reported_and_the_others_are_served(repository: Path, tmp_path: Path) -> None:
    (repository / "b" / "config.yaml").write_text(TENSORRT + "gpu_memory_budget: 1KiB\n")
    with serving(repository, tmp_path) as server:
        state, reason = index(server)["b"]
        assert state == "UNAVAILABLE"
        assert "its gpu_memory_budget is 1.0 KiB" in reason
        check_inference(server, "a", 1)
        check_inference(server, "c", 3)
        status, _, body = server.request("POST", "/v2/models/b/infer", b'{"inputs": []}')
        assert status == 503
        assert b"gpu_memory_budget" in body


# The road from a model.onnx to the GPU


@pytest.fixture
def road(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the model "r", which has the precision FP16 and nothing else, and a builder's orders in `orders`."""
    install_gpu(monkeypatch)
    folder = add_model(tmp_path / "repository", "r", affine(seed=1))
    (folder / "config.yaml").write_text("max_batch_size: 8\noptimization: {precision: fp16}\n")
    orders = tmp_path / "orders"
    orders.mkdir()
    (orders / "engine.plan").write_bytes(plan_of(tmp_path, 2))
    stamp = {"machine": asdict(tensorrt_machine()), "precision": "fp16", "asked": "fp16"}
    (orders / "tensorrt.json").write_text(json.dumps(stamp))
    for name in ("hold", "readonly"):
        (orders / name).touch()
    return tmp_path / "repository"


def metadata(server: Server) -> dict[str, str]:
    parameters: dict[str, str] = json.loads(server.request("GET", "/v2/models/r")[2])["parameters"]
    return {name.removeprefix("headrace."): value for name, value in parameters.items() if name.startswith("headrace.")}


def test_the_cpu_serves_until_the_gpu_is_ready_and_all_status_pages_agree(road: Path, tmp_path: Path) -> None:
    orders, state = tmp_path / "orders", tmp_path / "state"
    env = {"HOME": str(tmp_path), "FAKE_BUILDER_ORDERS": str(orders), "COLUMNS": "250"}
    before = sorted(path.name for path in (road / "r" / "1").iterdir())

    def log(name: str) -> Path:
        return tmp_path / name

    with start(road, log("first.log"), "--state-dir", str(state), env=env, command=COMMAND) as server:
        server.wait_until_ready()
        check_inference(server, "r", 1)
        until(
            lambda: "building TensorRT FP16, usually a minute or two; the CPU serves meanwhile" in index(server)["r"][1]
        )
        reason = "model.onnx serves on the CPU until its engine is built"
        assert metadata(server) == {
            "runtime": "onnxruntime",
            "device": "CPU",
            "precision": "as in model.onnx",
            "artefact": "model.onnx",
            "not_on_gpu": reason,
        }
        assert re.search(r"r +1 +READY +onnxruntime +CPU +as in model.onnx *\nr 1: \S", server.text)
        explained = json.loads(server.request("GET", "/v2/models/r/explain")[2])
        assert explained["limit"] == "not_on_gpu"
        assert reason in explained["summary"]
        (orders / "hold").unlink()
        until(lambda: index(server)["r"] == ("READY", ""))
        check_inference(server, "r", 2)
        there = {"runtime": "tensorrt", "device": "GPU 0", "precision": "fp16"}
        assert there.items() <= metadata(server).items()
        (statistics,) = json.loads(server.request("GET", "/v2/models/r/stats")[2])["model_stats"]
        assert there.items() <= statistics["headrace"].items()
        (shown,) = json.loads(server.request("GET", "/v2/status")[2])["models"]
        assert there.items() <= shown["serving"].items()
        grpc = triton_grpc.InferenceServerClient(server.grpc_address)
        assert grpc.get_inference_statistics("r").model_stats[0].name == "r"
        grpc.close()
        server.stop()
        assert "building TensorRT FP16" in server.text
    assert sorted(path.name for path in (road / "r" / "1").iterdir()) == before, "the engine is in the state folder"
    with serving(road, tmp_path, "--state-dir", str(state)) as server:
        assert index(server)["r"] == ("READY", "")
        check_inference(server, "r", 2)


@pytest.mark.parametrize(("config", "status"), [("", 1), ("fallback: onnxruntime\n", 0)])
def test_strict_refuses_cpu_fallback_for_a_required_gpu(tmp_path: Path, config: str, status: int) -> None:
    folder = add_model(tmp_path / "repository", "r", affine(seed=1))
    (folder / "config.yaml").write_text("instance_group: [{kind: gpu}]\n" + config)
    with start(tmp_path / "repository", tmp_path / "log", "--strict", env={"COLUMNS": "250"}) as server:
        if status:
            assert server.wait() == status
            assert "--strict: model r version 1 requires a GPU" in server.text
        else:
            server.wait_until_ready()
            assert re.search(r"r +1 +READY +onnxruntime +CPU .*\nr 1: model\.onnx serves on the CPU", server.text)
            server.stop()
