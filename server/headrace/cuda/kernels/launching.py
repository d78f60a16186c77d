"""Pictures and classes: kernels ready to be launched, compiled, loaded and given their tables when they are made.

A launch allocates nothing and waits for nothing, so that it may be captured in a CUDA graph.

Made and closed anywhere; launched with the device's context current (`headrace.cuda.driver.current`). Addresses are CUdeviceptr.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.core.tensor import Array
from headrace.cuda import driver
from headrace.cuda.driver import Stream
from headrace.cuda.kernels.loading import THREADS, Kernels, is_half
from headrace.cuda.memory import DeviceBuffer, PinnedBuffer, upload
from headrace.pipelines.recipe import ImageRecipe
from headrace.pipelines.resampling import PRECISION_BITS, Resampling

_ALIGNMENT_BYTES = 16


class Preprocessor:
    """Pixels to the tensor a model takes: resize, crop, normalise, lay out and cast in one kernel.

    The same bits as `reference.prepare`. Where nothing is resized or cropped, `scaling.PictureScaler` is faster.

    Args:
        device: its ordinal.
        recipe: how.
        dtype: of the tensor, float32 or float16.

    Raises:
        Unsupported: no GPU, or no compiler for it.
        DeviceError: the driver refuses.
    """

    def __init__(self, device: int, recipe: ImageRecipe, dtype: npt.DTypeLike) -> None:
        height, width = recipe.source or recipe.crop
        crop_height, crop_width = recipe.crop
        self._sizes = (height, width, crop_height, crop_width)
        self._grid = -(-crop_height * crop_width // THREADS)
        tables = Resampling.of(recipe)
        mean, std = (
            np.broadcast_to(np.array(values, np.float32), recipe.channels) for values in (recipe.mean, recipe.std)
        )
        down, across = tables.down, tables.across
        options = {
            "CHANNELS": recipe.channels,
            "PLANAR": int(recipe.layout == "nchw"),
            "HALF": is_half(dtype),
            "PRECISION_BITS": PRECISION_BITS,
        }
        self._device = device
        self._kernels = Kernels(device, "pictures.cu", options, {"prepare": "PPPPiPPiPPiiii"})
        self._tables, places = _keep(device, (down.first, down.weights, across.first, across.weights, mean, std))
        self._arguments = (
            *(places[0], places[1], down.weights.shape[1]),
            *(places[2], places[3], across.weights.shape[1]),
            *(places[4], places[5]),
            *self._sizes,
        )

    def launch(self, stream: Stream, source: int, rows: int, destination: int) -> None:
        """Queue the work of a batch.

        Args:
            stream: on which.
            source: address of uint8 (rows, *recipe.pixels).
            rows: pictures, at most 65535 (rows of a CUDA grid).
            destination: address of the tensor, (rows, *its shape).

        Raises:
            DeviceError: the driver refuses.
        """
        self._kernels.launch("prepare", (self._grid, rows), THREADS, stream, source, destination, *self._arguments)

    def close(self) -> None:
        """Give the tables back and unload it; all work must be done."""
        with driver.current(self._device):
            self._tables.free()
        self._kernels.close()


class Classifier:
    """Rows of scores to the best classes or to probabilities; see `reference.rank` and `reference.soften`.

    Args:
        device: its ordinal.
        classes: in a row.
        dtype: of the scores, float32 or float16.
        softmax: give probabilities in place of scores.
        top_k: how many classes, at most `classes`; 0: probabilities of all of them.

    Raises:
        Unsupported, DeviceError: as for `Preprocessor`.
    """

    def __init__(self, device: int, classes: int, dtype: npt.DTypeLike, softmax: bool, top_k: int) -> None:
        if top_k > classes or not (top_k or softmax):
            raise ValueError(f"top_k {top_k} of {classes} classes, softmax {softmax}")
        options = {"HALF": is_half(dtype), "THREADS": THREADS, "CLASSES": classes}
        self._kernels = Kernels(device, "classes.cu", options, {"soften": "PP", "rank": "PPPii"})
        self._top_k, self._softmax = top_k, int(softmax)

    def launch(self, stream: Stream, scores: int, rows: int, best: int, numbers: int = 0) -> None:
        """Queue the work of a batch.

        Args:
            stream: on which.
            scores: address of (rows, classes).
            rows: of the batch.
            best: address of float32 (rows, top_k), or (rows, classes) where `top_k` is 0.
            numbers: address of int32 (rows, top_k); not used where `top_k` is 0.

        Raises:
            DeviceError: the driver refuses.
        """
        if self._top_k:
            rest = (self._top_k, self._softmax)
            self._kernels.launch("rank", (rows, 1), THREADS, stream, scores, best, numbers, *rest)
        else:
            self._kernels.launch("soften", (rows, 1), THREADS, stream, scores, best)

    def close(self) -> None:
        """Unload it; all work must be done."""
        self._kernels.close()


def _keep(device: int, arrays: Sequence[Array]) -> tuple[DeviceBuffer, list[int]]:
    """One block of the GPU's memory with copies of all arrays, and where each of them is."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    with driver.current(device):
        block, staged, stream = DeviceBuffer(size), PinnedBuffer(), Stream()
        try:
            staged.reserve(size)
            bytes_of = staged.view((size,), np.dtype(np.uint8))
            for start, array in zip(starts, arrays, strict=True):
                bytes_of[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            upload(block, bytes_of, stream)
            stream.synchronize()
        except BaseException:
            block.free()
            raise
        finally:
            staged.free()
    return block, [block.address + start for start in starts]
