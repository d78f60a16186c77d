"""Memory that clients share, opened and pinned on a simulated GPU."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace.core.tensor import is_resident
from headrace.runtimes.cuda.shared_memory import ClientMemory, find_client_memory
from headrace.server.front_ends.arena import UNIT_BYTES, Arena, MappedArena
from headrace.server.front_ends.frames import SLOT, TensorPlace

from tests.support.exported_memory import finished, pinned, shared_file
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
    with shared_file(np.arange(10_000).astype(np.uint8).tobytes()) as descriptor:
        yield descriptor


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    assert find_client_memory() is None


@needs_shm
def test_the_driver_thread_unpins_it_after_the_last_reference(cuda: LateCuda, memory: ClientMemory, file: int) -> None:
    held = [pinned(memory, file, 0, 100)]
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    dropping.join(60)
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
    monkeypatch.setattr("headrace.runtimes.cuda.shared_memory._has_memory", lambda *_: os.ftruncate(file, 10) is None)
    assert pinned(memory, file, 0, 10_000) is None
    assert "cannot be mapped" in caplog.text


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


def test_memory_that_its_owner_has_freed_is_reported(cuda: LateCuda, memory: ClientMemory) -> None:
    cuda.exported[HANDLE] = np.arange(1000).astype(np.uint8)
    rows = memory.open_ipc(HANDLE, 0, 1000).locate(3, 500, frozenset())
    cuda.broken_ipc = True
    with pytest.raises(BadRequest, match="its owner must keep it allocated"):
        np.asarray(rows)
    del rows
    finished(memory)
