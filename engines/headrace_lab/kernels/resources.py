"""Bases of the algorithms and of prepared convolutions: kernels, constants, scratch memory, arithmetic of the references."""

from __future__ import annotations

import contextlib
import contextvars
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from headrace.core.errors import Unsupported
from headrace.core.tensor import Array
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream, check, loaded
from headrace.runtimes.cuda.kernels.launching import copy_to_gpu
from headrace.runtimes.cuda.kernels.loading import Kernels, compile_file, is_half
from headrace.runtimes.cuda.memory import DeviceBuffer

from headrace_lab.kernels.base import Convolution, ConvShape, Epilogue, finish
from headrace_lab.kernels.cufft import PlaneTransform
from headrace_lab.kernels.structures import StructureKernel

Floats = npt.NDArray[np.float32]

FOLDER = Path(__file__).parent
ELEMENTS = f"{FOLDER}/elements.cuh"


class GpuResources:
    """Kernels and memory on one GPU that are released together.

    Args:
        device: number of the GPU.

    Attributes:
        workspace_bytes: scratch memory.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._stack = contextlib.ExitStack()
        self.workspace_bytes = 0

    def load(
        self,
        file: str,
        options: Mapping[str, int],
        types: Mapping[str, str],
        headers: Sequence[str] = (ELEMENTS,),
        shared_bytes: Mapping[str, int] | None = None,
    ) -> Kernels:
        """Compile and load a kernel file of this package; arguments as for `Kernels`."""
        path = f"{FOLDER}/{file}"
        kernels = Kernels(self._device, path, options, types, shared_bytes, headers=headers)
        self._stack.callback(kernels.close)
        return kernels

    def load_with_structures(
        self, file: str, name: str, options: Mapping[str, int], headers: Sequence[str], shared_bytes: int
    ) -> StructureKernel:
        """Compile and load a kernel that takes structures; arguments as for `StructureKernel`."""
        kernel = StructureKernel(self._device, f"{FOLDER}/{file}", name, options, headers, shared_bytes)
        self._stack.callback(kernel.close)
        return kernel

    def constants(self, *arrays: Array | None) -> list[int]:
        """Copy arrays to the GPU; return their addresses, 0 for None."""
        block, addresses = copy_to_gpu(self._device, [array for array in arrays if array is not None])
        self._stack.callback(self._in_context, block.free)
        remaining = iter(addresses)
        return [0 if array is None else next(remaining) for array in arrays]

    def workspace(self, size_bytes: int) -> int:
        """Allocate scratch memory; return its address, a multiple of 256."""
        with self.current():
            block = DeviceBuffer(size_bytes)
        self._stack.callback(self._in_context, block.free)
        self.workspace_bytes += size_bytes
        return block.address

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make the context of the GPU current, for calls of the driver that need one."""
        return driver.current(self._device)

    def multiprocessors(self) -> int:
        """Return the number of multiprocessors of the GPU."""
        with self.current(), check("reading the properties of the GPU"):
            return int(loaded().Device(self._device).multiprocessor_count)

    def kernels_complete(self) -> None:
        """Declare that no other kernel is loaded; see `compile_only`."""

    def transform(self, size: int, batch: int, inverse: bool) -> PlaneTransform:
        """Plan Fourier transforms; arguments as for `PlaneTransform`."""
        with self.current():
            transform = PlaneTransform(size, batch, inverse)
        self._stack.callback(self._in_context, transform.close)
        return transform

    def _in_context(self, release: Callable[[], None]) -> None:
        with self.current():
            release()

    def close(self) -> None:
        """Free the memory and unload the kernels; all work must be done."""
        self._stack.close()


class _KernelsCompiled(Exception):
    """Ends `Algorithm.open` within `compile_only`."""


class _KernelCompiler(GpuResources):
    """Compiles kernels and does nothing else: no module is loaded and no memory allocated."""

    def load(
        self,
        file: str,
        options: Mapping[str, int],
        types: Mapping[str, str],
        headers: Sequence[str] = (ELEMENTS,),
        shared_bytes: Mapping[str, int] | None = None,
    ) -> Any:
        with self.current():
            compile_file(self._device, f"{FOLDER}/{file}", options, headers)

    def load_with_structures(
        self, file: str, name: str, options: Mapping[str, int], headers: Sequence[str], shared_bytes: int
    ) -> Any:
        with self.current():
            compile_file(self._device, f"{FOLDER}/{file}", options, headers, own_instructions=True)

    def constants(self, *arrays: Array | None) -> list[int]:
        return [0 for _ in arrays]

    def kernels_complete(self) -> None:
        raise _KernelsCompiled


