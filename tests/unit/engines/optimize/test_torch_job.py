"""The process on another interpreter: its files, its progress, its failures, and the check of its ONNX file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.optimize.pruning_program.jobs import Job, PrunedNetwork
from headrace_engines.optimize.torch_job import TorchInputs, run_torch_job
from headrace_engines.progress import silent
from onnx import numpy_helper

from tests.support.fake_torch_program import CRASHED, EXPLAINED, KILLED, SILENT, fake_python, pruning

X = np.random.default_rng(0).standard_normal((70, 4)).astype(np.float32)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }"""
    )
    weights = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(model, tmp_path / "source.onnx")
    return tmp_path / "source.onnx"


def job_of(source: Path) -> Job:
    return Job("prune", "onnx", str(source), input_name="x", output_name="y", flops_share=0.4, training={"epochs": 2})


def test_result_is_read_and_checked(source: Path, tmp_path: Path) -> None:
    shares: list[tuple[float, str]] = []
    python = fake_python(tmp_path, pruning())
    labels = np.arange(70)
    inputs = TorchInputs(X, train=X, labels=labels)
    result = run_torch_job(python, job_of(source), inputs, lambda done, note: shares.append((done, note)))
    assert result.network == PrunedNetwork(400, 1000, 5, 10, "CPU")
    assert result.difference == 0
    assert shares == [(0.5, "epoch 1 of 1")]
    assert [value.name for value in result.model.graph.input] == ["x"]
    (job,) = [json.loads(line) for line in (tmp_path / "python.calls").read_text().splitlines()]
    assert job["training"] == {"epochs": 2}
    assert not list(tmp_path.glob("headrace-torch-*"))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (EXPLAINED, r"^node view \(view\) cannot be pruned$"),
        (CRASHED, "failed with status 1: ImportError: libtorch.so is missing: check its packages"),
        (SILENT, "wrote no result"),
        (KILLED, "signal 9 .*lower --batch-size"),
        (pruning(offset=0.1), "differ from PyTorch's by .* is allowed"),
        (pruning(offset=float("nan")), "differ from PyTorch's by nan"),
    ],
)
def test_failures_are_explained(program: str, words: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=words):
        run_torch_job(fake_python(tmp_path, program), job_of(source), TorchInputs(X), silent)


def test_missing_interpreter_is_reported(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot be started .*--python"):
        run_torch_job(tmp_path / "none", job_of(source), TorchInputs(X), silent)


def test_files_of_a_job_keep_its_values(tmp_path: Path) -> None:
    job = Job("export", "code", "/net.py", "make", devices=3, training={"epochs": 1})
    job.write(tmp_path)
    assert Job.read(tmp_path) == job
    assert job.with_share(0.25).flops_share == 0.25
    network = PrunedNetwork(1, 2, 3, 4, layers={"a": (1, 2)})
    network.write(tmp_path)
    assert PrunedNetwork.read(tmp_path).macs == 1
