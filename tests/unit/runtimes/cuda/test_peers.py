"""Copies between two GPUs that are not there."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from headrace.core.errors import Unsupported
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream, current
from headrace.runtimes.cuda.memory import DeviceBuffer, read_gpu
from headrace.runtimes.cuda.peers import peer_copy

from tests.support.fake_gpu import cuda as cuda
from tests.support.fake_streams import LateCuda


@pytest.fixture(autouse=True)
def two_gpus(cuda: LateCuda) -> Iterator[None]:
    cuda.devices = 2
    yield
    assert (cuda.depth, cuda.live, cuda.queues) == (0, set(), {})


@pytest.mark.parametrize("peer_access", [True, False])
def test_a_copy_is_queued_on_a_stream_of_the_receiver(cuda: LateCuda, peer_access: bool) -> None:
    cuda.peer_access = peer_access
    copy = peer_copy(1, 0)
    assert copy is not None
    assert peer_copy(1, 0) is copy
    values = np.arange(9, dtype=np.uint8)
    with current(0):
        block, stream = DeviceBuffer(9), CudaStream()
        copy.queue(block.address, values.ctypes.data, 0, stream)
        copy.queue(block.address, values.ctypes.data, 9, stream)
        assert not np.array_equal(read_gpu(0, block.address, 9), values), "nothing has waited for the stream"
        stream.synchronize()
        np.testing.assert_array_equal(read_gpu(0, block.address, 9), values)
        block.free()
        del stream
    assert [(source, target) for source, target, _ in cuda.peer_copies] == [(1, 0)] * 2, "one for the test of the pair"
    assert cuda.accesses == ({(0, 1)} if peer_access else set())


def test_access_that_another_library_has_enabled(cuda: LateCuda) -> None:
    cuda.accesses.add((0, 1))
    assert peer_copy(1, 0) is not None


def test_a_pair_that_copies_wrong_bytes_is_not_used(cuda: LateCuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.wrong_peer_copies = True
    assert peer_copy(0, 1) is None
    cuda.wrong_peer_copies = False
    assert peer_copy(0, 1) is None, "the result of the test holds for the life of the process"
    assert peer_copy(1, 0) is not None
    (record,) = caplog.records
    assert (record.levelno, "no copies from GPU 0 to GPU 1" in record.getMessage()) == (logging.WARNING, True)


def test_a_pair_that_the_driver_refuses_is_not_used(
    cuda: LateCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver.library(), "cuMemcpyPeerAsync", lambda *_: 217, raising=False)
    assert peer_copy(0, 1) is None
    assert "copying from GPU 0 to GPU 1 failed on the GPU" in caplog.text


def test_a_full_gpu_is_tested_again_later(cuda: LateCuda) -> None:
    room, cuda.room_bytes = cuda.room_bytes, 0
    assert peer_copy(0, 1) is None
    cuda.room_bytes = room
    assert peer_copy(0, 1) is not None


def test_gpus_that_are_not_there() -> None:
    with pytest.raises(Unsupported, match="CUDA device 2 is not there"):
        peer_copy(2, 0)
    with pytest.raises(Unsupported, match="no peer of itself"):
        peer_copy(1, 1)
