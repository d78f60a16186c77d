"""Memory that clients share, opened and pinned on a simulated GPU."""

from __future__ import annotations

import gc
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace.core.tensor import is_resident
from headrace.cuda.shared_memory import ClientMemory, PinnedFile, find_client_memory
from headrace.front_ends.arena import UNIT_BYTES, Arena, MappedArena
from headrace.front_ends.frames import SLOT, TensorPlace

from tests.support.fake_streams import LateCuda, install

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
    created = ClientMemory(max_pinned_bytes=1 << 20)
    yield created
    finished(created)


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
    """Wait until the driver's thread has run all its queued work."""
    gc.collect()
    done = threading.Event()
    memory._thread.start()
    memory._thread.submit(done.set)
    assert done.wait(10)


def pinned(memory: ClientMemory, descriptor: int, start: int, size_bytes: int) -> PinnedFile | None:
    calls: list[tuple[PinnedFile | None, str]] = []
    done = threading.Event()

    def on_done(result: PinnedFile | None) -> None:
        calls.append((result, threading.current_thread().name))
        done.set()

    memory.pin(descriptor, start, size_bytes, 0, on_done)
    assert done.wait(10)
    finished(memory)
    (result, thread) = calls.pop()
    assert thread == "shared memory"
    return result


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    assert find_client_memory() is None


@needs_shm
def test_the_driver_thread_unpins_it_after_the_last_reference(cuda: LateCuda, memory: ClientMemory, file: int) -> None:
    held = [pinned(memory, file, 0, 100)]
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    dropping.join(10)
    finished(memory)
    assert not cuda.registered


@needs_shm
def test_driver_refusals_are_reported_and_logged(
    cuda: LateCuda, memory: ClientMemory, file: int, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuse_pinning = True
    assert pinned(memory, file, 0, 100) is None
    assert "pinning 100 bytes" in caplog.text
    cuda.refuse_pinning = False
    assert pinned(memory, file, 0, 100) is not None  # the thread lives


@needs_shm
def test_a_truncated_file_is_reported_and_logged(
    cuda: LateCuda, memory: ClientMemory, file: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Truncated between the look for holes and the mapping.
    monkeypatch.setattr("headrace.cuda.shared_memory._has_memory", lambda *_: os.ftruncate(file, 10) is None)
    assert pinned(memory, file, 0, 10_000) is None
    assert "cannot be mapped" in caplog.text


@needs_shm
def test_a_file_with_holes_is_not_pinned(memory: ClientMemory, file: int) -> None:
    os.ftruncate(file, 100 * PAGE)
    assert pinned(memory, file, 0, 100 * PAGE) is None
    assert pinned(memory, file, 0, 10_000) is not None


@needs_shm
def test_an_arena_is_pinned_before_it_was_written(memory: ClientMemory) -> None:
    arena = Arena(4 * UNIT_BYTES)
    mapped = MappedArena(os.dup(arena.fd), lambda _slots: None)
    mapped.start_pinning(memory.pin, {0})
    finished(memory)
    assert mapped.pinned is not None
    slot = arena.allocate(100)
    assert slot is not None
    slot[:] = 7
    place = arena.find(slot)
    assert place is not None
    number, generation, offset = place
    in_slot = TensorPlace(0, 0, (4, 25), 100, SLOT, offset, number, generation)
    rows = mapped.tensor(in_slot, np.dtype(np.uint8), on_gpu=True)
    assert is_resident(rows)
    np.testing.assert_array_equal(rows, np.full((4, 25), 7, np.uint8))
    mapped.close()
    arena.close()
    del rows, mapped
    finished(memory)


def exported(cuda: LateCuda) -> Any:
    cuda.exported[HANDLE] = np.arange(1000).astype(np.uint8)
    return cuda.exported[HANDLE]


def test_any_thread_may_request_a_host_copy(cuda: LateCuda, memory: ClientMemory) -> None:
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
