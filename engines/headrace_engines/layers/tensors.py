"""Tensors of an FP32 graph in its lowered form, and parts of a model between given tensors.

Lowering preserves the names of tensors (`precision.lowering`, `quantization.qdq`). A tensor that only quantised layers read has
its values after the Q/DQ pair: those are the values that the next layers compute with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from headrace_engines.onnx_graph import Array, OnnxGraph, captured, copy_model

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.UNDEFINED)


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Tensor of a lowered model with the values of an FP32 tensor.

    Attributes:
        name: name of the FP32 tensor.
        tensor: name in the lowered model; the output of its DequantizeLinear if all readers are quantised.
        stored: the 8-bit tensor before that DequantizeLinear; "" without one.
        quantized: name of the DequantizeLinear; "" without one.
    """

    name: str
    tensor: str
    stored: str = ""
    quantized: str = ""


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """Node of the FP32 model that writes a tensor.

    Attributes:
        node: name of the node.
        operator: e.g. "Conv".
        tensor: name of its output.
        shape: shape of the output, -1 for free dimensions; None if it is unknown.
        inputs: names of the tensors that it reads, without constants.
    """

    node: str
    operator: str
    tensor: str
    shape: tuple[int, ...] | None
    inputs: tuple[str, ...]


def source_layers(graph: OnnxGraph) -> dict[str, SourceLayer]:
    """Return the layers with an FP32 output, by name of the output, in the order of the graph.

    Args:
        graph: FP32 model, sorted.
    """
    layers = {}
    for node in graph.nodes:
        for tensor in node.output:
            if tensor and graph.element_type(tensor) in (TensorProto.FLOAT, TensorProto.UNDEFINED):
                inputs = tuple(dict.fromkeys(name for name in node.input if name and not graph.is_constant(name)))
                layers[tensor] = SourceLayer(node.name, node.op_type, tensor, graph.shape(tensor), inputs)
    return layers


def counterparts(names: Iterable[str], lowered: OnnxGraph) -> dict[str, Counterpart]:
    """Return the counterparts of FP32 tensors in a lowered model; no entry for tensors that it does not have.

    Args:
        names: names of FP32 tensors.
        lowered: graph of the lowered model.
    """
    found = (_counterpart(name, lowered) for name in names)
    return {match.name: match for match in found if match is not None}


def _counterpart(name: str, graph: OnnxGraph) -> Counterpart | None:
    producer = graph.producer(name)
    if producer is None or graph.element_type(name) not in FLOATS:
        return None
    if producer.op_type == "DequantizeLinear":
        return Counterpart(name, name, producer.input[0], producer.name)
    readers = graph.consumers(name)
    if name in graph.outputs or not readers or any(node.op_type != "QuantizeLinear" for node in readers):
        return Counterpart(name, name)
    stored = readers[0].output[0]
    pair = next((node for node in graph.consumers(stored) if node.op_type == "DequantizeLinear"), None)
    return Counterpart(name, name) if pair is None else Counterpart(name, pair.output[0], stored, pair.name)


def part_of_model(
    model: onnx.ModelProto, outputs: Sequence[str], inputs: Mapping[str, Array] | None = None
) -> onnx.ModelProto:
    """Return the part of a model that computes some tensors.

    Args:
        model: not changed.
        outputs: names of the tensors that become the outputs.
        inputs: values of the tensors that become inputs, for types and shapes, in addition to the model's inputs; only those that
            `outputs` depend on are used.
    """
    graph = OnnxGraph(copy_model(model))
    cuts = dict(inputs or {})
    nodes, read = _nodes_before(graph, outputs, cuts)
    part = onnx.ModelProto()
    part.CopyFrom(model)
    for field in ("node", "input", "output", "initializer", "value_info"):
        part.graph.ClearField(field)
    # Indices: the messages of a repeated field are compared by value.
    part.graph.node.extend(node for index, node in enumerate(graph.nodes) if index in nodes)
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in read - cuts.keys())
    part.graph.input.extend(value for value in model.graph.input if value.name in read - cuts.keys())
    for name, values in cuts.items():
        if name in read:
            part.graph.input.append(
                helper.make_tensor_value_info(name, graph.element_type(name) or TensorProto.FLOAT, values.shape)
            )
    add_outputs(part, graph, outputs)
    return part


