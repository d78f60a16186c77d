"""A model in several precisions side by side: building them, timing them in turns, and what was found, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import onnx
from headrace.config.manifest import Machine

from headrace_engines.accuracy import Accuracy
from headrace_engines.build import BuildResult, build_engine, sample_batch
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.progress import Report, part, silent
from headrace_engines.project import BuildSpec, Project, open_data, read_spec
from headrace_engines.store import Store
from headrace_engines.targets.base import Array, BatchTiming, Engine, Target

FORMAT = 1


# A machine's clock, its heat and its neighbours change while it is measured; rounds spread that over all precisions.
ROUNDS = 5


# Precisions that are compared by default; those that the machine refuses are left out.
DEFAULT_PRECISIONS = ("fp32", "fp16", "int8", "fp8")


Maker = Callable[[Project, BuildSpec, Target, Store, Report], BuildResult]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One precision.

    Attributes:
        precision: its word, as `BuildSpec.at` takes it.
        reason: why it was not measured, "" if it was.
        built: the artefact, None where there is a reason.
        memory_bytes: that the engine holds, None where it could not be measured.
        timings: by batch size.
        remark: a property of it on this machine that users should see.
    """

    precision: str
    reason: str = ""
    built: BuildResult | None = None
    memory_bytes: int | None = None
    timings: tuple[BatchTiming, ...] = ()
    remark: str = ""

    @property
    def accuracy(self) -> Accuracy | None:
        """Against the FP32 model, None where nothing was measured."""
        return self.built.accuracy if self.built is not None else None

    def at(self, rows: int) -> BatchTiming | None:
        """The timing of a batch size."""
        return next((timing for timing in self.timings if timing.rows == rows), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is not known is None."""
        built, accuracy = self.built, self.accuracy
        return {
            "precision": self.precision,
            "worked": built is not None,
            "reason": self.reason,
            "remark": self.remark,
            "accuracy": _without_nonfinite(accuracy.to_json() | {"drop": accuracy.drop})
            if accuracy is not None
            else None,
            "refusal": list(built.refusal) if built else [],
            "kept": list(built.kept) if built else [],
            "size_bytes": built.size_bytes if built else None,
            "memory_bytes": self.memory_bytes,
            "build_seconds": built.seconds if built else None,
            "cached": built.cached if built else None,
            "key": built.key if built else None,
            "timings": [asdict(timing) for timing in self.timings],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        model: its name.
        version: its number.
        machine: that everything was measured on.
        data: name and number of the samples for the accuracy.
        sizes: the batch sizes, ascending.
        seconds: that each precision was timed at each batch size.
        rows: by precision, in the requested order.
    """

    model: str
    version: int
    machine: Machine
    data: str
    sizes: tuple[int, ...]
    seconds: float
    rows: tuple[ComparisonRow, ...]

    @property
    def worked(self) -> list[ComparisonRow]:
        """The rows that could be measured."""
        return [row for row in self.rows if row.built is not None]

    def speed_up(self, row: ComparisonRow, rows: int) -> float | None:
        """Throughput against FP32 at a batch size, None where either is missing."""
        base = next((one.at(rows) for one in self.rows if one.precision == "fp32"), None)
        mine = row.at(rows)
        return mine.rows_per_s / base.rows_per_s if base is not None and mine is not None else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in microseconds, sizes in bytes, shares from 0 to 1."""
        return {
            "format": FORMAT,
            "model": self.model,
            "version": self.version,
            "machine": asdict(self.machine),
            "data": self.data,
            "batch_sizes": list(self.sizes),
            "seconds": self.seconds,
            "rounds": ROUNDS,
            "rows": [row.to_json() for row in self.rows],
        }


def compare(
    project: Project,
    target: Target,
    store: Store,
    precisions: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    reports: Mapping[str, Report],
    maker: Maker = build_engine,
) -> Comparison:
    """Build a model in several precisions (or find them in the store), then time them in turns in this process.

    What a machine refuses or what fails is a row with its reason. Nothing is published.

    Args:
        project: the version.
        target: for what.
        store: of artefacts.
        precisions: in order.
        sizes: batch sizes, ascending; each is one that the profiles take.
        seconds: to time each precision at each batch size.
        reports: by precision, called with the progress of its build; "timing" for the rest.
        maker: builds one.

    Raises:
        BuildError: the samples cannot be read.
    """
    spec = read_spec(project.config)
    rows: list[ComparisonRow] = []
    source = read_onnx(project.source)
    data = open_data(project, spec.at("fp32"))
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for precision in precisions:
            row = _build(project, spec.at(precision), target, store, reports.get(precision, silent), maker)
            row = replace(row, precision=precision, remark=_with_convolutions(row, source, target))
            if row.built is not None:
                try:
                    engine = target.open(row.built.path, source)
                except BuildError as error:
                    row = replace(row, reason=str(error), built=None)
                else:
                    stack.callback(engine.close)
                    engines[precision] = engine
            rows.append(row)
        batches = {size: sample_batch(data, size, project) for size in sizes}
        rows = _measure(rows, engines, batches, bool(project.config.max_batch_size), seconds, reports)
    data_origin = next((row.accuracy.data for row in rows if row.accuracy is not None), "")
    return Comparison(project.name, project.version, target.describe(), data_origin, tuple(sizes), seconds, tuple(rows))


def _build(
    project: Project, spec: BuildSpec, target: Target, store: Store, report: Report, maker: Maker
) -> ComparisonRow:
    refused = target.refuses(spec.precision)
    if refused:
        report(1.0, "refused")
        return ComparisonRow(spec.precision, refused)
    try:
        built = maker(project, spec, target, store, report)
    except MemoryError:
        return _failed(spec, report, "there is not enough memory: close other programs, or use fewer samples")
    except OSError as error:
        return _failed(spec, report, f"{error.strerror or error}: make room, or check the permissions")
    except BuildError as error:
        return _failed(spec, report, str(error))
    report(1.0, "from the store" if built.cached else "built")
    remarks = list(built.refusal)
    if target.name == "onnxruntime" and spec.precision == "fp16":
        from headrace_engines.targets.onnxruntime import FP16_REMARK

        remarks.append(FP16_REMARK)
    return ComparisonRow(spec.precision, built=built, remark="; ".join(remarks))


def _with_convolutions(row: ComparisonRow, source: onnx.ModelProto, target: Target) -> str:
    """The remark of a row, and where its convolutions are not FP8, that they are not."""
    if row.precision != "fp8" or row.built is None or all(node.op_type != "Conv" for node in source.graph.node):
        return row.remark
    refused = target.refuses_fp8_convolutions()
    return "; ".join(filter(None, (row.remark, refused and f"convolutions run in fp16: {refused}")))


def _failed(spec: BuildSpec, report: Report, reason: str) -> ComparisonRow:
    report(1.0, "failed")
    return ComparisonRow(spec.precision, reason)


def _measure(
    rows: list[ComparisonRow],
    engines: dict[str, Engine],
    batches: Mapping[int, dict[str, Array]],
    batched: bool,
    seconds: float,
    reports: Mapping[str, Report],
) -> list[ComparisonRow]:
    """Times, then memory, of each engine that still works; one that fails becomes its row's reason."""
    timing = reports.get("timing", silent)
    by_precision: dict[str, list[BatchTiming]] = {precision: [] for precision in engines}
    failed: dict[str, str] = {}
    for number, (size, inputs) in enumerate(batches.items()):
        report = part(timing, number / len(batches), (number + 1) / len(batches))
        alive = {precision: engine for precision, engine in engines.items() if precision not in failed}
        for precision, rounds in _interleaved(alive, inputs, seconds, report, failed, size).items():
            by_precision[precision].append(_median_timing(rounds, size, batched))
    timing(1.0, "timed")
    measured = []
    for row in rows:
        if row.precision in failed:
            measured.append(ComparisonRow(row.precision, failed[row.precision]))
        elif row.precision in engines:
            memory_bytes, remark = _memory(engines[row.precision], row.remark)
            timings = tuple(by_precision[row.precision])
            measured.append(replace(row, timings=timings, memory_bytes=memory_bytes, remark=remark))
        else:
            measured.append(row)
    return measured


def _interleaved(
    engines: Mapping[str, Engine],
    inputs: dict[str, Array],
    seconds: float,
    report: Report,
    failed: dict[str, str],
    size: int,
) -> dict[str, list[BatchTiming]]:
    rounds: dict[str, list[BatchTiming]] = {precision: [] for precision in engines}
    order = list(engines)
    for turn in range(ROUNDS):
        # The first engine of a round runs with the caches of the last one: each engine is first once.
        first = turn % max(len(order), 1)
        for index, precision in enumerate(order[first:] + order[:first]):
            if precision in failed:
                continue
            report((turn + index / len(order)) / ROUNDS, f"{precision}, {size} row{'s' * (size > 1)}")
            try:
                rounds[precision].append(engines[precision].time(inputs, seconds / ROUNDS))
            except (BuildError, MemoryError) as error:
                failed[precision] = f"{size} rows cannot be run: {error or 'there is not enough memory'}"
    return {precision: timings for precision, timings in rounds.items() if precision not in failed}


def _median_timing(rounds: list[BatchTiming], size: int, batched: bool) -> BatchTiming:
    """The median round of each figure: one bad round does not show."""
    # Without a batch dimension one execution is one row; the first dimension does not count.
    per_row = 1 if batched else max(rounds[0].rows, 1)
    return BatchTiming(
        rows=size,
        median_us=median(timing.median_us for timing in rounds),
        p99_us=median(timing.p99_us for timing in rounds),
        rows_per_s=median(timing.rows_per_s for timing in rounds) / per_row,
    )


def _memory(engine: Engine, remark: str) -> tuple[int | None, str]:
    try:
        return engine.memory_bytes, remark
    except BuildError as error:
        return None, "; ".join(filter(None, (remark, str(error))))


def _without_nonfinite(document: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in document.items()}


def default_sizes(project: Project, spec: BuildSpec) -> list[int]:
    """Return batch sizes from the smallest to the largest of the first profile, in factors of four, or of two if few."""
    if not project.config.max_batch_size:
        return [1]
    smallest, _, largest = next(iter(spec.profiles[0].shapes.values()))
    factor = 2 if largest[0] <= 16 * smallest[0] else 4
    sizes, size = {smallest[0], largest[0]}, smallest[0]
    while size < largest[0]:
        sizes.add(size)
        size *= factor
    return sorted(sizes)
