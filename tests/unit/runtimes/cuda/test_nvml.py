"""Readings of NVML in the units of the metrics; the page where NVML is missing, old or silent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

import pytest
from headrace.observability.metrics import MetricsPage
from headrace.observability.metrics_server import GpuCollector
from headrace.runtimes.cuda import devices
from headrace.runtimes.cuda.devices import Nvml

from tests.support import fake_nvml
from tests.support.fake_nvml import FakeNvml
from tests.support.prometheus import read_page

ALL_SILENT = {
    f"nvmlDeviceGet{name}"
    for name in (
        "UtilizationRates", "PowerUsage", "EnforcedPowerLimit", "TotalEnergyConsumption", "Temperature", "ClockInfo",
        "TotalEccErrors", "CurrentClocksThrottleReasons",
    )
}  # fmt: skip


def samples(gpus: Nvml) -> dict[tuple[str, ...], float]:
    """Values by name, GPU, and the other labels' values in the order of their names."""
    text = MetricsPage(list, gpus=gpus).render()[1].decode()
    return {
        (
            sample.name,
            *(value for _, value in sorted(sample.labels.items(), key=lambda pair: (pair[0] != "gpu", pair))),
        ): sample.value
        for family in read_page(text)
        for sample in family.samples
        if "gpu" in sample.name or "energy" in sample.name
    }


Watch = Callable[..., Nvml]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    def watched(fake: FakeNvml, buses: list[str] | None = None) -> Nvml:
        fake_nvml.install(monkeypatch, fake)
        return Nvml(lambda: buses)

    return watched


def test_every_figure_has_its_unit(watched: Watch) -> None:
    result = samples(watched(FakeNvml(buses=("0000:01:00.0",))))
    assert result == {
        ("headrace_gpu_up", "0"): 1,
        ("headrace_gpu_info", "0", "580.95.05", "NVIDIA Fake", "GPU-00000001"): 1,
        ("headrace_gpu_utilization_ratio", "0"): 0.73,
        ("headrace_gpu_device_memory_used_bytes", "0"): 3 << 30,
        ("headrace_gpu_device_memory_total_bytes", "0"): 80 << 30,
        ("headrace_gpu_power_watts", "0"): pytest.approx(412.5),
        ("headrace_gpu_power_limit_watts", "0"): pytest.approx(700),
        ("headrace_gpu_energy_joules_total", "0"): pytest.approx(5e6),
        ("headrace_gpu_temperature_celsius", "0"): 61,
        ("headrace_gpu_clock_hertz", "0", "sm"): pytest.approx(1.98e9),
        ("headrace_gpu_clock_hertz", "0", "memory"): pytest.approx(2.619e9),
        ("headrace_gpu_ecc_errors_total", "0", "corrected"): 7,
        ("headrace_gpu_ecc_errors_total", "0", "uncorrected"): 1,
        ("headrace_gpu_slowed", "0", "power_cap"): 1,
        ("headrace_gpu_slowed", "0", "hardware"): 0,
        ("headrace_gpu_slowed", "0", "thermal"): 0,
        ("headrace_gpu_slowed", "0", "power_brake"): 0,
        ("nv_gpu_utilization", "GPU-00000001"): 0.73,
        ("nv_gpu_memory_total_bytes", "GPU-00000001"): 80 << 30,
        ("nv_gpu_memory_used_bytes", "GPU-00000001"): 3 << 30,
        ("nv_gpu_power_usage", "GPU-00000001"): pytest.approx(412.5),
        ("nv_gpu_power_limit", "GPU-00000001"): pytest.approx(700),
        ("nv_energy_consumption", "GPU-00000001"): 0,
    }


def test_energy_counts_from_the_first_scrape(watched: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's counts from the start of the server, the driver's from its own."""
    fake = FakeNvml(buses=("0000:01:00.0",))
    collector = GpuCollector(watched(fake))

    def energy_j() -> float:
        (sample,) = [s for family in collector.collect() for s in family.samples if s.name == "nv_energy_consumption"]
        return sample.value

    assert energy_j() == 0
    later = lambda _self, _device, value: setattr(value._obj, "value", 5_000_012_000)  # noqa: E731
    monkeypatch.setattr(FakeNvml, "_DeviceGetTotalEnergyConsumption", later)
    assert energy_j() == pytest.approx(12)


def test_gpus_have_cudas_numbers(watched: Watch) -> None:
    """CUDA may show fewer of them, in another order."""
    gpus = watched(FakeNvml(), ["0000:02:00.0"])
    (reading,) = gpus.readings()
    assert (reading.gpu, reading.uuid) == (0, "GPU-00000002")


def test_a_lost_gpu_is_down_and_keeps_its_name(watched: Watch) -> None:
    fake = FakeNvml()
    gpus = watched(fake)
    gpus.readings()
    fake.lost.add(1)
    result = samples(gpus)
    assert (result["headrace_gpu_up", "0"], result["headrace_gpu_up", "1"]) == (1, 0)
    assert result["headrace_gpu_info", "1", "580.95.05", "NVIDIA Fake", "GPU-00000002"] == 1
    assert ("headrace_gpu_power_watts", "1") not in result
    fake.lost.clear()
    assert samples(gpus)["headrace_gpu_up", "1"] == 1


def test_unsupported_queries_of_a_board_are_omitted(watched: Watch) -> None:
    fake = FakeNvml(buses=("0000:01:00.0",))
    fake.silent = ALL_SILENT
    names = {key[0] for key in samples(watched(fake))}
    assert names == {
        "headrace_gpu_up", "headrace_gpu_info", "headrace_gpu_device_memory_used_bytes",
        "headrace_gpu_device_memory_total_bytes", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes",
    }  # fmt: skip


def test_without_a_driver_there_are_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def missing() -> NoReturn:
        calls.append(1)
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(devices, "open_library", missing)
    gpus = Nvml()
    assert samples(gpus) == samples(gpus) == {}
    assert calls == [1], "queried once, not at every scrape"


def test_a_gpu_unknown_to_nvml_is_down(watched: Watch) -> None:
    (reading,) = watched(FakeNvml(), ["0000:09:00.0"]).readings()
    assert (reading.up, reading.name) == (False, "")


def test_a_driver_older_than_a_function_lacks_only_its_figure(watched: Watch) -> None:
    fake = FakeNvml(buses=("0000:01:00.0",))
    fake.missing = {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetCurrentClocksThrottleReasons"}
    result = samples(watched(fake))
    assert not {name for name, *_ in result} & {"headrace_gpu_energy_joules_total", "headrace_gpu_slowed"}
    assert result["headrace_gpu_temperature_celsius", "0"] == 61


def test_an_nvml_that_does_not_start_is_a_warning(watched: Watch, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeNvml()
    fake.startup_error = fake_nvml.UNKNOWN
    with caplog.at_level(logging.WARNING, "headrace.cuda"):
        gpus = watched(fake)
        assert samples(gpus) == samples(gpus) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "GPU metrics are not available: NVML does not start (error 999), check nvidia-smi"
    ]


def test_the_drivers_version_is_that_of_nvml(watched: Watch) -> None:
    fake = FakeNvml()
    watched(fake)
    assert devices.driver_version() == "580.95.05"
    assert devices.driver_major.__wrapped__() == 580
    assert fake.open_count == 0
    fake.silent = {"nvmlSystemGetDriverVersion"}
    assert (devices.driver_version(), fake.open_count) == ("", 0)
    fake.startup_error = fake_nvml.UNKNOWN
    assert devices.driver_version() == ""
