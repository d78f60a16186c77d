"""Memory of clients: that of a real GPU, which belongs to a process of its own, and files in shared memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from headrace.runtimes.cuda.shared_memory import ClientMemory, PinnedFile

# Program of a client's process: copies the first bytes of its input to a GPU and prints the IPC handle. For each further line it
# prints the bytes that the memory has then. At the end of its input it frees the memory.
_PROGRAM = """
import sys
import numpy as np
import pycuda.driver as driver
driver.init()
context = driver.Device(int(sys.argv[2])).make_context()
content = np.frombuffer(sys.stdin.buffer.read(int(sys.argv[1])), np.uint8)
memory = driver.mem_alloc(content.nbytes)
driver.memcpy_htod(memory, content)
print(bytes(driver.mem_get_ipc_handle(memory)).hex(), flush=True)
for line in sys.stdin.buffer:
    now = np.empty(content.nbytes, np.uint8)
    driver.memcpy_dtoh(now, memory)
    print(now.tobytes().hex(), flush=True)
memory.free()
context.pop()
"""


class Owner:
    """A process with memory of a GPU.

    Args:
        content: bytes that the memory has first.
        gpu: number of the GPU.

    Attributes:
        process: of the program.
        handle: of CUDA IPC, for the memory.
    """

    def __init__(self, content: bytes, gpu: int = 0) -> None:
        words = [sys.executable, "-c", _PROGRAM, str(len(content)), str(gpu)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._write(content)
        self.handle = self._read()

    def content(self) -> bytes:
        """Return the bytes of the memory now."""
        self._write(b"\n")
        return self._read()

    def close(self) -> None:
        """Free the memory and end the process."""
        self.process.communicate(timeout=30)

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def _read(self) -> bytes:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that owns the memory has died"
        return bytes.fromhex(line.decode())


@contextmanager
def export(content: bytes, gpu: int = 0) -> Iterator[bytes]:
    """Put bytes into memory of a GPU that another process owns, for the length of a `with`; its IPC handle."""
    with closing(Owner(content, gpu)) as owner:
        yield owner.handle


def finished(memory: ClientMemory) -> None:
    """Wait until the driver's thread has closed what was dropped."""
    gc.collect()
    done = threading.Event()
    memory._thread.start()
    memory._thread.submit(done.set)
    assert done.wait(60)


def pinned(memory: ClientMemory, descriptor: int, start: int, size_bytes: int) -> PinnedFile | None:
    """Pin a part of a file; the driver's thread reports the result."""
    calls: list[tuple[PinnedFile | None, str]] = []
    done = threading.Event()

    def on_done(created: PinnedFile | None) -> None:
        calls.append((created, threading.current_thread().name))
        done.set()

    memory.pin(descriptor, start, size_bytes, 0, on_done)
    assert done.wait(60)
    finished(memory)
    result, thread = calls.pop()
    assert thread == "shared memory"
    return result


@contextmanager
def shared_file(content: bytes) -> Iterator[int]:
    """Yield the descriptor of a file in shared memory, all of it allocated."""
    path = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    path.unlink()
    yield descriptor
    os.close(descriptor)
