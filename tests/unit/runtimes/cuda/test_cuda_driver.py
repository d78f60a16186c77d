"""Contexts, memory, graphs and descriptions of GPUs, against a fake PyCUDA."""

from __future__ import annotations

import sys

import pytest
from headrace.core.errors import Unsupported
from headrace.runtimes.cuda import devices, driver

from tests.support.fake_cuda import FakeCuda


def test_without_pycuda_errors_name_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    assert devices.count() == 0
    with pytest.raises(Unsupported, match="install an NVIDIA driver"):
        devices.describe()
    with pytest.raises(Unsupported, match="install an NVIDIA driver"), driver.current():
        pass


def test_without_a_gpu_nothing_is_described(cuda: FakeCuda) -> None:
    cuda.devices = 0
    assert devices.count() == 0
    with pytest.raises(Unsupported, match="no NVIDIA GPU"):
        devices.describe()


def test_a_failed_capture_leaves_the_stream_usable(cuda: FakeCuda) -> None:
    def fail() -> None:
        raise ValueError("refused")

    with driver.current():
        stream = driver.CudaStream()
        with pytest.raises(ValueError, match="refused"):
            driver.CudaGraph(stream, fail)
        stream.synchronize()
        cuda.refuse_capture = True
        with pytest.raises(driver.DeviceError, match=r"capturing a CUDA graph failed.*INVALIDATED, 901"):
            driver.CudaGraph(stream, lambda: None)
        stream.synchronize()
    assert not cuda.graphs
