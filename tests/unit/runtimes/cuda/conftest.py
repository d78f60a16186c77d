"""Fake GPUs of the tests of this folder."""

from __future__ import annotations

import pytest

from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake GPU."""
    fake = FakeCuda()
    fake_cuda.install(monkeypatch, fake)
    return fake
