"""Descriptors, threads, processes and memory files of every kind of model return after reloads, failed loads and crashes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.examples import examples
from tests.support.models import add_model, add_pipeline, affine, ensemble_config
from tests.support.processes import children
from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving
from tests.support.waiting import until

CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[:, :4] for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor)]) for tensor in tensors]
"""
TENSORS = 'input [{ name: "X" data_type: TYPE_FP32 dims: [16] }] output [{ name: "Y" data_type: TYPE_FP32 dims: [4] }]'
PYTHON = f'backend: "python"\nmax_batch_size: 8\n{TENSORS}\ninstance_group [ {{ count: 2 kind: KIND_CPU }} ]'
ISOLATED = "isolation: process\nmax_batch_size: 8\n"
REPEATED = pytest.mark.parametrize(
    "times",
    [
        pytest.param(4, id="few"),
        pytest.param(examples(50), marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="many"),
    ],
)


def add_onnx(repository: Path) -> None:
    add_model(repository, "m", affine(), config="max_batch_size: 8")


def add_isolated(repository: Path) -> None:
    add_model(repository, "m", affine(), files={"config.yaml": ISOLATED})


def add_python(repository: Path) -> None:
    add_python_model(repository, "m", CODE, PYTHON)


def add_ensemble(repository: Path) -> None:
    add_python_model(repository, "inner", CODE, PYTHON)
    io = {"X": ("TYPE_FP32", (16,))}, {"Y": ("TYPE_FP32", (4,))}
    add_pipeline(repository, "m", ensemble_config([("inner", {"X": "X"}, {"Y": "Y"})], *io))


def held(server: Server) -> tuple[int, int, int, int]:
    """Descriptors, memory files, threads, and processes."""
    folder = Path(f"/proc/{server.process.pid}")
    links = [os.readlink(path) for path in (folder / "fd").iterdir() if path.is_symlink()]
    threads = len(list((folder / "task").iterdir()))
    return len(links), sum("memfd:" in link for link in links), threads, len(children(server.process.pid))


@REPEATED
@pytest.mark.parametrize("add", [add_onnx, add_isolated, add_python, add_ensemble])
def test_nothing_stays_of_reloads_failed_loads_and_crashes(
    tmp_path: Path, add: Callable[[Path], None], times: int
) -> None:
    repository = tmp_path / "models"
    add(repository)
    body = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}).encode()
    broken = '{"parameters": {"config": "{\\"max_batch_size\\": -1}"}}'
    with serving(
        repository, tmp_path, "--model-control", "explicit", "--allow-model-override", "--profile-s", "0"
    ) as server:

        def post(path: str, content: bytes = b"") -> int:
            return server.request("POST", f"/v2/{path}", content)[0]

        def cycle() -> None:
            names = ("inner", "m") if add is add_ensemble else ("m",)
            for name in names:
                assert post(f"repository/models/{name}/load") == 200
                assert post(f"repository/models/{name}/load") == 200
            assert post("repository/models/m/load", broken.encode()) == 400
            until(lambda: post("models/m/infer", body) == 200)
            for pid in children(server.process.pid):
                os.kill(pid, signal.SIGKILL)
            until(lambda: post("models/m/infer", body) == 200)
            for name in names:
                assert post(f"repository/models/{name}/unload") == 200

        for _ in range(2):
            cycle()
        before: list[tuple[int, int, int, int]] = []
        until(lambda: held(server)[3] == 0 and (before.append(held(server)) or len(before) > 20))
        first = before[-1]
        for _ in range(times):
            cycle()
        until(lambda: all(now <= was for now, was in zip(held(server), first, strict=True)))
