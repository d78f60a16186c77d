"""How much of a GPU's memory this process has taken, whoever else uses the GPU at the same time."""

from __future__ import annotations

import os

from headrace.cuda import devices
from headrace.cuda.driver import current, load


def process_gpu_bytes(device: int = 0) -> int:
    """Bytes that this process has of a GPU's memory, its context and code included.

    Where NVML does not tell (in containers that hide processes), those of all processes: then the GPU must be the test's alone.
    """
    told = processes(device).get(os.getpid(), 0)
    if told:
        return told
    with current(device):
        free, total = load().mem_get_info()
    return int(total) - int(free)


def processes(device: int = 0) -> dict[int, int]:
    """By process what it has of a GPU's memory, in bytes, 0 where that is not told; empty where NVML does not tell at all."""
    pynvml = devices.load_nvml()
    if pynvml is None:
        return {}
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(str(load().Device(device).pci_bus_id()))
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return {}
    return {process.pid: process.usedGpuMemory or 0 for process in running}
