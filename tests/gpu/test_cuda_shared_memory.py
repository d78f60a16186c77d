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
    """Capture writes to the descriptor of standard error, by C++ too, as the only element of a list."""
    message: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield message
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            message.append(file.read())


def test_another_thread_may_copy_and_drop_the_last_reference() -> None:
    from headrace.cuda.shared_memory import ClientMemory

    memory = ClientMemory(0)
    with _owner() as owner:
        rows = memory.open_ipc(owner.handle, 0, SIZE).locate(1000, 1 << 16, frozenset())
        held = [rows.as_tensor(np.dtype(np.int32), (64, 256))]
        del rows
        copies: list[Any] = []

        def last() -> None:
            copies.append(np.asarray(held[0][1:3]))
            held.clear()

        with _stderr() as message:
            thread = threading.Thread(target=last)
            thread.start()
            thread.join(30)
            _finished(memory)
        expected = (np.arange(SIZE) % 251).astype(np.uint8)[1000 + 1024 : 1000 + 3072]
        np.testing.assert_array_equal(copies.pop(), expected.view(np.int32).reshape(2, 256))
        # PyCUDA would write of a context that it cannot enter, and the mapping would stay open.
        assert message == [""]
        again = memory.open_ipc(owner.handle, 0, SIZE)
        np.testing.assert_array_equal(again.read(0, 10), np.arange(10))
        del again
        _finished(memory)


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
