"""What `headrace build` shows: a bar for each model with the phase it is in, a table when all is done."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from engines.progress import Report
from engines.report.style import size
from server.config.machine import Machine

if TYPE_CHECKING:
    from engines.building import Outcome


class BuildDisplay:
    """A bar a model; silent where nobody watches (no terminal).

    Args:
        console: where to draw.
        names: of the models, in order.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {
            name: self._progress.add_task(escape(name), total=1.0, start=False, note="waits") for name in names
        }

    def __enter__(self) -> BuildDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def report(self, name: str) -> Report:
        """Begin with a model; what is returned moves its bar."""
        task = self._tasks[name]
        self._progress.start_task(task)
        return lambda done, note: self._progress.update(task, completed=done, note=escape(note))

    def finish(self, outcome: Outcome) -> None:
        """Count a model as done, whatever came of it."""
        note = "failed" if outcome.error else "stored" if outcome.built and outcome.built.cached else "built"
        self._progress.update(self._tasks[outcome.name], completed=1.0, note=note)
        self._progress.stop_task(self._tasks[outcome.name])


def show_outcomes(console: Console, errors: Console, outcomes: Sequence[Outcome], machine: Machine) -> None:
    """Print a table of what was built; to `errors` what could not be built or published, and why."""
    title = f"Engines for {machine.target} {machine.version} on {machine.device} ({machine.capability})"
    table = Table("model", "engine", "", title=escape(title), title_justify="left")
    for heading in ("top-1", "accuracy", "rows/s", "size", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        if outcome.built is not None:
            table.add_row(*_row(outcome))
    if table.row_count:
        console.print(table)
    for outcome in outcomes:
        name = f"{outcome.name}: " if outcome.name else ""
        if outcome.error:
            verb = "was not published" if outcome.built else "was not built"
            head = f"[red]{escape(name.rstrip(': '))} {verb}:[/] " if name else ""
            errors.print(f"{head}{escape(outcome.error)}", highlight=False, soft_wrap=True)
        elif outcome.forced and outcome.built is not None:
            missed = escape("; ".join(outcome.built.refusal))
            errors.print(f"[yellow]{escape(name)}published with a mark:[/] {missed}", highlight=False, soft_wrap=True)


def _row(outcome: Outcome) -> list[str]:
    built = outcome.built
    assert built is not None
    accuracy = built.accuracy
    done = "published" if outcome.published else "refused"
    if outcome.forced:
        done = "published, marked"
    best = max((timing.rows_per_s for timing in built.timings), default=0.0)
    kept = f", {len(built.kept)} nodes kept" if built.kept else ""
    return [
        escape(outcome.name),
        f"{built.spec.precision}{kept}",
        f"{done}{' (stored)' if built.cached else ''}",
        "" if accuracy is None or accuracy.top1_agreement is None else f"{accuracy.top1_agreement:.1%}",
        "" if accuracy is None or accuracy.accuracy is None else f"{accuracy.accuracy:.1%}",
        f"{best:,.0f}" if best >= 100 else f"{best:.3g}",
        size(built.size_bytes),
        f"{outcome.seconds:.1f} s",
    ]
