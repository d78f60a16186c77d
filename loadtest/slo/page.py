"""The parts' tables in a page: each between two markers of its own, so that parts can be measured one by one."""

from __future__ import annotations

from loadtest.bench.report import (
    COMPARISON_COLUMNS,
    FIGURE_COLUMNS,
    Report,
    comparison_row,
    figure_row,
    markdown_table,
    replace_block,
)
from loadtest.bench.results import CaseResult


def marker(result: CaseResult) -> str:
    """The name between the comment signs of a part's two markers."""
    return f"slo-{result.name}"


def written(page: str, report: Report) -> str:
    """The page with the blocks of the parts that were measured replaced; those that failed stay.

    Raises:
        ValueError: a part has no block in the page.
    """
    for result in report.results:
        if not result.failure:
            page = replace_block(page, _block(result, report), marker(result))
    return page


def _block(result: CaseResult, report: Report) -> str:
    where = "; ".join(report.machine[label] for label in ("processor", "cores", "other load", "python", "commit"))
    lines = [f"`{report.command}`, {report.date}, {where}.", ""]
    lines += markdown_table(COMPARISON_COLUMNS, map(comparison_row, result.comparisons))
    if result.figures:
        rows = map(figure_row, result.figures)
        lines += ["", *markdown_table(FIGURE_COLUMNS, rows)]
    return "\n".join([*lines, "", *(f"- {note}" for note in result.notes)])
