"""A server whose clients keep inputs in shared memory, over real sockets; the GPU is a fake in the server's process.

The cases are those for a real GPU, in tests/gpu. The fake reads like one: what a client has cut off is no signal to it. Whatever
else in the server touched that memory would die of it here.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from headrace.core.tensor import Array

from tests.support import shared_memory_cases as cases
from tests.support.fake_gpu import install_gpu
from tests.support.fake_gpu_server import HANDLE_BYTES, SHARED
from tests.support.gpu_servers import COMMAND
from tests.support.serving import Server, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="system shared memory needs /dev/shm"),
]


@contextmanager
def export(content: bytes) -> Iterator[bytes]:
    """Memory of the fake GPU is a file that its handle names."""
    path = Path(SHARED, f"test-{uuid.uuid4().hex}")
    path.write_bytes(content)
    try:
        yield path.name.encode().ljust(HANDLE_BYTES, b"\0")
    finally:
        path.unlink()


@pytest.fixture(scope="module")
def right() -> tuple[Array, Array]:
    return cases.inputs_and_answers()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        install_gpu(patch)
        return cases.make_repository(tmp_path_factory.mktemp("shared"))


@pytest.fixture(params=["0", "2"])
def server(repository: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Without and with front ends, which send requests of one turn as groups."""
    mine = Path(shutil.copytree(repository, tmp_path / "repository"))
    with serving(mine, tmp_path, *cases.OPTIONS, "--front-ends", request.param, command=COMMAND) as started:
        yield started
        assert "Traceback" not in started.text, started.text


@pytest.mark.parametrize("case", cases.CASES)
def test_inputs_in_shared_memory(server: Server, right: tuple[Array, Array], case: str) -> None:
    cases.CASES[case](server, right, export)
