"""Dynamic INT8 of matrix products: weights are stored in 8 bits, activations are rounded while the model runs.

    FP32    Y = X W
    here    m = largest |x| of each row of X          [..., 1], e.g. for each token
            Q = round(127 X / m) + 128                UINT8
            Y = (Q - 128) V * (s / 127) * m           V: INT8 weights with a scale s for each column

No samples are needed. Every row of X has its own scale, so that a request's outputs do not depend on the other requests of
its batch; ONNX's DynamicQuantizeLinear has one scale for the whole batch. A scale for each token also rounds less: one large
activation does not make the steps of all others larger (ZeroQuant, Yao et al., 2022). Products that read the same tensor
share its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto

from headrace_engines.onnx_graph import OnnxGraph, copy_model

# Smallest width of a weight's sides: rounding the activations of narrower products takes longer than they gain.
_MIN_SIDE = 64
# Share of the weights that products must hold: in other models they take little of the time.
_MIN_SHARE = 0.5
_SIGNED_LARGEST = 127
# Sums of two products of 8 and 7 bits fit 16 bits, which CPUs without VNNI add in.
_NARROW_LARGEST = 63
_ZERO_POINT = 128
_TINY = np.float32(1e-30)
_AXES_INPUT_OPSET = 18


def dynamic_products(model: onnx.ModelProto) -> list[str]:
    """Return the names of the products that `quantize_products` runs in INT8, in order.

    Args:
        model: with unique names of nodes; not changed.
    """
    graph = OnnxGraph(copy_model(model))
    return [node.name for node in graph.nodes if _is_product(graph, node)]


def has_large_products(model: onnx.ModelProto) -> bool:
    """Return whether matrix products with constant weights hold at least half of a model's weights.

    Args:
        model: not changed.
    """
    graph = OnnxGraph(copy_model(model))
    weights = {node.input[1] for node in graph.nodes if _is_product(graph, node)}
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer if tensor.data_type == 1}
    tables = {node.input[0] for node in graph.nodes if node.op_type == "Gather"}
    total = sum(size for name, size in sizes.items() if name not in tables)
    return bool(weights) and sum(sizes.get(name, 0) for name in weights) >= _MIN_SHARE * total


def quantize_products(
    model: onnx.ModelProto, keep: Collection[str] = (), *, reduce_range: bool = False
) -> onnx.ModelProto:
    """Return a model whose matrix products with constant weights run in INT8.

    Args:
        model: FP32, result of `simplify`; not changed.
        keep: names of products that stay FP32.
        reduce_range: use 7 bits for weights, for CPUs without VNNI.
    """
    graph = OnnxGraph(copy_model(model))
    largest = _NARROW_LARGEST if reduce_range else _SIGNED_LARGEST
    rounded: dict[str, tuple[str, str]] = {}
    for node in [node for node in graph.nodes if _is_product(graph, node) and node.name not in keep]:
        source = node.input[0]
        if source not in rounded:
            rounded[source] = _round_rows(graph, source)
        _replace(graph, node, *rounded[source], largest)
    return graph.finish()


def _is_product(graph: OnnxGraph, node: onnx.NodeProto) -> bool:
    """Return whether a node multiplies FP32 rows by a constant matrix."""
    if node.op_type not in ("MatMul", "Gemm") or node.domain not in ("", "ai.onnx"):
        return False
    weight = graph.shape(node.input[1]) if graph.is_constant(node.input[1]) else None
    if weight is None or len(weight) != 2 or min(weight) < _MIN_SIDE or graph.is_constant(node.input[0]):
        return False
    if graph.element_type(node.input[1]) != TensorProto.FLOAT:
        return False
    shape = graph.shape(node.input[0])
    if node.op_type == "MatMul":
        return shape is not None and len(shape) > 1
    plain = graph.attribute(node, "alpha", 1.0) == 1.0 and graph.attribute(node, "beta", 1.0) == 1.0
    return plain and not graph.attribute(node, "transA", 0)


def _round_rows(graph: OnnxGraph, source: str) -> tuple[str, str]:
    """Add the rounding of a tensor; returns the names of the rounded tensor and of the largest value of each row."""
    absolute = graph.add_node("Abs", [source], f"{source}/absolute")
    if graph.opset < _AXES_INPUT_OPSET:
        largest = graph.add_node("ReduceMax", [absolute], f"{source}/largest", axes=[-1], keepdims=1)
    else:
        axes = graph.add_constant(f"{source}/last_axis", np.array([-1], np.int64))
        largest = graph.add_node("ReduceMax", [absolute, axes], f"{source}/largest", keepdims=1)
    # A row of zeros has no largest value to divide by.
    tiny = graph.add_constant(f"{source}/tiny", np.array(_TINY))
    bound = graph.add_node("Max", [largest, tiny], f"{source}/bound")
    relative = graph.add_node("Div", [source, bound], f"{source}/relative")
    step = graph.add_constant(f"{source}/step", np.array(1 / _SIGNED_LARGEST, np.float32))
    zero = graph.add_constant(f"{source}/zero", np.array(_ZERO_POINT, np.uint8))
    return graph.add_node("QuantizeLinear", [relative, step, zero], f"{source}/rounded"), bound


def _replace(graph: OnnxGraph, node: onnx.NodeProto, rounded: str, bound: str, largest: int) -> None:
    """Replace a product of FP32 by one of rounded rows and weights."""
    weight = graph.constant(node.input[1])
    assert weight is not None, "the weight is a constant"
    if node.op_type == "Gemm" and graph.attribute(node, "transB", 0):
        weight = weight.T
    scale = np.maximum(np.abs(weight).max(axis=0), _TINY).astype(np.float32) / np.float32(largest)
    values = np.clip(np.rint(weight / scale), -largest, largest).astype(np.int8)
    name = node.name
    stored = graph.add_constant(f"{name}/int8", values)
    zero = graph.add_constant(f"{name}/zero", np.array(_ZERO_POINT, np.uint8))
    total = graph.add_node("MatMulInteger", [rounded, stored, zero], f"{name}/integer")
    result = graph.add_node("Cast", [total], f"{name}/float", to=TensorProto.FLOAT)
    factor = graph.add_constant(f"{name}/scale", scale / np.float32(_SIGNED_LARGEST))
    result = graph.add_node("Mul", [result, factor], f"{name}/columns")
    result = graph.add_node("Mul", [result, bound], f"{name}/rows")
    if node.op_type == "Gemm" and len(node.input) > 2 and node.input[2]:
        result = graph.add_node("Add", [result, node.input[2]], f"{name}/biased")
    output = node.output[0]
    last = graph.producer(result)
    assert last is not None, "it was added above"
    graph.remove(node)
    # The output keeps its name: it may be an output of the model, or be read by a subgraph.
    graph.rename_output(last, output)
