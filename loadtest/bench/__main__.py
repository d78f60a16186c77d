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
from pathlib import Path

from headrace_reports.command_line import positive_count
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
            progress=lambda step: None,
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


def _run_all(cases: Sequence[Case], bench: Bench, progress: Progress) -> list[CaseResult]:
    results, task = [], progress.add_task("", total=len(cases))
    for case in cases:

        def begin(step: str, name: str = case.name) -> None:
            progress.update(task, description=f"{name}: {step}")

        results.append(_run(case, replace(bench, progress=begin)))
        progress.advance(task)
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
