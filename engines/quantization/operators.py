"""What quantisation needs to know of operators: which have weights, which only move values, which are steps between."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from engines.onnx_graph import Graph

# Outputs have values of input 0 and no others, so they have its range; see `moves_values`.
SAME_VALUES = frozenset(
    (
        *("DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Resize", "Slice"),
        *("SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    )
)
# A quantised output does these for nothing: values beyond the range saturate.
CLAMPS = frozenset(("Relu", "Clip"))
POOLS = frozenset(("AveragePool", "GlobalAveragePool"))
# Functions of single values.
ACTIVATIONS = frozenset(
    (
        *("Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu"),
        *("Selu", "Sigmoid", "Softplus", "Tanh"),
    )
)
# Steps of two or more tensors.
JOINS = frozenset(("Add", "Mul", "Concat"))


@dataclass(frozen=True, slots=True)
class Weighted:
    """A convolution or matrix product that can run in 8 bits.

    Attributes:
        name: of the node.
        operator: Conv, ConvTranspose, Gemm or MatMul.
        activations: places of the inputs that are computed at run time.
        weight: place of the constant operand, None for a product of two activations.
        axis: of the weight, along which each output channel has its own scale; None: one scale for all.
    """

    name: str
    operator: str
    activations: tuple[int, ...]
    weight: int | None
    axis: int | None


def weighted(graph: Graph, node: onnx.NodeProto) -> Weighted | None:
    """The node as one that can run in 8 bits; None if it is none: other operators, other types, already quantised."""
    if node.domain not in ("", "ai.onnx") or len(node.input) < 2:
        return None
    found = _weighted(graph, node)
    if found is None:
        return None
    for index in found.activations:
        maker = graph.producer(node.input[index])
        if not is_activation(graph, node.input[index]) or (maker is not None and maker.op_type == "DequantizeLinear"):
            return None
    if found.weight is not None and graph.element_type(node.input[found.weight]) != TensorProto.FLOAT:
        return None
    return found


def _weighted(graph: Graph, node: onnx.NodeProto) -> Weighted | None:
    constants = [graph.is_constant(name) for name in node.input[:2]]
    shape = graph.shape(node.input[1]) or ()
    match node.op_type:
        case "Conv" if constants[1]:
            return Weighted(node.name, "Conv", (0,), 1, 0)
        case "ConvTranspose" if constants[1]:
            # The weight is [in, out / groups, ...]: with groups, one place of axis 1 stands for several channels.
            axis = 1 if graph.attribute(node, "group", 1) == 1 else None
            return Weighted(node.name, "ConvTranspose", (0,), 1, axis)
        case "Gemm" if not constants[0] and not graph.attribute(node, "transA", 0):
            axis = 0 if graph.attribute(node, "transB", 0) else 1
            return Weighted(node.name, "Gemm", (0,), 1, axis) if constants[1] else _product(node)
        case "MatMul" if not constants[0]:
            axis = 1 if len(shape) == 2 else None
            return Weighted(node.name, "MatMul", (0,), 1, axis) if constants[1] else _product(node)
    return None


def _product(node: onnx.NodeProto) -> Weighted:
    return Weighted(node.name, node.op_type, (0, 1), None, None)


def all_weighted(graph: Graph, keep: Collection[str] = ()) -> dict[str, Weighted]:
    """All nodes that can run in 8 bits, less those in `keep`, by name and in order."""
    found = (weighted(graph, node) for node in graph.nodes)
    return {one.name: one for one in found if one is not None and one.name not in keep}


def is_activation(graph: Graph, tensor: str) -> bool:
    """True for a tensor of FP32 that is computed at run time, or whose type is not known."""
    unknown_or_fp32 = graph.element_type(tensor) in (TensorProto.UNDEFINED, TensorProto.FLOAT)
    return bool(tensor) and not graph.is_constant(tensor) and unknown_or_fp32


def joins_activations(graph: Graph, node: onnx.NodeProto) -> bool:
    """True for a step of different tensors that are all computed at run time."""
    return all(is_activation(graph, name) for name in node.input) and len(set(node.input)) == len(node.input) > 1


def moves_values(graph: Graph, node: onnx.NodeProto) -> bool:
    """True if a node's outputs have values of its input 0 and no others: moved, chosen or repeated."""
    # Resize by interpolation makes new values; without `mode` it takes the nearest.
    return node.op_type in SAME_VALUES and graph.attribute(node, "mode", b"") not in (b"linear", b"cubic")


