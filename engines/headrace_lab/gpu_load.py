"""State of a GPU during a measurement, by NVML: clocks, reasons of lowered clocks, power, energy. Nothing is set."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from headrace.core.telemetry import GpuReading
from headrace.runtimes.cuda.devices import Nvml

# Interval of the readings; NVML updates power about every 100 ms.
INTERVAL_S = 0.1
_REASONS = {
    "power_cap": "power limit",
    "hardware": "hardware slowdown",
    "thermal": "temperature",
    "power_brake": "external power brake",
}


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """Readings of one GPU over a measurement; None for figures that it does not report.

    Attributes:
        seconds: duration.
        readings: number of readings.
        sm_mhz: median clock of the multiprocessors.
        memory_mhz: median clock of the memory.
        power_w: mean power: energy over time if the board counts energy, else the mean of the readings.
        power_limit_w: enforced power limit.
        energy_j: energy of the measurement; None if the board does not count energy.
        temperature_c: highest temperature.
        utilization: mean share of time with a kernel, 0..1.
        slowed: reasons of lowered clocks that were seen at least once.
    """

    seconds: float
    readings: int
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    utilization: float | None = None
    slowed: tuple[str, ...] = ()

    def energy_each_j(self, count: int) -> float | None:
        """Return the energy of one of `count` items in joules; from the power if the board does not count energy."""
        energy = self.energy_j
        if energy is None and self.power_w is not None:
            energy = self.power_w * self.seconds
        return energy / count if energy is not None and count else None

    def text(self) -> str:
        """Describe the state in one line."""
        parts = [
            "" if self.sm_mhz is None else f"SM clock {self.sm_mhz:.0f} MHz",
            "" if self.memory_mhz is None else f"memory clock {self.memory_mhz:.0f} MHz",
            "" if self.power_w is None else f"{self.power_w:.0f} W",
            "" if self.power_limit_w is None else f"limit {self.power_limit_w:.0f} W",
            "" if self.temperature_c is None else f"{self.temperature_c:.0f} °C",
            f"clocks lowered by: {', '.join(self.slowed)}" if self.slowed else "clocks not lowered",
        ]
        return ", ".join(filter(None, parts)) if self.readings else "NVML reports nothing"


def summarize_readings(readings: Sequence[GpuReading], seconds: float) -> GpuLoad:
    """Return the state over the readings of one GPU, in order."""
    live = [reading for reading in readings if reading.up]
    if not live:
        return GpuLoad(seconds, 0)
    energies = [reading.energy_j for reading in live if reading.energy_j is not None]
    energy = energies[-1] - energies[0] if len(energies) > 1 and energies[-1] > energies[0] else None
    powers = _known(reading.power_w for reading in live)
    seen = {name for reading in live for name, is_slow in (reading.slowed or {}).items() if is_slow}
    return GpuLoad(
        seconds=seconds,
        readings=len(live),
        sm_mhz=_median_mhz(live, "sm"),
        memory_mhz=_median_mhz(live, "memory"),
        power_w=energy / seconds if energy is not None and seconds > 0 else fmean(powers) if powers else None,
        power_limit_w=next(iter(_known(reading.power_limit_w for reading in live)), None),
        energy_j=energy,
        temperature_c=max(_known(reading.temperature_c for reading in live), default=None),
        utilization=fmean(shares) if (shares := _known(reading.utilization for reading in live)) else None,
        slowed=tuple(text for name, text in _REASONS.items() if name in seen),
    )


def _known(values: Any) -> list[float]:
    return [float(value) for value in values if value is not None]


def _median_mhz(readings: Sequence[GpuReading], clock: str) -> float | None:
    values = _known((reading.clocks_hz or {}).get(clock) for reading in readings)
    return median(values) / 1e6 if values else None


class LoadSampler:
    """Reads one GPU while a block runs; `load` has the result after it.

    Args:
        gpu: number of the GPU.
        nvml: reader of the GPUs.

    Attributes:
        load: state over the block.
    """

    def __init__(self, gpu: int, nvml: Nvml) -> None:
        self._gpu = gpu
        self._nvml = nvml
        self._readings: list[GpuReading] = []
        self._started_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="gpu readings", daemon=True)
        self.load = GpuLoad(0.0, 0)

    def __enter__(self) -> LoadSampler:
        self._read()
        self._started_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._started_s
        self._ended.set()
        self._thread.join()
        self._read()
        self.load = summarize_readings(self._readings, seconds)

    def restart(self) -> None:
        """Discard the readings so far: the measurement begins now."""
        self._readings.clear()
        self._read()
        self._started_s = time.monotonic()

    def _sample(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._read()

    def _read(self) -> None:
        reading = next((one for one in self._nvml.readings() if one.gpu == self._gpu), None)
        if reading is not None:
            self._readings.append(reading)
