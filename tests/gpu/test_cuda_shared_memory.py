"""CUDA shared memory with a real GPU: another process allocates and exports, our regions read and write."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.support.exported_memory import Owner

_missing = importlib.util.find_spec("pycuda") is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_missing, reason="needs an NVIDIA GPU and PyCUDA")]

SIZE = 1 << 20
CONTENT = (np.arange(SIZE) % 251).astype(np.uint8)


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
    with closing(Owner(CONTENT.tobytes())) as owner:
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
        expected = CONTENT[1000 + 1024 : 1000 + 3072]
        np.testing.assert_array_equal(copies.pop(), expected.view(np.int32).reshape(2, 256))
        # PyCUDA would write of a context that it cannot enter, and the mapping would stay open.
        assert message == [""]
        again = memory.open_ipc(owner.handle, 0, SIZE)
        np.testing.assert_array_equal(again.read(0, 10), np.arange(10))
        del again
        _finished(memory)
