"""`python -m loadtest.slo`: the value of a latency objective, in one command.

Exit status: 0 if every target was met, 1 if one was missed, 2 if a part failed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from loadtest.bench import machine
from loadtest.bench.report import (
    COMPARISON_COLUMNS,
    FIGURE_COLUMNS,
    Report,
    comparison_row,
    figure_row,
    markdown_table,
    measured,
    print_report,
    replace_block,
    to_json,
)
from loadtest.bench.results import CaseResult
from loadtest.bench.session import Cores
from loadtest.slo import device, served
from loadtest.slo.plan import Plan

PARTS: Mapping[str, Callable[[Plan], CaseResult]] = {
    "overload": device.run,
    "http": served.over_http,
    "convolution": served.over_http_on_one_core,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    names = options.only or list(PARTS)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.markdown:
        for name in names:  # fails now, not after the measurements
            replace_block(options.markdown.read_text(), "", f"slo-{name}")
    busy = machine.warned_busy_share(console, "figures by the clock are worse")
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as the server has it
    with tempfile.TemporaryDirectory(prefix="headrace-slo-") as scratch:
        plan = Plan(options.rounds, options.seconds, options.model_repository, Path(scratch))
        results = [_run(name, plan, console) for name in names]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    report = measured("loadtest.slo", words, machine.describe(Cores(cores, cores), busy), results)
    print_report(report, console)
    if options.json:
        options.json.write_text(to_json(report))
    if options.markdown:
        options.markdown.write_text(written(options.markdown.read_text(), report))
    return report.status


def _run(name: str, plan: Plan, console: Console) -> CaseResult:
    """One part; its error is its result, so that the others are still measured."""
    begun_s = time.monotonic()
    try:
        return PARTS[name](plan)
    except Exception as error:
        traceback.print_exc()
        return CaseResult(name, "", failure=f"{type(error).__name__}: {error}")
    finally:
        console.print(f"{name}: {time.monotonic() - begun_s:.0f} s", style="dim")


def written(page: str, report: Report) -> str:
    """The page with the block of each part that was measured replaced; the blocks of parts that failed stay.

    Raises:
        ValueError: a part has no block in the page.
    """
    where = "; ".join(report.machine[label] for label in ("processor", "cores", "other load", "python", "commit"))
    for result in report.results:
        if result.failure:
            continue
        lines = [f"`{report.command}`, {report.date}, {where}.", ""]
        lines += markdown_table(COMPARISON_COLUMNS, map(comparison_row, result.comparisons))
        if result.figures:
            lines += ["", *markdown_table(FIGURE_COLUMNS, map(figure_row, result.figures))]
        block = "\n".join([*lines, "", *(f"- {note}" for note in result.notes)])
        page = replace_block(page, block, f"slo-{result.name}")
    return page


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.slo", description="Measure the value of a latency objective."
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    add("--rounds", type=int, default=3, help="how often each contender is measured (default: %(default)s)")
    add("--seconds", type=float, default=5.0, help="how long a trace is, by the clock (default: %(default)s)")
    add("--model-repository", type=Path, default=Path("model_repository"), help="built by `make models`")
    add("--json", type=Path, metavar="FILE", help="write all results")
    add("--markdown", type=Path, metavar="FILE", help="replace the parts' blocks in a page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
