"""Writes an FP32 model in the requested precision, for a target.

    fp32             simplified model
    fp16, bf16       weights and activations cast; nodes that would overflow or lose too much accuracy stay FP32
    int8, fp8        ranges from samples -> Q/DQ -> corrected biases; if the accuracy does not hold, the most sensitive layers
                     stay in floating point

The accuracy is first measured on ONNX Runtime, which runs any Q/DQ model: a TensorRT build takes minutes.

The sensitivity of a layer is the error of the model's outputs if only this layer is quantised. Each layer takes a session and a
run of the whole network: with 16 samples on two cores about a second for each layer of resnet50.

The noise that quantisation adds to the output of each layer would be cheaper: one run for all layers. It does not predict the
sensitivity: on efficientnet_lite0 it found at most 5 of the 8 most sensitive layers (rank correlation at most 0.63), because
later layers amplify or suppress the noise. The sensitivity on 8 samples found 7 or 8 of those on 32 samples (0.96).
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from headrace.config.machine import cpu_capability, has_vnni
from headrace.config.optimization_config import Calibration

from headrace_engines.accuracy import judge, measure
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.precision import limits
from headrace_engines.precision.casting import cast_model
from headrace_engines.precision.methods import DYNAMIC, EXPLICIT
from headrace_engines.progress import Report, part, silent
from headrace_engines.project import BuildData, BuildSpec
from headrace_engines.quantization.calibration import calibrate
from headrace_engines.quantization.dynamic import dynamic_products, quantize_products
from headrace_engines.quantization.placement import PRODUCTS, tensors_to_calibrate
from headrace_engines.quantization.qdq import SAMPLES, correct_biases, quantizable, quantize
from headrace_engines.quantization.samples import Samples

logger = logging.getLogger("headrace.build")
Array = npt.NDArray[Any]
# Rows of one run of a comparison; more rows need more memory and save little time.
ROWS = 8
# Number of samples of the search, which measures the accuracy many times.
SEARCH_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class LoweredModel:
    """A model ready for its target.

    Attributes:
        model: model in the requested precision.
        float_nodes: names of the nodes in floating point (int8, fp8) or FP32 (fp16, bf16).
        without: returns the model for a target without 8-bit kernels for some nodes: with these nodes in floating point too, or
            with FP32 in place of FP16 if they are already or none is named; None if no further variant exists.
    """

    model: onnx.ModelProto
    float_nodes: tuple[str, ...] = ()
    without: Callable[[Collection[str]], LoweredModel | None] | None = None


def lower_model(
    model: onnx.ModelProto,
    spec: BuildSpec,
    target: str,
    data: BuildData,
    tables: Path,
    report: Report,
    no_fp8_convolutions: str = "",
) -> LoweredModel:
    """Write a model in a precision.

    Args:
        model: simplified, FP32; not changed.
        spec: specification of the artefact; its precision is not "best".
        target: "onnxruntime" or "tensorrt".
        data: samples.
        tables: folder of calibration tables.
        report: called with the progress.
        no_fp8_convolutions: reason why the target has no FP8 convolutions; "" if it has (`Target.refuses_fp8_convolutions`).

    Raises:
        BuildError: the model cannot be written in this precision.
    """
    if spec.precision == "fp32" or spec.method == EXPLICIT:
        return LoweredModel(model)
    if spec.method == DYNAMIC:
        return _lower_dynamically(model, spec)
    if spec.precision in ("fp16", "bf16"):
        samples = data.calibration or data.held_out
        keep = limits.must_stay_fp32(model, samples, spec.precision, report) | fp32_nodes(model, spec)
        return LoweredModel(cast_model(model, spec.precision, keep), tuple(sorted(keep)))
    if spec.calibration.method == "tensorrt":
        cure = "write calibration.method: entropy, which builds int8 and fp8 from Q/DQ"
        raise BuildError(
            f"calibration.method is tensorrt, TensorRT 10's own calibrator, which is no longer used: {cure}"
        )
    return Quantizer(model, spec, target, data, tables, no_fp8_convolutions).run(report)


def _lower_dynamically(model: onnx.ModelProto, spec: BuildSpec) -> LoweredModel:
    """Write the products of a model in dynamic INT8, except those that the configuration keeps.

    Raises:
        BuildError: a name of the configuration matches no product, or no product is left.
    """
    nodes = dynamic_products(model)
    keep = nodes_to_keep(nodes, spec.calibration)
    if keep.issuperset(nodes):
        raise BuildError("calibration.keep leaves no product in int8: name fewer nodes, or use fp32")
    narrow = not has_vnni(cpu_capability())
    return LoweredModel(quantize_products(model, keep, reduce_range=narrow), tuple(sorted(keep)))


def fp32_nodes(model: onnx.ModelProto, spec: BuildSpec) -> set[str]:
    """Return the nodes that `optimization.keep_fp32` names.

    Raises:
        BuildError: a pattern matches no node.
    """
    names = [node.name for node in model.graph.node]
    return named_nodes(names, spec.keep_fp32, "optimization.keep_fp32", "no node of the model")


@dataclass
class Quantizer:
    """Writes one model with Q/DQ.

    Attributes:
        model: simplified, FP32; not changed.
        spec: specification; its precision is "int8" or "fp8".
        target: "onnxruntime" or "tensorrt".
        data: samples, with those of the calibration.
        tables: folder of calibration tables.
        fp8_reason: `no_fp8_convolutions` of `lower_model`.
        nodes: names of the layers that the target runs in 8 bits, in order.
    """

    model: onnx.ModelProto
    spec: BuildSpec
    target: str
    data: BuildData
    tables: Path
    fp8_reason: str

    def __post_init__(self) -> None:
        assert self.data.calibration is not None
        self.calibration = self.data.calibration
        nodes = quantizable(self.model, self.target, self.spec.precision)
        # Convolutions without FP8 on this target are not candidates, and are not listed in `float_nodes`.
        others = {node.name for node in self.model.graph.node if node.op_type not in PRODUCTS}
        fp8 = self.spec.precision == "fp8"
        self.not_fp8 = others.intersection(nodes) if fp8 and self.fp8_reason else set()
        self.nodes = [name for name in nodes if name not in self.not_fp8]
        self.ranges: dict[str, tuple[float, float]] = {}

    def run(self, report: Report) -> LoweredModel:
        """Return the model to build: with the fewest layers in floating point that hold the accuracy.

        Raises:
            BuildError: the model cannot be quantised.
        """
        precision = self.spec.precision
        keep = self.calibrate(part(report, 0.0, 0.4))
        quantized = self._corrected(keep, part(report, 0.4, 0.6))
        missed = self._missed(quantized, part(report, 0.6, 0.65))
        if missed:
            logger.info("the accuracy does not hold with every layer in %s: %s", precision, "; ".join(missed))
            keep = self._search(keep, part(report, 0.65, 0.95))
            quantized = self._corrected(keep, part(report, 0.95, 1.0))
        return self._lowered(quantized, keep, half=True)

    def variant(self, keep: set[str], *, corrected: bool) -> onnx.ModelProto:
        """Return the model with some layers in floating point, after `calibrate`.

        Args:
            keep: names of the layers.
            corrected: correct the biases, as a build does; else only the weights are rounded, which is faster.
        """
        quantized = self._corrected(keep, silent) if corrected else self._quantize(self.model, keep)
        return self._in_half(quantized, keep)

    def calibrate(self, report: Report) -> set[str]:
        """Calibrate the ranges and return the names of the nodes that the configuration keeps in floating point.

        Raises:
            BuildError: no layer can be quantised, or a name of the configuration matches no node.
        """
        calibration, precision = self.spec.calibration, self.spec.precision
        if not self.nodes:
            if any(node.op_type == "DequantizeLinear" for node in self.model.graph.node):
                raise BuildError("the model is quantised already: use fp32, which does not change it")
            if self.not_fp8:
                cure = "use fp16 or int8"
                raise BuildError(
                    f"the model has convolutions but no product to run in fp8, and {self.fp8_reason}: {cure}"
                )
            missing = "convolution and no product of FP32"
            raise BuildError(f"the model has no {missing} that {self.target} runs in {precision}: use fp32 or fp16")
        if self.not_fp8:
            logger.warning("%d convolutions run in fp16: %s", len(self.not_fp8), self.fp8_reason)
        # Names of nodes that only another target quantises are valid.
        keep = nodes_to_keep(quantizable(self.model), calibration)
        if keep.issuperset(self.nodes):
            raise BuildError(f"calibration.keep leaves no node in {precision}: name fewer nodes, or use fp32 or fp16")
        tensors = tensors_to_calibrate(self.model)
        self.ranges = calibrate(self.model, tensors, self.calibration, calibration, self.tables, report)
        return keep

    def _lowered(self, quantized: onnx.ModelProto, keep: set[str], half: bool) -> LoweredModel:
        """Return the model to build from a quantised one; `half`: layers in floating point may be FP16."""
        model = self._in_half(quantized, keep) if half else quantized

        def without(nodes: Collection[str]) -> LoweredModel | None:
            if half and self.spec.precision == "fp8":
                return self._lowered(quantized, keep, half=False)
            added = set(nodes) - keep
            if added:
                return self._lowered(self._corrected(keep | added, silent), keep | added, half)
            return self._lowered(quantized, keep, half=False) if model is not quantized else None

        return LoweredModel(model, tuple(sorted(keep)), without=without)

    def _corrected(self, keep: set[str], report: Report) -> onnx.ModelProto:
        """Return the quantised model with corrected biases, or without if they lower the cosine with the original."""
        plain = self._quantize(self.model, keep)
        nodes = [name for name in self.nodes if name not in keep]
        model = correct_biases(self.model, plain, nodes, self.calibration, part(report, 0.0, 0.6))
        corrected = self._quantize(model, keep)
        reference, few = OnnxRunner(self.model), self.calibration.head(SAMPLES)
        output = self.data.output
        before = measure(reference, OnnxRunner(plain), few, ROWS, part(report, 0.6, 0.8), output=output)
        after = measure(reference, OnnxRunner(corrected), few, ROWS, part(report, 0.8, 1.0), output=output)
        return corrected if after.cosine > before.cosine else plain

    def _quantize(self, model: onnx.ModelProto, keep: set[str]) -> onnx.ModelProto:
        # Without VNNI the sum of two products of UINT8 and INT8 overflows 16 bits; with weights of 7 bits it does not.
        narrow = self.target == "onnxruntime" and not has_vnni(cpu_capability())
        return quantize(model, self.ranges, self.target, self.spec.precision, keep | self.not_fp8, reduce_range=narrow)

    def _missed(self, quantized: onnx.ModelProto, report: Report) -> list[str]:
        """Return the missed accuracy limits that more layers in floating point may repair."""
        held_out = self.data.held_out.head(SEARCH_SAMPLES)
        reference, runner = OnnxRunner(self.model), OnnxRunner(quantized)
        accuracy = measure(reference, runner, held_out, ROWS, report, output=self.data.output)
        bar = self.spec.bar
        return judge(accuracy, bar if accuracy.drop is not None else replace(bar, max_drop=None))

    def _search(self, keep: set[str], report: Report) -> set[str]:
        candidates = [name for name in self.nodes if name not in keep]
        # An engine with fewer than half of its layers in INT8 has no advantage over FP16.
        max_layers = len(self.nodes) // 2 - len(keep.intersection(self.nodes))
        ranking = rank_layers(
            self.model,
            self.ranges,
            self.target,
            self.spec.precision,
            self.calibration,
            part(report, 0.0, 0.6),
            candidates,
        )
        searching = part(report, 0.6, 1.0)
        tries = 0

        def holds(layers: set[str]) -> bool:
            nonlocal tries
            tries += 1
            searching(tries / (tries + 4), f"{len(layers)} layers left in floating point")
            return not self._missed(self._quantize(self.model, keep | layers), silent)

        try:
            return keep | min_float_layers([name for name, _ in ranking[: max(max_layers, 0)]], holds)
        except BuildError:
            # The comparison of the built artefact decides; --force publishes it even below the limits.
            logger.warning(
                "the accuracy does not hold with half of the %d layers left in floating point either", len(self.nodes)
            )
            return keep

    def _in_half(self, quantized: onnx.ModelProto, keep: set[str]) -> onnx.ModelProto:
        """Cast the layers that stay in floating point to FP16 where that is faster: on TensorRT."""
        fp8 = self.spec.precision == "fp8"
        if self.target != "tensorrt" or not (keep or fp8):
            return quantized
        stay = limits.must_stay_fp32(self.model, self.calibration, "fp16", silent) | fp32_nodes(self.model, self.spec)
        # TensorRT's FP8 convolutions need FP16 scales and biases, its INT8 convolutions FP32.
        return cast_model(quantized, "fp16", stay, "scales" if fp8 else "layers")


def nodes_to_keep(nodes: list[str], calibration: Calibration) -> set[str]:
    """Return the nodes that `calibration.keep` names.

    Raises:
        BuildError: a pattern matches no node.
    """
    return named_nodes(nodes, calibration.keep, "optimization.calibration.keep", "no quantised node")


def named_nodes(nodes: list[str], patterns: Sequence[str], field: str, nothing: str) -> set[str]:
    """Return the nodes that a field of the configuration names.

    Args:
        nodes: names of nodes.
        patterns: names, `*` allowed.
        field: name of the field, for messages.
        nothing: what a wrong pattern matches, for messages.

    Raises:
        BuildError: a pattern matches no node.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        # Names may contain brackets, which have a meaning in patterns.
        named = {name for name in nodes if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not named:
            listed = ", ".join(nodes[:8]) + (", ..." if len(nodes) > 8 else "")
            raise BuildError(f"{field} has '{pattern}', which matches {nothing}: use names of {listed}")
        chosen |= named
    return chosen


# Number of samples of the sensitivity measurement.
RANKING_SAMPLES = 16
_ROWS = 8


def rank_layers(
    model: onnx.ModelProto,
    ranges: Mapping[str, tuple[float, float]],
    target: str,
    precision: str,
    samples: Samples,
    report: Report,
    nodes: Sequence[str] | None = None,
) -> list[tuple[str, float]]:
    """Measure the sensitivity of layers to quantisation.

    Args:
        model: simplified, FP32.
        ranges: calibrated ranges (low, high) by tensor.
        target: "tensorrt" or "onnxruntime".
        precision: "int8" or "fp8".
        samples: samples of which the first 16 are run.
        report: called after every layer.
        nodes: names of the layers to measure; None for all quantisable ones.

    Returns:
        (name, sensitivity), the most sensitive layer first. The sensitivity is the energy of the error over the energy of the
        output, for the worst floating-point output.

    Raises:
        BuildError: ONNX Runtime cannot run the model, or its quantised form.
    """
    layers = quantizable(model)
    named = layers if nodes is None else nodes
    batches = list(samples.head(RANKING_SAMPLES).batches(_ROWS))
    reference = OnnxRunner(model)
    expected = [reference.run(rows) for rows in batches]
    sensitivity: dict[str, float] = {}
    for i, name in enumerate(named):
        runner = OnnxRunner(quantize(model, ranges, target, precision, [other for other in layers if other != name]))
        sensitivity[name] = _output_error(expected, [runner.run(rows) for rows in batches])
        report((i + 1) / len(named), f"sensitivity of {name}")
    return sorted(sensitivity.items(), key=lambda item: -item[1])


def _output_error(expected: Sequence[Mapping[str, Array]], actual: Sequence[Mapping[str, Array]]) -> float:
    """Return the energy of the error over that of the signal over all samples, for the worst floating-point output."""
    worst = 0.0
    for name, first in expected[0].items():
        if first.dtype.kind != "f":
            continue
        signal = sum(float(np.square(rows[name], dtype=np.float64).sum()) for rows in expected)
        error = sum(
            float(np.square(np.subtract(rows[name], got[name], dtype=np.float64)).sum())
            for rows, got in zip(expected, actual, strict=True)
        )
        worst = max(worst, _ratio(error, signal))
    return worst


def _ratio(error: float, signal: float) -> float:
    if not np.isfinite(error):
        return float("inf")
    return float(error / signal) if signal else (float("inf") if error else 0.0)


# Searching


def min_float_layers(ranking: Sequence[str], holds: Callable[[set[str]], bool]) -> set[str]:
    """Return the smallest number of the most sensitive layers that must stay in floating point.

    Tries 1, 2, 4, 8, ... layers until the accuracy holds, then bisects between the last two numbers: about 2 log2 n trials for n
    layers, few of them with many layers.

    Args:
        ranking: names of layers, the most sensitive first; the accuracy does not hold with none of them.
        holds: returns whether the accuracy holds with these layers in floating point.

    Raises:
        BuildError: the accuracy does not hold with all of them.
    """
    few, many = 0, min(1, len(ranking))
    while not (many > few and holds(set(ranking[:many]))):
        if many == len(ranking):
            cure = "use fp16, or lower the limit in optimization.accuracy"
            raise BuildError(f"the accuracy does not hold even with all {many} layers in floating point: {cure}")
        few, many = many, min(2 * many, len(ranking))
    while many - few > 1:
        middle = (few + many) // 2
        if holds(set(ranking[:middle])):
            many = middle
        else:
            few = middle
    return set(ranking[:many])
