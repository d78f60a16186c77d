"""Memory of the host that a real GPU reads by itself: pinned arrays, and files of clients, also such as go away meanwhile."""

from __future__ import annotations

import importlib.util
import mmap
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from headrace.core.tensor import Array
from headrace.runtimes.cuda.shared_memory import ClientMemory, PinnedFile

from tests.gpu.contract.test_shared_memory import Fetch, finished
from tests.gpu.contract.test_shared_memory import pinned as pinned_descriptor

_missing = importlib.util.find_spec("pycuda") is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_missing, reason="needs an NVIDIA GPU and PyCUDA")]

SIZE = 3 << 20
PLACED = (0, 1, 2, 4, 8, 4095, 12_280, 16_384)
CONTENT = (np.arange(SIZE) % 251).astype(np.uint8)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path() -> Iterator[Path]:
    created = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    created.write_bytes(CONTENT.tobytes())
    yield created
    created.unlink(missing_ok=True)


def pinned(memory: ClientMemory, path: Path, start: int, size_bytes: int) -> PinnedFile | None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return pinned_descriptor(memory, descriptor, start, size_bytes)
    finally:
        os.close(descriptor)


PLACES = [(offset, size) for size in (1, 3, 4, 16, 17, 64, 4096, 1 << 16, (1 << 16) + 1, 1 << 20) for offset in PLACED]


def found_as_pinned(result: Array, start: int, left: int) -> None:
    """Bytes from `start` of a file that was cut down to `left` bytes are what they were when it was pinned.

    But for the rest of the page that the file ends in now: the kernel wipes that.
    """
    at = start + np.arange(len(result))
    wiped = (at >= left) & (at < -(-left // mmap.PAGESIZE) * mmap.PAGESIZE)
    np.testing.assert_array_equal(result, np.where(wiped, 0, CONTENT[start : start + len(result)]))


def cut_down_while_it_is_pinned(path: Path, left: int) -> None:
    memory = ClientMemory(1 << 30)
    region = pinned(memory, path, 0, SIZE)
    assert region is not None
    os.truncate(path, left)
    with closing(Fetch(SIZE)) as fetch:
        found_as_pinned(fetch(region.address, SIZE), 0, left)
        for offset, size in PLACES:
            found_as_pinned(fetch(region.address + offset, size), offset, left)
        found_as_pinned(fetch(region.address + SIZE - 101, 101), SIZE - 101, left)
    del region
    finished(memory)
    # All of it has been given back, and the GPU is as well as ever.
    path.write_bytes(CONTENT.tobytes())
    region = pinned(memory, path, 4096, 100_000)
    assert region is not None
    with closing(Fetch(SIZE)) as fetch:
        np.testing.assert_array_equal(fetch(region.address, 100_000), CONTENT[4096:104_096])
    del region
    finished(memory)


def cut_down_before_it_is_pinned(path: Path, left: int) -> None:
    from headrace.runtimes.cuda.driver import DeviceError
    from headrace.runtimes.cuda.memory import PinnedMapping

    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), SIZE, mmap.MAP_SHARED)
    os.truncate(path, left)
    with pytest.raises(DeviceError, match="pinning"):
        PinnedMapping(mapping, 0, lambda job: job())
    assert mapping.closed
    memory = ClientMemory(1 << 30)
    assert pinned(memory, path, 0, SIZE) is None


# In a process of its own: what it is about is that this one lives, and its GPU with it.
_ALONE = """
import sys
from pathlib import Path
sys.path.insert(0, ".")
from tests.gpu import test_pinned_memory as test
getattr(test, sys.argv[1])(Path(sys.argv[2]), int(sys.argv[3]))
print("lives")
"""


@pytest.mark.parametrize("left", [0, 4096 * 3 + 1])
@pytest.mark.parametrize("when", [cut_down_while_it_is_pinned, cut_down_before_it_is_pinned])
def test_a_client_that_truncates_its_memory_affects_no_other(
    path: Path, when: Callable[[Path, int], None], left: int
) -> None:
    words = [sys.executable, "-X", "faulthandler", "-c", _ALONE, when.__name__, str(path), str(left)]
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (process.returncode, process.stdout) == (0, "lives\n"), process.stderr


def test_memory_that_is_not_there_yet_is_not_pinned(path: Path) -> None:
    memory = ClientMemory(1 << 40)
    os.truncate(path, 1 << 34)
    assert pinned(memory, path, 0, 1 << 34) is None
    assert path.stat().st_blocks * 512 < 1 << 24
