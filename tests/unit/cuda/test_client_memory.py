"""Memory that clients share, opened and pinned on a simulated GPU."""

from __future__ import annotations

import gc
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.core.errors import BadRequest
from server.core.resident import PINNED
from server.cuda.driver import DeviceError
from server.cuda.pinned import pinned_empty, pinned_rows
from server.cuda.shared_memory import ClientMemory, PinnedFile, find_client_memory
from tests.fake_streams import LateCuda, install
from tests.residents import bytes_at, read

HANDLE = b"h" * 64
PAGE = os.sysconf("SC_PAGE_SIZE")
needs_shm = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs /dev/shm")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCuda]:
    fake = LateCuda()
    install(monkeypatch, fake)
    yield fake
    assert not fake.registered, "memory is still pinned"
    assert not fake.live, "memory is still open"


@pytest.fixture
def memory(cuda: LateCuda) -> Iterator[ClientMemory]:
    made = ClientMemory(most_pinned_bytes=1 << 20)
    yield made
    finished(made)


@pytest.fixture
def file() -> Iterator[int]:
    """A file in shared memory of 10,000 bytes, all there; its descriptor."""
    path = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    path.write_bytes(np.arange(10_000).astype(np.uint8).tobytes())
    descriptor = os.open(path, os.O_RDWR)
    path.unlink()
    yield descriptor
    os.close(descriptor)


def finished(memory: ClientMemory) -> None:
    """Until the driver's thread has done all that it was told so far."""
    gc.collect()
    done = threading.Event()
    memory._thread.start()
    memory._thread.submit(done.set)
    assert done.wait(10)


def pinned(memory: ClientMemory, descriptor: int, start: int, size_bytes: int) -> PinnedFile | None:
    told: list[tuple[PinnedFile | None, str]] = []
    done = threading.Event()

    def on_done(found: PinnedFile | None) -> None:
        told.append((found, threading.current_thread().name))
        done.set()

    memory.pin(descriptor, start, size_bytes, 0, on_done)
    assert done.wait(10)
    finished(memory)
    (found, thread) = told.pop()
    assert thread == "shared memory"
    return found


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    assert find_client_memory() is None


def test_with_a_gpu_there_is_one(cuda: LateCuda) -> None:
    assert isinstance(find_client_memory(), ClientMemory)


@needs_shm
@pytest.mark.parametrize(("start", "size"), [(0, 10_000), (1, 9_999), (PAGE, 100), (PAGE + 8, 10_000 - PAGE - 8)])
def test_a_file_is_pinned_where_its_range_begins(
    cuda: LateCuda, memory: ClientMemory, file: int, start: int, size: int
) -> None:
    found = pinned(memory, file, start, size)
    assert found is not None
    # What the client writes later is seen: it is the very memory.
    os.pwrite(file, b"new", start + 7)
    expected = np.arange(10_000).astype(np.uint8)[start : start + size]
    expected[7:10] = list(b"new")
    assert np.array_equal(bytes_at(found.address, size), expected)
    assert len(cuda.registered) == 1
    del found
    finished(memory)
    assert not cuda.registered


@needs_shm
def test_it_is_unpinned_by_the_drivers_thread_whoever_drops_it_last(
    cuda: LateCuda, memory: ClientMemory, file: int
) -> None:
    held = [pinned(memory, file, 0, 100)]
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    dropping.join(10)
    finished(memory)
    assert not cuda.registered


@needs_shm
def test_memory_that_a_client_has_made_up_is_not_pinned(cuda: LateCuda, memory: ClientMemory, file: int) -> None:
    os.ftruncate(file, 1 << 19)
    assert pinned(memory, file, 0, 1 << 19) is None
    os.pwrite(file, bytes((1 << 19) - 10_000), 10_000)
    assert pinned(memory, file, 0, 1 << 19) is not None


@needs_shm
def test_all_of_them_together_are_bounded(cuda: LateCuda, file: int) -> None:
    memory = ClientMemory(most_pinned_bytes=15_000)
    first = pinned(memory, file, 0, 10_000)
    assert first is not None
    assert pinned(memory, file, 0, 5_001) is None
    second = pinned(memory, file, 0, 5_000)
    assert second is not None
    del first
    finished(memory)
    assert pinned(memory, file, 0, 10_000) is not None
    del second
    finished(memory)


