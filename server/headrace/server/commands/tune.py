"""`headrace tune MODEL`: measures numbers of instances and batch sizes, and writes the best into the configuration."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_reports.command_line import (
    fit_title,
    is_pipe,
    number_parser,
    open_console,
    path_or_url,
    pickup_text,
    plural,
)
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from headrace.core.clock import NS_PER_MS
from headrace.core.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.config.files import Changes
    from headrace.config.model_folder import ModelFolder
    from headrace.models.tuning import MeasuredSetting, Options, Sweep


_count = number_parser(int, lambda number: 0 < number <= 65536, "is not a number from 1 to 65536")
_positive = number_parser(float, lambda number: 0 < number < 1e6, "is not a number over 0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model's name in the repository, or its folder")
    text = "where names are looked up: a folder, or the URL of a repository in a store"
    add("--model-repository", type=path_or_url, default=Path("model_repository"), metavar="DIR_OR_URL", help=text)
    add("--instances", type=_counts, default=(), metavar="N,N", help="numbers to try (1, 2, 4 ... up to the cores)")
    text = "largest batch to try (the configuration's, else by measurement)"
    add("--max-batch-size", type=_count, metavar="N", help=text)
    add("--input", type=Path, metavar="FILE.npz", help="an array for each input (model_warmup's, else random values)")
    add("--seconds", type=_positive, default=0.2, metavar="S", help="for each run (%(default)s)")
    add("--repeats", type=_count, default=5, metavar="N", help="runs of each pair of settings (%(default)s)")
    add("--slo-ms", type=_positive, default=0.0, metavar="MS", help="latency objective (the configuration's slo)")
    add("--apply", action="store_true", help="write the recommended change into the model's configuration")
    add("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command with the options of `add_arguments`; return the exit status."""
    # Imported here, since every command declares its options.
    from headrace.config.machine import usable_cores
    from headrace.config.model_folder import find_model_folder, read_model_folder
    from headrace.models.tuning import Options, default_counts

    console, errors = open_console(highlight=False), open_console(stderr=True, highlight=False)
    try:
        path = find_model_folder(args.model, Path(args.model_repository))
        folder = read_model_folder(path, path.parent)
        slo_ms = args.slo_ms or folder.config.slo.p99_ms or 0.0
        options = Options(
            counts=args.instances or default_counts(folder.config, usable_cores()),
            seconds=args.seconds,
            repeats=args.repeats,
            slo_ns=int(slo_ms * NS_PER_MS),
            max_rows=args.max_batch_size,
            input_file=args.input,
        )
        result = _run_sweep(folder, options, errors)
        if args.json:
            console.print(json.dumps(_document(result)), markup=False, soft_wrap=True)
        else:
            _print(console, folder.name, result, slo_ms)
        _change(console, errors, folder, result, args)
    except ConfigError as error:
        for finding in error.findings:
            errors.print(Text(str(finding)), soft_wrap=True)
        return 1
    except HeadraceError as error:
        errors.print(Text(f"headrace tune: {error}"), soft_wrap=True)
        return 1
    return 0


def _run_sweep(folder: ModelFolder, options: Options, errors: Console) -> Sweep:
    """Run the sweep, with a progress bar on terminals."""
    from headrace.models.tuning import sweep

    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[last]}", style="dim", markup=False),
        console=errors,
        transient=True,
        disable=not errors.is_terminal or is_pipe(errors),
    )
    with progress:
        task = progress.add_task(folder.name, total=None, last="")
        return sweep(
            folder, options, lambda count, total, text: progress.update(task, completed=count, total=total, last=text)
        )


def _document(result: Sweep) -> dict[str, Any]:
    """Sweep as JSON."""
    return {
        "points": [_point(point) for point in result.points],
        "now": result.current and _point(result.current),
        "best": result.best and _point(result.best),
        "advice": asdict(result.advice),
        "inputs": result.inputs,
        "runtime": result.runtime,
        "limit": result.limit,
    }


def _point(point: MeasuredSetting) -> dict[str, Any]:
    spread = {"rows_hz": point.rows_hz, "low_hz": point.low_hz, "high_hz": point.high_hz}
    return {**asdict(point), **spread}


