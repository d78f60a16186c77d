"""GPUs of this machine: names and capabilities, and readings of load, memory, power, clocks and errors by NVML.

NVML, NVIDIA's management library, comes with the driver; its Python binding (pynvml) is in the package nvidia-ml-py.
Every figure is optional: boards support different ones, and an older driver lacks newer functions.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headrace.core.errors import HeadraceError, Unsupported
from headrace.core.telemetry import GpuReading
from headrace.runtimes.cuda import driver

# Device files of the driver: on Linux, on Windows Subsystem for Linux, on Jetson.
_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvgpu"))
_VERSION_FILE = Path("/proc/driver/nvidia/version")


class Gpu(NamedTuple):
    """One GPU.

    Attributes:
        name: e.g. "NVIDIA H200".
        capability: compute capability, e.g. "9.0".
        driver: major version of NVIDIA's driver, e.g. 580; the major CUDA version if the driver's own is unknown.
        memory_bytes: total memory.
    """

    name: str
    capability: str
    driver: int
    memory_bytes: int


def has_device_files() -> bool:
    """Return True if an NVIDIA driver has its device files here; loads nothing."""
    return any(path.exists() for path in _DEVICE_FILES)


def is_visible() -> bool:
    """Return True if an NVIDIA driver and a GPU are present; loads the driver's library, but does not initialise it."""
    try:
        driver.library()
    except OSError:
        return False
    return has_device_files()


def count() -> int:
    """Return the number of GPUs, 0 without PyCUDA or a driver."""
    try:
        return int(driver.load().Device.count())
    except Unsupported:
        return 0


def describe(ordinal: int = 0) -> Gpu:
    """Return name, capability, driver and memory of one GPU.

    Raises:
        Unsupported: PyCUDA, the driver or the GPU is missing; the message says what to install.
    """
    cuda = driver.load()
    gpu_count = cuda.Device.count()
    if not 0 <= ordinal < gpu_count:
        raise Unsupported(f"CUDA device {ordinal} is not there: this machine has devices 0 to {gpu_count - 1}")
    with driver.check("reading the properties of the GPU"):
        device = cuda.Device(ordinal)
        major, minor = device.compute_capability()
        version = driver_major() or cuda.get_driver_version() // 1000
        return Gpu(str(device.name()), f"{major}.{minor}", int(version), int(device.total_memory()))


@functools.cache
def driver_major() -> int:
    """Return the major version of NVIDIA's driver, 0 if unknown."""
    text = driver_version()
    if not text:
        try:
            match = re.search(r"Module\D*?(\d+)\.\d+", _VERSION_FILE.read_text())
        except OSError:
            match = None
        text = match[1] if match else ""
    major = text.partition(".")[0]
    return int(major) if major.isdecimal() else 0


logger = logging.getLogger("headrace.cuda")

_N = TypeVar("_N", int, float)


def load_nvml() -> Any:
    """Import pynvml; return None without the driver's library.

    The import takes 25 ms and 3.5 MB, which a server without an NVIDIA driver saves.
    """
    try:
        open_library()
    except OSError:
        return None
    import pynvml

    return pynvml


def open_library() -> object:
    """Open the driver's NVML library; raises OSError without a driver."""
    return ctypes.CDLL("libnvidia-ml.so.1")


def driver_version() -> str:
    """Return the version of NVIDIA's driver, e.g. "580.95.05"; "" if NVML does not respond."""
    pynvml = load_nvml()
    if pynvml is None:
        return ""
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, UnicodeDecodeError):
        return ""


