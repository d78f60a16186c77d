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

from headrace.core.tensor import Array
from headrace.cuda.driver import CudaStream
from headrace.cuda.kernels.convolution.base import Convolution, ConvShape, Epilogue
from headrace.cuda.kernels.convolution.measured_tiles import IMPLICIT_GEMM, nearest
from headrace.cuda.kernels.convolution.resources import (
    ELEMENTS,
    FOLDER,
    GpuResources,
    as_floats,
    bias_of,
    convolve_in_float32,
    element_options,
    finished,
    prepare,
)

EPILOGUE = f"{FOLDER}/gemm_epilogue.cuh"
TENSOR_CORES = f"{FOLDER}/tensor_cores.cuh"
# Addresses are 32-bit numbers of elements.
_MAX_ELEMENTS = (1 << 31) - 1
# The taps inside of the input are 16 bits for rows and for columns.
_MAX_KERNEL = 16
# 16 bytes of float16.
_CHANNELS = 8
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


class ImplicitGemm:
    """The algorithm with one tile, or with the tile of the nearest measured layer for each shape.

    Args:
        tile: work of a block; None to select it.
        splits: blocks that share a tile.

    Attributes:
        name: of the algorithm.
        variant: the tile and the split, "auto" if they are selected for each shape.
        tile: work of a block; None if it is selected for each shape.
        splits: blocks that share a tile.
    """

    def __init__(self, tile: GemmTile | None = None, splits: int = 1) -> None:
        self.name = "implicit-gemm"
        self.tile, self.splits = tile, splits
        self.variant = "auto" if tile is None else f"{tile}" + (f" split {splits}" if splits > 1 else "")

    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """See `Algorithm.refusal`."""
        return refusal(shape, dtype, capability, (8, 0))

    def variants(self, shape: ConvShape) -> list[ImplicitGemm]:
        """Return the tiles and splits that are worth measuring for a shape.

        The first is that of the nearest measured layer; the others are in the order of a cost model.
        """
        measured = nearest(IMPLICIT_GEMM, shape)
        candidates = [
            ImplicitGemm(tile, splits)
            for tile in TILES
            for splits in SPLITS
            if splits == 1 or _can_split(shape, tile, splits)
        ]
        return sorted(
            candidates,
            key=lambda candidate: ((str(candidate.tile), candidate.splits) != measured, _cost(shape, candidate)),
        )

    def kernel_key(self, shape: ConvShape) -> tuple[object, ...]:
        """Return the properties of a shape that the compiled kernel depends on: none."""
        return ()

    def open(
        self,
        device: int,
        shape: ConvShape,
        dtype: npt.DTypeLike,
        epilogue: Epilogue,
        weights: Array,
        bias: Array | None = None,
    ) -> Convolution:
        """See `Algorithm.open`."""
        with prepare(self, device, shape, dtype) as resources:
            selected = self if self.tile is not None else self.variants(shape)[0]
            assert selected.tile is not None
            return _ImplicitGemmConvolution(resources, shape, epilogue, weights, bias, selected.tile, selected.splits)

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
        """Compute float32 sums of each tap; see `Algorithm`."""
        sums = convolve_in_float32(shape, as_floats(x, dtype), as_floats(weights, dtype))
        return finished(sums, dtype, epilogue, bias, residual)


