"""Comparison of all elements of a result with another candidate's on the GPU."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
from headrace.core.tensor import Array
from headrace.cuda.driver import CudaStream, check, loaded
from headrace.cuda.kernels.loading import Kernels, is_half
from headrace.cuda.memory import DeviceBuffer, copy_address, read_gpu

_BLOCKS = 1056
_THREADS = 256


class ResultComparison:
    """Compares results of one dtype on one GPU; the device must be current.

    Args:
        device: number of the GPU.
        dtype: float16 or float32.
        stream: stream of the kernel.
    """

    def __init__(self, device: int, dtype: npt.DTypeLike, stream: CudaStream) -> None:
        self._device = device
        self._stream = stream
        self._kernels = Kernels(device, "convolution/compare.cu", {"HALF": is_half(dtype)}, {"compare": "PPPiPP"})
        self._counts = DeviceBuffer(_BLOCKS * 8)
        self._saved = DeviceBuffer()

    def save(self, address: int, size_bytes: int) -> None:
        """Copy a result: later ones are compared with it."""
        self._saved.reserve(size_bytes)
        copy_address(self._saved.address, address, size_bytes, self._stream)
        self._stream.synchronize()

    def wrong(self, address: int, elements: int, limit: float, reference: int = 0) -> int:
        """Return the number of elements that are not finite or differ by more than `limit` from the reference.

        Args:
            address: of the result.
            elements: number of elements.
            limit: largest allowed difference.
            reference: address of the other result; 0 for the saved one.
        """
        bits = struct.unpack("<i", struct.pack("<f", limit))[0]
        counts = self._counts.address
        arguments = (address, reference or self._saved.address, elements, bits, counts, counts + 4 * _BLOCKS)
        self._kernels.launch("compare", (_BLOCKS, 1), _THREADS, self._stream, *arguments)
        self._stream.synchronize()
        return int(read_gpu(self._device, counts, 4 * _BLOCKS).view(np.int32).sum())

    def close(self) -> None:
        """Free the memory."""
        self._counts.free()
        self._saved.free()
        self._kernels.close()


def read_pixels(
    address: int,
    shape: tuple[int, int, int, int],
    dtype: np.dtype[np.generic],
    pixels: npt.NDArray[np.int64],
) -> Array:
    """Return all channels of an output in memory of the current GPU at (p, 3) pixels: picture, row, column.

    Args:
        address: of the output.
        shape: (n, out_h, out_w, k).
        dtype: of the elements.
        pixels: int64 (p, 3).

    Returns:
        (p, k) of `dtype`.
    """
    _, height, width, channels = shape
    size_bytes = channels * dtype.itemsize
    rows = np.empty((len(pixels), channels), dtype)
    numbers = (pixels[:, 0] * height + pixels[:, 1]) * width + pixels[:, 2]
    with check("copying from the GPU"):
        for row, number in zip(rows, numbers.tolist(), strict=True):
            loaded().memcpy_dtoh(row, address + number * size_bytes)
    return rows
