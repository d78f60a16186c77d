"""`headrace models build`: builds demo models with a progress bar for each, then prints a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from headrace_reports.command_line import fit_title
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace_engines.demo.build import (
    DemoOutcome,
    DemoState,
    build_demo_model,
    choose_models,
    demo_state,
)
from headrace_engines.progress import silent
from headrace_engines.report import BuildDisplay, print_text, size


def show_demo_outcomes(console: Console, outcomes: Sequence[DemoOutcome], output: Path) -> None:
    """Print one line if all models are up to date, else a table and the failures with their reasons."""
    for outcome in outcomes:
        if outcome.remark:
            print_text(console, f"{outcome.name}: {outcome.remark}.")
    if all(outcome.state is DemoState.UP_TO_DATE and not outcome.built and not outcome.error for outcome in outcomes):
        count = "The demo model is" if len(outcomes) == 1 else f"All {len(outcomes)} demo models are"
        print_text(console, f"{count} up to date in {output}.")
        return
    table = Table("model", "what was done", "weights", title=f"Demo models in {output}", title_justify="left")
    for heading in ("size", "accuracy", "time"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            _outcome_text(outcome),
            "published" if outcome.weights.startswith("sha256:") else outcome.weights,
            size(outcome.size_bytes) if outcome.size_bytes else "",
            "" if outcome.accuracy is None else f"{outcome.accuracy:.3f}",
            f"{outcome.seconds:.1f} s" if outcome.seconds else "",
        )
    console.print(fit_title(table, console.width))
    for outcome in outcomes:
        if outcome.error:
            head = f"{outcome.name} was not built: "
            console.print(Text.assemble((head, "red"), str(outcome.error)), highlight=False, soft_wrap=True)
        elif outcome.state is DemoState.FOREIGN and not outcome.built:
            reason = "the model there has no stamp of this builder and was not replaced; --force replaces it."
            print_text(console, f"{outcome.name}: {reason}")


def _outcome_text(outcome: DemoOutcome) -> str:
    if outcome.error:
        return "failed"
    if outcome.built:
        return "built" if outcome.state is DemoState.MISSING else "built anew"
    return "kept"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `models build`."""
    add = parser.add_argument
    add("--output", type=Path, default=Path("model_repository"), help="the model repository")
    add("--only", nargs="+", action="extend", default=[], metavar="NAME", help="only these models")
    add("--force", action="store_true", help="build up-to-date models, and models of other builders, too")


def run(options: argparse.Namespace, console: Console) -> int:
    """Build missing and outdated models; return 1 if a build failed, else 0.

    Raises:
        BuildError: a name is unknown.
    """
    models = choose_models(options.only)
    waiting = [m for m in models if options.force or demo_state(m, options.output) is not DemoState.UP_TO_DATE]
    with BuildDisplay(console, [model.name for model in waiting]) as display:
        outcomes = []
        for model in models:
            report = display.report(model.name) if model in waiting else silent
            outcome = build_demo_model(model, options.output, options.force, report)
            outcomes.append(outcome)
            if model in waiting:
                display.finish(model.name, _outcome_text(outcome))
    show_demo_outcomes(console, outcomes, options.output)
    return 1 if any(outcome.error for outcome in outcomes) else 0
