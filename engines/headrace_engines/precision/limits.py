"""The formats FP16 and BF16, the types that operators allow, and the nodes that lose too much accuracy in 16 bits.

By rule, since the error is inside of the operator and in no tensor:

    norms without `stash_type`, LRN, ReduceL2, ...      they square their input: FP16 overflows from 256 on
    LayerNormalization, GroupNormalization, RMSNormalization        only if `stash_type` is not FP32, its default: with FP32 the
        operator reads and writes 16 bits and computes in FP32, as TensorRT's INormalizationLayer does
    norms written out (Pow(2) or Mul -> ReduceMean -> Add -> Sqrt -> Div or Reciprocal)     every node of them
    CumSum, Softmax along more than 4,096 values        long sums
    Sin, Cos, Tan and the nodes that compute their angle        FP16 has an error of a quarter of a radian at 1,000 rad
    GridSample, RoiAlign, MaxRoiPool        coordinates: FP16 has 11 bits, a picture has more than a thousand pixels

By measurement of the activations of a few samples and of the weights, for a node that reads or writes a tensor

    with values beyond a quarter of the format's largest    the few samples do not contain the largest value that can occur
    with an error of more than eight times the rounding error       its small values become subnormal or zero
    whose nonzero values become zero and are a divisor, or the argument of a logarithm
    that is the mean of so many values that their sum would overflow
    that was cast from integers which the format cannot represent

Large negative values of a mask that only Softmax reads do not count: `cast_model` saturates them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, defs

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model
from headrace_engines.progress import Report
from headrace_engines.quantization.samples import Samples
from headrace_engines.simplify import raise_opset

Array = npt.NDArray[Any]
# Operators with most of the arithmetic, which FP16 and BF16 speed up. The others are limited by memory bandwidth.
HEAVY = frozenset(
    {"Conv", "ConvTranspose", "DeformConv", "Gemm", "MatMul", "Einsum", "Attention", "LSTM", "GRU", "RNN"}
)
# Operators that only move values: exact in any format.
MOVEMENT = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Concat", "Split", "Slice", "Gather"}
    | {"Expand", "Tile", "DepthToSpace", "SpaceToDepth", "Shape", "GatherND", "GatherElements", "Dropout", "Cast"}
)
# Operators with constants that are bounds.
BOUNDING = frozenset({"Clip", "Min", "Max"})
# Operators with an attribute for the output type; a cast rewrites it.
TYPE_ATTRIBUTE = {"Cast": "to", "ConstantOfShape": "value"}
# Inputs that are parameters of an operator: a cast does not change them.
_PARAMETERS = {"Resize": "roi", "Dropout": "ratio", "OneHot": "depth"}


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A floating-point format of 16 bits.

    Attributes:
        name: "fp16" or "bf16".
        element_type: `TensorProto.DataType`.
        dtype: NumPy type.
        largest: largest finite value.
        epsilon: difference between 1 and the next value.
        opset: first opset in which convolutions and pooling allow the type.
    """

    name: str
    element_type: int
    dtype: Any
    largest: float
    epsilon: float
    opset: int

    def round(self, values: Array) -> Array:
        """Return FP32 values rounded to the format, as FP32; values beyond `largest` become infinite."""
        with np.errstate(over="ignore"):
            return values.astype(self.dtype).astype(np.float32)

    def tensor(self, values: Array, bound: float) -> TensorProto:
        """Return a constant in the format; finite values beyond `largest` become `bound` with their sign."""
        beyond = np.isfinite(values) & (np.abs(values) > self.largest)
        values = np.where(beyond, np.copysign(np.float32(bound), values), values)
        raw = np.ascontiguousarray(values.astype(self.dtype)).tobytes()
        return TensorProto(data_type=self.element_type, dims=values.shape, raw_data=raw)


FORMATS = {
    "fp16": FloatFormat("fp16", TensorProto.FLOAT16, np.dtype(np.float16), 65504.0, 2.0**-10, 1),
    "bf16": FloatFormat(
        "bf16", TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16), (2 - 2**-7) * 2.0**127, 2.0**-7, 22
    ),
}


def float_format(precision: str) -> FloatFormat:
    """Return the format of a precision.

    Raises:
        BuildError: the precision is not one of 16 bits.
    """
    if precision not in FORMATS:
        raise BuildError(f"a model cannot be cast to '{precision}': use {' or '.join(FORMATS)}")
    return FORMATS[precision]


