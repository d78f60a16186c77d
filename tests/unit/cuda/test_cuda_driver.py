"""Contexts, memory, graphs and descriptions of GPUs, against a fake PyCUDA."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from server.core.errors import Unsupported
from server.cuda import device, driver, graphs, memory
from tests.fake_cuda import FakeCuda, install


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    install(monkeypatch, fake)
    return fake


def test_without_pycuda_everything_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    assert device.count() == 0
    with pytest.raises(Unsupported, match="install an NVIDIA driver"):
        device.describe()
    with pytest.raises(Unsupported, match="install an NVIDIA driver"), driver.current():
        pass


def test_without_a_gpu_nothing_is_described(cuda: FakeCuda) -> None:
    cuda.devices = 0
    assert device.count() == 0
    with pytest.raises(Unsupported, match="no NVIDIA GPU"):
        device.describe()


def test_a_gpu_is_described(cuda: FakeCuda) -> None:
    assert device.count() == 1
    assert device.describe() == ("Fake H1", "9.0", 580, 1 << 30)
    with pytest.raises(Unsupported, match="CUDA device 1 is not there: this machine has devices 0 to 0"):
        device.describe(1)


def test_contexts_nest_and_are_left_whatever_happens(cuda: FakeCuda) -> None:
    def fail() -> None:
        with driver.current(), driver.current():
            assert cuda.depth == 2
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert cuda.depth == 0


def test_memory_grows_and_is_given_back(cuda: FakeCuda) -> None:
    with driver.current():
        block, pinned, stream = memory.DeviceBuffer(), memory.PinnedBuffer(), driver.Stream()
        block.reserve(16)
        small = block.address
        block.reserve(8)
        assert block.address == small
        block.reserve(1024)
        pinned.reserve(1024)
        assert block.size_bytes == 1024
        assert len(cuda.live) == 2
        values = pinned.view((4, 4), np.dtype(np.float32))
        values[:] = np.arange(16).reshape(4, 4)
        memory.upload(block, values, stream)
        values[:] = 0
        memory.download(values, block, stream)
        stream.synchronize()
        assert values.sum() == 120
        del values
        block.free()
        pinned.free()
        pinned.free()
    assert not cuda.live
    with pytest.raises(RuntimeError, match="freed"):
        pinned.view((1,), np.dtype(np.uint8))


def test_a_full_gpu_is_told_and_leaves_the_buffer_empty(cuda: FakeCuda) -> None:
    cuda.room_bytes = 100
    with driver.current():
        block = memory.DeviceBuffer(64)
        with pytest.raises(driver.OutOfDeviceMemory, match=r"allocating 101 bytes.*memory is full.*smaller batches"):
            block.reserve(101)
        assert (block.address, block.size_bytes) == (0, 0)
    assert not cuda.live


def test_a_graph_replays_what_was_captured(cuda: FakeCuda) -> None:
    done: list[int] = []
    with driver.current():
        stream = driver.Stream()
        graph = graphs.Graph(stream, lambda: cuda.submit(lambda: done.append(1)))
        assert done == []
        graph.launch()
        graph.launch()
        assert done == [1, 1]
        graph.close()
        graph.close()
    assert not cuda.graphs


def test_a_failed_capture_leaves_the_stream_usable(cuda: FakeCuda) -> None:
    def fail() -> None:
        raise ValueError("refused")

    with driver.current():
        stream = driver.Stream()
        with pytest.raises(ValueError, match="refused"):
            graphs.Graph(stream, fail)
        stream.synchronize()
        cuda.refuse_capture = True
        with pytest.raises(driver.DeviceError, match=r"capturing a CUDA graph failed.*INVALIDATED, 901"):
            graphs.Graph(stream, lambda: None)
        stream.synchronize()
    assert not cuda.graphs


def test_events_tell_microseconds(cuda: FakeCuda) -> None:
    with driver.current():
        stream, first, last = driver.Stream(), driver.Event(), driver.Event()
        first.record(stream)
        cuda.submit(lambda: None)
        last.record(stream)
        assert last.us_since(first) == pytest.approx(50)
