"""Kernels, constants and scratch memory of a prepared convolution, and the NumPy arithmetic that references share."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import Unsupported
from headrace.core.tensor import Array
from headrace.cuda import driver
from headrace.cuda.cufft import PlaneTransform
from headrace.cuda.driver import check, loaded
from headrace.cuda.kernels.convolution.base import Algorithm, ConvShape, Epilogue, finish
from headrace.cuda.kernels.launching import copy_to_gpu
from headrace.cuda.kernels.loading import Kernels, compile_file, is_half
from headrace.cuda.kernels.structures import StructureKernel
from headrace.cuda.memory import DeviceBuffer

Floats = npt.NDArray[np.float32]

FOLDER = "convolution"
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


@contextlib.contextmanager
def prepare(algorithm: Algorithm, device: int, shape: ConvShape, dtype: npt.DTypeLike) -> Iterator[GpuResources]:
    """Yield resources for an algorithm that supports the shape; they are closed if the block raises.

    Raises:
        Unsupported: the algorithm refuses the shape, or there is no GPU.
    """
    with driver.current(device), check("reading the properties of the GPU"):
        major, minor = loaded().Device(device).compute_capability()
    reason = algorithm.refusal(shape, dtype, (major, minor))
    if reason:
        raise Unsupported(f"{algorithm.name} does not support {shape} in {np.dtype(dtype)}: {reason}")
    resources = _KernelCompiler(device) if _is_compile_only.get() else GpuResources(device)
    try:
        yield resources
    except BaseException:
        resources.close()
        raise


class PreparedConvolution:
    """Base of convolutions: owns kernels, constants and scratch memory.

    Args:
        resources: of the convolution.
    """

    def __init__(self, resources: GpuResources) -> None:
        self._resources = resources

    @property
    def workspace_bytes(self) -> int:
        """See `Convolution.workspace_bytes`."""
        return self._resources.workspace_bytes

    def close(self) -> None:
        """See `Convolution.close`."""
        self._resources.close()


def shape_options(shape: ConvShape) -> dict[str, int]:
    """Macros of the kernels for a shape, without its batch."""
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
    }


def element_options(dtype: npt.DTypeLike, epilogue: Epilogue) -> dict[str, int]:
    """Macros of `elements.cuh`."""
    return {
        "HALF": is_half(dtype),
        "BIAS": int(epilogue.bias),
        "RESIDUAL": int(epilogue.residual),
        "RELU": int(epilogue.relu),
    }


def bias_of(epilogue: Epilogue, bias: Array | None, shape: ConvShape) -> Floats | None:
    """Return the float32 bias of an epilogue, None if it has none.

    Raises:
        ValueError: the epilogue has a bias and the array is missing or has another shape.
    """
    if not epilogue.bias:
        return None
    if bias is None or bias.shape != (shape.k,):
        given = "no bias" if bias is None else f"a bias of shape {bias.shape}"
        raise ValueError(f"{given}: the epilogue adds one of shape ({shape.k},); pass it as `bias`")
    return np.ascontiguousarray(bias, np.float32)


def widest(count: int, *widths: int) -> int:
    """Return the first of the widths that divides a count of channels; 1 if none does."""
    return next((width for width in widths if count % width == 0), 1)


def as_floats(array: Array, dtype: npt.DTypeLike) -> Floats:
    """Round to a dtype and return the values in float32."""
    return array.astype(dtype).astype(np.float32)


def finished(
    sums: Floats, dtype: npt.DTypeLike, epilogue: Epilogue, bias: Array | None, residual: Array | None
) -> Array:
    """Apply an epilogue in float32 and round once to a dtype."""
    result: Array = finish(sums, epilogue, bias, residual).astype(dtype)  # type: ignore[arg-type]
    return result


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


class SumOfTaps:
    """Base of algorithms that add the products of each kernel position in float32, without a transform."""

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
        """Compute a float32 sum for each kernel position; see `Algorithm.reference`."""
        sums = convolve_in_float32(shape, as_floats(x, dtype), as_floats(weights, dtype))
        return finished(sums, dtype, epilogue, bias, residual)
