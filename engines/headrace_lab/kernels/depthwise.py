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

from headrace_lab.kernels.base import Convolution, ConvShape
from headrace_lab.kernels.direct import THREADS, TapsConvolution, threads_per_image
from headrace_lab.kernels.resources import (
    Algorithm,
    ConvOperation,
    GpuResources,
    widest,
)

_MAX_BLOCKS = 2**31 - 1


def _channels(shape: ConvShape, dtype: npt.DTypeLike) -> int:
    """Channels of a thread."""
    return widest(shape.c, *((8, 4, 2) if np.dtype(dtype) == np.float16 else (4, 2)))


class DepthwiseAlgorithm(Algorithm):
    """`Algorithm`: depthwise convolution in float32 or float16."""

    name = "depthwise"

    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """Supports as many groups as input and output channels."""
        if not shape.groups == shape.c == shape.k:
            return "it supports as many groups as input and output channels only: use direct or a GEMM"
        blocks = shape.n * threads_per_image(shape, _channels(shape, dtype)) // THREADS
        if blocks > _MAX_BLOCKS:
            return f"it needs {blocks} blocks, a grid has at most {_MAX_BLOCKS}: reduce the batch"
        return ""

    def prepared(self, resources: GpuResources, operation: ConvOperation) -> Convolution:
        """Prepare a supported shape with resources that are closed if this raises."""
        channels = _channels(operation.shape, operation.dtype)
        return TapsConvolution(resources, operation, "depthwise", channels)
