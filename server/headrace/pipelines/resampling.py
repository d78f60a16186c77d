"""Resizing with antialiasing as tables: for each pixel of the result, which pixels of the source count with what weight.

The arithmetic is that of Pillow's `Image.resize` on 8-bit channels (libImaging/Resample.c): a support that grows when the picture
shrinks, weights in fixed point with 22 bits, the horizontal pass first and rounded to 8 bits before the vertical one. Being of
whole numbers it gives the same bits in NumPy and in a CUDA kernel; and Pillow's, but where Pillow chooses to begin with the
vertical pass (tall pictures): then a bilinear result may differ by 1 of 255, a bicubic one by a few where it overshoots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.pipelines.recipe import ImageRecipe

# 32 bits less 8 of a pixel and 2 for what overshoots.
PRECISION_BITS = 32 - 8 - 2

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """Weights along one axis.

    Attributes:
        first: int32 (size,): where in the source the taps of each pixel of the result begin.
        weights: int32 (size, taps), in 1 / 2**PRECISION_BITS; 0 where a tap would lie outside of the source.
    """

    first: Ints
    weights: Ints

    @property
    def is_copy(self) -> bool:
        """True where every pixel is one of the source's as it is, side by side."""
        steps = np.diff(self.first)
        return self.weights.shape[1] == 1 and bool((self.weights == 1 << PRECISION_BITS).all() and (steps == 1).all())


def axis(source: int, low: float, high: float, size: int, interpolation: str) -> Axis:
    """The weights that make `size` pixels of those between two places.

    Args:
        source: pixels of the source.
        low, high: the part that is resized, in pixels of the source.
        size: pixels of the result.
        interpolation: "bilinear" or "bicubic".
    """
    # Pillow keeps the box in single precision.
    low32, high32 = np.float32(low), np.float32(high)
    scale = float(high32 - low32) / size
    stretch = max(scale, 1.0)
    support = (1.0 if interpolation == "bilinear" else 2.0) * stretch
    kernel = _bilinear if interpolation == "bilinear" else _bicubic
    rows: list[tuple[int, list[int]]] = []
    for index in range(size):
        center = float(low32) + (index + 0.5) * scale
        start = max(int(center - support + 0.5), 0)
        stop = min(int(center + support + 0.5), source)
        shares = [kernel((place - center + 0.5) / stretch) for place in range(start, stop)]
        total = sum(shares)
        fixed = [_fixed(share / total if total else share) for share in shares]
        while len(fixed) > 1 and fixed[0] == 0:
            start, fixed = start + 1, fixed[1:]
        while len(fixed) > 1 and fixed[-1] == 0:
            fixed.pop()
        rows.append((start, fixed))
    weights = np.zeros((size, max(len(fixed) for _, fixed in rows)), np.int32)
    for index, (_, fixed) in enumerate(rows):
        weights[index, : len(fixed)] = fixed
    return Axis(np.array([start for start, _ in rows], np.int32), weights)


@dataclass(frozen=True, slots=True, eq=False)
class Resampling:
    """From pixels of a fixed size to the crop of a recipe.

    Attributes:
        down: along the height.
        across: along the width.
    """

    down: Axis
    across: Axis

    @classmethod
    def of(cls, recipe: ImageRecipe) -> Resampling:
        """The tables of a recipe; a plain copy where it has no source."""
        height, width = recipe.source or recipe.crop
        left, top, right, bottom = (0.0, 0.0, width, height) if recipe.source is None else recipe.window(height, width)
        crop_height, crop_width = recipe.crop
        return cls(
            axis(height, top, bottom, crop_height, recipe.interpolation),
            axis(width, left, right, crop_width, recipe.interpolation),
        )

    @property
    def is_copy(self) -> bool:
        """True where the crop is a part of the pixels as they are."""
        return self.down.is_copy and self.across.is_copy


def resample(pixels: npt.NDArray[np.uint8], tables: Resampling) -> npt.NDArray[np.uint8]:
    """Resize and crop.

    Args:
        pixels: uint8 (height, width, channels).
        tables: for this height and width.

    Returns:
        uint8 (crop height, crop width, channels); a view where the crop is a part of the pixels as they are.
    """
    down, across = tables.down, tables.across
    # Only the rows that the vertical pass looks at.
    top = int(np.min(down.first))
    bottom = min(int(np.max(down.first)) + down.weights.shape[1], pixels.shape[0])
    part = _along(pixels[top:bottom], across, 1)
    return _along(part, Axis(down.first - top, down.weights), 0)


def _along(pixels: npt.NDArray[np.uint8], table: Axis, dimension: int) -> npt.NDArray[np.uint8]:
    """One pass; `dimension` is the one that is resized, 0 (height) or 1 (width)."""
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
        # A tap beyond the edge has the weight 0.
        places = np.minimum(table.first + tap, last)
        np.multiply(pixels.take(places, axis=dimension), table.weights[:, tap].reshape(spread), out=term)
        total += term
    total >>= PRECISION_BITS
    return np.clip(total, 0, 255, out=total).astype(np.uint8)


def _bilinear(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _bicubic(x: float) -> float:
    """Keys' kernel with a = -0.5."""
    x = abs(x)
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1.0
    return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5 if x < 2.0 else 0.0


def _fixed(share: float) -> int:
    return math.trunc(share * (1 << PRECISION_BITS) + (0.5 if share >= 0 else -0.5))
