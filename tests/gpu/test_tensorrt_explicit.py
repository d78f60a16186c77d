"""Models that carry Q/DQ on a real GPU: built as they are, compared with the same graph without Q/DQ, and other Q/DQ refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace_engines.build import build_engine
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner, read_onnx
from headrace_engines.progress import silent
from headrace_engines.project import read_spec
from headrace_engines.store import Store
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.engine_projects import write_project
from tests.support.gpu_marks import gpu_marks
from tests.support.networks import inputs_of, residual, transformer
from tests.support.quantized_models import with_qdq

pytestmark = gpu_marks(120)
TARGET = TensorRtTarget(optimization_level=1)
ROWS = 8


@pytest.mark.parametrize("network", [residual, transformer], ids=["residual", "transformer"])
def test_a_model_with_qdq_is_built_as_it_is(tmp_path: Path, network: type) -> None:
    plain: onnx.ModelProto = network()
    inputs = inputs_of(plain, 32)
    model = with_qdq(plain, inputs, "tensorrt")
    project = write_project(tmp_path, model, inputs, rows=ROWS, calibration={"data": ""})
    built = build_engine(project, read_spec(project.config, "int8"), TARGET, Store(tmp_path / "store"), silent)
    assert (built.spec.method, built.refusal) == ("explicit", [])
    assert built.accuracy is not None
    print(built.accuracy, built.timings)
    batch = inputs_of(model, ROWS)
    engine = TARGET.open(built.path, read_onnx(project.source))
    try:
        layers = engine.layers(batch)
        outputs = engine.run(batch)
    finally:
        engine.close()
    print("\n".join(f"{one.precision:5} {one.kind:12} {' + '.join(one.nodes) or one.name[:60]}" for one in layers))
    assert "int8" in {layer.precision for layer in layers}
    # The same rounding on ONNX Runtime.
    for name, expected in OnnxRunner(model).run(batch).items():
        cosine = np.vdot(outputs[name], expected) / np.linalg.norm(outputs[name]) / np.linalg.norm(expected)
        assert cosine > 0.999


def test_unsigned_activations_are_refused_by_their_node(tmp_path: Path) -> None:
    inputs = inputs_of(residual(), 32)
    model = with_qdq(residual(), inputs, "onnxruntime")
    project = write_project(tmp_path, model, inputs, rows=ROWS, calibration={"data": ""})
    with pytest.raises(BuildError, match=r"QuantizeLinear node .* unsigned values, TensorRT takes INT8"):
        build_engine(project, read_spec(project.config, "int8"), TARGET, Store(tmp_path / "store"), silent)
