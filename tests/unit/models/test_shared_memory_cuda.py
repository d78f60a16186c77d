"""Regions of a GPU share the names of the system's; what opens them is handed in."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from headrace.core.errors import BadRequest, Conflict, NotFound, Unsupported
from headrace.core.tensor import Array
from headrace.models.shared_memory import CUDA, SYSTEM, SharedMemoryRegions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system shared memory needs /dev/shm")


@pytest.fixture
def key() -> Iterator[str]:
    """Shared memory of sixteen bytes; its key."""
    path = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    path.write_bytes(bytes(16))
    yield f"/{path.name}"
    path.unlink()


class FakeGpu:
    """Stands for memory of a GPU."""

    gpu: int | None = 0

    def check(self, offset: int, size_bytes: int) -> None:
        pass

    def locate(self, offset: int, size_bytes: int, devices: frozenset[int]) -> None:
        pass

    def read(self, offset: int, size_bytes: int) -> Array:
        return np.zeros(size_bytes, np.uint8)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        pass


def test_unregister_removes_one_or_all_of_a_kind(key: str) -> None:
    regions = SharedMemoryRegions(allowed=True, cuda=lambda *_: FakeGpu())
    for name in ("a", "b", "c"):
        regions.register_system(name, key, 0, 1)
    regions.register_cuda("gpu", bytes(64), 0, 1)
    regions.unregister(SYSTEM, "a")
    regions.unregister(SYSTEM, "a")
    regions.unregister(SYSTEM, "gpu")
    with pytest.raises(NotFound):
        regions.find("a")
    regions.find("b")
    regions.unregister(SYSTEM, "")
    assert list(regions.status(SYSTEM, "")) == []
    assert len(regions.status(CUDA, "")) == 1
    regions.unregister(CUDA, "")
    with pytest.raises(NotFound):
        regions.find("gpu")


def test_cuda_without_a_gpu() -> None:
    regions = SharedMemoryRegions(allowed=True, cuda=None)
    with pytest.raises(Unsupported, match="no CUDA device"):
        regions.register_cuda("r", bytes(64), 0, 1)


def test_cuda_regions_use_the_opener_and_share_the_namespace(key: str) -> None:
    opened: list[tuple[bytes, int, int]] = []
    gpu = FakeGpu()

    def opener(handle: bytes, device: int, size_bytes: int) -> FakeGpu:
        opened.append((handle, device, size_bytes))
        if device == 9:
            raise BadRequest("device_id 9 is not there")
        return gpu

    regions = SharedMemoryRegions(allowed=True, cuda=opener)
    regions.register_cuda("r", b"h" * 64, 1, 4096)
    assert opened == [(b"h" * 64, 1, 4096)]
    assert regions.find("r") is gpu
    assert list(regions.status(CUDA, "r")) == [{"name": "r", "device_id": 1, "byte_size": 4096}]
    with pytest.raises(Conflict):
        regions.register_system("r", key, 0, 1)
    with pytest.raises(Conflict):
        regions.register_cuda("r", b"h" * 64, 1, 4096)
    with pytest.raises(BadRequest, match="device_id 9"):
        regions.register_cuda("s", b"h" * 64, 9, 1)
    assert len(opened) == 2
    assert len(regions.status(CUDA, "")) == 1
