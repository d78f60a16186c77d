"""Processes of Linux, for tests of child processes and their end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.waiting import until


def children(parent: int) -> list[int]:
    """Return the process ids of a process's live children."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return sorted(number for number in numbers if _state(number)[1] == parent and alive(number))


def alive(process: int) -> bool:
    """Return False if a process has ended, also before its parent waits for it."""
    return _state(process)[0] not in ("", "Z", "X")


def words(process: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def isolated_children(parent: int) -> list[int]:
    """Return the live children that run a model for a process."""
    return [child for child in children(parent) if "headrace.runtimes.isolated.child" in words(child)]


def stop(process: int) -> None:
    """Stop a process, and wait until all of its threads have stopped: one may run on while another takes the signal."""
    os.kill(process, signal.SIGSTOP)
    threads = Path(f"/proc/{process}/task")
    until(lambda: all(_state_in(thread / "stat")[0] == "T" for thread in threads.iterdir()))


def processor_s(process: int) -> float:
    """Processor time that a process has used, without its children's, seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def isolated_children_of_this_process() -> list[int]:
    """Return the live children of this process that run a model."""
    return isolated_children(os.getpid())


def _state(process: int) -> tuple[str, int]:
    return _state_in(Path(f"/proc/{process}/stat"))


def _state_in(file: Path) -> tuple[str, int]:
    try:
        stat = file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, int(parent)
