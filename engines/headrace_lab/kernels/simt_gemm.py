"""FP32 implicit GEMM without Tensor Cores: the yardstick of the FP32 algorithms.

The windows of the input are the rows of a matrix (pixels, r * s * c) that exists only in shared memory; weights are (r * s *
c, k), padded with zeros to whole tiles. A block of 64 to 256 threads computes 64x64 to 128x128 outputs, a thread 8x8 of
them: 64 registers of sums, 40 of operands, at most 128 in blocks of 256 threads, 168 in smaller ones. Shared memory has two
stages of (rows, 16 + 4) inputs and (16, columns) weights, 18 to 36 KiB, filled by `cp.async` while the other stage is
multiplied. A sum over r * s * c is split over several blocks if the output alone would not fill the GPU; a second kernel
adds up the parts (Chetlur et al. 2014, "cuDNN: Efficient Primitives for Deep Learning"; NVIDIA, CUTLASS, "Efficient GEMM in
CUDA").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from headrace.runtimes.cuda.driver import CudaStream
from headrace.runtimes.cuda.kernels.loading import Kernels

from headrace_lab.kernels.base import Convolution, ConvShape, Epilogue
from headrace_lab.kernels.resources import (
    ELEMENTS,
    FOLDER,
    Algorithm,
    ConvOperation,
    Floats,
    GpuResources,
    PreparedConvolution,
    element_options,
)

HEADERS = (ELEMENTS, f"{FOLDER}/async.cuh")
# Largest second dimension of a CUDA grid.
_MAX_GRID_Y = 65_535
# Threads of a multiprocessor with 128 registers each. Blocks of fewer threads copy more and need up to 168.
_THREADS_PER_MULTIPROCESSOR = 512
# Least depth of a part of a split sum, in tiles: below, adding up costs more than it saves.
_MIN_SPLIT_TILES = 4
_MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a block's tile.

    Attributes:
        m: rows of the output, a multiple of 16.
        n: columns, 64 or 128.
        k: depth of a stage.
        stages: stages in shared memory.
        thread_rows: rows of a thread, which has 8 columns.
    """

    m: int
    n: int
    k: int = 16
    stages: int = 2
    thread_rows: int = 8

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.m // self.thread_rows * self.n // 8

    def blocks(self, rows: int, columns: int) -> int:
        """Blocks of a product."""
        return -(-rows // self.m) * -(-columns // self.n)

    def options(self) -> dict[str, int]:
        """Macros of `simt_gemm.cu`."""
        return {
            "TILE_M": self.m,
            "TILE_N": self.n,
            "TILE_K": self.k,
            "STAGES": self.stages,
            "THREAD_ROWS": self.thread_rows,
            "THREADS": self.threads,
            "BLOCKS": (384 if self.thread_rows == 8 and self.threads < 256 else _THREADS_PER_MULTIPROCESSOR)
            // self.threads,
        }


TILES = (Tile(128, 128), Tile(128, 64), Tile(64, 64))
# Products of few rows are limited by reading the factors: more stages keep more copies in flight.
PRODUCT_TILES = (*TILES, Tile(32, 64, 16, 4, 4), Tile(16, 64, 16, 4, 2))


def fitting_tile(rows: int, columns: int, batch: int, count: int) -> Tile:
    """Return the tile of a batch of products: the largest whose blocks fill a number of multiprocessors, else the smallest.

    Tiles with twice as many rows as the product are left out.
    """
    fitting = [
        tile for tile in PRODUCT_TILES if (tile.n == 64 or tile.n < 2 * columns) and (tile.m == 16 or tile.m < 2 * rows)
    ]
    for tile in fitting:
        if tile.blocks(rows, columns) * batch * tile.threads >= count * 256:
            return tile
    return fitting[-1]


def split_count(tile: Tile, rows: int, columns: int, depth: int, groups: int, count: int) -> int:
    """Return the number of parts of a sum with which the blocks fill a number of multiprocessors."""
    threads = tile.blocks(rows, columns) * groups * tile.threads
    parts = count * _THREADS_PER_MULTIPROCESSOR // threads
    return max(1, min(parts, -(-depth // tile.k) // _MIN_SPLIT_TILES, _MAX_SPLITS))


def padded_factors(factors: Floats, tile: Tile) -> Floats:
    """Pad (batch, depth, columns) with zeros to whole tiles."""
    _, depth, columns = factors.shape
    return np.pad(factors, ((0, 0), (0, -depth % tile.k), (0, -columns % tile.n)))


class MatrixProducts:
    """A batch of products in float32: (rows, depth) * (depth, columns), the second factors being constant.

    Args:
        resources: of the convolution.
        tile: of a block.
        factors: (batch, depth, columns).
        splits: parts of a sum, which the reader of the products adds up.

    Attributes:
        splits: parts of a sum.
    """

    def __init__(self, resources: GpuResources, tile: Tile, factors: Floats, splits: int = 1) -> None:
        self._batch, depth, self._columns = factors.shape
        self._tile, self.splits = tile, splits
        options = {
            **tile.options(),
            **element_options(np.float32, Epilogue()),
            "SPLITS": splits,
            "PLAIN": 1,
            "DEPTH": depth,
            "COLUMNS": self._columns,
        }
        self._kernels = resources.load("simt_gemm.cu", options, {"multiply_tiles": "PPPPPi"}, HEADERS)
        (self._factors,) = resources.constants(padded_factors(factors, tile))

    def launch(self, stream: CudaStream, x: int, y: int, rows: int) -> None:
        """Queue the products.

        Args:
            stream: stream to queue on.
            x: address of (batch, rows, depth).
            y: address of (splits, batch, rows, columns).
            rows: of each product.
        """
        grid = self._tile.blocks(rows, self._columns), self._batch * self.splits
        self._kernels.launch("multiply_tiles", grid, self._tile.threads, stream, x, self._factors, 0, 0, y, rows)


class _SimtGemmConvolution(PreparedConvolution):
    """`Convolution` by FP32 implicit GEMM."""

    def __init__(self, resources: GpuResources, operation: ConvOperation, tile: Tile, splits: int) -> None:
        super().__init__(resources, operation)
        shape = operation.shape
        self._tile, self._splits = tile, splits
        options = {**operation.options(), **tile.options(), "SPLITS": splits, "PLAIN": 0}
        types = {"multiply_tiles": "PPPPPi", **({"add_splits": "PPPPi"} if splits > 1 else {})}
        self._kernels: Kernels = resources.load("simt_gemm.cu", options, types, HEADERS)
        resources.kernels_complete()
        outputs = shape.k // shape.groups
        factors = operation.weights.astype(np.float32).reshape(shape.groups, outputs, -1).transpose(0, 2, 1)
        self._factors, self._bias = resources.constants(
            np.ascontiguousarray(padded_factors(factors, tile)), operation.float_bias()
        )
        pixels = shape.n * shape.out_h * shape.out_w
        self._partial = resources.workspace(splits * pixels * shape.k * 4) if splits > 1 else 0
        self._channels_at_once = 1 if outputs % 4 else 4

    def launch(self, stream: CudaStream, x: int, y: int, residual: int = 0, rows: int | None = None) -> None:
        """Queue the convolution; see `Convolution`."""
        shape, tile = self._shape, self._tile
        pixels = (shape.n if rows is None else rows) * shape.out_h * shape.out_w
        grid = tile.blocks(pixels, shape.k // shape.groups), shape.groups * self._splits
        target = self._partial or y
        arguments = (x, self._factors, self._bias, residual, target, pixels)
        self._kernels.launch("multiply_tiles", grid, tile.threads, stream, *arguments)
        if self._splits > 1:
            blocks = -(-pixels * shape.k // (self._channels_at_once * tile.threads))
            sums = (self._partial, self._bias, residual, y, pixels)
            self._kernels.launch("add_splits", (blocks, 1), tile.threads, stream, *sums)


class SimtGemmAlgorithm(Algorithm):
    """`Algorithm`: FP32 implicit GEMM with one tile.

    Args:
        tile: of a block.
        splits: parts of a sum; None: as many as fill the GPU.
    """

    name = "simt-gemm"

    def __init__(self, tile: Tile, splits: int | None = None) -> None:
        self._tile = tile
        self._splits = splits
        self.variant = str(tile) + (f" {splits} splits" if splits else "")

    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """Supports float32 on GPUs since Ampere, up to 2**31 - 1 pixels."""
        if np.dtype(dtype) != np.float32:
            return "it multiplies float32 only: use implicit-gemm for float16"
        if capability < (8, 0):
            return f"it needs cp.async, which compute capability {capability[0]}.{capability[1]} lacks: use direct"
        if shape.n * shape.out_h * shape.out_w >= 2**31:
            return "it numbers output pixels with 31 bits: reduce the batch"
        if shape.groups * _MAX_SPLITS > _MAX_GRID_Y:
            return (
                f"it supports {_MAX_GRID_Y // _MAX_SPLITS} groups at most, not {shape.groups}: use depthwise or direct"
            )
        return ""

    def prepared(self, resources: GpuResources, operation: ConvOperation) -> Convolution:
        """Prepare a supported shape with resources that are closed if this raises."""
        shape = operation.shape
        pixels, depth = shape.n * shape.out_h * shape.out_w, shape.r * shape.s * (shape.c // shape.groups)
        outputs = shape.k // shape.groups
        splits = self._splits or split_count(
            self._tile, pixels, outputs, depth, shape.groups, resources.multiprocessors()
        )
        splits = min(splits, -(-depth // self._tile.k))
        return _SimtGemmConvolution(resources, operation, self._tile, splits)
