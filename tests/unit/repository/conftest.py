"""A GPU that is not there, and a TensorRT that runs on it."""

from pathlib import Path

import pytest

from tests.support.fake_gpu import cuda as cuda
from tests.support.fake_gpu import trt as trt
from tests.support.fake_gpu import trt_version as trt_version


@pytest.fixture(autouse=True)
def children_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes start with -P, which leaves the current folder out of the path: their backends are in `tests.support`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
