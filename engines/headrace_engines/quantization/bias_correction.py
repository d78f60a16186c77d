"""Bias correction: restores the mean of each channel that rounding the weights has shifted.

A rounded weight differs from its own by a fixed error. Where what it multiplies has a mean, as after a ReLU, the error shifts the
mean of the layer's outputs, and the shifts add up from layer to layer; depthwise convolutions, whose sums are short, suffer
most. The expected shift is the error times the mean of the inputs, and is taken off the bias (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", 2019, section 4.2; the means are measured here). It costs one pass
over some samples when the model is built, and nothing when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model
from headrace_engines.progress import Report
from headrace_engines.quantization.qdq import fp8_numbers
from headrace_engines.quantization.samples import Samples

Doubles = npt.NDArray[np.float64]

SAMPLES = 48
# Of one run: the inputs of all layers are there until they are averaged.
_ROWS = 4
# Operators whose second dimension is the channels, with the place of their bias.
_BIAS = {"Conv": 2, "Gemm": 2}


def correct_biases(
    model: onnx.ModelProto, quantized: onnx.ModelProto, nodes: Sequence[str], samples: Samples, report: Report
) -> onnx.ModelProto:
    """The FP32 model with biases that make up for the rounding of its weights; it is to be quantised again.

    Args:
        model: FP32, simplified; is not changed.
        quantized: its quantised form, whose weights are compared.
        nodes: names of the layers that are quantised.
        samples: to measure means on; the first `SAMPLES` are used.
        report: called with the progress.
    """
    graph, rounded = OnnxGraph(copy_model(model)), OnnxGraph(copy_model(quantized))
    counterparts = {node.name: node for node in rounded.nodes}
    names = set(nodes) & set(counterparts)
    layers = [node for node in graph.nodes if node.name in names and node.op_type in _BIAS]
    report(0.0, "correcting biases")
    means = _means(model, graph, sorted({node.input[0] for node in layers}), samples.head(SAMPLES), report)
    for node in layers:
        weight, mean = graph.constant(node.input[1]), means.get(node.input[0])
        stored = _stored_weight(rounded, counterparts[node.name].input[1])
        if weight is None or stored is None or mean is None or stored.shape != weight.shape:
            continue
        shift = _shift(graph, node, stored - weight, mean)
        if shift is not None and np.isfinite(shift).all():
            _subtract_shift(graph, node, shift)
    report(1.0, "corrected biases")
    return graph.finish()


def _means(
    model: onnx.ModelProto, graph: OnnxGraph, tensors: list[str], samples: Samples, report: Report
) -> dict[str, Doubles]:
    """Return the mean of each channel, by tensor, for tensors that have channels."""
    runner = OnnxRunner(model, [name for name in tensors if graph.producer(name) is not None])
    sums: dict[str, Doubles] = {}
    count = 0
    for batch in samples.batches(_ROWS):
        values: dict[str, npt.NDArray[Any]] = {**runner.run(batch), **batch}
        # The last batch may have fewer rows, and counts for less.
        rows = len(next(iter(batch.values()))) if samples.batched else 1
        count += rows
        report(count / len(samples), "correcting biases")
        for name in tensors:
            array = values[name]
            if array.ndim > 1:
                axes = tuple(axis for axis in range(array.ndim) if axis != 1)
                mean = array.mean(axis=axes, dtype=np.float64)
                sums[name] = sums.get(name, np.zeros(array.shape[1])) + rows * mean
    return {name: total / count for name, total in sums.items()}


def _stored_weight(graph: OnnxGraph, tensor: str) -> Doubles | None:
    """Return the weights of a layer: a constant behind a DequantizeLinear, in 8 bits or, before it is quantised, in FP32."""
    node = graph.producer(tensor)
    if node is None or node.op_type != "DequantizeLinear":
        return None
    quantizing = graph.producer(node.input[0])
    values = graph.constant(node.input[0] if quantizing is None else quantizing.input[0])
    scale = graph.constant(node.input[1])
    if values is None or scale is None:
        return None
    if quantizing is not None:
        values = fp8_numbers(values, np.float32(scale))
    numbers, factor = values.astype(np.float64), scale.astype(np.float64)
    if factor.ndim:
        shape = [1] * numbers.ndim
        shape[graph.attribute(node, "axis", 1)] = -1
        factor = factor.reshape(shape)
    weight: Doubles = numbers * factor
    return weight


def _shift(graph: OnnxGraph, node: onnx.NodeProto, error: Doubles, mean: Doubles) -> Doubles | None:
    """Return the shift of each output channel's mean by an error of the weights; None if the sizes do not fit."""
    if node.op_type == "Gemm":
        error = error if graph.attribute(node, "transB", 0) else error.T
        matrix: Doubles | None = (
            error @ mean if error.shape[1:] == mean.shape and _is_plain_product(graph, node) else None
        )
        return matrix
    groups = graph.attribute(node, "group", 1)
    outputs, inputs = error.shape[:2]
    if mean.size != groups * inputs:
        return None
    summed = error.sum(axis=tuple(range(2, error.ndim))).reshape(groups, outputs // groups, inputs)
    channels: Doubles = np.einsum("goi,gi->go", summed, mean.reshape(groups, inputs)).reshape(-1)
    return channels


def _is_plain_product(graph: OnnxGraph, node: onnx.NodeProto) -> bool:
    """A Gemm that is x times W plus a bias."""
    attributes = [
        graph.attribute(node, name, default) for name, default in (("alpha", 1.0), ("beta", 1.0), ("transA", 0))
    ]
    return attributes == [1.0, 1.0, 0]


def _subtract_shift(graph: OnnxGraph, node: onnx.NodeProto, shift: Doubles) -> None:
    """Give the node a bias of its own, less the shift; a bias that is computed, or one for each row, is left alone."""
    index = _BIAS[node.op_type]
    name = node.input[index] if len(node.input) > index else ""
    bias = graph.constant(name) if name else np.zeros(shift.shape, np.float32)
    if bias is None or bias.shape != shift.shape:
        return
    corrected = graph.add_constant(f"{node.name}.bias", (bias - shift).astype(np.float32))
    if len(node.input) > index:
        graph.rewire(node, index, corrected)
    else:
        node.input.append(corrected)
