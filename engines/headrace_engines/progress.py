"""Progress callbacks of builds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

# Callback with the finished share of the work (0..1) and a short text, the current phase.
Report = Callable[[float, str], None]
Clock = Callable[[], float]

PLUGIN_PHASES = "plug-ins: "
"""Start of the phases of `headrace build --plugins`, each of which is a line of output."""

# A line is repeated after this long, as a sign of life.
_REPEAT_S = 5.0
# Log lines of a phase without a terminal; short builds print none.
_LOG_S = 10.0


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


def with_progress_lines(report: Report, clock: Clock = time.monotonic) -> Report:
    """Return a callback that also prints lines "progress SHARE PHASE" to standard output.

    Each phase is printed once for each percent, and again after 5 s. TensorRT's builder alternates between nested phases
    thousands of times within one percent.

    Args:
        report: the callback.
        clock: monotonic seconds.
    """
    percent, phases, printed_s = "", set[str](), 0.0

    def print_line(done: float, note: str) -> None:
        nonlocal percent, printed_s
        share, now_s = f"{min(max(done, 0.0), 1.0):.2f}", clock()
        if share != percent:
            percent = share
            phases.clear()
        if note not in phases or now_s - printed_s >= _REPEAT_S:
            phases.add(note)
            printed_s = now_s
            sys.stdout.write(f"progress {share} {note}\n")
            sys.stdout.flush()
        report(done, note)

    return print_line


def log_lines(name: str, stream: TextIO, clock: Clock = time.monotonic) -> Report:
    """Return a callback that prints a line "NAME: 45%, PHASE" every 10 s, for logs and other outputs without a terminal.

    Args:
        name: name of the model.
        stream: standard error, as a rule.
        clock: monotonic seconds.
    """
    printed_s = clock()

    def print_line(done: float, note: str) -> None:
        nonlocal printed_s
        now_s = clock()
        if now_s - printed_s >= _LOG_S:
            printed_s = now_s
            stream.write(f"{name}: {min(max(done, 0.0), 1.0):.0%}, {note}\n")
            stream.flush()

    return print_line
