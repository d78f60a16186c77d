"""What `headrace build` shows: a bar for each model with the phase it is in, a table when all is done."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from engines.progress import Report
from engines.report.narrow_table import Heading, narrow_table
from engines.report.style import plain, rate, size
from engines.serving import served_words
from server.core.console import is_pipe, pickup_text

if TYPE_CHECKING:
    from engines.building import Outcome


# Bars at once: fewer than any terminal has lines, for what does not fit is not drawn.
_SHOWN = 8
_BAR_WIDTH = 16
_HEADINGS = (
    Heading("model"),
    Heading("engine", wraps=True),
    Heading("", wraps=True),
    Heading("top-1", number=True, rank=1),
    Heading("accuracy", number=True, rank=2),
    Heading("rows/s", number=True, rank=3),
    Heading("size", number=True, rank=4),
    Heading("time", number=True, rank=5),
)


class BuildDisplay:
    """A bar a model with the phase it is in; silent where nobody watches (no terminal).

    Args:
        console: where to draw.
        names: of the models, in order.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(overflow="fold")),
            BarColumn(_BAR_WIDTH),
            TaskProgressColumn(table_column=Column(no_wrap=True, min_width=4)),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
            # Takes the room that the others leave: a phase may be cut short, a model's name and the time may not.
            TextColumn("[dim]{task.fields[note]}", table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            disable=not console.is_terminal or is_pipe(console),
            expand=True,
        )
        self._names = list(names)
        self._tasks: dict[str, TaskID] = {
            name: self._progress.add_task(escape(name), total=1.0, start=False, note="waits", visible=place < _SHOWN)
            for place, name in enumerate(names)
        }

    def __enter__(self) -> BuildDisplay:
        try:
            self._progress.start()
        except BaseException:
            # Ctrl-C while the first picture is drawn: the cursor must come back.
            self._progress.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def report(self, name: str) -> Report:
        """Begin with a model; what is returned moves its bar."""
        task = self._tasks[name]
        first = max(min(self._names.index(name) - _SHOWN // 2, len(self._names) - _SHOWN), 0)
        for place, other in enumerate(self._names):
            self._progress.update(self._tasks[other], visible=first <= place < first + _SHOWN)
        self._progress.start_task(task)
        return lambda done, note: self._progress.update(task, completed=done, note=escape(note))

    def finish(self, name: str, note: str) -> None:
        """Complete the bar of a model.

        Args:
            name: The model.
            note: Its last phase, e.g. "built" or "failed".
        """
        self._progress.update(self._tasks[name], completed=1.0, note=note)
        self._progress.stop_task(self._tasks[name])


def show_outcomes(console: Console, errors: Console, outcomes: Sequence[Outcome]) -> None:
    """Print a table of what was built, its speed-up and what serves it; to `errors` what was not built or published, and why."""
    built = [outcome for outcome in outcomes if outcome.built is not None]
    for machine in dict.fromkeys(outcome.built.machine for outcome in built if outcome.built is not None):
        rows = [_row(outcome) for outcome in built if outcome.built is not None and outcome.built.machine == machine]
        console.print(narrow_table(f"Engines for {machine}", _HEADINGS, rows, console.width))
    _print_served(console, outcomes)
    for outcome in outcomes:
        name = f"{outcome.name}: " if outcome.name else ""
        if outcome.error:
            verb = "was not published" if outcome.built else "was not built"
            head = f"[red]{escape(outcome.name)} {verb}:[/] " if name else ""
            # Its name may stand in front of what went wrong, too.
            errors.print(f"{head}{escape(outcome.error.removeprefix(name))}", highlight=False, soft_wrap=True)
        elif outcome.not_served:
            head = f"[yellow]{escape(name)}built, but not served:[/] "
            errors.print(f"{head}{escape(outcome.not_served)}", highlight=False, soft_wrap=True)
        elif outcome.forced and outcome.built is not None:
            missed = escape("; ".join(outcome.built.refusal))
            errors.print(f"[yellow]{escape(name)}published with a mark:[/] {missed}", highlight=False, soft_wrap=True)


def _print_served(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print for each published engine its speed-up and what serves it, and what makes a running server take it."""
    published = [outcome for outcome in outcomes if outcome.published and outcome.built is not None]
    for outcome in published:
        lines = [text for text in (speed_text(outcome), *_served_lines(outcome)) if text]
        for line in lines:
            console.print(f"{plain(outcome.name)}: {plain(line)}", highlight=False, markup=False, soft_wrap=True)
    served = [outcome for outcome in published if outcome.repository and not outcome.not_served]
    for repository in dict.fromkeys(outcome.repository for outcome in served):
        names = [outcome.name for outcome in served if outcome.repository == repository]
        text = pickup_text(names[0] if len(names) == 1 else "MODEL", repository)
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _served_lines(outcome: Outcome) -> list[str]:
    """What serves after the build, and what stands against it."""
    assert outcome.built is not None
    lines = [] if outcome.not_served else [f"serves from now on: {served_words(outcome.built)}"]
    if outcome.advice:
        lines.append(outcome.advice)
    if outcome.place is not None:
        reason = "the model's folder cannot be written; a server with this --state-dir takes it from there"
        lines.append(f"published in {outcome.place}: {reason}")
    return lines


def speed_text(outcome: Outcome) -> str:
    """How many times faster an engine is than what serves now and than FP32; "" where neither was measured."""
    built = outcome.built
    assert built is not None
    parts = []
    if outcome.now_rows_per_s:
        now = f"{outcome.now}, {rate(outcome.now_rows_per_s)} rows/s"
        parts.append(f"{_times(built.rows_per_s, outcome.now_rows_per_s)} as fast as what serves now ({now})")
    elif outcome.now:
        parts.append(f"{rate(built.rows_per_s)} rows/s; {outcome.now} serves now")
    if built.spec.precision != "fp32":
        fp32 = outcome.fp32_rows_per_s
        measure = f"FP32 not measured: `headrace compare {outcome.name}` does"
        parts.append(f"{_times(built.rows_per_s, fp32)} as fast as FP32" if fp32 else measure)
    return "; ".join(parts)


def _times(faster: float, slower: float) -> str:
    ratio = faster / slower
    return f"{ratio:,.0f} times" if ratio >= 20 else f"{ratio:.2f} times"


def _row(outcome: Outcome) -> list[Text]:
    built = outcome.built
    assert built is not None
    accuracy = built.accuracy
    if outcome.published:
        done = "not served" if outcome.not_served else "published, marked" if outcome.forced else "published"
    else:
        done = "refused" if built.refusal else "not published"
    kept = f", {len(built.kept)} node{'s' * (len(built.kept) > 1)} kept" if built.kept else ""
    cells = [
        plain(outcome.name),
        f"{built.spec.precision}{kept}",
        done,
        "" if accuracy is None or accuracy.top1_agreement is None else f"{accuracy.top1_agreement:.1%}",
        "" if accuracy is None or accuracy.accuracy is None else f"{accuracy.accuracy:.1%}",
        rate(built.rows_per_s),
        size(built.size_bytes),
        "stored" if built.cached else f"{outcome.seconds:.1f} s",
    ]
    return [Text(cell) for cell in cells]
