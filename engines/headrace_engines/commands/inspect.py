"""`headrace inspect`: opens an engine and measures its layers: ONNX nodes, precision, kernel and time of each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from html import escape
from pathlib import Path

import numpy as np
import onnx
from headrace.config.files import write_durably
from headrace.config.manifest import FORMAT, LAYERS_FILE, LayerReport, MeasuredLayer, Stamp, choose_from_folder
from headrace.config.ragged_rules import is_ragged
from headrace_reports.command_line import is_pipe, plural, printable
from headrace_reports.svg_plot import colour
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace_engines.build import per_row
from headrace_engines.commands import add_model
from headrace_engines.errors import BuildError, CallError
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.project import Project, open_project, read_spec
from headrace_engines.quantization.ragged import ragged_samples
from headrace_engines.quantization.samples import random_samples
from headrace_engines.report import milliseconds, page, print_text, rate, save, table
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import Array, BatchTiming, ShapeRange, Target
from headrace_engines.targets.onnxruntime import is_rewritable, profile_unfused, rows_of

# A CPU needs seconds for the largest batches of a large model; the shares of the layers are the same from a few rows on.
_CPU_ROWS = 8
_NOISE_ROWS = 8
_TIMING_S = 0.5


def inspection_targets(name: str) -> list[Target]:
    """Return the targets whose engines are searched, in order; "auto" on a GPU machine includes its CPU.

    Raises:
        BuildError: the target is not available on this machine.
    """
    first = choose_target(name)
    if name != "auto" or first.name == "onnxruntime":
        return [first]
    return [first, choose_target("onnxruntime")]


def has_engine(project: Project, targets: Sequence[Target]) -> bool:
    """Return True if the version has an engine for this machine."""
    folder, digest = project.source.parent, project.digest()
    choices = (choose_from_folder(folder, digest, project.config, target.describe()) for target in targets)
    return any(choice.stamp is not None and choice.path is not None for choice in choices)


def inspect_source(project: Project) -> LayerReport:
    """Measure the ONNX file of a model on ONNX Runtime, whether or not there is an engine.

    A file whose optimised graph ONNX Runtime cannot write is measured node by node, with one row.

    Args:
        project: the version.

    Raises:
        BuildError: the file cannot be opened or run.
    """
    target = choose_target("onnxruntime")
    if not is_rewritable(onnx.load_model(project.source, load_external_data=False)):
        inputs = inspection_inputs(project, target, 1 if project.batched else None)
        layers = profile_unfused(project.source, inputs)
        total_us = sum(layer.time_us for layer in layers)
        rows = 1 if project.batched else rows_of(inputs)
        timing = BatchTiming(rows, total_us, total_us, rows * 1e6 / total_us if total_us else 0.0)
        return _layer_report(project, target, project.source, None, "", inputs, timing, layers)
    return _inspect(project, target, project.source, None, None)


def inspect(project: Project, targets: list[Target], rows: int | None = None) -> LayerReport:
    """Open the engine for this machine, else the model's ONNX file on ONNX Runtime, and measure its layers.

    Args:
        project: the version.
        targets: targets whose engines are searched, in order.
        rows: rows of the batch; None for the tuned batch.

    Raises:
        BuildError: no file can be opened or run.
    """
    folder = project.source.parent
    digest = project.digest()
    reasons = []
    for target in targets:
        choice = choose_from_folder(folder, digest, project.config, target.describe())
        if choice.stamp is not None and choice.path is not None:
            return _inspect(project, target, choice.path, choice.stamp, rows)
        reasons.append(choice.reason)
    return _inspect(project, choose_target("onnxruntime"), project.source, None, rows, reasons[0])


def _inspect(
    project: Project, target: Target, path: Path, stamp: Stamp | None, rows: int | None, reason: str = ""
) -> LayerReport:
    inputs = inspection_inputs(project, target, rows)
    host_code = stamp is not None and stamp.version_compatible
    with closing(target.open(path, read_onnx(project.source), host_code=host_code)) as engine:
        timing = per_row(engine.time(inputs, _TIMING_S), project)
        layers = engine.layers(inputs)
    return _layer_report(project, target, path, stamp, reason, inputs, timing, layers)


def _layer_report(
    project: Project,
    target: Target,
    path: Path,
    stamp: Stamp | None,
    reason: str,
    inputs: Mapping[str, Array],
    timing: BatchTiming,
    layers: Sequence[MeasuredLayer],
) -> LayerReport:
    return LayerReport(
        format=FORMAT,
        model=project.name,
        version=project.version,
        artefact=path.name,
        precision=stamp.precision if stamp is not None else "",
        machine=target.describe(),
        reason=reason,
        shapes={name: tuple(array.shape) for name, array in inputs.items()},
        **asdict(timing),
        total_us=sum(layer.time_us for layer in layers),
        layers=tuple(layers),
    )


def inspection_inputs(project: Project, target: Target, rows: int | None) -> dict[str, Array]:
    """Return random inputs in the tuned shapes; the time of a kernel does not depend on the values."""
    config = project.config
    try:
        profile: ShapeRange | None = read_spec(config).profiles[0]
    except BuildError:  # free dimensions without a profile become 1
        profile = None
    if is_ragged(config):
        if profile is None or rows not in (None, 1):
            reason = "--batch is for other models" if profile else "it needs optimization.profiles"
            raise CallError(f"{project.name} has ragged batches: {reason}")
        return next(iter(ragged_samples(config, 1, profile).batches(1)))
    tuned = {name: shape for name, (_, shape, _) in profile.shapes.items()} if profile else {}
    if not project.batched:
        if rows not in (None, 1):
            raise CallError(f"--batch is {rows}, but {project.name} has no batch dimension: leave --batch out")
        return next(iter(random_samples(config, 1, tuned).batches(1)))
    smallest, tuned_rows, largest = profile.rows if profile else (1, 1, config.max_batch_size)
    if rows is None:
        rows = max(smallest, min(tuned_rows, _CPU_ROWS)) if target.name == "onnxruntime" else tuned_rows
    if not smallest <= rows <= largest:
        raise CallError(
            f"--batch is {rows}, {project.name} takes {smallest} to {largest} rows: choose a number in this range"
        )
    samples = random_samples(config, min(rows, _NOISE_ROWS), {name: shape[1:] for name, shape in tuned.items()})
    batch = next(iter(samples.batches(_NOISE_ROWS)))
    return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in batch.items()}


_LAYERS_CSS = """
.sum{display:flex;height:1.6rem;border-radius:.3rem;overflow:hidden;margin:.8rem 0;background:var(--line)}
.sum span{display:block}
ol{padding:0;margin:0;list-style:none}
ol li{display:grid;grid-template:"name time""kind kind""bar bar"/minmax(0,1fr) auto;gap:.1rem .8rem;padding:.4rem 0;
border-bottom:1px solid var(--line)}
ol b,ol small{overflow-wrap:anywhere}ol b{font-weight:600}ol small{color:var(--soft)}
ol .name{grid-area:name}ol .kind{grid-area:kind}
ol .time{grid-area:time;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
ol .bar{grid-area:bar;height:.55rem;border-radius:.2rem;min-width:2px}
@media (min-width:60rem){
ol li{grid-template:"name kind time bar"/minmax(0,2fr) minmax(0,1.7fr) 9rem minmax(0,2.6fr);align-items:center;padding:.2rem 0}
ol .bar{height:1rem}}
"""


def _title(report: LayerReport) -> str:
    """Return file, precision and rows, e.g. "model.0123456789ab.onnx, int8, 8 rows"."""
    return f"{report.artefact}, {report.precision or 'as it is'}, {plural(report.rows, 'row')}"


def _shares(report: LayerReport) -> dict[str, float]:
    """Return the share of the time (0..1) of each precision, the largest first."""
    shares: dict[str, float] = {}
    for layer in report.layers:
        shares[layer.precision] = shares.get(layer.precision, 0.0) + layer.share
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def layers_page(report: LayerReport) -> str:
    """Return an HTML page of an engine's layers in the order in which they run."""
    layers = report.layers
    longest_us = max((layer.time_us for layer in layers), default=0.0) or 1.0
    title = f"{report.model} {report.version}: layers"
    body = [
        f"<h1>{escape(report.model)} <small>version {report.version}</small></h1>",
        f"<p>{escape(_title(report))}</p>",
        f"<p>{escape(str(report.machine))}</p>",
        f'<p class="soft">This is the model itself: {escape(report.reason)}.</p>' if report.reason else "",
        f"<p><b>{milliseconds(report.median_us)}</b> an execution (p99 {milliseconds(report.p99_us)}), "
        f"<b>{rate(report.rows_per_s)}</b> rows/s; {len(layers)} layers take "
        f"{milliseconds(report.total_us)} together under the profiler</p>",
        _by_precision(report),
        "<h2>Layers in order</h2><ol>",
        *(_layer(layer, longest_us) for layer in layers),
        "</ol><h2>By kind</h2>",
        _by_kind(layers),
    ]
    return page(title, "\n".join(body), _LAYERS_CSS)


def _layer(layer: MeasuredLayer, longest_us: float) -> str:
    nodes = ", ".join(layer.nodes)
    description = " · ".join(word for word in (layer.kind, layer.precision, layer.tactic) if word)
    head = f"<b>{escape(nodes)}</b>" if nodes else f'<span class="soft">{escape(layer.name)}</span>'
    name = f"<br><small>{escape(layer.name)}</small>" if nodes and nodes != layer.name else ""
    return (
        f'<li><div class="name">{head}{name}</div><small class="kind">{escape(description)}</small>'
        f'<div class="time">{layer.time_us:,.1f} us <span class="soft">{layer.share:.1%}</span></div>'
        f'<div class="bar" style="width:{100 * layer.time_us / longest_us:.2f}%;background:{colour(layer.precision)}"></div></li>'
    )


def _by_precision(report: LayerReport) -> str:
    shares = _shares(report)
    strip = "".join(
        f'<span style="width:{100 * share:.2f}%;background:{colour(name)}"></span>' for name, share in shares.items()
    )
    names = "".join(
        f'<li><span class="dot" style="background:{colour(name)}"></span>{escape(name or "unknown")} {share:.1%}</li>'
        for name, share in shares.items()
    )
    return f'<div class="sum">{strip}</div><ul class="legend">{names}</ul>'


def _by_kind(layers: Sequence[MeasuredLayer]) -> str:
    kinds: dict[str, list[MeasuredLayer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    ranked = sorted(kinds.items(), key=lambda item: -sum(layer.time_us for layer in item[1]))
    rows = []
    for kind, group in ranked:
        time_us, share = sum(layer.time_us for layer in group), sum(layer.share for layer in group)
        rows.append([escape(kind), str(len(group)), f"{time_us:,.1f}", f"{share:.1%}"])
    return table(("kind", "layers", "us", "share"), rows)


_BAR_WIDTH = 20
# Characters of a terminal from which on there is room for bars.
_WIDE = 110
_COLOURS = {"fp32": "blue", "fp16": "cyan", "bf16": "green", "int8": "yellow", "fp8": "magenta"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `inspect`."""
    add = parser.add_argument
    add_model(parser)
    add("--batch", type=int, metavar="ROWS", help=f"batch size (default: the tuned one, on a CPU at most {_CPU_ROWS})")
    add("--top", type=int, metavar="N", help="list the N longest layers (default: all, in order)")
    add("--html", type=Path, metavar="FILE", help="write an HTML page")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    add("--publish", action="store_true", help="write the report beside the model, for the server's page")


def run(options: argparse.Namespace, console: Console) -> int:
    """Inspect one model and return 0.

    Raises:
        BuildError: the model cannot be found, opened or run, or a file cannot be written.
    """
    for name, value in (("--top", options.top), ("--batch", options.batch)):
        if value is not None and value < 1:
            raise CallError(f"{name} is {value}: write a number from 1 on")
    project = open_project(options.model, options.model_repository, options.version)
    report = inspect(project, inspection_targets(options.target), options.batch)
    show(console, report, options.top)
    if options.html is not None:
        save(options.html, layers_page(report))
        print_text(console, f"The page is in {options.html}.")
    text = json.dumps(asdict(report), indent=2, allow_nan=False) + "\n"
    if options.json is not None:
        save(options.json, text)
    if options.publish:
        _publish(project, text)
        print_text(console, f"A server shows it now: {LAYERS_FILE} is beside the model.")
    return 0


def _publish(project: Project, text: str) -> None:
    """Write the report beside the model, complete or not at all."""
    path = project.source.parent / LAYERS_FILE
    try:
        write_durably(path, text.encode())
    except OSError as error:
        raise BuildError(f"{path}: cannot be written: {error.strerror}") from error


def show(console: Console, report: LayerReport, top: int | None) -> None:
    """Print the layers, all in order or the `top` longest first, and their sums."""
    layers = list(enumerate(report.layers, 1))
    if top is not None:
        layers = sorted(layers, key=lambda numbered: -numbered[1].time_us)[:top]
    head = f"{report.model} {report.version} on {report.machine}: {_title(report)}"
    print_text(console, printable(head), "bold")
    if report.reason:
        cure = f"`headrace build {report.model}` builds an engine"
        print_text(console, printable(f"This is the model itself: {report.reason}; {cure}."), "yellow")
    bar_width = _BAR_WIDTH if console.width >= _WIDE and not is_pipe(console) else 0
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("ONNX nodes", overflow="fold")
    for heading in ("kind", "precision", "tactic"):
        table.add_column(heading, overflow="fold")
    for heading in ("us", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    if bar_width:
        table.add_column("")
    longest = max((layer.share for _, layer in layers), default=0.0) or 1.0
    for number, layer in layers:
        bar = Text("█" * round(bar_width * layer.share / longest), _COLOURS.get(layer.precision, ""))
        table.add_row(str(number), *_cells(layer), *([bar] if bar_width else []))
    console.print(table)
    shares = ", ".join(f"{name or 'unknown'} {share:.1%}" for name, share in _shares(report).items())
    print_text(
        console,
        f"{len(report.layers)} layers, {milliseconds(report.total_us)} under the profiler: {shares}.\n"
        f"Without it {milliseconds(report.median_us)} an execution (p99 {milliseconds(report.p99_us)}), "
        f"{rate(report.rows_per_s)} rows/s.",
    )


def _cells(layer: MeasuredLayer) -> list[Text]:
    name = Text(printable(", ".join(layer.nodes))) if layer.nodes else Text(printable(layer.name), "dim")
    return [
        name,
        Text(printable(layer.kind)),
        Text(printable(layer.precision), _COLOURS.get(layer.precision, "")),
        Text(printable(layer.tactic)),
        Text(f"{layer.time_us:,.1f}"),
        Text(f"{layer.share:.1%}"),
    ]
