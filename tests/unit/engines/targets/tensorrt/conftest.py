"""A fake GPU and a fake TensorRT, versions 10 and 11."""

from __future__ import annotations

import pytest

from tests.support.fake_cuda import FakeCuda, install
from tests.support.fake_gpu import trt as trt


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    install(monkeypatch, fake)
    return fake


@pytest.fixture(params=["10.6.0", "11.4.0.106"])
def trt_version(request: pytest.FixtureRequest) -> str:
    return str(request.param)
