"""Writes an FP32 model in FP16 or BF16, strongly typed: every tensor has its type in the graph, no runtime has to choose.

What is cast and what is not:

    weights                     are converted; one that is also read by an FP32 node is there twice
    inputs and outputs          stay as they are: the model looks the same from outside
    `keep`                      stays FP32, and so do subgraphs, and operators whose schema does not allow the type
    computed from shapes        (sizes, positions) stays FP32: it takes no time, and it must be exact
    without FP32 outputs        (comparisons, ArgMax, casts to integers) takes what it is given: that changes nothing
    reshapes between FP32 nodes stay FP32: casting there and back gains nothing
    Q and DQ                    see `Quantized`

Casts are inserted between the two, one for all readers of a tensor.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, captured, copy_model
from headrace_engines.precision.limits import (
    BOUNDING,
    HEAVY,
    MOVEMENT,
    TYPE_ATTRIBUTE,
    FloatFormat,
    Signature,
    at_opset,
    float_format,
    must_stay_fp32,
    signature,
)

__all__ = ["Quantized", "cast_model", "must_stay_fp32"]


# What is cast of a model with Q/DQ.
#   "regions": only what no Q and no DQ touches, directly or through other FP32 nodes.
#   "layers":  also layers that were left in floating point among quantised ones, with what follows them. What reads a DQ
#              stays FP32, and so does what follows it up to the next such layer: it is fused with the quantised layer.
#   "scales":  everything, the scales included. TensorRT 10.6 finds no kernel for Conv + Relu then.
Quantized = Literal["regions", "layers", "scales"]


_QDQ = ("QuantizeLinear", "DequantizeLinear")


# The first version of Q and DQ with scales of 16 bits.
_SCALES_OPSET = 19


_CHECK_LIMIT_BYTES = 2**31 - 1


def cast_model(
    model: onnx.ModelProto, precision: str, keep: Collection[str] = (), quantized: Quantized = "layers"
) -> onnx.ModelProto:
    """A model that computes in FP16 or BF16 where it can.

    Constants beyond the format's largest value saturate: at that value where they bound others (Clip, Min, Max), elsewhere at
    half of it, so that adding to a saturated attention mask does not make it infinite. `must_stay_fp32` names the nodes for
    which that would be wrong. BF16 convolutions need opset 22, to which the model is brought where that is possible.

    Args:
        model: FP32, or with Q/DQ; is not changed.
        precision: "fp16" or "bf16".
        keep: names of nodes that stay FP32.
        quantized: what is cast of a model with Q/DQ.

    Raises:
        BuildError: the outcome is no valid ONNX model, or the precision is none of the two.
    """
    numbers = float_format(precision)
    opset = max(numbers.opset, _SCALES_OPSET if quantized == "scales" else 0)
    graph = OnnxGraph(copy_model(at_opset(model, opset)))
    _lift_constants(graph)
    writer = _Writer(graph, numbers, _nodes_to_cast(graph, numbers, frozenset(keep), quantized))
    written = writer.write()
    _check(written, model, precision)
    return written


def _lift_constants(graph: OnnxGraph) -> None:
    """Make FP32 initializers of Constant nodes, and no inputs of initializers, so that there is one kind of constant."""
    defaults = [entry for entry in graph.model.graph.input if graph.is_constant(entry.name)]
    for entry in defaults:
        graph.model.graph.input.remove(entry)
    graph.model.ir_version = max(graph.model.ir_version, 4 if defaults else 0)
    for node in [node for node in graph.nodes if node.op_type == "Constant"]:
        value = graph.attribute(node, "value")
        for name in ("value_float", "value_floats"):
            number = graph.attribute(node, name)
            value = value if number is None else numpy_helper.from_array(np.array(number, np.float32))
        if value is None or value.data_type != TensorProto.FLOAT or node.output[0] in graph.outputs:
            continue
        lifted = graph.model.graph.initializer.add()
        lifted.CopyFrom(value)
        lifted.name = node.output[0]
        graph.remove(node)


# Choosing


@dataclass(frozen=True, slots=True)
class _CastNode:
    """A node to cast and how."""

    node: onnx.NodeProto
    signature: Signature


def _nodes_to_cast(
    graph: OnnxGraph, numbers: FloatFormat, keep: frozenset[str], quantized: Quantized
) -> dict[str, _CastNode]:
    """The nodes to cast, by the name of their first output."""
    graph.sort()
    stay = _computed_from_shapes(graph) | _near_quantized(graph, quantized)
    chosen: dict[str, _CastNode] = {}
    cast_tensors: set[str] = set()
    for node in graph.nodes:
        key = _key(node)
        match = None if not key or key in stay or node.name in keep else signature(graph, node, numbers.element_type)
        if match is None:
            continue
        if match.follows:
            read = [node.input[i] for i in match.inputs if not graph.is_constant(node.input[i])]
            # What quantises weights needs the type of what dequantises them.
            if not cast_tensors.issuperset(read) or not (read or node.op_type == "QuantizeLinear"):
                continue
        chosen[key] = _CastNode(node, match)
        cast_tensors |= {node.output[i] for i in match.outputs}
    return _without_islands(graph, chosen)


def _key(node: onnx.NodeProto) -> str:
    return next((name for name in node.output if name), "")


def _computed_from_shapes(graph: OnnxGraph) -> set[str]:
    """Nodes that depend on the inputs' shapes but not on their values, by key."""
    values, shapes = set(graph.inputs), set[str]()
    keys = set()
    for node in graph.nodes:
        by_value, by_shape = not values.isdisjoint(node.input), not shapes.isdisjoint(node.input)
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            by_value = True  # what a subgraph reads is not analysed
        if by_value and node.op_type not in ("Shape", "Size"):
            values.update(node.output)
        elif by_value or by_shape:
            shapes.update(node.output)
            keys |= {_key(node)} if by_shape else set()
    return keys