@needs_shm
def test_what_the_driver_refuses_is_told_and_logged(
    cuda: LateCuda, memory: ClientMemory, file: int, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuse_pinning = True
    assert pinned(memory, file, 0, 100) is None
    assert "pinning 100 bytes" in caplog.text
    cuda.refuse_pinning = False
    assert pinned(memory, file, 0, 100) is not None  # the thread lives


@needs_shm
def test_a_truncated_file_is_told_and_logged(
    cuda: LateCuda, memory: ClientMemory, file: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Truncated between the look for holes and the mapping.
    monkeypatch.setattr("server.cuda.shared_memory._has_memory", lambda *_: os.ftruncate(file, 10) is None)
    assert pinned(memory, file, 0, 10_000) is None
    assert "cannot be mapped" in caplog.text


def exported(cuda: LateCuda) -> Any:
    cuda.exported[HANDLE] = np.arange(1000).astype(np.uint8)
    return cuda.exported[HANDLE]


def test_rows_on_a_gpu_are_located_and_not_copied(cuda: LateCuda, memory: ClientMemory) -> None:
    array = exported(cuda)
    region = memory.open_ipc(HANDLE, 0, 1000)
    rows = region.locate(8, 400, frozenset()).as_tensor(np.dtype(np.int32), (10, 10))
    assert rows.device == 0
    assert rows.owner is region
    assert np.array_equal(read(rows), array[8:408].view(np.int32).reshape(10, 10))
    with pytest.raises(BadRequest, match="do not lie in the region"):
        region.locate(601, 400, frozenset())
    # The name is taken away, the request still runs.
    del region
    finished(memory)
    assert cuda.live
    del rows
    finished(memory)
    assert not cuda.live


def test_any_thread_may_ask_for_a_host_copy(cuda: LateCuda, memory: ClientMemory) -> None:
    array = exported(cuda)
    rows = memory.open_ipc(HANDLE, 0, 1000).locate(3, 500, frozenset())
    copies: list[Any] = []
    thread = threading.Thread(target=lambda part: copies.append(np.asarray(part)), args=(rows[100:],))
    thread.start()
    thread.join(10)
    assert np.array_equal(copies.pop(), array[103:503])
    cuda.broken_ipc = True
    with pytest.raises(BadRequest, match="its owner must keep it allocated"):
        np.asarray(rows)
    del rows
    finished(memory)


@pytest.mark.parametrize(
    ("handle", "device", "size", "words"),
    [
        (b"h", 0, 10, "64 bytes"),
        (HANDLE, 0, 0, "byte_size"),
        (HANDLE, 1, 10, "device_id 1 is not there"),
        (HANDLE, 0, 1001, "past the end"),
        (b"x" * 64, 0, 10, "cannot be opened"),
    ],
)
def test_what_cannot_be_opened(
    cuda: LateCuda, memory: ClientMemory, handle: bytes, device: int, size: int, words: str
) -> None:
    exported(cuda)
    with pytest.raises(BadRequest, match=words):
        memory.open_ipc(handle, device, size)
    finished(memory)
    assert not cuda.live


def test_pinned_arrays_are_rows_of_their_own_process(cuda: LateCuda) -> None:
    array = pinned_empty((4, 3), np.float16)
    array[:] = np.arange(12).reshape(4, 3)
    rows = pinned_rows(array[1:])
    assert (rows.device, rows.shape, rows.dtype) == (PINNED, (3, 3), np.float16)
    assert rows.address == array.ctypes.data + 6
    del array
    gc.collect()
    assert np.array_equal(read(rows), np.arange(3, 12).reshape(3, 3))
    assert np.array_equal(np.asarray(rows[2:]), [[9, 10, 11]])
    assert cuda.registered
    del rows
    gc.collect()
    assert not cuda.registered


@pytest.mark.parametrize("make", [lambda: np.zeros(()), lambda: np.zeros((4, 4)).T[1:]], ids=["scalar", "strided"])
def test_what_is_no_rows_is_refused(cuda: LateCuda, make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="C-contiguous"):
        pinned_rows(make())


def test_memory_that_is_not_pinned_is_refused(cuda: LateCuda) -> None:
    with pytest.raises(DeviceError, match="looking for pinned memory"):
        pinned_rows(np.zeros(4))
