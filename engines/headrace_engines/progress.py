"""Progress callbacks of builds."""

from __future__ import annotations

import sys
from collections.abc import Callable

# Callback with the finished share of the work (0..1) and a short text, the current phase.
Report = Callable[[float, str], None]

PLUGIN_PHASES = "plug-ins: "
"""Start of the phases of `headrace build --plugins`, each of which is a line of output."""


def silent(_done: float, _note: str) -> None:
    """Discard progress."""


def part(report: Report, start: float, end: float) -> Report:
    """Return a callback whose 0..1 is `start`..`end` of the whole work."""
    return lambda done, note: report(start + (end - start) * min(max(done, 0.0), 1.0), note)


def with_lines(report: Report, start: str, write: Callable[[str], None]) -> Report:
    """Return a callback that also passes each new phase that begins with `start` to `write`."""
    last = ""

    def write_line(done: float, note: str) -> None:
        nonlocal last
        if note.startswith(start) and note != last:
            last = note
            write(note)
        report(done, note)

    return write_line


def with_progress_lines(report: Report) -> Report:
    """Return a callback that also prints a line "progress SHARE PHASE" for each percent or new phase."""
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
