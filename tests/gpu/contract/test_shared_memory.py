"""Memory that other processes share: the GPU's own memory by IPC handles, and the host's memory that a GPU reads."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace.core.tensor import PINNED, Array
from headrace.runtimes.cuda.driver import CudaStream, DeviceError, current, loaded
from headrace.runtimes.cuda.kernels.launching import RowGather
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, pinned_empty, pinned_rows
from headrace.runtimes.cuda.shared_memory import ClientMemory, find_client_memory

from tests.gpu.contract.conftest import GpuUnderTest
from tests.support.exported_memory import finished, pinned, shared_file

SIZE = 100_000
CONTENT = (np.arange(SIZE) % 251).astype(np.uint8)
PAGE = os.sysconf("SC_PAGE_SIZE")
needs_shm = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs /dev/shm")


@pytest.fixture
def memory(gpu: GpuUnderTest) -> Iterator[ClientMemory]:
    created = ClientMemory(max_pinned_bytes=1 << 30)
    yield created
    finished(created)


# --- The GPU's own memory ------------------------------------------------------------------------------------------------


def test_a_machine_with_a_gpu_opens_memory_of_clients(gpu: GpuUnderTest) -> None:
    assert isinstance(find_client_memory(), ClientMemory)


def test_a_region_is_read_and_written_where_its_owner_sees_it(gpu: GpuUnderTest, memory: ClientMemory) -> None:
    expected = CONTENT.copy()
    with gpu.export(CONTENT.tobytes()) as owner:
        region = memory.open_ipc(owner.handle, 0, SIZE)
        np.testing.assert_array_equal(region.read(0, SIZE), expected)
        np.testing.assert_array_equal(region.read(1001, 60_211), expected[1001 : 1001 + 60_211])
        assert region.read(SIZE, 0).size == 0
        tensor = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
        region.write(4096, memoryview(tensor))
        region.write(SIZE - 3, b"end")
        region.write(7, b"")
        expected[4096:8096] = tensor.view(np.uint8)
        expected[-3:] = list(b"end")
        assert owner.content() == expected.tobytes()
        # Once it is closed the same handle can be opened again.
        del region
        finished(memory)
        again = memory.open_ipc(owner.handle, 0, SIZE)
        np.testing.assert_array_equal(again.read(0, SIZE), expected)
        del again
        finished(memory)


def test_located_rows_keep_the_region_open(gpu: GpuUnderTest, memory: ClientMemory) -> None:
    with gpu.export(CONTENT.tobytes()) as owner:
        region = memory.open_ipc(owner.handle, 0, SIZE)
        rows = region.locate(8, 400, frozenset()).as_tensor(np.dtype(np.int32), (10, 10))
        assert (rows.device, rows.owner is region) == (0, True)
        del region
        finished(memory)
        np.testing.assert_array_equal(np.asarray(rows), CONTENT[8:408].view(np.int32).reshape(10, 10))
        del rows
        finished(memory)


def test_another_thread_may_copy_and_drop_the_last_reference(
    gpu: GpuUnderTest, memory: ClientMemory, capfd: pytest.CaptureFixture[str]
) -> None:
    with gpu.export(CONTENT.tobytes()) as owner:
        rows = memory.open_ipc(owner.handle, 0, SIZE).locate(1000, 1 << 16, frozenset())
        held = [rows.as_tensor(np.dtype(np.int32), (64, 256))]
        del rows
        copies: list[Any] = []

        def last() -> None:
            copies.append(np.asarray(held[0][1:3]))
            held.clear()

        thread = threading.Thread(target=last)
        thread.start()
        thread.join(60)
        finished(memory)
        # PyCUDA would write of a context that it cannot enter, and the mapping would stay open.
        assert capfd.readouterr().err == ""
        expected = CONTENT[1000 + 1024 : 1000 + 3072].view(np.int32).reshape(2, 256)
        np.testing.assert_array_equal(copies.pop(), expected)
        again = memory.open_ipc(owner.handle, 0, SIZE)
        np.testing.assert_array_equal(again.read(0, 10), np.arange(10))
        del again
        finished(memory)


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 1), (0, 1001), (1000, 1), (1, 1000), (2**64 - 1, 1), (2**64 - 1, 2**64 - 1), (0, -1)]
)
def test_a_range_out_of_the_region_is_refused(gpu: GpuUnderTest, memory: ClientMemory, offset: int, size: int) -> None:
    with gpu.export(CONTENT.tobytes()) as owner:
        region = memory.open_ipc(owner.handle, 0, 1000)
        with pytest.raises(BadRequest, match="do not lie in the region"):
            region.read(offset, size)
        with pytest.raises(BadRequest, match="do not lie in the region"):
            region.locate(offset, size, frozenset())
        if size >= 0:
            with pytest.raises(BadRequest, match="do not lie in the region"):
                region.write(offset, bytes(min(size, 2000)))
        assert owner.content() == CONTENT.tobytes()
        del region
        finished(memory)


def test_invalid_handles_are_refused_without_side_effects(gpu: GpuUnderTest, memory: ClientMemory) -> None:
    with gpu.export(CONTENT.tobytes()) as owner:
        for handle in (b"", owner.handle[:-1], owner.handle + b"\0"):
            with pytest.raises(BadRequest, match="64 bytes"):
                memory.open_ipc(handle, 0, 16)
        with pytest.raises(BadRequest, match="byte_size"):
            memory.open_ipc(owner.handle, 0, 0)
        for size in (1 << 34, 2**64 - 1):
            with pytest.raises(BadRequest, match="past the end of the CUDA allocation"):
                memory.open_ipc(owner.handle, 0, size)
        for device in (-1, 99, 2**63):
            with pytest.raises(BadRequest, match=f"device_id {device} is not there"):
                memory.open_ipc(owner.handle, device, 16)
        for handle in (bytes(64), b"\xff" * 64):
            with pytest.raises(BadRequest, match="cannot be opened"):
                memory.open_ipc(handle, 0, 16)
        finished(memory)
        region = memory.open_ipc(owner.handle, 0, 16)
        assert region.read(0, 16).tolist() == list(range(16))
        del region
        finished(memory)


# --- The host's memory that a GPU reads ----------------------------------------------------------------------------------


class Fetch:
    """Reads memory as the server does: by a kernel, into the GPU's own memory, and from there."""

    def __init__(self, size_bytes: int = SIZE) -> None:
        self._kernel = RowGather(0)
        with current(0):
            self._buffer, self._table, self._stream = DeviceBuffer(size_bytes), PinnedBuffer(), CudaStream()
            self._table.reserve(8)

    def __call__(self, address: int, size_bytes: int) -> Array:
        out = np.empty(size_bytes, np.uint8)
        with current(0):
            self._table.view((1,), np.dtype(np.uint64))[0] = address
            self._kernel.launch(self._stream, self._table.address, size_bytes, 1, 1, self._buffer.address, 8)
            self._stream.synchronize()
            loaded().memcpy_dtoh(out, self._buffer.address)
        return out

    def close(self) -> None:
        with current(0):
            del self._stream
            self._buffer.free()
            self._table.free()
        self._kernel.close()