def _print(console: Console, name: str, result: Sweep, slo_ms: float) -> None:
    counts = sorted({point.instances for point in result.points})
    table = Table("rows", *(plural(count, "instance") for count in counts), title=name)
    by_setting = {(point.instances, point.rows): point for point in result.points}
    for rows in sorted({point.rows for point in result.points}):
        cells = []
        for count in counts:
            point = by_setting[count, rows]
            style = "bold green" if point == result.best else "bold" if point == result.current else ""
            spread = f"({point.low_hz:,.0f}-{point.high_hz:,.0f})"
            cells.append(Text(f"{point.rows_hz:,.0f}/s {spread}  {point.p95_ns / NS_PER_MS:.3g} ms", style))
        table.add_row(str(rows), *cells)
    console.print(fit_title(table, console.width))
    runs = len(result.points[0].runs_hz)
    legend = (
        f"Rows a second of all instances together: median of {runs} runs (slowest-fastest); the time is what 95 of 100 "
        f"batches keep to. Inputs: {result.inputs}. Measured: {result.runtime}. No larger batch: {result.limit}."
    )
    console.print(Text(legend, "dim"))
    best = result.best
    if best is None:
        console.print(f"No setting meets {slo_ms:g} ms: {result.advice.reason}.")
        return
    within = f" within {slo_ms:g} ms" if slo_ms else ""
    setting = f"{best.instances} x {best.rows} rows, {best.rows_hz:,.0f} rows/s"
    console.print(f"Best{within}: {setting}; {result.advice.reason}.")


def _change(console: Console, errors: Console, folder: ModelFolder, result: Sweep, args: argparse.Namespace) -> None:
    """Print the recommended change as a diff, and write it with `--apply`.

    Raises:
        ConfigError: the change cannot be written, or the model could not be served with it.
    """
    from headrace.config.documents import refuse
    from headrace.config.files import read_config_file
    from headrace.config.model_folder import read_model_folder

    output = errors if args.json else console
    if not result.advice.change or result.best is None:
        if args.apply:
            output.print(f"{folder.name}: the configuration is unchanged.", markup=False)
        return
    try:
        file = read_config_file(folder.path)
        text = file.apply(_changes(folder, result))
    except OSError as error:
        raise refuse(folder.name, None, f"cannot be read: {error}", "check the permissions") from None
    if text == file.text:
        return
    # Check that the changed configuration can be served before it is written.
    read_model_folder(folder.path, folder.path.parent, replace(file, text=text).document)
    output.print(Text(file.diff(text)), soft_wrap=True)
    if not args.apply:
        output.print("--apply writes it.", markup=False)
        return
    file.write(text)
    output.print(f"Written to {file.path}.", markup=False, soft_wrap=True)
    if folder.config.optimization.profiles or result.runtime.startswith("tensorrt"):
        build = f"Then: headrace build {folder.name} (an engine is for one max_batch_size)."
        output.print(build, markup=False, soft_wrap=True)
    output.print(pickup_text(folder.name, str(folder.path.parent)), markup=False, soft_wrap=True)


def _changes(folder: ModelFolder, result: Sweep) -> Changes:
    """The best setting as changes of the configuration, without values that it already has."""
    from headrace.config.files import Changes

    best, current, config = result.best, result.current, folder.config
    assert best is not None
    rows = best.rows if config.max_batch_size and (current is None or best.rows != current.rows) else None
    # A GPU may need larger batches than this CPU: max_batch_size stays if the CPU has a limit of its own.
    has_cpu_limit = config.cpu_max_batch_size is not None and result.runtime.startswith("onnxruntime,")
    keeps_cpu_limit = rows is not None and has_cpu_limit
    return Changes(
        instances=best.instances if current is None or best.instances != current.instances else None,
        max_batch_size=rows if not keeps_cpu_limit or (rows or 0) > config.max_batch_size else None,
        # A written max_batch_size does not enable batching; a completed one does.
        dynamic_batching=rows is not None and rows > 1,
        cpu_max_batch_size=rows if keeps_cpu_limit else None,
    )


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) <= 64 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers from 1 to 64, such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))
