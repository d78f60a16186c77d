"""Description of the machine, read without using a GPU: the benchmark must survive the failure of one."""

from __future__ import annotations

import os
import subprocess

from loadtest.bench import machine

PACKAGES = ("tensorrt", "pycuda", "onnxruntime", "numpy", "uvloop", "httptools", "grpcio", "tritonclient")
_QUERY = "name,driver_version,memory.total,clocks.max.sm"
_STATE = "clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used"
_TIMEOUT_S = 20.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus() -> list[str]:
    """Description of each GPU; empty without nvidia-smi."""
    return _read_lines(_QUERY)


def states() -> list[str]:
    """Clocks, heat, power and memory in use of each GPU now: a GPU that was slowed down explains a low figure."""
    return _read_lines(_STATE)


def seeing(gpu: int) -> dict[str, str]:
    """The environment of a process that is to see one GPU only, of those that this one sees."""
    seen = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    return {_VISIBLE: seen[gpu] if seen else str(gpu)}


def _read_lines(query: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    if os.environ.get(_VISIBLE):
        command += ["-i", os.environ[_VISIBLE]]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in finished.stdout.splitlines() if line.strip()]


def describe(found: list[str]) -> dict[str, str]:
    """Label to text, in the order to print."""
    state = {f"GPU {number}": line for number, line in enumerate(found)}
    return state | {
        "processor": machine.processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "other load": f"{machine.busy_share():.0%} of the cores were in use before the run",
        "system": machine.system(),
        "python": machine.python(),
        "packages": ", ".join(f"{name} {machine.package_version(name)}" for name in PACKAGES),
        "commit": machine.commit(),
    }
