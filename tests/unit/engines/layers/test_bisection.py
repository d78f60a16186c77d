"""The first layer that deviates, and the layer that repairs the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.layers.bisection import Bisection, LayerSearch, bisect, first_batch_layer
from headrace_engines.layers.prefixes import PartRunner
from headrace_engines.progress import silent
from headrace_engines.project import Project, open_data, read_spec
from headrace_engines.simplify import simplify
from headrace_engines.store import Store
from headrace_engines.targets.base import ObservedEngine, TargetSpec
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget
from onnx import numpy_helper

from tests.support import networks
from tests.support.deviating_models import WrongEight, deviating_model, wrong_in_the_middle
from tests.support.engine_projects import write_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    model = deviating_model()
    return write_project(tmp_path / "models", model, networks.inputs_of(model, 32), calibration={"method": "minmax"})


def searched(project: Project, bound: float = 0.95, precision: str = "int8", **options: Any) -> Bisection:
    spec = read_spec(project.config, precision)
    store = Store(project.folder.path.parent.parent / "store")
    target = options.pop("target", None) or OnnxRuntimeTarget()
    return bisect(project, spec, target, store, open_data(project, spec), bound, silent, **options)


def test_the_layer_is_found_with_its_repair(project: Project) -> None:
    result = searched(project)
    assert result.layer is not None
    assert (result.layer.node, result.layer.operator, result.layer.shape) == ("loud", "Conv", (-1, 8, 6, 6))
    assert min(difference.cosine for difference in result.before.values()) > 0.95
    assert result.after is not None
    assert result.after.cosine < 0.5
    assert result.alone is not None
    assert result.alone.cosine < 0.5
    assert result.repair is not None
    assert result.repair.node == "loud"
    assert result.is_repaired
    assert result.unchecked == ""
    assert result.layers == 4


def test_the_repair_holds_in_a_build_with_it(tmp_path: Path) -> None:
    model = deviating_model()
    calibration = {"method": "minmax", "keep": ["loud"]}
    result = searched(write_project(tmp_path / "models", model, networks.inputs_of(model, 32), calibration=calibration))
    assert result.layer is None
    assert result.outputs.cosine > 0.99


def test_outputs_that_hold_the_bound_end_the_search(project: Project) -> None:
    result = searched(project, precision="fp16", bound=0.999)
    assert (result.layer, result.probes, result.repairs, result.repair) == (None, 1, (), None)


def test_rounding_to_fp16_deviates_from_the_first_layer_on(project: Project) -> None:
    result = searched(project, precision="fp16", bound=1 - 1e-9, with_repairs=False)
    assert result.layer is not None
    assert (result.layer.node, dict(result.before), result.repairs) == ("a", {}, ())
    assert result.alone is not None
    assert result.alone.cosine < result.bound


class _WithoutObserving(OnnxRuntimeTarget):
    def observe(self, *arguments: Any) -> ObservedEngine:
        raise BuildError("tensors cannot be read")


def test_a_search_without_a_check_of_earlier_layers_says_so(project: Project) -> None:
    result = searched(project, target=_WithoutObserving(), with_repairs=False)
    assert result.unchecked == "tensors cannot be read"
    assert result.layer is not None
    assert result.layer.node == "loud"


def damaged(model: onnx.ModelProto, *weights: str) -> onnx.ModelProto:
    """The model with other values in some weights: layers that are wrong."""
    changed = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in changed.graph.initializer:
        if tensor.name in weights:
            values = numpy_helper.to_array(tensor)
            wrong = np.random.default_rng(7).normal(size=values.shape).astype("f4")
            tensor.CopyFrom(numpy_helper.from_array(wrong, tensor.name))
    return changed


def search_of(model: onnx.ModelProto, lowered: onnx.ModelProto, folder: Path) -> LayerSearch:
    samples = networks.samples_of(networks.inputs_of(model, 8))
    runner = PartRunner(OnnxRuntimeTarget(), TargetSpec("fp32"), samples, True, folder)
    return LayerSearch(model, lowered, runner, 0.9999, silent)


@pytest.mark.parametrize(("weight", "layer"), [("w0", "stem"), ("w1", "a1"), ("wd", "down"), ("wc", "c1"), ("wf", "y")])
def test_a_damaged_layer_is_found_anywhere(weight: str, layer: str, tmp_path: Path) -> None:
    model = simplify(networks.residual())
    search = search_of(model, damaged(model, weight), tmp_path)
    output, difference = search.worst_output()
    assert (output, difference.cosine < 0.9999) == ("y", True)
    found = search.first_deviation(output)
    assert found.tensor == layer
    assert search.earlier_deviation(found, output) == found


def test_an_error_that_vanishes_on_its_way_is_found_by_reading_every_tensor(tmp_path: Path) -> None:
    # The branch of "hidden" is multiplied by zero; "late" is the layer that the output shows.
    text = """
        hidden = Conv(x, w0)  zero = Mul(hidden, nought)  a = Conv(x, w1)  b = Add(a, zero)
        c = Relu(b)  late = Conv(c, w2)  y = Relu(late)
    """
    constants: dict[str, Any] = networks.weights(w0=(4, 4, 1, 1), w1=(4, 4, 1, 1), w2=(4, 4, 1, 1))
    model = networks.network(text, constants | {"nought": np.float32(1e-9)}, ("N", 4, 4, 4))
    search = search_of(model, damaged(model, "w0", "w2"), tmp_path)
    found = search.first_deviation("y")
    assert found.tensor == "late"
    assert search.earlier_deviation(found, "y").tensor == "hidden"


def test_a_model_without_floating_point_outputs_is_refused(tmp_path: Path) -> None:
    model = networks.network("a = Relu(x)  y = Identity(x)", {}, ("N", 4))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.INT64, ["N"]))
    model.graph.node.append(onnx.helper.make_node("ArgMax", ["a"], ["z"], "z", keepdims=0))
    with pytest.raises(BuildError, match="no floating-point output"):
        search_of(model, model, tmp_path).worst_output()


@pytest.mark.parametrize(("rows", "layer"), [(8, "middle"), (4, None)])
def test_the_first_layer_whose_rows_differ_in_a_batch_is_found(tmp_path: Path, rows: int, layer: str | None) -> None:
    model = wrong_in_the_middle()
    project = write_project(tmp_path / "models", model, networks.inputs_of(model, 32))
    spec = read_spec(project.config, "fp32")
    store, data = Store(tmp_path / "store"), open_data(project, spec)
    found = first_batch_layer(project, spec, WrongEight(), store, data, rows, silent)
    assert (None if found is None else found.node) == layer
