"""Direct convolution: every output is summed by its definition, without shared memory.

A thread has 4 neighbouring output columns and 4 output channels (1 if the channels of a group are not divisible by 4): 16
sums in about 64 registers. Weights are (r, s, c / groups, k), so that a warp reads consecutive output channels; its reads of
the input are broadcasts. Reuse beyond that is left to the caches, so it is the slowest algorithm here, and the only one that
supports every shape.

Layout: x (n, h, w, c), y (n, out_h, out_w, k), float16 or float32; float32 sums. Source: Zhang, Franchetti and Low (2018),
"High Performance Zero-Memory Overhead Direct Convolutions", for sums over a register tile of columns and channels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from headrace.runtimes.cuda.driver import CudaStream

from headrace_lab.kernels.base import Convolution, ConvShape
from headrace_lab.kernels.resources import (
    Algorithm,
    ConvOperation,
    GpuResources,
    PreparedConvolution,
    widest,
)

THREADS = 128
_PIXELS = 4
# Operations that it does not exceed on an H200: 25 to 28e12 were measured.
_OPERATIONS_PER_S = 35e12


class TapsConvolution(PreparedConvolution):
    """`Convolution` whose threads have 4 neighbouring output columns of some channels each.

    Args:
        resources, operation: as for `PreparedConvolution`.
        name: of the kernel after "convolve_", and of its file.
        channels: output channels of a thread.
        options: further macros of the file.
    """

    def __init__(
        self, resources: GpuResources, operation: ConvOperation, name: str, channels: int, **options: int
    ) -> None:
        super().__init__(resources, operation)
        self._kernel = f"convolve_{name}"
        self._threads_per_image = threads_per_image(operation.shape, channels)
        macros = {**operation.options(), "THREADS": THREADS, "PIXELS": _PIXELS, "CHANNELS": channels, **options}
        self._kernels = resources.load(f"{name}.cu", macros, {self._kernel: "PPPPPi"})
        resources.kernels_complete()
        filters = np.ascontiguousarray(operation.weights.astype(operation.dtype).transpose(1, 2, 3, 0))
        self._constants = resources.constants(filters, operation.float_bias())

    def launch(self, stream: CudaStream, x: int, y: int, residual: int = 0, rows: int | None = None) -> None:
        """Queue the convolution; see `Convolution`."""
        images = self._shape.n if rows is None else rows
        blocks = -(-images * self._threads_per_image // THREADS)
        self._kernels.launch(self._kernel, (blocks, 1), THREADS, stream, x, *self._constants, residual, y, images)


def threads_per_image(shape: ConvShape, channels: int) -> int:
    """Return the threads of an image with so many output channels each."""
    return shape.out_h * -(-shape.out_w // _PIXELS) * (shape.k // channels)


class DirectAlgorithm(Algorithm):
    """`Algorithm`: direct convolution in float32 or float16."""

    name = "direct"

    def estimate_us(self, shape: ConvShape) -> float:
        """Return the least time on an H100 or H200, in microseconds."""
        return 1e6 * shape.flops / _OPERATIONS_PER_S

    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """Supports every shape of up to 2**31 - 1 blocks."""
        blocks = shape.n * shape.out_h * shape.out_w * shape.k // THREADS
        return "" if blocks < 2**31 else f"it needs {blocks} blocks, a grid has at most {2**31 - 1}: reduce the batch"

    def kernel_key(self, shape: ConvShape) -> tuple[object, ...]:
        """Return the properties of a shape that the compiled kernel depends on: all but the batch."""
        return (replace(shape, n=1),)

    def prepared(self, resources: GpuResources, operation: ConvOperation) -> Convolution:
        """Prepare a supported shape with resources that are closed if this raises."""
        channels, inputs = (
            widest(count // operation.shape.groups, 4) for count in (operation.shape.k, operation.shape.c)
        )
        return TapsConvolution(resources, operation, "direct", channels, INPUTS=inputs)
