"""`headrace build`: builds engines for this machine, compares them with FP32 and publishes them beside the model.

options -> `BuildRequest` -> `BuildResult` -> `Published`; `build_report` prints them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from headrace.config.optimization_config import PRECISIONS
from headrace.config.serving_plan import SLOWER_STATUS
from headrace.core.errors import HeadraceError
from headrace_reports.command_line import number_parser, open_console, printable
from rich.console import Console

from headrace_engines.build import build_best_engine, build_engine, sample_batch
from headrace_engines.build_publication import prove_batches, publish_build
from headrace_engines.build_report import BuildOutcome, last_phase, show_outcomes, slower_text, write_outcomes
from headrace_engines.build_request import Targets, request_build
from headrace_engines.commands import add_cache, add_repository_and_target, add_state, add_version
from headrace_engines.commands.compare import median_timing, time_in_turns
from headrace_engines.errors import BuildError, CallError, failure_text
from headrace_engines.progress import PLUGIN_PHASES, Report, with_lines, with_progress_lines
from headrace_engines.project import PLUGINS_BUDGET_S, Project, all_projects, open_data, open_project
from headrace_engines.report import BuildDisplay, print_text
from headrace_engines.store import Store

_TIMING_S = 1.0
_NO_SECONDS = "is no number of seconds above 0: write e.g. 120"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `build`."""
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="name of a model in the repository, or its folder")
    add("--all", action="store_true", help="build every model of the repository")
    add_version(parser)
    add("--precision", choices=PRECISIONS, help="precision, in place of the configuration's")
    add("--force", action="store_true", help="publish engines that miss the required accuracy, with a mark")
    add("--publish-slower", action="store_true", help="publish engines that are slower than what serves now")
    add(
        "--refine",
        action="store_true",
        help="INT8, FP8: measure the ten longest layers in the built engine; those that are faster in floating point stay there",
    )
    add(
        "--version-compatible",
        action="store_true",
        help="build a TensorRT engine that later TensorRT versions of the same major version load too; it holds code that runs",
    )
    add(
        "--plugins",
        default="off",
        metavar="off|auto|NODE,...",
        help="run convolutions of a TensorRT engine on our kernels: auto where the engine is measured to be faster, or the named "
        "ONNX nodes (default: off)",
    )
    add(
        "--plugins-budget",
        type=number_parser(float, lambda seconds: 0 < seconds < math.inf, _NO_SECONDS),
        default=PLUGINS_BUDGET_S,
        metavar="SECONDS",
        help="--plugins auto: time after which no further kernel is timed and no further engine is built (default: %(default)g)",
    )
    add("--json", type=Path, metavar="FILE", help="write the results and the measurements of --plugins as JSON")
    add("--rebuild", action="store_true", help="build again even if the engine is in the store")
    # The server starts builders with it and reads lines "progress SHARE PHASE" from standard output.
    add("--progress", action="store_true", help=argparse.SUPPRESS)
    add_repository_and_target(parser)
    add_cache(parser)
    add_state(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Build the requested models.

    Returns:
        1 if a build failed or missed its accuracy, else 3 if an engine is slower than what serves now, else 0.

    Raises:
        BuildError: a model or target does not exist, or options contradict each other.
    """
    if options.models and options.all:
        raise CallError("both models and --all are given: leave one of them out")
    if not options.models and not options.all:
        raise CallError("no model is given: name the models to build, or use --all")
    if options.all and options.version is not None:
        raise CallError("both --version and --all are given: name one model in place of --all")
    repository = options.model_repository
    projects: list[Project | BuildError] = all_projects(repository) if options.all else []
    projects += [open_project(name, repository, options.version) for name in options.models]
    with ThreadPoolExecutor(1) as pool:
        # Reading a large model takes as long as initialising a GPU; both run at the same time.
        digests = [pool.submit(project.digest) for project in projects if isinstance(project, Project)]
        targets = Targets(options.target)
        wait(digests)
    store = Store(options.cache)

    outcomes = []
    names = [p.name for p in projects if isinstance(p, Project)]
    with BuildDisplay(console, names, is_logged=not options.progress) as display:
        for project in projects:
            if isinstance(project, BuildError):
                outcomes.append(BuildOutcome("", error=str(project)))
                continue
            report = display.report(project.name)
            report = with_progress_lines(report) if options.progress else report
            if options.plugins != "off" and not options.progress:
                report = with_lines(report, PLUGIN_PHASES, _line_writer(console, project.name))
            outcome = build_model(project, options, targets, store, report)
            outcomes.append(outcome)
            display.finish(outcome.name, last_phase(outcome))
    show_outcomes(console, open_console(stderr=True), outcomes)
    if options.json is not None:
        write_outcomes(options.json, outcomes)
    if any(outcome.error and not outcome.is_slower for outcome in outcomes):
        return 1
    return SLOWER_STATUS if any(outcome.is_slower for outcome in outcomes) else 0


def _line_writer(console: Console, name: str) -> Callable[[str], None]:
    """Return a callback that prints a phase at once, also into a pipe."""

    def write(phase: str) -> None:
        print_text(console, f"{printable(name)}: {printable(phase)}")
        console.file.flush()

    return write


def build_model(
    project: Project, options: argparse.Namespace, targets: Targets, store: Store, report: Report
) -> BuildOutcome:
    """Build and publish one model; errors are in the outcome, not raised."""
    started_s = time.monotonic()
    outcome, error = BuildOutcome(project.name), ""
    try:
        request = request_build(project, options, targets)
        outcome = replace(outcome, request=request)
        build = build_best_engine if request.spec.precision == "best" else build_engine
        built = build(project, request.spec, request.target, store, report, rebuild=options.rebuild)
        outcome = replace(outcome, built=built)
        may_publish = options.force or not built.refusal
        if not options.publish_slower and may_publish and (error := _slower_in_turns(outcome, report)):
            return replace(outcome, error=error, is_slower=True, seconds=time.monotonic() - started_s)
        published = publish_build(request, built, store)
        outcome = replace(outcome, published=published)
        # A server that has started this build proves the engine when it loads it.
        if not options.progress and not request.expected.not_served:
            batches = prove_batches(request, built, store, report)
            outcome = replace(outcome, published=replace(published, batches=batches))
    except (HeadraceError, MemoryError, OSError) as raised:
        error = failure_text(raised)
    return replace(outcome, error=error, seconds=time.monotonic() - started_s)


def _slower_in_turns(outcome: BuildOutcome, report: Report) -> str:
    """Return how much slower the engine is than what serves now; "" if it is not.

    The two figures of the builds were taken one after the other, where other work may have slowed one of them only. So an
    engine that is slower by them is timed again, in turns with the file that serves.
    """
    error = slower_text(outcome)
    if not error:
        return ""
    request, built = outcome.request, outcome.built
    assert request is not None
    assert built is not None
    plan, target, project = request.expected.current, request.target, request.project
    assert plan is not None
    if plan.runtime != target.name:
        return error
    rows = max(built.timings, key=lambda timing: timing.rows_per_s).rows
    batch = sample_batch(open_data(project, built.spec), rows, project)
    host_code = plan.stamp is not None and plan.stamp.version_compatible
    failed: dict[str, str] = {}
    with (
        closing(target.open(built.path, host_code=built.spec.version_compatible)) as engine,
        closing(target.open(plan.file, host_code=host_code)) as current,
    ):
        rounds = time_in_turns({"engine": engine, "current": current}, batch, _TIMING_S, report, failed, rows)
    if failed:
        return error
    speeds = [median_timing(rounds[name], rows, project.batched).rows_per_s for name in ("engine", "current")]
    return slower_text(outcome, (speeds[0], speeds[1]))