def _near_quantized(graph: OnnxGraph, quantized: Quantized) -> set[str]:
    """Nodes of a model with Q/DQ that stay FP32, by key."""
    if quantized == "scales":
        return set()
    stay = {_key(node) for node in graph.nodes if node.op_type in _QDQ}
    if not stay:
        return stay
    if quantized == "regions":
        return stay | _regions(
            graph, {name for node in graph.nodes if node.op_type in _QDQ for name in _floats(graph, node)}
        )
    fused = {node.output[0] for node in graph.nodes if node.op_type == "DequantizeLinear"}
    for node in graph.nodes:
        if node.op_type in _QDQ or fused.isdisjoint(node.input):
            continue
        quantized_itself = any((p := graph.producer(name)) and p.op_type in _QDQ for name in node.input)
        if quantized_itself or node.op_type not in HEAVY:
            stay.add(_key(node))
            fused.update(node.output)
    return stay


def _floats(graph: OnnxGraph, node: onnx.NodeProto) -> set[str]:
    """The FP32 tensors that a node reads or makes, constants left out."""
    return {
        name
        for name in (*node.input, *node.output)
        if graph.element_type(name) == TensorProto.FLOAT and not graph.is_constant(name)
    }


def _regions(graph: OnnxGraph, tensors: set[str]) -> set[str]:
    """Nodes that are linked with FP32 tensors by FP32 tensors, Q and DQ being the borders, by key."""
    reached: set[str] = set()
    waiting = list(tensors)
    while waiting:
        name = waiting.pop()
        producer = graph.producer(name)
        for node in (*graph.consumers(name), *([producer] if producer is not None else [])):
            if node.op_type not in _QDQ and _key(node) not in reached:
                reached.add(_key(node))
                waiting.extend(_floats(graph, node))
    return reached


def _without_islands(graph: OnnxGraph, chosen: dict[str, _CastNode]) -> dict[str, _CastNode]:
    """Leave out nodes that only move values from FP32 to FP32; those that read a table of weights save memory, and stay cast."""
    seen: set[str] = set()
    islands: set[str] = set()
    for start in chosen:
        if start in seen:
            continue
        island, waiting = {start}, [start]
        while waiting:
            near = _neighbours(graph, chosen[waiting.pop()].node) & chosen.keys() - island
            island |= near
            waiting.extend(near)
        seen |= island
        if all(_only_moves(graph, chosen[key].node) for key in island):
            islands |= island
    return {key: one for key, one in chosen.items() if key not in islands}


def _neighbours(graph: OnnxGraph, node: onnx.NodeProto) -> set[str]:
    """Keys of the nodes that a node shares an FP32 tensor with."""
    names = _floats(graph, node)
    makers = (graph.producer(name) for name in names)
    return {_key(n) for n in makers if n is not None} | {_key(n) for name in names for n in graph.consumers(name)}


def _only_moves(graph: OnnxGraph, node: onnx.NodeProto) -> bool:
    return node.op_type in MOVEMENT and not any(
        graph.is_constant(name) and graph.element_type(name) == TensorProto.FLOAT for name in node.input
    )


# Writing


