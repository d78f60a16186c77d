"""Models that do not all fit into a GPU's memory, asked over real sockets; the GPU is a fake in the server's process."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.fake_gpu import install_gpu
from tests.models import add_model, affine
from tests.serving import Server, start
from tests.unit.control.control_thread import X, expected
from tests.unit.control.test_tensorrt_models import plan_of

COMMAND = (sys.executable, "-m", "tests.fake_gpu_server")
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


@contextmanager
def serving(repository: Path, log: Path, *options: str) -> Iterator[Server]:
    server = start(repository, log, *options, command=COMMAND)
    try:
        server.wait_until_ready()
        yield server
        server.stop()
    finally:
        server.process.kill()
        server.process.wait()


def ask(server: Server, name: str, seed: int) -> None:
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
    found: dict[str, float] = {}
    for name, size in MEMORY.findall(page):
        found[name] = found.get(name, 0) + float(size)
    return found


def test_more_models_than_the_gpu_holds_are_served_in_turns(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "all.log") as server:
        sizes = memory(server)
        assert len(set(sizes.values())) == 1, sizes
        assert set(sizes) == set("abc")
        ask(server, "a", 1)
    size = sizes["a"]
    fraction = repr((2 * size + 0.5) / (1 << 30))
    with serving(repository, tmp_path / "two.log", "--gpu-memory-fraction", fraction) as server:
        assert server.request("GET", "/v2/health/ready")[0] == 200
        assert index(server) == {"a": ("READY", "parked: loaded on demand"), "b": ("READY", ""), "c": ("READY", "")}
        assert server.request("GET", "/v2/models/a/ready")[0] == 200
        assert set(memory(server)) == {"b", "c"}
        failures: list[BaseException] = []

        def client(name: str, seed: int) -> None:
            try:
                for _ in range(3):
                    ask(server, name, seed)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=client, args=(name, seed)) for seed, name in enumerate("abc", 1) for _ in "12"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert sum(memory(server).values()) <= 2 * size
        page = server.request("GET", "/metrics")[2].decode()
        assert re.search(r'^headrace_on_demand_loads_total\{model="a",version="1"\} [1-9]', page, re.MULTILINE)
        assert f'headrace_gpu_memory_limit_bytes{{gpu="0"}} {2 * size}' in page


def test_a_model_that_fits_in_no_way_is_told_of_and_the_others_are_served(repository: Path, tmp_path: Path) -> None:
    (repository / "b" / "config.yaml").write_text(TENSORRT + "gpu_memory_budget: 1KiB\n")
    with serving(repository, tmp_path / "budget.log") as server:
        state, reason = index(server)["b"]
        assert state == "UNAVAILABLE"
        assert "its gpu_memory_budget is 1.0 KiB" in reason
        ask(server, "a", 1)
        ask(server, "c", 3)
        status, _, body = server.request("POST", "/v2/models/b/infer", b'{"inputs": []}')
        assert status == 503
        assert b"gpu_memory_budget" in body
