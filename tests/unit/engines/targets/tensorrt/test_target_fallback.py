"""Layers without an 8-bit kernel in TensorRT stay in floating point, without a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from headrace_engines.build import BuildResult, build_engine
from headrace_engines.errors import BuildError
from headrace_engines.progress import silent
from headrace_engines.project import read_spec
from headrace_engines.store import Store
from headrace_engines.targets.tensorrt import api as tensorrt_api
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.engine_projects import write_project
from tests.support.networks import inputs_of, residual

pytestmark = pytest.mark.slow
# The fallback does not look at the version of TensorRT.
ten = pytest.mark.parametrize("trt_version", ["10.6.0"])

NO_KERNEL = "Error Code 10: Internal Error (Could not find any implementation for node {}.)"


def dequantized(model: onnx.ModelProto, name: str) -> bool:
    """True if a node reads what a DequantizeLinear makes."""
    created = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    return any(node.name == name and not created.isdisjoint(node.input) for node in model.graph.node)


def element_types(model: onnx.ModelProto) -> set[int]:
    return {a.i for node in model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}


def built(
    trt: Any, folder: Path, refuses: Callable[[onnx.ModelProto], str], precision: str = "int8", **calibration: Any
) -> BuildResult:
    trt.state.refuses = refuses
    model = residual()
    accuracy = {"min_top1_agreement": 0.0, "min_cosine": 0.0}
    project = write_project(
        folder / "repository",
        model,
        inputs_of(model, 16),
        calibration=calibration,
        precision=precision,
        accuracy=accuracy,
    )
    return build_engine(project, read_spec(project.config), TensorRtTarget(), Store(folder / "store"), silent)


def test_layers_without_kernel_stay_in_floating_point(trt: Any, tmp_path: Path) -> None:
    built_models = []

    def refuses(model: onnx.ModelProto) -> str:
        built_models.append(model)
        for layer, name in (("node_c1 + node_c1r", "node_c1"), ("node_mean", "node_mean")):
            if dequantized(model, name):
                return NO_KERNEL.format(layer)
        return ""

    one = built(trt, tmp_path, refuses)
    assert one.float_nodes == ("node_c1", "node_mean")
    assert len(built_models) == 3
    assert all(dequantized(built_models[-1], name) for name in ("node_stem", "node_a1", "node_a2", "node_y"))
    # What is not in 8 bits is in FP16.
    assert element_types(built_models[-1]) == {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT}


@ten
def test_without_a_mixed_kernel_floating_point_is_fp32(trt: Any, tmp_path: Path) -> None:
    built_models = []

    def refuses(model: onnx.ModelProto) -> str:
        built_models.append(model)
        return NO_KERNEL.format("node_c1") if element_types(model) else ""

    one = built(trt, tmp_path, refuses, keep=["node_c1"])
    assert one.float_nodes == ("node_c1",)
    assert [bool(element_types(model)) for model in built_models] == [True, False]
    assert not dequantized(built_models[-1], "node_c1")
    assert dequantized(built_models[-1], "node_c2")


@ten
def test_a_layer_that_no_precision_helps_ends_the_build(trt: Any, tmp_path: Path) -> None:
    built_models = []

    def refuses(model: onnx.ModelProto) -> str:
        built_models.append(model)
        return NO_KERNEL.format("node_stem")

    with pytest.raises(BuildError, match="finds no kernel for node_stem"):
        built(trt, tmp_path, refuses)
    # In INT8, in FP16, in FP32.
    assert len(built_models) == 3
    assert not list((tmp_path / "store").glob("*/stamp.json"))


@pytest.mark.parametrize("runs_them", [True, False])
def test_convolutions_get_fp8_pairs_from_the_versions_that_run_them(
    runs_them: bool, trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not runs_them:
        monkeypatch.setattr(tensorrt_api, "FP8_CONVOLUTIONS", (99, 0))
    built_models = []

    def refuses(model: onnx.ModelProto) -> str:
        built_models.append(model)
        return ""

    one = built(trt, tmp_path, refuses, "fp8")
    assert one.float_nodes == ()
    in_fp8 = [
        name
        for name in ("node_a1", "node_a2", "node_down", "node_c1", "node_c2")
        if dequantized(built_models[-1], name)
    ]
    assert len(in_fp8) == (5 if runs_them else 0)
    assert dequantized(built_models[-1], "node_y")
