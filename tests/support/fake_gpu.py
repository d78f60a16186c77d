"""A GPU that is not there, and a TensorRT that runs on it: for tests as fixtures, which a conftest imports, and for processes.

Whatever a test does, all that it took must be given back.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import fake_streams
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_streams import LateCuda
from tests.support.fake_tensorrt import fake_tensorrt

VERSION = "10.6.0"


def install_gpu(patch: pytest.MonkeyPatch) -> LateCuda:
    """Both, until the patch is undone."""
    cuda = LateCuda()
    fake_streams.install(patch, cuda)
    install_tensorrt(patch, cuda)
    return cuda


def install_tensorrt(patch: pytest.MonkeyPatch, cuda: FakeCuda, version: str = VERSION) -> Any:
    """The module `tensorrt` on a fake GPU, until the patch is undone."""
    module = fake_tensorrt(cuda, version)
    patch.setitem(sys.modules, "tensorrt", module)
    return module


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    fake = LateCuda()
    fake_streams.install(monkeypatch, fake)
    return fake


@pytest.fixture
def trt_version() -> str:
    return VERSION


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, trt_version: str) -> Iterator[Any]:
    yield install_tensorrt(monkeypatch, cuda, trt_version)
    gc.collect()  # a stream goes with its object, which the traceback of an expected error may still hold
    assert cuda.depth == 0, "a context was left current"
    assert not cuda.live, "memory was not given back"
    assert not cuda.graphs, "a graph was not given back"
    assert not getattr(cuda, "queues", None), "a stream was not given back"
