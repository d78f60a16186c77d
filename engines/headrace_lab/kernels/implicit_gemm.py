"""Implicit GEMM with `mma.sync`: convolution as a matrix product whose left matrix is never stored.

The product has a row for each output pixel (n * out_h * out_w), a column for each output channel and r * s * c inner elements.
A block computes a tile of BM x BN; its inner loop goes over the taps of the kernel and, for each, over the channels in steps of
BK. The pixels under a tap are BM rows of channels in the NHWC input, so each step copies whole rows; taps in the padding and
rows behind the last pixel are filled with zeros by the copy itself.

Layout: x (n, h, w, c), weights (k, r, s, c), y (n, out_h, out_w, k), all float16; float32 sums, bias and partial sums.
Pipeline: `cp.async` of 16 bytes into STAGES tiles of shared memory, swizzled by the row so that `ldmatrix` has no bank
conflicts, then `mma.sync.m16n8k16` on fragments loaded one step of 16 ahead.
Epilogue: the sums go through shared memory, so that bias, residual and ReLU work on 16 bytes of one pixel.
Split: with few tiles, several blocks share a tile. Each stores its part in float32; the last to arrive adds the parts in
order, so that the result does not depend on the order of the blocks.

Budget of a block, e.g. 128x128x32 with 4 warps and 4 stages: 68 KiB of shared memory for the sums, which take the place of the
64 KiB of stages, and 219 registers a thread; two blocks on a multiprocessor of an H100. `GemmTile.shared_bytes` has the
formula.

Sources: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014 (implicit GEMM); PTX ISA, "mma.m16n8k16" and
"ldmatrix" (layout of the fragments); CUTLASS documentation, "Efficient GEMM in CUDA" (tiling and split K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from headrace.runtimes.cuda.driver import CudaStream

from headrace_lab.kernels.base import ConvShape
from headrace_lab.kernels.half_gemm import EPILOGUE, MULTIPROCESSORS, HalfGemm, refusal, tiles_of
from headrace_lab.kernels.measured_tiles import measured_tiles
from headrace_lab.kernels.resources import (
    ELEMENTS,
    FOLDER,
    ConvOperation,
    GpuResources,
    PreparedConvolution,
    element_options,
)

TENSOR_CORES = f"{FOLDER}/tensor_cores.cuh"
_KERNEL = "implicit_gemm"


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Work of a block.

    Attributes:
        bm: output pixels.
        bn: output channels.
        bk: input channels of a step, 32 or 64.
        warps_m: warps along the pixels.
        warps_n: warps along the channels.
        stages: tiles of the pipeline in shared memory.
    """

    bm: int
    bn: int
    bk: int
    warps_m: int
    warps_n: int
    stages: int

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk} {self.warps_m * self.warps_n} warps {self.stages} stages"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps_m * self.warps_n * 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the stages, then the float32 sums in the same place."""
        return max(self.stages * (self.bm + self.bn) * self.bk * 2, self.bm * (self.bn + 8) * 4)


