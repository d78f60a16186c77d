"""Models of texts of different length: ragged ones, as Triton's batch inputs need them, and ones that are padded."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model

INT64, INT32, FP32 = TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT


def ragged_sums() -> onnx.ModelProto:
    """ELEMENTS (all,) INT64 and OFFSETS (requests + 1,) INT32 -> SUM (requests, 1) of each request, and DOUBLED (all,)."""
    node = helper.make_node
    nodes = [
        node("CumSum", ["ELEMENTS", "axis"], ["running"]),
        node("Concat", ["zero", "running"], ["sums"], axis=0),
        node("Cast", ["OFFSETS"], ["offsets"], to=INT64),
        node("Slice", ["offsets", "one", "far"], ["ends"]),
        node("Slice", ["offsets", "zero", "minus_one"], ["starts"]),
        node("Gather", ["sums", "ends"], ["until_end"]),
        node("Gather", ["sums", "starts"], ["until_start"]),
        node("Sub", ["until_end", "until_start"], ["flat"]),
        node("Unsqueeze", ["flat", "one"], ["SUM"]),
        node("Add", ["ELEMENTS", "ELEMENTS"], ["DOUBLED"]),
    ]
    constants = {
        "axis": np.array(0, np.int64),
        "zero": np.array([0], np.int64),
        "one": np.array([1], np.int64),
        "minus_one": np.array([-1], np.int64),
        "far": np.array([1 << 40], np.int64),
    }
    return onnx_model(
        nodes,
        {"ELEMENTS": (INT64, ("all",)), "OFFSETS": (INT32, ("requests_and_one",))},
        {"SUM": (INT64, ("requests", 1)), "DOUBLED": (INT64, ("all",))},
        constants,
    )


RAGGED_CONFIG = """
max_batch_size: 16
input [ { name: "ELEMENTS" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "SUM" data_type: TYPE_INT64 dims: [ 1 ] }, { name: "DOUBLED" data_type: TYPE_INT64 dims: [ -1 ] } ]
batch_input [
  {
    kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO
    target_name: "OFFSETS" data_type: TYPE_INT32 source_input: "ELEMENTS"
  }
]
batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "DOUBLED" source_input: "ELEMENTS" } ]
dynamic_batching { max_queue_delay_microseconds: 100000 }
"""


def ragged_spans() -> onnx.ModelProto:
    """Sums like `ragged_sums`, of operators that TensorRT has for these types, and the size of the longest request.

    ELEMENTS (all,) FP32, OFFSETS (requests + 1,) INT32 and MAX_SHAPE (longest,) FP32 -> SUM (requests, 1), DOUBLED (all,) and
    LONGEST (requests, 1) FP32, which is that of the batch.
    """
    node = helper.make_node
    nodes = [
        node("Shape", ["ELEMENTS"], ["size"]),
        node("Gather", ["size", "zero_index"], ["count"], axis=0),
        node("Range", ["zero_index", "count", "one_index"], ["long_positions"]),
        node("Cast", ["long_positions"], ["positions"], to=FP32),
        node("Cast", ["OFFSETS"], ["offsets"], to=FP32),
        node("Slice", ["offsets", "one", "far"], ["ends"]),
        node("Slice", ["offsets", "zero", "minus_one"], ["starts"]),
        node("Unsqueeze", ["ends", "one"], ["end_column"]),
        node("Unsqueeze", ["starts", "one"], ["start_column"]),
        node("Less", ["positions", "end_column"], ["before_end"]),
        node("Less", ["positions", "start_column"], ["before_start"]),
        node("Cast", ["before_end"], ["until_end"], to=FP32),
        node("Cast", ["before_start"], ["until_start"], to=FP32),
        node("Sub", ["until_end", "until_start"], ["mask"]),
        node("Mul", ["mask", "ELEMENTS"], ["spans"]),
        node("ReduceSum", ["spans", "one"], ["SUM"], keepdims=1),
        node("Add", ["ELEMENTS", "ELEMENTS"], ["DOUBLED"]),
        node("Mul", ["MAX_SHAPE", "nothing"], ["zeros"]),
        node("Add", ["zeros", "unit"], ["ones"]),
        node("ReduceSum", ["ones", "zero"], ["longest"], keepdims=1),
        node("Mul", ["SUM", "nothing"], ["column"]),
        node("Add", ["column", "longest"], ["LONGEST"]),
    ]
    constants = {
        "zero_index": np.array(0, np.int64),
        "one_index": np.array(1, np.int64),
        "zero": np.array([0], np.int64),
        "one": np.array([1], np.int64),
        "minus_one": np.array([-1], np.int64),
        "far": np.array([1 << 30], np.int64),
        "nothing": np.array(0, np.float32),
        "unit": np.array(1, np.float32),
    }
    return onnx_model(
        nodes,
        {"ELEMENTS": (FP32, ("all",)), "OFFSETS": (INT32, ("bounds",)), "MAX_SHAPE": (FP32, ("longest_request",))},
        {"SUM": (FP32, ("requests", 1)), "DOUBLED": (FP32, ("all",)), "LONGEST": (FP32, ("requests", 1))},
        constants,
    )


def token_sums(masked: bool = True) -> onnx.ModelProto:
    """ids and mask (rows, length) INT64 -> doubled (rows, length), and total (rows, 1): the sum of the ids + 1 under the mask.

    Args:
        masked: False adds 1 for padded positions too, as a model does that has no mask.
    """
    node = helper.make_node
    nodes = [
        node("Add", ["ids", "ids"], ["doubled"]),
        node("Add", ["ids", "one"], ["next"]),
        node("Mul", ["next", "mask"], ["seen"]) if masked else node("Add", ["next", "mask"], ["seen"]),
        node("ReduceSum", ["seen", "axes"], ["total"], keepdims=1),
    ]
    text = (INT64, ("rows", "length"))
    return onnx_model(
        nodes,
        {"ids": text, "mask": text},
        {"doubled": text, "total": (INT64, ("rows", 1))},
        {"one": np.array(1, np.int64), "axes": np.array([1], np.int64)},
    )


PADDED_CONFIG = """
max_batch_size: 16
dynamic_batching: {max_queue_delay_microseconds: 100000}
pad: {ids: 0, mask: 0, multiple_of: 16}
max_queue_wait_microseconds: 0
"""
