"""NVML of the driver itself: the figures are there, and agree with what CUDA says."""

from __future__ import annotations

import pytest
from headrace.runtimes.cuda import devices
from headrace.runtimes.cuda.devices import Nvml

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not devices.count(), reason="needs an NVIDIA GPU and PyCUDA")]


def test_nvml_reports_every_gpu() -> None:
    readings = Nvml().readings()
    assert len(readings) == devices.count() > 0
    for reading in readings:
        gpu = devices.describe(reading.gpu)
        assert reading.up
        assert reading.name == gpu.name
        assert reading.uuid.startswith("GPU-")
        assert reading.driver.split(".")[0] == str(gpu.driver)
        assert reading.memory_total_bytes is not None
        assert 0.9 * gpu.memory_bytes <= reading.memory_total_bytes <= 1.1 * gpu.memory_bytes
        assert 0 < (reading.memory_used_bytes or 0) < reading.memory_total_bytes
        assert reading.utilization is None or 0 <= reading.utilization <= 1
        assert reading.power_w is None or 5 < reading.power_w < 2000
        assert reading.temperature_c is None or 10 < reading.temperature_c < 120
        assert all(1e8 < hertz < 1e10 for hertz in reading.clocks_hz.values())
