"""Kernels ready to be launched: compiled, loaded and given their tables when they are made.

A launch allocates nothing and waits for nothing, so that it may be captured in a CUDA graph.

Made and closed anywhere; launched with the device's context current (`server.cuda.driver.current`). Addresses are CUdeviceptr.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server.core.tensor import Array
from server.cuda import driver
from server.cuda.driver import Stream, check, loaded
from server.cuda.memory import DeviceBuffer, PinnedBuffer, upload
from server.cuda.nvrtc import compile_cuda
from server.pipelines.recipe import ImageRecipe
from server.pipelines.resampling import PRECISION_BITS, Resampling

_FOLDER = Path(__file__).parent
_THREADS = 256
# Of CUDA: rows of a grid (y).
MAX_ROWS = 65535
_ALIGNMENT_BYTES = 16


class Preprocessor:
    """Pixels to the tensor a model takes: resize, crop, normalise, lay out and cast in one kernel.

    The same bits as `reference.prepare`.

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
        self._grid = -(-crop_height * crop_width // _THREADS)
        tables = Resampling.of(recipe)
        mean, std = (
            np.broadcast_to(np.array(values, np.float32), recipe.channels) for values in (recipe.mean, recipe.std)
        )
        down, across = tables.down, tables.across
        options = {
            "CHANNELS": recipe.channels,
            "PLANAR": int(recipe.layout == "nchw"),
            "HALF": _is_half(dtype),
            "PRECISION_BITS": PRECISION_BITS,
        }
        self._device = device
        self._kernel = _load(device, "pictures.cu", options)["prepare", "PPPPiPPiPPiiii"]
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
            rows: pictures, at most `MAX_ROWS`.
            destination: address of the tensor, (rows, *its shape).

        Raises:
            DeviceError: the driver refuses.
        """
        _launch(self._kernel, (self._grid, rows), stream, source, destination, *self._arguments)

    def close(self) -> None:
        """Give the tables back; all work must be done."""
        with driver.current(self._device):
            self._tables.free()


class RowGather:
    """Rows from anywhere in the GPU's memory into one batch, padded with copies of the last row; see `reference.gather`.

    Args:
        device: its ordinal.
        row_bytes: of one row.

    Raises:
        Unsupported, DeviceError: as for `Preprocessor`.
    """

    def __init__(self, device: int, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        # Enough threads for 16 bytes each, up to what fills a GPU with a few rows.
        self._grid = max(1, min(32, row_bytes // (_ALIGNMENT_BYTES * _THREADS)))
        self._kernel = _load(device, "rows.cu", {})["gather", "PPPi"]

    def launch(self, stream: Stream, addresses: int, rows: int, total: int, destination: int) -> None:
        """Queue the work of a batch.

        Args:
            stream: on which.
            addresses: address, on the GPU or of pinned memory, of uint64 (rows,): where each row is.
            rows: at least 1.
            total: rows of the result, at least `rows` and at most `MAX_ROWS`.
            destination: address of the result, total * row_bytes.

        Raises:
            DeviceError: the driver refuses.
        """
        _launch(self._kernel, (self._grid, total), stream, addresses, destination, self._row_bytes, rows)


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
        kernels = _load(device, "classes.cu", {"HALF": _is_half(dtype), "THREADS": _THREADS})
        self._soften = kernels["soften", "PPi"]
        self._rank = kernels["rank", "PPPiii"]
        self._classes, self._top_k, self._softmax = classes, top_k, int(softmax)

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
            rest = (self._classes, self._top_k, self._softmax)
            _launch(self._rank, (rows, 1), stream, scores, best, numbers, *rest)
        else:
            _launch(self._soften, (rows, 1), stream, scores, best, self._classes)


class _Kernels:
    """The kernels of one file, compiled and loaded."""

    def __init__(self, module: Any) -> None:
        self._module = module  # its code stays loaded as long as this lives

    def __getitem__(self, name_and_types: tuple[str, str]) -> Any:
        """A kernel by its name and the types of its arguments as `struct` writes them."""
        name, types = name_and_types
        with check(f"finding the kernel {name}"):
            kernel = self._module.get_function(name)
            kernel.prepare(types)
        return kernel


def _load(device: int, file: str, options: dict[str, int]) -> _Kernels:
    source = (_FOLDER / "half.cuh").read_text(encoding="utf-8") + (_FOLDER / file).read_text(encoding="utf-8")
    with driver.current(device):
        with check("asking what the GPU is"):
            capability = loaded().Device(device).compute_capability()
        told = [f"-D{name}={value}" for name, value in options.items()]
        code = compile_cuda(source, file, tuple(capability), told)
        with check(f"loading {file}"):
            return _Kernels(loaded().module_from_buffer(code))


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


def _launch(kernel: Any, grid: tuple[int, int], stream: Stream, *arguments: int) -> None:
    with check("launching a kernel"):
        kernel.prepared_async_call(grid, (_THREADS, 1, 1), stream.stream, *arguments)


def _is_half(dtype: npt.DTypeLike) -> int:
    kind = np.dtype(dtype)
    if kind not in (np.float16, np.float32):
        raise ValueError(f"kernels read and write float32 and float16, not {kind}")
    return int(kind == np.float16)