class _Writer:
    """Casts the chosen nodes of a graph."""

    def __init__(self, graph: OnnxGraph, numbers: FloatFormat, chosen: dict[str, _CastNode]) -> None:
        self._graph = graph
        self._numbers = numbers
        self._chosen = chosen
        # Read under a name that cannot be changed: by the model's caller, and by subgraphs.
        self._fixed = set(graph.outputs) | {name for node in graph.nodes for name in captured(node)}
        # Tensors whose maker was cast; FP32 tensors and their 16-bit twins, and the other way round.
        self._made: set[str] = set()
        self._low: dict[str, str] = {}
        self._high: dict[str, str] = {}
        self._constants: dict[tuple[str, float], str] = {}

    def write(self) -> onnx.ModelProto:
        """Change the graph and give its model."""
        planned = [(node, self._chosen.get(_key(node))) for node in self._graph.nodes]
        for node, one in planned:
            for i in one.signature.outputs if one else ():
                self._make(node, i)
        for node, one in planned:
            self._read(node, one.signature.inputs if one else ())
        self._graph.sort()
        self._drop_idle_casts()
        return self._graph.finish()

    def _make(self, node: onnx.NodeProto, index: int) -> None:
        """Let an output become 16-bit."""
        graph, name = self._graph, node.output[index]
        low = name
        if name in self._fixed:
            low = node.output[index] = graph.fresh(f"{name}/{self._numbers.name}")
            back = helper.make_node("Cast", [low], [name], graph.fresh(f"{name}/fp32"), to=TensorProto.FLOAT)
            graph.model.graph.node.append(back)
            self._high[name] = name
        graph.set_type(low, self._numbers.element_type, graph.shape(name))
        self._low[name] = low
        self._made.add(name)
        attribute = next((a for a in node.attribute if a.name == TYPE_ATTRIBUTE.get(node.op_type)), None)
        if attribute is not None and attribute.HasField("t"):
            attribute.t.CopyFrom(self._numbers.tensor(numpy_helper.to_array(attribute.t), self._numbers.largest))
        elif attribute is not None:
            attribute.i = self._numbers.element_type
        elif node.op_type == "ConstantOfShape":
            node.attribute.append(helper.make_attribute("value", self._numbers.tensor(np.zeros(1, np.float32), 0.0)))

    def _read(self, node: onnx.NodeProto, inputs: tuple[int, ...]) -> None:
        """Let a node read 16-bit tensors at these inputs, and what it read so far at the others."""
        for i, name in enumerate(node.input):
            if i in inputs:
                self._graph.rewire(node, i, self._as_low(name, node.op_type))
            elif name in self._made:
                self._graph.rewire(node, i, self._as_high(name))

    def _as_low(self, name: str, operator: str) -> str:
        values = self._graph.constant(name)
        if values is None:
            if name not in self._low:
                self._low[name] = self._cast(name, self._numbers.name, self._numbers.element_type)
            return self._low[name]
        largest = self._numbers.largest
        key = name, largest if operator in BOUNDING else largest / 2
        if key not in self._constants:
            tensor = self._numbers.tensor(values, key[1])
            self._constants[key] = self._graph.add_constant(f"{name}/{self._numbers.name}", tensor)
        return self._constants[key]

    def _as_high(self, name: str) -> str:
        if name not in self._high:
            self._high[name] = self._cast(name, "fp32", TensorProto.FLOAT)
        return self._high[name]

    def _cast(self, name: str, suffix: str, element_type: int) -> str:
        output = self._graph.add_node("Cast", [name], f"{name}/{suffix}", to=element_type)
        self._graph.set_type(output, element_type, self._graph.shape(name))
        return output

    def _drop_idle_casts(self) -> None:
        """Take out casts of the model's own that now cast a tensor to what it is."""
        graph = self._graph
        for node in [node for node in graph.nodes if node.op_type == "Cast"]:
            source, output = node.input[0], node.output[0]
            if graph.element_type(source) != graph.attribute(node, "to") or output in self._fixed:
                continue
            for reader in graph.consumers(output):
                for i, name in enumerate(reader.input):
                    if name == output:
                        graph.rewire(reader, i, source)
            graph.remove(node)


def _check(written: onnx.ModelProto, source: onnx.ModelProto, precision: str) -> None:
    """Hold the types of all tensors against the operators' schemas.

    Raises:
        BuildError: they do not fit although the source's do.
    """
    if written.ByteSize() > _CHECK_LIMIT_BYTES:  # the checker takes no more
        return
    try:
        onnx.checker.check_model(written, full_check=True)
    except Exception as error:  # C++'s errors share no other base
        try:
            onnx.checker.check_model(source, full_check=True)
        except Exception:  # then the checker's result means nothing: it refuses models that run well
            return
        first = str(error).strip().partition("\n")[0]
        cure = "build it in fp32, or keep the nodes around it in FP32"
        raise BuildError(f"the model cannot be written in {precision}: {first}: {cure}") from error
