"""`headrace compare`: compares a model in several precisions and writes a table, JSON, an HTML page and an SVG."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import onnx
from headrace.config.machine import Machine
from headrace.config.optimization_config import PRECISIONS
from headrace_reports.command_line import plural, printable
from headrace_reports.svg_plot import (
    HEIGHT,
    LEGEND_HEIGHT,
    WIDTH,
    Bar,
    PlotPoint,
    Series,
    bar_plot,
    bars_height,
    colour,
    legend,
    line_plot,
    side_by_side,
    svg,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace_engines.accuracy import Accuracy
from headrace_engines.build import BuildResult, build_engine, sample_batch
from headrace_engines.commands import add_cache, add_model
from headrace_engines.errors import BuildError, CallError, failure_text
from headrace_engines.layers.comparison import LayerComparison, compare_layers
from headrace_engines.layers.report import layers_section, show_layers
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.precision.methods import REMARKS
from headrace_engines.progress import Report, part
from headrace_engines.project import BuildSpec, Project, open_data, open_project, read_spec
from headrace_engines.report import (
    BuildDisplay,
    finite,
    make_folder,
    milliseconds,
    page,
    print_text,
    rate,
    save,
    save_json,
    size,
    table,
)
from headrace_engines.store import Store
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import Array, BatchTiming, Engine, Target

FORMAT = 1
# Clock rate, temperature and other load change during a measurement; rounds spread these effects over all precisions.
ROUNDS = 5
# Precisions that are compared by default; FP8 only if the target supports it.
DEFAULT_PRECISIONS = ("fp32", "fp16", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """Result for one precision.

    Attributes:
        precision: one of `PRECISIONS`.
        reason: reason why it was not measured; "" if it was.
        built: the artefact; None if there is a reason.
        memory_bytes: memory of the loaded engine; None if it could not be measured.
        timings: one for each batch size.
        remark: property of the precision on this machine, shown to users; "" without any.
    """

    precision: str
    reason: str = ""
    built: BuildResult | None = None
    memory_bytes: int | None = None
    timings: tuple[BatchTiming, ...] = ()
    remark: str = ""

    @property
    def accuracy(self) -> Accuracy | None:
        """Accuracy against the FP32 model; None without a measurement."""
        return self.built.accuracy if self.built is not None else None

    def at(self, rows: int) -> BatchTiming | None:
        """Return the timing of a batch size; None without one."""
        return next((timing for timing in self.timings if timing.rows == rows), None)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; unknown values are None."""
        built, accuracy = self.built, self.accuracy
        return {
            "precision": self.precision,
            "worked": built is not None,
            "reason": self.reason,
            "remark": self.remark,
            "accuracy": finite(accuracy.to_json() | {"drop": accuracy.drop}) if accuracy is not None else None,
            "refusal": list(built.refusal) if built else [],
            "kept": list(built.float_nodes) if built else [],
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
        model: name of the model.
        version: number of the version.
        machine: machine of the measurement.
        data: name and number of the samples for the accuracy.
        sizes: batch sizes, ascending.
        seconds: timing duration of each precision at each batch size.
        rows: one row for each precision, in the requested order.
        layers: comparison of the inner tensors; None without `--layers`.
    """

    model: str
    version: int
    machine: Machine
    data: str
    sizes: tuple[int, ...]
    seconds: float
    rows: tuple[ComparisonRow, ...]
    layers: LayerComparison | None = None

    @property
    def worked(self) -> list[ComparisonRow]:
        """Rows of the measured precisions."""
        return [row for row in self.rows if row.built is not None]

    def speed_up(self, row: ComparisonRow, rows: int) -> float | None:
        """Return the throughput relative to FP32 at a batch size; None if either is missing."""
        base = next((candidate.at(rows) for candidate in self.rows if candidate.precision == "fp32"), None)
        mine = row.at(rows)
        return mine.rows_per_s / base.rows_per_s if base is not None and mine is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with times in microseconds, sizes in bytes and shares from 0 to 1."""
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
        } | ({} if self.layers is None else {"layers": self.layers.to_json()})


