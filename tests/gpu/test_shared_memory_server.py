"""A server on a real GPU whose clients keep inputs in shared memory: the GPU fetches them, whatever clients do meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from headrace.core.tensor import Array

from tests.support import shared_memory_cases as cases
from tests.support.gpu_marks import gpu_marks
from tests.support.serving import Server, serving

pytestmark = gpu_marks(180, "fastapi", "uvicorn")

# A client's process: puts what comes on its input on GPU 0, prints the IPC handle, and keeps the memory until its input ends.
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
    words = [sys.executable, "-c", _OWNER, str(len(content))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write(content)
        owner.stdin.flush()
        yield bytes.fromhex(owner.stdout.readline().decode())
        owner.stdin.close()


@pytest.fixture(scope="module")
def right() -> tuple[Array, Array]:
    return cases.inputs_and_answers()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shared")
    with serving(cases.make_repository(folder), folder, *cases.OPTIONS) as started:
        yield started
        assert "Traceback" not in started.text, started.text


def test_rows_in_a_system_region(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_system_region(server, right)


def test_rows_that_are_not_aligned(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_unaligned_rows(server, right)


def test_rows_in_a_cuda_region(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_cuda_region(server, right, export)


def test_all_kinds_share_batches(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_all_kinds_together(server, right, export)


def test_a_client_that_truncates_its_memory_affects_only_its_own_responses(
    server: Server, right: tuple[Array, Array]
) -> None:
    cases.check_truncated_memory(server, right)


def test_regions_come_and_go_under_load(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_regions_come_and_go(server, right)
