"""Tables, JSON, and the block in a page."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.bench.report import (
    Report,
    number,
    print_report,
    replace_block,
    to_json,
    to_markdown,
    write_markdown,
)
from loadtest.bench.results import CaseResult, Comparison, Figure, Spread, at_least

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
REPORT = Report(
    command="python -m loadtest.bench",
    date="2026-01-02T03:04:05+0000",
    machine={"processor": "a processor", "cores": "2"},
    results=[
        CaseResult(
            name="tiny-64",
            title="tiny on one core",
            figures=(Figure("headrace", "requests/s", Spread(29214.0, 28000.0, 30000.0, 5)),),
            comparisons=(
                Comparison("headrace / bare ASGI", "", Spread(0.583, 0.57, 0.6, 5), at_least(0.5)),
                Comparison("headrace / naive", "", Spread(4.9, 4.5, 5.2, 5), at_least(5.0)),
            ),
            notes=("a note",),
        ),
        CaseResult(name="memory", title="memory", failure="the server died\nwith a long log"),
    ],
)


def test_block_is_replaced_and_nothing_else() -> None:
    page = f"# Title\n\n{BEGIN}\nold | figures\n{END}\n\nAfter.\n"
    assert replace_block(page, "new\n") == f"# Title\n\n{BEGIN}\nnew\n{END}\n\nAfter.\n"
    others = page.replace("bench:", "slo:")
    assert replace_block(page + others, "new", "slo") == page + replace_block(others, "new", "slo")


def test_replacing_twice_is_replacing_once() -> None:
    page = f"a\n{BEGIN}\n{END}\nb\n"
    once = replace_block(page, to_markdown(REPORT))
    assert replace_block(once, to_markdown(REPORT)) == once


@pytest.mark.parametrize(
    "page", ["no markers", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n"], ids=str.strip
)
def test_a_page_without_one_block_is_refused_untouched(page: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(page)
    with pytest.raises(ValueError, match="bench:begin"):
        write_markdown(REPORT, path)
    assert path.read_text() == page


def test_markdown_has_every_figure_and_verdict() -> None:
    block = to_markdown(REPORT)
    assert "| headrace | requests/s | 29,214 | 28,000 | 30,000 | 5 |" in block
    assert "| `tiny-64` | headrace / bare ASGI | 0.583 | 0.570 | 0.600 | >= 0.5 | PASS |" in block
    assert "| `tiny-64` | headrace / naive | 4.900 | 4.500 | 5.200 | >= 5 | MISS |" in block
    assert "Failed: the server died" in block
    assert "- a note" in block
    assert "`python -m loadtest.bench`" in block
    tables = [line for line in block.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_terminal_shows_targets_verdicts_and_failures() -> None:
    stream = io.StringIO()
    print_report(REPORT, Console(file=stream, width=140))
    printed = stream.getvalue()
    for expected in ("PASS", "MISS", ">= 0.5", "FAILED: the server died", "29,214", "a processor"):
        assert expected in printed


def test_json_carries_the_verdicts() -> None:
    whole = json.loads(to_json(REPORT))
    assert [comparison["verdict"] for comparison in whole["results"][0]["comparisons"]] == ["PASS", "MISS"]
    assert whole["results"][1]["failure"].startswith("the server died")
    assert whole["machine"]["cores"] == "2"


@pytest.mark.parametrize(("value", "text"), [(29214.4, "29,214"), (118.2, "118"), (12.44, "12.4"), (0.5829, "0.583")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
