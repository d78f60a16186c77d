"""Writes a model in 8 bits: Q/DQ pairs at the places of `placement`, with scales from ranges, and corrected biases.

QuantizeLinear and DequantizeLinear define the arithmetic; the target fuses the pairs into integer kernels. The arithmetic is that
of Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference" (2018).

FP8 is E4M3 without infinities, as TensorRT runs it on GPUs of Ada, Hopper and later. The format: Micikevicius et al.,
"FP8 Formats for Deep Learning" (2022). TensorRT's use of it: its documentation, "Working with Quantized Types", and its release
notes for convolutions.

Bias correction restores the mean of each channel, which the rounding of the weights shifts. A rounded weight has a fixed error.
If the inputs have a mean, as after a ReLU, the error shifts the mean of the layer's outputs. The shifts add up from layer to
layer; depthwise convolutions with their short sums are affected most. The expected shift is the error times the mean of the
inputs; it is subtracted from the bias (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
2019, section 4.2; the means are measured here). It costs one pass over some samples in the build, and nothing at run time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, OnnxGraph, OnnxRunner, captured, copy_model
from headrace_engines.progress import Report
from headrace_engines.quantization.placement import QdqPlacement, WeightedLayer, place_pairs, weighted_layers
from headrace_engines.quantization.samples import Samples
from headrace_engines.simplify import raise_opset

# Largest finite FP8 number.
FP8_LARGEST = 448.0
# First opset with FP8 in QuantizeLinear.
FP8_OPSET = 19


def fp8_scale(largest: float) -> np.float32:
    """Return the scale for absolute values up to `largest`; a normal FP16 number, so that it can be cast."""
    if not largest > 0:
        return np.float32(1)
    limits = np.finfo(np.float16)
    # A larger scale loses nothing for small values, since the exponents of the format reach far enough down.
    exact = min(max(largest / FP8_LARGEST, float(limits.smallest_normal)), float(limits.max))
    scale = np.float16(exact)
    return np.float32(scale if float(scale) >= exact else next_fp8_scale(np.float32(scale)))


def next_fp8_scale(scale: np.float32) -> np.float32:
    """Return the next larger scale in FP16."""
    return np.float32(np.nextafter(np.float16(scale), np.float16(np.inf)))


def encode_fp8(values: Array, scale: np.float32) -> TensorProto:
    """Return FP32 values of any shape, divided by the scale, rounded and saturated, as an FP8 tensor without a name."""
    bits = fp8_numbers(values, scale).view(np.uint8)
    return helper.make_tensor("fp8", TensorProto.FLOAT8E4M3FN, values.shape, bits.tobytes(), raw=True)


def fp8_numbers(values: Array, scale: np.float32) -> Array:
    """Return FP32 values divided by the scale as an array of FP8 numbers, rounded and saturated."""
    numbers: Array = np.clip(values.astype(np.float32) / scale, -FP8_LARGEST, FP8_LARGEST).astype(
        ml_dtypes.float8_e4m3fn
    )
    return numbers


Floats = npt.NDArray[np.float32]
_INT32_LARGEST = 2**31 - 1
# Ratio between scales that must differ: too small to change values.
_SCALE_RATIO = np.float32(1 + 2**-12)


def quantizable(model: onnx.ModelProto, target: str = "", precision: str = "int8") -> list[str]:
    """Return the names of the convolutions and products that `quantize` runs in 8 bits, in order.

    Args:
        model: result of `simplify`; not changed.
        target: "tensorrt" or "onnxruntime"; "" for nodes that at least one of them quantises.
        precision: "int8" or "fp8"; used with a target.
    """
    graph = OnnxGraph(copy_model(model))
    return list(place_pairs(graph, target, precision).weighted if target else weighted_layers(graph))


def quantize(
    model: onnx.ModelProto,
    ranges: Mapping[str, tuple[float, float]],
    target: str,
    precision: str = "int8",
    keep: Collection[str] = (),
    *,
    reduce_range: bool = False,
) -> onnx.ModelProto:
    """Return the model with Q/DQ pairs and 8-bit weights for a target.

    For TensorRT all tensors are symmetric and biases stay FP32. For ONNX Runtime activations are UINT8 with a zero point and
    biases INT32. Weights have a scale for each output channel (FP8: one scale).

    Args:
        model: FP32, result of `simplify`; not changed.
        ranges: (low, high) of each tensor in `tensors_to_calibrate`.
        target: "tensorrt" or "onnxruntime".
        precision: "int8" or "fp8".
        keep: names of nodes that stay in floating point; names of other nodes are allowed.
        reduce_range: use 7 bits for weights, for CPUs without VNNI, where sums of two 8-bit products overflow 16 bits.

    Raises:
        BuildError: a range is missing or invalid, or the target does not support the precision.
    """
    model = copy_model(raise_opset(model, FP8_OPSET) if precision == "fp8" else model)
    graph = OnnxGraph(model)
    placement = place_pairs(graph, target, precision, keep)
    scheme = _Fp8() if precision == "fp8" else _Scheme() if target == "tensorrt" else _UnsignedInt8(reduce_range)
    writer = _Writer(graph, placement, scheme, ranges)
    writer.write()
    if target == "onnxruntime":
        _avoid_float_gemm(graph, placement)
    _keep_names(graph, placement.stored, writer.pairs)
    return graph.finish()


@dataclass(frozen=True, slots=True)
class _Scale:
    """Scale of a tensor, FP32 [] or [channels], and zero point of the 8-bit type and the same shape."""

    scale: Floats
    zero_point: Array | TensorProto


class _Scheme:
    """An 8-bit format: scales of activations and weights. This base class is symmetric INT8."""

    element_type: int = TensorProto.INT8  # of activations
    weight_type: int = TensorProto.INT8
    quantizes_bias = False  # True if biases become INT32
    largest_weight = 127  # largest INT8 number of a weight

    def activation(self, low: float, high: float, clamped: bool) -> _Scale:
        """Return the scale for values in low..high, 0 included; if `clamped`, values must not exceed `high`."""
        largest = max(-low, high)
        return _Scale(_float32(largest / 127 if largest else 1.0), np.zeros((), np.int8))

    def larger(self, scale: Floats) -> Floats:
        """Return the next larger scale."""
        return _float32(scale * _SCALE_RATIO)

    def weight(
        self, values: Floats, layer: WeightedLayer, min_scale: Floats | None
    ) -> tuple[Array | TensorProto | None, _Scale]:
        """Return the weights in 8 bits, or None if the target quantises them, and their scale.

        Args:
            values: weights, FP32.
            layer: layer of the weights.
            min_scale: lower bounds of the scales, FP32 [channels]; None without bounds.
        """
        return _symmetric(values, layer.axis, min_scale, self.largest_weight)


class _UnsignedInt8(_Scheme):
    element_type: int = TensorProto.UINT8
    quantizes_bias = True

    def __init__(self, reduce_range: bool) -> None:
        self.largest_weight = 63 if reduce_range else 127

    def activation(self, low: float, high: float, clamped: bool) -> _Scale:
        scale = _float32((high - low) / 255 if high > low else 1.0)
        zero_point = np.uint8(np.clip(np.rint(-low / scale), 0, 255))
        # ONNX Runtime removes a Clip before a QuantizeLinear only if the largest 8-bit number is within the bounds.
        while clamped and high > low and np.float32(255 - zero_point) * scale > np.float32(high):
            scale = np.asarray(np.nextafter(scale, np.float32(0)))
        return _Scale(scale, np.asarray(zero_point))


class _Fp8(_Scheme):
    element_type: int = TensorProto.FLOAT8E4M3FN
    weight_type: int = TensorProto.FLOAT8E4M3FN

    def activation(self, low: float, high: float, clamped: bool) -> _Scale:
        return self._with_zero(fp8_scale(max(-low, high)))

    def larger(self, scale: Floats) -> Floats:
        return _float32(next_fp8_scale(np.float32(scale)))

    def weight(
        self, values: Floats, layer: WeightedLayer, min_scale: Floats | None
    ) -> tuple[TensorProto | None, _Scale]:
        # One scale: the exponents of FP8 cover small channels too, and TensorRT supports scales by channel on some GPUs only.
        scale = fp8_scale(float(np.abs(values).max(initial=0)))
        # A convolution runs in FP8 if TensorRT quantises its weights, and in FP16 if they are stored in FP8 (10.6 on an H200).
        whole = None if layer.operator == "Conv" else encode_fp8(values, scale)
        return whole, self._with_zero(scale)

    def _with_zero(self, scale: np.float32) -> _Scale:
        return _Scale(_float32(scale), encode_fp8(np.zeros((), np.float32), np.float32(1)))


def _float32(values: npt.ArrayLike) -> Floats:
    """Return scales as FP32, at least the smallest normal number."""
    return np.asarray(np.maximum(values, np.finfo(np.float32).tiny), np.float32)


def _symmetric(values: Floats, axis: int | None, min_scale: Floats | None, largest: int) -> tuple[Array, _Scale]:
    """Return INT8 weights in -largest..largest and their scales; channels of zeros have the scale of the whole tensor."""
    others = tuple(i for i in range(values.ndim) if i != axis) if axis is not None else None
    size = np.abs(values).max(axis=others, initial=0)
    whole = float(size.max(initial=0)) or 1.0
    scale = np.where(size > 0, size, whole).astype(np.float32) / np.float32(largest)
    scale = _float32(np.maximum(scale, min_scale) if min_scale is not None and axis is not None else scale)
    shape = [-1 if i == axis else 1 for i in range(values.ndim)] if axis is not None else []
    quantized = np.clip(np.rint(values / scale.reshape(shape)), -largest, largest).astype(np.int8)
    return quantized, _Scale(scale, np.zeros(scale.shape, np.int8))


class _Writer:
    """Adds Q/DQ pairs to a graph, one for each tensor."""

    def __init__(
        self, graph: OnnxGraph, placement: QdqPlacement, scheme: _Scheme, ranges: Mapping[str, tuple[float, float]]
    ) -> None:
        self._graph, self._placement, self._scheme, self._ranges = graph, placement, scheme, ranges
        self._scales: dict[str, _Scale] = {}
        self._weights: dict[tuple[str, int | None, bytes], str] = {}
        self.pairs: dict[str, str] = {}  # tensor -> output of its DequantizeLinear

    def write(self) -> None:
        graph, placement = self._graph, self._placement
        nodes = {node.name: node for node in graph.nodes}
        inputs = {edge: nodes[edge[0]].input[edge[1]] for edge in placement.edges}
        for tensor in dict.fromkeys([*inputs.values(), *placement.stored]):
            readers = graph.consumers(tensor) if tensor in placement.stored else []
            pair = self._pair(tensor)
            for reader in readers:
                for index in (i for i, name in enumerate(reader.input) if name == tensor):
                    graph.rewire(reader, index, pair)
        for (name, index), tensor in inputs.items():
            graph.rewire(nodes[name], index, self.pairs[tensor])
        for name, layer in placement.weighted.items():
            if layer.weight is not None:
                self._constants(nodes[name], layer, inputs[(name, layer.activations[0])])

    def _pair(self, tensor: str) -> str:
        scheme = self._scheme
        low, high, clamped = self._range(tensor)
        scale = scheme.activation(low, high, clamped)
        other_scales = {
            float(self._scales[name].scale) for name in self._placement.apart.get(tensor, ()) if name in self._scales
        }
        while float(scale.scale) in other_scales:
            scale = replace(scale, scale=scheme.larger(scale.scale))
        self._scales[tensor] = scale
        self.pairs[tensor] = self._dequantized(tensor, None, scale, None, scheme.element_type)
        return self.pairs[tensor]

    def _range(self, tensor: str) -> tuple[float, float, bool]:
        """Return the range of a tensor, 0 included, and whether a Relu or Clip bounds it."""
        low = high = 0.0
        for name in self._placement.sources[tensor]:
            if name not in self._ranges:
                raise BuildError(f"the range of tensor '{name}' is missing: calibrate it (see tensors_to_calibrate)")
            measured = self._ranges[name]
            if not all(map(math.isfinite, measured)) or measured[0] > measured[1]:
                raise BuildError(
                    f"the range of tensor '{name}' is {tuple(measured)}, not finite: check the samples and the model"
                )
            low, high = min(low, measured[0]), max(high, measured[1])
        producer = self._graph.producer(tensor)
        if producer is None or producer.op_type not in ("Relu", "Clip"):
            return low, high, False
        bounds = [0.0, math.inf] if producer.op_type == "Relu" else [-math.inf, math.inf]
        for index, name in enumerate(producer.input[1:] if producer.op_type == "Clip" else ()):
            bound = self._graph.constant(name) if name else None
            bounds[index] = float(bound.reshape(-1)[0]) if bound is not None else bounds[index]
        return max(low, min(bounds[0], 0.0)), min(high, max(bounds[1], 0.0)), True

    def _constants(self, node: onnx.NodeProto, layer: WeightedLayer, tensor: str) -> None:
        """Quantise the weight and, depending on the scheme, the bias of a node that reads `tensor`."""
        graph, scheme = self._graph, self._scheme
        assert layer.weight is not None
        name = node.input[layer.weight]
        values = graph.constant(name)
        assert values is not None
        bias = (
            graph.constant(node.input[2]) if scheme.quantizes_bias and len(node.input) > 2 and node.input[2] else None
        )
        step = self._scales[tensor].scale
        # Lower bound of a weight's scale: the bias, in steps of both scales, must be an INT32, with half of the range for sums.
        min_scale = None if bias is None else np.asarray(2 * np.abs(bias) / (step * _INT32_LARGEST), np.float32)
        quantized, weight_scale = scheme.weight(values, layer, min_scale)
        key = (name, layer.axis, weight_scale.scale.tobytes())
        if key not in self._weights:
            self._weights[key] = self._dequantized(name, quantized, weight_scale, layer.axis, scheme.weight_type)
        graph.rewire(node, layer.weight, self._weights[key])
        if bias is not None:
            scale = np.asarray(weight_scale.scale.astype(np.float64) * step, np.float32)
            whole = np.clip(np.rint(bias.astype(np.float64) / scale), -_INT32_LARGEST, _INT32_LARGEST).astype(np.int32)
            zeros = _Scale(scale, np.zeros(scale.shape, np.int32))
            graph.rewire(node, 2, self._dequantized(node.input[2], whole, zeros, 0, TensorProto.INT32))

    def _dequantized(
        self, name: str, quantized: Array | TensorProto | None, scale: _Scale, axis: int | None, element_type: int
    ) -> str:
        """Return the output of a DequantizeLinear of a constant, or of a QuantizeLinear of the tensor without a constant."""
        graph = self._graph
        shape = graph.shape(name)
        scales = [
            graph.add_constant(f"{name}_scale", scale.scale),
            graph.add_constant(f"{name}_zero_point", scale.zero_point),
        ]
        by_channel = axis if scale.scale.ndim else None
        if quantized is None:
            stored = graph.add_node("QuantizeLinear", [name, *scales], f"{name}_quantized", axis=by_channel)
        else:
            stored = graph.add_constant(f"{name}_quantized", quantized)
        graph.set_type(stored, element_type, shape)
        output = graph.add_node("DequantizeLinear", [stored, *scales], f"{name}_dequantized", axis=by_channel)
        graph.set_type(output, TensorProto.FLOAT, shape)
        return output


def _avoid_float_gemm(graph: OnnxGraph, placement: QdqPlacement) -> None:
    """Write the addition after an integer MatMul as a Sum.

    ONNX Runtime fuses a MatMul and the Add after it into a Gemm (for matrices, or if all sizes are known) before it reads Q/DQ
    pairs. The product would then run on dequantised weights. A Sum of two tensors is equal and not fused.
    """
    for node in graph.nodes:
        layer = placement.weighted.get(node.name)
        if layer is None or layer.operator != "MatMul" or node.output[0] in placement.stored:
            continue
        shape = graph.shape(node.output[0])
        matrices = shape is not None and (len(shape) == 2 or min(shape, default=0) >= 0)
        for reader in graph.consumers(node.output[0]) if matrices else ():
            if reader.op_type == "Add":
                reader.op_type = "Sum"


def _keep_names(graph: OnnxGraph, stored: Collection[str], pairs: Mapping[str, str]) -> None:
    """Rename the outputs of pairs whose tensor is an output of the model or read by a subgraph to the name of the tensor.

    The tensor itself gets another name. With a second reader ONNX Runtime would find no integer kernel for its layer.
    """
    fixed = dict.fromkeys([*graph.outputs, *sorted({name for node in graph.nodes for name in captured(node)})])
    renamed = {name: graph.fresh(f"{name}_float") for name in fixed if name in stored}
    renamed |= {pairs[name]: name for name in list(renamed)}
    for node in graph.nodes:
        for field in (node.input, node.output):
            for index, name in enumerate(field):
                if name in renamed:
                    field[index] = renamed[name]


Doubles = npt.NDArray[np.float64]
SAMPLES = 48
# Rows of one run: the inputs of all layers are in memory until they are averaged.
_ROWS = 4
# Operators with channels in the second dimension and a bias as input 2.
_BIASED = ("Conv", "Gemm")


def correct_biases(
    model: onnx.ModelProto, quantized: onnx.ModelProto, nodes: Sequence[str], samples: Samples, report: Report
) -> onnx.ModelProto:
    """Return the FP32 model with biases that compensate for the rounding of its weights; quantise it again.

    Args:
        model: FP32, simplified; not changed.
        quantized: its quantised form, with the rounded weights.
        nodes: names of the quantised layers.
        samples: samples to measure means on; the first `SAMPLES` are used.
        report: called with the progress.
    """
    graph, rounded = OnnxGraph(copy_model(model)), OnnxGraph(copy_model(quantized))
    counterparts = {node.name: node for node in rounded.nodes}
    names = set(nodes) & set(counterparts)
    layers = [node for node in graph.nodes if node.name in names and node.op_type in _BIASED]
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
    """Return the mean of each channel, FP64 [channels] by tensor, for tensors with channels."""
    runner = OnnxRunner(model, [name for name in tensors if graph.producer(name) is not None])
    sums: dict[str, Doubles] = {}
    count = 0
    for batch in samples.batches(_ROWS):
        values: dict[str, npt.NDArray[Any]] = {**runner.run(batch), **batch}
        # Weighted by rows: the last batch may have fewer.
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
    """Return the rounded weights of a layer: a constant before a DequantizeLinear, in 8 bits or in FP32."""
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
    """Return the shift of the mean of each output channel by the error of the weights; None if the shapes do not fit."""
    if node.op_type == "Gemm":
        error = error if graph.attribute(node, "transB", 0) else error.T
        # x times W plus a bias, without factors.
        names = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        plain = all(graph.attribute(node, name, value) == value for name, value in names.items())
        return np.asarray(error @ mean) if plain and error.shape[1:] == mean.shape else None
    groups = graph.attribute(node, "group", 1)
    outputs, inputs = error.shape[:2]
    if mean.size != groups * inputs:
        return None
    summed = error.sum(axis=tuple(range(2, error.ndim))).reshape(groups, outputs // groups, inputs)
    channels: Doubles = np.einsum("goi,gi->go", summed, mean.reshape(groups, inputs)).reshape(-1)
    return channels


def _subtract_shift(graph: OnnxGraph, node: onnx.NodeProto, shift: Doubles) -> None:
    """Subtract the shift from a copy of the node's bias, except for a computed bias or one with other shapes."""
    name = node.input[2] if len(node.input) > 2 else ""
    bias = graph.constant(name) if name else np.zeros(shift.shape, np.float32)
    if bias is None or bias.shape != shift.shape:
        return
    corrected = graph.add_constant(f"{node.name}.bias", (bias - shift).astype(np.float32))
    if len(node.input) > 2:
        graph.rewire(node, 2, corrected)
    else:
        node.input.append(corrected)
