"""Launchers of the kernels, and their use as stages before and after a TensorRT plan.

Kernels are compiled and loaded, and their tables copied to the GPU, at construction. A launch allocates nothing and
waits for nothing, so a CUDA graph can capture it. Create and close launchers anywhere; launch them with the device's
context current (`headrace.runtimes.cuda.driver.current`). Addresses are CUdeviceptr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.tensor import Array
from headrace.inference.pipelines.recipe import PRECISION_BITS, ImageRecipe, Resampling
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream
from headrace.runtimes.cuda.kernels.loading import THREADS, Kernels, is_half
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, upload

_ALIGNMENT_BYTES = 16
_ADDRESS_BYTES = 8

# Largest second dimension of a CUDA grid (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
_MAX_GRID_ROWS = 65_535


def _parts(rows: int) -> Iterator[tuple[int, int]]:
    """Cut a batch into launches; yields the first row and the number of rows of each."""
    for first in range(0, rows, _MAX_GRID_ROWS):
        yield first, min(rows - first, _MAX_GRID_ROWS)


class Preprocessor:
    """Converts pixels to the model's tensor: resize, crop, normalize, lay out and cast in one kernel.

    Bit-identical to `prepare` of the NumPy references. `PictureScaler` is faster if nothing is resized or cropped.

    Args:
        device: number of the GPU.
        recipe: preprocessing steps.
        dtype: element type of the tensor, float32 or float16.

    Raises:
        Unsupported: there is no GPU, or no compiler for it.
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
        self._pixel_bytes, self._tensor_bytes = math.prod(recipe.pixels), _tensor_bytes(recipe, dtype)
        self._device = device
        self._kernels = Kernels(device, "pictures.cu", options, {"prepare": "PPPPiPPiPPiiii"})
        self._tables, addresses = copy_to_gpu(
            device, (down.first, down.weights, across.first, across.weights, mean, std)
        )
        self._arguments = (
            *(addresses[0], addresses[1], down.weights.shape[1]),
            *(addresses[2], addresses[3], across.weights.shape[1]),
            *(addresses[4], addresses[5]),
            *self._sizes,
        )

    def launch(self, stream: CudaStream, source: int, rows: int, destination: int) -> None:
        """Queue the kernel for a batch.

        Args:
            stream: stream to queue on.
            source: address of uint8 (rows, *recipe.pixels).
            rows: images.
            destination: address of the tensor, (rows, *shape of one tensor).

        Raises:
            DeviceError: the driver refuses.
        """
        for first, count in _parts(rows):
            pixels, target = source + first * self._pixel_bytes, destination + first * self._tensor_bytes
            self._kernels.launch("prepare", (self._grid, count), THREADS, stream, pixels, target, *self._arguments)

    def close(self) -> None:
        """Free the tables and unload the kernel; all work must be done."""
        with driver.current(self._device):
            self._tables.free()
        self._kernels.close()


class Classifier:
    """Converts rows of scores to the best classes or to probabilities; see `rank` and `soften` of the NumPy references.

    Args:
        device: number of the GPU.
        classes: in a row.
        dtype: element type of the scores, float32 or float16.
        softmax: return probabilities instead of scores.
        top_k: number of classes to return, at most `classes`; 0 returns the probabilities of all.

    Raises:
        Unsupported, DeviceError: as for `Preprocessor`.
    """

    def __init__(self, device: int, classes: int, dtype: npt.DTypeLike, softmax: bool, top_k: int) -> None:
        if top_k > classes or not (top_k or softmax):
            raise ValueError(f"top_k {top_k} of {classes} classes, softmax {softmax}")
        options = {"HALF": is_half(dtype), "THREADS": THREADS, "CLASSES": classes}
        self._kernels = Kernels(device, "classes.cu", options, {"soften": "PP", "rank": "PPPii"})
        self._top_k, self._softmax = top_k, int(softmax)

    def launch(self, stream: CudaStream, scores: int, rows: int, best: int, numbers: int = 0) -> None:
        """Queue the kernel for a batch.

        Args:
            stream: stream to queue on.
            scores: address of (rows, classes).
            rows: of the batch.
            best: address of float32 (rows, top_k), or (rows, classes) if `top_k` is 0.
            numbers: address of int32 (rows, top_k); not used if `top_k` is 0.

        Raises:
            DeviceError: the driver refuses.
        """
        if self._top_k:
            rest = (self._top_k, self._softmax)
            self._kernels.launch("rank", (rows, 1), THREADS, stream, scores, best, numbers, *rest)
        else:
            self._kernels.launch("soften", (rows, 1), THREADS, stream, scores, best)

    def close(self) -> None:
        """Unload the kernel; all work must be done."""
        self._kernels.close()


def copy_to_gpu(device: int, arrays: Sequence[Array]) -> tuple[DeviceBuffer, list[int]]:
    """Copy arrays into one block of GPU memory.

    Returns:
        The block, and the address of each array, a multiple of 16.

    Raises:
        DeviceError: the driver refuses.
    """
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    with driver.current(device):
        block, staged, stream = DeviceBuffer(size), PinnedBuffer(), CudaStream()
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
            # PyCUDA destroys a stream only while its context is current.
            del stream
    return block, [block.address + start for start in starts]


