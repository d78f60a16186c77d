"""Which GPUs there are, and what an artefact for one of them depends on."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import Unsupported
from headrace.cuda import driver, libcuda, nvml

# What the driver shows of a GPU that it has: on Linux, on Windows' subsystem for Linux, on Jetson.
_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvgpu"))
_VERSION_FILE = Path("/proc/driver/nvidia/version")


class Gpu(NamedTuple):
    """One GPU.

    Attributes:
        name: e.g. "NVIDIA H200".
        capability: compute capability, e.g. "9.0".
        driver: major version of NVIDIA's driver, e.g. 580; of its CUDA version where the driver's own is not told.
        memory_bytes: all of its memory.
    """

    name: str
    capability: str
    driver: int
    memory_bytes: int


def is_visible() -> bool:
    """True if an NVIDIA driver and a GPU are there; loads the driver's library, but starts nothing."""
    try:
        libcuda.library()
    except OSError:
        return False
    return any(path.exists() for path in _DEVICE_FILES)


def count() -> int:
    """How many GPUs the driver finds, 0 where there is no PyCUDA or no driver."""
    try:
        return int(driver.load().Device.count())
    except Unsupported:
        return 0


def describe(ordinal: int = 0) -> Gpu:
    """One GPU.

    Raises:
        Unsupported: there is no PyCUDA, no driver or no such GPU; says what to install.
    """
    cuda = driver.load()
    found = cuda.Device.count()
    if not 0 <= ordinal < found:
        raise Unsupported(f"CUDA device {ordinal} is not there: this machine has devices 0 to {found - 1}")
    with driver.check("asking what the GPU is"):
        device = cuda.Device(ordinal)
        major, minor = device.compute_capability()
        version = driver_major() or cuda.get_driver_version() // 1000
        return Gpu(str(device.name()), f"{major}.{minor}", int(version), int(device.total_memory()))


@functools.cache
def driver_major() -> int:
    """Major version of NVIDIA's driver, 0 where it cannot be found out."""
    text = nvml.driver_version()
    if not text:
        try:
            found = re.search(r"Module\D*?(\d+)\.\d+", _VERSION_FILE.read_text())
        except OSError:
            found = None
        text = found[1] if found else ""
    major = text.partition(".")[0]
    return int(major) if major.isdecimal() else 0
