"""Processor time of a server on the same machine, with its child processes (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.core.errors import BadRequest


def tree_cpu_s(pid: int) -> float:
    """Return the processor time in seconds of a process and of its descendants that run now.

    Raises:
        BadRequest: this system shows no such process.
    """
    try:
        own = _cpu_s(pid)
    except (OSError, ValueError, IndexError):
        raise BadRequest(
            f"--server-pid {pid}: /proc shows no such process: name the server's process on this machine (Linux), or leave it out"
        ) from None
    return own + sum(_child_cpu_s(child) for child in _children(pid))


def _child_cpu_s(pid: int) -> float:
    """Return the time of a process tree below the server; 0 for a process that has ended meanwhile."""
    try:
        return _cpu_s(pid) + sum(_child_cpu_s(child) for child in _children(pid))
    except (OSError, ValueError, IndexError):
        return 0.0


def _cpu_s(pid: int) -> float:
    """Return user and system time of a process (proc_pid_stat(5), fields 14 and 15)."""
    # The name in parentheses may hold blanks.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []
