"""`headrace split`: cuts an ONNX model into parts of equal time, each on its own GPU, and writes the pipeline that joins them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from headrace.config.manifest import LayerReport
from headrace.runtimes.cuda import devices
from headrace_reports.command_line import is_pipe, pickup_text, plural, printable
from rich.console import Console
from rich.text import Text

from headrace_engines.commands import add_model
from headrace_engines.commands.inspect import has_engine, inspect, inspect_source, inspection_inputs, inspection_targets
from headrace_engines.errors import CallError
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.project import SOURCE, Project, open_project
from headrace_engines.report import BuildDisplay, Heading, milliseconds, narrow_table, print_text, save_json, size
from headrace_engines.split.models import SplitModel, is_coarse, prove, split_model
from headrace_engines.split.part_writer import PublishedSplit, check_config, staged_split
from headrace_engines.targets import choose_target

_MAX_PARTS = 16
_BAR_WIDTH = 24
# Rows of the proof: more than one, so that a tensor without its batch would be noticed.
_PROOF_ROWS = 2
# The longest part in relation to the mean of all, from which on the split is said to be unbalanced.
_UNBALANCED = 1.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `split`."""
    add_model(parser)
    parser.add_argument("--parts", type=int, default=2, metavar="N", help="number of parts (2)")
    text = "GPU of each part, e.g. 0,1; none: parts on the CPU (default: the machine's GPUs in turn, else the CPU)"
    parser.add_argument("--gpus", metavar="LIST", help=text)
    parser.add_argument(
        "--batch", type=int, metavar="ROWS", help="batch size that is measured (default: the tuned one)"
    )
    text = "how much longer than necessary the longest part may be, in percent, where fewer bytes cross then (5)"
    parser.add_argument("--slack", type=float, default=5.0, metavar="P", help=text)
    parser.add_argument("--replace", action="store_true", help="replace parts and pipeline of an earlier split")
    text = "do not run the whole and the parts to compare their outputs"
    parser.add_argument("--no-check", action="store_true", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")


def run(options: argparse.Namespace, console: Console) -> int:
    """Split one model, print the parts, and return 0.

    Raises:
        BuildError: the model cannot be split or measured, or the repository cannot be written.
    """
    _check_options(options)
    project = open_project(options.model, options.model_repository, options.version)
    check_config(project)
    gpus = _gpus(options)
    with BuildDisplay(console, [project.name]) as display:
        report = display.report(project.name)
        report(0.0, "measures the layers")
        layers = _measure(project, options)
        report(0.5, "cuts the graph")
        inputs = inspection_inputs(project, choose_target("onnxruntime"), None)
        split = split_model(
            read_onnx(project.source),
            layers,
            inputs,
            parts=options.parts,
            slack=options.slack / 100,
            batched=project.batched,
        )
        report(0.6, "writes the parts")
        repository = project.folder.path.parent
        with staged_split(project, split, repository, gpus, replace=options.replace) as (stage, published):
            if not options.no_check:
                report(0.7, "compares the parts with the whole")
                files = [stage / name / "1" / SOURCE for name in published.parts]
                if project.batched:
                    inputs = {name: np.resize(array, (_PROOF_ROWS, *array.shape[1:])) for name, array in inputs.items()}
                prove(project.source, files, inputs)
        display.finish(project.name, "split")
    result = _Result(project, layers, split, published, gpus, is_checked=not options.no_check)
    show(console, result)
    if options.json is not None:
        save_json(options.json, document(result))
    print_text(console, pickup_text(published.pipeline, str(repository)))
    return 0


@dataclass(frozen=True, slots=True)
class _Result:
    """A finished split."""

    project: Project  # the whole
    layers: LayerReport  # its measured layers
    split: SplitModel  # its parts
    published: PublishedSplit  # their folders
    gpus: tuple[int, ...]  # GPU of each part; empty for parts on the CPU
    is_checked: bool  # the outputs were compared

    @property
    def rows(self) -> int:
        """Rows of the measured batch; 1 for a model without batches."""
        return self.layers.rows if self.project.batched else 1

    def device(self, part: int) -> str:
        """Return the device of a part, e.g. "GPU 1"."""
        return f"GPU {self.gpus[part]}" if self.gpus else "CPU"


def _check_options(options: argparse.Namespace) -> None:
    if not 2 <= options.parts <= _MAX_PARTS:
        raise CallError(f"--parts is {options.parts}: write a number from 2 to {_MAX_PARTS}")
    if options.batch is not None and options.batch < 1:
        raise CallError(f"--batch is {options.batch}: write a number from 1 on")
    if not 0 <= options.slack <= 100:
        raise CallError(f"--slack is {options.slack:g}: write percent, from 0 to 100")


def _gpus(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the GPU of each part; empty for parts on the CPU."""
    if options.gpus is None:
        count = 0 if options.target == "onnxruntime" else devices.count()
        return tuple(part % count for part in range(options.parts)) if count else ()
    if options.gpus == "none":
        return ()
    numbers = options.gpus.split(",")
    if len(numbers) != options.parts or not all(number.isdecimal() for number in numbers):
        raise CallError(f"--gpus is {options.gpus!r}: write {options.parts} numbers, one a part, e.g. 0,1; or none")
    return tuple(map(int, numbers))


def _measure(project: Project, options: argparse.Namespace) -> LayerReport:
    """Measure the engine of this machine; without one, or where its layers are too coarse, the ONNX file on the CPU."""
    targets = inspection_targets(options.target)
    if not has_engine(project, targets):
        if options.batch is None:
            return inspect_source(project)
        targets = inspection_targets("onnxruntime")
    report = inspect(project, targets, options.batch)
    return inspect_source(project) if is_coarse(report, options.parts) and report.artefact != SOURCE else report


def document(result: _Result) -> dict[str, Any]:
    """Return the split as JSON data."""
    split, published = result.split, result.published
    return {
        "model": result.project.name,
        "version": result.project.version,
        "pipeline": published.pipeline,
        "measured": split.times.source,
        "rows": result.rows,
        "outputs_compared": result.is_checked,
        "parts": [
            {
                "model": name,
                "device": result.device(number),
                "nodes": len(part.nodes),
                "time_us": part.time_us,
                "weight_bytes": split.weight_bytes[number],
                "received_bytes_per_row": sum(tensor.row_bytes for tensor in part.received),
                "received": [
                    {"name": tensor.name, "dims": list(tensor.dims), "bytes_per_row": tensor.row_bytes}
                    for tensor in part.received
                ],
            }
            for number, (name, part) in enumerate(zip(published.parts, split.parts, strict=True))
        ],
        "notes": list(published.notes),
    }


def show(console: Console, result: _Result) -> None:
    """Print the parts as a table, and what they mean."""
    split, published = result.split, result.published
    times_us = [part.time_us for part in split.parts]
    total_us, longest_us = sum(times_us) or 1.0, max(times_us) or 1.0
    bar_width = 0 if is_pipe(console) else _BAR_WIDTH
    headings = [
        Heading("part"),
        Heading("device"),
        Heading("nodes", number=True, rank=2),
        Heading("time", number=True),
        Heading("share", number=True),
        Heading("weights", number=True),
        Heading("receives", number=True),
        Heading("tensors", wraps=True, rank=1),
        Heading("", rank=3),
    ]
    rows: list[list[Text | str]] = [
        [
            printable(name),
            result.device(number),
            str(len(part.nodes)),
            milliseconds(part.time_us),
            f"{part.time_us / total_us:.1%}",
            size(split.weight_bytes[number]),
            size(result.rows * sum(tensor.row_bytes for tensor in part.received)) if part.received else "",
            printable(", ".join(tensor.name for tensor in part.received)),
            Text("█" * round(bar_width * part.time_us / longest_us), "cyan"),
        ]
        for number, (name, part) in enumerate(zip(published.parts, split.parts, strict=True))
    ]
    batch = f", a batch of {plural(result.rows, 'row')}" if result.project.batched else ""
    console.print(narrow_table(f"{result.project.name} in parts{batch}", headings, rows, console.width))
    print_text(console, printable(f"Times are those of {split.times.source}."))
    if longest_us > _UNBALANCED * total_us / len(times_us):
        print_text(console, printable(_unbalanced(result, times_us)), "yellow")
    for note in published.notes:
        print_text(console, printable(f"Note: {note}."))
    if result.is_checked:
        print_text(console, "On ONNX Runtime the joined parts give the outputs of the whole, bit for bit.")
    print_text(console, f"{published.pipeline} joins them; {result.project.name} is unchanged.")


def _unbalanced(result: _Result, times_us: list[float]) -> str:
    longest = int(np.argmax(times_us))
    layer = max(result.layers.layers, key=lambda each: each.time_us)
    name = ", ".join(layer.nodes[:3]) or layer.name
    return (
        f"The parts are not balanced: {result.published.parts[longest]} takes {times_us[longest] / sum(times_us):.0%} of the "
        f"time. The longest layer, {name} ({layer.kind}), takes {layer.share:.0%} alone and is never cut."
    )
