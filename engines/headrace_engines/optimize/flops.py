"""Multiplications and parameters of an ONNX model."""

from __future__ import annotations

import numpy as np
import onnx

from headrace_engines.onnx_graph import OnnxGraph, copy_model


def model_macs(model: onnx.ModelProto) -> int | None:
    """Return the multiplications of one row in Conv, Gemm and MatMul; None if a shape is unknown.

    Args:
        model: not changed; free dimensions count as 1.
    """
    graph = OnnxGraph(copy_model(model))
    total = 0
    for node in graph.nodes:
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        output, operand = graph.shape(node.output[0]), graph.shape(node.input[1])
        entering = graph.shape(node.input[0])
        if output is None or operand is None or entering is None:
            return None
        if node.op_type == "Conv":
            reduced = int(np.prod(operand[1:]))
        elif node.op_type == "Gemm":
            reduced = operand[1 if graph.attribute(node, "transB", 0) else 0]
        else:
            reduced = entering[-1]
        # The first dimension is the batch: one row.
        total += int(np.prod([max(size, 1) for size in output[1:]])) * max(reduced, 1)
    return total


def model_parameters(model: onnx.ModelProto) -> int:
    """Return the number of floating-point weights."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
    return sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer if tensor.data_type in floats)