_is_compile_only: contextvars.ContextVar[bool] = contextvars.ContextVar("is_compile_only", default=False)


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Let `Algorithm.open` compile its kernels and end the block, in this thread: nothing is loaded or allocated on the GPU.

    Threads that compile for many shapes ahead need no weights on the GPU and no scratch memory.
    """
    token = _is_compile_only.set(True)
    try:
        yield
    except _KernelsCompiled:
        pass
    finally:
        _is_compile_only.reset(token)


@dataclass(frozen=True, slots=True)
class ConvOperation:
    """A convolution to prepare; attributes as the arguments of `Algorithm.open`."""

    shape: ConvShape
    dtype: npt.DTypeLike
    epilogue: Epilogue
    weights: Array
    bias: Array | None = None

    def options(self) -> dict[str, int]:
        """Macros of the kernels for the shape, without its batch, and of `elements.cuh`."""
        shape = self.shape
        return {
            "IN_CHANNELS": shape.c,
            "IN_HEIGHT": shape.h,
            "IN_WIDTH": shape.w,
            "OUT_CHANNELS": shape.k,
            "OUT_HEIGHT": shape.out_h,
            "OUT_WIDTH": shape.out_w,
            "KERNEL_HEIGHT": shape.r,
            "KERNEL_WIDTH": shape.s,
            "STRIDE": shape.stride,
            "PADDING": shape.pad,
            "GROUPS": shape.groups,
            **element_options(self.dtype, self.epilogue),
        }

    def float_bias(self) -> Floats | None:
        """Return the float32 bias of the epilogue, None if it has none.

        Raises:
            ValueError: the epilogue has a bias and the array is missing or has another shape.
        """
        if not self.epilogue.bias:
            return None
        channels = self.shape.k
        if self.bias is None or self.bias.shape != (channels,):
            given = "no bias" if self.bias is None else f"a bias of shape {self.bias.shape}"
            raise ValueError(f"{given}: the epilogue adds one of shape ({channels},); pass it as `bias`")
        return np.ascontiguousarray(self.bias, np.float32)


class PreparedConvolution:
    """Base of convolutions: owns kernels, constants and scratch memory.

    Args:
        resources: of the convolution.
        operation: the convolution.
    """

    def __init__(self, resources: GpuResources, operation: ConvOperation) -> None:
        self._resources, self._shape = resources, operation.shape

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory on the GPU, in bytes, without weights."""
        return self._resources.workspace_bytes

    def close(self) -> None:
        """Free weights and scratch memory and unload the kernels; all work must be done."""
        self._resources.close()


