"""`headrace compare`: real engines of a tiny model, a function that builds them directly, and engines that fail."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import headrace_engines.commands.compare
import numpy as np
import onnx
import pytest
from headrace.config.machine import Machine
from headrace_engines.accuracy import Accuracy
from headrace_engines.build import BuildResult
from headrace_engines.commands.compare import (
    ROUNDS,
    Comparison,
    add_arguments,
    comparison_page,
    comparison_picture,
    default_sizes,
    run,
)
from headrace_engines.errors import BuildError, CallError
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.progress import Report, silent
from headrace_engines.project import BuildSpec, Project, open_project, read_spec
from headrace_engines.store import Store
from headrace_engines.targets.base import BatchTiming, Engine, MeasuredLayer, Target, TargetSpec
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget
from onnx import numpy_helper
from rich.console import Console

from tests.support import networks
from tests.support.engine_projects import write_project

CONFIG = """backend: onnxruntime
max_batch_size: {batch}
input: [{{name: x, data_type: TYPE_FP32, dims: [8]}}]
output: [{{name: y, data_type: TYPE_FP32, dims: [4]}}]
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,8] x) => (float[N,4] y) { [mul] y = MatMul(x, w) }"""
    )
    weights = np.random.default_rng(0).standard_normal((8, 4)).astype("f4")
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    folder = tmp_path / "models" / "small"
    (folder / "1").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(batch=8))
    onnx.save(model, folder / "1" / "model.onnx")
    return open_project("small", tmp_path / "models")


def accuracy_of(precision: str) -> Accuracy:
    lost = 0.0 if precision == "fp32" else 0.02
    return Accuracy(50, "held_out.npz (50 samples)", 1 - lost, 1 - lost, lost, 0.9 - lost, 0.9)


def build_directly(project: Project, spec: BuildSpec, target: Target, store: Store, report: Report) -> BuildResult:
    path = store.root / f"{spec.precision}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    target.build(read_onnx(project.source), TargetSpec(spec.precision), path, report)
    machine, kept = target.describe(), ("mul",) if spec.precision == "int8" else ()
    size_bytes = path.stat().st_size
    return BuildResult(
        path, spec, machine, "0" * 64, accuracy_of(spec.precision), [], kept, (), size_bytes, 1.5, cached=False
    )


def fails_on_int8(project: Project, spec: BuildSpec, target: Target, store: Store, report: Report) -> BuildResult:
    if spec.precision == "int8":
        raise BuildError("small: int8 needs <samples> to calibrate with")
    if spec.precision == "fp16":
        raise MemoryError
    return build_directly(project, spec, target, store, report)


def quiet(_name: str) -> Report:
    return silent


def compare(*arguments: Any, build: Any = build_directly) -> Comparison:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headrace_engines.commands.compare, "build_engine", build)
        return headrace_engines.commands.compare.compare(*arguments)


def compared(project: Project, tmp_path: Path, precisions: tuple[str, ...], build: Any = build_directly) -> Comparison:
    store = Store(tmp_path / "store")
    return compare(project, OnnxRuntimeTarget(), store, precisions, (1, 8), 0.02, quiet, build=build)


def test_every_precision_is_timed_at_every_size(project: Project, tmp_path: Path) -> None:
    comparison = compared(project, tmp_path, ("fp32", "int8"))
    for row in comparison.rows:
        assert [timing.rows for timing in row.timings] == [1, 8]
        assert all(0 < timing.median_us <= timing.p99_us for timing in row.timings)
        assert row.memory_bytes is not None
        assert row.memory_bytes > 0
    assert comparison.speed_up(comparison.rows[0], 8) == 1
    assert comparison.data == "held_out.npz (50 samples)"


def test_failures_and_refusals_have_a_row(project: Project, tmp_path: Path) -> None:
    comparison = compared(project, tmp_path, ("fp32", "fp16", "int8", "fp8"), fails_on_int8)
    reasons = {row.precision: row.reason for row in comparison.rows}
    assert reasons["fp32"] == ""
    assert "memory" in reasons["fp16"]
    assert "samples" in reasons["int8"]
    assert "FP8" in reasons["fp8"]
    assert [row.precision for row in comparison.worked] == ["fp32"]
    page = comparison_page(comparison)
    assert "int8 needs &lt;samples&gt;" in page
    assert "<samples>" not in page


class _NoFp8Convolutions(OnnxRuntimeTarget):
    def refuses(self, precision: str, *, version_compatible: bool = False) -> str:
        return ""

    def refuses_fp8_convolutions(self) -> str:
        return "TensorRT 10.6.0 is too old"


def test_layers_that_fp8_leaves_in_fp16_are_noted(tmp_path: Path) -> None:
    def remarks(text: str, folder: Path) -> list[str]:
        model = networks.network(text, networks.weights(w=(4, 4, 1, 1)), ("N", 4, 8, 8))
        project = write_project(folder, model, networks.inputs_of(model, 16))
        target, store = _NoFp8Convolutions(), Store(folder / "store")
        result = compare(project, target, store, ("fp32", "fp8"), (1,), 0.02, quiet)
        return [row.remark for row in result.rows]

    assert remarks("y = Conv(x, w)", tmp_path / "a") == ["", "convolutions run in fp16: TensorRT 10.6.0 is too old"]
    assert remarks("y = Add(x, x)", tmp_path / "b") == ["", ""]


def test_the_json_keeps_its_form(project: Project, tmp_path: Path) -> None:
    document = json.loads(json.dumps(compared(project, tmp_path, ("fp32", "int8", "fp8")).to_json(), allow_nan=False))
    assert list(document) == [
        "format",
        "model",
        "version",
        "machine",
        "data",
        "batch_sizes",
        "seconds",
        "rounds",
        "rows",
    ]
    assert [list(row) for row in document["rows"]] == 3 * [
        [
            "precision", "worked", "reason", "remark", "accuracy", "refusal", "kept", "size_bytes", "memory_bytes",
            "build_seconds", "cached", "key", "timings",
        ]
    ]  # fmt: skip
    assert [row["worked"] for row in document["rows"]] == [True, True, False]
    assert list(document["rows"][0]["timings"][0]) == ["rows", "median_us", "p99_us", "rows_per_s"]
    assert document["rows"][1]["accuracy"]["drop"] == pytest.approx(0.02)
    assert document["rows"][1]["kept"] == ["mul"]
    assert document["batch_sizes"] == [1, 8]


def test_layers_are_compared_on_request(tmp_path: Path) -> None:
    model = networks.residual()
    project = write_project(tmp_path / "models", model, networks.inputs_of(model, 16))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [project.name, "--model-repository", str(tmp_path / "models"), "--cache", str(tmp_path / "cache")]
    words += ["--target", "onnxruntime", "--precisions", "fp32,int8", "--batch", "1", "--seconds", "0.01"]
    output = tmp_path / "output"
    console = Console(file=io.StringIO(), width=160)
    assert run(parser.parse_args([*words, "--layers", "--output", str(output)]), console) == 0
    document = json.loads((output / "compare.json").read_text())
    assert document["layers"]["precisions"] == ["fp32", "int8"]
    assert any(row["operator"] == "Relu" and row["differences"]["int8"] for row in document["layers"]["rows"])
    assert "<h2>Layers</h2>" in (output / "compare.html").read_text()
    assert isinstance(console.file, io.StringIO)
    assert "int8 cosine" in console.file.getvalue()


def test_values_that_are_not_finite_are_none_in_json(project: Project, tmp_path: Path) -> None:
    comparison = compared(project, tmp_path, ("fp32",))
    row = comparison.rows[0]
    assert row.built is not None
    broken = replace(row.built, accuracy=Accuracy(1, "noise", None, float("nan"), float("inf")))
    document = replace(row, built=broken).to_json()
    assert document["accuracy"]["cosine"] is None
    assert document["accuracy"]["max_abs"] is None


@dataclass
class Clocked:
    """An engine that records its calls and fails at a given batch size."""

    name: str
    calls: list[tuple[str, int]]
    fails_at: int = 0
    closed: list[str] = field(default_factory=list)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def time(self, inputs: Mapping[str, Any], seconds: float) -> BatchTiming:
        rows = len(next(iter(inputs.values())))
        self.calls.append((self.name, rows))
        if rows == self.fails_at:
            raise BuildError("out of device memory")
        turn = sum(1 for call in self.calls if call == (self.name, rows))
        # Other work slows down the third round of five.
        median_us = 900.0 if turn == 3 else 100.0 + turn
        return BatchTiming(rows, median_us, 2 * median_us, rows * 1e6 / median_us)

    def layers(self, inputs: Mapping[str, Any]) -> list[MeasuredLayer]:
        return []

    @property
    def memory_bytes(self) -> int:
        raise BuildError("no memory to be seen")

    def close(self) -> None:
        self.closed.append(self.name)


class ClockedTarget(OnnxRuntimeTarget):
    """Opens `Clocked` engines."""

    def __init__(self, fails_at: dict[str, int]) -> None:
        self.calls: list[tuple[str, int]] = []
        self.closed: list[str] = []
        self._fails_at = fails_at

    def open(  # type: ignore[override]
        self, path: Path, source: onnx.ModelProto | None = None, *, host_code: bool = False
    ) -> Engine:
        if self._fails_at.get(path.stem) == -1:
            raise BuildError("cannot be opened")
        return Clocked(path.stem, self.calls, self._fails_at.get(path.stem, 0), self.closed)


def test_precisions_alternate_and_each_is_first_once(project: Project, tmp_path: Path) -> None:
    target = ClockedTarget({})
    comparison = compare(project, target, Store(tmp_path), ("fp32", "fp16", "int8"), (1, 8), 1.0, quiet)
    first_size = [name for name, rows in target.calls if rows == 1]
    rounds = [first_size[i : i + 3] for i in range(0, len(first_size), 3)]
    assert len(rounds) == ROUNDS
    assert all(sorted(names) == ["fp16", "fp32", "int8"] for names in rounds)
    assert {names[0] for names in rounds} == {"fp32", "fp16", "int8"}
    assert comparison.rows[0].timings[0].median_us == 104.0  # one bad round in five does not show
    assert sorted(target.closed) == ["fp16", "fp32", "int8"]
    assert comparison.rows[0].memory_bytes is None
    assert "no memory to be seen" in comparison.rows[0].remark


def test_an_engine_that_fails_while_it_is_timed_is_a_row_with_the_reason(project: Project, tmp_path: Path) -> None:
    target = ClockedTarget({"int8": 8, "fp16": -1})
    comparison = compare(project, target, Store(tmp_path), ("fp32", "fp16", "int8"), (1, 8), 1.0, quiet)
    reasons = {row.precision: row.reason for row in comparison.rows}
    assert reasons["fp32"] == ""
    assert reasons["fp16"] == "cannot be opened"
    assert reasons["int8"] == "8 rows cannot be run: out of device memory"
    assert [timing.rows for timing in comparison.rows[0].timings] == [1, 8]
    assert target.calls.count(("int8", 8)) == 1


def test_without_a_batch_dimension_an_execution_is_a_row(project: Project, tmp_path: Path) -> None:
    config = project.config.model_copy(update={"max_batch_size": 0})
    single = replace(project, folder=replace(project.folder, config=config))
    timing = headrace_engines.commands.compare.median_timing([BatchTiming(8, 100.0, 200.0, 80_000.0)], 1, False)
    assert timing == BatchTiming(1, 100.0, 200.0, 10_000.0)
    assert default_sizes(single, read_spec(project.config)) == [1]


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [1]), (8, [1, 2, 4, 8]), (64, [1, 4, 16, 64]), (100, [1, 4, 16, 64, 100])]
)
def test_default_sizes(project: Project, most: int, expected: list[int]) -> None:
    config = project.config.model_copy(update={"max_batch_size": most})
    large = replace(project, folder=replace(project.folder, config=config))
    assert default_sizes(large, read_spec(config)) == expected


def call(project: Project, tmp_path: Path, *words: str | Path) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = io.StringIO()
    given = [
        "small", "--model-repository", project.folder.path.parent, "--cache", tmp_path / "store", "--target",
        "onnxruntime", "--seconds", "0.02", *words,
    ]  # fmt: skip
    status = run(parser.parse_args([str(word) for word in given]), Console(file=out, width=160))
    return status, out.getvalue()


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace_engines.commands.compare, "build_engine", fails_on_int8)


@pytest.mark.usefixtures("direct")
def test_the_command_writes_three_files(project: Project, tmp_path: Path) -> None:
    status, text = call(project, tmp_path, "--output", tmp_path / "out")
    assert status == 0
    assert "int8: not measured: small: int8 needs <samples> to calibrate with" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["compare.html", "compare.json", "compare.svg"]
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["precision"] for row in written["rows"]] == ["fp32", "fp16", "int8"]
    ElementTree.parse(tmp_path / "out" / "compare.svg")


@pytest.mark.usefixtures("direct")
def test_a_read_only_output_folder_is_reported_before_a_build(project: Project, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"file cannot be written: .*name another folder"):
        call(project, tmp_path, "--output", tmp_path / "file")
    with pytest.raises(BuildError, match=r"name the folder, e\.g\. .*/x$"):
        call(project, tmp_path, "--output", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()
    assert not (tmp_path / "store").exists()


def test_the_bar_of_the_timing_ends(project: Project, tmp_path: Path) -> None:
    progress: list[tuple[float, str]] = []

    def reports(name: str) -> Report:
        return silent if name != "timing" else lambda done, note: progress.append((done, note))

    compare(project, OnnxRuntimeTarget(), Store(tmp_path), ["fp32"], [1, 2], 0.02, reports, build=fails_on_int8)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[0] == (0.0, "fp32, 1 row")
    assert progress[-1][0] == 1.0


@pytest.mark.usefixtures("direct")
def test_the_status_is_that_of_fp32(project: Project, tmp_path: Path) -> None:
    assert call(project, tmp_path, "--precisions", "int8,fp32", "--batch", "1")[0] == 0
    assert call(project, tmp_path, "--precisions", "int8", "--batch", "1")[0] == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--precisions", "fp31"), "--precisions is 'fp31'"),
        (("--precisions", "best"), "write some of fp32"),
        (("--precisions", "fp32,int8-tensorrt"), "no longer used: write int8 in its place"),
        (("--batch", "0"), "--batch is '0'"),
        (("--batch", "1,9"), "1 to 8 rows"),
        (("--seconds", "0"), "--seconds is 0"),
        (("--seconds", "nan"), "--seconds is nan"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_built(
    words: tuple[str, str], expected: str, project: Project, tmp_path: Path
) -> None:
    with pytest.raises(CallError, match=expected):
        call(project, tmp_path, *words)
    assert not (tmp_path / "store").exists()


def test_the_picture_and_the_page_show_hostile_names_as_text(project: Project, tmp_path: Path) -> None:
    comparison = replace(
        compared(project, tmp_path, ("fp32", "int8")),
        model="<script>x</script>",
        machine=Machine("tensorrt", "10<b>", "GPU & co", "9.0", 550),
        data="</svg>",
    )
    page, picture = comparison_page(comparison), comparison_picture(comparison)
    assert "<script" not in page + picture
    assert "<b>" not in page + picture
    root = ElementTree.fromstring(picture)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("<script>x</script>" in text and "GPU & co" in text for text in texts)
    assert {"fp32", "int8"} <= set(texts)
