"""ONNX models built node by node; one computes for a requested time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from loadtest.protocol import Array

Dim = int | str | None
_OPSET = 21
_IR_VERSION = 10


def onnx_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[Dim]]],
    outputs: Mapping[str, tuple[int, Sequence[Dim]]],
    constants: Mapping[str, Array] | None = None,
) -> onnx.ModelProto:
    """A model of one graph, checked.

    Args:
        nodes: in the order of computing.
        inputs: datatype (of `TensorProto`) and shape by name.
        outputs: likewise.
        constants: weights by name.
    """
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    onnx.checker.check_model(model)
    return model


def busy(width: int = 128) -> onnx.ModelProto:
    """STEPS (1,) INT64 -> Y (1,) FP32, the same number: computes for as many steps as requested, some 30 us each on one core.

    No batch dimension. Each step multiplies a matrix, the identity matrix, by the identity matrix.
    """
    fp32 = TensorProto.FLOAT
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["keep_on"], ["keep_on_out"]),
            helper.make_node("MatMul", ["carried", "eye"], ["carried_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, ()),
            helper.make_tensor_value_info("keep_on", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("carried", fp32, (width, width)),
        ],
        [
            helper.make_tensor_value_info("keep_on_out", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("carried_out", fp32, (width, width)),
        ],
    )
    constants: dict[str, Array] = {
        "eye": np.eye(width, dtype=np.float32),
        "true": np.array(True),
        "scalar": np.array([], np.int64),
        "axes": np.array([0, 1], np.int64),
        "flat": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("Reshape", ["STEPS", "scalar"], ["trips"]),
        helper.make_node("Loop", ["trips", "true", "eye"], ["last"], body=body),
        helper.make_node("ReduceMax", ["last", "axes"], ["highest"], keepdims=0),
        helper.make_node("Reshape", ["highest", "flat"], ["one"]),
        helper.make_node("Cast", ["STEPS"], ["steps"], to=fp32),
        helper.make_node("Mul", ["one", "steps"], ["Y"]),
    ]
    return onnx_model(nodes, {"STEPS": (TensorProto.INT64, (1,))}, {"Y": (fp32, (1,))}, constants)
