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

import fnmatch
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from headrace.config.manifest import cpu_capability, has_vnni
from headrace.config.optimization_config import Calibration
from onnx import TensorProto, helper, numpy_helper

from headrace_engines.accuracy import judge, measure
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, captured, copy_model
from headrace_engines.precision import limits
from headrace_engines.precision.methods import DYNAMIC, EXPLICIT
from headrace_engines.progress import Report, part, silent
from headrace_engines.project import BuildData, BuildSpec
from headrace_engines.quantization.calibration import calibrate
from headrace_engines.quantization.dynamic import dynamic_products, quantize_products
from headrace_engines.quantization.placement import PRODUCTS, tensors_to_calibrate
from headrace_engines.quantization.qdq import SAMPLES, correct_biases, quantizable, quantize
from headrace_engines.quantization.samples import Samples

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


# Choosing


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


# Writing


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
