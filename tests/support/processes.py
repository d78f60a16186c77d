"""Processes as Linux tells of them, for tests of what is started and must end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def children(parent: int) -> list[int]:
    """Process ids of a process's children that live."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return sorted(number for number in numbers if _state(number)[1] == parent and alive(number))


def alive(process: int) -> bool:
    """False if it has ended, also while its status has not been asked for."""
    return _state(process)[0] not in ("", "Z", "X")


def words(process: int) -> list[str]:
    """Its command line; nothing of a process that has gone meanwhile."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def isolated_children(parent: int) -> list[int]:
    """Those that run a model for it."""
    return [child for child in children(parent) if "headrace.backends.process.child" in words(child)]


def eventually(true: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def processor_s(process: int) -> float:
    """Processor time that a process has used, without its children's, seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def isolated_children_of_this_process() -> list[int]:
    """Of this process."""
    return isolated_children(os.getpid())


def _state(process: int) -> tuple[str, int]:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, int(parent)
