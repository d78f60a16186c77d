"""GPU memory of this process, while other processes use the GPU."""

from __future__ import annotations

import os

from headrace.runtimes.cuda import devices
from headrace.runtimes.cuda.driver import current, load


def process_gpu_bytes(device: int = 0) -> int:
    """Return the bytes of GPU memory of this process, its context and code included.

    Without NVML's report (in containers that hide processes) those of all processes: no other process may use the GPU then.
    """
    used_bytes = processes(device).get(os.getpid(), 0)
    if used_bytes:
        return used_bytes
    with current(device):
        free, total = load().mem_get_info()
    return int(total) - int(free)


def processes(device: int = 0) -> dict[int, int]:
    """Return GPU memory in bytes by process id, 0 if not reported; empty without a report of NVML."""
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
