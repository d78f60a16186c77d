"""Memory of the host that a real GPU reads by itself: pinned arrays, and files of clients, also such as go away meanwhile."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from server.core.resident import PINNED, ResidentRows
from server.core.tensor import Array
from server.cuda.shared_memory import ClientMemory, PinnedFile

_missing = importlib.util.find_spec("pycuda") is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_missing, reason="needs an NVIDIA GPU and PyCUDA")]

SIZE = 3 << 20
CONTENT = (np.arange(SIZE) % 251).astype(np.uint8)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path() -> Iterator[Path]:
    made = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    made.write_bytes(CONTENT.tobytes())
    yield made
    made.unlink(missing_ok=True)


def pinned(memory: ClientMemory, path: Path, start: int, size_bytes: int) -> PinnedFile | None:
    found: list[PinnedFile | None] = []
    done = threading.Event()

    def on_done(made: PinnedFile | None) -> None:
        found.append(made)
        done.set()

    descriptor = os.open(path, os.O_RDWR)
    try:
        memory.pin(descriptor, start, size_bytes, 0, on_done)
        assert done.wait(30)
    finally:
        os.close(descriptor)
    return found.pop()


def finished(memory: ClientMemory) -> None:
    gc.collect()
    done = threading.Event()
    memory._thread.submit(done.set)
    assert done.wait(30)


def copied_by_gpu(address: int, size_bytes: int) -> Array:
    """What the GPU finds there, by way of its own memory."""
    from server.cuda.driver import Stream, current, loaded
    from server.cuda.libcuda import library, succeeded
    from server.cuda.memory import DeviceBuffer

    out = np.empty(size_bytes, np.uint8)
    with current(0):
        buffer, stream = DeviceBuffer(size_bytes), Stream()
        target, source = ctypes.c_ulonglong(buffer.address), ctypes.c_ulonglong(address)
        handle = ctypes.c_void_p(stream.handle)
        succeeded(library().cuMemcpyAsync(target, source, ctypes.c_size_t(size_bytes), handle), "copying")
        stream.synchronize()
        loaded().memcpy_dtoh(out, buffer.address)
        buffer.free()
        del stream
    return out


def test_the_gpu_reads_a_pinned_array() -> None:
    from server.cuda.pinned import pinned_empty, pinned_rows

    array = pinned_empty((16, 1000), np.float32)
    array[:] = np.random.default_rng(0).standard_normal(array.shape, dtype=np.float32)
    expected = array[3:5].copy()
    rows: ResidentRows = pinned_rows(array)[3:5]
    del array
    gc.collect()
    assert rows.device == PINNED
    seen = copied_by_gpu(rows.address, rows.nbytes).view(np.float32).reshape(rows.shape)
    np.testing.assert_array_equal(seen, expected)
    np.testing.assert_array_equal(np.asarray(rows), expected)


def test_memory_that_is_not_pinned_is_refused() -> None:
    from server.cuda.driver import DeviceError
    from server.cuda.pinned import pinned_rows

    with pytest.raises(DeviceError, match="looking for pinned memory"):
        pinned_rows(np.zeros(1 << 20, np.uint8))


@pytest.mark.parametrize(("start", "size"), [(0, SIZE), (4096, 100), (4097, 1_000_000), (SIZE - 3, 3)])
def test_the_gpu_reads_a_file_in_shared_memory(path: Path, start: int, size: int) -> None:
    memory = ClientMemory(1 << 30)
    found = pinned(memory, path, start, size)
    assert found is not None
    np.testing.assert_array_equal(copied_by_gpu(found.address, size), CONTENT[start : start + size])
    # What the client writes later is seen without asking.
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff\xfe\xfd")
    assert copied_by_gpu(found.address, 3).tolist() == [255, 254, 253]
    del found
    finished(memory)
    again = pinned(memory, path, start, size)
    assert again is not None
    del again
    finished(memory)


def test_two_regions_of_one_file_are_pinned_side_by_side(path: Path) -> None:
    memory = ClientMemory(1 << 30)
    both = [pinned(memory, path, 0, SIZE), pinned(memory, path, 100, 5000)]
    for found, start in zip(both, (0, 100), strict=True):
        assert found is not None
        np.testing.assert_array_equal(copied_by_gpu(found.address, 5000), CONTENT[start : start + 5000])
    both.clear()
    found = None
    finished(memory)


# In a process of its own: what it is about is that this one lives, and its GPU with it.
_TRUNCATED = """
import os, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, ".")
from server.cuda.shared_memory import ClientMemory
from tests.gpu.test_pinned_memory import CONTENT, SIZE, copied_by_gpu, pinned
path = Path(sys.argv[1])
found = pinned(ClientMemory(1 << 30), path, 0, SIZE)
assert found is not None
os.truncate(path, int(sys.argv[2]))
# Small copies may go another way than large ones.
for size in (1, 64, 4096, 1 << 16, SIZE):
    assert np.array_equal(copied_by_gpu(found.address, size), CONTENT[:size]), size
assert np.array_equal(copied_by_gpu(found.address + SIZE - 100, 100), CONTENT[-100:])
print("lives")
"""


@pytest.mark.parametrize("left", [0, 4096 * 3 + 1])
def test_a_client_that_truncates_its_memory_hurts_nobody(path: Path, left: int) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _TRUNCATED, str(path), str(left)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (process.returncode, process.stdout) == (0, "lives\n"), process.stderr


def test_memory_that_is_not_there_yet_is_not_pinned(path: Path) -> None:
    memory = ClientMemory(1 << 40)
    os.truncate(path, 1 << 34)
    assert pinned(memory, path, 0, 1 << 34) is None
    assert path.stat().st_blocks * 512 < 1 << 24
