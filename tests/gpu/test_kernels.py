"""Our kernels on a real GPU with batches that are too large for the host; `contract/test_kernels.py` has the small ones."""

from __future__ import annotations

import numpy as np
from headrace.inference.pipelines.recipe import ImageRecipe

from tests.support.gpu_marks import gpu_marks
from tests.support.kernel_cases import (
    CAMERA,
    RECIPES,
    check_gather,
    check_pictures,
    check_pictures_anywhere,
    check_rank,
    check_soften,
)

pytestmark = gpu_marks(60)


def test_large_batches_of_pictures_that_lie_anywhere() -> None:
    for dtype in ("float32", "float16"):
        check_pictures_anywhere(RECIPES["crop only"], dtype, 64, 8)
        check_pictures_anywhere(RECIPES["one pixel"], dtype, 140_000)  # more than a grid has rows


def test_pixels_are_scaled_as_if_divided_whatever_the_scale() -> None:
    rng = np.random.default_rng(7)
    for _ in range(40):
        mean, std = rng.uniform(0, 255, 3), rng.uniform(0.01, 300, 3)
        recipe = ImageRecipe(by="server", crop=(16, 48), mean=tuple(map(float, mean)), std=tuple(map(float, std)))
        check_pictures(recipe, "float32", rows=4)


def test_a_large_batch_of_camera_pictures() -> None:
    check_pictures(CAMERA, "float16", rows=8)
    check_pictures(RECIPES["crop only"], "float32", rows=33)


def test_large_rows_are_gathered_and_padded() -> None:
    check_gather(150_528, 4, 8, offset=3)
    check_gather(150_528, 200, 256, blocks=132)


def test_many_classes_are_ranked_and_become_probabilities() -> None:
    check_rank(7, 257, 257, "float16", False)
    check_rank(300, 21_841, 3, "float32", True)
    for classes in (255, 256, 5001):
        check_soften(6, classes, "float32")
