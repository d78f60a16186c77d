"""Finds the first layer of a lower precision that deviates from FP32, and the layer whose higher precision repairs the outputs.

The search looks at prefixes: the part of the lowered model between the inputs and one tensor, built and run like an engine. No
tensor inside of a prefix is an output, so that its layers are fused as in the whole engine.

    1. prefixes that end at cut points (tensors that every path goes through) are bisected, then those of the layers in between
    2. if a tensor that the layer reads deviates too, the search moves there: the layer that is found has good inputs
    3. the bisection assumes that a deviation stays on its way to the outputs; so all tensors are read in one run, and if an
       earlier one deviates there and at the end of its prefix, its layer is the result
    4. the layer alone runs in the lower precision, fed with FP32 values: its own error, without that of the layers before it
    5. each layer in turn stays in the higher precision; the best of them are built as a whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from headrace_engines.errors import BuildError
from headrace_engines.layers.differences import TensorDifference
from headrace_engines.layers.prefixes import PartRunner, PrecisionVariants
from headrace_engines.layers.tensors import SourceLayer, counterparts, cut_points, part_of_model, source_layers
from headrace_engines.onnx_graph import Array, OnnxGraph, OnnxRunner, copy_model, read_onnx
from headrace_engines.progress import Report, part
from headrace_engines.project import BuildData, BuildSpec, Project
from headrace_engines.simplify import simplify
from headrace_engines.store import Store
from headrace_engines.targets.base import Target, TargetSpec

# Kernels of other sizes add in another order: rows of a right engine hold this cosine in a batch, in 8 bits the second one.
_ROW_COSINE, _ROW_COSINE_8_BITS = 0.9999, 0.999
# Layers whose repair is confirmed with a whole model as a build writes it.
CONFIRMED = 3


@dataclass(frozen=True, slots=True)
class Repair:
    """Effect of one layer in the higher precision.

    Attributes:
        node: name of the layer.
        difference: difference of the worst output with this layer in the higher precision.
    """

    node: str
    difference: TensorDifference


@dataclass(frozen=True, slots=True)
class Bisection:
    """Result of a search.

    Attributes:
        bound: smallest cosine that is no deviation.
        output: name of the worst output of the model.
        outputs: difference of that output.
        layer: the first layer that deviates; None if no output does.
        before: difference of each tensor that the layer reads, by name; a missing one is an input of the model.
        after: difference of the layer's output; None without a layer.
        alone: difference of the layer's output if it is fed with FP32 values; None if the layer cannot be run alone.
        unchecked: reason why earlier layers were not all checked; "" if they were.
        probes: number of prefixes that were run.
        repairs: effect of single layers, the best first.
        layers: number of layers in the lower precision.
    """

    bound: float
    output: str
    outputs: TensorDifference
    layer: SourceLayer | None = None
    before: Mapping[str, TensorDifference] = field(default_factory=dict)
    after: TensorDifference | None = None
    alone: TensorDifference | None = None
    unchecked: str = ""
    probes: int = 0
    repairs: tuple[Repair, ...] = ()
    layers: int = 0

    @property
    def repair(self) -> Repair | None:
        """The best layer to keep in the higher precision, if the outputs are better with it; else None."""
        best = self.repairs[0] if self.repairs else None
        return best if best is not None and best.difference.cosine > self.outputs.cosine else None

    @property
    def is_repaired(self) -> bool:
        """True if the outputs hold the bound with that layer in the higher precision."""
        return self.repair is not None and self.repair.difference.cosine >= self.bound


class LayerSearch:
    """Searches one lowered model for the layer that deviates.

    Args:
        model: FP32 model, simplified.
        lowered: its lowered form.
        runner: builds and compares parts.
        bound: smallest cosine that is no deviation.
        report: called with the share 0..1 of the search, which is estimated.
    """

    def __init__(
        self, model: onnx.ModelProto, lowered: onnx.ModelProto, runner: PartRunner, bound: float, report: Report
    ) -> None:
        self._model, self._lowered, self._runner, self._bound, self._report = model, lowered, runner, bound, report
        self._graph = OnnxGraph(copy_model(model))
        self._graph.sort()
        self._lowered_graph = OnnxGraph(copy_model(lowered))
        self._layers = source_layers(self._graph)
        self._matches = counterparts(self._layers, self._lowered_graph)
        self._differences: dict[str, TensorDifference] = {}

    @property
    def probes(self) -> int:
        """Number of prefixes that were run."""
        return len(self._differences)

    def difference(self, tensor: str) -> TensorDifference:
        """Return the difference of a tensor after its prefix in the lower precision.

        Raises:
            BuildError: the prefix cannot be built or run.
        """
        if tensor not in self._differences:
            self._report(self.probes / (self.probes + 6), f"prefix up to {self._layers[tensor].node}")
            prefix = part_of_model(self._lowered, [self._matches[tensor].tensor])
            reference = OnnxRunner(self._model, [tensor])
            self._differences[tensor] = self._runner.compare(reference, tensor, prefix)
        return self._differences[tensor]

    def worst_output(self) -> tuple[str, TensorDifference]:
        """Return the floating-point output with the smallest cosine.

        Raises:
            BuildError: the model has no such output.
        """
        names = [name for name in self._graph.outputs if name in self._matches]
        if not names:
            raise BuildError(
                "the model has no floating-point output that a layer computes: there is nothing to compare"
            )
        worst = min(names, key=lambda name: self.difference(name).cosine)
        return worst, self.difference(worst)

    def first_deviation(self, end: str) -> SourceLayer:
        """Return a layer whose inputs hold the bound and whose output does not.

        Args:
            end: name of a tensor that deviates.
        """
        points = [name for name in cut_points(self._graph, end) if name in self._matches and name != end]
        points.append(end)
        low, high = self._bisect(points)
        before = set(self._ancestors(low)) | {low} if low else set[str]()
        between = [name for name in self._ancestors(high) if name not in before]
        _, tensor = self._bisect([*between, high])
        return self._with_good_inputs(tensor)

    def earlier_deviation(self, layer: SourceLayer, end: str) -> SourceLayer:
        """Return the first layer before `layer` that deviates, `layer` without one; reads all tensors in one run.

        Args:
            layer: result of `first_deviation`.
            end: name of the tensor that it was found for.

        Raises:
            BuildError: the tensors cannot be read.
        """
        before = self._ancestors(end)
        names = before[: before.index(layer.tensor)] if layer.tensor in before else before
        if not names:
            return layer
        self._report(0.9, "checking earlier layers")
        differences = self._runner.compare_observed(self._model, self._lowered, names)
        for name in names:
            difference = differences.get(name)
            if difference is not None and not difference.cosine >= self._bound and self._deviates(name):
                return self._with_good_inputs(name)
        return layer

    def describe(self, result: Bisection) -> Bisection:
        """Return the result with the layer that deviates first, for a result whose output deviates."""
        layer, unchecked = self.first_deviation(result.output), ""
        try:
            layer = self.earlier_deviation(layer, result.output)
        except BuildError as error:
            unchecked = str(error)
        return replace(
            result,
            layer=layer,
            before={name: self.difference(name) for name in self.inputs_of(layer)},
            after=self.difference(layer.tensor),
            alone=self.alone(layer),
            unchecked=unchecked,
            probes=self.probes,
        )

    def _with_good_inputs(self, tensor: str) -> SourceLayer:
        """Return the layer of a deviating tensor, or a layer before it whose inputs do not deviate."""
        while True:
            deviating = next((name for name in self.inputs_of(self._layers[tensor]) if self._deviates(name)), None)
            if deviating is None:
                return self._layers[tensor]
            tensor = deviating

    def inputs_of(self, layer: SourceLayer) -> list[str]:
        """Return the comparable tensors that a layer reads; one without a counterpart is replaced by those it depends on."""
        found: dict[str, None] = {}
        for name in layer.inputs:
            if name in self._matches:
                found[name] = None
            elif name in self._layers:
                found.update(dict.fromkeys(self.inputs_of(self._layers[name])))
        return list(found)

    def alone(self, layer: SourceLayer) -> TensorDifference | None:
        """Return the difference of a layer that is fed with FP32 values; None if it does not run alone."""
        inputs = [name for name in layer.inputs if name in self._layers]
        reference = OnnxRunner(self._model, [*inputs, layer.tensor])
        shapes: dict[str, Array] = {name: np.empty(()) for name in inputs}
        model = part_of_model(self._lowered, [self._matches[layer.tensor].tensor], shapes)
        try:
            return self._runner.compare_alone(reference, layer, model)
        except BuildError:
            return None

    def _bisect(self, tensors: Sequence[str]) -> tuple[str, str]:
        """Return neighbours: the last tensor before, and the first after the bound; "" before the first tensor.

        Args:
            tensors: in order; the last one deviates.
        """
        low, high = -1, len(tensors) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._deviates(tensors[middle]):
                high = middle
            else:
                low = middle
        return tensors[low] if low >= 0 else "", tensors[high]

    def _deviates(self, tensor: str) -> bool:
        return not self.difference(tensor).cosine >= self._bound  # true for NaN, too

    def _ancestors(self, tensor: str) -> list[str]:
        """Return the comparable tensors that a tensor depends on, in the order of the graph."""
        part_model = part_of_model(self._model, [tensor])
        names = {name for node in part_model.graph.node for name in node.output} - {tensor}
        return [name for name in self._layers if name in names and name in self._matches]

    def nodes_before(self, tensor: str) -> set[str]:
        """Return the names of the nodes that a tensor depends on."""
        return {node.name for node in part_of_model(self._model, [tensor]).graph.node}


def bisect(
    project: Project,
    spec: BuildSpec,
    target: Target,
    store: Store,
    data: BuildData,
    bound: float,
    report: Report,
    *,
    with_repairs: bool = True,
) -> Bisection:
    """Search a model for the first layer that deviates in a lower precision.

    Args:
        project: the version.
        spec: specification of the lower precision.
        target: target of the precision.
        store: store of calibration tables, timing cache and scratch files.
        data: samples; those that are held out are compared.
        bound: smallest cosine that is no deviation.
        report: called with the progress.
        with_repairs: also search for the layer whose higher precision repairs the outputs.

    Raises:
        BuildError: the model cannot be lowered or run.
    """
    variants = _variants(project, spec, target, store, data, part(report, 0.0, 0.2))
    report(0.2, "writing the model")
    with store.scratch() as scratch:
        runner = PartRunner(target, _order(spec, target, store), data.held_out, project.batched, Path(scratch))
        search = LayerSearch(variants.model, variants.write(), runner, bound, part(report, 0.2, 0.5))
        output, outputs = search.worst_output()
        result = Bisection(bound, output, outputs, probes=search.probes, layers=len(variants.layers))
        if outputs.cosine >= bound:
            return result
        result = search.describe(result)
        if not with_repairs or result.layer is None:
            return result
        repairs = _Repairs(variants.model, variants, runner, output)
        return replace(result, repairs=repairs.run(search, result.layer.node, part(report, 0.5, 1.0)))


def _variants(
    project: Project, spec: BuildSpec, target: Target, store: Store, data: BuildData, report: Report
) -> PrecisionVariants:
    no_fp8 = target.refuses_fp8_convolutions() if spec.precision == "fp8" else ""
    model = simplify(read_onnx(project.source))
    variants = PrecisionVariants(model, spec, target.name, data, store.tables, no_fp8)
    variants.prepare(report)
    return variants


def _order(spec: BuildSpec, target: Target, store: Store) -> TargetSpec:
    return TargetSpec(spec.precision, spec.profiles, spec.workspace_bytes, store.timing_cache(target.describe()))


def first_batch_layer(
    project: Project, spec: BuildSpec, target: Target, store: Store, data: BuildData, rows: int, report: Report
) -> SourceLayer | None:
    """Return the first layer whose rows have other values in a batch than alone; None if the outputs have the same ones.

    Args:
        project, spec, target, store, data, report: as of `bisect`; any precision but "best".
        rows: rows of the batch.

    Raises:
        BuildError: the model cannot be lowered or run.
    """
    if spec.precision == "fp32":
        model = lowered = simplify(read_onnx(project.source))
    else:
        variants = _variants(project, spec, target, store, data, part(report, 0.0, 0.2))
        model, lowered = variants.model, variants.write()
    bound = _ROW_COSINE_8_BITS if spec.quantized else _ROW_COSINE
    with store.scratch() as scratch:
        runner = PartRunner(target, _order(spec, target, store), data.held_out, project.batched, Path(scratch), rows)
        search = LayerSearch(model, lowered, runner, bound, part(report, 0.2, 1.0))
        output, outputs = search.worst_output()
        return None if outputs.cosine >= bound else search.first_deviation(output)


@dataclass(frozen=True, slots=True)
class _Repairs:
    """Effect of single layers in the higher precision on one output.

    Every layer is tried on ONNX Runtime without corrected biases. The best `CONFIRMED` ones and the layer that deviates first are
    then written as a build writes them and run on the target; only those are returned.
    """

    model: onnx.ModelProto
    variants: PrecisionVariants
    runner: PartRunner
    output: str

    def run(self, search: LayerSearch, first: str, report: Report) -> tuple[Repair, ...]:
        relevant = search.nodes_before(self.output)
        candidates = [name for name in self.variants.layers if name in relevant]
        ranking = []
        for number, name in enumerate(candidates):
            report(0.8 * number / len(candidates), f"{name} in the higher precision")
            try:
                quick = OnnxRunner(self.variants.write([name], corrected=False))
            except BuildError:  # e.g. the only layer in the lower precision
                continue
            ranking.append((self.runner.compare_runner(OnnxRunner(self.model), self.output, quick).cosine, name))
        best = [name for _, name in sorted(ranking, key=lambda entry: -entry[0])]
        chosen = list(dict.fromkeys([*best[:CONFIRMED], *([first] if first in best else [])]))
        repairs = []
        for number, name in enumerate(chosen):
            report(0.8 + 0.2 * number / len(chosen), f"building with {name} in the higher precision")
            whole = part_of_model(self.variants.write([name]), [self.output])
            repairs.append(Repair(name, self.runner.compare(OnnxRunner(self.model), self.output, whole)))
        return tuple(sorted(repairs, key=lambda repair: -repair.difference.cosine))
