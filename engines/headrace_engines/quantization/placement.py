"""Selects the places of Q/DQ pairs in a graph, by rules on operators and their neighbours.

TensorRT fuses a DequantizeLinear into the operator after it and a QuantizeLinear into the one before it (its documentation,
"Explicit Quantization"). So there is a pair before each data input of a convolution or product; on the shortcut of a residual
addition, since the convolution fused with it would write FP32 otherwise; none before a MaxPool, since TensorRT moves the pair
after it; and one before averages, gates and batch norms between quantised operators.

ONNX Runtime fuses "DQ, operator, Q" groups into integer kernels (its documentation, "Quantize ONNX models"). So tensors between
quantised operators are stored in 8 bits, with pairs on outputs too.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, copy_model

# Operators whose outputs have only values of input 0, and so its range; see `moves_values`.
SAME_VALUES = frozenset((
    "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Resize", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
))  # fmt: skip
# Operators that a quantised output includes: values beyond the range saturate.
CLAMPS = frozenset(("Relu", "Clip"))
POOLS = frozenset(("AveragePool", "GlobalAveragePool"))
# Elementwise functions.
ACTIVATIONS = frozenset((
    "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Selu", "Sigmoid", "Softplus", "Tanh",
))  # fmt: skip
# Operators with FP8 kernels on every target that has FP8.
PRODUCTS = ("Gemm", "MatMul")
# Operators of two or more tensors.
JOINS = frozenset(("Add", "Mul", "Concat"))


@dataclass(frozen=True, slots=True)
class WeightedLayer:
    """A convolution or matrix product that can run in 8 bits.

    Attributes:
        name: name of the node.
        operator: Conv, ConvTranspose, Gemm or MatMul.
        activations: indices of the inputs that are computed at run time.
        weight: index of the constant input; None for a product of two activations.
        axis: axis of the weight with one scale for each output channel; None for one scale.
    """

    name: str
    operator: str
    activations: tuple[int, ...]
    weight: int | None
    axis: int | None


def weighted_layer(graph: OnnxGraph, node: onnx.NodeProto) -> WeightedLayer | None:
    """Return the layer of a node that can run in 8 bits; None for other operators or types, or if it is quantised."""
    if node.domain not in ("", "ai.onnx") or len(node.input) < 2:
        return None
    layer = _weighted(graph, node)
    if layer is None:
        return None
    for index in layer.activations:
        producer = graph.producer(node.input[index])
        if not is_activation(graph, node.input[index]) or (
            producer is not None and producer.op_type == "DequantizeLinear"
        ):
            return None
    if layer.weight is not None and graph.element_type(node.input[layer.weight]) != TensorProto.FLOAT:
        return None
    return layer


def _weighted(graph: OnnxGraph, node: onnx.NodeProto) -> WeightedLayer | None:
    axis: int | None
    match node.op_type:
        case "Conv":
            axis = 0
        case "ConvTranspose":
            # The weight is [in, out / groups, ...]: with groups, an index of axis 1 belongs to several channels.
            axis = 1 if graph.attribute(node, "group", 1) == 1 else None
        case "Gemm" if not graph.attribute(node, "transA", 0):
            axis = 0 if graph.attribute(node, "transB", 0) else 1
        case "MatMul":
            axis = 1 if len(graph.shape(node.input[1]) or ()) == 2 else None
        case _:
            return None
    if graph.is_constant(node.input[1]):
        return WeightedLayer(node.name, node.op_type, (0,), 1, axis)
    return WeightedLayer(node.name, node.op_type, (0, 1), None, None) if node.op_type in PRODUCTS else None


def weighted_layers(graph: OnnxGraph, keep: Collection[str] = ()) -> dict[str, WeightedLayer]:
    """Return all layers that can run in 8 bits, without those in `keep`, by name and in order."""
    layers = (weighted_layer(graph, node) for node in graph.nodes)
    return {layer.name: layer for layer in layers if layer is not None and layer.name not in keep}


def is_activation(graph: OnnxGraph, tensor: str) -> bool:
    """Return whether a tensor is FP32, or of unknown type, and computed at run time."""
    unknown_or_fp32 = graph.element_type(tensor) in (TensorProto.UNDEFINED, TensorProto.FLOAT)
    return bool(tensor) and not graph.is_constant(tensor) and unknown_or_fp32


def joins_activations(graph: OnnxGraph, node: onnx.NodeProto) -> bool:
    """Return whether the inputs of a node are different tensors that are all computed at run time."""
    return all(is_activation(graph, name) for name in node.input) and len(set(node.input)) == len(node.input) > 1


def moves_values(graph: OnnxGraph, node: onnx.NodeProto) -> bool:
    """Return whether a node's outputs have values of its input 0 and no others: moved, selected or repeated."""
    # Resize by interpolation computes new values; without `mode` it selects the nearest one.
    return node.op_type in SAME_VALUES and graph.attribute(node, "mode", b"") not in (b"linear", b"cubic")


