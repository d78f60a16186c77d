"""Layers to measure: of a model, of ResNet-50, of the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError, CallError
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.layers import kernel_size_layers, model_layers, resnet50_layers, shape_layer
from onnx import helper, numpy_helper

ROOT = Path(__file__).resolve().parents[4]


def network(nodes: list[onnx.NodeProto], outputs: dict[str, list[int]], **weights: np.ndarray) -> onnx.ModelProto:
    """A model with the input x (free, 8, 9, 9)."""
    value = lambda name, shape: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)  # noqa: E731
    graph = helper.make_graph(
        nodes,
        "network",
        [value("x", [None, 8, 9, 9])],
        [value(name, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def kernel(k: int, c: int, size: int) -> np.ndarray:
    return np.ones((k, c, size, size), np.float32)


def test_bias_residual_and_relu_after_a_convolution_are_its_epilogue() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w3", "b"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "w1"], ["c"], name="second"),
        helper.make_node("Conv", ["x", "w1"], ["d"], name="projection"),
        helper.make_node("Add", ["c", "d"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    model = network(nodes, {"y": [None, 8, 9, 9]}, w3=kernel(8, 8, 3), w1=kernel(8, 8, 1), b=np.ones(8, np.float32))
    layers, skipped = model_layers(model)
    assert not skipped
    assert [(layer.shape, layer.epilogue, layer.nodes) for layer in layers] == [
        (ConvShape(1, 8, 9, 9, 8, 3, 3, 1, 1), Epilogue(bias=True, relu=True), ("first",)),
        (ConvShape(1, 8, 9, 9, 8, 1, 1), Epilogue(residual=True, relu=True), ("second", "projection")),
    ]


def test_an_output_with_two_readers_and_an_add_of_another_shape_are_not_fused() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="shared"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Add", ["a", "r"], ["s"]),
        helper.make_node("Conv", ["s", "w3"], ["t"], name="scaled"),
        helper.make_node("Add", ["t", "one"], ["y"]),
    ]
    model = network(nodes, {"y": [None, 8, 7, 7]}, w1=kernel(8, 8, 1), w3=kernel(8, 8, 3), one=np.ones(1, np.float32))
    layers, _ = model_layers(model)
    assert [layer.epilogue for layer in layers] == [Epilogue(), Epilogue()]


def test_convolutions_that_cannot_be_measured_are_named_with_the_reason() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w3"], ["a"], name="dilated", dilations=[2, 2]),
        helper.make_node("Conv", ["x", "w3"], ["b"], name="uneven", pads=[0, 0, 1, 1]),
    ]
    model = network(nodes, {"a": [None, 8, 5, 5], "b": [None, 8, 8, 8]}, w3=kernel(8, 8, 3))
    with pytest.raises(BuildError, match=r"dilated: its dilation is not 1; uneven: its padding \[0, 0, 1, 1\]"):
        model_layers(model)


def test_same_padding_is_resolved() -> None:
    nodes = [helper.make_node("Conv", ["x", "w3"], ["y"], auto_pad="SAME_UPPER")]
    layers, _ = model_layers(network(nodes, {"y": [None, 8, 9, 9]}, w3=kernel(8, 8, 3)))
    assert layers[0].shape.pad == 1


def test_resnet50_has_22_layers_and_4_with_a_residual() -> None:
    layers = resnet50_layers()
    assert len(layers) == 22
    assert {layer.shape.r for layer in layers} == {1, 3}
    residual = [layer.shape.k for layer in layers if layer.epilogue.residual]
    assert residual == [256, 512, 1024, 2048]
    assert sum(layer.epilogue == Epilogue(bias=True) for layer in layers) == 3


def test_the_table_of_resnet50_is_that_of_the_demo_model() -> None:
    path = ROOT / "model_repository" / "resnet50" / "1" / "model.onnx"
    if not path.exists():
        pytest.skip("the demo model resnet50 is not built: make models")
    found, skipped = model_layers(onnx.load(path))
    assert not skipped
    of_model = {layer.shape: layer.epilogue for layer in found if layer.shape.r < 7}
    assert of_model == {layer.shape: layer.epilogue for layer in resnet50_layers()}


def test_shapes_of_the_command_line() -> None:
    layer = shape_layer("8,64,56,56,128,3,3,2,1")
    assert layer.at(4) == ConvShape(4, 64, 56, 56, 128, 3, 3, 2, 1)
    assert layer.name == "3x3 64->128 56x56 /2"
    assert shape_layer("1,8,5,5,8,3,3,1,1,8").shape.groups == 8
    for text, reason in (
        ("1,2,3", "it has 3 numbers"),
        ("1,8,2,2,8,5,5,1,0", "larger than"),
        ("a,b", "invalid literal"),
    ):
        with pytest.raises(CallError, match=reason):
            shape_layer(text)


def test_kernel_sizes_keep_the_size_of_the_picture() -> None:
    layers = kernel_size_layers(ConvShape(1, 8, 20, 20, 8, 3, 3, 1, 1), (3, 7))
    assert [(layer.shape.r, layer.shape.out_h) for layer in layers] == [(3, 20), (7, 20)]
    with pytest.raises(CallError, match="has 4: write odd numbers"):
        kernel_size_layers(ConvShape(1, 8, 20, 20, 8, 3, 3, 1, 1), (3, 4))
