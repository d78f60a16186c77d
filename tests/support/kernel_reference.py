"""NumPy references of the kernels, which tests compare with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from headrace.core.tensor import Array
from headrace.inference.pipelines.execution import softmax, top_k
from headrace.inference.pipelines.recipe import PRECISION_BITS, Axis, ImageRecipe, Resampling


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


def resample(pixels: npt.NDArray[np.uint8], tables: Resampling) -> npt.NDArray[np.uint8]:
    """Of `pictures.cu`: the resized crop of one picture.

    Args:
        pixels: uint8 (height, width, channels).
        tables: for this height and width.

    Returns:
        uint8 (crop height, crop width, channels); a view if the crop is a part of the pixels, unchanged.
    """
    down, across = tables.down, tables.across
    # Only the rows that the vertical pass reads.
    top = int(np.min(down.first))
    bottom = min(int(np.max(down.first)) + down.weights.shape[1], pixels.shape[0])
    part = _along(pixels[top:bottom], across, 1)
    return _along(part, Axis(down.first - top, down.weights), 0)


def _along(pixels: npt.NDArray[np.uint8], table: Axis, dimension: int) -> npt.NDArray[np.uint8]:
    """Run one pass along `dimension`, 0 (height) or 1 (width)."""
    size, taps = table.weights.shape
    if table.is_copy:
        start = int(table.first[0])
        return pixels[start : start + size] if dimension == 0 else pixels[:, start : start + size]
    last = pixels.shape[dimension] - 1
    spread = (size, 1, 1) if dimension == 0 else (1, size, 1)
    shape = (size, *pixels.shape[1:]) if dimension == 0 else (pixels.shape[0], size, pixels.shape[2])
    total = np.full(shape, 1 << (PRECISION_BITS - 1), np.int32)
    term = np.empty(shape, np.int32)
    for tap in range(taps):
        # Taps beyond the edge have the weight 0.
        indices = np.minimum(table.first + tap, last)
        np.multiply(pixels.take(indices, axis=dimension), table.weights[:, tap].reshape(spread), out=term)
        total += term
    total >>= PRECISION_BITS
    return np.clip(total, 0, 255, out=total).astype(np.uint8)


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