def origin_of(graph: OnnxGraph, tensor: str) -> str:
    """Return the tensor in which the values of a tensor were computed."""
    producer = graph.producer(tensor)
    while producer is not None and moves_values(graph, producer) and is_activation(graph, producer.input[0]):
        tensor = producer.input[0]
        producer = graph.producer(tensor)
    return tensor


def tensors_between(
    graph: OnnxGraph, chosen: Collection[str], through: Collection[str], keep: Collection[str] = ()
) -> set[str]:
    """Return the tensors whose values reach a quantised node through operators that can run in 8 bits too.

    Args:
        graph: graph in topological order.
        chosen: names of the quantised convolutions and products.
        through: operators that can run in 8 bits.
        keep: names of nodes that stay in floating point.
    """
    tensors: set[str] = set()
    for node in reversed(graph.nodes):
        if node.name in chosen:
            layer = weighted_layer(graph, node)
            tensors.update(node.input[index] for index in (layer.activations if layer else ()))
        elif node.op_type in through and node.name not in keep and any(name in tensors for name in node.output):
            if node.op_type in JOINS:
                tensors.update(node.input if joins_activations(graph, node) else ())
            elif is_activation(graph, node.input[0]):
                tensors.add(node.input[0])
    return tensors


def concatenated(graph: OnnxGraph, tensors: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Group tensors that should have one scale because a concatenation joins them.

    Returns:
        By tensor that is an input or output of a concatenation: the outermost concatenations with its values, whose ranges
        include its range.
    """
    group: dict[str, str] = {}

    def head(tensor: str) -> str:
        while group.setdefault(tensor, tensor) != tensor:
            tensor = group[tensor]
        return tensor

    nodes = [n for n in graph.nodes if n.op_type == "Concat" and n.output[0] in tensors]
    nodes = [node for node in nodes if joins_activations(graph, node)]
    parts = {origin_of(graph, name) for node in nodes for name in node.input}
    for node in nodes:
        for name in node.input:
            group[head(origin_of(graph, name))] = head(node.output[0])
    outermost: dict[str, list[str]] = {}
    for node in nodes:
        if node.output[0] not in parts:
            outermost.setdefault(head(node.output[0]), []).append(node.output[0])
    return {tensor: tuple(outermost[head(tensor)]) for tensor in list(group)}


def overlapping(graph: OnnxGraph, tensors: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Find tensors that have values in common because of a concatenation.

    Args:
        graph: graph in topological order.
        tensors: names of the tensors.

    Returns:
        By tensor the tensors with common values, in order; no entry for tensors without any.
    """
    parts_of: dict[str, frozenset[str]] = {}  # the concatenations in it, with their inputs
    for node in graph.nodes:
        if node.op_type == "Concat" and joins_activations(graph, node):
            parts = (parts_of.get(name, frozenset((name,))) for name in node.input)
            parts_of[node.output[0]] = frozenset(node.output).union(*parts)
        elif moves_values(graph, node) and is_activation(graph, node.input[0]):
            same = parts_of.get(node.input[0], frozenset((node.input[0],)))
            parts_of.update((name, same) for name in node.output)
    holders: dict[str, list[str]] = {}
    for tensor in tensors:
        for part in parts_of.get(tensor, (tensor,)):
            holders.setdefault(part, []).append(tensor)
    overlaps = {}
    for tensor in tensors:
        tensor_parts = parts_of.get(tensor, frozenset((tensor,)))
        near = {
            other
            for part in tensor_parts
            for other in holders[part]
            if parts_of.get(other, frozenset((other,))) != tensor_parts
        }
        if near:
            overlaps[tensor] = tuple(other for other in tensors if other in near)
    return overlaps


# Limits of TensorRT's FP8 convolutions: largest filter, smallest number of channels, no groups. Others run in slow kernels. The
# target has the versions with FP8 convolutions.
_MAX_FILTER_ELEMENTS = 32
_MIN_CHANNELS = 16


def _has_fp8_kernel(graph: OnnxGraph, node: onnx.NodeProto, layer: WeightedLayer) -> bool:
    """Return whether TensorRT has a fast FP8 kernel: for products, and convolutions of many channels with small filters."""
    if layer.operator in PRODUCTS:
        return True
    if layer.operator != "Conv" or graph.attribute(node, "group", 1) != 1:
        return False
    channels_out, channels_in, *kernel = graph.shape(node.input[1]) or (0, 0)
    return min(channels_out, channels_in) >= _MIN_CHANNELS and math.prod(kernel) <= _MAX_FILTER_ELEMENTS


TARGETS = ("tensorrt", "onnxruntime")
_TENSORRT_STEPS = SAME_VALUES | CLAMPS | POOLS | ACTIVATIONS | JOINS | {"BatchNormalization"}
# Operators that ONNX Runtime runs on 8-bit tensors.
_ONNXRUNTIME_MOVES = frozenset((
    "DepthToSpace", "Flatten", "MaxPool", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
))  # fmt: skip
_ONNXRUNTIME_STEPS = _ONNXRUNTIME_MOVES | CLAMPS | POOLS | JOINS | {"LeakyRelu", "Sigmoid"}


@dataclass(frozen=True, slots=True)
class QdqPlacement:
    """Layers and tensors to quantise.

    Attributes:
        weighted: convolutions and products that run in 8 bits, by name of the node.
        edges: (name of a node, index of its input) of inputs with a Q/DQ pair.
        stored: tensors stored in 8 bits; all of their readers use the pair.
        sources: by quantised tensor, the tensors whose joint range it has.
        apart: by quantised tensor, the tensors whose scale it must not have.
    """

    weighted: dict[str, WeightedLayer]
    edges: tuple[tuple[str, int], ...]
    stored: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]
    apart: dict[str, tuple[str, ...]]


