"""How much of a GPU's memory this process has taken, whoever else uses the GPU at the same time."""

from __future__ import annotations

import ctypes
import os

from server.cuda.driver import current, load

_MOST_PROCESSES = 256
_NOT_TOLD = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of `nvmlDeviceGetComputeRunningProcesses_v3`."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def own_bytes(device: int = 0) -> int:
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
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        running = nvml.nvmlDeviceGetComputeRunningProcesses_v3
    except (OSError, AttributeError):
        return {}
    if nvml.nvmlInit_v2() != 0:
        return {}
    try:
        handle, count = ctypes.c_void_p(), ctypes.c_uint(_MOST_PROCESSES)
        found = (_Process * _MOST_PROCESSES)()
        address = str(load().Device(device).pci_bus_id()).encode()
        failed = nvml.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(handle))
        failed = failed or running(handle, ctypes.byref(count), found)
    finally:
        nvml.nvmlShutdown()
    if failed:
        return {}
    return {each.pid: each.used_bytes if each.used_bytes != _NOT_TOLD else 0 for each in found[: count.value]}
