"""From a batch of uint8 pictures to the tensor a model takes: what `preprocess.by: server` does on a CPU.

A picture at a time, in place, so that what is computed on stays in the processor's caches. The result is, bit for bit, that of
`server.pipelines.image.prepare` on the same pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from server.core.tensor import Array
from server.pipelines.image import RESAMPLING
from server.pipelines.recipe import ImageRecipe


class PixelSteps:
    """Resize, crop, normalise and lay out batches of pictures, in a buffer that is allocated once.

    Ownership: one thread; what `apply` returns is valid until the next call.

    Args:
        recipe: how, with `by` "server".
        dtype: of the tensor, float32 or float16.
    """

    def __init__(self, recipe: ImageRecipe, dtype: npt.DTypeLike = np.float32) -> None:
        self._recipe = recipe
        self._dtype = np.dtype(dtype)
        height, width = recipe.crop
        channels = recipe.channels
        planar = recipe.layout == "nchw"
        self._order = (2, 0, 1) if planar else (0, 1, 2)
        self._shape = (channels, height, width) if planar else (height, width, channels)
        spread = (-1, 1, 1) if planar else (-1,)
        self._mean = np.array(recipe.mean, np.float32).reshape(spread)
        self._std = np.array(recipe.std, np.float32).reshape(spread)
        self._buffer: npt.NDArray[Any] = np.empty((0, *self._shape), self._dtype)
        self._row = np.empty(self._shape, np.float32)

    def apply(self, pixels: Array) -> Array:
        """The tensor of a batch.

        Args:
            pixels: uint8 (rows, *recipe.pixels).

        Returns:
            (rows, *the tensor's shape), contiguous.
        """
        rows = pixels.shape[0]
        if rows > self._buffer.shape[0]:
            self._buffer = np.empty((rows, *self._shape), self._dtype)
        tensor = self._buffer[:rows]
        exact = self._dtype == np.float32
        for picture, target in zip(pixels, tensor, strict=True):
            row = target if exact else self._row
            np.copyto(row, self._cropped(picture).transpose(self._order))
            row -= self._mean
            row /= self._std
            if not exact:
                target[...] = row
        return tensor

    def _cropped(self, picture: npt.NDArray[Any]) -> npt.NDArray[Any]:
        recipe = self._recipe
        if recipe.source is None:
            return picture
        height, width = recipe.source
        crop_height, crop_width = recipe.crop
        left, top, right, bottom = recipe.window(height, width)
        if (left, top, right, bottom) == (int(left), int(top), int(left) + crop_width, int(top) + crop_height):
            return picture[int(top) : int(bottom), int(left) : int(right)]
        # Pillow's own loops: NumPy needs two and a half times as long for the same pixels.
        image = Image.fromarray(picture[..., 0] if recipe.channels == 1 else picture)
        box = (left, top, right, bottom)
        cut = image.resize((crop_width, crop_height), RESAMPLING[recipe.interpolation], box=box)
        return np.asarray(cut).reshape(crop_height, crop_width, recipe.channels)