def place_pairs(graph: OnnxGraph, target: str, precision: str = "int8", keep: Collection[str] = ()) -> QdqPlacement:
    """Select the layers and tensors to quantise.

    Args:
        graph: graph of a simplified model, in topological order.
        target: "tensorrt" or "onnxruntime".
        precision: "int8" or "fp8".
        keep: names of nodes that stay in floating point.

    Raises:
        BuildError: the target does not support the precision.
    """
    if target not in TARGETS or precision not in ("int8", "fp8") or (target, precision) == ("onnxruntime", "fp8"):
        raise BuildError(f"{target} cannot run {precision}: use int8, or build for TensorRT on a GPU that has FP8")
    rules = _TensorRT(graph, precision, keep) if target == "tensorrt" else _OnnxRuntime(graph, keep)
    by_name = {node.name: node for node in graph.nodes}
    tensors = dict.fromkeys([*(by_name[name].input[index] for name, index in rules.edges), *rules.stored])
    # Groups of the whole graph, so that ranges do not depend on `keep`.
    steps = _TENSORRT_STEPS if target == "tensorrt" else _ONNXRUNTIME_STEPS
    groups = concatenated(graph, tensors_between(graph, weighted_layers(graph), steps))
    origins = {tensor: origin_of(graph, tensor) for tensor in tensors}
    sources = {tensor: groups.get(origin, (origin,)) for tensor, origin in origins.items()}
    # If another layer reads an input of a concatenation with the same scale, TensorRT lets a convolution write it directly into
    # the concatenation and reads it there with the wrong batch stride (measured with TensorRT 10.6).
    apart = overlapping(graph, tensors) if target == "tensorrt" else {}
    return QdqPlacement(rules.weighted, tuple(rules.edges), tuple(rules.stored), sources, apart)