class Nvml:
    """Reads the GPUs by NVML, which the first call opens and which stays open.

    Calls from several threads are serialized by a lock.

    Args:
        buses: returns the PCI address of each GPU in CUDA's order, None if CUDA has none; None uses `pci_addresses`.
    """

    def __init__(self, buses: Callable[[], list[str] | None] | None = None) -> None:
        self._buses = buses or pci_addresses
        self._lock = threading.Lock()
        self._pynvml: Any = None
        self._is_opened = False
        self._devices: list[Any] = []  # NVML's handles, None for a GPU that NVML does not find
        self._identities: dict[int, tuple[str, str]] = {}  # name and UUID, saved for when the GPU is lost
        self._driver = ""

    def readings(self) -> list[GpuReading]:
        """Read every GPU that the server may use; empty without a driver. Takes some milliseconds."""
        with self._lock:
            if not self._is_opened:
                self._is_opened = True
                self._open()
            return [self._reading(gpu, device) for gpu, device in enumerate(self._devices)]

    def _open(self) -> None:
        pynvml = load_nvml()
        if pynvml is None:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.warning(
                "GPU metrics are not available: NVML does not start (error %d), check nvidia-smi", error.value
            )
            return
        self._pynvml = pynvml
        self._driver = self._read("SystemGetDriverVersion") or ""
        buses = self._buses()
        if buses is None:
            count = self._read("DeviceGetCount") or 0
            self._devices = [self._read("DeviceGetHandleByIndex", index) for index in range(count)]
        else:
            self._devices = [self._read("DeviceGetHandleByPciBusId", bus) for bus in buses]

    def _reading(self, gpu: int, device: Any) -> GpuReading:
        pynvml = self._pynvml
        memory = None if device is None else self._read("DeviceGetMemoryInfo", device)
        if memory is not None and gpu not in self._identities:
            self._identities[gpu] = self._read("DeviceGetName", device) or "", self._read("DeviceGetUUID", device) or ""
        name, uuid = self._identities.get(gpu, ("", ""))
        if memory is None:
            return GpuReading(gpu, name, uuid, self._driver if device is not None else "")
        reading = GpuReading(gpu, name, uuid, self._driver, up=gpu not in driver.lost_gpus())
        reading.memory_used_bytes, reading.memory_total_bytes = int(memory.used), int(memory.total)
        utilization = self._read("DeviceGetUtilizationRates", device)
        reading.utilization = None if utilization is None else utilization.gpu / 100
        reading.power_w = _scaled(self._read("DeviceGetPowerUsage", device), 1e-3)
        reading.power_limit_w = _scaled(self._read("DeviceGetEnforcedPowerLimit", device), 1e-3)
        reading.energy_j = _scaled(self._read("DeviceGetTotalEnergyConsumption", device), 1e-3)
        reading.temperature_c = self._read("DeviceGetTemperature", device, pynvml.NVML_TEMPERATURE_GPU)
        clocks = {"sm": pynvml.NVML_CLOCK_SM, "memory": pynvml.NVML_CLOCK_MEM}
        reading.clocks_hz = _supported(
            {name: _scaled(self._read("DeviceGetClockInfo", device, clock), 1e6) for name, clock in clocks.items()}
        )
        kinds = {
            "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        }
        volatile = pynvml.NVML_VOLATILE_ECC  # since the driver was loaded
        reading.ecc_errors = _supported(
            {name: self._read("DeviceGetTotalEccErrors", device, kind, volatile) for name, kind in kinds.items()}
        )
        # Every driver since 2017 has this name; newer ones also have ...ClocksEventReasons.
        bits = self._read("DeviceGetCurrentClocksThrottleReasons", device)
        if bits is not None:
            reading.slowed = {reason: bool(bits & mask) for reason, mask in _slowdown_masks(pynvml).items()}
        return reading

    def _read(self, function: str, *arguments: Any) -> Any:
        """Call `nvml<function>`; None if the board, the driver or a lost GPU returns an error."""
        try:
            return getattr(self._pynvml, "nvml" + function)(*arguments)
        except (self._pynvml.NVMLError, UnicodeDecodeError):
            return None


def _slowdown_masks(pynvml: Any) -> dict[str, int]:
    """Bits of the clocks' throttle reasons, without "idle" and the operator's own settings."""
    return {
        "power_cap": pynvml.nvmlClocksThrottleReasonSwPowerCap,
        "hardware": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }


def pci_addresses() -> list[str] | None:
    """Return the PCI address of each GPU visible to CUDA, in its order; None without CUDA."""
    try:
        cuda = driver.load()
        with driver.check("reading the PCI addresses of the GPUs"):
            return [str(cuda.Device(ordinal).pci_bus_id()) for ordinal in range(int(cuda.Device.count()))]
    except HeadraceError:
        return None


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _supported(values: Mapping[str, _N | None]) -> dict[str, _N]:
    return {name: value for name, value in values.items() if value is not None}