class ChunkedConvolution(PreparedConvolution, ABC):
    """Base of convolutions that transform the images of a batch in chunks of equal size, as their scratch memory allows.

    Args:
        resources, operation: as for `PreparedConvolution`.
        tiles_per_image: parts that an image is cut into.
        max_images: images of a chunk, as far as the shape has them; at least one is taken.
    """

    def __init__(
        self, resources: GpuResources, operation: ConvOperation, tiles_per_image: int, max_images: int
    ) -> None:
        super().__init__(resources, operation)
        images = operation.shape.n
        chunks = -(-images // max(1, min(images, max_images)))
        self._chunk = -(-images // chunks)
        self._tiles_per_image, self._chunk_tiles = tiles_per_image, self._chunk * tiles_per_image
        item_bytes = np.dtype(operation.dtype).itemsize
        self._x_bytes, self._y_bytes = (
            math.prod(size[1:]) * item_bytes for size in (operation.shape.x_shape, operation.shape.y_shape)
        )

    def launch(self, stream: CudaStream, x: int, y: int, residual: int = 0, rows: int | None = None) -> None:
        """Queue the convolution; see `Convolution`."""
        images = self._shape.n if rows is None else rows
        for first in range(0, images, self._chunk):
            tiles = min(self._chunk, images - first) * self._tiles_per_image
            added = residual + first * self._y_bytes if residual else 0
            self.launch_chunk(stream, x + first * self._x_bytes, y + first * self._y_bytes, added, tiles)

    @abstractmethod
    def launch_chunk(self, stream: CudaStream, x: int, y: int, residual: int, tiles: int) -> None:
        """Queue a chunk of so many tiles; the addresses are those of its first image."""


class Algorithm(ABC):
    """A way to compute a convolution. Instances are stateless; each variant of a tile size is an instance of its own.

    Attributes:
        name: name in tables and on the command line, e.g. "implicit-gemm", "winograd-f4".
        variant: tile sizes or another parameter, e.g. "128x128x32 3 stages"; "" if there is only one.
    """

    name: str
    variant: str = ""

    def variants(self, shape: ConvShape) -> Sequence[Algorithm]:
        """Return the variants that are worth measuring for a shape, the most promising first."""
        return [self]

    def estimate_us(self, shape: ConvShape) -> float | None:
        """Return the least time on an H100 or H200 by a cost model, in microseconds; None without a model.

        The shape must be supported.
        """
        return None

    def kernel_key(self, shape: ConvShape) -> tuple[object, ...]:
        """Return the properties of a shape that the compiled kernels depend on."""
        return (shape,)

    @abstractmethod
    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """Return the reason why the algorithm does not support a shape; "" if it does.

        Args:
            shape: the convolution.
            dtype: of input, output, weights and residual: float16 or float32.
            capability: compute capability of the GPU, e.g. (9, 0).
        """

    @abstractmethod
    def prepared(self, resources: GpuResources, operation: ConvOperation) -> Convolution:
        """Prepare a supported shape with resources that are closed if this raises; see `open`."""

    def open(
        self,
        device: int,
        shape: ConvShape,
        dtype: npt.DTypeLike,
        epilogue: Epilogue,
        weights: Array,
        bias: Array | None = None,
    ) -> Convolution:
        """Prepare the algorithm for a shape.

        Args:
            device: number of the GPU.
            shape: the convolution; `n` is the largest batch.
            dtype: of input, output and residual: float16 or float32.
            epilogue: operations on the sums.
            weights: float32 `weights_shape`, in host memory; rounded to `dtype`, or transformed from float32.
            bias: float32 (k,), in host memory, if the epilogue has a bias.

        Raises:
            Unsupported: `refusal` has a reason, or there is no GPU or compiler.
            DeviceError: the driver or the compiler refuses.
        """
        with driver.current(device), check("reading the properties of the GPU"):
            major, minor = loaded().Device(device).compute_capability()
        reason = self.refusal(shape, dtype, (major, minor))
        if reason:
            raise Unsupported(f"{self.name} does not support {shape} in {np.dtype(dtype)}: {reason}")
        resources = _KernelCompiler(device) if _is_compile_only.get() else GpuResources(device)
        try:
            return self.prepared(resources, ConvOperation(shape, dtype, epilogue, weights, bias))
        except BaseException:
            resources.close()
            raise

    def sums(self, shape: ConvShape, dtype: npt.DTypeLike, x: Array, weights: Array) -> Floats:
        """Compute the algorithm's sums in float32 with NumPy, with its roundings, for `reference`.

        Here: the products of each kernel position are added without a transform.
        """
        return convolve_in_float32(shape, as_floats(x, dtype), as_floats(weights, dtype))

    def reference(
        self,
        shape: ConvShape,
        dtype: npt.DTypeLike,
        epilogue: Epilogue,
        x: Array,
        weights: Array,
        bias: Array | None = None,
        residual: Array | None = None,
    ) -> Array:
        """Compute the algorithm's arithmetic with NumPy: the same transforms in float32, the same roundings.

        It shows on the CPU that the algorithm is right; `convolve` is the yardstick for all of them.

        Returns:
            `y_shape` of `dtype`.
        """
        sums = self.sums(shape, dtype, x, weights)
        result: Array = finish(sums, epilogue, bias, residual).astype(dtype)  # type: ignore[arg-type]
        return result


def element_options(dtype: npt.DTypeLike, epilogue: Epilogue) -> dict[str, int]:
    """Macros of `elements.cuh`."""
    return {
        "HALF": is_half(dtype),
        "BIAS": int(epilogue.bias),
        "RESIDUAL": int(epilogue.residual),
        "RELU": int(epilogue.relu),
    }


def widest(count: int, *widths: int) -> int:
    """Return the first of the widths that divides a count of channels; 1 if none does."""
    return next((width for width in widths if count % width == 0), 1)


def as_floats(array: Array, dtype: npt.DTypeLike) -> Floats:
    """Round to a dtype and return the values in float32."""
    return array.astype(dtype).astype(np.float32)


def convolve_in_float32(shape: ConvShape, x: Floats, weights: Floats) -> Floats:
    """Compute a convolution with a float32 sum for each kernel position; no epilogue."""
    pad, stride, groups = shape.pad, shape.stride, shape.groups
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    sums = np.zeros((*shape.y_shape[:3], groups, shape.k // groups), np.float32)
    filters = weights.reshape(groups, shape.k // groups, shape.r, shape.s, -1)
    for row in range(shape.r):
        for column in range(shape.s):
            window = padded[:, row : row + (shape.out_h - 1) * stride + 1 : stride]
            window = window[:, :, column : column + (shape.out_w - 1) * stride + 1 : stride]
            inputs = window.reshape(*window.shape[:3], groups, -1)
            sums += np.einsum("nhwgc,gkc->nhwgk", inputs, filters[:, :, row, column], optimize=True)
    return sums.reshape(shape.y_shape)
