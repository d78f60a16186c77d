"""State of a GPU over a measurement: figures from readings, and readings that are missing."""

from __future__ import annotations

import pytest
from headrace.core.telemetry import GpuReading
from headrace_lab.gpu_load import GpuLoad, LoadSampler, summarize_readings


def reading(**figures: object) -> GpuReading:
    one = GpuReading(0, "Fake H1", "GPU-0", "580", up=True)
    for name, value in figures.items():
        setattr(one, name, value)
    return one


def test_power_is_energy_over_time_where_the_board_counts_it() -> None:
    readings = [
        reading(energy_j=100.0, power_w=1.0, clocks_hz={"sm": 1.0e9, "memory": 2e9}, temperature_c=40),
        reading(energy_j=250.0, power_w=1.0, clocks_hz={"sm": 1.5e9}, temperature_c=50, slowed={"thermal": True}),
        reading(energy_j=400.0, clocks_hz={"sm": 2.0e9}, utilization=0.5, slowed={"thermal": False}),
    ]
    load = summarize_readings(readings, 2.0)
    assert load == GpuLoad(2.0, 3, 1500.0, 2000.0, 150.0, None, 300.0, 50.0, 0.5, ("temperature",))
    assert load.energy_each_j(100) == 3.0
    assert load.text() == "SM clock 1500 MHz, memory clock 2000 MHz, 150 W, 50 °C, clocks lowered by: temperature"


def test_energy_follows_from_power_on_other_boards() -> None:
    load = summarize_readings([reading(power_w=100.0), reading(power_w=300.0, power_limit_w=700.0)], 4.0)
    assert (load.power_w, load.energy_j, load.energy_each_j(8)) == (200.0, None, 100.0)
    assert load.text() == "200 W, limit 700 W, clocks not lowered"


def test_a_lost_gpu_and_no_driver_have_no_figures() -> None:
    lost = GpuReading(0, "", "", "580")
    for readings in ([], [lost]):
        load = summarize_readings(readings, 1.0)
        assert load == GpuLoad(1.0, 0)
        assert load.energy_each_j(10) is None
        assert load.text() == "NVML reports nothing"


class _Counter:
    """Readings of two GPUs; every call adds a joule."""

    def __init__(self) -> None:
        self.calls = 0

    def readings(self) -> list[GpuReading]:
        self.calls += 1
        other = GpuReading(0, "", "", "", up=True, energy_j=1e9 * self.calls)
        return [other, GpuReading(1, "", "", "", up=True, energy_j=float(self.calls))]


def test_the_sampler_reads_its_gpu_before_and_after() -> None:
    counter = _Counter()
    with LoadSampler(1, counter) as sampler:  # type: ignore[arg-type]  # only `readings` is called
        counter.calls += 100
        sampler.restart()
    assert sampler.load.energy_j is not None
    # What was before `restart` does not count.
    assert 1 <= sampler.load.energy_j < 100
    assert sampler.load.seconds == pytest.approx(0, abs=60)
