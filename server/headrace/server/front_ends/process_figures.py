"""CPU time, memory and starts of the server's processes, read from /proc on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.core.clock import NS_PER_S
from headrace.core.response_bodies import ProcessFigures
from headrace.server.front_ends.counter_array import CounterArray

ENGINE, SUPERVISOR = "engine", "supervisor"


def read_text(path: str) -> str:
    """Return the text of a file; raises OSError."""
    return Path(path).read_text("latin-1")


class ProcessUsage(NamedTuple):
    """CPU time and resident memory of a process; zeros once it has ended.

    Attributes:
        cpu_ns: user and system time in nanoseconds, without that of its children.
        memory_bytes: resident memory; 0 between its end and the parent's `wait`.
    """

    cpu_ns: int
    memory_bytes: int


def process_usage(pid: int, read: Callable[[str], str] = read_text) -> ProcessUsage:
    """Read the usage of a process.

    Args:
        pid: process id.
        read: returns the text of a file; raises OSError.
    """
    try:
        # The name is in brackets and may have blanks; user and system time are fields 14 and 15.
        ticks = sum(map(int, read(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:13]))
        pages = int(read(f"/proc/{pid}/statm").split()[1])
    except (OSError, ValueError, IndexError):
        return ProcessUsage(0, 0)
    return ProcessUsage(ticks * NS_PER_S // os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGESIZE"))


def label(number: int) -> str:
    """Return the name of a process in metrics and on the page: "engine" for 0, "front_end_1" for 1."""
    return f"front_end_{number}" if number else ENGINE


class ServerProcesses:
    """The processes of a server with front ends.

    Args:
        arrays: of the engine process, then of each front end.
        supervisor_pid: process id of the supervisor.
        read: returns the text of a file; raises OSError.
    """

    def __init__(
        self,
        arrays: Sequence[CounterArray],
        supervisor_pid: int,
        read: Callable[[str], str] = read_text,
    ) -> None:
        self._arrays = tuple(arrays)
        self._supervisor_pid = supervisor_pid
        self._read = read
        self._cpu_ns: dict[int, int] = {}  # last value of each process, by number

    def figures(self) -> list[ProcessFigures]:
        """Return the figures of the supervisor, the engine process and each front end; totals never fall."""
        usage = process_usage(self._supervisor_pid, self._read)
        result = [
            ProcessFigures(SUPERVISOR, self._supervisor_pid, usage.cpu_ns / NS_PER_S, usage.memory_bytes, 1, 0, 0, True)
        ]
        for number, array in enumerate(self._arrays):
            pid, ended_ns = array.pid, array.ended_cpu_ns
            usage = process_usage(pid, self._read) if pid else ProcessUsage(0, 0)
            # The last scrape may have read a process whose end is not recorded yet: its time is in `ended_cpu_ns` soon.
            total_ns = self._cpu_ns[number] = max(ended_ns + usage.cpu_ns, self._cpu_ns.get(number, 0))
            counts = array.starts, array.all_connections, array.moved, array.is_expected
            result.append(ProcessFigures(label(number), pid, total_ns / NS_PER_S, usage.memory_bytes, *counts))
        return result
