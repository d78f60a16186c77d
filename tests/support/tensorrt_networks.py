"""Small networks for the tests on a GPU, written node by node, and their answers by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]

FLOAT, HALF, INT64, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.BOOL


class Sketch:
    """Nodes and constants of a network under construction.

    Args:
        element: type of the constants and of what is computed.
    """

    def __init__(self, element: int = FLOAT) -> None:
        self.element = element
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self._random = np.random.default_rng(7)

    def node(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add a node whose output has its name."""
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, name: str, values: Any, *, as_it_is: bool = False) -> str:
        """Add an initializer; floating point values take the network's type unless they are to stay as they are."""
        values = np.asarray(values)
        if values.dtype.kind == "f" and not as_it_is:
            values = values.astype(helper.tensor_dtype_to_np_dtype(self.element))
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def random(self, *shape: int) -> Array:
        """Weights of unit gain."""
        return self._random.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))

    def model(self, inputs: Sequence[tuple[str, int, Any]], outputs: Sequence[tuple[str, int, Any]]) -> onnx.ModelProto:
        """The network; inputs and outputs are (name, type, shape)."""
        values = [[helper.make_tensor_value_info(*spec) for spec in side] for side in (inputs, outputs)]
        graph = helper.make_graph(self.nodes, "sketch", values[0], values[1], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
        onnx.checker.check_model(model)
        return model


def convolutions(element: int = FLOAT, scales: Mapping[str, float] | None = None) -> onnx.ModelProto:
    """A residual network: x FP32[n, 3, 16, 16] -> logits FP32[n, 10], top INT64[n], positive BOOL[n, 10].

    Args:
        element: FLOAT or HALF, between casts.
        scales: by tensor the scale of its Q/DQ pair, which makes it INT8; the weights are quantized per channel.
    """
    net = Sketch(element)
    x = "x" if element == FLOAT else net.node("Cast", ["x"], "x_cast", to=element)

    def quantized(tensor: str, reader: str) -> str:
        if scales is None:
            return tensor
        key = "x" if tensor.startswith("x") else tensor
        scale = net.constant(f"{reader}_scale", np.float32(scales[key]))
        zero = net.constant(f"{reader}_zero", np.int8(0))
        net.node("QuantizeLinear", [tensor, scale, zero], f"{reader}_q")
        return net.node("DequantizeLinear", [f"{reader}_q", scale, zero], f"{reader}_dq")

    def weights(name: str, *shape: int) -> str:
        values = net.random(*shape)
        if scales is None:
            return net.constant(name, values)
        each = np.abs(values).reshape(shape[0], -1).max(axis=1) / 127
        rounded = np.rint(values / each.reshape(-1, *[1] * (len(shape) - 1))).astype(np.int8)
        scale, zero = net.constant(f"{name}_scale", each), net.constant(f"{name}_zero", np.zeros(shape[0], np.int8))
        return net.node("DequantizeLinear", [net.constant(name, rounded), scale, zero], f"{name}_dq", axis=0)

    def convolution(tensor: str, name: str, channels: int) -> str:
        bias = net.constant(f"{name}_b", np.linspace(-0.1, 0.1, 32, dtype=np.float32))
        inputs = [quantized(tensor, name), weights(f"{name}_w", 32, channels, 3, 3), bias]
        return net.node("Conv", inputs, name, pads=[1, 1, 1, 1], kernel_shape=[3, 3])

    stem = net.node("Relu", [convolution(x, "conv1", 3)], "relu1")
    inner = net.node("Relu", [convolution(stem, "conv2", 32)], "relu2")
    both = net.node("Add", [convolution(inner, "conv3", 32), quantized(stem, "shortcut")], "add")
    pooled = net.node("GlobalAveragePool", [net.node("Relu", [both], "relu3")], "pool")
    flat = net.node("Flatten", [pooled], "flat")
    bias = net.constant("fc_b", np.zeros(10, np.float32))
    logits = net.node("Gemm", [quantized(flat, "fc"), weights("fc_w", 10, 32), bias], "gemm", transB=1)
    net.node("Cast", [logits], "logits", to=FLOAT)
    net.node("ArgMax", ["logits"], "top", axis=1, keepdims=0)
    net.node("Greater", ["logits", net.constant("nought", np.float32(0), as_it_is=True)], "positive")
    outputs = [("logits", FLOAT, ["n", 10]), ("top", INT64, ["n"]), ("positive", BOOL, ["n", 10])]
    return net.model([("x", FLOAT, ["n", 3, 16, 16])], outputs)


def transformer() -> onnx.ModelProto:
    """One block of a text encoder: ids INT64[n, s] -> hidden FP32[n, s, 32]."""
    net = Sketch()
    width, heads = 32, 4
    hidden = net.node("Gather", [net.constant("table", net.random(100, width) * 5), "ids"], "embed")

    def linear(tensor: str, name: str, columns: int) -> str:
        created = net.node("MatMul", [tensor, net.constant(f"{name}_w", net.random(width, columns))], f"{name}_mm")
        return net.node("Add", [created, net.constant(f"{name}_b", np.zeros(columns, np.float32))], name)

    def norm(tensor: str, name: str) -> str:
        scale = net.constant(f"{name}_g", np.ones(width, np.float32))
        return net.node("LayerNormalization", [tensor, scale], name, axis=-1)

    split = net.constant("split", np.array([0, 0, heads, width // heads], np.int64))
    parts = []
    for name, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
        shaped = net.node("Reshape", [linear(hidden, name, width), split], f"{name}_r")
        parts.append(net.node("Transpose", [shaped], f"{name}_t", perm=order))
    scores = net.node("MatMul", parts[:2], "scores")
    shares = net.node(
        "Softmax", [net.node("Mul", [scores, net.constant("root", np.float32(0.35))], "scaled")], "shares"
    )
    mixed = net.node("Transpose", [net.node("MatMul", [shares, parts[2]], "mixed")], "mixed_t", perm=[0, 2, 1, 3])
    joined = net.node("Reshape", [mixed, net.constant("join", np.array([0, 0, width], np.int64))], "joined")
    attended = norm(net.node("Add", [hidden, linear(joined, "out", width)], "add1"), "norm1")
    wide = linear(attended, "wide", width)
    half = net.node("Mul", [wide, net.constant("half", np.float32(0.5))], "half_of")
    erf = net.node("Erf", [net.node("Mul", [wide, net.constant("r2", np.float32(0.7071068))], "over_r2")], "erf")
    gelu = net.node("Mul", [half, net.node("Add", [erf, net.constant("one", np.float32(1))], "erf1")], "gelu")
    last = net.node("Add", [attended, linear(gelu, "narrow", width)], "add2")
    net.node("Identity", [norm(last, "norm2")], "hidden")
    return net.model([("ids", INT64, ["n", "s"])], [("hidden", FLOAT, ["n", "s", width])])


def answers(model: onnx.ModelProto, inputs: Mapping[str, Array], tensors: Sequence[str] = ()) -> dict[str, Array]:
    """Outputs and inner tensors by ONNX Runtime on the CPU."""
    from headrace_engines.onnx_graph import OnnxRunner

    return OnnxRunner(model, tensors, optimize=False).run(inputs)


def scales_of(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, float]:
    """Scales of symmetric INT8 for what `convolutions` quantizes, from the largest values."""
    result = answers(model, inputs, ["relu1", "relu2", "flat"]) | dict(inputs)
    return {name: float(np.abs(result[name]).max()) / 127 for name in ("x", "relu1", "relu2", "flat")}


def pictures(rows: int, seed: int = 0) -> Array:
    """x of `convolutions`."""
    return np.random.default_rng(seed).standard_normal((rows, 3, 16, 16)).astype(np.float32)


def cosine(a: Array, b: Array) -> float:
    """Of two tensors taken as vectors."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
