"""The source of our CUDA kernels, compiled for the host, against their NumPy references."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from server.cuda.kernels import loading
from server.cuda.kernels.launching import Classifier, Preprocessor
from tests.fake_cuda import FakeCuda, install
from tests.kernel_cases import RECIPES, check_gather, check_pictures, check_rank, check_soften
from tests.kernels_on_host import HostKernels

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def cuda(built: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    install(monkeypatch, fake)
    host = HostKernels(built, fake)
    monkeypatch.setattr(loading, "compile_cuda", host.compile_cuda)
    monkeypatch.setattr(sys.modules["pycuda.driver"], "module_from_buffer", host.module_from_buffer, raising=False)
    return fake


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", RECIPES)
def test_pictures(name: str, dtype: str, cuda: FakeCuda) -> None:
    check_pictures(RECIPES[name], dtype, rows=2)
    assert not cuda.live


def test_a_launch_can_be_captured_and_replayed(cuda: FakeCuda) -> None:
    check_pictures(RECIPES["shrunk"], "float32", graph=True)
    assert cuda.launches == 2


@pytest.mark.parametrize(("row_bytes", "offset"), [(1, 0), (16, 0), (37, 0), (37, 4), (4096, 0), (4096, 3), (4096, 4)])
def test_rows(row_bytes: int, offset: int) -> None:
    check_gather(row_bytes, 3, 3, offset)
    check_gather(row_bytes, 5, 8, offset)
    check_gather(row_bytes, 1, 300, offset, blocks=1)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_classes(dtype: str, softmax: bool) -> None:
    check_rank(4, 300, 3, dtype, softmax)
    check_rank(4, 1, 1, dtype, softmax)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_probabilities(dtype: str) -> None:
    check_soften(4, 257, dtype)


def test_what_no_kernel_does_is_refused() -> None:
    with pytest.raises(ValueError, match="not float64"):
        Preprocessor(0, RECIPES["odd"], "float64")
    with pytest.raises(ValueError, match="top_k 5 of 4 classes"):
        Classifier(0, 4, "float32", True, 5)
    with pytest.raises(ValueError, match="softmax False"):
        Classifier(0, 4, "float32", False, 0)
