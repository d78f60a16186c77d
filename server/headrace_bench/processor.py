"""Processor time of a server on the same machine, with its child processes (Linux)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from headrace.core.errors import BadRequest


def tree_cpu_s(pid: int) -> float:
    """Return the processor time in seconds of a process and of its descendants that run now.

    Raises:
        BadRequest: this system shows no such process.
    """
    try:
        own = cpu_s(pid)
    except (OSError, ValueError, IndexError):
        raise BadRequest(
            f"--server-pid {pid}: /proc shows no such process: name the server's process on this machine (Linux), or leave it out"
        ) from None
    return own + sum(_child_cpu_s(child) for child in children(pid))


def _child_cpu_s(pid: int) -> float:
    """Return the time of a process tree below the server; 0 for a process that has ended meanwhile."""
    try:
        return cpu_s(pid) + sum(_child_cpu_s(child) for child in children(pid))
    except (OSError, ValueError, IndexError):
        return 0.0


def cpu_s(pid: int) -> float:
    """Return user and system time in seconds of a process alone (proc_pid_stat(5), fields 14 and 15).

    Raises:
        OSError: there is no such process.
    """
    # The name in parentheses may hold blanks.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started; those of threads that end meanwhile are left out."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, file.read_text().split())
    return found
