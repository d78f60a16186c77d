"""Work captured in graphs and replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from headrace.runtimes.cuda import driver, memory
from headrace.runtimes.cuda.driver import CudaGraph

from tests.gpu.contract.conftest import GpuUnderTest


class Copies:
    """A copy to the GPU and back, between two rows of pinned memory."""

    def __init__(self) -> None:
        self.stream = driver.CudaStream()
        self.block, self.pinned = memory.DeviceBuffer(64), memory.PinnedBuffer()
        self.pinned.reserve(128)
        self.source, self.target = self.pinned.view((2, 64), np.dtype(np.uint8))
        self.source[:], self.target[:] = 1, 0

    def enqueue(self) -> None:
        memory.upload(self.block, self.source, self.stream)
        memory.download(self.target, self.block, self.stream)

    def close(self) -> None:
        self.stream.synchronize()
        del self.source, self.target, self.stream
        self.block.free()
        self.pinned.free()


@pytest.fixture
def copies(gpu: GpuUnderTest) -> Iterator[Copies]:
    with driver.current():
        created = Copies()
        yield created
        created.close()


def test_a_capture_runs_nothing(copies: Copies) -> None:
    graph = CudaGraph(copies.stream, copies.enqueue)
    copies.stream.synchronize()
    assert copies.target.tolist() == [0] * 64
    graph.close()
    graph.close()


def test_a_graph_replays_its_work_with_the_values_of_now(copies: Copies) -> None:
    graph = CudaGraph(copies.stream, copies.enqueue)
    for value in (1, 2, 3):
        copies.source[:] = value
        graph.launch()
        copies.stream.synchronize()
        assert copies.target.tolist() == [value] * 64
    graph.close()


def test_a_failed_capture_leaves_the_stream_usable(copies: Copies) -> None:
    def fail() -> None:
        copies.enqueue()
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        CudaGraph(copies.stream, fail)
    copies.stream.synchronize()
    assert copies.target.tolist() == [0] * 64
    copies.enqueue()
    copies.stream.synchronize()
    assert copies.target.tolist() == [1] * 64


def test_waiting_invalidates_a_capture_and_leaves_the_stream_usable(copies: Copies) -> None:
    # The fake refuses it with an assertion.
    with contextlib.suppress(driver.DeviceError, AssertionError):
        CudaGraph(copies.stream, copies.stream.synchronize).close()
    copies.enqueue()
    copies.stream.synchronize()
    assert copies.target.tolist() == [1] * 64
