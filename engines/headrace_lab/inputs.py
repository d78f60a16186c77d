"""Random operands of one layer on the GPU, whose every element the host can compute again.

Activations repeat one block of random values whose length is a prime, so that no row, picture or channel repeats it in step. The
host keeps the block alone: a check of any element of a batch of gigabytes needs no copy from the GPU.

Measurements rotate over several sets of activations that together exceed the L2 cache twice, as in a network whose tensors are
larger than the cache. Weights and bias are one set and stay in the cache if they fit; that holds for all candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from headrace.core.tensor import Array
from headrace.runtimes.cuda.driver import CudaStream, check, loaded
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, copy_on_gpu, upload

from headrace_lab.kernels.base import ConvShape, Epilogue

# Largest prime below 2^20.
_BLOCK = 1_048_573
_MAX_SETS = 512
_L2_FACTOR = 2


def l2_bytes(device: int) -> int:
    """Return the size of a GPU's L2 cache in bytes."""
    cuda = loaded()
    with check("reading the properties of the GPU"):
        return int(cuda.Device(device).get_attribute(cuda.device_attribute.L2_CACHE_SIZE))


@dataclass(frozen=True, slots=True)
class HostOperands:
    """Operands of a layer in host memory.

    Attributes:
        shape: the convolution.
        dtype: of the activations and the residual.
        epilogue: operations on the sums.
        block: random values, in `dtype`, that the input repeats; the residual repeats it from its middle on.
        weights: float32 `weights_shape`, with values that `dtype` represents exactly.
        bias: float32 (k,).
    """

    shape: ConvShape
    dtype: np.dtype[Any]
    epilogue: Epilogue
    block: Array
    weights: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]

    def x_at(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return elements of the input by their flat index."""
        return self.block[index % len(self.block)].astype(np.float64)

    def residual_at(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return elements of the residual by their flat index."""
        return self.block[(index + len(self.block) // 2) % len(self.block)].astype(np.float64)


def host_operands(shape: ConvShape, dtype: npt.DTypeLike, epilogue: Epilogue, seed: int) -> HostOperands:
    """Draw the operands of a layer: normal activations; weights scaled by 1/sqrt(K), as layers are initialised.

    K is the number of products in a sum, r*s*c/groups: outputs have a variance near 1.
    """
    kind = np.dtype(dtype)
    generator = np.random.default_rng(seed)
    elements = max(math.prod(shape.x_shape), math.prod(shape.y_shape))
    block = generator.standard_normal(min(_BLOCK, max(elements, 64)), np.float32).astype(kind)
    products = shape.r * shape.s * (shape.c // shape.groups)
    weights = generator.standard_normal(shape.weights_shape, np.float32) / np.float32(math.sqrt(products))
    bias = generator.standard_normal(shape.k, np.float32)
    return HostOperands(
        shape, kind, epilogue, block, weights.astype(kind).astype(np.float32), bias.astype(kind).astype(np.float32)
    )


class DeviceOperands:
    """Sets of activations on the GPU; the device must be current.

    Args:
        operands: values.
        cache_bytes: size of the L2 cache.
        stream: stream of the copies.

    Attributes:
        x: addresses of the inputs, one for each set.
        y: addresses of the outputs.
        residual: addresses of the residuals; 0 without one.
    """

    def __init__(self, operands: HostOperands, cache_bytes: int, stream: CudaStream) -> None:
        shape, itemsize = operands.shape, operands.dtype.itemsize
        x_bytes, y_bytes = math.prod(shape.x_shape) * itemsize, math.prod(shape.y_shape) * itemsize
        residual_bytes = y_bytes if operands.epilogue.residual else 0
        set_bytes = x_bytes + y_bytes + residual_bytes
        sets = min(math.ceil(_L2_FACTOR * cache_bytes / set_bytes) if set_bytes else 1, _MAX_SETS)
        sets = max(sets, 1)
        self.y_bytes = y_bytes
        self._block = DeviceBuffer()
        # One allocation for all sets: hundreds of small ones cost more time than the measurement.
        stride = [_aligned(size) for size in (x_bytes, y_bytes, residual_bytes)]
        try:
            self._block.reserve(sum(stride) * sets)
            base = self._block.address
            self.x = [base + number * stride[0] for number in range(sets)]
            base += sets * stride[0]
            self.y = [base + number * stride[1] for number in range(sets)]
            base += sets * stride[1]
            self.residual = [base + number * stride[2] if residual_bytes else 0 for number in range(sets)]
            middle = len(operands.block) // 2
            _fill(self.x, x_bytes, operands.block, stream)
            if residual_bytes:
                _fill(self.residual, y_bytes, np.roll(operands.block, -middle), stream)
        except BaseException:
            self._block.free()
            raise

    def __len__(self) -> int:
        return len(self.x)

    def poison(self, index: int, stream: CudaStream) -> None:
        """Fill an output with bytes that are NaN in float16 and float32."""
        with check("filling memory of the GPU"):
            loaded().memset_d8_async(self.y[index], 0xFF, self.y_bytes, stream.stream)

    def close(self) -> None:
        """Free the memory; all work must be done."""
        self._block.free()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 256) * 256


def _fill(targets: Sequence[int], size_bytes: int, block: Array, stream: CudaStream) -> None:
    """Repeat a block over each target; the length doubles with every copy on the GPU."""
    pinned, device = PinnedBuffer(), DeviceBuffer()
    try:
        pinned.reserve(block.nbytes)
        view = pinned.view(block.shape, block.dtype)
        np.copyto(view, block)
        device.reserve(block.nbytes)
        upload(device, view, stream)
        first = targets[0]
        done = min(block.nbytes, size_bytes)
        copy_on_gpu(first, device, done, stream)
        with check("copying on the GPU"):
            while done < size_bytes:
                # A multiple of the block is complete before each copy, so the copy continues it.
                length = min(done, size_bytes - done)
                loaded().memcpy_dtod_async(first + done, first, length, stream.stream)
                done += length
            for target in targets[1:]:
                loaded().memcpy_dtod_async(target, first, size_bytes, stream.stream)
        stream.synchronize()
    finally:
        pinned.free()
        device.free()