TILES: tuple[GemmTile, ...] = (
    GemmTile(128, 256, 64, 2, 4, 3),
    GemmTile(256, 128, 64, 4, 2, 3),
    GemmTile(128, 128, 64, 2, 2, 3),
    GemmTile(128, 128, 32, 2, 4, 4),
    GemmTile(128, 128, 32, 2, 2, 4),
    GemmTile(256, 64, 32, 4, 1, 4),
    GemmTile(128, 64, 64, 2, 2, 4),
    GemmTile(64, 128, 64, 2, 2, 4),
    GemmTile(64, 64, 64, 2, 2, 4),
    GemmTile(64, 64, 64, 2, 2, 3),
    GemmTile(64, 32, 64, 2, 2, 4),
)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Blocks that share a tile, as far as `variants` proposes them."""


class _ImplicitGemmConvolution(PreparedConvolution):
    """`Convolution` with one tile."""

    def __init__(self, resources: GpuResources, operation: ConvOperation, tile: GemmTile, splits: int) -> None:
        super().__init__(resources, operation)
        shape = operation.shape
        self._tile, self._splits = tile, splits
        options = {
            **element_options(np.float16, operation.epilogue),
            "BM": tile.bm,
            "BN": tile.bn,
            "BK": tile.bk,
            "WARPS_M": tile.warps_m,
            "WARPS_N": tile.warps_n,
            "STAGES": tile.stages,
        }
        types, shared = {_KERNEL: "P" * 7 + "i" * 12}, {_KERNEL: tile.shared_bytes}
        self._kernels = resources.load("implicit_gemm.cu", options, types, (ELEMENTS, EPILOGUE, TENSOR_CORES), shared)
        resources.kernels_complete()
        arrivals = np.zeros(tiles_of(shape, tile.bm, tile.bn), np.int32) if splits > 1 else None
        filters = np.ascontiguousarray(operation.weights, dtype=np.float16)
        self._constants = resources.constants(filters, operation.float_bias(), arrivals)
        self._partial = resources.workspace(4 * splits * int(np.prod(shape.y_shape))) if splits > 1 else 0

    def launch(self, stream: CudaStream, x: int, y: int, residual: int = 0, rows: int | None = None) -> None:
        """Queue the convolution; allocates nothing and waits for nothing, so a CUDA graph can capture it."""
        shape = self._shape if rows is None else replace(self._shape, n=rows)
        blocks = tiles_of(shape, self._tile.bm, self._tile.bn) * self._splits
        filters, bias, arrivals = self._constants
        self._kernels.launch(
            _KERNEL,
            (blocks, 1),
            self._tile.threads,
            stream,
            *(x, filters, bias, residual, y, self._partial, arrivals),
            *(shape.n * shape.out_h * shape.out_w, shape.h, shape.w, shape.c, shape.k, shape.out_h, shape.out_w),
            *(shape.r, shape.s, shape.stride, shape.pad, self._splits),
        )


class ImplicitGemm(HalfGemm[GemmTile]):
    """Implicit GEMM with `mma.sync`; arguments as for `HalfGemm`."""

    name = "implicit-gemm"
    tiles = TILES
    split_counts = SPLITS
    measured = measured_tiles(name)
    convolution = _ImplicitGemmConvolution

    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """Return the reason why the algorithm does not support a shape; "" if it does."""
        return refusal(shape, dtype, capability, (8, 0))

    def kernel_key(self, shape: ConvShape) -> tuple[object, ...]:
        """Return the properties of a shape that the compiled kernel depends on: none."""
        return ()

    def can_split(self, shape: ConvShape, tile: GemmTile, splits: int) -> bool:
        """Return whether so many blocks may share a tile. Each part has two steps, and a multiprocessor has at most four
        blocks.
        """
        steps = shape.r * shape.s * -(-shape.c // tile.bk)
        return splits <= steps // 2 and tiles_of(shape, tile.bm, tile.bn) * splits <= 4 * MULTIPROCESSORS

    def cycles(self, shape: ConvShape, tile: GemmTile, splits: int) -> float:
        """Return the estimated time in cycles. Rounds of blocks, each with its steps, and what a block does besides."""
        blocks = tiles_of(shape, tile.bm, tile.bn) * splits
        steps = -(-shape.r * shape.s * -(-shape.c // tile.bk) // splits)
        together = max(1, min((227 << 10) // tile.shared_bytes, 512 // tile.threads))
        rounds = -(-blocks // (MULTIPROCESSORS * together))
        used = min(together, -(-blocks // MULTIPROCESSORS))
        # A multiprocessor multiplies 1024 pairs of halves in a cycle with `mma.sync` at most about 0.6 of that; small tiles
        # load more from L2 for each product.
        products = tile.bm * tile.bn * tile.bk / (4096 * 0.6) * used
        bytes_loaded = (tile.bm + tile.bn) * tile.bk * 2 / 40 * used
        step = max(products, bytes_loaded, 150.0)
        finish = 1500 + tile.bm * tile.bn * (2 + 8 * (splits if splits > 1 else 0)) / 30 * used
        return float(rounds * (steps * step + finish))
