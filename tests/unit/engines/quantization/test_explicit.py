"""Models that carry Q/DQ: their precision, and the FP32 model behind them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.quantization.explicit import explicit_precision, refused_by_tensorrt, without_qdq
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_blocks import Network, small_cnn
from tests.support.quantized_models import with_qdq

PICTURES = {"picture": np.random.default_rng(3).standard_normal((16, 3, 16, 16)).astype(np.float32)}


def run(model: onnx.ModelProto, optimize: bool = True) -> np.ndarray:
    (output,) = OnnxRunner(model, optimize=optimize).run(PICTURES).values()
    return output


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_without_qdq_only_the_rounding_of_weights_is_left(target: str) -> None:
    """On ONNX Runtime the pairs replace Relus, which must come back."""
    model = with_qdq(small_cnn(), PICTURES, target)
    assert explicit_precision(model) == "int8"
    plain = without_qdq(model)
    onnx.checker.check_model(plain, full_check=True)
    kinds = {node.op_type for node in plain.graph.node}
    assert not kinds & {"QuantizeLinear", "DequantizeLinear"}
    expected = run(small_cnn())
    rounding = np.abs(run(plain) - expected).max()
    assert rounding < 0.02 * np.abs(expected).max()
    assert rounding < np.abs(run(model) - expected).max()
    assert explicit_precision(plain) == ""


def pair(net: Network, tensor: str, scale: float, zero: int, dtype: type = np.uint8) -> str:
    constants = net.constant(scale), net.constant(zero, dtype)
    return net.node("DequantizeLinear", net.node("QuantizeLinear", tensor, *constants), *constants)


@pytest.mark.parametrize(
    ("scale", "zero", "expected"),
    [
        (2.0, 0, np.array([[0, 0, 1, 5, 9]])),  # begins at 0: a Relu was left out
        (6 / 255, 0, np.array([[0, 0, 1, 5, 6]])),  # ends at 6: Relu6
        (2.0, 128, np.array([[-7, -1, 1, 5, 9]])),
    ],
)
def test_ranges_that_stand_for_activations(scale: float, zero: int, expected: np.ndarray) -> None:
    net = Network()
    x = net.input("x", ["N", 5])
    plain = without_qdq(net.model(net.node("Neg", net.node("Neg", pair(net, x, scale, zero)))))
    values = np.array([[-7, -1, 1, 5, 9]], np.float32)
    (output,) = OnnxRunner(plain).run({"x": values}).values()
    np.testing.assert_array_equal(output, expected)


def test_outputs_of_the_model_keep_their_names() -> None:
    net = Network()
    model = net.model(pair(net, net.input("x", ["N", 5]), 0.1, 128))
    (name,) = (value.name for value in model.graph.output)
    values = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
    np.testing.assert_array_equal(OnnxRunner(without_qdq(model)).run({"x": values})[name], values)


def test_moved_values_between_q_and_dq() -> None:
    net = Network()
    x = net.input("x", ["N", 4, 6])
    constants = net.constant(0.05), net.constant(0, np.int8)
    turned = net.node("Transpose", net.node("QuantizeLinear", x, *constants), perm=[0, 2, 1])
    model = net.model(net.node("DequantizeLinear", turned, *constants))
    values = np.random.default_rng(0).standard_normal((2, 4, 6)).astype(np.float32)
    (output,) = OnnxRunner(without_qdq(model)).run({"x": values}).values()
    np.testing.assert_array_equal(output, values.transpose(0, 2, 1))


def test_computations_on_8_bit_values_are_refused_by_their_node() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    constants = net.constant(0.05), net.constant(0, np.int8)
    integers = net.node("QuantizeLinear", x, *constants)
    total = net.node("MatMulInteger", integers, net.constant(np.ones((4, 2)), np.int8), name="integer")
    model = net.model(net.node("Cast", total, to=TensorProto.FLOAT))
    with pytest.raises(BuildError, match="MatMulInteger node 'integer' computes with 8-bit values"):
        without_qdq(model)


def test_constants_in_nodes() -> None:
    """PyTorch writes scales as Constant nodes."""
    model = with_qdq(small_cnn(), PICTURES, "tensorrt")
    expected = run(without_qdq(model))
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in model.graph.initializer]
    every = [*nodes, *model.graph.node]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(every)
    assert explicit_precision(model) == "int8"
    assert refused_by_tensorrt(model) == ""
    np.testing.assert_allclose(run(without_qdq(model)), expected, rtol=1e-5)


def test_weights_in_8_bits_alone_are_no_quantised_model() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    stored = net.constant(np.arange(8).reshape(4, 2), np.int8), net.constant(0.1)
    assert explicit_precision(net.model(net.node("MatMul", x, net.node("DequantizeLinear", *stored)))) == ""


def test_fp8() -> None:
    net = Network(opset=19)
    x = net.input("x", ["N", 4])
    model = net.model(pair(net, x, 0.1, 0))
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.UINT8:
            fp8 = helper.make_tensor(tensor.name, TensorProto.FLOAT8E4M3FN, [], [0.0])
            tensor.CopyFrom(fp8)
    assert explicit_precision(model) == "fp8"


def test_what_tensorrt_does_not_take() -> None:
    assert refused_by_tensorrt(with_qdq(small_cnn(), PICTURES, "tensorrt")) == ""
    assert "unsigned values" in refused_by_tensorrt(with_qdq(small_cnn(), PICTURES, "onnxruntime"))
    net = Network()
    model = net.model(pair(net, net.input("x", ["N", 4]), 0.1, 3, np.int8))
    assert "QuantizeLinear node 'QuantizeLinear0' has a zero point" in refused_by_tensorrt(model)
    assert numpy_helper.to_array(model.graph.initializer[1]) == 3


def test_a_tensor_keeps_its_name_behind_the_relu_that_was_left_out() -> None:
    """Engines have the tensor there; layers are compared by name."""
    net = Network()
    x = net.input("x", ["N", 4])
    negative = net.node("Neg", x, name="negative")
    plain = without_qdq(net.model(net.node("Neg", pair(net, negative, 1.0, 0))))
    values = np.array([[-2, -1, 1, 2]], np.float32)
    outputs = OnnxRunner(plain, [negative], optimize=False).run({"x": values})
    np.testing.assert_array_equal(outputs[negative], [[2, 1, 0, 0]])
