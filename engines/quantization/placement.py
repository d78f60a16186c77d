"""Where a graph gets Q/DQ pairs, by rules on operators and their neighbours; the same for any network.

TensorRT fuses a DequantizeLinear into the operator behind it and a QuantizeLinear into the one before it (its documentation,
"Explicit Quantization"). So a pair stands before each data input of a convolution or product; on the shortcut of a residual
addition, or else the convolution that it is fused with would write FP32; never before a MaxPool, over which TensorRT moves the
pair behind it by itself; before averages, gates and batch norms that lie between quantised operators.

ONNX Runtime fuses whole "DQ, operator, Q" groups into integer kernels (its documentation, "Quantize ONNX models"), so tensors
between quantised operators are stored in 8 bits: pairs stand on outputs too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx

from engines.errors import BuildError
from engines.onnx_graph import Graph, copy_model
from engines.quantization.fp8 import fp8_layers
from engines.quantization.operators import (
    ACTIVATIONS,
    CLAMPS,
    JOINS,
    POOLS,
    SAME_VALUES,
    Weighted,
    all_weighted,
    concatenated,
    is_activation,
    joins_activations,
    moves_values,
    only_reader,
    overlapping,
    source,
    wanted,
)

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
class Placement:
    """What is quantised.

    Attributes:
        weighted: convolutions and products that run in 8 bits, by name of the node.
        edges: (name of a node, place of its input): reads its input through a Q/DQ pair.
        stored: tensors that exist in 8 bits only: all their readers read them through the pair.
        sources: by quantised tensor, those whose ranges together are its own.
        apart: by quantised tensor, those whose scale it must not have.
    """

    weighted: dict[str, Weighted]
    edges: tuple[tuple[str, int], ...]
    stored: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]
    apart: dict[str, tuple[str, ...]]


def place(graph: Graph, target: str, precision: str = "int8", keep: Collection[str] = ()) -> Placement:
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
    groups = concatenated(graph, wanted(graph, all_weighted(graph), steps))
    origins = {tensor: source(graph, tensor) for tensor in tensors}
    sources = {tensor: groups.get(origin, (origin,)) for tensor, origin in origins.items()}
    # Where what is concatenated is read elsewhere too, with the same scale, TensorRT lets a convolution write it straight to its
    # place in the concatenation and reads it there: with the wrong stride of the batch, as seen with TensorRT 10.6.
    apart = overlapping(graph, tensors) if target == "tensorrt" else {}
    return Placement(rules.weighted, tuple(rules.edges), tuple(rules.stored), sources, apart)


def tensors_to_calibrate(model: onnx.ModelProto) -> list[str]:
    """Names of the tensors whose ranges `quantize` needs for either target and any `keep`, in the graph's order.

    Args:
        model: from `simplify`; is not changed.
    """
    graph = Graph(copy_model(model))
    needed = {name for target in TARGETS for names in place(graph, target).sources.values() for name in names}
    order = [*graph.inputs, *(name for node in graph.nodes for name in node.output)]
    return [name for name in order if name in needed]


class _TensorRT:
    """Pairs on edges alone: TensorRT moves and merges them by itself."""

    def __init__(self, graph: Graph, precision: str, keep: Collection[str]) -> None:
        self._graph, self._keep = graph, keep
        every = all_weighted(graph, keep)
        self.weighted = fp8_layers(graph, every) if precision == "fp8" else every
        self._floats = set(all_weighted(graph)) - set(self.weighted)
        self._wanted = wanted(graph, self.weighted, _TENSORRT_STEPS, keep)
        self._joinable = precision == "int8" or any(one.operator == "Conv" for one in self.weighted.values())
        self._depth = _depths(graph)
        self.edges: list[tuple[str, int]] = []
        self.stored: list[str] = []
        for node in graph.nodes:
            if node.name in self.weighted:
                self.edges += [(node.name, index) for index in self.weighted[node.name].activations]
            elif node.name not in keep and any(name in self._wanted for name in node.output):
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
        # A pair pays where it lets an addition join a quantised convolution, in INT8 also between two of them.
        if not joins_activations(graph, node) or not self._joinable:
            return []
        fusible = [index for index, name in enumerate(node.input) if self._is_convolution(name)]
        if fusible:
            # Of two convolutions the main branch's is fused, the other one makes the shortcut.
            fused = max(fusible, key=lambda index: self._depth[node.input[index]])
            return [index for index in (0, 1) if index != fused]
        return [0, 1] if all(len(graph.shape(name) or ()) >= 4 for name in node.input) else []

    def _is_convolution(self, tensor: str) -> bool:
        maker, reader = self._graph.producer(tensor), only_reader(self._graph, tensor)
        one = self.weighted.get(maker.name) if maker is not None and reader is not None else None
        return one is not None and one.operator in ("Conv", "ConvTranspose")

    def _is_gate(self, node: onnx.NodeProto) -> bool:
        """True for one value a channel times a feature map, as in squeeze-and-excitation."""
        if not joins_activations(self._graph, node):
            return False
        shapes = [self._graph.shape(name) or () for name in node.input]
        flat = [len(shape) >= 4 and all(size == 1 for size in shape[2:]) for shape in shapes]
        return len(shapes[0]) == len(shapes[1]) and flat[0] != flat[1]

    def _is_float(self, tensor: str) -> bool:
        """True for what a convolution or product that stays in floating point makes."""
        maker = self._graph.producer(tensor)
        while maker is not None and maker.op_type in SAME_VALUES | CLAMPS:
            maker = self._graph.producer(maker.input[0])
        return maker is not None and maker.name in self._floats


class _OnnxRuntime:
    """Tensors in 8 bits wherever what makes them and what reads them can do with it."""

    def __init__(self, graph: Graph, keep: Collection[str]) -> None:
        self._graph = graph
        every = all_weighted(graph, keep)
        nodes = {node.name: node for node in graph.nodes}
        self.weighted = {name: one for name, one in every.items() if _has_integer_kernel(graph, nodes[name], one)}
        self._wanted = wanted(graph, self.weighted, _ONNXRUNTIME_STEPS, set(keep) - self._free_steps())
        self.edges = [(name, index) for name, one in self.weighted.items() for index in one.activations]
        stored: dict[str, None] = {}
        for node in graph.nodes:
            if node.name in self.weighted:
                end = self._clamped(node.output[0])
                # An integer convolution has an integer output; a product may also write FP32.
                if node.op_type == "Conv" or self._all_want(end):
                    stored[end] = None
            elif self._runs_in_8_bits(node, stored, keep):
                for name in node.output:
                    stored[self._clamped(name)] = None
        self.stored = list(stored)

    def _free_steps(self) -> set[str]:
        """Nodes that compute the very same in 8 bits: keeping them in floating point would only cost."""
        return {node.name for node in self._graph.nodes if node.op_type in SAME_VALUES | CLAMPS}

    def _runs_in_8_bits(self, node: onnx.NodeProto, stored: Collection[str], keep: Collection[str]) -> bool:
        if node.op_type not in _ONNXRUNTIME_STEPS or not any(name in self._wanted for name in node.output):
            return False
        if node.op_type in JOINS:
            ready = joins_activations(self._graph, node) and all(name in stored for name in node.input)
            return ready and node.name not in keep
        if node.op_type in _ONNXRUNTIME_MOVES:
            plain = len(node.output) == 1 or node.op_type == "Split"  # a MaxPool that tells places needs floats
            return plain and moves_values(self._graph, node) and node.input[0] in stored
        return node.input[0] in stored and (node.op_type in CLAMPS or node.name not in keep)

    def _clamped(self, tensor: str) -> str:
        """The tensor behind the Relu or Clip that alone reads this one: storing it in 8 bits does the clamping."""
        reader = only_reader(self._graph, tensor)
        return str(reader.output[0]) if reader is not None and reader.op_type in CLAMPS else tensor

    def _all_want(self, tensor: str) -> bool:
        """True if quantised operators are all that reads a tensor, moved about or not."""
        readers = self._graph.consumers(tensor)
        if not readers or tensor in self._graph.outputs:
            return False
        for reader in readers:
            if reader.name in self.weighted:
                if any(reader.input[index] == tensor for index in self.weighted[reader.name].activations):
                    continue
                return False
            moved = reader.op_type in _ONNXRUNTIME_MOVES and moves_values(self._graph, reader)
            if not moved or not all(map(self._all_want, reader.output)):
                return False
        return True


def _has_integer_kernel(graph: Graph, node: onnx.NodeProto, one: Weighted) -> bool:
    """True if ONNX Runtime's CPU kernels can do it: no transposed convolution, a Gemm only as `simplify` leaves it."""
    if one.operator == "Conv":
        return len(node.input) < 3 or not node.input[2] or graph.is_constant(node.input[2])
    if one.operator == "Gemm":
        weight = graph.shape(node.input[1])
        plain = graph.attribute(node, "alpha", 1.0) == graph.attribute(node, "beta", 1.0) == 1.0
        if one.weight is None or one.axis is None or weight is None or not plain:
            return False
        bias = node.input[2] if len(node.input) > 2 else ""
        return not bias or (graph.is_constant(bias) and graph.shape(bias) == (weight[one.axis],))
    return one.operator == "MatMul"


def _depths(graph: Graph) -> dict[str, int]:
    """By tensor how many convolutions lie, at the most, between it and the inputs."""
    depth: dict[str, int] = {}
    for node in graph.nodes:
        own = int(node.op_type in ("Conv", "ConvTranspose"))
        behind = max((depth.get(name, 0) for name in node.input if is_activation(graph, name)), default=0)
        depth.update((name, own + behind) for name in node.output)
    return depth
