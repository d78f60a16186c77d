"""Output of the builder: text, tables and progress bars in terminals, and HTML pages of one file without scripts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any

from headrace_reports.command_line import PIPE_WIDTH, fit_title, is_pipe, printable
from headrace_reports.html_page import page as page
from headrace_reports.html_page import table as table
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from headrace_engines.errors import BuildError
from headrace_engines.progress import Report, log_lines, silent


def milliseconds(time_us: float) -> str:
    """Format a time: "0.043 ms", "12.3 ms", "1,520 ms"."""
    if not math.isfinite(time_us):
        return "-"
    time_ms = time_us / 1e3
    return f"{time_ms:,.0f} ms" if time_ms >= 1000 else f"{time_ms:.3g} ms" if time_ms >= 0.1 else f"{time_ms:.3f} ms"


def rate(rows_per_s: float) -> str:
    """Format a throughput: "19.4", "41,200"."""
    return f"{rows_per_s:,.0f}" if rows_per_s >= 100 else f"{rows_per_s:.3g}"


def size(size_bytes: int) -> str:
    """Format a size in decimal units: "102.0 MB", "154 kB", "1.5 kB"."""
    if size_bytes >= 1e6:
        return f"{size_bytes / 1e6:,.1f} MB"
    return f"{size_bytes / 1e3:.0f} kB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, without markup, emoji codes and highlighting; a terminal breaks long lines itself."""
    console.print(Text(text, style), soft_wrap=True)


def finite(value: Any) -> Any:
    """Return JSON data with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_GAP = 3


@dataclass(frozen=True, slots=True)
class Heading:
    """Heading and layout of a column.

    Attributes:
        text: text of the heading.
        number: True to align the column to the right.
        wraps: True if its text may break between words.
        rank: columns with the highest rank are dropped first in a narrow terminal; 0 is never dropped.
    """

    text: str
    number: bool = False
    wraps: bool = False
    rank: int = 0


def narrow_table(title: str, headings: Sequence[Heading], rows: Sequence[Sequence[Text | str]], width: int) -> Table:
    """Return a table of at most `width` characters, without columns that are empty in every row.

    If the table is too wide, the gaps shrink, then columns are dropped by rank. A name in the first column is not broken up to
    half of the width.

    Args:
        title: title above the table.
        headings: the columns; the first one names the row.
        rows: one cell for each column; a cell may have several lines.
        width: width of the console, in characters; with the width of a pipe every cell has one line.
    """
    texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    if width >= PIPE_WIDTH:
        texts = [[Text(", ").join(cell.split("\n")) for cell in row] for row in texts]
    shown = [column for column in range(len(headings)) if any(row[column].plain for row in texts)]
    min_widths = [_widest(heading, [row[i] for row in texts], heading.wraps) for i, heading in enumerate(headings)]
    max_widths = [_widest(heading, [row[i] for row in texts], False) for i, heading in enumerate(headings)]
    min_widths[0] = min(min_widths[0], width // 2)
    gap = _GAP
    while (spare := width - sum(min_widths[column] + gap for column in shown) + gap) < 0:
        expendable = max(shown, key=lambda column: headings[column].rank)
        if gap > 1:
            gap -= 1
        elif headings[expendable].rank:
            shown.remove(expendable)
        else:
            break
    # The box draws one character of the gap.
    table = Table(title=Text(title, "bold"), box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.padding = (0, gap - 1, 0, 0)
    table.title_justify = table.caption_justify = "left"
    for column in shown:
        extra = min(max(spare, 0), max_widths[column] - min_widths[column])
        spare -= extra
        justify = "right" if headings[column].number else "left"
        table.add_column(headings[column].text, justify=justify, overflow="fold", max_width=min_widths[column] + extra)  # type: ignore[arg-type]
    for row in texts:
        table.add_row(*(row[column] for column in shown))
    return fit_title(table, width)


def _widest(heading: Heading, cells: Sequence[Text], words: bool) -> int:
    texts = [heading.text, *(cell.plain for cell in cells)]
    return max(cell_len(piece) for text in texts for piece in (text.split() if words else text.split("\n")) or [""])


# Largest number of visible bars. rich does not draw lines beyond the height of the terminal.
_MAX_BARS = 8
_BAR_WIDTH = 16


class BuildDisplay:
    """One progress bar for each model with its phase; without a terminal, a line on standard error every 10 s.

    Args:
        console: console to draw on.
        names: names of the models, in order.
        is_logged: print the lines; False where the caller prints its own.
    """

    def __init__(self, console: Console, names: Sequence[str], *, is_logged: bool = True) -> None:
        self._is_logged = is_logged
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            BarColumn(_BAR_WIDTH),
            TaskProgressColumn(table_column=Column(no_wrap=True, min_width=4)),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
            # Uses the remaining width: a phase may be truncated, the name of a model and the time may not.
            TextColumn("{task.fields[note]}", style="dim", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            disable=not console.is_terminal or is_pipe(console),
            expand=True,
        )
        self._names = list(names)
        self._tasks: dict[str, TaskID] = {
            name: self._progress.add_task(
                escape_markup(name), total=1.0, start=False, note="waits", visible=index < _MAX_BARS
            )
            for index, name in enumerate(names)
        }

    def __enter__(self) -> BuildDisplay:
        try:
            self._progress.start()
        except BaseException:
            # Ctrl-C during the first drawing: the cursor must become visible again.
            self._progress.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def report(self, name: str) -> Report:
        """Start the bar of a model and return the callback that moves it."""
        task = self._tasks[name]
        first = max(min(self._names.index(name) - _MAX_BARS // 2, len(self._names) - _MAX_BARS), 0)
        for index, other in enumerate(self._names):
            self._progress.update(self._tasks[other], visible=first <= index < first + _MAX_BARS)
        self._progress.start_task(task)
        log = log_lines(printable(name), sys.stderr) if self._progress.disable and self._is_logged else silent

        def report(done: float, note: str) -> None:
            self._progress.update(task, completed=done, note=escape_markup(note))
            log(done, note)

        return report

    def finish(self, name: str, note: str) -> None:
        """Complete the bar of a model.

        Args:
            name: name of the model.
            note: last phase, e.g. "built" or "failed".
        """
        self._progress.update(self._tasks[name], completed=1.0, note=note)
        self._progress.stop_task(self._tasks[name])


def make_folder(path: Path) -> None:
    """Create a folder for pages and check that it can be written.

    Raises:
        BuildError: it cannot be created or written, or has the name of a page.
    """
    if path.suffix in (".html", ".json", ".svg") and not path.is_dir():
        raise BuildError(
            f"{path} would be a folder with the name of a file: name the folder, e.g. {path.with_suffix('')}"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror}: name another folder, or make room") from error


def save_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document as JSON, with null for NaN and infinity; folders are made.

    Raises:
        BuildError: the file cannot be written.
    """
    save(path, json.dumps(finite(document), indent=2, allow_nan=False) + "\n")


def save(path: Path, text: str) -> None:
    """Write a page, a picture or JSON.

    Raises:
        BuildError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror}: name another file, or make room") from error
