"""Layers of built engines against FP32: rows, remarks, the table and the page."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace_engines.build import BuildResult, build_engine
from headrace_engines.errors import BuildError
from headrace_engines.layers.comparison import LayerComparison, compare_layers, observed_differences
from headrace_engines.layers.report import cosine_text, layers_section, show_layers
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.progress import silent
from headrace_engines.project import Project, open_data, read_spec
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.simplify import simplify
from headrace_engines.store import Store
from headrace_engines.targets.base import ObservedEngine
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget
from rich.console import Console

from tests.support import networks
from tests.support.deviating_models import deviating_model
from tests.support.engine_projects import write_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    model = deviating_model()
    samples = networks.inputs_of(model, 32)
    accuracy = {"min_cosine": 0.1, "min_top1_agreement": 0.0}
    return write_project(
        tmp_path_factory.mktemp("models"), model, samples, calibration={"method": "minmax"}, accuracy=accuracy
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


def built(project: Project, store: Store, *precisions: str) -> list[BuildResult]:
    spec, target = read_spec(project.config), OnnxRuntimeTarget()
    return [build_engine(project, spec.at(precision), target, store, silent) for precision in precisions]


def compared(project: Project, store: Store, *precisions: str) -> LayerComparison:
    data = open_data(project, read_spec(project.config).at("int8"))
    return compare_layers(project, built(project, store, *precisions), OnnxRuntimeTarget(), store, data, silent)


def test_the_layer_that_deviates_has_the_small_cosine(project: Project, store: Store) -> None:
    comparison = compared(project, store, "fp32", "int8")
    assert comparison.precisions == ("fp32", "int8")
    assert comparison.samples == 8
    assert not comparison.remarks
    by_tensor = {row.layer.tensor: row for row in comparison.rows}
    assert by_tensor["br"].differences["int8"].cosine > 0.99
    # The Relu after "loud", which is fused with it.
    assert by_tensor["c"].differences["int8"].cosine < 0.8
    assert by_tensor["c"].layer.operator == "Relu"
    assert "loud" not in by_tensor
    assert max(row.differences["fp32"].relative for row in comparison.rows) < 1e-5


def test_only_tensors_of_an_engine_have_its_figures(project: Project, store: Store) -> None:
    rows = {row.layer.tensor: row.differences for row in compared(project, store, "int8", "fp16").rows}
    # ONNX Runtime has no fused kernel of a Conv and a Relu in FP16.
    assert list(rows["loud"]) == ["fp16"]
    assert list(rows["c"]) == ["int8", "fp16"]


def test_a_model_that_carries_pairs_is_compared_with_itself_without_them(tmp_path: Path, store: Store) -> None:
    model = simplify(networks.residual())
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    carried = quantize(model, ranges, "onnxruntime")
    project = write_project(tmp_path / "models", carried, networks.inputs_of(model, 16))
    spec = read_spec(project.config).at("int8")
    engine = build_engine(project, spec, OnnxRuntimeTarget(), store, silent)
    comparison = compare_layers(project, [engine], OnnxRuntimeTarget(), store, open_data(project, spec), silent)
    by_tensor = {row.layer.tensor: row.differences["int8"] for row in comparison.rows}
    # With pairs on both sides the difference would be none.
    assert 0.9 < by_tensor["y"].cosine < 1
    assert by_tensor["y"].relative > 1e-3


class _Unreadable(OnnxRuntimeTarget):
    def observe(self, *arguments: Any) -> ObservedEngine:
        raise BuildError("no tensors can be read")


def test_an_engine_whose_tensors_cannot_be_read_has_a_remark(project: Project, store: Store) -> None:
    data = open_data(project, read_spec(project.config).at("int8"))
    comparison = compare_layers(project, built(project, store, "fp32"), _Unreadable(), store, data, silent)
    assert (comparison.precisions, comparison.rows) == ((), ())
    assert comparison.remarks == {"fp32": "its layers cannot be compared: no tensors can be read"}
    assert "no tensors can be read" in layers_section(comparison)
    assert "no tensors can be read" in printed(comparison)


class _Forgetful:
    """Returns tensor "a" in the first batch only, and "b" in another shape."""

    names = ("a", "b", "y")
    remark = ""

    def __init__(self, runner: OnnxRunner) -> None:
        self.runner, self.runs = runner, 0

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.runs += 1
        values = self.runner.run(inputs)
        values["b"] = values["b"][:, :1]
        return {name: array for name, array in values.items() if name != "a" or self.runs == 1}

    def close(self) -> None:
        """Do nothing."""


def test_a_tensor_without_values_of_every_batch_has_no_figure() -> None:
    model = simplify(networks.network("a = Relu(x)  b = Abs(x)  c = Add(a, b)  y = Neg(c)", {}, ("N", 4)))
    engine = _Forgetful(OnnxRunner(model, ["a", "b"]))
    samples = networks.samples_of(networks.inputs_of(model, 4))
    assert list(observed_differences(model, engine, engine, samples, 2, silent)) == ["y"]


def printed(comparison: LayerComparison, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_layers(console, comparison)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_page_and_json_have_every_row(project: Project, store: Store) -> None:
    comparison = compared(project, store, "fp32", "int8")
    text, page = printed(comparison), layers_section(comparison)
    for row in comparison.rows:
        assert row.layer.node in text
        assert f"<td>{row.layer.node}</td>" in page
    assert "int8 cosine" in text
    assert page.count('<path d="M') > 2
    document = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert list(document) == ["samples", "data", "precisions", "remarks", "rows"]
    assert list(document["rows"][0]) == ["node", "operator", "tensor", "shape", "differences"]
    assert list(document["rows"][0]["differences"]["int8"]) == ["cosine", "max_abs", "mean_abs", "relative"]


def test_narrow_terminals_show_the_cosines(project: Project, store: Store) -> None:
    lines = printed(compared(project, store, "fp32", "int8"), 60).splitlines()
    assert max(map(len, lines[:10])) <= 60
    assert any("int8 cosine" in line for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1.00000"), (1 - 1e-15, "1.00000"), (1 - 4.5e-8, "1 - 4.5e-08"), (0.9998, "0.99980"), (-0.5, "-0.50000")],
)
def test_cosines_near_one_are_written_by_their_distance(value: float, text: str) -> None:
    assert cosine_text(np.float64(value)) == text
