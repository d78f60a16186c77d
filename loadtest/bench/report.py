"""The results as tables on the terminal, as Markdown in a page, and as JSON."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.bench.results import CaseResult, Comparison, Figure, Spread

STYLES = {"PASS": "bold green", "MISS": "bold red", "-": "dim"}
FIGURE_COLUMNS = ("what", "unit", "median", "min", "max", "rounds")
COMPARISON_COLUMNS = ("comparison", "median", "min", "max", "target", "")


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the bench.

    Attributes:
        command: as it was typed.
        date: when, ISO 8601.
        machine: label to text.
        results: one for each case that ran.
    """

    command: str
    date: str
    machine: Mapping[str, str]
    results: Sequence[CaseResult]

    @property
    def status(self) -> int:
        """Exit status: 2 if a case failed, 1 if a target was missed, else 0."""
        if any(result.failure for result in self.results):
            return 2
        return int(any(result.missed for result in self.results))


def measured(program: str, words: Sequence[str], machine: Mapping[str, str], results: Sequence[CaseResult]) -> Report:
    """Return the report of a program that was called with these words and ends now."""
    command = shlex.join(["python", "-m", program, *words])
    return Report(command, time.strftime("%Y-%m-%dT%H:%M:%S%z"), machine, results)


def print_report(report: Report, console: Console) -> None:
    """Tables of figures, then of comparisons with the target beside each."""
    for result in report.results:
        console.rule(f"[bold]{result.name}[/]  {result.title}", align="left")
        if result.failure:
            console.print(f"FAILED: {result.failure}", style="bold red", markup=False)
            continue
        console.print(_table(FIGURE_COLUMNS, map(figure_row, result.figures)))
        for note in result.notes:
            console.print(note, style="dim", markup=False)
    compared = [comparison for result in report.results for comparison in result.comparisons]
    if compared:
        console.rule("[bold]comparisons[/]", align="left")
        table = _table(COMPARISON_COLUMNS, [])
        for result in report.results:
            for comparison in result.comparisons:
                *cells, verdict = comparison_row(comparison)
                table.add_row(f"{result.name}: {cells[0]}", *cells[1:], f"[{STYLES[verdict]}]{verdict}[/]")
        console.print(table)
    for label, text in report.machine.items():
        console.print(f"{label:>10}  {text}", style="dim", markup=False, highlight=False)


def to_json(report: Report) -> str:
    """Everything, the verdicts included."""
    results = []
    for result in report.results:
        plain = asdict(result)
        for comparison, entry in zip(result.comparisons, plain["comparisons"], strict=True):
            entry["verdict"] = comparison.verdict
        results.append(plain)
    whole = {"command": report.command, "date": report.date, "machine": dict(report.machine), "results": results}
    return json.dumps(whole, indent=2) + "\n"


def to_markdown(report: Report) -> str:
    """The block that stands between the markers of a page."""
    lines = [f"Written by `{report.command}` on {report.date}.", ""]
    lines += markdown_table(("machine", ""), report.machine.items())
    compared = [
        (f"`{result.name}`", *comparison_row(comparison))
        for result in report.results
        for comparison in result.comparisons
    ]
    if compared:
        lines += ["", "### Ratios and targets", ""]
        lines += markdown_table(("case", *COMPARISON_COLUMNS), compared)
    lines += ["", "### Figures"]
    for result in report.results:
        lines += ["", f"**`{result.name}`**: {result.title}", ""]
        if result.failure:
            lines.append(f"Failed: {result.failure.splitlines()[0]}")
            continue
        lines += markdown_table(FIGURE_COLUMNS, map(figure_row, result.figures))
        if result.notes:
            lines += ["", *(f"- {note}" for note in result.notes)]
    return "\n".join(lines)


def replace_block(page: str, block: str, name: str = "bench") -> str:
    """The page with the text between two markers, `<!-- bench:begin -->` and `<!-- bench:end -->`, replaced.

    Raises:
        ValueError: the markers are not there exactly once each, in their order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"expected one line '{begin}' and after it one line '{end}'")
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{block.strip()}\n{end}{after}"


def write_markdown(report: Report, path: Path) -> None:
    """Replace the block in a page; ValueError, and the page untouched, if it has no markers."""
    path.write_text(replace_block(path.read_text(), to_markdown(report)))


def number(value: float) -> str:
    """Three significant digits and more, no exponent: 0.583, 12.4, 118, 29,214."""
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}"


def _cells(spread: Spread) -> tuple[str, str, str]:
    return number(spread.median), number(spread.low), number(spread.high)


def figure_row(figure: Figure) -> tuple[str, ...]:
    """A line of a table with `FIGURE_COLUMNS`."""
    return figure.contender, figure.unit, *_cells(figure.spread), str(figure.spread.rounds)


def comparison_row(comparison: Comparison) -> tuple[str, ...]:
    """A line of a table with `COMPARISON_COLUMNS`."""
    label = f"{comparison.label} ({comparison.unit})" if comparison.unit else comparison.label
    target = str(comparison.target) if comparison.target else "-"
    return label, *_cells(comparison.spread), target, comparison.verdict


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in ("median", "min", "max", "rounds") else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table as Markdown, line by line."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
