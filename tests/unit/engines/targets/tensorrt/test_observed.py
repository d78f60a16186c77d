"""Inner tensors of plans: debug tensors of what the fused layers write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.precision.casting import cast_model
from headrace_engines.progress import Report, silent
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.separate_process import EndedError
from headrace_engines.simplify import simplify
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt import target as target_module
from headrace_engines.targets.tensorrt.observed import ObservedPlan
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support import networks

ORDER = TargetSpec("fp32", (ShapeRange({"x": ((1, 3, 12, 12), (2, 3, 12, 12), (4, 3, 12, 12))}),))


def tensors(model: onnx.ModelProto) -> list[str]:
    return [name for node in model.graph.node for name in node.output]


@pytest.fixture(autouse=True)
def _builds_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake TensorRT exists in this process only."""

    def call(function: Callable[..., None], *arguments: Any, report: Report) -> None:
        function(*arguments, report)

    monkeypatch.setattr(target_module, "call_apart", call)


def observed(model: onnx.ModelProto, names: list[str], folder: Path) -> ObservedPlan:
    return TensorRtTarget().observe(model, ORDER, names, folder, silent)


def test_only_tensors_that_layers_write_are_read(trt: Any, tmp_path: Path) -> None:
    model = simplify(networks.residual())
    trt.state.fused = {"stem", "a1", "c1"}
    engine = observed(model, tensors(model), tmp_path)
    assert engine.remark == ""
    assert set(engine.names) == set(tensors(model)) - trt.state.fused
    inputs = networks.inputs_of(model)
    expected = OnnxRunner(model, engine.names, optimize=False).run(inputs)
    values = engine.run(inputs)
    assert set(values) == set(engine.names)
    for name, array in values.items():
        np.testing.assert_array_equal(array, expected[name], name)
    engine.close()


def test_tensors_in_8_bits_are_dequantised(trt: Any, tmp_path: Path) -> None:
    model = simplify(networks.residual())
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    lowered = quantize(model, ranges, "tensorrt")
    engine = observed(lowered, tensors(model), tmp_path)
    inputs = networks.inputs_of(model)
    expected = OnnxRunner(model, engine.names, optimize=False).run(inputs)
    values = engine.run(inputs)
    assert "a1r" in values
    for name, array in values.items():
        assert array.dtype == np.float32
        assert networks.cosine(array, expected[name]) > 0.99, name
    engine.close()


def test_tensors_in_16_bits_become_fp32(trt: Any, tmp_path: Path) -> None:
    model = simplify(networks.residual())
    engine = observed(cast_model(model, "fp16"), ["c1", "y"], tmp_path)
    values = engine.run(networks.inputs_of(model))
    assert {name: array.dtype for name, array in values.items()} == {"c1": np.float32, "y": np.float32}
    engine.close()


def test_a_layer_that_reading_changes_is_counted(trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_engines.targets.tensorrt import engine as module

    layers = iter(
        [
            '{"Layers": [{"Name": "s", "Outputs": [{"Name": "c1"}], "Metadata": "[ONNX Layer: c1]\\u001e[ONNX Layer: c1r]"}]}',
            '{"Layers": [{"Name": "s", "Metadata": "[ONNX Layer: c1]"}, {"Name": "t", "Metadata": "[ONNX Layer: c1r]"}]}',
        ]
    )
    model = simplify(networks.residual())
    for node in model.graph.node:
        node.name = node.output[0]
    monkeypatch.setattr(module.TensorRtEngine, "layer_information", lambda self: next(layers))
    engine = observed(model, tensors(model), tmp_path)
    assert engine.remark == "reading its tensors changed the fusion of 1 of 1 layers"
    assert set(engine.names) == {"c1", "y"}
    engine.close()


def test_an_engine_that_reports_nothing_is_an_error(trt: Any, tmp_path: Path, cuda: Any) -> None:
    model = simplify(networks.residual())
    path = tmp_path / "model.plan"
    TensorRtTarget().build(model, ORDER, path, silent)
    engine = TensorRtTarget().open(path, model)
    with pytest.raises(BuildError, match="reports no inner tensors"):
        engine.run_debug(networks.inputs_of(model))
    engine.close()


def test_a_failing_copy_of_a_tensor_is_raised(trt: Any, tmp_path: Path, cuda: Any) -> None:
    model = simplify(networks.residual())
    engine = observed(model, ["c1"], tmp_path)
    cuda.broken_ipc = True
    with pytest.raises(BuildError):
        engine.run(networks.inputs_of(model))
    cuda.broken_ipc = False
    engine.close()


REFUSALS = (
    "slice of isDebug for {}' is listed more than once",
    "Node debug output for {} cannot be quantized by {}. You might want to add a DQ node before debug output for {}.",
)


@pytest.mark.parametrize("text", REFUSALS)
def test_tensors_that_tensorrt_cannot_mark_are_left_out(
    trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    model = simplify(networks.residual())
    build_plan, marks = target_module.build_plan, []

    def refuse(*arguments: Any) -> None:
        marks.append(arguments[5].debug_tensors)
        for name in ("cr", "ar"):
            if name in marks[-1]:
                raise BuildError(f"TensorRT 10.6.0 cannot build the engine: {text.replace('{}', name)}")
        build_plan(*arguments)

    monkeypatch.setattr(target_module, "build_plan", refuse)
    engine = observed(model, tensors(model), tmp_path)
    assert [len(marks[1] - mark) for mark in marks[1:]] == [0, 1, 2]
    assert set(engine.names) == set(tensors(model)) - {"ar", "cr"}
    assert engine.remark == "TensorRT cannot report ar, cr"
    assert set(engine.run(networks.inputs_of(model))) == set(engine.names)
    engine.close()


@pytest.mark.parametrize("quantised", [False, True])
def test_tensors_are_outputs_where_the_process_of_the_build_ends(
    trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    model = simplify(networks.residual())
    lowered = quantize(model, networks.measured_ranges(model, tensors_to_calibrate(model)), "tensorrt")
    order, build_plan = lowered if quantised else model, target_module.build_plan

    def end(*arguments: Any) -> None:
        if arguments[5].debug_tensors:
            raise EndedError("the process that called _build_apart ended by signal 6")
        build_plan(*arguments)

    marked = observed(order, tensors(model), tmp_path)
    monkeypatch.setattr(target_module, "build_plan", end)
    outputs = observed(order, tensors(model), tmp_path)
    assert outputs.remark == "TensorRT cannot report its tensors, so they are outputs"
    inputs = networks.inputs_of(model)
    expected, actual = marked.run(inputs), outputs.run(inputs)
    assert actual.keys() == expected.keys() == set(outputs.names)
    for name, array in actual.items():
        np.testing.assert_array_equal(array, expected[name], name)
    marked.close()
    outputs.close()


def test_other_failures_with_marks_are_raised(trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, build_plan = simplify(networks.residual()), target_module.build_plan

    def refuse(*arguments: Any) -> None:
        if arguments[5].debug_tensors:
            raise BuildError("cannot build the engine: no kernel")
        build_plan(*arguments)

    monkeypatch.setattr(target_module, "build_plan", refuse)
    with pytest.raises(BuildError, match="no kernel"):
        observed(model, ["a1r"], tmp_path)
