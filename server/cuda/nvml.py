"""What NVIDIA's management library (NVML) tells of GPUs: load, memory, power, clocks, errors.

The library comes with the driver, so it is called by ctypes: nothing has to be installed. Signatures and numbers are those of
NVML's API reference. Every figure is optional: boards differ in what they tell.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from server.core.errors import HeadraceError
from server.cuda import driver

logger = logging.getLogger("headrace.cuda")

_N = TypeVar("_N", int, float)

_TEXT_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE, NVML_DEVICE_NAME_V2_BUFFER_SIZE; the others are smaller
_TEMPERATURE_GPU = 0
_CLOCKS = {"sm": 1, "memory": 2}
_ECC_KINDS = {"corrected": 0, "uncorrected": 1}
_VOLATILE = 0  # since the driver was loaded
# Bits of nvmlClocksEventReasons; "idle" and what the operator has set himself are no news.
_SLOWED = {
    "power_cap": 0x4,
    "hardware": 0x8,
    "thermal": 0x20 | 0x40,
    "power_brake": 0x80,
}


class _Utilization(ctypes.Structure):
    _fields_: ClassVar = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@dataclass(slots=True)
class Reading:
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


def open_library() -> Any:
    """NVML itself; raises OSError where there is no driver."""
    return ctypes.CDLL("libnvidia-ml.so.1")


class Nvml:
    """Asks NVML; it is opened by the first question, and stays open.

    Any thread may ask; one at a time does.

    Args:
        opened: gives the library, raises OSError where there is none; None: the driver's.
        buses: gives the PCI address of each GPU in CUDA's order, None where CUDA cannot tell; None: asks CUDA.
    """

    def __init__(
        self, opened: Callable[[], Any] | None = None, buses: Callable[[], list[str] | None] | None = None
    ) -> None:
        self._opened = opened or open_library
        self._buses = buses or pci_addresses
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._asked = False
        self._devices: list[ctypes.c_void_p | None] = []
        self._known: dict[int, tuple[str, str]] = {}  # name and UUID, kept for when the GPU is lost
        self._driver = ""

    def readings(self) -> list[Reading]:
        """Of every GPU that the server may use; none where there is no driver. Takes some milliseconds."""
        with self._lock:
            if not self._asked:
                self._asked = True
                self._open()
            return [self._reading(gpu, device) for gpu, device in enumerate(self._devices)]

    def _open(self) -> None:
        try:
            nvml = self._opened()
        except OSError:
            return
        if failed := nvml.nvmlInit_v2():
            logger.warning("the GPUs cannot be watched: NVML does not start (error %d)", failed)
            return
        self._nvml = nvml
        self._driver = self._text(nvml.nvmlSystemGetDriverVersion)
        buses = self._buses()
        if buses is None:
            count = ctypes.c_uint()
            found = 0 if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value
            self._devices = [self._device(nvml.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(i)) for i in range(found)]
        else:
            by_bus = nvml.nvmlDeviceGetHandleByPciBusId_v2
            self._devices = [self._device(by_bus, ctypes.c_char_p(bus.encode())) for bus in buses]

    def _device(self, get: Callable[..., int], which: object) -> ctypes.c_void_p | None:
        device = ctypes.c_void_p()
        return None if get(which, ctypes.byref(device)) else device

    def _reading(self, gpu: int, device: ctypes.c_void_p | None) -> Reading:
        nvml = self._nvml
        if device is None:
            return Reading(gpu)
        memory = _Memory()
        up = not nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        if up and gpu not in self._known:
            self._known[gpu] = self._text(nvml.nvmlDeviceGetName, device), self._text(nvml.nvmlDeviceGetUUID, device)
        name, uuid = self._known.get(gpu, ("", ""))
        reading = Reading(gpu, name, uuid, self._driver, up)
        if not up:
            return reading
        reading.memory_used_bytes, reading.memory_total_bytes = int(memory.used), int(memory.total)
        utilization = _Utilization()
        if not nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(utilization)):
            reading.utilization = utilization.gpu / 100
        reading.power_w = _scaled(self._uint(nvml.nvmlDeviceGetPowerUsage, device), 1e-3)
        reading.power_limit_w = _scaled(self._uint(nvml.nvmlDeviceGetEnforcedPowerLimit, device), 1e-3)
        reading.energy_j = _scaled(self._ulonglong(nvml.nvmlDeviceGetTotalEnergyConsumption, device), 1e-3)
        reading.temperature_c = self._uint(nvml.nvmlDeviceGetTemperature, device, ctypes.c_int(_TEMPERATURE_GPU))
        reading.clocks_hz = _told(
            {
                name: _scaled(self._uint(nvml.nvmlDeviceGetClockInfo, device, ctypes.c_int(number)), 1e6)
                for name, number in _CLOCKS.items()
            }
        )
        volatile = ctypes.c_int(_VOLATILE)
        reading.ecc_errors = _told(
            {
                kind: self._ulonglong(nvml.nvmlDeviceGetTotalEccErrors, device, ctypes.c_int(number), volatile)
                for kind, number in _ECC_KINDS.items()
            }
        )
        # The name that every driver since 2017 knows; newer ones call it ...ClocksEventReasons too.
        bits = self._ulonglong(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, device)
        if bits is not None:
            reading.slowed = {reason: bool(bits & mask) for reason, mask in _SLOWED.items()}
        return reading

    @staticmethod
    def _uint(get: Callable[..., int], *arguments: object) -> int | None:
        value = ctypes.c_uint()
        return None if get(*arguments, ctypes.byref(value)) else value.value

    @staticmethod
    def _ulonglong(get: Callable[..., int], *arguments: object) -> int | None:
        value = ctypes.c_ulonglong()
        return None if get(*arguments, ctypes.byref(value)) else value.value

    @staticmethod
    def _text(get: Callable[..., int], *arguments: object) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        return "" if get(*arguments, text, ctypes.c_uint(_TEXT_BYTES)) else text.value.decode(errors="replace")


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


def _told(values: Mapping[str, _N | None]) -> dict[str, _N]:
    return {name: value for name, value in values.items() if value is not None}