def tensors_to_calibrate(model: onnx.ModelProto) -> list[str]:
    """Return the names of the tensors whose ranges `quantize` needs for both targets and any `keep`, in the graph's order.

    Args:
        model: result of `simplify`; not changed.
    """
    graph = OnnxGraph(copy_model(model))
    needed = {name for target in TARGETS for names in place_pairs(graph, target).sources.values() for name in names}
    order = [*graph.inputs, *(name for node in graph.nodes for name in node.output)]
    return [name for name in order if name in needed]


class _TensorRT:
    """Rules of TensorRT: pairs on edges only, since TensorRT moves and merges them."""

    def __init__(self, graph: OnnxGraph, precision: str, keep: Collection[str]) -> None:
        self._graph, self._keep = graph, keep
        self.weighted = weighted_layers(graph, keep)
        if precision == "fp8":
            layers = ((node, self.weighted[node.name]) for node in graph.nodes if node.name in self.weighted)
            self.weighted = {node.name: layer for node, layer in layers if _has_fp8_kernel(graph, node, layer)}
        self._floats = set(weighted_layers(graph)) - set(self.weighted)
        self._between = tensors_between(graph, self.weighted, _TENSORRT_STEPS, keep)
        self._joinable = precision == "int8" or any(layer.operator == "Conv" for layer in self.weighted.values())
        self._depth = _depths(graph)
        self.edges: list[tuple[str, int]] = []
        self.stored: list[str] = []
        for node in graph.nodes:
            if node.name in self.weighted:
                self.edges += [(node.name, index) for index in self.weighted[node.name].activations]
            elif node.name not in keep and any(name in self._between for name in node.output):
                self.edges += [(node.name, index) for index in self._step(node, precision)]

    def _step(self, node: onnx.NodeProto, precision: str) -> list[int]:
        """Return the inputs to quantise of a node between quantised operators."""
        if node.op_type == "Add":
            chosen = self._addition(node)
        elif precision == "int8" and (node.op_type in POOLS or node.op_type == "BatchNormalization"):
            chosen = [0]
        elif precision == "int8" and node.op_type == "Mul" and self._is_gate(node):
            chosen = [0, 1]
        else:
            chosen = []
        return [] if any(self._is_float(node.input[index]) for index in chosen) else chosen

    def _addition(self, node: onnx.NodeProto) -> list[int]:
        """Return the shortcut of a residual addition, or both inputs if no convolution can be fused with it."""
        graph = self._graph
        # A pair is useful if TensorRT can then fuse an addition with a quantised convolution, in INT8 also between two of them.
        if not joins_activations(graph, node) or not self._joinable:
            return []
        fusible = [index for index, name in enumerate(node.input) if self._is_convolution(name)]
        if fusible:
            # Of two convolutions the one of the main branch is fused, the other one computes the shortcut.
            fused = max(fusible, key=lambda index: self._depth[node.input[index]])
            return [index for index in (0, 1) if index != fused]
        return [0, 1] if all(len(graph.shape(name) or ()) >= 4 for name in node.input) else []

    def _is_convolution(self, tensor: str) -> bool:
        producer, reader = self._graph.producer(tensor), self._graph.only_reader(tensor)
        layer = self.weighted.get(producer.name) if producer is not None and reader is not None else None
        return layer is not None and layer.operator in ("Conv", "ConvTranspose")

    def _is_gate(self, node: onnx.NodeProto) -> bool:
        """Return whether a node multiplies a feature map by one value for each channel, as in squeeze-and-excitation."""
        if not joins_activations(self._graph, node):
            return False
        shapes = [self._graph.shape(name) or () for name in node.input]
        flat = [len(shape) >= 4 and all(size == 1 for size in shape[2:]) for shape in shapes]
        return len(shapes[0]) == len(shapes[1]) and flat[0] != flat[1]

    def _is_float(self, tensor: str) -> bool:
        """Return whether a convolution or product in floating point computes a tensor."""
        producer = self._graph.producer(tensor)
        while producer is not None and producer.op_type in SAME_VALUES | CLAMPS:
            producer = self._graph.producer(producer.input[0])
        return producer is not None and producer.name in self._floats


