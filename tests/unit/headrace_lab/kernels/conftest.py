"""Fake GPUs of the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.kernels_on_host import install_host_kernels


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake GPU."""
    fake = FakeCuda()
    fake_cuda.install(monkeypatch, fake)
    return fake


@pytest.fixture
def host_gpu(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> Iterator[FakeCuda]:
    """A fake GPU that runs the kernels on the host; all of its memory must be freed at the end."""
    install_host_kernels(monkeypatch, cuda)
    yield cuda
    assert not cuda.live, "memory was not freed"
    assert cuda.depth == 0, "a context was left current"
