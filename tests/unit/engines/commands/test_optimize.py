"""`headrace optimize`: results published within the loss target, nothing published beyond it, wrong calls refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace_engines.__main__ import main
from headrace_engines.importers import environment
from headrace_engines.onnx_graph import OnnxRunner, read_onnx
from headrace_engines.project import Project, open_project
from onnx import numpy_helper

from tests.support.engine_projects import write_project
from tests.support.fake_torch_program import EXPLAINED, fake_python, pruning

ROWS = 64


def classifier(seed: int = 0) -> onnx.ModelProto:
    """Return two products of 16 and 32 values, and 4 classes."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,16] x) => (float[N,4] y) {
            [first] a = MatMul(x, w0)
            r = Relu(a)
            [second] y = MatMul(r, w1)
        }"""
    )
    random = np.random.default_rng(seed)
    for name, shape in (("w0", (16, 32)), ("w1", (32, 4))):
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name))
    return model


@pytest.fixture
def project(tmp_path: Path) -> Project:
    x = np.random.default_rng(1).standard_normal((ROWS, 16)).astype(np.float32)
    labels = OnnxRunner(classifier()).run({"x": x})["y"].argmax(1)
    return write_project(tmp_path / "models", classifier(), {"x": x, "labels": labels})


def call(tmp_path: Path, *words: str) -> int:
    places = ["--model-repository", str(tmp_path / "models"), "--cache", str(tmp_path / "cache")]
    return main(["optimize", *words, "--seconds", "0.02", "--target", "onnxruntime", *places])


def models(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "models").iterdir())


@pytest.fixture
def with_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that makes a program the interpreter with PyTorch."""

    def use(program: str) -> Path:
        python = fake_python(tmp_path, program)
        monkeypatch.setattr(environment, "framework_python", lambda *_, **__: python)
        monkeypatch.setattr(environment, "installation_text", lambda *_, **__: "")
        return python.with_suffix(".calls")

    return use


