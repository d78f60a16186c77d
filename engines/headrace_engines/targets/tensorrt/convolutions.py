"""Finds convolutions of an FP16 model that our plug-in can run, and replaces them by nodes of the plug-in.

    Conv -> Add (a residual) -> Relu     one node of the plug-in; Add and Relu are optional
    Conv -> Relu

TensorRT's parser creates the plug-in of a node by its operator, and the plug-in finds its layer by the attribute `layer`. The
weights travel beside the ONNX model: as attributes they would be lists of integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from headrace.core.tensor import Array
from headrace.runtimes.cuda.convolution_plugin import PLUGIN
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.kernels.plugin import INDEX_FIELD, PluginLayer
from headrace_lab.kernels.resources import Algorithm
from onnx import TensorProto, helper

from headrace_engines.onnx_graph import OnnxGraph, copy_model

# Channels last in TensorRT is HWC8: without padding only if 8 divides the channels.
_CHANNELS = 8


@dataclass(frozen=True, slots=True)
class FusedConvolution:
    """A convolution of a model with the operations that the plug-in fuses.

    Attributes:
        name: name of the Conv node.
        nodes: names of all replaced nodes, the Conv first.
        shape: the convolution; `n` is the largest batch.
        epilogue: fused operations.
        weights: float16, `shape.weights_shape`.
        bias: float32 (k,), or None.
        inputs: tensors that the plug-in reads: the input, and the residual if there is one.
        output: tensor that it writes.
    """

    name: str
    nodes: tuple[str, ...]
    shape: ConvShape
    epilogue: Epilogue
    weights: Array
    bias: Array | None
    inputs: tuple[str, ...]
    output: str

    def layer(self, algorithm: Algorithm) -> PluginLayer:
        """Return the plug-in's layer for an algorithm."""
        return PluginLayer(algorithm.name, algorithm.variant, self.shape, self.epilogue, self.weights, self.bias)


def find_convolutions(model: onnx.ModelProto, rows: int) -> list[FusedConvolution]:
    """Return the convolutions that the plug-in can run, in topological order.

    These are FP16, with a free or fixed batch and otherwise fixed shapes, two spatial dimensions, constant weights, equal strides
    and paddings in both directions, dilation 1, and input and output channels that are multiples of 8.

    Args:
        model: the model in the precision of the engine; not changed.
        rows: largest batch, where the batch is free.
    """
    graph = OnnxGraph(copy_model(model))
    convolutions: list[FusedConvolution] = []
    claimed: set[str] = set()
    # A residual Add belongs to the last of two convolutions, whose result is added without waiting.
    for node in reversed(graph.nodes):
        if node.op_type == "Conv" and node.domain == "":
            convolution = _fused(graph, node, rows, claimed)
            if convolution is not None:
                claimed.update(convolution.nodes)
                convolutions.append(convolution)
    return convolutions[::-1]


def replace_convolutions(
    model: onnx.ModelProto, chosen: Sequence[FusedConvolution], algorithms: Mapping[str, Algorithm]
) -> tuple[onnx.ModelProto, tuple[PluginLayer, ...]]:
    """Return a model with nodes of the plug-in, and their layers.

    Args:
        model: the model of `find_convolutions`; not changed.
        chosen: convolutions to replace.
        algorithms: algorithm by name of the convolution.
    """
    graph = OnnxGraph(copy_model(model))
    removed = {name for convolution in chosen for name in convolution.nodes}
    for node in [node for node in graph.nodes if node_name(node) in removed]:
        graph.model.graph.node.remove(node)
    for index, convolution in enumerate(chosen):
        node = helper.make_node(PLUGIN, list(convolution.inputs), [convolution.output], name=convolution.name)
        node.attribute.append(helper.make_attribute(INDEX_FIELD, [index]))
        graph.model.graph.node.append(node)
    finished = OnnxGraph(graph.model).finish()
    return finished, tuple(convolution.layer(algorithms[convolution.name]) for convolution in chosen)


def node_name(node: onnx.NodeProto) -> str:
    """Return the name of a node; without one, the name that TensorRT's parser gives it."""
    return node.name or f"node_of_{node.output[0]}"


def _fused(graph: OnnxGraph, node: onnx.NodeProto, rows: int, claimed: set[str]) -> FusedConvolution | None:
    shape = _shape(graph, node, rows)
    weights = graph.constant(node.input[1])
    bias = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if shape is None or weights is None or (bias is None and len(node.input) > 2 and node.input[2]):
        return None
    names, inputs, output = [node_name(node)], [node.input[0]], node.output[0]
    add = graph.only_reader(output)
    residual = _residual(graph, add, output) if add is not None and node_name(add) not in claimed else ""
    if add is not None and residual:
        names.append(node_name(add))
        inputs.append(residual)
        output = add.output[0]
    relu = graph.only_reader(output)
    is_relu = relu is not None and relu.op_type == "Relu" and node_name(relu) not in claimed
    if relu is not None and is_relu:
        names.append(node_name(relu))
        output = relu.output[0]
    return FusedConvolution(
        name=names[0],
        nodes=tuple(names),
        shape=shape,
        epilogue=Epilogue(bias is not None, bool(residual), is_relu),
        weights=np.ascontiguousarray(weights.transpose(0, 2, 3, 1)),
        bias=None if bias is None else bias.astype(np.float32),
        inputs=tuple(inputs),
        output=output,
    )


def _shape(graph: OnnxGraph, node: onnx.NodeProto, rows: int) -> ConvShape | None:
    """Return the shape of a Conv that the plug-in supports, else None."""
    tensors = (node.input[0], node.input[1], node.output[0])
    if any(graph.element_type(name) != TensorProto.FLOAT16 for name in tensors):
        return None
    x, y, weights = (graph.shape(name) for name in (node.input[0], node.output[0], node.input[1]))
    if x is None or y is None or weights is None or len(x) != 4 or len(weights) != 4:
        return None
    auto_pad = graph.attribute(node, "auto_pad", b"NOTSET")
    strides = tuple(graph.attribute(node, "strides", [1, 1]))
    pads = tuple(graph.attribute(node, "pads", [0, 0, 0, 0]))
    dilations = tuple(graph.attribute(node, "dilations", [1, 1]))
    groups = int(graph.attribute(node, "group", 1))
    uniform = len({*strides}) == 1 and len({*pads}) == 1 and {*dilations} == {1}
    if auto_pad not in (b"NOTSET", "NOTSET") or not uniform or min(x[1:]) < 1:
        return None
    if x[1] % _CHANNELS or weights[0] % _CHANNELS or weights[1] * groups != x[1]:
        return None
    k, _, r, s = weights
    try:
        shape = ConvShape(x[0] if x[0] > 0 else rows, x[1], x[2], x[3], k, r, s, strides[0], pads[0], groups)
    except ValueError:
        return None
    return shape if (k, shape.out_h, shape.out_w) == y[1:] else None


def _residual(graph: OnnxGraph, add: onnx.NodeProto, output: str) -> str:
    """Return the tensor of the same shape that an Add adds to a convolution's output; "" if it is another Add."""
    others = [name for name in add.input if name != output]
    if add.op_type != "Add" or len(others) != 1 or graph.is_constant(others[0]):
        return ""
    same = graph.shape(others[0]) == graph.shape(output) is not None
    return others[0] if same and graph.element_type(others[0]) == TensorProto.FLOAT16 else ""
