"""A GPU that is not there, and a TensorRT that runs on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_streams import LateCuda, install
from tests.fake_tensorrt import fake_tensorrt


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    fake = LateCuda()
    install(monkeypatch, fake)
    return fake


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch, cuda: LateCuda) -> Iterator[Any]:
    module = fake_tensorrt(cuda)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    yield module
    assert not cuda.live, "memory was not given back"
    assert not cuda.queues, "a stream was not given back"
    assert not cuda.graphs, "a graph was not given back"
