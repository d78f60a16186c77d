"""Our kernels against their NumPy references: compiled for the GPU, and for the host."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.inference.pipelines.recipe import ImageRecipe
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream
from headrace.runtimes.cuda.kernels import launching, loading
from headrace.runtimes.cuda.kernels.launching import Classifier, PictureScaler, Preprocessor

from tests.support.kernel_cases import (
    RECIPES,
    check_gather,
    check_pictures,
    check_pictures_anywhere,
    check_rank,
    check_soften,
)

pytestmark = pytest.mark.usefixtures("needs_kernels")
dtypes = pytest.mark.parametrize("dtype", ["float32", "float16"])


@dtypes
@pytest.mark.parametrize("name", RECIPES)
def test_pictures(name: str, dtype: str) -> None:
    check_pictures(RECIPES[name], dtype, rows=2)


@dtypes
def test_copies_by_the_kernel_that_also_resizes_have_the_same_bits(dtype: str) -> None:
    for name in ("odd", "odd channels last", "odd gray"):
        check_pictures(RECIPES[name], dtype, rows=2, general=True)


@dtypes
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_pictures_that_lie_anywhere(dtype: str, offset: int) -> None:
    for name in ("not divisible", "odd channels last", "odd gray", "one pixel"):
        check_pictures_anywhere(RECIPES[name], dtype, offset=offset)


def test_no_grid_is_larger_than_a_gpu_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, int]] = []
    monkeypatch.setattr(loading.Kernels, "launch", lambda self, name, grid, *rest: grids.append(grid))
    recipe = RECIPES["one pixel"]
    for kernel in (PictureScaler(0, recipe, "float32"), Preprocessor(0, recipe, "float32")):
        launches = [kernel.launch, kernel.launch_each] if isinstance(kernel, PictureScaler) else [kernel.launch]
        with driver.current():
            stream = CudaStream()
            for launch in launches:
                launch(stream, 0, 140_000, 0)
                assert [rows for _, rows in grids] == [65_535, 65_535, 8_930]
                grids.clear()
            del stream
        kernel.close()


def test_every_picture_of_a_batch_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MAX_GRID_ROWS", 2)
    for name in ("odd channels last", "odd gray"):
        for rows in (2, 3, 6):
            check_pictures_anywhere(RECIPES[name], "float32", rows)
            check_pictures(RECIPES[name], "float16", rows)
            check_pictures(RECIPES[name], "float32", rows, general=True)
    check_pictures(RECIPES["shrunk"], "float16", 5, graph=True)


def test_the_kernel_divides_if_multiplying_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    scales: list[float] = []
    monkeypatch.setattr(launching, "multiplies", lambda mean, std: scales.append(std) is not None)
    check_pictures(RECIPES["odd"], "float32")
    assert len(scales) == 1, "one channel that does not is enough"
    check_pictures(ImageRecipe(by="server", crop=(9, 9), mean=(0.1, 0.2, 0.3), std=(3.0, 5.0, 7.0)), "float16")


def test_a_launch_can_be_captured_and_replayed() -> None:
    check_pictures(RECIPES["shrunk"], "float32", graph=True)


@pytest.mark.parametrize(("row_bytes", "offset"), [(1, 0), (16, 0), (37, 0), (37, 4), (4096, 0), (4096, 3), (4096, 4)])
def test_rows_are_gathered_and_padded(row_bytes: int, offset: int) -> None:
    check_gather(row_bytes, 3, 3, offset)
    check_gather(row_bytes, 5, 8, offset)
    check_gather(row_bytes, 1, 300, offset, blocks=1)


@dtypes
@pytest.mark.parametrize("softmax", [False, True])
def test_classes_are_ranked(dtype: str, softmax: bool) -> None:
    check_rank(4, 300, 3, dtype, softmax)
    check_rank(4, 1, 1, dtype, softmax)
    check_rank(4, 2100, 5, dtype, softmax)  # more than a thread keeps


@dtypes
def test_scores_become_probabilities(dtype: str) -> None:
    check_soften(4, 257, dtype)


def test_unsupported_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match="not float64"):
        Preprocessor(0, RECIPES["odd"], np.float64)
    with pytest.raises(ValueError, match="top_k 5 of 4 classes"):
        Classifier(0, 4, "float32", True, 5)
    with pytest.raises(ValueError, match="softmax False"):
        Classifier(0, 4, "float32", False, 0)
