"""Places Q/DQ pairs in a graph, by rules on operators and their neighbours; the same rules for any network.

TensorRT fuses a DequantizeLinear into the operator behind it and a QuantizeLinear into the one before it (its documentation,
"Explicit Quantization"). So a pair stands before each data input of a convolution or product; on the shortcut of a residual
addition, or else the convolution that it is fused with would write FP32; never before a MaxPool, over which TensorRT moves the
pair behind it by itself; before averages, gates and batch norms that lie between quantised operators.

ONNX Runtime fuses whole "DQ, operator, Q" groups into integer kernels (its documentation, "Quantize ONNX models"), so tensors
between quantised operators are stored in 8 bits: pairs stand on outputs too.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, copy_model

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
class WeightedLayer:
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


def weighted_layer(graph: OnnxGraph, node: onnx.NodeProto) -> WeightedLayer | None:
    """The node as one that can run in 8 bits; None if it is none: other operators, other types, already quantised."""
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
    constants = [graph.is_constant(name) for name in node.input[:2]]
    shape = graph.shape(node.input[1]) or ()
    match node.op_type:
        case "Conv" if constants[1]:
            return WeightedLayer(node.name, "Conv", (0,), 1, 0)
        case "ConvTranspose" if constants[1]:
            # The weight is [in, out / groups, ...]: with groups, one place of axis 1 stands for several channels.
            axis = 1 if graph.attribute(node, "group", 1) == 1 else None
            return WeightedLayer(node.name, "ConvTranspose", (0,), 1, axis)
        case "Gemm" if not constants[0] and not graph.attribute(node, "transA", 0):
            axis = 0 if graph.attribute(node, "transB", 0) else 1
            return WeightedLayer(node.name, "Gemm", (0,), 1, axis) if constants[1] else _product(node)
        case "MatMul" if not constants[0]:
            axis = 1 if len(shape) == 2 else None
            return WeightedLayer(node.name, "MatMul", (0,), 1, axis) if constants[1] else _product(node)
    return None


def _product(node: onnx.NodeProto) -> WeightedLayer:
    return WeightedLayer(node.name, node.op_type, (0, 1), None, None)


def weighted_layers(graph: OnnxGraph, keep: Collection[str] = ()) -> dict[str, WeightedLayer]:
    """All nodes that can run in 8 bits, less those in `keep`, by name and in order."""
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
    # Resize by interpolation makes new values; without `mode` it takes the nearest.
    return node.op_type in SAME_VALUES and graph.attribute(node, "mode", b"") not in (b"linear", b"cubic")


def origin_of(graph: OnnxGraph, tensor: str) -> str:
    """The tensor that first had the values of this one."""
    producer = graph.producer(tensor)
    while producer is not None and moves_values(graph, producer) and is_activation(graph, producer.input[0]):
        tensor = producer.input[0]
        producer = graph.producer(tensor)
    return tensor


def only_reader(graph: OnnxGraph, tensor: str) -> onnx.NodeProto | None:
    """The one node that reads a tensor; None if there are more, or if it is an output of the model."""
    readers = graph.consumers(tensor)
    return readers[0] if len(readers) == 1 and tensor not in graph.outputs else None


def tensors_between(
    graph: OnnxGraph, chosen: Collection[str], through: Collection[str], keep: Collection[str] = ()
) -> set[str]:
    """Tensors whose values reach a quantised node by steps that could run in 8 bits too.

    Args:
        graph: in topological order.
        chosen: names of the convolutions and products that are quantised.
        through: operators of the steps.
        keep: names of nodes that are no such steps.
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
    """Tensors that end in one another by concatenation should have one scale, so that nothing is scaled anew.

    Returns:
        By tensor that is concatenated, or made by it: the outermost concatenations it is part of, whose ranges hold its own.
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
    """Find the tensors that have values in common, where a concatenation made one of the two.

    Args:
        graph: in topological order.
        tensors: names.

    Returns:
        By tensor the others, in their order; without those that have none.
    """
    parts_of: dict[str, frozenset[str]] = {}  # of the concatenations in it, and what those are made of
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


# What runs in FP8 wherever anything does.
PRODUCTS = ("Gemm", "MatMul")
# TensorRT has FP8 convolutions for no larger filters, no fewer channels and no groups; others fall back to slow kernels. Which
# versions have any is a property of the target.
_MAX_FILTER_ELEMENTS = 32
_MIN_CHANNELS = 16


def fp8_layers(graph: OnnxGraph, layers: dict[str, WeightedLayer]) -> dict[str, WeightedLayer]:
    """Return the layers with fast FP8 kernels in TensorRT: products, and convolutions of many channels with small filters."""
    nodes = {node.name: node for node in graph.nodes}
    return {name: layer for name, layer in layers.items() if _fits(graph, nodes[name], layer)}


def _fits(graph: OnnxGraph, node: onnx.NodeProto, layer: WeightedLayer) -> bool:
    if layer.operator in PRODUCTS:
        return True
    if layer.operator != "Conv" or graph.attribute(node, "group", 1) != 1:
        return False
    channels_out, channels_in, *kernel = graph.shape(node.input[1]) or (0, 0)
    return min(channels_out, channels_in) >= _MIN_CHANNELS and math.prod(kernel) <= _MAX_FILTER_ELEMENTS


TARGETS = ("tensorrt", "onnxruntime")
_TENSORRT_STEPS = SAME_VALUES | CLAMPS | POOLS | ACTIVATIONS | JOINS | {"BatchNormalization"}
# What ONNX Runtime does on 8 bits as it would on floats.
_ONNXRUNTIME_MOVES = frozenset(
    (
        *("DepthToSpace", "Flatten", "MaxPool", "Reshape", "Resize", "Slice", "Split"),
        *("Squeeze", "Transpose", "Unsqueeze"),
    )
)
_ONNXRUNTIME_STEPS = _ONNXRUNTIME_MOVES | CLAMPS | POOLS | JOINS | {"LeakyRelu", "Sigmoid"}


@dataclass(frozen=True, slots=True)
class QdqPlacement:
    """The layers and tensors that are quantised.
    Attributes:
        weighted: convolutions and products that run in 8 bits, by name of the node.
        edges: (name of a node, place of its input): reads its input through a Q/DQ pair.
        stored: tensors that exist in 8 bits only: all their readers read them through the pair.
        sources: by quantised tensor, those whose ranges together are its own.
        apart: by quantised tensor, those whose scale it must not have.
    """

    weighted: dict[str, WeightedLayer]
    edges: tuple[tuple[str, int], ...]
    stored: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]
    apart: dict[str, tuple[str, ...]]


def place_pairs(graph: OnnxGraph, target: str, precision: str = "int8", keep: Collection[str] = ()) -> QdqPlacement:
    """Decide what is quantised.

    Args:
        graph: of a simplified model, in topological order.
        target: "tensorrt" or "onnxruntime".
        precision: "int8" or "fp8".
        keep: names of nodes that stay in floating point.

    Raises:
        BuildError: the target cannot have the precision.
    """
    if target not in TARGETS or precision not in ("int8", "fp8") or (target, precision) == ("onnxruntime", "fp8"):
        raise BuildError(f"{target} cannot run {precision}: ask for int8, or build for TensorRT on a GPU that has FP8")
    rules = _TensorRT(graph, precision, keep) if target == "tensorrt" else _OnnxRuntime(graph, keep)
    by_name = {node.name: node for node in graph.nodes}
    tensors = dict.fromkeys([*(by_name[name].input[index] for name, index in rules.edges), *rules.stored])
    # The groups are those of the whole graph, so that a range means the same whatever is kept.
    steps = _TENSORRT_STEPS if target == "tensorrt" else _ONNXRUNTIME_STEPS
    groups = concatenated(graph, tensors_between(graph, weighted_layers(graph), steps))
    origins = {tensor: origin_of(graph, tensor) for tensor in tensors}
    sources = {tensor: groups.get(origin, (origin,)) for tensor, origin in origins.items()}
    # Where what is concatenated is read elsewhere too, with the same scale, TensorRT lets a convolution write it straight to its
    # place in the concatenation and reads it there: with the wrong stride of the batch, as seen with TensorRT 10.6.
    apart = overlapping(graph, tensors) if target == "tensorrt" else {}
    return QdqPlacement(rules.weighted, tuple(rules.edges), tuple(rules.stored), sources, apart)


def tensors_to_calibrate(model: onnx.ModelProto) -> list[str]:
    """Names of the tensors whose ranges `quantize` needs for either target and any `keep`, in the graph's order.

    Args:
        model: from `simplify`; is not changed.
    """
    graph = OnnxGraph(copy_model(model))
    needed = {name for target in TARGETS for names in place_pairs(graph, target).sources.values() for name in names}
    order = [*graph.inputs, *(name for node in graph.nodes for name in node.output)]
    return [name for name in order if name in needed]


class _TensorRT:
    """Pairs on edges alone: TensorRT moves and merges them by itself."""

    def __init__(self, graph: OnnxGraph, precision: str, keep: Collection[str]) -> None:
        self._graph, self._keep = graph, keep
        every = weighted_layers(graph, keep)
        self.weighted = fp8_layers(graph, every) if precision == "fp8" else every
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
        """Inputs of a step between quantised operators that should be quantised."""
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
        """The shortcut of a residual addition; both operands where no convolution can be fused with it."""
        graph = self._graph
        # A pair pays where it allows TensorRT to fuse an addition with a quantised convolution, in INT8 also between two of them.
        if not joins_activations(graph, node) or not self._joinable:
            return []
        fusible = [index for index, name in enumerate(node.input) if self._is_convolution(name)]
        if fusible:
            # Of two convolutions the main branch's is fused, the other one makes the shortcut.
            fused = max(fusible, key=lambda index: self._depth[node.input[index]])
            return [index for index in (0, 1) if index != fused]
        return [0, 1] if all(len(graph.shape(name) or ()) >= 4 for name in node.input) else []

    def _is_convolution(self, tensor: str) -> bool:
        producer, reader = self._graph.producer(tensor), only_reader(self._graph, tensor)
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
        """Return whether a tensor is made by a convolution or product that stays in floating point."""
        producer = self._graph.producer(tensor)
        while producer is not None and producer.op_type in SAME_VALUES | CLAMPS:
            producer = self._graph.producer(producer.input[0])
        return producer is not None and producer.name in self._floats


class _OnnxRuntime:
    """Tensors in 8 bits wherever what makes them and what reads them can do with it."""

    def __init__(self, graph: OnnxGraph, keep: Collection[str]) -> None:
        self._graph = graph
        every = weighted_layers(graph, keep)
        nodes = {node.name: node for node in graph.nodes}
        self.weighted = {name: layer for name, layer in every.items() if _has_integer_kernel(graph, nodes[name], layer)}
        self._between = tensors_between(graph, self.weighted, _ONNXRUNTIME_STEPS, set(keep) - self._free_steps())
        self.edges = [(name, index) for name, layer in self.weighted.items() for index in layer.activations]
        stored: dict[str, None] = {}
        for node in graph.nodes:
            if node.name in self.weighted:
                end = self._clamped(node.output[0])
                # An integer convolution has an integer output; a product may also write FP32.
                if node.op_type == "Conv" or self._only_quantized_readers(end):
                    stored[end] = None
            elif self._runs_in_8_bits(node, stored, keep):
                for name in node.output:
                    stored[self._clamped(name)] = None
        self.stored = list(stored)

    def _free_steps(self) -> set[str]:
        """Nodes that compute the very same in 8 bits: keeping them in floating point would only cost."""
        return {node.name for node in self._graph.nodes if node.op_type in SAME_VALUES | CLAMPS}

    def _runs_in_8_bits(self, node: onnx.NodeProto, stored: Collection[str], keep: Collection[str]) -> bool:
        if node.op_type not in _ONNXRUNTIME_STEPS or not any(name in self._between for name in node.output):
            return False
        if node.op_type in JOINS:
            ready = joins_activations(self._graph, node) and all(name in stored for name in node.input)
            return ready and node.name not in keep
        if node.op_type in _ONNXRUNTIME_MOVES:
            plain = len(node.output) == 1 or node.op_type == "Split"  # a MaxPool that returns indices needs floats
            return plain and moves_values(self._graph, node) and node.input[0] in stored
        return node.input[0] in stored and (node.op_type in CLAMPS or node.name not in keep)

    def _clamped(self, tensor: str) -> str:
        """The tensor behind the Relu or Clip that alone reads this one: storing it in 8 bits does the clamping."""
        reader = only_reader(self._graph, tensor)
        return str(reader.output[0]) if reader is not None and reader.op_type in CLAMPS else tensor

    def _only_quantized_readers(self, tensor: str) -> bool:
        """Return whether quantised operators alone read a tensor, moved or not."""
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
    """Return whether ONNX Runtime has a CPU kernel for it: no transposed convolution, a Gemm only as `simplify` leaves it."""
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
    """Return, by tensor, the largest number of convolutions between it and the inputs."""
    depth: dict[str, int] = {}
    for node in graph.nodes:
        count = int(node.op_type in ("Conv", "ConvTranspose"))
        behind = max((depth.get(name, 0) for name in node.input if is_activation(graph, name)), default=0)
        depth.update((name, count + behind) for name in node.output)
    return depth
