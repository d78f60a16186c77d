"""Output of `models build`: a progress bar for each model, then a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from headrace.core.command_line import fit_title, is_pipe
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace_engines.demo.build import DemoOutcome, DemoState


class DemoDisplay:
    """One progress bar over all models and one for each; draws nothing without a terminal.

    Args:
        console: where to draw.
        names: the models that will be worked on, in order.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal or is_pipe(console),
        )
        self._done = dict.fromkeys(names, 0.0)
        self._overall = self._progress.add_task("[bold]demo models", total=len(names), note="")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> DemoDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, name: str, done: float, note: str) -> None:
        """Show how far a model is: `done` from 0 to 1 and a few words."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=1.0, note=note)
        self._progress.update(self._tasks[name], completed=done, note=note)
        self._done[name] = done
        self._progress.update(self._overall, completed=sum(self._done.values()))

    def finish(self, outcome: DemoOutcome) -> None:
        """Complete the bar of a model, built or failed."""
        self.update(outcome.name, 1.0, "failed" if outcome.error else "done" if outcome.built else "kept")


def show_outcomes(console: Console, outcomes: Sequence[DemoOutcome], output: Path) -> None:
    """Print one line if nothing had to be done, else a table; then what could not be done, and why."""
    for outcome in outcomes:
        if outcome.remark:
            console.print(f"{outcome.name}: {outcome.remark}.", highlight=False, markup=False, soft_wrap=True)
    if all(outcome.state is DemoState.UP_TO_DATE and not outcome.built and not outcome.error for outcome in outcomes):
        count = "The demo model is" if len(outcomes) == 1 else f"All {len(outcomes)} demo models are"
        console.print(f"{count} up to date in {output}.", highlight=False, soft_wrap=True)
        return
    table = Table("model", "what was done", "weights", title=f"Demo models in {output}", title_justify="left")
    for heading in ("size", "accuracy", "time"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            _outcome_text(outcome),
            "published" if outcome.weights.startswith("sha256:") else outcome.weights,
            _size(outcome.size_bytes),
            "" if outcome.accuracy is None else f"{outcome.accuracy:.3f}",
            f"{outcome.seconds:.1f} s" if outcome.seconds else "",
        )
    console.print(fit_title(table, console.width))
    for outcome in outcomes:
        if outcome.error:
            console.print(f"[red]{outcome.name} was not built:[/] {outcome.error}", highlight=False, soft_wrap=True)
        elif outcome.state is DemoState.FOREIGN and not outcome.built:
            notice = (
                f"{outcome.name}: a model without a stamp of this builder is there and was kept; --force replaces it."
            )
            console.print(notice, highlight=False, soft_wrap=True)


def _outcome_text(outcome: DemoOutcome) -> str:
    if outcome.error:
        return "failed"
    if outcome.built:
        return "built" if outcome.state is DemoState.MISSING else "built anew"
    return "kept"


def _size(size_bytes: int) -> str:
    if not size_bytes:
        return ""
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"