def source(graph: Graph, tensor: str) -> str:
    """The tensor that first had the values of this one."""
    maker = graph.producer(tensor)
    while maker is not None and moves_values(graph, maker) and is_activation(graph, maker.input[0]):
        tensor = maker.input[0]
        maker = graph.producer(tensor)
    return tensor


def only_reader(graph: Graph, tensor: str) -> onnx.NodeProto | None:
    """The one node that reads a tensor; None if there are more, or if it is an output of the model."""
    readers = graph.consumers(tensor)
    return readers[0] if len(readers) == 1 and tensor not in graph.outputs else None


def wanted(graph: Graph, chosen: Collection[str], through: Collection[str], keep: Collection[str] = ()) -> set[str]:
    """Tensors whose values reach a quantised node by steps that could run in 8 bits too.

    Args:
        graph: in topological order.
        chosen: names of the convolutions and products that are quantised.
        through: operators of the steps.
        keep: names of nodes that are no such steps.
    """
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if node.name in chosen:
            one = weighted(graph, node)
            found.update(node.input[index] for index in (one.activations if one else ()))
        elif node.op_type in through and node.name not in keep and any(name in found for name in node.output):
            if node.op_type in JOINS:
                found.update(node.input if joins_activations(graph, node) else ())
            elif is_activation(graph, node.input[0]):
                found.add(node.input[0])
    return found


def concatenated(graph: Graph, wanted_tensors: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Tensors that end in one another by concatenation should have one scale, so that nothing is scaled anew.

    Returns:
        By tensor that is concatenated, or made by it: the outermost concatenations it is part of, whose ranges hold its own.
    """
    group: dict[str, str] = {}

    def head(tensor: str) -> str:
        while group.setdefault(tensor, tensor) != tensor:
            tensor = group[tensor]
        return tensor

    nodes = [n for n in graph.nodes if n.op_type == "Concat" and n.output[0] in wanted_tensors]
    nodes = [node for node in nodes if joins_activations(graph, node)]
    parts = {source(graph, name) for node in nodes for name in node.input}
    for node in nodes:
        for name in node.input:
            group[head(source(graph, name))] = head(node.output[0])
    outermost: dict[str, list[str]] = {}
    for node in nodes:
        if node.output[0] not in parts:
            outermost.setdefault(head(node.output[0]), []).append(node.output[0])
    return {tensor: tuple(outermost[head(tensor)]) for tensor in list(group)}


def overlapping(graph: Graph, tensors: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Which of some tensors have values in common, where a concatenation made one of the two.

    Args:
        graph: in topological order.
        tensors: names.

    Returns:
        By tensor the others, in their order; without those that have none.
    """
    made: dict[str, frozenset[str]] = {}  # of the concatenations in it, and what those are made of
    for node in graph.nodes:
        if node.op_type == "Concat" and joins_activations(graph, node):
            parts = (made.get(name, frozenset((name,))) for name in node.input)
            made[node.output[0]] = frozenset(node.output).union(*parts)
        elif moves_values(graph, node) and is_activation(graph, node.input[0]):
            same = made.get(node.input[0], frozenset((node.input[0],)))
            made.update((name, same) for name in node.output)
    holders: dict[str, list[str]] = {}
    for tensor in tensors:
        for part in made.get(tensor, (tensor,)):
            holders.setdefault(part, []).append(tensor)
    found = {}
    for tensor in tensors:
        own = made.get(tensor, frozenset((tensor,)))
        near = {other for part in own for other in holders[part] if made.get(other, frozenset((other,))) != own}
        if near:
            found[tensor] = tuple(other for other in tensors if other in near)
    return found