def compare(
    project: Project,
    target: Target,
    store: Store,
    precisions: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    reports: Callable[[str], Report],
    *,
    with_layers: bool = False,
) -> Comparison:
    """Build a model in several precisions or find them in the store, then time them in turns in this process.

    An unsupported or failed precision is a row with a reason. Nothing is published.

    Args:
        project: the version.
        target: target to build for.
        store: store of artefacts.
        precisions: precisions, in order.
        sizes: batch sizes, ascending, within the profiles.
        seconds: timing duration of each precision at each batch size.
        reports: returns the progress callback of a build by its precision, of the timing by "timing", and by "layers".
        with_layers: also compare the inner tensors with those of FP32.

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
            row = _build(project, spec.at(precision), target, store, reports(precision), source)
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
        rows = _measure(rows, engines, batches, project.batched, seconds, reports)
    layers = None
    if with_layers:
        engines_built = [row.built for row in rows if row.built is not None]
        layers = compare_layers(project, engines_built, target, store, data, reports("layers"))
    data_origin = next((row.accuracy.data for row in rows if row.accuracy is not None), "")
    machine = target.describe()
    return Comparison(project.name, project.version, machine, data_origin, tuple(sizes), seconds, tuple(rows), layers)


def _build(
    project: Project, spec: BuildSpec, target: Target, store: Store, report: Report, source: onnx.ModelProto
) -> ComparisonRow:
    refused = target.refuses(spec.precision)
    if refused:
        report(1.0, "refused")
        return ComparisonRow(spec.precision, refused)
    try:
        built = build_engine(project, spec, target, store, report)
    except (MemoryError, OSError, BuildError) as error:
        report(1.0, "failed")
        return ComparisonRow(spec.precision, failure_text(error))
    report(1.0, "from the store" if built.cached else "built")
    remarks = list(built.refusal)
    remarks += [REMARKS[built.spec.method]] if built.spec.method else []
    if spec.precision == "fp8" and any(node.op_type == "Conv" for node in source.graph.node):
        refused = target.refuses_fp8_convolutions()
        remarks += [f"convolutions run in fp16: {refused}"] if refused else []
    if target.name == "onnxruntime" and spec.precision == "fp16":
        from headrace_engines.targets.onnxruntime import FP16_REMARK

        remarks.append(FP16_REMARK)
    return ComparisonRow(spec.precision, built=built, remark="; ".join(remarks))


def _measure(
    rows: list[ComparisonRow],
    engines: dict[str, Engine],
    batches: Mapping[int, dict[str, Array]],
    batched: bool,
    seconds: float,
    reports: Callable[[str], Report],
) -> list[ComparisonRow]:
    """Return the rows with times and memory; an engine that fails becomes a row with a reason."""
    timing = reports("timing")
    by_precision: dict[str, list[BatchTiming]] = {precision: [] for precision in engines}
    failed: dict[str, str] = {}
    for number, (batch_size, inputs) in enumerate(batches.items()):
        report = part(timing, number / len(batches), (number + 1) / len(batches))
        alive = {precision: engine for precision, engine in engines.items() if precision not in failed}
        for precision, rounds in time_in_turns(alive, inputs, seconds, report, failed, batch_size).items():
            by_precision[precision].append(median_timing(rounds, batch_size, batched))
    timing(1.0, "timed")
    measured = []
    for row in rows:
        if row.precision in failed:
            measured.append(ComparisonRow(row.precision, failed[row.precision]))
        elif row.precision in engines:
            row = replace(row, timings=tuple(by_precision[row.precision]))
            try:
                measured.append(replace(row, memory_bytes=engines[row.precision].memory_bytes))
            except BuildError as error:
                measured.append(replace(row, remark="; ".join(filter(None, (row.remark, str(error))))))
        else:
            measured.append(row)
    return measured


def time_in_turns(
    engines: Mapping[str, Engine],
    inputs: dict[str, Array],
    seconds: float,
    report: Report,
    failed: dict[str, str],
    size: int,
) -> dict[str, list[BatchTiming]]:
    """Time engines on a batch in `ROUNDS` rounds.

    Args:
        engines: engines by name.
        inputs: the batch.
        seconds: duration for each engine, over all rounds.
        report: progress callback.
        failed: gets the reason for each engine that fails, by name.
        size: rows of the batch, for messages.

    Returns:
        The timings of each round, by name, without failed engines.
    """
    rounds: dict[str, list[BatchTiming]] = {precision: [] for precision in engines}
    order = list(engines)
    for turn in range(ROUNDS):
        # The first engine of a round runs with the caches of the last one, so each engine is first in one of the rounds.
        first = turn % max(len(order), 1)
        for index, precision in enumerate(order[first:] + order[:first]):
            if precision in failed:
                continue
            report((turn + index / len(order)) / ROUNDS, f"{precision}, {plural(size, 'row')}")
            try:
                rounds[precision].append(engines[precision].time(inputs, seconds / ROUNDS))
            except (BuildError, MemoryError) as error:
                failed[precision] = f"{size} rows cannot be run: {error or 'there is not enough memory'}"
    return {precision: timings for precision, timings in rounds.items() if precision not in failed}


def median_timing(rounds: list[BatchTiming], size: int, batched: bool) -> BatchTiming:
    """Return the median over the rounds of each figure; one slow round has no effect."""
    # Without a batch dimension one execution is one row, whatever the first dimension.
    per_row = 1 if batched else max(rounds[0].rows, 1)
    return BatchTiming(
        rows=size,
        median_us=median(timing.median_us for timing in rounds),
        p99_us=median(timing.p99_us for timing in rounds),
        rows_per_s=median(timing.rows_per_s for timing in rounds) / per_row,
    )


def default_sizes(project: Project, spec: BuildSpec) -> list[int]:
    """Return batch sizes from the smallest to the largest of the first profile, in factors of four, or of two up to 16."""
    if not project.batched:
        return [1]
    smallest, _, largest = spec.profiles[0].rows
    factor = 2 if largest <= 16 * smallest else 4
    sizes, size = {smallest, largest}, smallest
    while size < largest:
        sizes.add(size)
        size *= factor
    return sorted(sizes)


def comparison_page(comparison: Comparison) -> str:
    """Return an HTML page with three plots and two tables, and with a plot and a table of the layers if they were compared."""
    names = [row.precision for row in comparison.worked]
    throughput, latency, accuracy = _panels(comparison)
    lines = [comparison_cells(row) for row in comparison.worked]
    columns = filled_columns(lines)
    label = f"{comparison.model} by precision: "
    body = [
        f"<h1>{escape(comparison.model)} <small>version {comparison.version}, precisions compared</small></h1>",
        f"<p>{escape(str(comparison.machine))}</p>",
        f'<p class="soft">Timed in turns in one process, {comparison.seconds:g} s each; medians over rounds.'
        + (f" Accuracy on {escape(comparison.data)}." if comparison.data else "")
        + "</p>",
        f'<div class="key">{svg(legend(names), WIDTH, LEGEND_HEIGHT, label + "legend")}</div>',
        '<div class="plots">',
        svg(throughput, WIDTH, HEIGHT, label + "throughput"),
        svg(latency, WIDTH, HEIGHT, label + "latency"),
        svg(accuracy[0], WIDTH, accuracy[1], label + "accuracy"),
        "</div><h2>Accuracy and size</h2>",
        table(
            [HEADINGS[column] for column in columns], [[escape(cells[column]) for column in columns] for cells in lines]
        ),
        *(
            f"<p><small><b>{escape(row.precision)}</b> {escape(columns)}</small></p>"
            for row, columns in _remarks(comparison)
        ),
        "<h2>Speed</h2>",
        table(
            SPEED_HEADINGS, [_speed_cells(comparison, row, n) for row in comparison.worked for n in comparison.sizes]
        ),
        *([] if comparison.layers is None else [layers_section(comparison.layers)]),
    ]
    return page(f"{comparison.model}: precisions compared", "\n".join(body), ".key{max-width:28rem}")


def comparison_picture(comparison: Comparison) -> str:
    """Return an SVG with the three plots side by side, for documents."""
    throughput, latency, accuracy = _panels(comparison)
    title = f"{comparison.model} on {comparison.machine}"
    names = [row.precision for row in comparison.worked]
    return side_by_side([(throughput, HEIGHT), (latency, HEIGHT), accuracy], names, title)


HEADINGS = ("precision", "top-1", "cosine", "accuracy", "kept", "size", "memory", "built", "remark")
SPEED_HEADINGS = ("precision", "batch", "median", "p99", "rows/s", "against fp32")


def comparison_cells(row: ComparisonRow) -> list[str]:
    """Return the properties of one precision as plain text under `HEADINGS`."""
    built, accuracy = row.built, row.accuracy
    if built is None:
        return [row.precision, *[""] * (len(HEADINGS) - 2), f"not measured: {row.reason}"]
    agreement = accuracy.top1_agreement if accuracy else None
    true = accuracy.accuracy if accuracy else None
    drop = accuracy.drop if accuracy else None
    points = "" if drop is None or abs(drop) < 0.0005 else f" ({-100 * drop:+.1f})"
    return [
        row.precision,
        "" if agreement is None else f"{agreement:.1%}",
        "" if accuracy is None else f"{accuracy.cosine:.5f}",
        "" if true is None else f"{true:.1%}{points}",
        str(len(built.float_nodes)) if built.float_nodes else "",
        size(built.size_bytes),
        "" if row.memory_bytes is None else size(row.memory_bytes),
        f"{built.seconds:.1f} s",
        row.remark,
    ]


def filled_columns(lines: list[list[str]]) -> list[int]:
    """Return the columns of `comparison_cells` in which a row has text, without remarks."""
    return [column for column in range(len(HEADINGS) - 1) if any(line[column] for line in lines)]


def speed_cells(comparison: Comparison, row: ComparisonRow, rows: int) -> list[str]:
    """Return the times of one precision at a batch size as plain text under `SPEED_HEADINGS`."""
    timing, times = row.at(rows), comparison.speed_up(row, rows)
    if timing is None:
        return [row.precision, str(rows), "", "", "", ""]
    return [
        row.precision,
        str(rows),
        milliseconds(timing.median_us),
        milliseconds(timing.p99_us),
        rate(timing.rows_per_s),
        "" if times is None else f"x {times:.2f}",
    ]


def _remarks(comparison: Comparison) -> list[tuple[ComparisonRow, str]]:
    return [(row, remark) for row in comparison.rows if (remark := comparison_cells(row)[-1])]


def _panels(comparison: Comparison) -> tuple[str, str, tuple[str, int]]:
    worked = comparison.worked
    throughput = [Series(r.precision, [PlotPoint(t.rows, t.rows_per_s) for t in r.timings]) for r in worked]
    latency = [
        Series(r.precision, [PlotPoint(t.rows, t.median_us / 1e3, t.p99_us / 1e3) for t in r.timings]) for r in worked
    ]
    bars = _accuracy_bars(worked)
    return (
        line_plot("Throughput", throughput, "rows a batch", "rows/s"),
        line_plot("Latency: median, and up to p99", latency, "rows a batch", "ms", log_y=True),
        (bar_plot("Accuracy", bars), bars_height(len(bars))),
    )


def _accuracy_bars(rows: list[ComparisonRow]) -> list[Bar]:
    bars = []
    for row in rows:
        accuracy = row.accuracy
        if accuracy is None:
            continue
        if accuracy.top1_agreement is not None:
            agreement = accuracy.top1_agreement
            bars.append(Bar(row.precision, f"{row.precision} same as FP32", agreement, f"{agreement:.1%}"))
        else:
            bars.append(Bar(row.precision, f"{row.precision} cosine", accuracy.cosine, f"{accuracy.cosine:.4f}"))
        if accuracy.accuracy is not None:
            bars.append(Bar(row.precision, f"{row.precision} correct", accuracy.accuracy, f"{accuracy.accuracy:.1%}"))
    return bars


def _speed_cells(comparison: Comparison, row: ComparisonRow, rows: int) -> list[str]:
    name, *others = (escape(cell) for cell in speed_cells(comparison, row, rows))
    return [f'<span class="dot" style="background:{colour(row.precision)}"></span>{name}', *others]


_COMPARABLE = tuple(precision for precision in PRECISIONS if precision != "best")
# INT8 of TensorRT 10's own calibrator, removed from Headrace.
_CALIBRATOR = "int8-tensorrt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `compare`."""
    add = parser.add_argument
    add_model(parser)
    add_cache(parser)
    text = f"precisions, of {', '.join(_COMPARABLE)} (default: {', '.join(DEFAULT_PRECISIONS)}, if supported)"
    add("--precisions", metavar="P,P", help=text)
    add("--batch", metavar="N,N", help="batch sizes (default: from 1 to the largest)")
    add("--seconds", type=float, default=2.0, metavar="S", help="timing of each precision at each batch size (2)")
    text = "also compare the tensors between the layers with those of FP32: cosine, largest and mean error"
    add("--layers", action="store_true", help=text)
    add("--output", type=Path, metavar="DIR", help="write compare.json, compare.html and compare.svg here")


