"""The two 16-bit formats, and what the operators' schemas allow of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, defs

from engines.errors import BuildError
from engines.onnx_graph import Graph
from engines.simplify import raise_opset

Array = npt.NDArray[Any]

# What multiplies and adds the most: where FP16 and BF16 pay. The rest runs at the speed of memory.
HEAVY = frozenset(
    {"Conv", "ConvTranspose", "DeformConv", "Gemm", "MatMul", "Einsum", "Attention", "LSTM", "GRU", "RNN"}
)
# What only brings values to another place: exact in any format.
MOVEMENT = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Concat", "Split", "Slice", "Gather"}
    | {"Expand", "Tile", "DepthToSpace", "SpaceToDepth", "Shape", "GatherND", "GatherElements", "Dropout", "Cast"}
)
# What a constant only bounds.
BOUNDING = frozenset({"Clip", "Min", "Max"})
# Operators whose output type an attribute tells, which is then rewritten.
TYPE_ATTRIBUTE = {"Cast": "to", "ConstantOfShape": "value"}
# Inputs that tell an operator what to do rather than being computed with: they stay as they are.
_PARAMETERS = {"Resize": "roi", "Dropout": "ratio", "OneHot": "depth"}


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format of 16 bits.

    Attributes:
        name: "fp16" or "bf16".
        element_type: `TensorProto.DataType`.
        dtype: NumPy's.
        largest: finite value.
        epsilon: between 1 and the next value.
        opset: the first in which convolutions and pooling may have it.
    """

    name: str
    element_type: int
    dtype: Any
    largest: float
    epsilon: float
    opset: int

    def round(self, values: Array) -> Array:
        """FP32 values as the format has them, in FP32; those beyond `largest` become infinite."""
        with np.errstate(over="ignore"):
            return values.astype(self.dtype).astype(np.float32)

    def tensor(self, values: Array, bound: float) -> TensorProto:
        """A constant; finite values that the format does not have become `bound` with their sign."""
        beyond = np.isfinite(values) & (np.abs(values) > self.largest)
        values = np.where(beyond, np.copysign(np.float32(bound), values), values)
        raw = np.ascontiguousarray(values.astype(self.dtype)).tobytes()
        return TensorProto(data_type=self.element_type, dims=values.shape, raw_data=raw)


FORMATS = {
    "fp16": Format("fp16", TensorProto.FLOAT16, np.dtype(np.float16), 65504.0, 2.0**-10, 1),
    "bf16": Format("bf16", TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16), (2 - 2**-7) * 2.0**127, 2.0**-7, 22),
}


def format_of(precision: str) -> Format:
    """The format of a precision.

    Raises:
        BuildError: it is none of 16 bits.
    """
    if precision not in FORMATS:
        raise BuildError(f"a model cannot be cast to '{precision}': say {' or '.join(FORMATS)}")
    return FORMATS[precision]


def at_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """The model at this opset or a later one, as it is where it cannot be brought there; the given one is not changed."""
    try:
        raised = raise_opset(model, version)
    except BuildError:
        return model
    same = {node.name for node in raised.graph.node} >= {node.name for node in model.graph.node}
    return raised if same else model


@dataclass(frozen=True, slots=True)
class Signature:
    """What of a node changes when it is cast.

    Attributes:
        inputs: indexes of the FP32 inputs that become 16-bit.
        outputs: indexes of the FP32 outputs that become 16-bit.
        follows: it has no FP32 output (comparisons, ArgMax, Shape): it takes whatever format its input has.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    follows: bool


def signature(graph: Graph, node: onnx.NodeProto, element_type: int) -> Signature | None:
    """How a node would be cast, by the type constraints of its operator's schema; None where it must stay as it is.

    That is: an operator without a schema (another vendor's), one with subgraphs, one that does not allow the type at the model's
    opset, one that reads what nobody knows the type of, and one without FP32 tensors.

    Args:
        graph: of the model.
        node: of the graph.
        element_type: `TensorProto.DataType` to cast to.
    """
    schema = schema_of(graph, node)
    if schema is None or any(a.HasField("g") or a.graphs for a in node.attribute):
        return None
    if any(name and not graph.element_type(name) for name in node.input):
        return None
    wanted = _type_text(element_type)
    allowed = {c.type_param_str: wanted in c.allowed_type_strs for c in schema.type_constraints}
    inputs = _fp32(graph, node.input, schema.inputs)
    outputs = _fp32(graph, node.output, schema.outputs)
    told = _PARAMETERS.get(node.op_type, "")
    reads = {i: formal.type_str for i, formal in inputs.items() if formal.name != told and formal.type_str in allowed}
    # A type that no input shares is told by an attribute: one that we can rewrite, or one like LayerNormalization's stash_type.
    by_attribute = node.op_type in TYPE_ATTRIBUTE
    makes = {i: formal.type_str for i, formal in outputs.items() if formal.type_str in reads.values() or by_attribute}
    if not all(allowed.get(variable, False) for variable in (*reads.values(), *makes.values())):
        return None
    if not makes and (outputs or not reads):
        return None
    return Signature(tuple(reads), tuple(makes), not makes)


def schema_of(graph: Graph, node: onnx.NodeProto) -> defs.OpSchema | None:
    """The schema of a node's operator at the model's opset, None for an operator that ONNX does not know."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = next((o.version for o in graph.model.opset_import if o.domain == domain), None)
    version = graph.opset if version is None and not domain else version
    if version is None or not defs.has(node.op_type, version, domain):
        return None
    return defs.get_schema(node.op_type, version, domain)


def _fp32(graph: Graph, names: Any, formals: Any) -> dict[int, defs.OpSchema.FormalParameter]:
    """By index, what the schema says of the tensors that are FP32."""
    return {
        i: formals[min(i, len(formals) - 1)]
        for i, name in enumerate(names)
        if name and graph.element_type(name) == TensorProto.FLOAT
    }


def _type_text(element_type: int) -> str:
    return f"tensor({TensorProto.DataType.Name(element_type).lower()})"


def upstream(graph: Graph, node: onnx.NodeProto, through: Callable[[onnx.NodeProto], bool]) -> list[onnx.NodeProto]:
    """The nodes that a node's inputs come from, as far back as `through` holds; without the node itself."""
    found: dict[int, onnx.NodeProto] = {}
    waiting = [node]
    while waiting:
        for name in waiting.pop().input:
            producer = graph.producer(name)
            if producer is not None and id(producer) not in found and through(producer):
                found[id(producer)] = producer
                waiting.append(producer)
    return list(found.values())
