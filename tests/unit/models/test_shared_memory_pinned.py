"""System regions in pinned memory: who has them pinned, when, and what happens until then. The pinning itself is a stand-in."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace.core.tensor import PINNED, Array
from headrace.models.shared_memory import SYSTEM, Pinned, SharedMemoryRegions

from tests.support.resident_rows import read

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system shared memory needs /dev/shm")

GPUS = frozenset({1, 2})
CONTENT = np.arange(4000, dtype=np.uint8)


class Copied:
    """Stands for a mapping: a copy of the file as it was."""

    def __init__(self, descriptor: int, start: int, size_bytes: int) -> None:
        self.array: Array = np.frombuffer(os.pread(descriptor, size_bytes, start), np.uint8).copy()

    @property
    def address(self) -> int:
        return self.array.ctypes.data


@dataclass
class Pinning:
    """Pins on the test's command, without a thread.

    Attributes:
        attempts: (start, size_bytes, device) of every attempt.
        descriptors: of every attempt.
        waiting: ends the attempts that are under way, with success or without.
    """

    attempts: list[tuple[int, int, int]] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    waiting: list[Callable[[bool], None]] = field(default_factory=list)

    def pin(
        self, descriptor: int, start: int, size_bytes: int, device: int, done: Callable[[Pinned | None], None]
    ) -> None:
        self.attempts.append((start, size_bytes, device))
        self.descriptors.append(descriptor)
        self.waiting.append(lambda well: done(Copied(descriptor, start, size_bytes) if well else None))

    def end(self, well: bool = True) -> None:
        self.waiting.pop()(well)


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    path.write_bytes(CONTENT.tobytes())
    yield path
    path.unlink()


@pytest.fixture
def pinning() -> Pinning:
    return Pinning()


@pytest.fixture
def regions(path: Path, pinning: Pinning) -> SharedMemoryRegions:
    regions = SharedMemoryRegions(allowed=True, cuda=None, pin=pinning.pin)
    regions.register_system("r", f"/{path.name}", 1000, 2000)
    return regions


def test_the_first_gpu_model_pins_it_and_later_requests_are_located(
    regions: SharedMemoryRegions, pinning: Pinning
) -> None:
    region = regions.find("r")
    assert region.locate(0, 10, frozenset()) is None
    assert not pinning.attempts
    assert region.locate(0, 10, GPUS) is None
    assert region.locate(0, 10, GPUS) is None
    assert pinning.attempts == [(1000, 2000, 1)]
    pinning.end()
    rows = region.locate(8, 16, GPUS)
    assert rows is not None
    assert rows.device == PINNED
    assert np.array_equal(read(rows), CONTENT[1008:1024])
    assert len(pinning.attempts) == 1


def test_a_host_copy_is_read_from_the_file_and_not_through_the_mapping(
    regions: SharedMemoryRegions, pinning: Pinning, path: Path
) -> None:
    region = regions.find("r")
    region.locate(0, 1, GPUS)
    pinning.end()
    rows = region.locate(100, 50, GPUS)
    assert rows is not None
    with path.open("r+b") as file:
        file.seek(1100)
        file.write(bytes(50))
    assert np.array_equal(np.asarray(rows[10:]), np.zeros(40))
    os.truncate(path, 1000)
    with pytest.raises(BadRequest, match="smaller than when it was registered"):
        np.asarray(rows)
    assert np.array_equal(read(rows), CONTENT[1100:1150])


def test_failures_are_tried_again_ever_more_rarely(regions: SharedMemoryRegions, pinning: Pinning) -> None:
    region, attempts = regions.find("r"), []
    for number in range(1, 20):
        assert region.locate(0, 1, GPUS) is None
        if pinning.waiting:
            attempts.append(number)
            pinning.end(well=False)
    assert attempts == [1, 2, 4, 8, 16]


def test_ranges_out_of_the_region_are_refused_pinned_or_not(regions: SharedMemoryRegions, pinning: Pinning) -> None:
    region = regions.find("r")
    for _ in range(2):
        for offset, size in ((-1, 1), (0, 2001), (2000, 1), (2**63, 1), (1, -1)):
            with pytest.raises(BadRequest, match="do not lie in the region"):
                region.locate(offset, size, GPUS)
        region.locate(0, 1, GPUS)
        if pinning.waiting:
            pinning.end()
    assert region.locate(0, 2000, GPUS) is not None


def descriptors_of(path: Path) -> int:
    """Count the descriptors of a file in this process; others may close at any time, when the collector finds them."""
    file, count = path.stat(), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found = os.fstat(int(name))
            count += (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino)
    return count


def test_rows_in_flight_hold_the_mapping_and_the_file(
    regions: SharedMemoryRegions, pinning: Pinning, path: Path
) -> None:
    assert descriptors_of(path)
    regions.find("r").locate(0, 1, GPUS)
    pinning.end()
    rows = regions.find("r").locate(0, 4, GPUS)
    assert rows is not None
    owner = weakref.ref(rows.owner)  # type: ignore[arg-type]
    regions.unregister(SYSTEM, "")
    gc.collect()
    assert owner() is not None
    assert np.array_equal(np.asarray(rows), CONTENT[1000:1004])
    assert np.array_equal(read(rows), CONTENT[1000:1004])
    del rows
    gc.collect()
    assert owner() is None
    assert descriptors_of(path) == 0


def test_an_unregistered_region_is_pinned_from_its_file(
    regions: SharedMemoryRegions, pinning: Pinning, path: Path
) -> None:
    regions.find("r").locate(0, 1, GPUS)
    regions.unregister(SYSTEM, "r")
    gc.collect()
    # The descriptor is still that file's: of what is opened meanwhile nothing has its number.
    with path.open("rb") as other:
        assert other.fileno() not in pinning.descriptors
        assert [os.fstat(number).st_size for number in pinning.descriptors] == [4000]
    pinning.end()
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pinning.descriptors[0])
