"""Inner tensors of real plans and the search for the layer that deviates, on a real GPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from headrace_engines.build import build_engine
from headrace_engines.layers.bisection import bisect
from headrace_engines.layers.comparison import compare_layers
from headrace_engines.progress import silent
from headrace_engines.project import open_data, read_spec
from headrace_engines.store import Store
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support import networks
from tests.support.deviating_models import deviating_model
from tests.support.engine_projects import write_project
from tests.support.gpu_marks import gpu_marks

pytestmark = gpu_marks(180)
# The search builds an engine for each prefix.
TARGET = TensorRtTarget(optimization_level=1)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_tensors_of_a_plan_are_those_of_the_model(precision: str, tmp_path: Path) -> None:
    model = networks.residual()
    project = write_project(tmp_path / "models", model, networks.inputs_of(model, 32), calibration={"method": "minmax"})
    spec, target, store = read_spec(project.config, precision), TARGET, Store(tmp_path / "store")
    built = build_engine(project, spec, target, store, silent)
    comparison = compare_layers(project, [built], target, store, open_data(project, spec), silent)
    print(precision, comparison.remarks, [(row.layer.tensor, row.differences) for row in comparison.rows])
    assert [name for name, text in comparison.remarks.items() if "cannot be compared" in text] == []
    # More than the output: at least the pool or a sum is written by a layer.
    assert len(comparison.rows) > 1
    worst = min(row.differences[precision].cosine for row in comparison.rows)
    assert worst > (0.98 if precision == "int8" else 0.999)


def test_the_layer_that_deviates_is_found_and_repaired(tmp_path: Path) -> None:
    model: onnx.ModelProto = deviating_model()
    project = write_project(tmp_path / "models", model, networks.inputs_of(model, 32), calibration={"method": "minmax"})
    spec, target, store = read_spec(project.config, "int8"), TARGET, Store(tmp_path / "store")
    result = bisect(project, spec, target, store, open_data(project, spec), 0.95, silent)
    print(result)
    assert result.layer is not None
    assert result.layer.node == "loud"
    assert result.repair is not None
    assert (result.repair.node, result.is_repaired) == ("loud", True)
