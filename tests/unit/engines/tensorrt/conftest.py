"""A fake GPU and a fake TensorRT in two flavours; whatever a test does, all must be given back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_cuda import FakeCuda, install
from tests.fake_tensorrt import fake_tensorrt


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    install(monkeypatch, fake)
    return fake


@pytest.fixture(params=["10.6.0", "11.4.0.106"])
def trt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> Iterator[Any]:
    module = fake_tensorrt(cuda, request.param)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    yield module
    assert cuda.depth == 0, "a context was left current"
    assert not cuda.live, "memory was not given back"
    assert not cuda.graphs, "a graph was not given back"
