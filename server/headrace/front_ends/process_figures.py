"""CPU time, memory and starts of the server's processes, read from /proc when they are wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.core.clock import NS_PER_S
from headrace.core.telemetry import ProcessFigures
from headrace.front_ends.counter_array import CounterArray

ENGINE, SUPERVISOR = "engine", "supervisor"


def process_name(number: int) -> str:
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
        read: Callable[[str], str] = lambda path: Path(path).read_text(),
    ) -> None:
        self._arrays = tuple(arrays)
        self._supervisor_pid = supervisor_pid
        self._read = read
        self._cpu_s: dict[int, float] = {}  # last value of each process that runs, by number

    def figures(self) -> list[ProcessFigures]:
        """Return the figures of the supervisor, the engine process and each front end; totals never fall."""
        cpu_s, memory_bytes = self._usage(self._supervisor_pid)
        result = [ProcessFigures(SUPERVISOR, self._supervisor_pid, cpu_s, memory_bytes, 1, 0)]
        for number, array in enumerate(self._arrays):
            pid, ended_ns = array.pid, array.ended_cpu_ns
            cpu_s, memory_bytes = self._usage(pid) if pid else (0.0, 0)
            # The last scrape may have read a process whose end is not recorded yet: its time is in `ended_cpu_ns` soon.
            total_s = self._cpu_s[number] = max(ended_ns / NS_PER_S + cpu_s, self._cpu_s.get(number, 0.0))
            result.append(
                ProcessFigures(process_name(number), pid, total_s, memory_bytes, array.starts, array.all_connections)
            )
        return result

    def _usage(self, pid: int) -> tuple[float, int]:
        """Return CPU seconds and resident bytes of a process; zeros if it has ended."""
        try:
            # The name is in brackets and may have blanks; user and system time are fields 14 and 15.
            times = self._read(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:13]
            pages = self._read(f"/proc/{pid}/statm").split()[1]
            cpu_s = sum(int(ticks) for ticks in times) / os.sysconf("SC_CLK_TCK")
            return cpu_s, int(pages) * os.sysconf("SC_PAGESIZE")
        except (OSError, ValueError, IndexError):
            return 0.0, 0
