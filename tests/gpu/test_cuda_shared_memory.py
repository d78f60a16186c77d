"""CUDA shared memory with a real GPU: another process allocates and exports, our regions read and write.

Also a script, for a GPU machine without pytest: `python tests/gpu/test_cuda_shared_memory.py` from the repository's root.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

# The client of these tests: allocates `size` bytes, fills them with i % 251, prints the IPC handle, then answers commands.
_OWNER = """
import sys
import numpy as np
import pycuda.driver as driver
driver.init()
context = driver.Device(0).make_context()
size = int(sys.argv[1])
memory = driver.mem_alloc(size)
driver.memcpy_htod(memory, (np.arange(size) % 251).astype(np.uint8))
print(bytes(driver.mem_get_ipc_handle(memory)).hex(), flush=True)
for command in sys.stdin:
    if command.strip() == "show":
        content = np.empty(size, np.uint8)
        driver.memcpy_dtoh(content, memory)
        print(content.tobytes().hex(), flush=True)
memory.free()
context.pop()
"""
SIZE = 1 << 20


class _Owner:
    """A process that owns memory of the GPU."""

    def __init__(self, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWNER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.handle = bytes.fromhex(self._line())

    def content(self) -> bytes:
        assert self.process.stdin is not None
        self.process.stdin.write("show\n")
        self.process.stdin.flush()
        return bytes.fromhex(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that owns the memory has died"
        return line


@contextlib.contextmanager
def _owner(size: int = SIZE) -> Iterator[_Owner]:
    owner = _Owner(size)
    try:
        yield owner
    finally:
        owner.process.communicate("", timeout=30)


def _finished(memory: Any) -> None:
    """Until the driver's thread has closed what was dropped."""
    gc.collect()
    done = threading.Event()
    memory._thread.submit(done.set)
    assert done.wait(30)


@contextlib.contextmanager
def _stderr() -> Iterator[list[str]]:
    """What is written to the descriptor of standard error meanwhile, by C++ too, as the one element of a list."""
    said: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.append(file.read())


@contextlib.contextmanager
def _refused(kind: type[Exception], words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {words}")


def test_reads_and_writes_what_the_owner_sees() -> None:
    from server.control.shared_memory import CUDA, SharedMemoryRegions
    from server.cuda.shared_memory import find_client_memory

    memory = find_client_memory()
    assert memory is not None
    with _owner() as owner:
        regions = SharedMemoryRegions(allowed=True, cuda=memory.open_ipc)
        regions.register_cuda("gpu", owner.handle, 0, SIZE)
        assert list(regions.status(CUDA, "")) == [{"name": "gpu", "device_id": 0, "byte_size": SIZE}]
        region = regions.find("gpu")
        expected = (np.arange(SIZE) % 251).astype(np.uint8)
        np.testing.assert_array_equal(region.read(0, SIZE), expected)
        np.testing.assert_array_equal(region.read(1001, 602_112), expected[1001 : 1001 + 602_112])
        assert region.read(SIZE, 0).size == 0

        tensor = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
        region.write(4096, memoryview(tensor))
        region.write(SIZE - 3, b"end")
        region.write(7, b"")
        expected[4096:8096] = tensor.view(np.uint8)
        expected[-3:] = list(b"end")
        assert owner.content() == expected.tobytes()

        # A request in flight keeps the memory open; afterwards the same handle can be opened anew.
        regions.unregister(CUDA, "gpu")
        np.testing.assert_array_equal(region.read(0, SIZE), expected)
        del region
        _finished(memory)
        regions.register_cuda("again", owner.handle, 0, SIZE)
        np.testing.assert_array_equal(regions.find("again").read(0, SIZE), expected)
        regions.unregister(CUDA, "")


def test_another_thread_may_copy_and_drop_the_last_reference() -> None:
    from server.cuda.shared_memory import ClientMemory

    memory = ClientMemory(0)
    with _owner() as owner:
        rows = memory.open_ipc(owner.handle, 0, SIZE).locate(1000, 1 << 16, frozenset())
        held = [rows.as_tensor(np.dtype(np.int32), (64, 256))]
        del rows
        copies: list[Any] = []

        def last() -> None:
            copies.append(np.asarray(held[0][1:3]))
            held.clear()

        with _stderr() as said:
            thread = threading.Thread(target=last)
            thread.start()
            thread.join(30)
            _finished(memory)
        expected = (np.arange(SIZE) % 251).astype(np.uint8)[1000 + 1024 : 1000 + 3072]
        np.testing.assert_array_equal(copies.pop(), expected.view(np.int32).reshape(2, 256))
        # PyCUDA would write of a context that it cannot enter, and the mapping would stay open.
        assert said == [""]
        again = memory.open_ipc(owner.handle, 0, SIZE)
        np.testing.assert_array_equal(again.read(0, 10), np.arange(10))
        del again
        _finished(memory)


def test_ranges_lie_in_the_region() -> None:
    from server.core.errors import BadRequest
    from server.cuda.shared_memory import ClientMemory

    open_ipc = ClientMemory(0).open_ipc
    with _owner() as owner:
        region = open_ipc(owner.handle, 0, 1000)
        before = owner.content()
        for offset, size in ((-1, 1), (0, 1001), (1000, 1), (1, 1000), (2**64 - 1, 1), (2**64 - 1, 2**64 - 1), (0, -1)):
            with _refused(BadRequest, "do not lie in the region"):
                region.read(offset, size)
        for offset, data in ((0, bytes(1001)), (1000, b"x"), (-1, b"x"), (2**63, b"x")):
            with _refused(BadRequest, "do not lie in the region"):
                region.write(offset, data)
        assert owner.content() == before
        del region


def test_what_cannot_be_opened() -> None:
    from server.core.errors import BadRequest
    from server.cuda.shared_memory import ClientMemory

    open_ipc = ClientMemory(0).open_ipc
    with _owner() as owner:
        for handle in (b"", owner.handle[:-1], owner.handle + b"\0"):
            with _refused(BadRequest, "64 bytes"):
                open_ipc(handle, 0, 16)
        with _refused(BadRequest, "byte_size"):
            open_ipc(owner.handle, 0, 0)
        for size in (1 << 34, 2**64 - 1):
            with _refused(BadRequest, "past the end of the CUDA allocation"):
                open_ipc(owner.handle, 0, size)
        for device in (-1, 99, 2**63):
            with _refused(BadRequest, f"device_id {device} is not there"):
                open_ipc(owner.handle, device, 16)
        for handle in (bytes(64), b"\xff" * 64):
            with _refused(BadRequest, "cannot be opened"):
                open_ipc(handle, 0, 16)
        # None of that has hurt the device.
        region = open_ipc(owner.handle, 0, 16)
        assert region.read(0, 16).tolist() == list(range(16))
        del region


if importlib.util.find_spec("pytest") is not None:
    import pytest

    _missing = importlib.util.find_spec("pycuda") is None
    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_missing, reason="needs an NVIDIA GPU and PyCUDA")]

if __name__ == "__main__":
    sys.path.insert(0, ".")
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "passed")
