"""Progress reports of long work."""

from __future__ import annotations

import sys
from collections.abc import Callable

# Called with the share of the work that is done, 0..1, and a few words on what is being done.
Report = Callable[[float, str], None]


def silent(_done: float, _note: str) -> None:
    """Ignore progress."""


def part(report: Report, start: float, end: float) -> Report:
    """Return a report for a part of the work, from `start` to `end` of the whole."""
    return lambda done, note: report(start + (end - start) * min(max(done, 0.0), 1.0), note)


def with_progress_lines(report: Report) -> Report:
    """Return a report that also prints a line "progress SHARE PHASE" for each whole percent or phase."""
    last = ""

    def print_line(done: float, note: str) -> None:
        nonlocal last
        line = f"progress {min(max(done, 0.0), 1.0):.2f} {note}"
        if line != last:
            last = line
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        report(done, note)

    return print_line
