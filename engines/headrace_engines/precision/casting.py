"""Writes an FP32 model in a lower floating-point precision, with casts at the borders.

FP16 and BF16 models are strongly typed: every tensor has its type in the graph.

    weights                     are converted; a weight with an FP32 reader is stored in both types
    inputs and outputs          are not changed
    `keep`                      stays FP32, as do subgraphs and operators whose schema does not allow the type
    computed from shapes        (sizes, positions) stays FP32: it takes no time and must be exact
    without FP32 outputs        (comparisons, ArgMax, casts to integers) has the type of its input: the result is the same
    reshapes between FP32 nodes stay FP32: two casts gain nothing
    Q and DQ                    see `Quantized`

A tensor between FP32 and 16 bits has one cast for all of its readers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, captured, copy_model
from headrace_engines.precision import limits

# Nodes to cast in a model with Q/DQ.
#   "layers":  layers in floating point, also among quantised ones, with the nodes after them. Readers of a DQ stay FP32, with the
#              nodes after them up to the next such layer: they are fused with the quantised layer.
#   "scales":  all nodes, with FP16 scales. TensorRT 10.6 finds no kernel for Conv + Relu then.
Quantized = Literal["layers", "scales"]
_QDQ = ("QuantizeLinear", "DequantizeLinear")
# First opset of Q and DQ with scales of 16 bits.
_SCALES_OPSET = 19
_CHECK_LIMIT_BYTES = 2**31 - 1


def cast_model(
    model: onnx.ModelProto, precision: str, keep: Collection[str] = (), quantized: Quantized = "layers"
) -> onnx.ModelProto:
    """Return a model that computes in FP16 or BF16.

    Constants beyond the format's largest value saturate: at that value if they are bounds (Clip, Min, Max), else at half of it,
    so that a sum with a saturated attention mask stays finite. `must_stay_fp32` returns the nodes for which saturation would be
    wrong. BF16 convolutions need opset 22; the model is converted to it if possible.

    Args:
        model: FP32, or with Q/DQ; not changed.
        precision: "fp16" or "bf16".
        keep: names of nodes that stay FP32.
        quantized: nodes to cast in a model with Q/DQ.

    Raises:
        BuildError: the result is not a valid ONNX model, or the precision is neither of the two.
    """
    numbers = limits.float_format(precision)
    opset = max(numbers.opset, _SCALES_OPSET if quantized == "scales" else 0)
    graph = OnnxGraph(copy_model(limits.at_opset(model, opset)))
    _lift_constants(graph)
    writer = _Writer(graph, numbers, _nodes_to_cast(graph, numbers, frozenset(keep), quantized))
    written = writer.write()
    _check(written, model, precision)
    return written


def _lift_constants(graph: OnnxGraph) -> None:
    """Replace FP32 Constant nodes by initializers, and remove initializers from the inputs."""
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


def _nodes_to_cast(
    graph: OnnxGraph, numbers: limits.FloatFormat, keep: frozenset[str], quantized: Quantized
) -> dict[str, limits.Signature]:
    """Return the changes of the nodes to cast, by the name of their first output."""
    graph.sort()
    stay = _computed_from_shapes(graph) | _near_quantized(graph, quantized)
    chosen: dict[str, limits.Signature] = {}
    cast_tensors: set[str] = set()
    for node in graph.nodes:
        key = _key(node)
        match = (
            None if not key or key in stay or node.name in keep else limits.signature(graph, node, numbers.element_type)
        )
        if match is None:
            continue
        if match.follows:
            read = [node.input[i] for i in match.inputs if not graph.is_constant(node.input[i])]
            # The QuantizeLinear of weights needs the type of their DequantizeLinear.
            if not cast_tensors.issuperset(read) or not (read or node.op_type == "QuantizeLinear"):
                continue
        chosen[key] = match
        cast_tensors |= {node.output[i] for i in match.outputs}
    return _without_islands(graph, chosen)


def _key(node: onnx.NodeProto) -> str:
    return next((name for name in node.output if name), "")


def _computed_from_shapes(graph: OnnxGraph) -> set[str]:
    """Return the keys of nodes that depend on shapes of the inputs but not on their values."""
    values, shapes = set(graph.inputs), set[str]()
    keys = set()
    for node in graph.nodes:
        by_value, by_shape = not values.isdisjoint(node.input), not shapes.isdisjoint(node.input)
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            by_value = True  # reads of a subgraph are not analysed
        if by_value and node.op_type not in ("Shape", "Size"):
            values.update(node.output)
        elif by_value or by_shape:
            shapes.update(node.output)
            keys |= {_key(node)} if by_shape else set()
    return keys


def _near_quantized(graph: OnnxGraph, quantized: Quantized) -> set[str]:
    """Return the keys of nodes that stay FP32 in a model with Q/DQ."""
    if quantized == "scales":
        return set()
    stay = {_key(node) for node in graph.nodes if node.op_type in _QDQ}
    if not stay:
        return stay
    fused = {node.output[0] for node in graph.nodes if node.op_type == "DequantizeLinear"}
    for node in graph.nodes:
        if node.op_type in _QDQ or fused.isdisjoint(node.input):
            continue
        quantized_itself = any((p := graph.producer(name)) and p.op_type in _QDQ for name in node.input)
        if quantized_itself or node.op_type not in limits.HEAVY:
            stay.add(_key(node))
            fused.update(node.output)
    return stay


def _floats(graph: OnnxGraph, node: onnx.NodeProto) -> set[str]:
    """Return the FP32 tensors that a node reads or writes, without constants."""
    return {
        name
        for name in (*node.input, *node.output)
        if graph.element_type(name) == TensorProto.FLOAT and not graph.is_constant(name)
    }


def _without_islands(graph: OnnxGraph, chosen: dict[str, limits.Signature]) -> dict[str, limits.Signature]:
    """Remove nodes that only move values between FP32 nodes, except readers of a table of weights: these save memory."""
    nodes = {_key(node): node for node in graph.nodes}
    visited: set[str] = set()
    islands: set[str] = set()
    for start in chosen:
        if start in visited:
            continue
        island, waiting = {start}, [start]
        while waiting:
            near = _neighbours(graph, nodes[waiting.pop()]) & chosen.keys() - island
            island |= near
            waiting.extend(near)
        visited |= island
        if all(_only_moves(graph, nodes[key]) for key in island):
            islands |= island
    return {key: match for key, match in chosen.items() if key not in islands}


def _neighbours(graph: OnnxGraph, node: onnx.NodeProto) -> set[str]:
    """Return the keys of the nodes that share an FP32 tensor with a node."""
    names = _floats(graph, node)
    producers = (graph.producer(name) for name in names)
    return {_key(n) for n in producers if n is not None} | {_key(n) for name in names for n in graph.consumers(name)}


def _only_moves(graph: OnnxGraph, node: onnx.NodeProto) -> bool:
    return node.op_type in limits.MOVEMENT and not any(
        graph.is_constant(name) and graph.element_type(name) == TensorProto.FLOAT for name in node.input
    )


class _Writer:
    """Casts the chosen nodes of a graph."""

    def __init__(self, graph: OnnxGraph, numbers: limits.FloatFormat, chosen: dict[str, limits.Signature]) -> None:
        self._graph = graph
        self._numbers = numbers
        self._chosen = chosen
        # Tensors whose name cannot change: outputs of the model and reads of subgraphs.
        self._fixed = set(graph.outputs) | {name for node in graph.nodes for name in captured(node)}
        # Outputs of cast nodes; 16-bit copies of FP32 tensors by name, and FP32 copies of 16-bit tensors by name.
        self._cast_outputs: set[str] = set()
        self._low: dict[str, str] = {}
        self._high: dict[str, str] = {}
        self._constants: dict[tuple[str, float], str] = {}

    def write(self) -> onnx.ModelProto:
        """Change the graph and return its model."""
        planned = [(node, self._chosen.get(_key(node))) for node in self._graph.nodes]
        for node, cast in planned:
            for i in cast.outputs if cast else ():
                self._make(node, i)
        for node, cast in planned:
            self._read(node, cast.inputs if cast else ())
        self._graph.sort()
        self._drop_idle_casts()
        return self._graph.finish()

    def _make(self, node: onnx.NodeProto, index: int) -> None:
        """Change the type of an output to 16 bits."""
        graph, name = self._graph, node.output[index]
        low = name
        if name in self._fixed:
            low = node.output[index] = graph.fresh(f"{name}/{self._numbers.name}")
            back = helper.make_node("Cast", [low], [name], graph.fresh(f"{name}/fp32"), to=TensorProto.FLOAT)
            graph.model.graph.node.append(back)
            self._high[name] = name
        graph.set_type(low, self._numbers.element_type, graph.shape(name))
        self._low[name] = low
        self._cast_outputs.add(name)
        attribute = next((a for a in node.attribute if a.name == limits.TYPE_ATTRIBUTE.get(node.op_type)), None)
        if attribute is not None and attribute.HasField("t"):
            attribute.t.CopyFrom(self._numbers.tensor(numpy_helper.to_array(attribute.t), self._numbers.largest))
        elif attribute is not None:
            attribute.i = self._numbers.element_type
        elif node.op_type == "ConstantOfShape":
            node.attribute.append(helper.make_attribute("value", self._numbers.tensor(np.zeros(1, np.float32), 0.0)))

    def _read(self, node: onnx.NodeProto, inputs: tuple[int, ...]) -> None:
        """Connect these inputs of a node to 16-bit tensors, and the others to FP32 tensors."""
        for i, name in enumerate(node.input):
            if i in inputs:
                self._graph.rewire(node, i, self._as_low(name, node.op_type))
            elif name in self._cast_outputs:
                self._graph.rewire(node, i, self._as_high(name))

    def _as_low(self, name: str, operator: str) -> str:
        values = self._graph.constant(name)
        if values is None:
            if name not in self._low:
                self._low[name] = self._cast(name, self._numbers.name, self._numbers.element_type)
            return self._low[name]
        largest = self._numbers.largest
        key = name, largest if operator in limits.BOUNDING else largest / 2
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
        """Remove casts of the source model that now have equal types on both sides."""
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
    """Check the types of all tensors against the schemas of the operators.

    Raises:
        BuildError: the check fails, and does not fail for the source model.
    """
    if written.ByteSize() > _CHECK_LIMIT_BYTES:  # limit of the checker
        return
    try:
        onnx.checker.check_model(written, full_check=True)
    except Exception as error:  # C++'s errors share no other base
        try:
            onnx.checker.check_model(source, full_check=True)
        except Exception:  # the checker rejects the source model too, which runs
            return
        first = str(error).strip().partition("\n")[0]
        cure = "build it in fp32, or keep the nodes around it in FP32"
        raise BuildError(f"the model cannot be written in {precision}: {first}: {cure}") from error
