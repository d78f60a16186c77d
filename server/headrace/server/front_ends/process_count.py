"""Most front-end processes for `--front-ends auto`, from the cores and the memory that the server may use.

Cores are those of the scheduler's affinity mask, or the CPU quota of the control group (cgroup v2, `cpu.max`) if that is less: a
container with a limit of 2 CPUs sees all cores of its machine. Memory counts where the control group limits it (`memory.max`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CORES_PER_FRONT_END = 1.6
"""One front end for each of these: the engine process and the models compute on the others. Measured: docs/performance.md."""
MIN_CORES = 4
MAX_FRONT_ENDS = 8
_MEMORY_OF_ONE = 256 << 20
"""One front end for each of these bytes of a memory limit: 12 MB of its own, and bodies in flight."""

_CGROUP_ROOT = "/sys/fs/cgroup"


class FrontEndChoice(NamedTuple):
    """A number of front ends and its reason, for the startup message.

    Attributes:
        processes: front-end processes; 0 for one process that does everything.
        reason: why, as part of a sentence.
    """

    processes: int
    reason: str


def choose_front_ends(cores: float, platform: str = sys.platform, memory_bytes: int | None = None) -> FrontEndChoice:
    """Return the most front ends for a machine.

    Args:
        cores: processor cores that the server may use; a quota need not be a whole number.
        platform: as `sys.platform`.
        memory_bytes: memory limit of the server; None without one.
    """
    if platform != "linux":
        return FrontEndChoice(0, f"front-end processes need Linux, this is {platform}")
    shown = f"{cores:.3g} {'core' if cores == 1 else 'cores'}"
    if cores < MIN_CORES:
        return FrontEndChoice(0, f"{shown}: one process does everything below {MIN_CORES}")
    count = min(int(cores / CORES_PER_FRONT_END), MAX_FRONT_ENDS)
    rule = f"one for {CORES_PER_FRONT_END:g}, at most {MAX_FRONT_ENDS}"
    if memory_bytes is not None and memory_bytes < count * _MEMORY_OF_ONE:
        shown, rule = f"a memory limit of {memory_bytes >> 20} MiB", f"one for {_MEMORY_OF_ONE >> 20} MiB"
        count = memory_bytes // _MEMORY_OF_ONE
    return FrontEndChoice(count, f"{shown}: {rule}")


def available_cores(read: Callable[[str], str] = lambda path: Path(path).read_text()) -> float:
    """Return the processor cores that this process may use.

    Args:
        read: returns the text of a file; raises OSError.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_cores(read)
    return float(affinity) if quota is None else min(float(affinity), quota)


def quota_cores(read: Callable[[str], str]) -> float | None:
    """Return the smallest CPU quota of the process's control group (v2) and the groups above it, in cores; None for none.

    Args:
        read: returns the text of a file; raises OSError.
    """
    quotas = []
    for text in _group_files("cpu.max", read):
        quota, _, period = text.strip().partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(read: Callable[[str], str] = lambda path: Path(path).read_text()) -> int | None:
    """Return the smallest memory limit of the process's control group (v2) and the groups above it, in bytes; None for none.

    Args:
        read: returns the text of a file; raises OSError.
    """
    return min(map(int, filter(str.isdecimal, map(str.strip, _group_files("memory.max", read)))), default=None)


def _group_files(name: str, read: Callable[[str], str]) -> Iterator[str]:
    """Yield a file of the process's control group and of those above it; groups without it are left out."""
    try:
        groups = read("/proc/self/cgroup").splitlines()
    except OSError:
        return
    # In a container the group is usually "/": its namespace begins at the container's own group.
    path = next((line[3:] for line in groups if line.startswith("0::/")), "/")
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts) + 1):
        with suppress(OSError, ValueError):  # the root group has no such file
            yield read("/".join([_CGROUP_ROOT, *parts[:depth], name]))
