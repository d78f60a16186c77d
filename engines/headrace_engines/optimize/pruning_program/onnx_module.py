"""Converts the ONNX graph of a small convolutional network to a `torch.fx.GraphModule`.

The result is checked against ONNX Runtime's outputs before its use; an operator or attribute that is not listed here is refused
with the node's name.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import fx, nn

from headrace_engines.optimize.pruning_program.channels import NotUnderstood

_POINTWISE = {
    "Relu": nn.ReLU, "Sigmoid": nn.Sigmoid, "Tanh": nn.Tanh, "HardSwish": nn.Hardswish, "Mish": nn.Mish, "Identity": nn.Identity,
    "Dropout": nn.Identity,
}  # fmt: skip
_BINARY = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}
_SPATIAL_RANK = 2
_BATCH_SIZES = (0, -1)


def read_network(path: str) -> fx.GraphModule:
    """Return the network of an ONNX file with one input and one output, in evaluation mode.

    Raises:
        NotUnderstood: an operator or attribute is not supported; the message has the node.
    """
    return _Converter(onnx.load(path)).convert()


class _Converter:
    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = onnx.shape_inference.infer_shapes(model)
        self._constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._values: dict[str, fx.Node] = {}
        self._ranks = {
            value.name: [d.dim_value or -1 for d in value.type.tensor_type.shape.dim]
            for value in (*self._model.graph.value_info, *self._model.graph.input)
        }

    def convert(self) -> fx.GraphModule:
        graph = self._model.graph
        inputs = [value.name for value in graph.input if value.name not in self._constants]
        if len(inputs) != 1 or len(graph.output) != 1:
            raise NotUnderstood(
                f"the model has {len(inputs)} inputs and {len(graph.output)} outputs: channels are pruned for one of each"
            )
        self._values[inputs[0]] = self._graph.placeholder("x")
        for number, node in enumerate(graph.node):
            if node.op_type == "Constant":
                value = helper.get_attribute_value(node.attribute[0])
                self._constants[node.output[0]] = (
                    numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.array(value)
                )
                continue
            self._values[node.output[0]] = self._node(node, f"layer{number}_{node.op_type.lower()}")
        self._graph.output(self._values[graph.output[0].name])
        return fx.GraphModule(self._root, self._graph).eval()

    def _node(self, node: onnx.NodeProto, name: str) -> fx.Node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        module: nn.Module | None = None
        if kind in _POINTWISE:
            module = _POINTWISE[kind]()
        elif kind == "LeakyRelu":
            module = nn.LeakyReLU(attributes.get("alpha", 0.01))
        elif kind == "HardSigmoid" and abs(attributes.get("alpha", 0.2) - 1 / 6) < 1e-6:
            module = nn.Hardsigmoid()
        elif kind == "Clip":
            module = self._clip(node)
        elif kind == "Conv":
            module = self._convolution(node, attributes)
        elif kind == "BatchNormalization":
            module = self._batch_norm(node, attributes)
        elif kind in ("MaxPool", "AveragePool"):
            module = self._pool(node, attributes)
        elif kind == "GlobalAveragePool":
            module = nn.AdaptiveAvgPool2d(1)
        elif kind in ("Gemm", "MatMul"):
            module = self._linear(node, attributes)
        elif kind in ("Flatten", "Reshape"):
            module = self._flatten(node, attributes)
        elif kind == "Softmax" and attributes.get("axis", -1) in (-1, 1) and len(self._shape(node.input[0])) == 2:
            module = nn.Softmax(1)
        elif kind == "ReduceMean":
            return self._mean(node, attributes)
        elif kind in _BINARY:
            return self._binary(node, kind)
        elif kind == "Concat":
            if attributes.get("axis") not in (1,):
                raise self._refusal(node, "only axis 1 is supported")
            return self._graph.call_function(torch.cat, ([self._input(node, i) for i in range(len(node.input))], 1))
        if module is None:
            raise self._refusal(node, "this operator is not supported")
        value = self._input(node, 0)
        for part, layer in enumerate(module if isinstance(module, nn.Sequential) else [module]):
            part_name = f"{name}_{part}" if part else name
            self._root.add_module(part_name, layer)
            value = self._graph.call_module(part_name, (value,))
        return value

    # Operators

    def _convolution(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> nn.Module:
        weight = self._constant(node, 1)
        if weight.ndim != 2 + _SPATIAL_RANK:
            raise self._refusal(node, "only convolutions of two dimensions are supported")
        padding, extra = self._padding(node, attributes)
        groups = int(attributes.get("group", 1))
        convolution = nn.Conv2d(
            weight.shape[1] * groups,
            weight.shape[0],
            tuple(weight.shape[2:]),
            tuple(attributes.get("strides", (1, 1))),
            padding,
            tuple(attributes.get("dilations", (1, 1))),
            groups,
            bias=len(node.input) > 2,
        )
        _set(convolution, weight, self._constant(node, 2) if len(node.input) > 2 else None)
        return convolution if extra is None else nn.Sequential(extra, convolution)

    def _batch_norm(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> nn.Module:
        scale, bias, mean, variance = (self._constant(node, index) for index in range(1, 5))
        norm = nn.BatchNorm2d(len(scale), eps=float(attributes.get("epsilon", 1e-5)))
        _set(norm, scale, bias)
        norm.running_mean = torch.tensor(mean)
        norm.running_var = torch.tensor(variance)
        return norm

    def _pool(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> nn.Module:
        padding, extra = self._padding(node, attributes)
        if extra is not None or any(size != 1 for size in attributes.get("dilations", ())):
            raise self._refusal(node, "only equal padding on both sides and no dilation are supported")
        kernel = tuple(attributes["kernel_shape"])
        stride = tuple(attributes.get("strides", (1,) * len(kernel)))
        if len(kernel) != _SPATIAL_RANK:
            raise self._refusal(node, "only two dimensions are supported")
        ceil = bool(attributes.get("ceil_mode", 0))
        if node.op_type == "MaxPool":
            return nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil)
        include = bool(attributes.get("count_include_pad", 0))
        return nn.AvgPool2d(kernel, stride, padding, ceil_mode=ceil, count_include_pad=include)

    def _padding(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> tuple[tuple[int, int], nn.Module | None]:
        """Return the padding of both sides, or a module that pads if the sides differ."""
        if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
            raise self._refusal(node, "auto_pad is not supported: write pads")
        top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
        if (top, left) == (bottom, right):
            return (top, left), None
        return (0, 0), nn.ZeroPad2d((left, right, top, bottom))

    def _linear(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> nn.Module:
        if attributes.get("transA", 0) or len(self._shape(node.input[0])) != 2:
            raise self._refusal(node, "its input is not [samples, features]")
        weight = self._constant(node, 1) * np.float32(attributes.get("alpha", 1.0))
        if weight.ndim != 2:
            raise self._refusal(node, "its weight has no two dimensions")
        if not attributes.get("transB", 0):
            weight = weight.T
        bias = None
        if len(node.input) > 2:
            bias = np.broadcast_to(
                self._constant(node, 2).reshape(-1) * np.float32(attributes.get("beta", 1.0)), len(weight)
            )
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        _set(linear, weight, bias)
        return linear

    def _flatten(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> nn.Module:
        shape = self._shape(node.input[0])
        features = int(np.prod(shape[1:])) if all(size > 0 for size in shape[1:]) else 0
        if node.op_type == "Flatten":
            if attributes.get("axis", 1) != 1:
                raise self._refusal(node, "only axis 1 is supported")
        else:
            sizes = self._constant(node, 1).tolist()
            if (
                len(sizes) != 2
                or sizes[0] not in _BATCH_SIZES
                or sizes[1] not in ((-1,) if sizes[0] == 0 else ()) + (features,)
            ):
                raise self._refusal(node, f"its shape is {sizes}, only [samples, all features] is supported")
        return nn.Flatten(1)

    def _mean(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> fx.Node:
        rank = len(self._shape(node.input[0]))
        axes = attributes.get("axes") or (self._constant(node, 1).tolist() if len(node.input) > 1 else ())
        if sorted(axis % rank for axis in axes) != [2, 3] or rank != 4:
            raise self._refusal(node, "only the mean over all positions is supported")
        keep = bool(attributes.get("keepdims", 1))
        return self._graph.call_method("mean", (self._input(node, 0),), {"dim": [2, 3], "keepdim": keep})

    def _clip(self, node: onnx.NodeProto) -> nn.Module:
        limits = [
            float(self._constant(node, index)) if len(node.input) > index and node.input[index] else None
            for index in (1, 2)
        ]
        if node.attribute or None in limits:
            raise self._refusal(node, "only Clip with two constant limits is supported")
        return nn.Hardtanh(*limits)

    def _binary(self, node: onnx.NodeProto, kind: str) -> fx.Node:
        operands: list[Any] = []
        for index, name in enumerate(node.input):
            constant = self._constants.get(name)
            if constant is not None and constant.size != 1:
                raise self._refusal(node, "a constant with several values is not supported")
            operands.append(self._input(node, index) if constant is None else float(constant.reshape(())))
        return self._graph.call_function(_BINARY[kind], tuple(operands))

    # Values

    def _input(self, node: onnx.NodeProto, index: int) -> fx.Node:
        name = node.input[index]
        if name not in self._values:
            raise self._refusal(node, f"its input {name} is a constant")
        return self._values[name]

    def _constant(self, node: onnx.NodeProto, index: int) -> np.ndarray[Any, Any]:
        name = node.input[index]
        if name not in self._constants:
            raise self._refusal(node, f"its input {name} is computed, a constant is supported")
        return np.array(self._constants[name])

    def _shape(self, name: str) -> Sequence[int]:
        return self._ranks.get(name, [])

    def _refusal(self, node: onnx.NodeProto, reason: str) -> NotUnderstood:
        return NotUnderstood(
            f"node {node.name or node.output[0]} ({node.op_type}) cannot be converted to PyTorch: {reason}"
        )


def _set(module: Any, weight: np.ndarray[Any, Any], bias: np.ndarray[Any, Any] | None) -> None:
    module.weight = nn.Parameter(torch.tensor(np.ascontiguousarray(weight, np.float32)))
    if bias is not None:
        module.bias = nn.Parameter(torch.tensor(np.ascontiguousarray(bias, np.float32)))
