"""Memory of a real GPU that belongs to a process of its own, as that of a client does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Program of a client's process: copies its input to GPU 0, prints the IPC handle, frees the memory at the end of its input.
_OWNER = """
import sys
import numpy as np
import pycuda.driver as driver
driver.init()
context = driver.Device(0).make_context()
content = np.frombuffer(sys.stdin.buffer.read(int(sys.argv[1])), np.uint8)
memory = driver.mem_alloc(content.nbytes)
driver.memcpy_htod(memory, content)
print(bytes(driver.mem_get_ipc_handle(memory)).hex(), flush=True)
sys.stdin.read()
memory.free()
context.pop()
"""


@contextmanager
def export(content: bytes) -> Iterator[bytes]:
    """Put bytes into memory of GPU 0 that another process owns, for the length of a `with`; its IPC handle."""
    words = [sys.executable, "-c", _OWNER, str(len(content))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write(content)
        owner.stdin.flush()
        yield bytes.fromhex(owner.stdout.readline().decode())
        owner.stdin.close()
