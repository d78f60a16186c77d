"""From a batch of uint8 pictures to the tensor a model takes: what `preprocess.by: server` does on a CPU.

A picture at a time, in place, so that what is computed on stays in the processor's caches. The result is, bit for bit, that of
`headrace.pipelines.image.prepare` on the same pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.core.tensor import Array
from headrace.pipelines.image import RESAMPLING
from headrace.pipelines.recipe import ImageRecipe


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
        # What becomes of each of the 256 values, by channel: looking it up is faster than NumPy turns floats into halves.
        values = np.arange(256, dtype=np.float32)
        mean, std = (np.broadcast_to(np.array(numbers, np.float32), channels) for numbers in (recipe.mean, recipe.std))
        self._halves = ((values - mean[:, None]) / std[:, None]).astype(self._dtype)

    def apply(self, pixels: Array, out: Array | None = None) -> Array:
        """The tensor of a batch.

        Args:
            pixels: uint8 (rows, *recipe.pixels).
            out: where to, (rows, *the tensor's shape); the buffer if None.

        Returns:
            (rows, *the tensor's shape), contiguous.
        """
        tensor = self._buffer_of(pixels.shape[0]) if out is None else out
        scale = self._scale if self._dtype == np.float32 else self._look_up
        for picture, target in zip(pixels, tensor, strict=True):
            scale(self._cropped(picture), target)
        return tensor

    def _buffer_of(self, rows: int) -> Array:
        if rows > self._buffer.shape[0]:
            self._buffer = np.empty((rows, *self._shape), self._dtype)
        return self._buffer[:rows]

    def _scale(self, picture: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        np.copyto(target, picture.transpose(self._order))
        target -= self._mean
        target /= self._std

    def _look_up(self, picture: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        for channel, halves in enumerate(self._halves):
            place = target[channel] if self._recipe.layout == "nchw" else target[..., channel]
            np.take(halves, picture[..., channel], out=place, mode="clip")

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
