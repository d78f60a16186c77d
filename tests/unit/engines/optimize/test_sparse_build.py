"""TensorRT's sparse kernels: on for the second build, kept only if that engine is faster, named in the stamp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.config.machine import Machine
from headrace.config.manifest import BatchTiming, Stamp
from headrace_engines.build import build_engine, make_stamp
from headrace_engines.build_report import BuildOutcome, speed_text
from headrace_engines.optimize.sparsity import choose_sparse, make_sparse
from headrace_engines.progress import Report, silent
from headrace_engines.project import Project, read_spec
from headrace_engines.store import Store
from headrace_engines.targets.base import TargetSpec
from headrace_engines.targets.onnxruntime import OnnxRuntimeEngine, OnnxRuntimeTarget
from onnx import numpy_helper

from tests.support.engine_projects import write_project

ORDER = TargetSpec("fp32", sparse_weights=True)


class SparseTarget(OnnxRuntimeTarget):
    """Stands for TensorRT: engines built with sparse kernels have another time."""

    name = "tensorrt"

    def __init__(self, dense_us: float, sparse_us: float) -> None:
        self.orders: list[TargetSpec] = []
        self._times = {False: dense_us, True: sparse_us}
        self.is_sparse: dict[int, bool] = {}

    def describe(self) -> Machine:
        return Machine("tensorrt", "10.6.0", "NVIDIA H200", "9.0", 580)

    def build(self, model: onnx.ModelProto, order: TargetSpec, path: Path, report: Report) -> None:
        super().build(model, order, path, report)
        self.orders.append(order)
        self.is_sparse[path.stat().st_ino] = order.sparse_weights

    def open(self, path: Path, source: onnx.ModelProto | None = None, **_options: Any) -> Any:
        time_us = self._times[self.is_sparse[path.stat().st_ino]]

        class Timed(OnnxRuntimeEngine):
            def time(self, inputs: Mapping[str, Any], seconds: float) -> BatchTiming:
                return BatchTiming(len(next(iter(inputs.values()))), time_us, time_us, 1e6 / time_us)

        return Timed(path, source)


def matmul() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,16] x) => (float[N,8] y) { [product] y = MatMul(x, w) }"""
    )
    weights = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return model


@pytest.mark.parametrize(("sparse_us", "kept"), [(90.0, True), (98.9, True), (99.5, False), (120.0, False)])
def test_sparse_kernels_are_kept_only_if_faster(sparse_us: float, kept: bool, tmp_path: Path) -> None:
    target = SparseTarget(100.0, sparse_us)
    artefact = tmp_path / "model.onnx"
    target.build(matmul(), TargetSpec("fp32"), artefact, silent)
    dense = artefact.stat().st_ino
    choice = choose_sparse(target, matmul(), ORDER, artefact, {"x": np.ones((4, 16), np.float32)}, silent)
    assert choice.is_faster is kept
    assert (artefact.stat().st_ino != dense) is kept
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert (choice.rows, choice.dense_us, choice.sparse_us) == (4, 100.0, sparse_us)


def project_of(tmp_path: Path, model: onnx.ModelProto) -> Project:
    return write_project(tmp_path / "models", model, {"x": np.random.default_rng(1).random((16, 16), np.float32)})


@pytest.mark.parametrize("sparse_us", [80.0, 120.0])
def test_stamp_names_sparse_kernels_that_were_kept(sparse_us: float, tmp_path: Path) -> None:
    project, target, store = (
        project_of(tmp_path, make_sparse(matmul(), ["w"])),
        SparseTarget(100.0, sparse_us),
        Store(tmp_path / "s"),
    )
    built = build_engine(project, read_spec(project.config), target, store, silent)
    assert [order.sparse_weights for order in target.orders] == [False, True]
    assert built.sparse_weights is (sparse_us < 100)
    assert built.sparsity == {"rows": 8, "dense_us": 100.0, "sparse_us": sparse_us, "nodes": ["product"]}
    entry = store.find(built.key)
    assert entry is not None
    stamp = make_stamp(built, entry, project, "fp32", False, False)
    assert stamp.sparse_weights is (sparse_us < 100)
    assert ("sparse_weights" in stamp.to_json()) is (sparse_us < 100)
    assert Stamp.from_json(stamp.to_json()) == stamp
    text = speed_text(BuildOutcome("net", built=built))
    assert ("sparse kernels kept: 1.25 times" if sparse_us < 100 else "sparse kernels not kept: 0.83 times") in text
    again = build_engine(project, read_spec(project.config), target, store, silent)
    assert again.cached
    assert again.sparse_weights is built.sparse_weights


def test_dense_models_are_built_once(tmp_path: Path) -> None:
    project, target = project_of(tmp_path, matmul()), SparseTarget(100.0, 50.0)
    built = build_engine(project, read_spec(project.config), target, Store(tmp_path / "s"), silent)
    assert [order.sparse_weights for order in target.orders] == [False]
    assert not built.sparse_weights
    assert built.sparsity is None


def test_onnx_runtime_has_no_sparse_kernels(tmp_path: Path) -> None:
    project = project_of(tmp_path, make_sparse(matmul(), ["w"]))
    built = build_engine(project, read_spec(project.config), OnnxRuntimeTarget(), Store(tmp_path / "s"), silent)
    assert not built.sparse_weights
    assert built.sparsity is None