def add_outputs(model: onnx.ModelProto, graph: OnnxGraph, names: Sequence[str]) -> list[str]:
    """Add outputs to a model and return their names, in order: those of the tensors, or of their FP32 form for BF16.

    Args:
        model: changed; outputs that it has already are not added again.
        graph: graph with the types of the tensors.
        names: names of tensors.
    """
    present = {value.name for value in model.graph.output}
    added = []
    for name in names:
        output = name
        if graph.element_type(name) == TensorProto.BFLOAT16:  # NumPy has no such type
            output = f"{name}/observed"
            model.graph.node.append(helper.make_node("Cast", [name], [output], output, to=TensorProto.FLOAT))
            model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, _sizes(graph, name)))
        elif name not in present:
            model.graph.output.append(_value_info(graph, name))
        added.append(output)
    return added


def dequantized(graph: OnnxGraph, match: Counterpart, values: Array) -> Array:
    """Return the FP32 values of an 8-bit tensor.

    Args:
        graph: graph of the lowered model.
        match: counterpart with a DequantizeLinear whose scale is constant.
        values: values of `match.stored`.
    """
    node = graph.producer(match.tensor)
    assert node is not None
    scale, zero_point = graph.constant(node.input[1]), None
    assert scale is not None
    if len(node.input) > 2 and node.input[2]:
        zero_point = graph.constant(node.input[2])
    shape = [1] * values.ndim
    if scale.ndim and scale.size > 1:
        shape[graph.attribute(node, "axis", 1)] = -1
    zero = np.float32(0) if zero_point is None else zero_point.astype(np.float32).reshape(shape)
    result: Array = (values.astype(np.float32) - zero) * scale.astype(np.float32).reshape(shape)
    return result


def _nodes_before(graph: OnnxGraph, outputs: Sequence[str], cuts: Collection[str]) -> tuple[set[int], set[str]]:
    """Return the indices of the nodes that outputs depend on, and the tensors that they read; walks end at `cuts`."""
    producer_of = {name: index for index, node in enumerate(graph.nodes) for name in node.output if name}
    waiting = [producer_of[name] for name in outputs if name in producer_of]
    nodes: set[int] = set()
    read: set[str] = set()
    while waiting:
        index = waiting.pop()
        if index in nodes:
            continue
        nodes.add(index)
        node = graph.nodes[index]
        names = {name for name in node.input if name} | captured(node)
        read |= names
        waiting.extend(producer_of[name] for name in names if name in producer_of and name not in cuts)
    return nodes, read


def _value_info(graph: OnnxGraph, name: str) -> onnx.ValueInfoProto:
    element_type = graph.element_type(name)
    if not element_type:
        return onnx.ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, element_type, _sizes(graph, name))


def _sizes(graph: OnnxGraph, name: str) -> list[int | None] | None:
    shape = graph.shape(name)
    return None if shape is None else [None if size < 0 else size for size in shape]


def cut_points(graph: OnnxGraph, end: str) -> list[str]:
    """Return the tensors that every path from the inputs to `end` goes through, in the order of the graph; `end` is the last.

    Args:
        graph: sorted.
        end: name of a tensor.
    """
    indices, _ = _nodes_before(graph, [end], ())
    order = sorted(indices)
    last_read: dict[str, int] = {}
    for position, index in enumerate(order):
        node = graph.nodes[index]
        for name in {*node.input, *captured(node)}:
            if name and not graph.is_constant(name):
                last_read[name] = position
    points = []
    open_until = max((last_read.get(name, -1) for name in graph.inputs), default=-1)
    for position, index in enumerate(order):
        outputs = [name for name in graph.nodes[index].output if name in last_read or name == end]
        if open_until <= position and len(outputs) == 1:
            points.append(outputs[0])
        open_until = max([open_until, *(last_read.get(name, -1) for name in outputs)])
    return points
