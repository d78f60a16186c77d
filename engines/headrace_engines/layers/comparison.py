"""Compares the inner tensors of a model in several precisions with the FP32 model on the same samples.

The FP32 values are those of the simplified model on ONNX Runtime, without fusions. Each engine is loaded so that its inner
tensors can be read (`Target.observe`); only tensors that its fused layers still write are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from headrace_engines.build import BuildResult, PaddedEngine
from headrace_engines.errors import BuildError
from headrace_engines.layers.differences import DifferenceSums, TensorDifference
from headrace_engines.layers.tensors import SourceLayer, source_layers
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model, read_onnx
from headrace_engines.precision.lowering import lower_model
from headrace_engines.precision.methods import EXPLICIT
from headrace_engines.progress import Report, part
from headrace_engines.project import BuildData, Project
from headrace_engines.quantization.explicit import explicit_precision, without_qdq
from headrace_engines.quantization.samples import Samples
from headrace_engines.simplify import simplify
from headrace_engines.store import Store
from headrace_engines.targets.base import ModelRunner, ObservedEngine, Target, TargetSpec

# Number of samples, and rows of a run: all tensors of a batch are in memory.
SAMPLES = 16
ROWS = 2


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One tensor.

    Attributes:
        layer: the node of the FP32 model that writes it.
        differences: differences from FP32, by precision; no entry for an engine that does not have the tensor.
    """

    layer: SourceLayer
    differences: Mapping[str, TensorDifference]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "node": self.layer.node,
            "operator": self.layer.operator,
            "tensor": self.layer.tensor,
            "shape": None if self.layer.shape is None else list(self.layer.shape),
            "differences": {name: difference.to_json() for name, difference in self.differences.items()},
        }


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """Differences of all tensors.

    Attributes:
        samples: number of compared samples.
        data: name of the samples.
        precisions: precisions of the compared engines.
        rows: one row for each tensor that at least one engine has, in the order of the graph.
        remarks: by precision, a change of the fused layers by the reading, or the reason why it was not compared.
    """

    samples: int
    data: str
    precisions: tuple[str, ...]
    rows: tuple[LayerRow, ...]
    remarks: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "samples": self.samples,
            "data": self.data,
            "precisions": list(self.precisions),
            "remarks": dict(self.remarks),
            "rows": [row.to_json() for row in self.rows],
        }


def compare_layers(
    project: Project, built: Sequence[BuildResult], target: Target, store: Store, data: BuildData, report: Report
) -> LayerComparison:
    """Compare the tensors of built engines with FP32.

    Args:
        project: the version.
        built: the engines, one for each precision.
        target: target of the engines.
        store: store of calibration tables and scratch files.
        data: samples; the first `SAMPLES` that are held out are compared.
        report: called with the progress.

    Raises:
        BuildError: the FP32 model does not run on the samples.
    """
    source = read_onnx(project.source)
    model = simplify(without_qdq(source) if explicit_precision(source) else source)
    graph = OnnxGraph(copy_model(model))
    graph.sort()
    layers = source_layers(graph)
    held_out = data.held_out.head(SAMPLES)
    results: dict[str, dict[str, TensorDifference]] = {}
    remarks: dict[str, str] = {}
    for number, engine in enumerate(built):
        share = part(report, number / len(built), (number + 1) / len(built))
        name = engine.spec.precision
        try:
            results[name], remark = _differences(project, engine, model, target, store, data, list(layers), share)
        except BuildError as error:
            remark = f"its layers cannot be compared: {error}"
        if remark:
            remarks[name] = remark
    report(1.0, "compared layers")
    rows = []
    for tensor, layer in layers.items():
        differences = {name: tensors[tensor] for name, tensors in results.items() if tensor in tensors}
        if differences:
            rows.append(LayerRow(layer, differences))
    return LayerComparison(len(held_out), data.held_out.name, tuple(results), tuple(rows), remarks)


def _differences(
    project: Project,
    built: BuildResult,
    model: onnx.ModelProto,
    target: Target,
    store: Store,
    data: BuildData,
    names: list[str],
    report: Report,
) -> tuple[dict[str, TensorDifference], str]:
    """Return the differences of one engine by tensor, and its remark."""
    source = read_onnx(project.source) if built.spec.method == EXPLICIT else model
    lowered = lowered_again(built, source, target, store, data, part(report, 0.0, 0.2))
    with store.scratch() as scratch:
        observed = target.observe(lowered, target_spec(built, store), names, Path(scratch), part(report, 0.2, 0.6))
        with closing(observed):
            runner, rows = padded(project, built, observed)
            held_out, share = data.held_out.head(SAMPLES), part(report, 0.6, 1.0)
            return observed_differences(model, observed, runner, held_out, rows, share), observed.remark


def observed_differences(
    model: onnx.ModelProto, observed: ObservedEngine, runner: ModelRunner, samples: Samples, rows: int, report: Report
) -> dict[str, TensorDifference]:
    """Return the differences of all tensors that an engine returns for every batch, by name.

    Args:
        model: FP32 model, simplified.
        observed: the engine.
        runner: runs the engine on batches of `rows` rows.
        samples: samples to compare.
        rows: rows of a batch.
        report: called after every batch.

    Raises:
        BuildError: a model does not run on the samples.
    """
    reference = OnnxRunner(model, observed.names, optimize=False)
    sums = {name: DifferenceSums() for name in observed.names}
    done = batches = 0
    for inputs in samples.batches(rows):
        count = len(next(iter(inputs.values()))) if samples.batched else 1
        expected, actual = reference.run(inputs), runner.run(inputs)
        for name, total in sums.items():
            # A padded batch of a tensor without rows in front has another shape.
            if name in actual and actual[name].shape == expected[name].shape:
                total.add(expected[name], actual[name], count)
        done, batches = done + count, batches + 1
        report(done / len(samples), f"comparing layers, {done} of {len(samples)}")
    return {name: total.result() for name, total in sums.items() if total.batches == batches}


def padded(project: Project, built: BuildResult, runner: ModelRunner) -> tuple[ModelRunner, int]:
    """Return a runner that takes batches of any size up to the returned number of rows."""
    if not project.batched:
        return runner, 1
    min_rows, max_rows = min((profile.rows[0], profile.rows[2]) for profile in built.spec.profiles)
    return PaddedEngine(runner, min_rows), min(max(ROWS, min_rows), max_rows)


def target_spec(built: BuildResult, store: Store) -> TargetSpec:
    """Return the parameters of the build of an engine."""
    return TargetSpec(
        precision=built.spec.precision,
        profiles=built.spec.profiles,
        workspace_bytes=built.spec.workspace_bytes,
        timing_cache=store.timing_cache(built.machine),
    )


def lowered_again(
    built: BuildResult, model: onnx.ModelProto, target: Target, store: Store, data: BuildData, report: Report
) -> onnx.ModelProto:
    """Return the ONNX model that an engine was built from: its own file, or the lowered model with the same layers kept.

    Raises:
        BuildError: the model cannot be lowered.
    """
    if built.path.suffix == ".onnx":
        return read_onnx(built.path)
    calibration = built.spec.calibration.model_copy(update={"keep": built.float_nodes})
    spec = replace(built.spec, calibration=calibration if built.spec.quantized else built.spec.calibration)
    no_fp8 = target.refuses_fp8_convolutions() if spec.precision == "fp8" else ""
    return lower_model(model, spec, target.name, data, store.tables, report, no_fp8).model
