"""The builders' command line on a real GPU, with the demo model `digits`: build, inspect, compare, engines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from headrace.config.manifest import Stamp, read_stamps
from headrace_engines.__main__ import main
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.gpu_marks import gpu_marks

pytestmark = gpu_marks(180)

ROOT = Path(__file__).resolve().parents[2]
# Tables do not break their words then.
_WIDE = {**os.environ, "COLUMNS": "200"}


@dataclass(frozen=True)
class Workspace:
    """A repository with `digits`, and a store."""

    repository: Path
    cache: Path

    @property
    def version(self) -> Path:
        return self.repository / "digits" / "1"

    @property
    def options(self) -> list[str]:
        return ["--model-repository", str(self.repository), "--cache", str(self.cache)]

    def copy(self, folder: Path) -> Workspace:
        """One that may be spoilt; the store is the same."""
        shutil.copytree(self.repository, folder / "copy")
        return Workspace(folder / "copy", self.cache)

    def stamp(self) -> Stamp:
        (stamp,) = read_stamps(self.version)
        return stamp


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace_engines", *words]


def run(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """One command in a process of its own, and the seconds it took."""
    start_s = time.monotonic()
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=120, cwd=ROOT, env=_WIDE)
    return done, time.monotonic() - start_s


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with `digits` alone, trained here (4 s on a CPU) and built for nothing yet."""
    repository = tmp_path_factory.mktemp("source")
    done, _ = run("models", "build", "--output", str(repository), "--only", "digits")
    assert done.returncode == 0, done.stdout + done.stderr
    return repository