Floats = npt.NDArray[np.float32]

# Bytes that a thread writes for one channel, and the types of the kernel's `Scale` arguments after the pixel count.
_PIECE_BYTES = 16
_SCALE = "i" * 9
# Bits of a double beyond those of a float, and their value halfway between two floats.
_EXTRA_BITS = np.uint64((1 << 29) - 1)
_HALF_WAY = np.uint64(1 << 28)
# Outside of these bounds results may be subnormal floats, which have fewer bits.
_SMALL, _LARGE = 1e-30, 1e30


class PictureScaler:
    """Like `Preprocessor`, with the same bits, for recipes that `fits` accepts; images may lie at any address.

    Args:
        device: number of the GPU.
        recipe: preprocessing steps.
        dtype: element type of the tensor, float32 or float16.

    Raises:
        Unsupported: there is no GPU, or no compiler for it.
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
        self._pixel_bytes, self._tensor_bytes = math.prod(recipe.pixels), _tensor_bytes(recipe, dtype)

    @staticmethod
    def fits(recipe: ImageRecipe) -> bool:
        """Return True if the pixels are neither resized nor cropped."""
        return recipe.source is None

    def launch(self, stream: CudaStream, source: int, rows: int, destination: int) -> None:
        """Queue the kernel for a batch; see `Preprocessor.launch`."""
        self._launch("scale_all", stream, source, self._pixel_bytes, rows, destination)

    def launch_each(self, stream: CudaStream, addresses: int, rows: int, destination: int) -> None:
        """Queue the kernel for a batch whose images lie at any addresses.

        Args:
            stream: stream to queue on.
            addresses: address, on the GPU or in pinned memory, of uint64 (rows,) with the address of each image,
                there likewise.
            rows: images.
            destination: address of the tensor, (rows, *shape of one tensor).

        Raises:
            DeviceError: the driver refuses.
        """
        self._launch("scale_each", stream, addresses, _ADDRESS_BYTES, rows, destination)

    def close(self) -> None:
        """Unload the kernel; all work must be done."""
        self._kernels.close()

    def _launch(
        self, kernel: str, stream: CudaStream, source: int, source_bytes: int, rows: int, destination: int
    ) -> None:
        """Queue a kernel that reads `source_bytes` at `source` for each row."""
        for first, count in _parts(rows):
            start, target = source + first * source_bytes, destination + first * self._tensor_bytes
            self._kernels.launch(kernel, (self._blocks, count), THREADS, stream, start, target, *self._arguments)


def _tensor_bytes(recipe: ImageRecipe, dtype: npt.DTypeLike) -> int:
    """Bytes of the tensor of one image."""
    return math.prod(recipe.shape[1:]) * np.dtype(dtype).itemsize


def multiplies(mean: np.float32, std: np.float32) -> bool:
    """Return True if the kernel gets the bits of (pixel - mean) / std for all pixels without a division.

    It multiplies by the inverse and corrects the result by two fused operations (J.-M. Muller et al., "Handbook of
    Floating-Point Arithmetic", on division by Newton's iteration). The check computes this in double precision, which
    is exact except for the last sum. If that sum lies halfway between two floats, rounding it again might be wrong,
    and the result is False.
    """
    if not _SMALL < std < _LARGE:
        return False
    with np.errstate(all="ignore"):
        distance = np.arange(256, dtype=np.float32) - np.float32(mean)
        inverse = np.float32(1) / np.float32(std)
        near = distance * inverse
        rest = (distance.astype(np.float64) - near.astype(np.float64) * np.float64(std)).astype(np.float32)
        mended = rest.astype(np.float64) * np.float64(inverse) + near.astype(np.float64)
        half_way = (mended.view(np.uint64) & _EXTRA_BITS) == _HALF_WAY
        exact = distance / np.float32(std)
    return not half_way.any() and np.array_equal(mended.astype(np.float32).view(np.uint32), exact.view(np.uint32))


def _bits(values: Floats) -> Sequence[int]:
    """Return the bits of up to three float32 values as three int32, padded with zeros."""
    padded = np.zeros(3, np.float32)
    padded[: len(values)] = values
    bits: list[int] = padded.view(np.int32).tolist()
    return bits


# A few large blocks keep the bus busy with few of the GPU's multiprocessors, and leave the others free: a PCIe bus of
# 54 GB/s and about 1.5 us latency needs 80 KB in flight, 8 blocks have 256 KB.
_THREADS = 512


class RowGather:
    """Gathers rows from any GPU or pinned memory into one batch, padded with copies of the last row.

    Args:
        device: number of the GPU.

    Raises:
        Unsupported, DeviceError: as for `Kernels`.
    """

    def __init__(self, device: int) -> None:
        self._kernels = Kernels(device, "rows.cu", {}, {"gather": "PPPii"})

    def launch(
        self,
        stream: CudaStream,
        addresses: int,
        row_bytes: int,
        rows: int,
        total: int,
        destination: int,
        blocks: int,
    ) -> None:
        """Queue the kernel for a batch.

        Args:
            stream: stream to queue on.
            addresses: address, on the GPU or in pinned memory, of uint64 (rows,) with the address of each row.
            row_bytes: size of a row, at least 1.
            rows: at least 1.
            total: rows of the result, at least `rows`.
            destination: address of the result, total * row_bytes.
            blocks: number of thread blocks, each of which occupies a multiprocessor; 8 saturate a PCIe bus.

        Raises:
            DeviceError: the driver refuses.
        """
        self._kernels.launch("gather", (blocks, 1), _THREADS, stream, addresses, destination, row_bytes, rows, total)

    def close(self) -> None:
        """Unload the kernel; all work must be done."""
        self._kernels.close()


Sizes = tuple[int, ...]
Launch = Callable[[CudaStream, int, int, Sequence[int]], None]
"""Queues a kernel for a batch: on a stream, from the address of its input, for a number of rows including padding, to the address
of each output in the order of `client_tensors`. It allocates nothing and waits for nothing: it may be captured.
"""


@dataclass(frozen=True)
class PictureStage:
    """Stage that converts uint8 pixels to the model's input tensor; see `GpuStage`.

    Attributes:
        tensor: name of the model's input, and of the pixels that clients send.
        recipe: preprocessing steps.
        dtype: element type of the tensor, float32 or float16.
    """

    tensor: str
    recipe: ImageRecipe
    dtype: np.dtype[Any]

    @property
    def row(self) -> Sizes:
        """Shape of one image's tensor."""
        return self.recipe.shape[1:]

    @property
    def client_tensors(self) -> Mapping[str, tuple[np.dtype[Any], Sizes]]:
        """The pixels, by name: element type and shape of one image."""
        return {self.tensor: (np.dtype(np.uint8), self.recipe.pixels)}

    def open(self, device: int) -> _Pictures:
        """Load the kernel on a GPU.

        Raises:
            Unsupported: there is no GPU, or no compiler for it.
            DeviceError: the driver refuses.
        """
        return _Pictures(picture_kernel(device, self.recipe, self.dtype))


@dataclass(frozen=True)
class ClassStage:
    """Stage that converts scores to the best classes or to probabilities; see `GpuStage`.

    Attributes:
        tensor: name of the model's output.
        dtype: element type of the scores, float32 or float16.
        row: shape of one row of scores.
        classes: in a row.
        softmax: return probabilities instead of scores.
        top_k: number of classes, 0 returns the probabilities of all.
        scores: clients' name of the best classes' scores.
        numbers: clients' name of the best classes' indices.
    """

    tensor: str
    dtype: np.dtype[Any]
    row: Sizes
    classes: int
    softmax: bool
    top_k: int
    scores: str
    numbers: str

    @property
    def client_tensors(self) -> Mapping[str, tuple[np.dtype[Any], Sizes]]:
        """Outputs by name: element type and shape of one row, in the order of the targets of `_Classes.launch`."""
        if not self.top_k:
            return {self.tensor: (np.dtype(np.float32), self.row)}
        shape = (self.top_k,)
        return {self.scores: (np.dtype(np.float32), shape), self.numbers: (np.dtype(np.int32), shape)}

    def open(self, device: int) -> _Classes:
        """Load the kernel on a GPU; raises as `PictureStage.open` does."""
        return _Classes(Classifier(device, self.classes, self.dtype, self.softmax, self.top_k))


def picture_kernel(device: int, recipe: ImageRecipe, dtype: npt.DTypeLike) -> Preprocessor | PictureScaler:
    """Create the fastest kernel for a recipe; raises as both of them do."""
    kind = PictureScaler if PictureScaler.fits(recipe) else Preprocessor
    return kind(device, recipe, dtype)


class _Pictures:
    def __init__(self, kernel: Preprocessor | PictureScaler) -> None:
        self._kernel = kernel

    def launch(self, stream: CudaStream, source: int, rows: int, targets: Sequence[int]) -> None:
        self._kernel.launch(stream, source, rows, targets[0])

    @property
    def fetch(self) -> Launch | None:
        # A resizing kernel reads pixels several times, so they are copied to the GPU first.
        return self._fetch if isinstance(self._kernel, PictureScaler) else None

    def _fetch(self, stream: CudaStream, addresses: int, rows: int, targets: Sequence[int]) -> None:
        assert isinstance(self._kernel, PictureScaler), "only PictureScaler reads images in place"
        self._kernel.launch_each(stream, addresses, rows, targets[0])

    def close(self) -> None:
        self._kernel.close()


class _Classes:
    def __init__(self, kernel: Classifier) -> None:
        self._kernel = kernel

    def launch(self, stream: CudaStream, source: int, rows: int, targets: Sequence[int]) -> None:
        self._kernel.launch(stream, source, rows, *targets)

    @property
    def fetch(self) -> None:
        return None

    def close(self) -> None:
        self._kernel.close()


GpuStage = PictureStage | ClassStage
"""A step before an input of a plan or after an output. Clients have `client_tensors` instead of it: one for an input."""

StageKernel = _Pictures | _Classes
"""A stage on one GPU, shared by all instances there. `fetch` takes the addresses of rows in place of their own; None without."""
