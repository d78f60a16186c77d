"""Shapes of convolutions and the float64 reference, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from headrace_lab.kernels.base import ConvShape, Epilogue, convolve
from onnx import TensorProto, helper

SHAPES = [
    ConvShape(2, 8, 9, 7, 4, 3, 3, 1, 1),
    ConvShape(1, 3, 23, 21, 5, 7, 7, 2, 3),
    ConvShape(3, 4, 6, 6, 6, 1, 1, 2, 0),
    ConvShape(2, 6, 8, 8, 6, 3, 3, 1, 1, groups=6),
    ConvShape(1, 4, 12, 12, 8, 5, 3, 1, 2, groups=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_equals_onnx_runtime(shape: ConvShape) -> None:
    generator = np.random.default_rng(1)
    x = generator.standard_normal(shape.x_shape, np.float32)
    weights = generator.standard_normal(shape.weights_shape, np.float32)
    bias = generator.standard_normal(shape.k, np.float32)
    residual = generator.standard_normal(shape.y_shape, np.float32)
    node = helper.make_node(
        "Conv", ["x", "w", "b"], ["y"], strides=[shape.stride] * 2, pads=[shape.pad] * 4, group=shape.groups
    )
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "w", "b")]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph([node], "g", infos, [output]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": x.transpose(0, 3, 1, 2).copy(), "w": weights.transpose(0, 3, 1, 2).copy(), "b": bias}
    expected = session.run(None, feeds)[0].transpose(0, 2, 3, 1)
    assert expected.shape == shape.y_shape
    result = convolve(shape, Epilogue(bias=True), x, weights, bias)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    result = convolve(shape, Epilogue(bias=True, residual=True, relu=True), x, weights, bias, residual)
    np.testing.assert_allclose(result, np.maximum(expected + residual, 0), rtol=1e-4, atol=1e-4)


def test_operations_and_bytes() -> None:
    shape = ConvShape(1, 64, 56, 56, 64, 3, 3, 1, 1)
    assert shape.flops == 2 * 56 * 56 * 64 * 64 * 9
    assert shape.min_bytes("float16") == 2 * (2 * 56 * 56 * 64 + 9 * 64 * 64)
    assert shape.min_bytes("float32", residual=True) == 4 * (3 * 56 * 56 * 64 + 9 * 64 * 64)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 4, 3, 3, 4, 5, 5), "larger than the padded input"),
        ((0, 4, 3, 3, 4, 1, 1), "at least 1"),
        ((1, 4, 3, 3, 4, 1, 1, 1, 0, 3), "3 groups do not divide"),
    ],
)
def test_impossible_shapes(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConvShape(*sizes)
