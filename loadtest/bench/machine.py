"""Description of the machine, reported with every figure."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console

from loadtest.bench.session import Cores
from loadtest.servers import ROOT

_BUSY_WARNING = 0.1
_OPEN_FILES = 8192
PACKAGES = ("onnxruntime", "numpy", "uvicorn", "uvloop", "httptools", "fastapi", "pydantic", "grpcio")


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def describe(cores: Cores, busy: float) -> dict[str, str]:
    """Processor, cores, how busy it was, memory, system, versions, commit: label to text, in the order to print."""
    packages = ", ".join(f"{name} {package_version(name)}" for name in PACKAGES)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    used = f"{len(cores.both)} used: {_list(cores.server)} for servers, {_list(cores.client)} for clients"
    wrk = _first_line(["wrk", "--version"]).split(" Copyright")[0]
    return {
        "processor": processor(),
        "cores": f"{os.cpu_count()} in the machine, {used}",
        "memory": f"{memory_bytes / 2**30:.1f} GiB",
        "other load": f"{busy:.0%} of the cores were in use before the run",
        "system": system(),
        "python": python(),
        "packages": packages,
        "clients": ", ".join(filter(None, (wrk, _first_line(["h2load", "--version"])))),
        "commit": commit(),
    }


def _list(cores: tuple[int, ...]) -> str:
    return ", ".join(map(str, cores))


def busy_share(seconds: float = 1.0) -> float:
    """The share of all cores that is in use now, 0 to 1, the hypervisor's other guests included: before a run it is noise."""
    idle_before, all_before = _idle_and_all()
    time.sleep(seconds)
    idle_after, all_after = _idle_and_all()
    return 1.0 - (idle_after - idle_before) / max(1, all_after - all_before)


def warned_busy_share(console: Console, effect: str) -> float:
    """Return the share of the cores that others use, after a warning with its effect if that is more than a tenth."""
    busy = busy_share()
    if busy > _BUSY_WARNING:
        console.print(f"{busy:.0%} of the cores are in use by others: {effect}", style="yellow")
    return busy


def allow_open_files() -> None:
    """Raise the limit of open files of this process and its children, as far as it may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _idle_and_all() -> tuple[int, int]:
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def system() -> str:
    """The operating system's name and release."""
    return f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"


def python() -> str:
    """The interpreter and its version."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def commit() -> str:
    """The commit of this repository."""
    return _first_line(["git", "describe", "--always", "--dirty"]) or "not a git checkout"


def processor() -> str:
    """The processor's name, family and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    name = fields.get("model name", platform.machine())
    numbers = [
        f"{label} {fields[key]}" for label, key in (("family", "cpu family"), ("model", "model")) if key in fields
    ]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def package_version(package: str) -> str:
    """Of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _first_line(command: list[str]) -> str:
    """First line of a command's output, "" if it cannot be run; wrk exits with 1 after its version."""
    try:
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return ""
    return next(iter(finished.stdout.splitlines()), "").strip()
