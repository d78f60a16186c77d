"""Figures of a model before and after: accuracy, multiplications, size, latency, throughput and energy of the built engines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import onnx
from headrace.runtimes.cuda.devices import Nvml

from headrace_engines.build import BuildResult, build_engine, sample_batch
from headrace_engines.commands.compare import median_timing, time_in_turns
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, copy_model, read_onnx
from headrace_engines.progress import Report, part
from headrace_engines.project import BuildSpec, Project, open_data
from headrace_engines.store import Store
from headrace_engines.targets.base import Array, BatchTiming, Engine, Target

_ENERGY_S = 1.0


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Figures of one model.

    Attributes:
        label: "before" or "after".
        macs: multiplications of one row in convolutions and products; None if a shape is unknown.
        parameters: number of floating-point weights.
        size_bytes: size of `model.onnx`.
        engine_bytes: size of the engine.
        precision: precision of the engine.
        accuracy: accuracy against labels, 0..1; None without labels.
        agreement: top-1 agreement with the original model, 0..1; None without classes.
        timings: one for each batch size.
        joules_per_row: energy of the GPU for one row at the largest batch size; None without a GPU's counter.
    """

    label: str
    macs: int | None
    parameters: int
    size_bytes: int
    engine_bytes: int
    precision: str
    accuracy: float | None
    agreement: float | None
    timings: tuple[BatchTiming, ...]
    joules_per_row: float | None


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """Model to measure.

    Attributes:
        label: "before" or "after".
        project: version of the model.
        accuracy: accuracy against labels; None without labels.
        agreement: agreement with the original model; None without classes.
    """

    label: str
    project: Project
    accuracy: float | None
    agreement: float | None


def measure_models(
    models: Sequence[MeasuredModel], spec: BuildSpec, target: Target, store: Store, seconds: float, report: Report
) -> list[ModelFigures]:
    """Build the engines of models with equal inputs, or find them in the store, and time them in turns.

    Args:
        models: the models; the first one's samples are the batches.
        spec: specification of the engines.
        target: target of the engines.
        store: store of engines.
        seconds: duration of the timing of each engine at each batch size.
        report: progress callback.

    Raises:
        BuildError: an engine cannot be built or run.
    """
    builds: dict[str, BuildResult] = {}
    for number, model in enumerate(models):
        share = part(report, 0.6 * number / len(models), 0.6 * (number + 1) / len(models))
        builds[model.label] = build_engine(model.project, spec, target, store, share)
    first = models[0].project
    data = open_data(first, spec)
    smallest, _, largest = spec.profiles[0].rows if first.batched else (1, 1, 1)
    timings: dict[str, list[BatchTiming]] = {model.label: [] for model in models}
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for label, built in builds.items():
            engines[label] = target.open(built.path)
            stack.callback(engines[label].close)
        sizes = sorted({smallest, largest})
        for index, rows in enumerate(sizes):
            share = part(report, 0.6 + 0.3 * index / len(sizes), 0.6 + 0.3 * (index + 1) / len(sizes))
            failed: dict[str, str] = {}
            batch = sample_batch(data, rows, first)
            rounds = time_in_turns(engines, batch, seconds, share, failed, rows)
            if failed:
                raise BuildError(next(iter(failed.values())))
            for label, round_timings in rounds.items():
                timings[label].append(median_timing(round_timings, rows, first.batched))
        report(0.9, "measuring energy")
        batch = sample_batch(data, largest, first)
        energies = {label: _joules_per_row(engine, batch, target) for label, engine in engines.items()}
    return [_figures(model, builds[model.label], timings[model.label], energies[model.label]) for model in models]


def _figures(
    model: MeasuredModel, built: BuildResult, timings: Sequence[BatchTiming], joules: float | None
) -> ModelFigures:
    source = read_onnx(model.project.source)
    return ModelFigures(
        model.label,
        model_macs(source),
        model_parameters(source),
        model.project.source.stat().st_size,
        built.size_bytes,
        built.spec.precision,
        model.accuracy,
        model.agreement,
        tuple(timings),
        joules,
    )


def _joules_per_row(engine: Engine, batch: Mapping[str, Array], target: Target) -> float | None:
    """Return the energy of one row by the GPU's counter, idle power included; None without one."""
    if target.name != "tensorrt":
        return None
    nvml = Nvml()
    before = _energy_j(nvml)
    started_s = time.monotonic()
    timing = engine.time(batch, _ENERGY_S)
    seconds, after = time.monotonic() - started_s, _energy_j(nvml)
    if before is None or after is None or not timing.rows_per_s:
        return None
    return (after - before) / seconds / timing.rows_per_s


def _energy_j(nvml: Nvml) -> float | None:
    readings = nvml.readings()
    return readings[0].energy_j if readings else None


# Multiplications and parameters of an ONNX model.


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