class _OnnxRuntime:
    """Rules of ONNX Runtime: tensors are stored in 8 bits if their producers and readers support it."""

    def __init__(self, graph: OnnxGraph, keep: Collection[str]) -> None:
        self._graph = graph
        every = weighted_layers(graph, keep)
        nodes = {node.name: node for node in graph.nodes}
        self.weighted = {name: layer for name, layer in every.items() if _has_integer_kernel(graph, nodes[name], layer)}
        # These nodes have the same result in 8 bits; floating point would only cost time.
        free = {node.name for node in graph.nodes if node.op_type in SAME_VALUES | CLAMPS}
        self._between = tensors_between(graph, self.weighted, _ONNXRUNTIME_STEPS, set(keep) - free)
        self.edges = [(name, index) for name, layer in self.weighted.items() for index in layer.activations]
        stored: dict[str, None] = {}
        for node in graph.nodes:
            if node.name in self.weighted:
                end = self._clamped(node.output[0])
                # An integer convolution has an integer output; a product can write FP32.
                if node.op_type == "Conv" or self._only_quantized_readers(end):
                    stored[end] = None
            elif self._runs_in_8_bits(node, stored, keep):
                for name in node.output:
                    stored[self._clamped(name)] = None
        self.stored = list(stored)

    def _runs_in_8_bits(self, node: onnx.NodeProto, stored: Collection[str], keep: Collection[str]) -> bool:
        if node.op_type not in _ONNXRUNTIME_STEPS or not any(name in self._between for name in node.output):
            return False
        if node.op_type in JOINS:
            ready = joins_activations(self._graph, node) and all(name in stored for name in node.input)
            return ready and node.name not in keep
        if node.op_type in _ONNXRUNTIME_MOVES:
            plain = len(node.output) == 1 or node.op_type == "Split"  # a MaxPool with indices needs floats
            return plain and moves_values(self._graph, node) and node.input[0] in stored
        return node.input[0] in stored and (node.op_type in CLAMPS or node.name not in keep)

    def _clamped(self, tensor: str) -> str:
        """Return the output of a Relu or Clip that is the only reader of a tensor, else the tensor: 8 bits clamp too."""
        reader = self._graph.only_reader(tensor)
        return str(reader.output[0]) if reader is not None and reader.op_type in CLAMPS else tensor

    def _only_quantized_readers(self, tensor: str) -> bool:
        """Return whether only quantised operators read a tensor, moved or not."""
        readers = self._graph.consumers(tensor)
        if not readers or tensor in self._graph.outputs:
            return False
        for reader in readers:
            if reader.name in self.weighted:
                if any(reader.input[index] == tensor for index in self.weighted[reader.name].activations):
                    continue
                return False
            moved = reader.op_type in _ONNXRUNTIME_MOVES and moves_values(self._graph, reader)
            if not moved or not all(map(self._only_quantized_readers, reader.output)):
                return False
        return True


def _has_integer_kernel(graph: OnnxGraph, node: onnx.NodeProto, layer: WeightedLayer) -> bool:
    """Return whether ONNX Runtime has an integer CPU kernel: no ConvTranspose, Gemm only in the form of `simplify`."""
    if layer.operator == "Conv":
        return len(node.input) < 3 or not node.input[2] or graph.is_constant(node.input[2])
    if layer.operator == "Gemm":
        weight = graph.shape(node.input[1])
        plain = graph.attribute(node, "alpha", 1.0) == graph.attribute(node, "beta", 1.0) == 1.0
        if layer.weight is None or layer.axis is None or weight is None or not plain:
            return False
        bias = node.input[2] if len(node.input) > 2 else ""
        return not bias or (graph.is_constant(bias) and graph.shape(bias) == (weight[layer.axis],))
    return layer.operator == "MatMul"


def _depths(graph: OnnxGraph) -> dict[str, int]:
    """Return the largest number of convolutions between each tensor and the inputs."""
    depth: dict[str, int] = {}
    for node in graph.nodes:
        count = int(node.op_type in ("Conv", "ConvTranspose"))
        behind = max((depth.get(name, 0) for name in node.input if is_activation(graph, name)), default=0)
        depth.update((name, count + behind) for name in node.output)
    return depth
