"""The fake GPU with kernels compiled for the host."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from headrace.cuda.kernels import loading

from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.kernels_on_host import HostKernels


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels compiled for the host, kept for the session."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def host_gpu(monkeypatch: pytest.MonkeyPatch, kernel_folder: Path) -> Iterator[FakeCuda]:
    """A fake GPU that runs the kernels on the host; all of its memory must be freed at the end."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    cuda = FakeCuda()
    fake_cuda.install(monkeypatch, cuda)
    host = HostKernels(kernel_folder, cuda)
    monkeypatch.setattr(loading, "compile_cuda", host.compile_cuda)
    monkeypatch.setattr(sys.modules["pycuda.driver"], "module_from_buffer", host.module_from_buffer, raising=False)
    yield cuda
    assert not cuda.live, "memory was not freed"
    assert cuda.depth == 0, "a context was left current"