@pytest.fixture
def fetch(needs_kernels: None) -> Iterator[Fetch]:
    with closing(Fetch()) as created:
        yield created


@pytest.fixture
def file() -> Iterator[int]:
    """A file in shared memory with `CONTENT`, all of it allocated; its descriptor."""
    with shared_file(CONTENT.tobytes()) as descriptor:
        yield descriptor


def test_a_gpu_reads_a_pinned_array(fetch: Fetch) -> None:
    array = pinned_empty((16, 1000), np.float32)
    array[:] = np.random.default_rng(0).standard_normal(array.shape, dtype=np.float32)
    expected = array[3:5].copy()
    rows = pinned_rows(array)[3:5]
    del array
    gc.collect()
    assert (rows.device, rows.shape, rows.dtype) == (PINNED, (2, 1000), np.float32)
    np.testing.assert_array_equal(fetch(rows.address, rows.nbytes).view(np.float32).reshape(rows.shape), expected)
    np.testing.assert_array_equal(np.asarray(rows), expected)
    del rows
    gc.collect()


def test_memory_that_is_not_pinned_is_refused(gpu: GpuUnderTest) -> None:
    with pytest.raises(DeviceError, match="resolving the address of pinned memory"):
        pinned_rows(np.zeros(1 << 20, np.uint8))


@pytest.mark.parametrize("make", [lambda: np.zeros(()), lambda: np.zeros((4, 4)).T[1:]], ids=["scalar", "strided"])
def test_invalid_row_ranges_are_refused(gpu: GpuUnderTest, make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="C-contiguous"):
        pinned_rows(make())


@needs_shm
@pytest.mark.parametrize(("start", "size"), [(0, SIZE), (1, 9_999), (PAGE, 100), (PAGE + 1, 50_000), (SIZE - 3, 3)])
def test_a_gpu_reads_a_file_in_shared_memory(
    memory: ClientMemory, fetch: Fetch, file: int, start: int, size: int
) -> None:
    result = pinned(memory, file, start, size)
    assert result is not None
    np.testing.assert_array_equal(fetch(result.address, size), CONTENT[start : start + size])
    # What the client writes later is seen: it is the same memory.
    os.pwrite(file, b"\xff\xfe\xfd", start)
    assert fetch(result.address, 3).tolist() == [255, 254, 253]
    del result
    finished(memory)
    again = pinned(memory, file, start, size)
    assert again is not None
    del again
    finished(memory)


@needs_shm
def test_two_regions_of_one_file_are_pinned_side_by_side(memory: ClientMemory, fetch: Fetch, file: int) -> None:
    both = [pinned(memory, file, 0, SIZE), pinned(memory, file, 100, 5000)]
    for result, start in zip(both, (0, 100), strict=True):
        assert result is not None
        np.testing.assert_array_equal(fetch(result.address, 5000), CONTENT[start : start + 5000])
    both.clear()
    result = None
    finished(memory)


@needs_shm
def test_unwritten_client_memory_is_not_pinned(memory: ClientMemory, file: int) -> None:
    os.ftruncate(file, 1 << 19)
    assert pinned(memory, file, 0, 1 << 19) is None
    os.pwrite(file, bytes((1 << 19) - SIZE), SIZE)
    assert pinned(memory, file, 0, 1 << 19) is not None
    finished(memory)


@needs_shm
def test_all_pinned_files_together_are_bounded(gpu: GpuUnderTest, file: int) -> None:
    memory = ClientMemory(max_pinned_bytes=15_000)
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