@pytest.fixture(scope="module")
def workspace(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """`digits` built in INT8 by the command line; to be looked at only."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(source, folder / "repository")
    created = Workspace(folder / "repository", folder / "cache")
    done, seconds = run("build", "digits", "--publish-slower", "--precision", "int8", *created.options)
    print(done.stdout, f"{seconds:.1f} s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "published" in done.stdout
    return created


def test_digits_in_int8(workspace: Workspace) -> None:
    stamp = workspace.stamp()
    assert stamp.machine == TensorRtTarget().describe()
    assert (stamp.precision, stamp.overridden, stamp.forced) == ("int8", True, False)
    assert stamp.artefact.endswith(".plan")
    assert (workspace.version / stamp.artefact).stat().st_size == stamp.size_bytes
    accuracy: dict[str, Any] = dict(stamp.accuracy or {})
    assert accuracy["accuracy"] >= accuracy["reference_accuracy"] - 0.005, accuracy
    assert accuracy["top1_agreement"] > 0.98
    assert [timing.rows for timing in stamp.timings] == [1, 64]
    # Nothing of the work in progress is left.
    assert sorted(path.name for path in workspace.version.iterdir() if path.name.startswith(".")) == []
    assert list((workspace.cache / "scratch").glob("*")) == []


def test_the_second_build_takes_less_than_two_seconds(workspace: Workspace, tmp_path: Path) -> None:
    # As on another machine of the same kind: the store is there, the artefact is not beside the model.
    other = workspace.copy(tmp_path)
    for path in [*other.version.glob("*.plan"), other.version / "build.json"]:
        path.unlink()
    elapsed_s = []
    for _ in range(2):
        done, seconds = run("build", "digits", "--publish-slower", "--precision", "int8", *other.options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "stored" in done.stdout
        elapsed_s.append(seconds)
    print(f"{elapsed_s[0]:.2f} s, {elapsed_s[1]:.2f} s")
    assert min(elapsed_s) < 2.0, elapsed_s
    assert other.stamp().key == workspace.stamp().key


def test_the_server_finds_the_engine(workspace: Workspace) -> None:
    from headrace.config.digests import config_digest, onnx_digest
    from headrace.config.manifest import choose_from_folder
    from headrace_engines.project import open_project

    project = open_project("digits", workspace.repository)
    digests = onnx_digest(project.source), config_digest(project.config)
    choice = choose_from_folder(workspace.version, *digests, TensorRtTarget().describe())
    assert choice.stamp == workspace.stamp()
    assert choice.reason == ""


def test_inspect_names_the_onnx_nodes(workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "digits.html", tmp_path / "digits.json"
    words = ["--model-repository", str(workspace.repository), "--html", str(page), "--json", str(data)]
    assert main(["inspect", "digits", *words]) == 0
    print(capsys.readouterr().out)
    document = json.loads(data.read_text())
    assert document["artefact"] == workspace.stamp().artefact
    assert document["reason"] == ""
    assert document["rows"] == 64
    layers = document["layers"]
    named = {node for layer in layers for node in layer["nodes"]}
    model = onnx.load(workspace.version / "model.onnx")
    measured = {node.name or f"node_of_{node.output[0]}": node.op_type for node in model.graph.node}
    assert named <= measured.keys()
    assert {name for name, kind in measured.items() if kind in ("Conv", "Gemm", "MatMul")} <= named, named
    assert abs(sum(layer["share"] for layer in layers) - 1) < 1e-6
    assert "int8" in {layer["precision"] for layer in layers}
    assert any(layer["tactic"] for layer in layers)
    assert 1 < document["median_us"] <= document["p99_us"]
    html = page.read_text()
    assert all(node in html for node in named)
    assert html.rstrip().endswith("</html>")


def test_compare_has_every_precision(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # How fast the kernels are is not what is tested.
    monkeypatch.setattr(
        "headrace_engines.commands.compare.choose_target", lambda name: TensorRtTarget(optimization_level=1)
    )
    target = TensorRtTarget()
    names = [name for name in ("fp32", "fp16", "int8", "fp8") if not target.refuses(name)]
    words = ["--precisions", ",".join(names), "--batch", "1,64", "--seconds", "0.1", "--output", str(tmp_path / "out")]
    workspace = Workspace(source, tmp_path / "cache")
    assert main(["compare", "digits", *words, *workspace.options]) == 0
    print(capsys.readouterr().out)
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document["machine"] == asdict(target.describe())
    rows = {row["precision"]: row for row in document["rows"]}
    assert list(rows) == names
    assert {name: row["reason"] for name, row in rows.items() if not row["worked"]} == {}
    for name, row in rows.items():
        assert [timing["rows"] for timing in row["timings"]] == [1, 64], name
        assert row["memory_bytes"] > 0
        assert row["size_bytes"] > 0
        assert row["accuracy"]["top1_agreement"] > 0.95, name
    assert "<svg" in (tmp_path / "out" / "compare.svg").read_text()
    assert all(name in (tmp_path / "out" / "compare.html").read_text() for name in names)
    # Nothing is published by it.
    assert not (source / "digits" / "1" / "build.json").exists()


def test_engines_ls_and_verify_on_this_machine(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "ls", "--json", *workspace.options]) == 0
    document = json.loads(capsys.readouterr().out)
    (one,) = document["published"]
    assert (one["model"], one["state"], one["problem"]) == ("digits", "used", None)
    assert one["stamp"]["machine"] == asdict(TensorRtTarget().describe())
    assert [entry["key"] for entry in document["store"]["entries"]] == [workspace.stamp().key]
    assert main(["engines", "verify", *workspace.options]) == 0


def test_a_damaged_plan_is_detected_and_not_used(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = workspace.copy(tmp_path)
    plan = other.version / other.stamp().artefact
    plan.chmod(0o644)
    content = bytearray(plan.read_bytes())
    content[len(content) // 2] ^= 0xFF
    plan.write_bytes(content)
    assert main(["engines", "verify", *other.options]) == 1
    assert "digits" in capsys.readouterr().out
    plan.write_bytes(content[:-1])
    assert main(["inspect", "digits", "--model-repository", str(other.repository)]) == 0
    assert "This is the model itself" in capsys.readouterr().out
    # Publishing again mends it.
    assert main(["build", "digits", "--publish-slower", "--precision", "int8", *other.options]) == 0
    assert main(["engines", "verify", *other.options]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_no_files(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    shutil.copytree(source, tmp_path / "repository")
    workspace = Workspace(tmp_path / "repository", tmp_path / "cache")
    child = subprocess.Popen(
        command("build", "digits", "--publish-slower", "--precision", "fp16", *workspace.options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    try:
        # The scratch folder is there as soon as TensorRT is about to build.
        end = time.monotonic() + 60
        while not any(path.is_dir() for path in (workspace.cache / "scratch").glob("*")) and time.monotonic() < end:
            assert child.poll() is None, child.stdout and child.stdout.read()
            time.sleep(0.02)
        time.sleep(0.5)
        child.send_signal(number)
        document = child.communicate(timeout=60)[0]
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 128 + number, document
    assert not (workspace.version / "build.json").exists()
    assert list(workspace.version.glob("*.plan")) == []
    assert [path for path in (workspace.cache / "scratch").glob("*") if path.is_dir()] == []
    assert list(workspace.cache.glob("*/stamp.json")) == []
