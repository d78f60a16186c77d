"""NumPy references of the kernels, which tests compare with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from headrace.core.tensor import Array
from headrace.pipelines.execution import softmax, top_k
from headrace.pipelines.recipe import ImageRecipe, Resampling, resample


def prepare(pixels: npt.NDArray[np.uint8], recipe: ImageRecipe, dtype: npt.DTypeLike) -> Array:
    """Of `pictures.cu`: the tensor of a batch.

    Args:
        pixels: uint8 (rows, *recipe.pixels).
        recipe: how.
        dtype: of the tensor, float32 or float16.

    Returns:
        (rows, *the tensor's shape).
    """
    tables = Resampling.of(recipe)
    cut = np.stack([resample(picture, tables) for picture in pixels]).astype(np.float32)
    scaled = (cut - np.array(recipe.mean, np.float32)) / np.array(recipe.std, np.float32)
    ordered = scaled.transpose(0, 3, 1, 2) if recipe.layout == "nchw" else scaled
    return np.ascontiguousarray(ordered, dtype)


def gather(rows: Sequence[Array], total: int) -> Array:
    """Of `rows.cu`: rows one below the other, the last one repeated until there are `total`."""
    return np.stack([*rows, *[rows[-1]] * (total - len(rows))])


def rank(scores: Array, count: int, with_softmax: bool) -> tuple[Array, Array]:
    """Of `classes.cu`, `rank`: the best scores (float32) and their classes (int32), both (rows, count)."""
    exact = scores.astype(np.float32)
    classes = top_k(exact, count)
    return np.take_along_axis(softmax(exact) if with_softmax else exact, classes, axis=1), classes


def soften(scores: Array) -> Array:
    """Of `classes.cu`, `soften`: the probabilities (float32) of the classes of each row."""
    return softmax(scores.astype(np.float32))
