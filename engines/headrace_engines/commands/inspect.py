"""`headrace inspect`: the layers of a built engine, the ONNX nodes that each does, in which precision and in how much time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headrace.config.durable import write_durably
from headrace.config.manifest import LAYERS_FILE
from headrace.core.command_line import is_pipe
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace_engines.commands import add_model
from headrace_engines.errors import BuildError, CallError
from headrace_engines.inspection import _CPU_ROWS, EngineInspection, inspect, inspection_targets
from headrace_engines.project import Project, open_project
from headrace_engines.report.pages import layers_page, save
from headrace_engines.report.terminal import milliseconds, plain, rate
from headrace_engines.targets.base import Layer

_BAR_WIDTH = 20


# Characters of a terminal from which on there is room for bars.
_WIDE = 110


_COLOURS = {"fp32": "blue", "fp16": "cyan", "bf16": "green", "int8": "yellow", "fp8": "magenta"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `inspect`."""
    add_model(parser)
    parser.add_argument(
        "--batch", type=int, metavar="ROWS", help=f"the tuned batch if left out, on a CPU {_CPU_ROWS} at most"
    )
    parser.add_argument("--top", type=int, metavar="N", help="the N longest layers; all, in order, if left out")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a bar a layer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument(
        "--publish", action="store_true", help="lay it beside the model, where the server's page shows it"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Inspect one model.

    Raises:
        BuildError: it cannot be found, opened, run or written.
    """
    for name, value in (("--top", options.top), ("--batch", options.batch)):
        if value is not None and value < 1:
            raise CallError(f"{name} is {value}: write a number from 1 on")
    project = open_project(options.model, options.model_repository, options.version)
    inspection = inspect(project, inspection_targets(options.target), options.batch)
    show(console, inspection, options.top)
    if options.html is not None:
        save(options.html, layers_page(inspection))
        console.print(f"The page is in {options.html}.", highlight=False, soft_wrap=True, markup=False)
    text = json.dumps(inspection.to_json(), indent=2, allow_nan=False) + "\n"
    if options.json is not None:
        save(options.json, text)
    if options.publish:
        _publish(project, text)
        console.print(f"A server shows it now: {LAYERS_FILE} is beside the model.", highlight=False)
    return 0


def _publish(project: Project, text: str) -> None:
    """Put the report beside the model, whole or not at all."""
    path = project.source.parent / LAYERS_FILE
    try:
        write_durably(path, text.encode())
    except OSError as error:
        raise BuildError(f"{path}: cannot be written: {error.strerror}") from error


def show(console: Console, inspection: EngineInspection, top: int | None) -> None:
    """Print the layers, all in order or the longest first, and what they add up to."""
    layers = list(enumerate(inspection.layers, 1))
    if top is not None:
        layers = sorted(layers, key=lambda numbered: -numbered[1].time_us)[:top]
    head = f"{inspection.model} {inspection.version} on {inspection.machine_text}: {inspection.title}"
    console.print(Text(plain(head), "bold"), soft_wrap=True)
    if inspection.reason:
        cure = f"`headrace build {inspection.model}` builds an engine"
        console.print(Text(plain(f"This is the model itself: {inspection.reason}; {cure}."), "yellow"), soft_wrap=True)
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
        bar = (
            [Text("█" * round(bar_width * layer.share / longest), _COLOURS.get(layer.precision, ""))]
            if bar_width
            else []
        )
        table.add_row(str(number), *_cells(layer), *bar)
    console.print(table)
    shares = ", ".join(f"{name or 'unknown'} {share:.1%}" for name, share in inspection.shares().items())
    timing = inspection.timing
    console.print(
        f"{len(inspection.layers)} layers, {milliseconds(inspection.total_us)} under the profiler: {shares}.\n"
        f"Without it {milliseconds(timing.median_us)} an execution (p99 {milliseconds(timing.p99_us)}), "
        f"{rate(timing.rows_per_s)} rows/s.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _cells(layer: Layer) -> list[Text]:
    name = Text(plain(", ".join(layer.nodes))) if layer.nodes else Text(plain(layer.name), "dim")
    return [
        name,
        Text(plain(layer.kind)),
        Text(plain(layer.precision), _COLOURS.get(layer.precision, "")),
        Text(plain(layer.tactic)),
        Text(f"{layer.time_us:,.1f}"),
        Text(f"{layer.share:.1%}"),
    ]
