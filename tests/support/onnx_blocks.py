"""Small networks for tests of the passes over ONNX models."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]


class Network:
    """An ONNX model that grows by calls; a tensor is its name."""

    def __init__(self, opset: int = 17, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self._opset = opset
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"constant{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.random.standard_normal(shape) / np.sqrt(np.prod(shape[1:] or (1,))))

    def node(
        self, operator: str, *inputs: str, name: str = "", outputs: int = 1, domain: str = "", **attributes: Any
    ) -> str:
        name = name or f"{operator}{len(self._nodes)}"
        names = [f"{name}_out{i or ''}" for i in range(outputs)]
        self._nodes.append(helper.make_node(operator, list(inputs), names, name=name, domain=domain, **attributes))
        return names[0]

    def conv(self, tensor: str, channels: tuple[int, int], name: str, size: int = 3) -> str:
        weight = self.weight(channels[1], channels[0], size, size)
        return self.node("Conv", tensor, weight, self.weight(channels[1]), name=name, pads=[size // 2] * 4)

    def model(self, *outputs: str) -> onnx.ModelProto:
        """The model, its outputs' types and shapes as far as ONNX infers them."""
        graph = helper.make_graph(self._nodes, "net", self._inputs, [], self._constants)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        opsets = [helper.make_opsetid("", self._opset), helper.make_opsetid("com.microsoft", 1)]
        inferred = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=8))
        del inferred.graph.value_info[:]
        return inferred


def transformer_block(width: int = 16, positions: int = 8, *, written_out_norm: bool = False) -> onnx.ModelProto:
    """Attention with a mask, and two layers with GELU, both with residuals: [N, positions, width] and a mask of the positions."""
    net = Network()
    tokens = net.input("tokens", ["N", positions, width])
    mask = net.input("mask", ["N", positions], TensorProto.INT64)
    normed = _norm(net, tokens, width, written_out_norm)
    heads = []
    for _ in range(3):
        projected = net.node("MatMul", normed, net.weight(width, width))
        split = net.node("Reshape", projected, net.constant([0, positions, 2, width // 2], np.int64))
        heads.append(net.node("Transpose", split, perm=[0, 2, 1, 3]))
    scores = net.node("MatMul", heads[0], net.node("Transpose", heads[1], perm=[0, 1, 3, 2]))
    scaled = net.node("Div", scores, net.constant(np.sqrt(width / 2)))
    # As exporters write a mask: 0 where a position counts, the least FP32 number where it does not.
    seen = net.node("Unsqueeze", net.node("Cast", mask, to=TensorProto.FLOAT), net.constant([1, 2], np.int64))
    unseen = net.node("Mul", net.node("Sub", net.constant(1.0), seen), net.constant(np.finfo(np.float32).min))
    attention = net.node("Softmax", net.node("Add", scaled, unseen, name="add_mask"), axis=-1, name="softmax")
    mixed = net.node("Transpose", net.node("MatMul", attention, heads[2]), perm=[0, 2, 1, 3])
    joined = net.node("Reshape", mixed, net.constant([0, positions, width], np.int64))
    first = net.node("Add", tokens, net.node("MatMul", joined, net.weight(width, width)))
    hidden = net.node("MatMul", _norm(net, first, width, written_out_norm), net.weight(width, 4 * width))
    erf = net.node("Erf", net.node("Div", hidden, net.constant(np.sqrt(2))))
    gelu = net.node("Mul", hidden, net.node("Mul", net.node("Add", erf, net.constant(1.0)), net.constant(0.5)))
    return net.model(net.node("Add", first, net.node("MatMul", gelu, net.weight(4 * width, width))))


def _norm(net: Network, tensor: str, width: int, written_out: bool) -> str:
    scale, bias = net.constant(np.ones(width)), net.weight(width)
    if not written_out:
        return net.node("LayerNormalization", tensor, scale, bias, axis=-1)
    centred = net.node("Sub", tensor, net.node("ReduceMean", tensor, axes=[-1]))
    square = net.node("Pow", centred, net.constant(2.0))
    variance = net.node("Add", net.node("ReduceMean", square, axes=[-1]), net.constant(1e-12))
    normed = net.node("Div", centred, net.node("Sqrt", variance))
    return net.node("Add", net.node("Mul", normed, scale), bias)


def small_cnn(seed: int = 0) -> onnx.ModelProto:
    """Three convolutions with a residual, pooling and a classifier: [N, 3, 16, 16] -> [N, 10]."""
    net = Network(seed=seed)
    picture = net.input("picture", ["N", 3, 16, 16])
    first = net.node("Relu", net.conv(picture, (3, 8), "conv1"))
    pooled = net.node("MaxPool", first, kernel_shape=[2, 2], strides=[2, 2], name="pool")
    second = net.node("Relu", net.conv(pooled, (8, 8), "conv2"))
    third = net.node("Relu", net.node("Add", net.conv(second, (8, 8), "conv3"), pooled))
    flat = net.node("Flatten", net.node("GlobalAveragePool", third))
    return net.model(net.node("Gemm", flat, net.weight(8, 10), net.weight(10), name="classifier"))
