"""Counterparts of FP32 tensors in lowered models, parts of models, and cut points."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace_engines.layers.tensors import counterparts, cut_points, dequantized, part_of_model, source_layers
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model
from headrace_engines.precision.casting import cast_model
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.simplify import simplify

from tests.support import networks


def sorted_graph(model: onnx.ModelProto) -> OnnxGraph:
    graph = OnnxGraph(copy_model(model))
    graph.sort()
    return graph


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return simplify(networks.residual())


def quantized(model: onnx.ModelProto, target: str) -> onnx.ModelProto:
    return quantize(model, networks.measured_ranges(model, tensors_to_calibrate(model)), target)


def test_a_stored_tensor_is_read_after_its_pair(model: onnx.ModelProto) -> None:
    lowered = sorted_graph(quantized(model, "onnxruntime"))
    matches = counterparts(source_layers(sorted_graph(model)), lowered)
    assert matches["a1r"].tensor != "a1r"
    assert lowered.producer(matches["a1r"].tensor).op_type == "DequantizeLinear"  # type: ignore[union-attr]
    assert lowered.producer(matches["a1r"].stored).op_type == "QuantizeLinear"  # type: ignore[union-attr]
    # A Conv before its Relu is not stored in 8 bits.
    assert (matches["a1"].tensor, matches["a1"].stored) == ("a1", "")


def test_a_tensor_with_a_reader_in_floating_point_is_itself(model: onnx.ModelProto) -> None:
    lowered = sorted_graph(quantized(model, "tensorrt"))
    matches = counterparts(source_layers(sorted_graph(model)), lowered)
    others = [node.op_type for node in lowered.consumers("ar")]
    assert set(others) == {"QuantizeLinear"} or matches["ar"].stored == ""
    assert matches["y"].tensor == "y"


def test_values_in_8_bits_are_dequantised_as_the_graph_does(model: onnx.ModelProto) -> None:
    lowered = quantized(model, "onnxruntime")
    graph = sorted_graph(lowered)
    match = counterparts(["stem_r"], graph)["stem_r"]
    values = OnnxRunner(lowered, [match.stored, match.tensor]).run(networks.inputs_of(model))
    assert values[match.stored].dtype == np.uint8
    np.testing.assert_allclose(dequantized(graph, match, values[match.stored]), values[match.tensor], rtol=1e-6)


def test_names_survive_a_cast(model: onnx.ModelProto) -> None:
    layers = source_layers(sorted_graph(model))
    assert set(counterparts(layers, sorted_graph(cast_model(model, "fp16")))) == set(layers)


def test_a_part_computes_what_the_whole_model_does(model: onnx.ModelProto) -> None:
    inputs = networks.inputs_of(model)
    expected = OnnxRunner(model, ["a"]).run(inputs)["a"]
    part = part_of_model(model, ["a"])
    onnx.checker.check_model(part, full_check=True)
    assert [value.name for value in part.graph.output] == ["a"]
    assert not {"wc", "wf"} & {tensor.name for tensor in part.graph.initializer}
    np.testing.assert_allclose(OnnxRunner(part).run(inputs)["a"], expected, rtol=1e-6)


def test_a_part_can_begin_at_inner_tensors(model: onnx.ModelProto) -> None:
    values = OnnxRunner(model, ["ar", "c1"]).run(networks.inputs_of(model))
    part = part_of_model(model, ["c1"], {"ar": values["ar"]})
    assert [value.name for value in part.graph.input] == ["ar"]
    assert [node.op_type for node in part.graph.node] == ["Conv"]
    np.testing.assert_allclose(OnnxRunner(part).run({"ar": values["ar"]})["c1"], values["c1"], rtol=1e-6)


def test_bf16_outputs_are_returned_in_fp32(model: onnx.ModelProto) -> None:
    part = part_of_model(cast_model(model, "bf16"), ["c1"])
    assert part.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_cut_points_are_the_tensors_on_every_path(model: onnx.ModelProto) -> None:
    points = cut_points(sorted_graph(model), "y")
    assert points == ["stem", "stem_r", "pool", "a", "ar", "c", "cr", "mean", "flat", "y"]


def test_an_input_that_is_read_late_leaves_no_cut_before() -> None:
    model = networks.network("a = Relu(x)  b = Relu(a)  c = Add(b, x)  y = Relu(c)", {}, ("N", 4))
    assert cut_points(sorted_graph(model), "y") == ["c", "y"]
