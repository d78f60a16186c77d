"""Builds of models that carry Q/DQ, and of transformers in INT8 without samples, on ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace_engines import build
from headrace_engines.build import BuildResult, build_best_engine, build_engine
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner, read_onnx
from headrace_engines.precision.methods import stored_precision, with_method
from headrace_engines.progress import silent
from headrace_engines.project import Project, read_spec
from headrace_engines.store import Store
from headrace_engines.targets.base import BatchTiming
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget
from onnx import numpy_helper

from loadtest.onnx_models import transformer
from tests.support.engine_projects import write_project
from tests.support.onnx_blocks import small_cnn
from tests.support.quantized_models import with_qdq

PICTURES = {"picture": np.random.default_rng(3).standard_normal((16, 3, 16, 16)).astype(np.float32)}
SHAPES = {"ids": [[8], [8], [8]], "mask": [[8], [8], [8]]}


@pytest.fixture(autouse=True)
def short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_TIMING_S", 0.01)


def quantized(folder: Path, target: str = "onnxruntime", **optimization: Any) -> Project:
    model = with_qdq(small_cnn(), PICTURES, target)
    return write_project(folder, model, {}, calibration={"data": ""}, **optimization)


def encoder(folder: Path, **optimization: Any) -> Project:
    model = transformer(layers=2, width=64, heads=2, words=50)
    calibration = {"data": "", **optimization.pop("calibration", {})}
    return write_project(folder, model, {}, calibration=calibration, profiles=[{"shapes": SHAPES}], **optimization)


def built(project: Project, folder: Path, precision: str) -> BuildResult:
    spec = read_spec(project.config, precision)
    return build_engine(project, spec, OnnxRuntimeTarget(), Store(folder / "store"), silent)


def kinds(path: Path) -> set[str]:
    return {node.op_type for node in read_onnx(path).graph.node}


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_qdq_are_built_as_they_are(tmp_path: Path, target: str) -> None:
    project = quantized(tmp_path, target)
    assert stored_precision(project) == "int8"
    one = built(project, tmp_path, "int8")
    assert (one.spec.method, one.refusal) == ("explicit", [])
    artefact, source = read_onnx(one.path), read_onnx(project.source)
    assert [node.op_type for node in artefact.graph.node] == [node.op_type for node in source.graph.node]
    outputs = (next(iter(OnnxRunner(model).run(PICTURES).values())) for model in (artefact, source))
    np.testing.assert_array_equal(*outputs)
    # The reference has no rounding of activations: the difference is not zero.
    assert one.accuracy is not None
    assert 0.95 < one.accuracy.cosine < 0.999999
    assert built(project, tmp_path, "int8").cached


def test_wrong_scales_are_refused_by_the_gate(tmp_path: Path) -> None:
    model = with_qdq(small_cnn(), PICTURES, "tensorrt")
    scales = {node.input[1] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    for tensor in model.graph.initializer:
        if tensor.name in scales:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) / np.float32(100), tensor.name))
    project = write_project(tmp_path, model, {}, calibration={"data": ""})
    one = built(project, tmp_path, "int8")
    assert any("cosine with FP32's outputs" in text for text in one.refusal)


def test_fp32_of_a_model_with_qdq_has_none(tmp_path: Path) -> None:
    project = quantized(tmp_path)
    one = built(project, tmp_path, "fp32")
    assert one.spec.method == "stripped"
    assert not kinds(one.path) & {"QuantizeLinear", "DequantizeLinear"}
    found = build.find_fp32_engine(
        project, built(project, tmp_path, "int8").spec, OnnxRuntimeTarget(), Store(tmp_path / "store")
    )
    assert found is not None
    assert found.key == one.key


def test_another_8_bit_format_is_refused(tmp_path: Path) -> None:
    project = quantized(tmp_path)
    with pytest.raises(BuildError, match="carries Q/DQ of int8, not of fp8: write precision: int8, or leave it out"):
        with_method(project, read_spec(project.config, "fp8"), "tensorrt")


def test_a_written_precision_is_not_replaced(tmp_path: Path) -> None:
    assert stored_precision(quantized(tmp_path, precision="fp32")) == ""


def test_int8_of_a_transformer_without_samples_is_dynamic(tmp_path: Path) -> None:
    project = encoder(tmp_path)
    one = built(project, tmp_path, "int8")
    assert (one.spec.method, one.refusal) == ("dynamic", [])
    assert "MatMulInteger" in kinds(one.path)
    assert one.size_bytes < 0.5 * built(project, tmp_path, "fp32").size_bytes
    assert one.accuracy is not None
    assert 0.99 < one.accuracy.cosine < 0.999999


def test_products_that_the_configuration_keeps(tmp_path: Path) -> None:
    project = encoder(tmp_path, calibration={"keep": ["l0_*"]})
    one = built(project, tmp_path, "int8")
    assert len(one.float_nodes) == 6
    assert sum(node.op_type == "MatMulInteger" for node in read_onnx(one.path).graph.node) == 6
    project = encoder(tmp_path / "other", calibration={"keep": ["nowhere"]})
    with pytest.raises(BuildError, match="'nowhere', which matches no quantised node"):
        built(project, tmp_path, "int8")


def test_a_strict_gate_refuses_dynamic_int8(tmp_path: Path) -> None:
    one = built(encoder(tmp_path, accuracy={"min_cosine": 0.9999999}), tmp_path, "int8")
    assert any("cosine" in text for text in one.refusal)


def test_int8_needs_samples_elsewhere(tmp_path: Path) -> None:
    project = write_project(tmp_path, small_cnn(), {}, calibration={"data": ""})
    with pytest.raises(BuildError, match="int8 needs samples"):
        built(project, tmp_path, "int8")
    project = encoder(tmp_path / "encoder")
    assert with_method(project, read_spec(project.config, "int8"), "tensorrt").method == ""
    assert with_method(project, read_spec(project.config, "fp16"), "onnxruntime").method == ""


@pytest.mark.parametrize(("faster", "chosen"), [(2.0, "int8"), (0.9, "fp32")])
def test_best_takes_dynamic_int8_where_it_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: float, chosen: str
) -> None:
    def timed(self: Any, *_: object) -> list[BatchTiming]:
        rate = faster if self.spec.precision == "int8" else 1.0
        return [BatchTiming(rows=8, median_us=8e6 / rate, p99_us=8e6 / rate, rows_per_s=rate)]

    monkeypatch.setattr(build._Builder, "_timings", timed)
    project = encoder(tmp_path)
    spec = replace(read_spec(project.config), precision="best")
    best = build_best_engine(project, spec, OnnxRuntimeTarget(), Store(tmp_path / "store"), silent, rebuild=False)
    assert best.spec.precision == chosen


def test_best_of_a_model_with_qdq_compares_it_with_fp32(tmp_path: Path) -> None:
    project = quantized(tmp_path)
    spec = replace(read_spec(project.config), precision="best")
    store = Store(tmp_path / "store")
    build_best_engine(project, spec, OnnxRuntimeTarget(), store, silent, rebuild=False)
    for precision, method in (("fp32", "stripped"), ("fp16", "stripped"), ("int8", "explicit")):
        one = built(project, tmp_path, precision)
        assert (one.cached, one.spec.method) == (True, method)
        assert onnx.checker.check_model(read_onnx(one.path)) is None
