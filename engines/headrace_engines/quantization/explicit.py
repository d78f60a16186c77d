"""Models that carry QuantizeLinear and DequantizeLinear (Q/DQ): their precision, and the FP32 model behind them.

A quantising exporter has chosen layers and scales already. Such a model is built as it is, and compared with the same graph
without Q and DQ: that shows what its rounding costs. Weights that are stored in 8 bits are the exporter's: their rounding is
a part of both.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, copy_model, evaluate_constant, replace_items

_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
_FP8 = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)
# Operators that move 8-bit values without computing with them.
_MOVERS = frozenset(
    {
        "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice",
        "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
_RELU6 = 6.0
_RELU6_TOLERANCE = 0.03


def explicit_precision(model: onnx.ModelProto) -> str:
    """Return the precision that the Q/DQ of a model's activations give it: "int8", "fp8", or "" without any.

    A model with 8-bit weights behind DequantizeLinear alone computes in floating point.

    Args:
        model: constants need not be loaded.
    """
    graph = OnnxGraph(copy_model(model))
    kinds = [
        _element_type(graph, node)
        for node in graph.nodes
        if node.op_type == _Q and not graph.is_constant(node.input[0])
    ]
    if not kinds:
        return ""
    return "fp8" if all(kind in _FP8 for kind in kinds) else "int8"


def refused_by_tensorrt(model: onnx.ModelProto) -> str:
    """Return the reason why TensorRT does not take a model's Q/DQ, with the node; "" if it does.

    Args:
        model: with Q/DQ.
    """
    graph = OnnxGraph(copy_model(model))
    for node in graph.nodes:
        if node.op_type not in (_Q, _DQ):
            continue
        tensor = node.output[0] if node.op_type == _Q else node.input[0]
        kind = _element_type(graph, node) if node.op_type == _Q else graph.element_type(tensor)
        if kind == TensorProto.UINT8:
            return f"{node.op_type} node '{node.name}' has unsigned values, TensorRT takes INT8"
        zero = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if zero is not None and kind == TensorProto.INT8 and zero.any():
            return f"{node.op_type} node '{node.name}' has a zero point other than 0, TensorRT takes symmetric scales"
    return ""


def without_qdq(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without Q and DQ of activations, with its weights in FP32.

    DQ of an 8-bit input of the model and Q of an 8-bit output stay. A range that begins at 0 becomes a Relu, which exporters
    leave out before it.

    Args:
        model: with Q/DQ; not changed.

    Raises:
        BuildError: 8-bit values are computed with between a Q and its DQ; the message names the node.
    """
    graph = OnnxGraph(copy_model(model))
    _lift_constants(graph)
    graph.sort()
    renamed: dict[str, str] = {}
    integers: set[str] = set()
    dropped: set[str] = set()
    added: list[onnx.NodeProto] = []
    for node in graph.nodes:
        # 8-bit values that reach an output of the model stay as they are.
        if node.op_type == _Q and not any(name in graph.outputs for name in _moved(graph, node.output[0])):
            bounded = _bounded(graph, node)
            added += bounded
            integers.add(node.output[0])
            renamed[node.output[0]] = bounded[-1].output[0] if bounded else node.input[0]
            dropped.add(node.output[0])
        elif node.op_type == _DQ:
            source = node.input[0]
            if source in integers:
                renamed[node.output[0]] = source
                dropped.add(node.output[0])
            elif graph.is_constant(source):
                values = evaluate_constant(graph.model, node.output[0])[0]
                graph.model.graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
                dropped.add(node.output[0])
        elif any(name in integers for name in node.input):
            if node.op_type not in _MOVERS:
                raise BuildError(
                    f"{node.op_type} node '{node.name or node.output[0]}' computes with 8-bit values between QuantizeLinear and "
                    "DequantizeLinear: export the model with a DequantizeLinear before each operator"
                )
            integers.update(node.output)
    return _written(graph, renamed, dropped, added)


def _bounded(graph: OnnxGraph, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the activation that the range of a QuantizeLinear stands for: none, Relu, or Clip to 6 after it.

    Exporters remove a Relu before a range that begins at 0, and a Clip before one that ends at 6.
    """
    scale = graph.constant(node.input[1])
    zero = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
    if scale is None or zero is None or zero.dtype.kind not in "iu" or zero.dtype.itemsize > 1:
        return []
    limits = np.iinfo(zero.dtype)
    if (zero != limits.min).any():
        return []
    source, name = node.input[0], graph.fresh(f"{node.output[0]}/relu")
    producer = graph.producer(source)
    linear, bounded = source, name
    readers = graph.consumers(source)
    computed = producer is not None and producer.op_type not in (_Q, _DQ) and producer.output[0] == source
    if producer is not None and computed and len(readers) == 1 and source not in graph.outputs:
        # The tensor keeps its name behind the Relu, where engines have it.
        linear, bounded = graph.fresh(f"{source}/linear"), source
        graph.rename_output(producer, linear)
    relu = onnx.helper.make_node("Relu", [linear], [bounded], name=name)
    if np.abs((limits.max - limits.min) * scale - _RELU6).max() > _RELU6_TOLERANCE:
        return [relu]
    six = graph.add_constant(f"{name}/six", np.array(_RELU6, scale.dtype))
    return [relu, onnx.helper.make_node("Min", [bounded, six], [f"{name}6"], name=f"{name}6")]


def _written(
    graph: OnnxGraph, renamed: dict[str, str], dropped: set[str], added: list[onnx.NodeProto]
) -> onnx.ModelProto:
    def original(name: str) -> str:
        while name in renamed:
            name = renamed[name]
        return name

    outputs = set(graph.outputs)
    nodes = []
    for node in (*graph.nodes, *added):
        if node.output[0] in dropped:
            # An output of the model keeps its name.
            ends = outputs.intersection(node.output) & renamed.keys()
            nodes += [onnx.helper.make_node("Identity", [original(name)], [name], name=node.name) for name in ends]
            continue
        for index, name in enumerate(node.input):
            node.input[index] = original(name)
        nodes.append(node)
    model = graph.model
    replace_items(model.graph.node, nodes)
    # Types of tensors that were 8-bit integers.
    del model.graph.value_info[:]
    return OnnxGraph(model).finish()


def _moved(graph: OnnxGraph, tensor: str) -> Iterator[str]:
    yield tensor
    for node in graph.consumers(tensor):
        if node.op_type in _MOVERS:
            for name in node.output:
                yield from _moved(graph, name)


def _lift_constants(graph: OnnxGraph) -> None:
    """Replace Constant nodes by initializers."""
    constants = [
        node for node in graph.nodes if node.op_type == "Constant" and graph.attribute(node, "value") is not None
    ]
    for node in constants:
        tensor = graph.attribute(node, "value")
        tensor.name = node.output[0]
        graph.model.graph.initializer.append(tensor)
        graph.remove(node)


def _element_type(graph: OnnxGraph, node: onnx.NodeProto) -> int:
    """Return the element type that a QuantizeLinear writes."""
    if len(node.input) > 2 and node.input[2]:
        zero = graph.element_type(node.input[2])
        if zero:
            return zero
        producer = graph.producer(node.input[2])
        value = graph.attribute(producer, "value") if producer is not None else None
        if value is not None:
            return int(value.data_type)
    return int(graph.attribute(node, "output_dtype", 0)) or TensorProto.UINT8