def run(options: argparse.Namespace, console: Console) -> int:
    """Compare one model; return 0 if FP32 (or the first precision, without FP32) was measured, else 1.

    Raises:
        BuildError: the model or the options are invalid, or the files cannot be written.
    """
    if not 0 < options.seconds <= 3600:
        raise CallError(f"--seconds is {options.seconds:g}: write a number above 0, 3600 at most")
    project = open_project(options.model, options.model_repository, options.version)
    sizes = _sizes(options.batch, project)
    target = choose_target(options.target)
    precisions = _precisions(options.precisions, target)
    if options.output is not None:
        # A measurement takes minutes: check the output folder before it.
        make_folder(options.output)
    with BuildDisplay(console, [*precisions, "timing", *(["layers"] if options.layers else [])]) as display:
        store = Store(options.cache)
        comparison = compare(
            project,
            target,
            store,
            precisions,
            sizes,
            options.seconds,
            display.report,
            with_layers=options.layers,
        )
    show(console, comparison)
    if options.output is not None:
        write(comparison, options.output)
        print_text(console, f"compare.json, compare.html and compare.svg are in {options.output}.")
    base = next((row for row in comparison.rows if row.precision == "fp32"), comparison.rows[0])
    return 0 if base.built is not None else 1


def write(comparison: Comparison, folder: Path) -> None:
    """Write compare.json, compare.html and compare.svg.

    Raises:
        BuildError: a file cannot be written.
    """
    save_json(folder / "compare.json", comparison.to_json())
    save(folder / "compare.html", comparison_page(comparison))
    save(folder / "compare.svg", comparison_picture(comparison) + "\n")


