"""Tables on narrow terminals: the order of dropped columns, and no truncated cells."""

from __future__ import annotations

import io

import pytest
from headrace_engines.report import Heading, narrow_table
from rich.console import Console
from rich.text import Text

HEADINGS = (
    Heading("model"),
    Heading("state", wraps=True),
    Heading("nothing"),
    Heading("size", number=True, rank=1),
    Heading("time", number=True, rank=2),
)
ROWS = [
    [Text(cell) for cell in ("efficientnet_lite0", "published, marked", "", "18.5 MB", "11.5 s")],
    [Text(cell) for cell in ("tiny", "refused", "", "2.7 kB", "0.5 s")],
]


def drawn(width: int, rows: list[list[Text]] = ROWS) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(narrow_table("Title", HEADINGS, rows, width))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize(
    ("width", "headings", "whole"),
    [
        (80, "model state size time", "published, marked"),
        # 18 + 10 + 7 + 6 and a space between each.
        (44, "model state size time", "published,"),
        (43, "model state size", "published,"),
        (37, "model state size", "published,"),
        (36, "model state", "published, marked"),
    ],
)
def test_columns_are_dropped_by_rank_before_a_name_wraps(width: int, headings: str, whole: str) -> None:
    _title, heads, _line, first, *_ = drawn(width)
    assert heads.split() == headings.split(), "an empty column is omitted"
    assert first.startswith("efficientnet_lite0 ")
    assert whole in first


def test_a_name_longer_than_half_of_the_width_is_folded() -> None:
    lines = drawn(60, [[Text("n" * 50), *ROWS[0][1:]]])
    assert "".join(lines).count("n" * 30) == 1
    assert sum(line.count("n") for line in lines[3:]) == 50
    assert "time" in lines[1]


def test_markup_and_lines_in_cells_are_text() -> None:
    lines = drawn(80, [[Text("[red]m[/]"), Text("two\nlines"), *ROWS[0][2:]]])
    assert any("[red]m[/]" in line for line in lines)
