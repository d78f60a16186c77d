"""Depthwise convolution: one input channel for each output channel.

Neighbouring threads have neighbouring channels, 16 bytes of them each where the channels allow it, of 4 neighbouring output
columns. With stride 1 a window of 4 inputs slides along the row in registers, so that an input is read once for each row of
the kernel; the rows come from the caches. Sums are 16 (float32) or 32 (float16) registers of 64 to 128; no shared memory.
The algorithm is limited by memory: it has 2 * r * s operations for each output. Weights are (r, s, c).

Source of the layout: Howard et al. (2017), "MobileNets", for the operation; Lu, Zhang and Wang (2021), "Optimizing Depthwise
Separable Convolution Operations on GPUs", for the reuse in registers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.core.tensor import Array
from headrace.cuda.driver import CudaStream
from headrace.cuda.kernels.convolution.base import Convolution, ConvShape, Epilogue
from headrace.cuda.kernels.convolution.resources import (
    GpuResources,
    PreparedConvolution,
    SumOfTaps,
    bias_of,
    element_options,
    prepare,
    shape_options,
    widest,
)

_THREADS = 128
_PIXELS = 4
_MAX_BLOCKS = 2**31 - 1


def _vector(shape: ConvShape, dtype: npt.DTypeLike) -> int:
    """Channels of a thread."""
    return widest(shape.c, *((8, 4, 2) if np.dtype(dtype) == np.float16 else (4, 2)))


def _threads_per_image(shape: ConvShape, dtype: npt.DTypeLike) -> int:
    return shape.out_h * -(-shape.out_w // _PIXELS) * (shape.c // _vector(shape, dtype))


class _DepthwiseConvolution(PreparedConvolution):
    """`Convolution` of the depthwise algorithm."""

    def __init__(
        self,
        resources: GpuResources,
        shape: ConvShape,
        dtype: npt.DTypeLike,
        epilogue: Epilogue,
        weights: Array,
        bias: Array | None,
    ) -> None:
        super().__init__(resources)
        options = {
            **shape_options(shape),
            **element_options(dtype, epilogue),
            "THREADS": _THREADS,
            "PIXELS": _PIXELS,
            "CHANNELS": _vector(shape, dtype),
        }
        self._threads_per_image = _threads_per_image(shape, dtype)
        self._images = shape.n
        self._kernels = resources.load("depthwise.cu", options, {"convolve_depthwise": "PPPPPi"})
        resources.kernels_complete()
        filters = np.ascontiguousarray(weights.astype(dtype)[..., 0].transpose(1, 2, 0))
        self._constants = resources.constants(filters, bias_of(epilogue, bias, shape))

    def launch(self, stream: CudaStream, x: int, y: int, residual: int = 0, rows: int | None = None) -> None:
        """Queue the convolution; see `Convolution`."""
        images = self._images if rows is None else rows
        grid = -(-images * self._threads_per_image // _THREADS), 1
        arguments = (x, *self._constants, residual, y, images)
        self._kernels.launch("convolve_depthwise", grid, _THREADS, stream, *arguments)


class DepthwiseAlgorithm(SumOfTaps):
    """`Algorithm`: depthwise convolution in float32 or float16."""

    name = "depthwise"
    variant = ""

    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """Supports as many groups as input and output channels."""
        if not shape.groups == shape.c == shape.k:
            return "it supports as many groups as input and output channels only: use direct or a GEMM"
        blocks = shape.n * _threads_per_image(shape, dtype) // _THREADS
        if blocks > _MAX_BLOCKS:
            return f"it needs {blocks} blocks, a grid has at most {_MAX_BLOCKS}: reduce the batch"
        return ""

    def open(
        self,
        device: int,
        shape: ConvShape,
        dtype: npt.DTypeLike,
        epilogue: Epilogue,
        weights: Array,
        bias: Array | None = None,
    ) -> Convolution:
        """Prepare a shape; see `Algorithm`."""
        with prepare(self, device, shape, dtype) as resources:
            return _DepthwiseConvolution(resources, shape, dtype, epilogue, weights, bias)
