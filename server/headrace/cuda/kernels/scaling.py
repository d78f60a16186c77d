"""Pictures that are neither resized nor cropped: pixels to the tensor a model takes, each byte read and written once.

A launch allocates nothing and waits for nothing, so that it may be captured in a CUDA graph. Addresses are CUdeviceptr.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.cuda.driver import Stream
from headrace.cuda.kernels.loading import THREADS, Kernels, is_half
from headrace.pipelines.recipe import ImageRecipe

Floats = npt.NDArray[np.float32]

# The kernel's pieces of one channel's results, and its arguments behind the number of pixels: `Scale`.
_PIECE_BYTES = 16
_SCALE = "i" * 9
# Bits that a double has more than a float; and what they are where it lies half way between two floats.
_MORE = np.uint64((1 << 29) - 1)
_HALF_WAY = np.uint64(1 << 28)
# Beyond these, results may be so small that floats have fewer bits.
_SMALL, _LARGE = 1e-30, 1e30


class PictureScaler:
    """As `launching.Preprocessor`, the same bits too, for recipes that `fits` is True of; and from wherever the pictures lie.

    Args:
        device: its ordinal.
        recipe: how.
        dtype: of the tensor, float32 or float16.

    Raises:
        Unsupported: no GPU, or no compiler for it.
        DeviceError: the driver refuses.
    """

    def __init__(self, device: int, recipe: ImageRecipe, dtype: npt.DTypeLike) -> None:
        half = is_half(dtype)
        mean, std = (np.broadcast_to(np.array(v, np.float32), recipe.channels) for v in (recipe.mean, recipe.std))
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / std
        options = {
            "CHANNELS": recipe.channels,
            "PLANAR": int(recipe.layout == "nchw"),
            "HALF": half,
            "DIVIDES": int(not all(multiplies(m, s) for m, s in zip(mean, std, strict=True))),
            "THREADS": THREADS,
        }
        types = {"scale_all": "PPi" + _SCALE, "scale_each": "PPi" + _SCALE}
        self._kernels = Kernels(device, "copies.cu", options, types)
        pixels = math.prod(recipe.crop)
        self._arguments = (pixels, *_bits(mean), *_bits(std), *_bits(inverse))
        group = _PIECE_BYTES // np.dtype(dtype).itemsize
        self._blocks = -(-pixels // (THREADS * group))

    @staticmethod
    def fits(recipe: ImageRecipe) -> bool:
        """True if the pixels are taken as they are, all of them."""
        return recipe.source is None

    def launch(self, stream: Stream, source: int, rows: int, destination: int) -> None:
        """Queue the work of a batch; see `launching.Preprocessor.launch`."""
        self._kernels.launch("scale_all", (self._blocks, rows), THREADS, stream, source, destination, *self._arguments)

    def launch_each(self, stream: Stream, addresses: int, rows: int, destination: int) -> None:
        """Queue the work of a batch whose pictures lie anywhere.

        Args:
            stream: on which.
            addresses: address, on the GPU or of pinned memory, of uint64 (rows,): where each picture is, there likewise.
            rows: pictures, at most 65535.
            destination: address of the tensor, (rows, *its shape).

        Raises:
            DeviceError: the driver refuses.
        """
        self._kernels.launch(
            "scale_each", (self._blocks, rows), THREADS, stream, addresses, destination, *self._arguments
        )

    def close(self) -> None:
        """Unload it; all work must be done."""
        self._kernels.close()


def multiplies(mean: np.float32, std: np.float32) -> bool:
    """True if, of all pixels, the kernel gets the bits of (pixel - mean) / std without dividing.

    It multiplies by the inverse and adds what is wanting, by two fused operations (J.-M. Muller et al., "Handbook of
    Floating-Point Arithmetic", on division by Newton's iteration). Here that is done in double precision, which is exact but for
    the last sum; where that lies half way between two floats, rounding it again might go wrong: then the answer is False.
    """
    if not _SMALL < std < _LARGE:
        return False
    with np.errstate(all="ignore"):
        distance = np.arange(256, dtype=np.float32) - np.float32(mean)
        inverse = np.float32(1) / np.float32(std)
        near = distance * inverse
        rest = (distance.astype(np.float64) - near.astype(np.float64) * np.float64(std)).astype(np.float32)
        mended = rest.astype(np.float64) * np.float64(inverse) + near.astype(np.float64)
        half_way = (mended.view(np.uint64) & _MORE) == _HALF_WAY
        exact = distance / np.float32(std)
    return not half_way.any() and np.array_equal(mended.astype(np.float32).view(np.uint32), exact.view(np.uint32))


def _bits(values: Floats) -> Sequence[int]:
    """int32 with the bits of three float32, of which the last may be zeros."""
    found = np.zeros(3, np.float32)
    found[: len(values)] = values
    bits: list[int] = found.view(np.int32).tolist()
    return bits
