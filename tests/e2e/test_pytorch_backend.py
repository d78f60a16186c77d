"""Models of PyTorch over HTTP: with an imitation of torch, and with torch itself where it is installed.

`HEADRACE_TEST_TORCH` names a folder with torch for the path of the models, where it is not installed beside the tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import ROOT, Server, serving

TORCH = os.environ.get("HEADRACE_TEST_TORCH", "")
needs_torch = pytest.mark.skipif(
    not TORCH and importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

CONFIG = """
%s
max_batch_size: 16
input { name: "%s", data_type: TYPE_FP32, dims: [ 4 ] }
input { name: "%s", data_type: TYPE_FP32, dims: [ 1 ] }
output { name: "%s", data_type: TYPE_FP32, dims: [ 4 ] }
output { name: "%s", data_type: TYPE_FP32, dims: [ 1 ] }
parameters { key: "INTRA_OP_THREAD_COUNT" value: { string_value: "1" } }
"""
BY_NUMBER = ("INPUT__1", "INPUT__0", "OUTPUT__1", "OUTPUT__0")
TUPLE = {"arguments": ["bias", "x"], "expression": "(bias + 1, x * 2 + bias)"}
DICT = {"arguments": ["bias", "x"], "expression": "{'next': bias + 1, 'sum': x * 2 + bias, 'unused': x}"}
X = np.arange(8, dtype=np.float32).reshape(2, 4)
BIAS = np.array([[10], [20]], np.float32)


def add_model(repository: Path, name: str, filename: str, names: tuple[str, ...], line: str) -> Path:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG % (line, *names))
    return folder / filename


def infer(server: Server, name: str, **arrays: Any) -> dict[str, Any]:
    inputs = [
        {"name": key, "datatype": "FP32", "shape": list(array.shape), "data": array.ravel().tolist()}
        for key, array in arrays.items()
    ]
    status, _, content = server.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": inputs}).encode())
    assert status == 200, content
    outputs = json.loads(content)["outputs"]
    return {each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in outputs}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("torch")
    repository = folder / "repository"
    by_name = ("x", "bias", "sum", "next")
    backend = 'backend: "pytorch"'
    files = {
        add_model(repository, "script", "model.pt", BY_NUMBER, 'platform: "pytorch_libtorch"'): TUPLE,
        add_model(repository, "program", "model.pt2", BY_NUMBER, backend): TUPLE,
        add_model(repository, "named", "model.pt", by_name, backend): DICT,
        add_model(repository, "named_program", "other.pt2", by_name, 'default_model_filename: "other.pt2"'): DICT,
        add_model(repository, "short", "model.pt", BY_NUMBER, backend): {"arguments": ["x"], "expression": "x"},
    }
    for file, document in files.items():
        file.write_text(json.dumps(document))
    path = folder / "path"
    path.mkdir()
    shutil.copy(ROOT / "tests" / "support" / "fake_torch.py", path / "torch.py")
    with serving(repository, folder, env={"PYTHONPATH": str(path)}) as started:
        yield started


@pytest.mark.parametrize("name", ["script", "program"])
def test_tensors_are_passed_by_number(server: Server, name: str) -> None:
    result = infer(server, name, INPUT__1=X, INPUT__0=BIAS)
    np.testing.assert_array_equal(result["OUTPUT__1"], X * 2 + BIAS)
    np.testing.assert_array_equal(result["OUTPUT__0"], BIAS + 1)


@pytest.mark.parametrize("name", ["named", "named_program"])
def test_tensors_are_passed_by_name_and_results_are_taken_by_name(server: Server, name: str) -> None:
    result = infer(server, name, x=X, bias=BIAS)
    np.testing.assert_array_equal(result["sum"], X * 2 + BIAS)
    np.testing.assert_array_equal(result["next"], BIAS + 1)


def test_threads_are_bounded(server: Server) -> None:
    assert "torch runs 1 threads" in server.text


def test_a_module_with_fewer_results_fails_the_request(server: Server) -> None:
    arrays = {"INPUT__1": X, "INPUT__0": BIAS}
    inputs = [
        {"name": key, "datatype": "FP32", "shape": list(array.shape), "data": array.ravel().tolist()}
        for key, array in arrays.items()
    ]
    status, _, content = server.request("POST", "/v2/models/short/infer", json.dumps({"inputs": inputs}).encode())
    assert status == 500
    assert b"reference" in content


def test_a_package_for_another_device_is_refused(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    package = add_model(repository, "package", "model.pt2", BY_NUMBER, 'backend: "pytorch"')
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("package/data/aotinductor/model/a_metadata.json", '{"AOTI_DEVICE_KEY": "cuda"}')
    (tmp_path / "path").mkdir()
    shutil.copy(ROOT / "tests" / "support" / "fake_torch.py", tmp_path / "path" / "torch.py")
    with serving(repository, tmp_path, env={"PYTHONPATH": str(tmp_path / "path")}) as server:
        (row,) = json.loads(server.request("POST", "/v2/repository/index")[2])
        assert "the package is compiled for cuda, the instance runs on cpu: compile it for cpu" in row["reason"]


def test_without_torch_the_model_is_refused_and_others_serve(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_model(repository, "script", "model.pt", BY_NUMBER, 'backend: "pytorch"').write_text("a module")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text("raise ImportError('No module named torch')\n")
    with serving(repository, tmp_path, env={"PYTHONPATH": str(tmp_path / "path")}) as server:
        (row,) = json.loads(server.request("POST", "/v2/repository/index")[2])
        assert row["state"] == "UNAVAILABLE"
        assert "torch is not installed: write it into requirements.txt of the model" in row["reason"]


MAKE_MODELS = """
import sys, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor([2.0]))
    def forward(self, bias, x):
        return bias + 1, x * self.factor + bias

script, program, package, static = sys.argv[1:]
model, arguments = Model().eval(), (torch.zeros(3, 1), torch.zeros(3, 4))
torch.jit.trace(model, arguments).save(script)
rows = torch.export.Dim("rows")
exported = torch.export.export(model, arguments, dynamic_shapes=({0: rows}, {0: rows}))
torch.export.save(exported, program)
torch._inductor.aoti_compile_and_package(exported, package_path=package)
torch._inductor.aoti_compile_and_package(torch.export.export(model, arguments), package_path=static)
"""


@needs_torch
def test_torch_itself_serves_torchscript_exported_programs_and_packages(tmp_path: Path) -> None:
    repository, backend = tmp_path / "repository", 'backend: "pytorch"'
    models = {"script": "model.pt", "program": "model.pt2", "package": "model.pt2", "static": "model.pt2"}
    files = [add_model(repository, name, filename, BY_NUMBER, backend) for name, filename in models.items()]
    environment = {"PYTHONPATH": TORCH} if TORCH else {}
    command = [sys.executable, "-W", "ignore", "-c", MAKE_MODELS, *map(str, files)]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    with serving(repository, tmp_path, env=environment) as server:
        for name in ("script", "program", "package"):
            result = infer(server, name, INPUT__1=X, INPUT__0=BIAS)
            np.testing.assert_array_equal(result["OUTPUT__1"], X * 2 + BIAS)
            np.testing.assert_array_equal(result["OUTPUT__0"], BIAS + 1)
        # Compiled for three rows: without a check it would read past these two.
        with pytest.raises(AssertionError, match="the model failed on this request"):
            infer(server, "static", INPUT__1=X, INPUT__0=BIAS)
        assert "unmatched dim value at 0, expected: 3, but got: 2" in server.text
