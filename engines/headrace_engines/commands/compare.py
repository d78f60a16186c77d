"""`headrace compare`: a model in several precisions, as a table, as JSON, as a page and as a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headrace.core.optimization_config import PRECISIONS
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace_engines.commands import add_cache, add_model
from headrace_engines.comparison import DEFAULT_PRECISIONS, Comparison, compare, default_sizes
from headrace_engines.errors import CallError
from headrace_engines.progress import Report
from headrace_engines.project import Project, open_project, read_spec
from headrace_engines.report.pages import (
    HEADINGS,
    SPEED_HEADINGS,
    comparison_cells,
    comparison_page,
    comparison_picture,
    filled_columns,
    make_folder,
    save,
    speed_cells,
)
from headrace_engines.report.terminal import BuildDisplay, plain
from headrace_engines.store import Store
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import Target

_COMPARABLE = tuple(precision for precision in PRECISIONS if precision != "best")
# INT8 by TensorRT 10's own calibrator, which Headrace no longer builds.
_CALIBRATOR = "int8-tensorrt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    add_model(parser)
    add_cache(parser)
    parser.add_argument(
        "--precisions",
        metavar="P,P",
        help=f"of {', '.join(_COMPARABLE)}; if left out {', '.join(DEFAULT_PRECISIONS)} as far as the machine has them",
    )
    parser.add_argument("--batch", metavar="N,N", help="batch sizes; from 1 to the largest if left out")
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="to time a precision at a batch size (2)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write compare.json, compare.html and compare.svg here"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Compare; 0 if FP32, or the first precision where FP32 was not requested, could be measured.

    Raises:
        BuildError: nothing could be begun, or the files cannot be written.
    """
    if not 0 < options.seconds <= 3600:
        raise CallError(f"--seconds is {options.seconds:g}: write a number above 0, 3600 at most")
    project = open_project(options.model, options.model_repository, options.version)
    sizes = _sizes(options.batch, project)
    target = choose_target(options.target)
    precisions = _precisions(options.precisions, target)
    if options.output is not None:
        # Measuring takes minutes; that there is no place for the result should show before.
        make_folder(options.output)
    with BuildDisplay(console, [*precisions, "timing"]) as display:
        reports = {name: _lazy_report(display, name) for name in (*precisions, "timing")}
        comparison = compare(project, target, Store(options.cache), precisions, sizes, options.seconds, reports)
    show(console, comparison)
    if options.output is not None:
        write(comparison, options.output)
        console.print(
            f"compare.json, compare.html and compare.svg are in {options.output}.",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    base = next((row for row in comparison.rows if row.precision == "fp32"), comparison.rows[0])
    return 0 if base.built is not None else 1


def write(comparison: Comparison, folder: Path) -> None:
    """Write the three files.

    Raises:
        BuildError: they cannot be written.
    """
    save(folder / "compare.json", json.dumps(comparison.to_json(), indent=2, allow_nan=False) + "\n")
    save(folder / "compare.html", comparison_page(comparison))
    save(folder / "compare.svg", comparison_picture(comparison) + "\n")


def show(console: Console, comparison: Comparison) -> None:
    """Print what the precisions are and how fast they are."""
    console.print(
        Text(plain(f"{comparison.model} {comparison.version} on {comparison.machine}"), "bold"), soft_wrap=True
    )
    cells = [comparison_cells(row) for row in comparison.worked]
    columns = filled_columns(cells)
    what = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        what.add_column(HEADINGS[column], justify="right" if column else "left", no_wrap=True)
    for line in cells:
        what.add_row(*(Text(line[column]) for column in columns))
    if what.row_count:
        console.print(what)
    speed = Table(*SPEED_HEADINGS[:1], box=SIMPLE_HEAD, pad_edge=False)
    for heading in SPEED_HEADINGS[1:]:
        speed.add_column(heading, justify="right")
    for row in comparison.worked:
        for number, rows in enumerate(comparison.sizes):
            last = number == len(comparison.sizes) - 1
            speed.add_row(*map(Text, speed_cells(comparison, row, rows)), end_section=last)
    if speed.row_count:
        console.print(speed)
    for row in comparison.rows:
        if remark := comparison_cells(row)[-1]:
            console.print(f"{row.precision}: {plain(remark)}", highlight=False, soft_wrap=True, markup=False)


def _lazy_report(display: BuildDisplay, name: str) -> Report:
    """A bar whose clock runs from its first report on."""
    started: list[Report] = []

    def report(done: float, note: str) -> None:
        if not started:
            started.append(display.report(name))
        started[0](done, note)

    return report


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
    if not project.config.max_batch_size:
        if sizes != [1]:
            raise CallError(f"{project.name} has no batch dimension: leave --batch out")
        return sizes
    smallest, _, largest = next(iter(spec.profiles[0].shapes.values()))
    if sizes[0] < smallest[0] or sizes[-1] > largest[0]:
        cure = "raise max_batch_size or the profile's batch" if sizes[-1] > largest[0] else "lower the profile's batch"
        raise CallError(
            f"--batch is {option}, engines of {project.name} take {smallest[0]} to {largest[0]} rows: {cure}"
        )
    return sizes
