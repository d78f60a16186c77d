"""Contexts, memory, streams and events."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from headrace.core.errors import Unsupported
from headrace.core.tensor import Array
from headrace.runtimes.cuda import devices, driver, memory

from tests.gpu.contract.conftest import GpuUnderTest

UINT8 = np.dtype(np.uint8)


@pytest.fixture(autouse=True)
def _on(gpu: GpuUnderTest) -> None:
    """Every test here runs on each GPU."""


def test_a_gpu_is_described() -> None:
    result = devices.describe()
    assert result.name
    assert re.fullmatch(r"\d+\.\d+", result.capability)
    assert result.driver > 0
    assert result.memory_bytes >= 1 << 30
    with pytest.raises(Unsupported, match="CUDA device 99 is not there: this machine has devices 0 to"):
        devices.describe(99)


def test_contexts_nest_and_are_popped_after_an_error() -> None:
    def fail() -> None:
        with driver.current(), driver.current():
            memory.DeviceBuffer(16).free()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    with driver.current():
        memory.DeviceBuffer(16).free()


def test_memory_grows_and_is_copied_in_the_order_of_the_stream() -> None:
    with driver.current():
        block, pinned, stream = memory.DeviceBuffer(), memory.PinnedBuffer(), driver.CudaStream()
        block.reserve(16)
        small = block.address
        block.reserve(8)
        assert block.address == small
        block.reserve(1024)
        pinned.reserve(2048)
        assert block.size_bytes == 1024
        source = pinned.view((2, 16, 16), np.dtype(np.float32))
        source[0] = np.arange(256).reshape(16, 16)
        source[1] = 0
        memory.upload(block, source[0], stream)
        memory.download(source[1], block, stream)
        stream.synchronize()
        np.testing.assert_array_equal(source[1], source[0])
        del source
        block.free()
        pinned.free()
        pinned.free()
        del stream
    with pytest.raises(RuntimeError, match="after free"):
        pinned.view((1,), UINT8)


def test_a_full_gpu_is_an_error_and_leaves_the_buffer_empty() -> None:
    with driver.current():
        block = memory.DeviceBuffer(64)
        with pytest.raises(driver.OutOfDeviceMemory, match=r"allocating \d+ bytes.*memory is full.*smaller batches"):
            block.reserve(1 << 50)
        assert (block.address, block.size_bytes) == (0, 0)
        block.reserve(64)
        assert block.address
        block.free()


def test_freed_memory_can_be_used_again(gpu: GpuUnderTest) -> None:
    with driver.current():
        memory.DeviceBuffer(1 << 20).free()  # what a process takes once is taken now
        before = gpu.used_bytes()
        blocks = [memory.DeviceBuffer(64 << 20) for _ in range(2)]
        assert gpu.used_bytes() - before >= 128 << 20
        for block in blocks:
            block.free()
        assert gpu.used_bytes() - before <= gpu.slack_bytes


def test_a_stream_waits_for_an_event_of_another() -> None:
    with driver.current():
        first, second, copied = driver.CudaStream(), driver.CudaStream(), driver.loaded().Event()
        block, pinned = memory.DeviceBuffer(1 << 20), memory.PinnedBuffer()
        pinned.reserve(2 << 20)
        source, target = pinned.view((2, 1 << 20), UINT8)
        source[:] = 7
        target[:] = 0
        memory.upload(block, source, first)
        copied.record(first.stream)
        second.stream.wait_for_event(copied)
        memory.download(target, block, second)
        second.synchronize()
        assert set(target.tolist()) == {7}
        del source, target, copied
        first.synchronize()
        block.free()
        pinned.free()
        del first, second


def test_events_measure_microseconds_between_them() -> None:
    with driver.current():
        stream, first, last = driver.CudaStream(), driver.TimingEvent(), driver.TimingEvent()
        block, pinned = memory.DeviceBuffer(8 << 20), memory.PinnedBuffer()
        pinned.reserve(8 << 20)
        first.record(stream)
        memory.upload(block, pinned.view((8 << 20,), UINT8), stream)
        last.record(stream)
        stream.synchronize()
        assert 0 < last.us_since(first) < 1e6
        block.free()
        pinned.free()
        del stream, first, last


def upload_and_wait(block: memory.DeviceBuffer, values: Array, stream: driver.CudaStream) -> None:
    with driver.current():
        memory.upload(block, values, stream)
        stream.synchronize()


def test_another_thread_may_use_the_same_memory() -> None:
    with driver.current():
        stream, block, pinned = driver.CudaStream(), memory.DeviceBuffer(64), memory.PinnedBuffer()
        pinned.reserve(64)
        values = pinned.view((64,), UINT8)
        values[:] = 5

    thread = threading.Thread(target=upload_and_wait, args=(block, values, stream))
    thread.start()
    thread.join(60)
    with driver.current():
        values[:] = 0
        memory.download(values, block, stream)
        stream.synchronize()
        assert values.tolist() == [5] * 64
        del values, stream
        block.free()
        pinned.free()
