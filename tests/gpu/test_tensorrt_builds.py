"""Whole builds for a real GPU, from a model's folder to an artefact in the store that was compared with FP32: every precision.

`pytest -rP tests/gpu/test_tensorrt_builds.py` prints what the engines consist of.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.config.manifest import BatchTiming
from headrace_engines.build import BuildResult, build_engine
from headrace_engines.errors import NoKernelError
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.progress import silent
from headrace_engines.project import BuildSpec, Project, read_spec
from headrace_engines.store import Store
from headrace_engines.targets.base import MeasuredLayer
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.engine_projects import write_project
from tests.support.gpu_marks import gpu_marks
from tests.support.networks import inputs_of, network, residual, transformer, weights

pytestmark = gpu_marks(120)

TARGET = TensorRtTarget(optimization_level=1)
# As people build: convolutions in FP8 were seen at this level only.
DEFAULT_TARGET = TensorRtTarget()
ROWS = 8


def project_of(folder: Path, model: onnx.ModelProto, **fields: Any) -> Project:
    """Outputs for noise are compared: they must be close, not have the same top-1 class."""
    fields.setdefault("accuracy", {"min_top1_agreement": 0.0, "min_cosine": 0.97})
    return write_project(folder / "repository", model, inputs_of(model, 32), rows=ROWS, **fields)


def build(
    folder: Path, project: Project, spec: BuildSpec | None = None, target: TensorRtTarget = TARGET
) -> BuildResult:
    return build_engine(project, spec or read_spec(project.config), target, Store(folder / "store"), silent)


def layers_of(built: BuildResult, project: Project) -> list[MeasuredLayer]:
    engine = TARGET.open(built.path, read_onnx(project.source))
    try:
        layers = engine.layers(inputs_of(read_onnx(project.source), ROWS))
    finally:
        engine.close()
    print(
        f"{built.spec.precision}: {built.accuracy}, kept {', '.join(built.float_nodes) or 'nothing'}, {built.size_bytes} bytes"
    )
    print("\n".join(f"{one.precision:5} {one.kind:12} {' + '.join(one.nodes) or one.name[:60]}" for one in layers))
    return layers


def nodes_in(layers: list[MeasuredLayer], precision: str) -> set[str]:
    return {node for one in layers if one.precision == precision for node in one.nodes}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "fp8"])
def test_a_residual_network_in_every_precision(tmp_path: Path, precision: str) -> None:
    if refused := TARGET.refuses(precision):
        pytest.skip(refused)
    project = project_of(tmp_path, residual(), precision=precision)
    target = DEFAULT_TARGET if precision == "fp8" else TARGET
    built = build(tmp_path, project, target=target)
    assert built.refusal == []
    assert built.accuracy is not None
    assert built.accuracy.cosine > (0.9995 if precision in ("fp32", "fp16") else 0.97)
    assert [timing.rows for timing in built.timings] == [1, ROWS]
    assert all(isinstance(timing, BatchTiming) and timing.median_us > 1 for timing in built.timings)
    layers, convolutions = layers_of(built, project), {"node_a2", "node_c1", "node_c2"}
    beside = precision == "fp8" and bool(TARGET.refuses_fp8_convolutions())
    assert convolutions <= nodes_in(layers, "fp16" if beside else precision)
    if precision == "fp8":
        assert "node_y" in nodes_in(layers, "fp8")
        assert bool(convolutions & nodes_in(layers, "fp8")) == (not beside)
    again = build(tmp_path, project, target=target)
    assert again.cached
    assert (again.key, again.machine) == (built.key, TARGET.describe())
    assert list((tmp_path / "store" / "timing").iterdir())


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "fp8"])
def test_a_transformer_in_every_precision(tmp_path: Path, precision: str) -> None:
    if refused := TARGET.refuses(precision):
        pytest.skip(refused)
    project = project_of(tmp_path, transformer(), precision=precision)
    built = build(tmp_path, project)
    assert built.refusal == []
    assert nodes_in(layers_of(built, project), precision) & {"node_q0", "node_k0", "node_h0", "node_p0"}


def test_excluded_layers_of_an_int8_engine_run_in_fp16(tmp_path: Path) -> None:
    project = project_of(tmp_path, residual(), precision="int8", calibration={"keep": ["node_c1"]})
    built = build(tmp_path, project)
    assert built.refusal == []
    assert built.float_nodes == ("node_c1",)
    layers = layers_of(built, project)
    assert {"node_a1", "node_a2", "node_c2"} <= nodes_in(layers, "int8")
    assert "node_c1" in nodes_in(layers, "fp16")


def test_excluded_products_of_an_int8_engine_run_in_fp16(tmp_path: Path) -> None:
    project = project_of(tmp_path, transformer(), precision="int8", calibration={"keep": ["node_h0", "node_s0"]})
    built = build(tmp_path, project)
    assert built.refusal == []
    assert built.float_nodes == ("node_h0", "node_s0")
    assert "node_h0" in nodes_in(layers_of(built, project), "fp16")


def test_an_inaccurate_layer_is_detected_and_excluded(tmp_path: Path) -> None:
    # One output channel of node_b is a thousand times the others: per-tensor INT8 behind it leaves nothing of those.
    text = """
        a0 = Conv <pads=[1,1,1,1]> (x, w0, b)  a = Relu(a0)  b0 = Conv(a, w1, b)  b1 = Mul(b0, uneven)
        c = Conv(b1, w2, b)  d = Relu(c)  e = Conv <pads=[1,1,1,1]> (d, w3, b)  f = Relu(e)
        g = Conv(f, w1, b)  h = Relu(g)  i = Conv(h, w1, b)  y = Relu(i)
    """
    constants: dict[str, Any] = weights(
        w0=(32, 3, 3, 3), w1=(32, 32, 1, 1), w2=(32, 32, 1, 1), w3=(32, 32, 3, 3), b=(32,)
    )
    uneven = np.ones((1, 32, 1, 1), np.float32)
    uneven[0, 0] = 3000
    constants["uneven"] = uneven
    constants["w2"][:, 0] /= 3000
    model = network(text, constants, ("N", 3, 16, 16))
    accuracy = {"min_top1_agreement": 0.0, "min_cosine": 0.995}
    project = project_of(tmp_path, model, precision="int8", accuracy=accuracy, calibration={"method": "minmax"})
    built = build(tmp_path, project)
    assert built.refusal == []
    assert "node_c" in built.float_nodes
    layers = layers_of(built, project)
    assert "node_c" not in nodes_in(layers, "int8")
    assert "node_e" in nodes_in(layers, "int8")


def test_a_kernel_that_is_missing_costs_its_layer_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing kernels vary with the TensorRT version, so the refusal is simulated; the build after it is real."""
    project = project_of(tmp_path, residual(), precision="int8")
    real, refused = TensorRtTarget.build, ["node_c1"]

    def build_or_refuse(self: TensorRtTarget, *arguments: Any) -> None:
        if refused:
            raise NoKernelError("no kernel", (refused.pop(),))
        real(self, *arguments)

    monkeypatch.setattr(TensorRtTarget, "build", build_or_refuse)
    built = build(tmp_path, project)
    assert built.float_nodes == ("node_c1",)
    assert "node_c1" not in nodes_in(layers_of(built, project), "int8")


def test_a_store_records_its_machine(tmp_path: Path) -> None:
    project = project_of(tmp_path, residual(), precision="fp16")
    built = build(tmp_path, project)
    entry = Store(tmp_path / "store").find(built.key)
    assert entry is not None
    assert entry.facts["machine"] == asdict(TARGET.describe())
    assert entry.facts["built_with"]["tensorrt"] == TARGET.describe().version