def at_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Return the model converted to this opset or a later one; the same model if the conversion fails or loses nodes."""
    try:
        raised = raise_opset(model, version)
    except BuildError:
        return model
    same = {node.name for node in raised.graph.node} >= {node.name for node in model.graph.node}
    return raised if same else model


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a node that change when it is cast.

    Attributes:
        inputs: indexes of the FP32 inputs that become 16-bit.
        outputs: indexes of the FP32 outputs that become 16-bit.
        follows: it has no FP32 output (comparisons, ArgMax, Shape) and is cast with its input.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    follows: bool


def signature(graph: OnnxGraph, node: onnx.NodeProto, element_type: int) -> Signature | None:
    """Return the inputs and outputs that a cast of a node changes, by its operator's schema; None if it cannot be cast.

    Not cast are: operators without a schema (of other vendors), with subgraphs, without the type at the model's opset, with an
    input of unknown type, or without FP32 tensors.

    Args:
        graph: graph of the model.
        node: node of the graph.
        element_type: `TensorProto.DataType` to cast to.
    """
    schema = schema_of(graph, node)
    if schema is None or any(a.HasField("g") or a.graphs for a in node.attribute):
        return None
    if any(name and not graph.element_type(name) for name in node.input):
        return None
    type_text = f"tensor({TensorProto.DataType.Name(element_type).lower()})"
    allowed = {c.type_param_str: type_text in c.allowed_type_strs for c in schema.type_constraints}
    inputs = _fp32(graph, node.input, schema.inputs)
    outputs = _fp32(graph, node.output, schema.outputs)
    parameter = _PARAMETERS.get(node.op_type, "")
    reads = {
        i: formal.type_str for i, formal in inputs.items() if formal.name != parameter and formal.type_str in allowed
    }
    # A type without an input is set by an attribute: a rewritable one, or one like stash_type of LayerNormalization.
    by_attribute = node.op_type in TYPE_ATTRIBUTE
    makes = {i: formal.type_str for i, formal in outputs.items() if formal.type_str in reads.values() or by_attribute}
    if not all(allowed.get(variable, False) for variable in (*reads.values(), *makes.values())):
        return None
    if not makes and (outputs or not reads):
        return None
    return Signature(tuple(reads), tuple(makes), not makes)


def schema_of(graph: OnnxGraph, node: onnx.NodeProto) -> defs.OpSchema | None:
    """Return the schema of a node's operator at the model's opset; None for an operator that ONNX does not define."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = next((o.version for o in graph.model.opset_import if o.domain == domain), None)
    version = graph.opset if version is None and not domain else version
    if version is None or not defs.has(node.op_type, version, domain):
        return None
    return defs.get_schema(node.op_type, version, domain)


def _fp32(graph: OnnxGraph, names: Any, formals: Any) -> dict[int, defs.OpSchema.FormalParameter]:
    """Return the schema's parameters of the FP32 tensors, by index."""
    return {
        i: formals[min(i, len(formals) - 1)]
        for i, name in enumerate(names)
        if name and graph.element_type(name) == TensorProto.FLOAT
    }