def refusal(shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int], least: tuple[int, int]) -> str:
    """Return the reason why no implicit GEMM of float16 supports a shape; "" if it does.

    Args:
        shape: the convolution.
        dtype: of the activations.
        capability: compute capability of the GPU.
        least: lowest compute capability of the kernel.
    """
    if np.dtype(dtype) != np.float16:
        return f"{np.dtype(dtype)}: Tensor Cores multiply float16 here; use float16, or an algorithm for float32"
    if capability < least:
        needed, present = (".".join(map(str, number)) for number in (least, capability))
        return f"compute capability {present}: the kernel needs {needed}; use another algorithm"
    if shape.groups > 1:
        return f"{shape.groups} groups: one matrix product has one group; use the depthwise or the direct algorithm"
    if shape.c % _CHANNELS or shape.k % _CHANNELS:
        return f"{shape.c} and {shape.k} channels: copies of 16 bytes need multiples of 8; pad the channels with zeros"
    if max(shape.r, shape.s) > _MAX_KERNEL:
        return f"kernel {shape.r}x{shape.s}: at most {_MAX_KERNEL} in each direction; use FFT"
    sizes = (np.prod(size, dtype=np.int64) for size in (shape.x_shape, shape.y_shape, shape.weights_shape))
    if max(sizes) > _MAX_ELEMENTS:
        return f"{shape}: a tensor has more than 2^31 - 1 elements; use a smaller batch"
    return ""


def tiles_of(shape: ConvShape, bm: int, bn: int) -> int:
    """Number of tiles of bm x bn of a shape's output."""
    return -(-shape.n * shape.out_h * shape.out_w // bm) * -(-shape.k // bn)


# Multiprocessors of an H100 SXM and of an H200.
_MULTIPROCESSORS = 132


def _can_split(shape: ConvShape, tile: GemmTile, splits: int) -> bool:
    """Return whether each part has two steps and the blocks are at most four for each multiprocessor."""
    steps = shape.r * shape.s * -(-shape.c // tile.bk)
    return splits <= steps // 2 and tiles_of(shape, tile.bm, tile.bn) * splits <= 4 * _MULTIPROCESSORS


def _cost(shape: ConvShape, candidate: ImplicitGemm) -> float:
    """Estimated time in cycles: rounds of blocks, each with its steps, and what a block does besides."""
    tile, splits = candidate.tile, candidate.splits
    assert tile is not None
    blocks = tiles_of(shape, tile.bm, tile.bn) * splits
    steps = -(-shape.r * shape.s * -(-shape.c // tile.bk) // splits)
    together = max(1, min((227 << 10) // tile.shared_bytes, 512 // tile.threads))
    rounds = -(-blocks // (_MULTIPROCESSORS * together))
    used = min(together, -(-blocks // _MULTIPROCESSORS))
    # A multiprocessor multiplies 1024 pairs of halves in a cycle with `mma.sync` at most about 0.6 of that; small tiles
    # load more from L2 for each product.
    products = tile.bm * tile.bn * tile.bk / (4096 * 0.6) * used
    bytes_loaded = (tile.bm + tile.bn) * tile.bk * 2 / 40 * used
    step = max(products, bytes_loaded, 150.0)
    finish = 1500 + tile.bm * tile.bn * (2 + 8 * (splits if splits > 1 else 0)) / 30 * used
    return float(rounds * (steps * step + finish))


class _ImplicitGemmConvolution:
    """`Convolution` with one tile."""

    def __init__(
        self,
        resources: GpuResources,
        shape: ConvShape,
        epilogue: Epilogue,
        weights: Array,
        bias: Array | None,
        tile: GemmTile,
        splits: int,
    ) -> None:
        self._resources, self._shape = resources, shape
        self._tile, self._splits = tile, splits
        options = {
            **element_options(np.float16, epilogue),
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
        filters = np.ascontiguousarray(weights, dtype=np.float16)
        self._constants = resources.constants(filters, bias_of(epilogue, bias, shape), arrivals)
        self._partial = resources.workspace(4 * splits * int(np.prod(shape.y_shape))) if splits > 1 else 0

    @property
    def workspace_bytes(self) -> int:
        """See `Convolution.workspace_bytes`."""
        return self._resources.workspace_bytes

    def launch(self, stream: CudaStream, x: int, y: int, residual: int = 0, rows: int | None = None) -> None:
        """See `Convolution.launch`."""
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

    def close(self) -> None:
        """See `Convolution.close`."""
        self._resources.close()
