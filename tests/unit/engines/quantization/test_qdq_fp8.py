"""FP8: numbers of the format, and quantised models."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model
from headrace_engines.precision.casting import cast_model
from headrace_engines.progress import silent
from headrace_engines.quantization.placement import place_pairs, tensors_to_calibrate
from headrace_engines.quantization.qdq import (
    FP8_LARGEST,
    correct_biases,
    encode_fp8,
    fp8_scale,
    next_fp8_scale,
    quantize,
)
from headrace_engines.simplify import simplify
from onnx import TensorProto

from tests.support import networks
from tests.support.networks import samples_of


def test_numbers_round_to_the_nearest_and_saturate() -> None:
    values = np.array([0, 1, -1.0625, 1.1, 448, 500, -1e9, 2**-9, 2**-11], np.float32)
    tensor = encode_fp8(values, np.float32(1))
    assert tensor.data_type == TensorProto.FLOAT8E4M3FN
    bits = np.frombuffer(tensor.raw_data, ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(bits, np.array([0, 1, -1, 1.125, 448, 448, -448, 2**-9, 0], np.float32))


def test_scale_brings_the_largest_value_to_the_largest_number() -> None:
    assert fp8_scale(448) == 1
    assert fp8_scale(0) == 1
    for largest in (1e-30, 1e-3, 0.7, 13.3, 1e4):
        scale = fp8_scale(largest)
        assert scale * FP8_LARGEST >= largest
        assert scale == np.float32(np.float16(scale)) <= max(largest / FP8_LARGEST * 1.001, 2**-14)
        assert scale < next_fp8_scale(scale) < scale * 1.001
    assert fp8_scale(1e30) == 65504
    tensor = encode_fp8(np.array([[7.0, -3.5]], np.float32), fp8_scale(7.0))
    assert list(tensor.dims) == [1, 2]
    np.testing.assert_array_equal(np.frombuffer(tensor.raw_data, ml_dtypes.float8_e4m3fn).astype(int), [448, -224])


def stored_type(graph: OnnxGraph, dequantizing: onnx.NodeProto | None) -> int:
    """Element type of the constant that is dequantised, or quantised first."""
    assert dequantizing is not None
    quantizing = graph.producer(dequantizing.input[0])
    name = dequantizing.input[0] if quantizing is None else quantizing.input[0]
    assert graph.is_constant(name)
    return graph.element_type(name)


@pytest.mark.parametrize("name", ["residual", "squeeze_excite", "transformer", "squeezenet"])
def test_models_in_fp8_are_valid_and_close(name: str) -> None:
    own = getattr(networks, name, None)
    model = simplify(own() if own is not None else networks.light(name))
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    quantized = quantize(model, ranges, "tensorrt", "fp8")
    onnx.checker.check_model(quantized, full_check=True)
    assert (quantized.opset_import[0].version, quantized.ir_version) == (19, 9)
    graph = OnnxGraph(copy_model(quantized))
    chosen = place_pairs(OnnxGraph(copy_model(model)), "tensorrt", "fp8").weighted
    for node in graph.nodes:
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            makers = [graph.producer(tensor) for tensor in node.input[:2]]
            operators = [maker is not None and maker.op_type == "DequantizeLinear" for maker in makers]
            assert operators == [node.name in chosen] * 2
            if node.name in chosen and chosen[node.name].weight is not None:
                stored = TensorProto.FLOAT if node.op_type == "Conv" else TensorProto.FLOAT8E4M3FN
                assert stored_type(graph, makers[1]) == stored
        if node.op_type == "QuantizeLinear":
            assert graph.element_type(node.input[2]) == TensorProto.FLOAT8E4M3FN
    assert chosen
    x, seen = networks.inputs_of(model), networks.logits(model)
    expected = OnnxRunner(model, [seen]).run(x)[seen]
    assert networks.cosine(expected, OnnxRunner(quantized, [seen], optimize=False).run(x)[seen]) > 0.97


def one_convolution() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """As it is, and quantised."""
    model = simplify(networks.network("y = Conv(x, w)", networks.weights(w=(16, 16, 1, 1)), ("N", 16, 4, 4)))
    return model, quantize(model, dict.fromkeys(tensors_to_calibrate(model), (-4.0, 4.0)), "tensorrt", "fp8")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_of_convolutions_and_their_scales_have_one_type_before_they_are_quantised(precision: str) -> None:
    """TensorRT refuses FP32 weights with FP16 scales, and runs convolutions whose weights are stored in FP8 in FP16."""
    _, written = one_convolution()
    graph = OnnxGraph(copy_model(written if precision == "fp32" else cast_model(written, "fp16", quantized="scales")))
    convolution = next(node for node in graph.nodes if node.op_type == "Conv")
    element_type = TensorProto.FLOAT if precision == "fp32" else TensorProto.FLOAT16
    dequantizing = graph.producer(convolution.input[1])
    assert dequantizing is not None
    quantizing = graph.producer(dequantizing.input[0])
    assert quantizing is not None
    assert (quantizing.op_type, dequantizing.op_type) == ("QuantizeLinear", "DequantizeLinear")
    assert quantizing.input[1:] == dequantizing.input[1:]
    kinds = [graph.element_type(tensor) for tensor in (*quantizing.input[:2], convolution.input[1])]
    assert kinds == [element_type] * 3


def test_biases_make_up_for_weights_that_the_target_is_to_round() -> None:
    model, quantized = one_convolution()
    ones = np.ones((2, 16, 4, 4), np.float32)
    corrected = correct_biases(model, quantized, ["node_y"], samples_of({"x": ones}), silent)
    error = OnnxRunner(quantized, ["w_dequantized"]).run({"x": ones})["w_dequantized"] - OnnxGraph(model).constant("w")
    bias = OnnxGraph(corrected).constant("node_y.bias")
    np.testing.assert_allclose(bias, -error.sum(axis=(1, 2, 3)), rtol=1e-4, atol=1e-6)
    assert np.abs(error).max() > 0
