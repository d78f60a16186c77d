"""A fake of NVML's C library below pynvml: two GPUs that answer every function, of which one can be lost.

Signatures are those of NVML's API reference; arguments that come back are what `ctypes.byref` gives.
"""

# ruff: noqa: N802 (the names are NVML's)

from __future__ import annotations

import ctypes
from typing import Any

import pynvml
import pytest
from headrace.runtimes.cuda import devices

NOT_SUPPORTED, UNKNOWN, GPU_IS_LOST = 3, 999, 15


def install(monkeypatch: pytest.MonkeyPatch, library: FakeNvml) -> None:
    """Let pynvml load the fake until the test is over."""
    monkeypatch.setattr(devices, "open_library", lambda: library)
    monkeypatch.setattr(pynvml, "CDLL", lambda _name: library)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


class FakeNvml:
    """The functions that `headrace.runtimes.cuda.devices` calls through pynvml.

    Attributes:
        lost: numbers of GPUs that do not answer any more.
        silent: names of functions that a board does not support.
        missing: names of functions that the driver is too old for.
        startup_error: what nvmlInitWithFlags returns.
        open_count: calls of nvmlInitWithFlags less those of nvmlShutdown.
        slowed: what nvmlDeviceGetCurrentClocksThrottleReasons gives.
    """

    def __init__(self, buses: tuple[str, ...] = ("0000:01:00.0", "0000:02:00.0")) -> None:
        self.lost: set[int] = set()
        self.silent: set[str] = set()
        self.missing: set[str] = set()
        self.startup_error = 0
        self.open_count = 0
        self.slowed = 0x4 | 0x1
        self._buses = buses

    def __getattr__(self, name: str) -> Any:
        method = "_" + name.removeprefix("nvml")
        if name in self.missing or not hasattr(type(self), method):
            raise AttributeError(f"NVML has no function {name}")

        def call(*arguments: Any) -> int:
            if name in self.silent:
                return NOT_SUPPORTED
            if name.startswith("nvmlDeviceGet") and "Handle" not in name and "Count" not in name:
                number = _number(arguments[0])
                assert number, "a device's handle"
                if number - 1 in self.lost:
                    return GPU_IS_LOST
            return getattr(type(self), method)(self, *arguments) or 0

        return call

    def _InitWithFlags(self, flags: int) -> int:
        assert flags == 0
        self.open_count += not self.startup_error
        return self.startup_error

    def _Shutdown(self) -> None:
        self.open_count -= 1

    def _SystemGetDriverVersion(self, text: Any, size: Any) -> None:
        text.value = b"580.95.05"

    def _DeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = len(self._buses)

    def _DeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> None:
        _set_number(device, index.value + 1)

    def _DeviceGetHandleByPciBusId_v2(self, bus: Any, device: Any) -> int:
        if bus.value.decode() not in self._buses:
            return 6  # NVML_ERROR_NOT_FOUND
        _set_number(device, self._buses.index(bus.value.decode()) + 1)
        return 0

    def _DeviceGetName(self, device: Any, text: Any, size: Any) -> None:
        text.value = b"NVIDIA Fake"

    def _DeviceGetUUID(self, device: Any, text: Any, size: Any) -> None:
        text.value = b"GPU-%08d" % _number(device)

    def _DeviceGetMemoryInfo(self, device: Any, memory: Any) -> None:
        memory._obj.total, memory._obj.used, memory._obj.free = 80 << 30, 3 << 30, 77 << 30

    def _DeviceGetUtilizationRates(self, device: Any, rates: Any) -> None:
        rates._obj.gpu, rates._obj.memory = 73, 20

    def _DeviceGetPowerUsage(self, device: Any, value: Any) -> None:
        value._obj.value = 412_500

    def _DeviceGetEnforcedPowerLimit(self, device: Any, value: Any) -> None:
        value._obj.value = 700_000

    def _DeviceGetTotalEnergyConsumption(self, device: Any, value: Any) -> None:
        value._obj.value = 5_000_000_000

    def _DeviceGetTemperature(self, device: Any, sensor: Any, value: Any) -> None:
        assert sensor.value == 0
        value._obj.value = 61

    def _DeviceGetClockInfo(self, device: Any, clock: Any, value: Any) -> None:
        value._obj.value = {1: 1980, 2: 2619}[clock.value]

    def _DeviceGetTotalEccErrors(self, device: Any, kind: Any, counter: Any, value: Any) -> None:
        assert counter.value == 0
        value._obj.value = {0: 7, 1: 1}[kind.value]

    def _DeviceGetCurrentClocksThrottleReasons(self, device: Any, value: Any) -> None:
        value._obj.value = self.slowed


def _number(device: Any) -> int:
    """The fake's number of a device's handle, from 1; the handle is an opaque pointer."""
    return ctypes.cast(device, ctypes.c_void_p).value or 0


def _set_number(device: Any, number: int) -> None:
    ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p)).contents.value = number
