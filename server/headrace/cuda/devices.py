"""GPUs of this machine: what they are, and readings of load, memory, power, clocks and errors by NVML.

NVML, NVIDIA's management library, comes with the driver; its Python binding (pynvml) is in the package nvidia-ml-py.
Every figure is optional: boards differ in what they support, and an older driver lacks newer functions.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headrace.core.errors import HeadraceError, Unsupported
from headrace.cuda import driver

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
        driver.library()
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
    text = driver_version()
    if not text:
        try:
            found = re.search(r"Module\D*?(\d+)\.\d+", _VERSION_FILE.read_text())
        except OSError:
            found = None
        text = found[1] if found else ""
    major = text.partition(".")[0]
    return int(major) if major.isdecimal() else 0


logger = logging.getLogger("headrace.cuda")

_N = TypeVar("_N", int, float)


@dataclass(slots=True)
class GpuReading:
    """One GPU now; None stands for what it does not tell.

    Attributes:
        gpu: CUDA's number for it; NVML's where PyCUDA is missing.
        name, uuid, driver: what it is, "" if it does not tell.
        up: the driver answers for it.
        utilization: share of the last moments in which a kernel ran, 0 to 1.
        clocks_hz: by what they drive: sm, memory.
        ecc_errors: by kind, since the driver was loaded: corrected, uncorrected.
        slowed: by reason, whether it keeps the clocks down now.
    """

    gpu: int
    name: str = ""
    uuid: str = ""
    driver: str = ""
    up: bool = False
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    clocks_hz: Mapping[str, float] = field(default_factory=dict)
    ecc_errors: Mapping[str, int] = field(default_factory=dict)
    slowed: Mapping[str, bool] = field(default_factory=dict)


def load_nvml() -> Any:
    """Import pynvml; None where the driver's library is missing.

    The import takes 25 ms and 3.5 MB, which a server without an NVIDIA driver saves.
    """
    try:
        open_library()
    except OSError:
        return None
    import pynvml

    return pynvml


def open_library() -> object:
    """Open the driver's library; raises OSError where there is no driver."""
    return ctypes.CDLL("libnvidia-ml.so.1")


def driver_version() -> str:
    """Version of NVIDIA's driver, e.g. "580.95.05"; empty where NVML does not answer."""
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
        buses: returns the PCI address of each GPU in CUDA's order, None where CUDA cannot tell; None: `pci_addresses`.
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
        """Of every GPU that the server may use; none where there is no driver. Takes some milliseconds."""
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
            logger.warning("the GPUs cannot be watched: NVML does not start (error %d)", error.value)
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
        reading = GpuReading(gpu, name, uuid, self._driver, up=True)
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
        # The name that every driver since 2017 has; newer ones have ...ClocksEventReasons too.
        bits = self._read("DeviceGetCurrentClocksThrottleReasons", device)
        if bits is not None:
            reading.slowed = {reason: bool(bits & mask) for reason, mask in _slowdown_masks(pynvml).items()}
        return reading

    def _read(self, function: str, *arguments: Any) -> Any:
        """Call `nvml<function>`; None where the board, the driver or a lost GPU does not answer."""
        try:
            return getattr(self._pynvml, "nvml" + function)(*arguments)
        except (self._pynvml.NVMLError, UnicodeDecodeError):
            return None


def _slowdown_masks(pynvml: Any) -> dict[str, int]:
    """Bits of the clocks' throttle reasons, without "idle" and what the operator has set."""
    return {
        "power_cap": pynvml.nvmlClocksThrottleReasonSwPowerCap,
        "hardware": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }


def pci_addresses() -> list[str] | None:
    """PCI address of each GPU that CUDA shows to this process, in its order; None where CUDA cannot tell."""
    try:
        cuda = driver.load()
        with driver.check("asking where the GPUs are"):
            return [str(cuda.Device(ordinal).pci_bus_id()) for ordinal in range(int(cuda.Device.count()))]
    except HeadraceError:
        return None


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _supported(values: Mapping[str, _N | None]) -> dict[str, _N]:
    return {name: value for name, value in values.items() if value is not None}
