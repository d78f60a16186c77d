"""The source of our CUDA kernels, compiled for the host, against their NumPy references."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.cuda.kernels import loading, scaling
from server.cuda.kernels.launching import Classifier, Preprocessor
from server.pipelines.recipe import ImageRecipe
from tests.fake_cuda import FakeCuda, install
from tests.kernel_cases import RECIPES, check_gather, check_pictures, check_pictures_anywhere, check_rank, check_soften
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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_copies_by_the_kernel_that_also_resizes(dtype: str) -> None:
    for name in ("odd", "odd channels last", "odd gray"):
        check_pictures(RECIPES[name], dtype, rows=2, general=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_pictures_that_lie_anywhere(dtype: str, offset: int) -> None:
    for name in ("not divisible", "odd channels last", "odd gray", "one pixel"):
        check_pictures_anywhere(RECIPES[name], dtype, offset=offset)


def test_where_multiplying_is_not_exact_the_kernel_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(scaling, "multiplies", lambda mean, std: asked.append(std) is not None)
    check_pictures(RECIPES["odd"], "float32")
    assert len(asked) == 1, "one channel that does not is enough"
    check_pictures(ImageRecipe(by="server", crop=(9, 9), mean=(0.1, 0.2, 0.3), std=(3.0, 5.0, 7.0)), "float16")


@given(st.floats(-300, 300, width=32), st.floats(0.0078125, 3e5, width=32))
def test_multiplying_is_exact_for_what_recipes_have(mean: float, std: float) -> None:
    assert scaling.multiplies(np.float32(mean), np.float32(std))


def test_multiplying_is_not_trusted_where_it_is_wrong() -> None:
    for std in (1e-45, 1e-40, 3e38, np.inf, np.nan):
        assert not scaling.multiplies(np.float32(100), np.float32(std))


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
    check_rank(4, 2100, 5, dtype, softmax)  # more than a thread keeps


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
