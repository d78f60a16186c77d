"""`headrace inspect`: the layers of a built engine, the ONNX nodes that each does, in which precision and in how much time."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engines.arguments import add_one_model
from engines.errors import BuildError, CallError
from engines.inspection import Inspection
from engines.onnx_graph import read_onnx
from engines.project import Project, open_project
from engines.quantization.samples import random_samples
from engines.report.layers_page import layers_page
from engines.report.page import save
from engines.report.style import milliseconds, plain, rate
from engines.spec import spec_of
from engines.targets.base import Array, Layer, ShapeRange, Target
from engines.targets.choice import choose_target
from server.config.durable import write_durably
from server.config.layer_report import LAYERS_FILE
from server.config.stamps import choose_in, onnx_digest
from server.core.console import is_pipe
from server.core.errors import ConfigError

# A CPU needs seconds for the largest batches of a large model; the picture is the same from a few rows on.
_CPU_ROWS = 8
_NOISE_ROWS = 8
_TIMING_S = 0.5
_BAR_WIDTH = 20
# Characters of a terminal from which on there is room for bars.
_WIDE = 110
_COLOURS = {"fp32": "blue", "fp16": "cyan", "bf16": "green", "int8": "yellow", "fp8": "magenta"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `inspect`."""
    add_one_model(parser)
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
    inspection = inspect(project, targets_of(options.target), options.batch)
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


def targets_of(name: str) -> list[Target]:
    """Where an engine is looked for, in order; "auto" on a GPU machine means its CPU as well.

    Raises:
        BuildError: the target is not to be had.
    """
    first = choose_target(name)
    if name != "auto" or first.name == "onnxruntime":
        return [first]
    return [first, choose_target("onnxruntime")]


def inspect(project: Project, targets: list[Target], rows: int | None = None) -> Inspection:
    """Open what was built for this machine, else the model itself on ONNX Runtime, and look into it.

    Args:
        project: the version.
        targets: where engines are looked for, in order.
        rows: of the batch, None: what it is tuned for.

    Raises:
        BuildError: nothing can be opened or run.
    """
    folder = project.source.parent
    try:
        digest = onnx_digest(project.source)
    except ConfigError as error:
        raise BuildError(str(error)) from error
    reasons = []
    for target in targets:
        choice = choose_in(folder, digest, project.config, target.describe())
        if choice.stamp is not None and choice.path is not None:
            return _inspect(project, target, choice.path, choice.stamp.precision, "", rows)
        reasons.append(choice.reason)
    return _inspect(project, choose_target("onnxruntime"), project.source, "", reasons[0], rows)


def _inspect(project: Project, target: Target, path: Path, precision: str, reason: str, rows: int | None) -> Inspection:
    inputs = _inputs(project, target, rows)
    engine = target.open(path, read_onnx(project.source))
    try:
        timing = engine.time(inputs, _TIMING_S)
        layers = engine.layers(inputs)
    finally:
        engine.close()
    batched = bool(project.config.max_batch_size)
    if not batched:
        # Without a batch dimension, one execution is one row.
        timing = replace(timing, rows=1, rows_per_s=timing.rows_per_s / max(timing.rows, 1))
    return Inspection(
        model=project.name,
        version=project.version,
        artefact=path.name,
        precision=precision,
        machine=target.describe(),
        reason=reason,
        shapes={name: tuple(array.shape) for name, array in inputs.items()},
        rows=timing.rows,
        timing=timing,
        layers=layers,
    )


def _inputs(project: Project, target: Target, rows: int | None) -> dict[str, Array]:
    """Noise in the shapes that the engine is tuned for: kernels take as long on any values."""
    config = project.config
    try:
        profile: ShapeRange | None = spec_of(config).profiles[0]
    except BuildError:  # free dimensions of which nobody tells anything: they become 1
        profile = None
    tuned = {name: shape for name, (_, shape, _) in profile.shapes.items()} if profile else {}
    if not config.max_batch_size:
        if rows not in (None, 1):
            raise CallError(f"{project.name} has no batch dimension: leave --batch out")
        return next(iter(random_samples(config, 1, tuned).batches(1)))
    least, best, most = next(iter(profile.shapes.values())) if profile else ((1,), (1,), (config.max_batch_size,))
    if rows is None:
        rows = max(least[0], min(best[0], _CPU_ROWS)) if target.name == "onnxruntime" else best[0]
    if not least[0] <= rows <= most[0]:
        raise CallError(f"--batch is {rows}, {project.name} takes {least[0]} to {most[0]} rows")
    samples = random_samples(config, min(rows, _NOISE_ROWS), {name: shape[1:] for name, shape in tuned.items()})
    batch = next(iter(samples.batches(_NOISE_ROWS)))
    return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in batch.items()}


def show(console: Console, inspection: Inspection, top: int | None) -> None:
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
    shares = ", ".join(f"{name or 'not told'} {share:.1%}" for name, share in inspection.shares().items())
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