def show(console: Console, comparison: Comparison) -> None:
    """Print a table of the precisions and a table of their speed."""
    print_text(console, printable(f"{comparison.model} {comparison.version} on {comparison.machine}"), "bold")
    cells = [comparison_cells(row) for row in comparison.worked]
    columns = filled_columns(cells)
    properties = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        properties.add_column(HEADINGS[column], justify="right" if column else "left", no_wrap=True)
    for line in cells:
        properties.add_row(*(Text(line[column]) for column in columns))
    if properties.row_count:
        console.print(properties)
    speed = Table(*SPEED_HEADINGS[:1], box=SIMPLE_HEAD, pad_edge=False)
    for heading in SPEED_HEADINGS[1:]:
        speed.add_column(heading, justify="right")
    for row in comparison.worked:
        for number, rows in enumerate(comparison.sizes):
            last = number == len(comparison.sizes) - 1
            speed.add_row(*map(Text, speed_cells(comparison, row, rows)), end_section=last)
    if speed.row_count:
        console.print(speed)
    for row, remark in _remarks(comparison):
        print_text(console, f"{row.precision}: {printable(remark)}")
    if comparison.layers is not None:
        show_layers(console, comparison.layers)


def _precisions(option: str | None, target: Target) -> list[str]:
    if option is None:
        return [precision for precision in DEFAULT_PRECISIONS if precision != "fp8" or not target.refuses(precision)]
    names = list(dict.fromkeys(word.strip().lower() for word in option.split(",") if word.strip()))
    if _CALIBRATOR in names:
        raise CallError(
            f"--precisions has {_CALIBRATOR}, TensorRT 10's own calibrator, which is no longer used: write int8 in its place"
        )
    unknown = [name for name in names if name not in _COMPARABLE]
    if unknown or not names:
        raise CallError(f"--precisions is '{option}': write some of {','.join(_COMPARABLE)}")
    return names


def _sizes(option: str | None, project: Project) -> list[int]:
    spec = read_spec(project.config)
    if option is None:
        return default_sizes(project, spec)
    words = [word.strip() for word in option.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise CallError(f"--batch is '{option}': write batch sizes from 1 on, e.g. 1,8,32")
    sizes = sorted({int(word) for word in words})
    if not project.batched:
        if sizes != [1]:
            raise CallError(f"{project.name} has no batch dimension: leave --batch out")
        return sizes
    smallest, _, largest = spec.profiles[0].rows
    if sizes[0] < smallest or sizes[-1] > largest:
        cure = "raise max_batch_size or the profile's batch" if sizes[-1] > largest else "lower the profile's batch"
        raise CallError(f"--batch is {option}, engines of {project.name} take {smallest} to {largest} rows: {cure}")
    return sizes