# Number of measured samples; a few are enough for the order of magnitude.
SAMPLES = 16
# Largest allowed activation on these samples, as a share of the format's largest value.
_MARGIN = 0.25
# Largest error relative to the tensor's RMS, in units of the format's epsilon; rounding alone is at most 0.3.
_LOSS = 8.0
_LONG_SOFTMAX = 4096
_SQUARES = {"InstanceNormalization", "MeanVarianceNormalization", "LpNormalization", "LRN", "LpPool", "GlobalLpPool"}
_REDUCTIONS = {"ReduceL2", "ReduceSumSquare", "ReduceLogSumExp", "ReduceLogSum", "ReduceProd"}
_SUMS = _REDUCTIONS | {"CumSum", "CumProd", "DFT", "STFT"}
_COORDINATES = {"GridSample", "RoiAlign", "MaxRoiPool", "AffineGrid", "NonMaxSuppression"}
_BY_RULE = _SQUARES | _SUMS | _COORDINATES
_STASHING = {"LayerNormalization", "GroupNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
_ANGLES = {"Sin", "Cos", "Tan"}
_MEANS = {"ReduceMean", "GlobalAveragePool"}
# Index of the input that must not become zero, by operator.
_NOT_ZERO = {"Div": 1, "Reciprocal": 0, "Log": 0}
_INTEGERS = {
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip
_BEFORE_SOFTMAX = MOVEMENT | {"Add", "Where", "Mul", "Div", "Min", "Max", "And", "Not"}
_BETWEEN_MEAN_AND_ROOT = {"Add", "Max", "Clip", "Cast", "Identity"}


def must_stay_fp32(model: onnx.ModelProto, samples: Samples | None, precision: str, report: Report) -> set[str]:
    """Return the names of the nodes that should not be cast.

    Args:
        model: FP32, without Q/DQ, with named nodes (as after `simplify`).
        samples: samples of which the first 16 are run; None to use only rules and weights.
        precision: "fp16" or "bf16".
        report: called after every sample.

    Raises:
        BuildError: a node has no name, or ONNX Runtime cannot run the model.
    """
    numbers = float_format(precision)
    graph = OnnxGraph(copy_model(at_opset(model, numbers.opset)))
    unnamed = next((node for node in graph.nodes if not node.name), None)
    if unnamed is not None:
        raise BuildError(f"the {unnamed.op_type} of output '{unnamed.output[0]}' has no name: simplify the model first")
    keep = {node.name for node in graph.nodes if _by_rule(graph, node)}
    norms = _written_out_norms(graph)
    keep |= {name for norm in norms for name in norm.nodes} | _angle_nodes(graph) | _by_weights(graph, numbers)
    if samples is not None and len(samples):
        keep |= _by_activations(graph, numbers, samples.head(SAMPLES), report)
    return keep | _affine_in_fp32(norms, keep)


# By rule


def _by_rule(graph: OnnxGraph, node: onnx.NodeProto) -> bool:
    if node.op_type in _STASHING:
        schema = schema_of(graph, node)
        stashes = schema is not None and "stash_type" in schema.attributes
        return not stashes or graph.attribute(node, "stash_type", TensorProto.FLOAT) != TensorProto.FLOAT
    if node.op_type in ("Softmax", "LogSoftmax"):
        shape = graph.shape(node.input[0])
        axis = graph.attribute(node, "axis", -1 if graph.opset >= 13 else 1)
        return shape is not None and _long(shape[axis:] if graph.opset < 13 else (shape[axis],))
    return node.op_type in _BY_RULE


def _long(sizes: tuple[int, ...]) -> bool:
    return min(sizes, default=1) > 0 and math.prod(sizes) > _LONG_SOFTMAX


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm written as single operators: producer of its input, its nodes, and the scale and shift after it."""

    source: onnx.NodeProto | None
    nodes: frozenset[str]
    affine: frozenset[str]


def _written_out_norms(graph: OnnxGraph) -> list[_Norm]:
    """Find divisions by the root of a mean of squares, with all of their nodes."""
    norms = []
    for mean in (node for node in graph.nodes if node.op_type in ("ReduceMean", "ReduceSum")):
        square = graph.producer(mean.input[0])
        if square is None or not _squares(graph, square):
            continue
        divided, behind = _divisions_by_root(graph, mean)
        if not divided:
            continue
        nodes = {square.name, mean.name, *behind}
        # The subtraction of the mean before the square.
        source, centred = square.input[0], graph.producer(square.input[0])
        if centred is not None and centred.op_type == "Sub":
            source = centred.input[0]
            means = [graph.producer(name) for name in centred.input]
            nodes |= {centred.name, *(m.name for m in means if m is not None and m.op_type == "ReduceMean")}
        norms.append(_Norm(graph.producer(source), frozenset(nodes), _affine(graph, divided)))
    return norms


def _affine_in_fp32(norms: list[_Norm], keep: set[str]) -> set[str]:
    """Return the scales and shifts that stay FP32 with their norm: those of norms of FP32 tensors.

    ONNX Runtime fuses a norm with the nodes after it into an operator of one type, the type before the cast of the norm's input.
    Its type check fails if the scale has another type.
    """
    return {name for norm in norms if norm.source is None or norm.source.name in keep for name in norm.affine}


def _squares(graph: OnnxGraph, node: onnx.NodeProto) -> bool:
    if node.op_type == "Mul":
        return node.input[0] == node.input[1]
    exponent = graph.constant(node.input[1]) if node.op_type == "Pow" else None
    return exponent is not None and bool(np.all(exponent == 2))


def _divisions_by_root(graph: OnnxGraph, mean: onnx.NodeProto) -> tuple[list[onnx.NodeProto], set[str]]:
    """Return the nodes that divide by the root of a mean of squares, and the names of the nodes up to them."""
    divided: list[onnx.NodeProto] = []
    names: set[str] = set()
    for node in graph.consumers(mean.output[0]):
        if node.op_type in _BETWEEN_MEAN_AND_ROOT:
            below, collected = _divisions_by_root(graph, node)
            divided += below
            names |= {node.name, *collected} if collected else set()
        elif node.op_type == "Sqrt" or (node.op_type == "Pow" and graph.is_constant(node.input[1])):
            readers = [r for r in graph.consumers(node.output[0]) if r.op_type in ("Div", "Reciprocal", "Mul")]
            inverses = [r for r in readers if graph.is_constant(r.input[0]) or r.op_type == "Reciprocal"]
            products = [m for r in inverses for m in graph.consumers(r.output[0]) if m.op_type == "Mul"]
            divided += [r for r in readers if r not in inverses] + products
            names |= {node.name, *(n.name for n in (*readers, *products))}
    return divided, names


def _affine(graph: OnnxGraph, normed: list[onnx.NodeProto]) -> frozenset[str]:
    """Return the names of the scale and the shift after a norm."""
    names: set[str] = set()
    nodes = normed
    for operator in ("Mul", "Add"):
        readers = [reader for node in nodes for reader in graph.consumers(node.output[0])]
        nodes = [r for r in readers if r.op_type == operator and any(graph.is_constant(name) for name in r.input)]
        names |= {node.name for node in nodes}
    return frozenset(names)


def _angle_nodes(graph: OnnxGraph) -> set[str]:
    """Return trigonometric nodes and the nodes of their angles, back to the last layer with weights."""

    def computes(node: onnx.NodeProto) -> bool:
        # The frequencies of rotary positions are a vector, possibly multiplied by MatMul.
        return node.op_type not in HEAVY or not any(_is_matrix(graph.constant(name)) for name in node.input)

    waiting = [node for node in graph.nodes if node.op_type in _ANGLES]
    names = {node.name for node in waiting}
    while waiting:
        for tensor in waiting.pop().input:
            producer = graph.producer(tensor)
            if producer is not None and producer.name not in names and computes(producer):
                names.add(producer.name)
                waiting.append(producer)
    return names


def _is_matrix(values: Array | None) -> bool:
    return values is not None and sum(size > 1 for size in values.shape) > 1


# By measurement


@dataclass(slots=True)
class _Extent:
    """Range and rounding error of a tensor in a format, over all samples."""

    highest: float = 0.0
    lowest: float = 0.0
    energy: float = 0.0
    error_energy: float = 0.0
    vanishing: bool = False
    exact: bool = True
    sum_share: int = 1

    def add(self, values: Array, numbers: FloatFormat, masked: bool) -> None:
        """Add an array, without the large negative values of a masked tensor."""
        values = values[np.isfinite(values)]
        if masked:
            values = values[values > -_MARGIN * numbers.largest]
        if not values.size:
            return
        self.highest = max(self.highest, float(values.max()))
        self.lowest = min(self.lowest, float(values.min()))
        inside = values[np.abs(values) <= numbers.largest]
        rounded = numbers.round(inside)
        self.energy += float(np.square(inside, dtype=np.float64).sum())
        self.error_energy += float(np.square(inside - rounded, dtype=np.float64).sum())
        self.vanishing = self.vanishing or bool(np.any((rounded == 0) & (inside != 0)))
        self.exact = self.exact and inside.size == values.size and bool(np.array_equal(inside, rounded))

    def magnitude(self) -> float:
        return max(self.highest, -self.lowest)

    def loses(self, numbers: FloatFormat) -> bool:
        return self.error_energy > self.energy * (_LOSS * numbers.epsilon) ** 2


def _by_weights(graph: OnnxGraph, numbers: FloatFormat) -> set[str]:
    """Return the nodes with a constant that overflows or loses too much accuracy."""
    names: set[str] = set()
    measured: dict[str, _Extent] = {}
    for node, changes in _castable(graph, numbers):
        for i in changes:
            name = node.input[i]
            values = graph.constant(name) if name not in measured and graph.is_constant(name) else None
            if values is not None:
                measured[name] = _Extent()
                measured[name].add(values, numbers, masked=False)
            if name not in measured:
                continue
            extent = measured[name]
            high, low = extent.highest > numbers.largest, extent.lowest < -numbers.largest
            if low and not high and _only_into_softmax(graph, node.output[0]):
                low = False
            bounds = node.op_type in BOUNDING
            if (not bounds and (high or low)) or extent.loses(numbers) or _divides_by_zero(node, i, extent):
                names.add(node.name)
    return names


def _castable(graph: OnnxGraph, numbers: FloatFormat) -> Iterator[tuple[onnx.NodeProto, tuple[int, ...]]]:
    """Yield the nodes that can be cast, with the indices of the inputs that would change."""
    for node in graph.nodes:
        match = signature(graph, node, numbers.element_type)
        if match is not None:
            yield node, match.inputs


def _divides_by_zero(node: onnx.NodeProto, index: int, extent: _Extent) -> bool:
    return extent.vanishing and _NOT_ZERO.get(node.op_type) == index


def _only_into_softmax(graph: OnnxGraph, tensor: str) -> bool:
    """Return whether every path from a tensor ends in a Softmax."""
    if tensor in graph.outputs:
        return False
    readers = graph.consumers(tensor)
    return bool(readers) and all(
        reader.op_type in ("Softmax", "LogSoftmax")
        or (reader.op_type in _BEFORE_SOFTMAX and all(_only_into_softmax(graph, name) for name in reader.output))
        for reader in readers
    )


def _by_activations(graph: OnnxGraph, numbers: FloatFormat, samples: Samples, report: Report) -> set[str]:
    """Return the nodes that read or produce a tensor which the format cannot represent."""
    castable = list(_castable(graph, numbers))
    names: dict[str, None] = {}
    for node, changes in castable:
        read = [node.input[i] for i in changes]
        outputs = [name for name in node.output if graph.element_type(name) == TensorProto.FLOAT]
        names |= dict.fromkeys(name for name in (*read, *outputs) if name and not graph.is_constant(name))
    extents = _measure(graph, numbers, list(names), samples, report)
    nodes: set[str] = set()
    for name, extent in extents.items():
        producer, readers = graph.producer(name), graph.consumers(name)
        divides = [
            r for r in readers for i, read in enumerate(r.input) if read == name and _divides_by_zero(r, i, extent)
        ]
        mean = producer is not None and producer.op_type in _MEANS
        integers = (
            producer is not None and producer.op_type == "Cast" and graph.element_type(producer.input[0]) in _INTEGERS
        )
        limit = _MARGIN * numbers.largest
        if extent.magnitude() > limit or extent.loses(numbers) or (integers and not extent.exact):
            nodes |= {reader.name for reader in readers}
        elif not divides and not (mean and extent.magnitude() * extent.sum_share > limit):
            continue
        nodes |= {reader.name for reader in divides}
        if producer is not None:
            nodes.add(producer.name)
    return nodes & {node.name for node, _ in castable}


def _measure(
    graph: OnnxGraph, numbers: FloatFormat, names: list[str], samples: Samples, report: Report
) -> dict[str, _Extent]:
    """Return the extents of FP32 tensors over samples, by name."""
    inputs = set(graph.inputs)
    runner = OnnxRunner(graph.model, [name for name in names if name not in inputs], optimize=False)
    masked = {name for name in names if _only_into_softmax(graph, name)}
    extents = {name: _Extent() for name in names}
    for i, rows in enumerate(samples.batches(1)):
        values = {**runner.run(rows), **rows}
        for name, extent in extents.items():
            extent.add(values[name], numbers, name in masked)
            producer = graph.producer(name)
            if producer is not None and producer.op_type in _MEANS and producer.input[0] in values:
                extent.sum_share = max(extent.sum_share, values[producer.input[0]].size // max(values[name].size, 1))
        report((i + 1) / len(samples), "measuring activations")
    return extents
