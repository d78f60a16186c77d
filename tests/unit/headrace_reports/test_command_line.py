"""Text of commands in a terminal: brackets of names and errors are no markup, whichever command prints them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from headrace_reports.command_line import open_console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[3]
TEXT = "pip install '.[demo]' of [red]m[/red] [/]"


@pytest.mark.parametrize("stderr", [False, True])
def test_brackets_are_printed(capsys: pytest.CaptureFixture[str], stderr: bool) -> None:
    console = open_console(stderr=stderr)
    console.print(TEXT, style="red", soft_wrap=True)
    table = Table(title=TEXT)
    table.add_column(TEXT)
    table.add_row(TEXT)
    console.print(table)
    captured = capsys.readouterr()
    assert (captured.err if stderr else captured.out).count(TEXT) == 4


def test_every_command_prints_through_such_a_console() -> None:
    files = [path for folder in ("server", "engines") for path in (ROOT / folder).rglob("*.py")]
    made = {path.name for path in files if re.search(r"(?<![\w.])Console\(", path.read_text(encoding="utf-8"))}
    assert made == {"command_line.py", "program.py"}, (
        "program.py has the console of the log, whose handler reads no markup"
    )
    columns = [line for path in files for line in re.findall(r"TextColumn\(.*", path.read_text(encoding="utf-8"))]
    assert columns
    assert not [line for line in columns if line.count("TextColumn(") > line.count("markup=False")]
