"""FP8, E4M3 without infinities, as TensorRT runs it on GPUs of Ada, Hopper and later.

The format: Micikevicius et al., "FP8 Formats for Deep Learning" (2022). What TensorRT makes of it: its documentation, "Working
with Quantized Types", and its release notes for convolutions.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from engines.onnx_graph import Array, Graph
from engines.quantization.operators import Weighted

# The largest finite number.
FP8_LARGEST = 448.0
# What runs in FP8 wherever anything does.
PRODUCTS = ("Gemm", "MatMul")
# The first opset with FP8 in QuantizeLinear.
FP8_OPSET = 19
# TensorRT has FP8 convolutions for no larger filters, no fewer channels and no groups; others fall back to slow kernels. Which
# versions have any, the target tells.
_MOST_FILTER_ELEMENTS = 32
_FEWEST_CHANNELS = 16


def fp8_layers(graph: Graph, found: dict[str, Weighted]) -> dict[str, Weighted]:
    """Those that TensorRT has fast FP8 kernels for: products, and convolutions of many channels with small filters."""
    nodes = {node.name: node for node in graph.nodes}
    return {name: one for name, one in found.items() if _fits(graph, nodes[name], one)}


def _fits(graph: Graph, node: onnx.NodeProto, one: Weighted) -> bool:
    if one.operator in PRODUCTS:
        return True
    if one.operator != "Conv" or graph.attribute(node, "group", 1) != 1:
        return False
    channels_out, channels_in, *kernel = graph.shape(node.input[1]) or (0, 0)
    return min(channels_out, channels_in) >= _FEWEST_CHANNELS and math.prod(kernel) <= _MOST_FILTER_ELEMENTS


def fp8_scale(largest: float) -> np.float32:
    """The scale that brings values up to `largest`, in size, into the format; a normal number of FP16, so that it can be cast."""
    if not largest > 0:
        return np.float32(1)
    limits = np.finfo(np.float16)
    # Small values lose nothing by a larger scale: the format's own exponents reach far enough down.
    wanted = min(max(largest / FP8_LARGEST, float(limits.smallest_normal)), float(limits.max))
    scale = np.float16(wanted)
    return np.float32(scale if float(scale) >= wanted else next_fp8_scale(np.float32(scale)))


def next_fp8_scale(scale: np.float32) -> np.float32:
    """The next larger one."""
    return np.float32(np.nextafter(np.float16(scale), np.float16(np.inf)))


def encode_fp8(values: Array, scale: np.float32) -> TensorProto:
    """FP32 values divided by the scale, rounded to the nearest FP8 number, saturated; any shape, no name."""
    bits = fp8_numbers(values, scale).view(np.uint8)
    return helper.make_tensor("fp8", TensorProto.FLOAT8E4M3FN, values.shape, bits.tobytes(), raw=True)


def fp8_numbers(values: Array, scale: np.float32) -> Array:
    """The same as an array of FP8 numbers."""
    found: Array = np.clip(values.astype(np.float32) / scale, -FP8_LARGEST, FP8_LARGEST).astype(ml_dtypes.float8_e4m3fn)
    return found
