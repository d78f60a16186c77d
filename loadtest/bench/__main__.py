"""`python -m loadtest.bench`: Headrace beside its peers, or with `--against PYTHON` beside another checkout of itself.

Exit status: 0 if every target was met (or `--quick`, whose figures mean little), 1 if one was missed, 2 if a case failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.core.command_line import positive_count
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loadtest.bench import clients, machine
from loadtest.bench.cases import CASES, Paired
from loadtest.bench.inprocess import WrongAnswer
from loadtest.bench.report import measured, print_report, replace_block, to_json, write_markdown
from loadtest.bench.results import CaseResult
from loadtest.bench.session import Bench, Case, cores_of
from loadtest.load import LoadFailed
from loadtest.protocol import Refused
from loadtest.servers import ServerFailed

FAILURES = (ServerFailed, WrongAnswer, Refused, LoadFailed, subprocess.CalledProcessError, OSError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    console = Console()
    usable = machine.usable_cores()
    too_few = f"the bench needs {options.server_cores + 1} cores, {options.server_cores} for the server and one for the client"
    for advice in filter(None, (clients.missing(), too_few if len(usable) <= options.server_cores else "")):
        console.print(advice, style="bold red")
        return 2
    if options.markdown:
        replace_block(options.markdown.read_text(), "")  # Fails now, not after the measurements.
    cores = cores_of(usable, options.server_cores)
    # This process draws the progress bar: beside the client, never beside a server that is measured.
    os.sched_setaffinity(0, cores.client)
    machine.allow_open_files()
    busy = machine.warned_busy_share(console, "expect noise, ratios included")
    cases = [case for case in CASES if not options.only or case.name in options.only]
    if options.against:
        cases = [case for case in cases if isinstance(case, Paired)]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch, _progress(console) as progress:
        rounds = options.rounds or (1 if options.quick else 5)
        bench = Bench(
            repository=options.model_repository,
            python=options.python,
            against=options.against,
            front_ends=options.front_ends,
            rounds=rounds,
            quick=options.quick,
            cores=cores,
            scratch=Path(scratch),
            progress=lambda step, seconds: None,
        )
        results = _run_all(cases, bench, progress)
    report = measured("loadtest.bench", words, machine.describe(cores, busy), results)
    print_report(report, console)
    if options.json:
        options.json.write_text(to_json(report))
    if options.markdown:
        write_markdown(report, options.markdown)
    return 0 if options.quick and report.status == 1 else report.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench", description="Measure Headrace beside its peers.")
    parser.add_argument("--quick", action="store_true", help="short samples, to check that everything runs; no targets")
    parser.add_argument("--rounds", type=positive_count, help="rounds of each case (default: 5; 1 with --quick)")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--model-repository", type=Path, default=Path("model_repository"), help="built by `make models`"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="replace the block between the bench markers in a page"
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="PYTHON", help="interpreter of the Headrace to measure"
    )
    parser.add_argument(
        "--against",
        default="",
        metavar="PYTHON",
        help="interpreter of another checkout's environment: compare the two, without other contenders",
    )
    parser.add_argument(
        "--front-ends", type=int, default=0, help="front-end processes of Headrace (default: one process)"
    )
    parser.add_argument("--server-cores", type=positive_count, default=1, help="cores of a server (default: 1)")
    return parser


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # One redraw a second: drawing takes time from the client's core.
    return Progress(*columns, console=console, refresh_per_second=1, transient=True)


class Steps:
    """The progress bar of a run: a step's seconds count once the next step begins."""

    def __init__(self, progress: Progress, total_s: float) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total_s)
        self._running_s = 0.0

    def begin(self, case: str, step: str, seconds: float) -> None:
        """A step of a case that takes `seconds`."""
        self._progress.update(self._task, description=f"{case}: {step}", advance=self._running_s)
        self._running_s = seconds

    def finish(self, done_s: float) -> None:
        """A case ended: set the progress to what was planned up to here."""
        self._progress.update(self._task, completed=done_s)
        self._running_s = 0.0


def _run_all(cases: Sequence[Case], bench: Bench, progress: Progress) -> list[CaseResult]:
    steps = Steps(progress, sum(case.planned_s(bench) for case in cases))
    results, planned_s = [], 0.0
    for case in cases:
        results.append(_run(case, replace(bench, progress=partial(steps.begin, case.name))))
        planned_s += case.planned_s(bench)
        steps.finish(planned_s)
    return results


def _run(case: Case, bench: Bench) -> CaseResult:
    """One case; its error is its result, so that the others are still measured."""
    try:
        return case.run(bench)
    except FAILURES as failure:
        text = str(failure)
        if isinstance(failure, subprocess.CalledProcessError):
            text += f"\n{failure.stderr}"
        return CaseResult(case.name, case.title, failure=text)


if __name__ == "__main__":
    sys.exit(main())