def jobs(calls: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_measured_engines_of_another_effort_are_built_anew(
    project: Project, tmp_path: Path, with_program: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # A model whose outputs have other signs, so that it is another engine.
    with_program(pruning(good_from=1.0))
    words = ("net", "--flops", "0.5", "--target-loss", "100")
    assert call(tmp_path, *words) == 0
    stored = len(list((tmp_path / "cache").rglob("*.onnx")))
    assert stored == 2
    assert call(tmp_path, *words, "--progress") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("progress ")]
    shares = [float(line[1]) for line in lines]
    assert len(shares) > 10
    assert shares == sorted(shares)
    assert len(list((tmp_path / "cache").rglob("*.onnx"))) == stored
    assert call(tmp_path, *words, "--optimization-level", "1") == 0
    assert len(list((tmp_path / "cache").rglob("*.onnx"))) == 2 * stored


def test_strongest_pruning_within_the_target_is_published(
    project: Project, tmp_path: Path, with_program: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = with_program(pruning(good_from=0.3))
    words = ["--prune", "channels", "--target-loss", "1", "--epochs", "3", "--devices", "2", "--seed", "9"]
    assert call(tmp_path, "net", *words, "--output", str(tmp_path / "out")) == 0
    tried = jobs(calls)
    assert [job["flops_share"] for job in tried] == [0.5, 0.2, 0.3]
    assert all(job["training"]["epochs"] == 3 and job["training"]["seed"] == 9 for job in tried)
    assert all((job["devices"], job["input_name"], job["output_name"]) == (2, "x", "y") for job in tried)
    document = json.loads((tmp_path / "models/net_pruned/1/optimize.json").read_text())
    assert document == json.loads((tmp_path / "out/optimize.json").read_text())
    assert document["network"]["macs"] == 300
    before, after = document["models"]
    assert before["macs"] == after["macs"] == 16 * 32 + 32 * 4
    assert (before["accuracy"], document["points_lost"], before["joules_per_row"]) == (1.0, 0.0, None)
    assert [timing["rows"] for timing in after["timings"]] == [1, 8]
    assert "<td>joules per row</td><td>-</td><td>-</td>" in (tmp_path / "out/optimize.html").read_text()
    assert [bool(trial["refusal"]) for trial in document["trials"]] == [False, True, False]
    output = capsys.readouterr().out
    assert "20.0% of the FLOPs" in output
    assert "net_pruned version 1 is published" in output
    assert open_project("net_pruned", tmp_path / "models").config.max_batch_size == 8


def test_gate_failure_publishes_nothing(
    project: Project, tmp_path: Path, with_program: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = with_program(pruning(good_from=1.0))
    assert call(tmp_path, "net", "--prune", "channels", "--target-loss", "1") == 1
    assert max(job["flops_share"] for job in jobs(calls)) == 0.9
    assert models(tmp_path) == ["net"]
    assert sorted(path.name for path in (tmp_path / "models/net").iterdir()) == ["1", "calibration.npz", "config.yaml"]
    error = capsys.readouterr().err
    assert "even the weakest pruning, to 90% of the FLOPs, misses the target" in error
    assert "--target-loss" in error


def test_failure_of_the_program_publishes_nothing(
    project: Project, tmp_path: Path, with_program: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with_program(EXPLAINED)
    assert call(tmp_path, "net", "--prune", "channels") == 1
    assert models(tmp_path) == ["net"]
    assert "node view (view) cannot be pruned" in capsys.readouterr().err


def test_fixed_share_is_one_job_and_another_version(
    project: Project, tmp_path: Path, with_program: Callable[[str], Path]
) -> None:
    calls = with_program(pruning())
    assert call(tmp_path, "net", "--prune", "channels", "--flops", "0.35", "--name", "net") == 0
    assert [job["flops_share"] for job in jobs(calls)] == [0.35]
    assert open_project("net", tmp_path / "models").version == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["net", "--prune", "channels", "--flops", "1.5"], "--flops is 1.5"),
        (["net", "--prune", "channels", "--target-loss", "-1"], "--target-loss is -1"),
        (["net", "--prune", "channels", "--devices", "65", "--batch-size", "65"], "--devices is 65"),
        (["net", "--prune", "channels", "--epochs", "0"], "--epochs is 0"),
        (["net.py:make", "--prune", "channels"], "net.py:make: expected FILE.py:function"),
        (["net.py", "--prune", "channels"], "names no function"),
        (["net", "--data", "none.npz"], "no samples none.npz"),
    ],
)
def test_wrong_calls_are_refused(
    words: list[str],
    message: str,
    project: Project,
    tmp_path: Path,
    with_program: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_program(pruning())
    assert call(tmp_path, *words) != 0
    assert message in capsys.readouterr().err
    assert models(tmp_path) == ["net"]


def test_removed_kind_is_refused(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--prune", "2:4"], ["--prune=2:4"]):
        with pytest.raises(SystemExit, match="2"):
            call(tmp_path, "net", *words)
        assert "argument --prune: 2:4 is gone" in capsys.readouterr().err
    assert models(tmp_path) == ["net"]


def test_model_without_samples_is_refused(
    tmp_path: Path, with_program: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with_program(pruning())
    project = write_project(tmp_path / "models", classifier(), {"x": np.ones((4, 16), np.float32)})
    (project.folder.path / "config.yaml").write_text("max_batch_size: 8\n")
    assert call(tmp_path, "net") == 1
    assert "has no samples" in capsys.readouterr().err


def test_code_needs_data(
    tmp_path: Path, with_program: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with_program(pruning())
    (tmp_path / "net.py").write_text("def make(): ...\n")
    assert call(tmp_path, f"{tmp_path / 'net.py'}:make", "--prune", "channels") == 2
    assert "--data" in capsys.readouterr().err


NETWORK = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 3)).eval()
"""


@pytest.mark.slow
def test_pytorch_code_becomes_a_smaller_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs PyTorch, which the test environment does not install")
    pytest.importorskip("onnxscript", reason="needs the exporter of PyTorch")
    monkeypatch.setattr(environment, "framework_python", lambda *_, **__: Path(sys.executable))
    monkeypatch.setattr(environment, "installation_text", lambda *_, **__: "")
    (tmp_path / "net.py").write_text(NETWORK)
    np.savez(tmp_path / "data.npz", picture=np.random.default_rng(0).random((128, 1, 8, 8), np.float32))
    words = ["--prune", "channels", "--data", str(tmp_path / "data.npz"), "--name", "small", "--flops", "0.5"]
    assert (
        call(tmp_path, f"{tmp_path / 'net.py'}:make", *words, "--target-loss", "100", "--epochs", "2", "--devices", "2")
        == 0
    )
    project = open_project("small", tmp_path / "models")
    assert [tensor.name for tensor in project.config.input] == ["picture"]
    document = json.loads((project.version_folder / "optimize.json").read_text())
    before, after = document["models"]
    assert after["macs"] <= 0.5 * before["macs"]
    x = np.random.default_rng(1).random((5, 1, 8, 8), np.float32)
    assert OnnxRunner(read_onnx(project.source)).run({"picture": x})["output"].shape == (5, 3)


@pytest.mark.slow
def test_digits_are_pruned(
    demo_repository: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="needs PyTorch, which the test environment does not install")
    pytest.importorskip("onnxscript", reason="needs the exporter of PyTorch")
    monkeypatch.setattr(environment, "framework_python", lambda *_, **__: Path(sys.executable))
    monkeypatch.setattr(environment, "installation_text", lambda *_, **__: "")
    (tmp_path / "models").mkdir()
    subprocess.run(["cp", "-r", str(demo_repository("digits") / "digits"), str(tmp_path / "models")], check=True)
    assert call(tmp_path, "digits", "--prune", "channels", "--flops", "0.5", "--target-loss", "3", "--epochs", "8") == 0
    document = json.loads((tmp_path / "models/digits_pruned/1/optimize.json").read_text())
    before, after = document["models"]
    assert after["macs"] <= 0.5 * before["macs"]
    assert os.path.getsize(tmp_path / "models/digits_pruned/1/model.onnx") < os.path.getsize(
        tmp_path / "models/digits/1/model.onnx"
    )
