"""Winograd's minimal filtering for 3x3 kernels with stride 1: F(2x2, 3x3) and F(4x4, 3x3).

Three kernels: the input is cut into overlapping tiles of 4x4 or 6x6 and transformed to (positions, tiles, c); one matrix
product for each of the 16 or 36 positions; the products are transformed to tiles of 2x2 or 4x4 outputs, with the epilogue.
An output then needs 4 or 2.25 multiplications for each input channel instead of 9. Kernels are transformed in float64 on the
host.

In float16 the transforms are computed in float32; transformed inputs are stored in float16, scaled by 2**-2 (F(2x2)) or
2**-7 (F(4x4)) so that no finite input overflows, and transformed kernels, scaled to at most 1024. Both scales are powers of
two. Products are `half_products` with float32 results. The output transform amplifies the two roundings to 11 bits: on
normal random operands the relative error ||y - exact|| / ||exact|| is 6e-4 for F(2x2) and 3e-3 for F(4x4), the largest error
1e-3 and 1e-2 of the largest output; one rounding of the result alone is 2e-4 (float32: 5e-7 and 3e-6).

A thread of a transform has one tile of 1, 2 or 4 channels in registers, at most 96; no shared memory. Products of float32
are the tiles of `simt_gemm`. Transformed inputs and products are written and read once each, 2.25 (F(4x4)) to 4 (F(2x2))
times the size of input and output. Products of small batches are limited by reading the transformed kernels, which are 4
(F(4x4)) or 1.8 times the size of the kernels: their tiles have few rows, and their sums are split over several blocks; the
output transform adds the parts.

The source of the matrices is Lavin and Gray (2015), "Fast Algorithms for Convolutional Neural Networks".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from headrace.core.tensor import Array
from headrace.runtimes.cuda.driver import CudaStream
from headrace.runtimes.cuda.kernels.loading import is_half

from headrace_lab.kernels.base import Convolution, ConvShape
from headrace_lab.kernels.half_products import TILES as HALF_TILES
from headrace_lab.kernels.half_products import HalfProducts, Halves, fitting_half_tile
from headrace_lab.kernels.resources import (
    Algorithm,
    ChunkedConvolution,
    ConvOperation,
    Floats,
    GpuResources,
    as_floats,
    widest,
)
from headrace_lab.kernels.simt_gemm import (
    PRODUCT_TILES,
    MatrixProducts,
    fitting_tile,
    split_count,
)

_THREADS = 64
# Threads of a multiprocessor below which a thread of a transform has one channel.
_SMALL_THREADS = 1024
_MAX_SPLITS = 8
# Scratch memory of a chunk of images, in bytes. Chunks that fit into the L2 cache are slower: each ends with idle processors.
_CHUNK_BYTES = 2 << 30

# Matrices of the transforms by the size of a tile.
INPUT = {
    2: ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    4: (
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
}
KERNEL = {
    2: ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    4: (
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
}
OUTPUT = {
    2: ((1, 1, 1, 0), (0, 1, -1, -1)),
    4: ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
}
# In float16: by the size of a tile, the power of two that transformed inputs are divided by, at least the square of the
# largest sum of magnitudes in a row of the matrix; and the greatest magnitude of transformed weights.
_INPUT_SHIFT = {2: 2, 4: 7}
_LARGEST_HALF_WEIGHT = 1024
_MAX_WEIGHT_SHIFT = 40


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of a shape's output.

    Attributes:
        size: outputs of a tile in each direction, 2 or 4.
        high: tiles above each other in an image.
        wide: tiles beside each other.
    """

    size: int
    high: int
    wide: int

    @classmethod
    def of(cls, shape: ConvShape, size: int) -> Tiling:
        """Return the tiles of a shape."""
        return cls(size, -(-shape.out_h // size), -(-shape.out_w // size))

    @property
    def per_image(self) -> int:
        """Tiles of an image."""
        return self.high * self.wide

    @property
    def positions(self) -> int:
        """Values of a transformed tile of one channel."""
        return (self.size + 2) ** 2


def transformed_weights(weights: Array, size: int) -> Floats:
    """Transform kernels (k, 3, 3, c) to (positions, c, k), computed in float64."""
    matrix = np.array(KERNEL[size])
    outputs, _, _, inputs = weights.shape
    taps = weights.astype(np.float64).transpose(1, 2, 3, 0).reshape(9, -1)
    transformed: Floats = (np.kron(matrix, matrix) @ taps).astype(np.float32).reshape(-1, inputs, outputs)
    return transformed


def half_weights(transformed: Floats) -> tuple[Halves, int]:
    """Round transformed weights to float16 after scaling by a power of two.

    Returns:
        (positions, k, c), and the exponent of the scale.
    """
    largest = float(np.abs(transformed).max())
    shift = math.floor(math.log2(_LARGEST_HALF_WEIGHT / largest)) if 0 < largest < math.inf else 0
    shift = max(-_MAX_WEIGHT_SHIFT, min(shift, _MAX_WEIGHT_SHIFT))
    return np.ldexp(transformed.transpose(0, 2, 1), shift).astype(np.float16), shift


def transformed_input(shape: ConvShape, x: Floats, size: int) -> Floats:
    """Transform the input to (positions, tiles, c)."""
    tiling, pad = Tiling.of(shape, size), shape.pad
    below, right = (
        tiles * size + 2 - pad - length for tiles, length in ((tiling.high, shape.h), (tiling.wide, shape.w))
    )
    padded = np.pad(x, ((0, 0), (pad, max(below, 0)), (pad, max(right, 0)), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size + 2, size + 2), (1, 2))
    windows = windows[:, : tiling.high * size : size, : tiling.wide * size : size]
    matrix = np.array(INPUT[size], np.float32)
    result = np.einsum("ip,nhwcpq,jq->ijnhwc", matrix, windows, matrix, optimize=True)
    return np.ascontiguousarray(result.reshape(tiling.positions, -1, shape.c))


def transformed_output(shape: ConvShape, products: Floats, size: int) -> Floats:
    """Transform products (positions, tiles, k) to the output."""
    tiling = Tiling.of(shape, size)
    matrix = np.array(OUTPUT[size], np.float32)
    tiles = products.reshape(size + 2, size + 2, shape.n, tiling.high, tiling.wide, shape.k)
    result = np.einsum("ip,pqnhwk,jq->nhiwjk", matrix, tiles, matrix, optimize=True)
    y: Floats = result.reshape(shape.n, tiling.high * size, tiling.wide * size, shape.k)
    return y[:, : shape.out_h, : shape.out_w]


@dataclass(frozen=True, slots=True)
class ProductBlocks:
    """Division of the products over blocks.

    Attributes:
        m: tiles of a block, 16 to 128.
        n: output channels of a block, 64 or 128.
        splits: parts of a sum.
    """

    m: int
    n: int
    splits: int = 1

    def __str__(self) -> str:
        return f"{self.m}x{self.n}" + (f" {self.splits} splits" if self.splits > 1 else "")


_LARGE_BLOCKS = (ProductBlocks(128, 128), ProductBlocks(128, 64), ProductBlocks(64, 64))
_SMALL_BLOCKS = tuple(ProductBlocks(m, 64, splits) for m in (64, 32, 16) for splits in (1, 2, 4))
# Tiles of a batch from which on small blocks are not proposed.
_LARGE_TILES = 512
# Blocks with which a GPU is filled; the best proposals are near it.
_FILLING_BLOCKS = 400


def proposals(tiling: Tiling, shape: ConvShape) -> list[ProductBlocks]:
    """Return the divisions that are worth measuring for a shape, the most promising first."""
    rows = shape.n * tiling.per_image
    if rows >= _LARGE_TILES:
        return [blocks for blocks in _LARGE_BLOCKS if blocks.n == 64 or blocks.n < 2 * shape.k]

    def distance(blocks: ProductBlocks) -> float:
        count = -(-rows // blocks.m) * -(-shape.k // blocks.n) * blocks.splits * tiling.positions
        return abs(math.log(count / _FILLING_BLOCKS))

    possible = [
        blocks for blocks in _SMALL_BLOCKS if (blocks.m == 16 or blocks.m < 2 * rows) and blocks.splits * 64 <= shape.c
    ]
    return sorted(possible or _SMALL_BLOCKS[-3:-2], key=distance)


def _float_products(
    resources: GpuResources, factors: Floats, rows: int, count: int, blocks: ProductBlocks | None
) -> MatrixProducts:
    """Open the products of float32 for the tiles of a chunk, on a GPU with `count` multiprocessors."""
    batch, depth, columns = factors.shape
    if blocks is not None:
        tile = next(tile for tile in PRODUCT_TILES if (tile.m, tile.n) == (blocks.m, blocks.n))
        return MatrixProducts(resources, tile, factors, blocks.splits)
    tile = fitting_tile(rows, columns, batch, count)
    splits = min(split_count(tile, rows, columns, depth, batch, count), _MAX_SPLITS)
    return MatrixProducts(resources, tile, factors, splits)


def _half_products(
    resources: GpuResources, factors: Halves, rows: int, count: int, blocks: ProductBlocks | None
) -> HalfProducts:
    """Open the products of float16; as `_float_products`."""
    batch, columns, depth = factors.shape
    if blocks is not None:
        tile = next(tile for tile in HALF_TILES if (tile.m, tile.n) == (blocks.m, blocks.n))
        return HalfProducts(resources, tile, factors, blocks.splits)
    tile = fitting_half_tile(rows, columns, batch, count)
    return HalfProducts(resources, tile, factors, tile.splits(rows, columns, batch, depth, count))


class _WinogradConvolution(ChunkedConvolution):
    """`Convolution` by Winograd's algorithm."""

    def __init__(
        self,
        resources: GpuResources,
        operation: ConvOperation,
        tiling: Tiling,
        chunk_bytes: int,
        blocks: ProductBlocks | None,
    ) -> None:
        shape = operation.shape
        item_bytes = np.dtype(operation.dtype).itemsize
        per_image = tiling.positions * tiling.per_image * (shape.c * item_bytes + shape.k * 4)
        super().__init__(resources, operation, tiling.per_image, chunk_bytes // per_image)
        half = is_half(operation.dtype)
        tiles = self._chunk_tiles
        count = resources.multiprocessors()
        options = {**operation.options(), "HALF_PRODUCTS": half}
        transformed = transformed_weights(operation.weights, tiling.size)
        self._products: MatrixProducts | HalfProducts
        if half:
            factors, shift = half_weights(transformed)
            options["INPUT_SHIFT"] = _INPUT_SHIFT[tiling.size]
            options["OUTPUT_EXPONENT"] = _INPUT_SHIFT[tiling.size] - shift
            self._products = _half_products(resources, factors, tiles, count, blocks)
        else:
            self._products = _float_products(resources, transformed, tiles, count, blocks)
        splits = self._products.splits
        self._kernels, self._threads = [], []
        for name, types, channels in (("transform_input", "PPi", shape.c), ("transform_output", "PPPPi", shape.k)):
            # Few tiles are spread over more threads.
            is_small = tiles * channels < count * _SMALL_THREADS
            wide = 1 if is_small else widest(channels, *((4, 2) if tiling.size == 2 else (2,)))
            options |= {"TILE": tiling.size, "THREADS": _THREADS, "CHANNELS": wide, "SPLITS": splits}
            self._kernels.append(resources.load("winograd.cu", options, {name: types}))
            self._threads.append(channels // wide)
        resources.kernels_complete()
        (self._bias,) = resources.constants(operation.float_bias()) if operation.epilogue.bias else [0]
        self._inputs = resources.workspace(tiling.positions * tiles * shape.c * item_bytes)
        self._outputs = resources.workspace(splits * tiling.positions * tiles * shape.k * 4)

    def launch_chunk(self, stream: CudaStream, x: int, y: int, residual: int, tiles: int) -> None:
        """Queue a chunk of so many tiles; the addresses are those of its first image."""
        grids = [(-(-tiles * threads // _THREADS), 1) for threads in self._threads]
        self._kernels[0].launch("transform_input", grids[0], _THREADS, stream, x, self._inputs, tiles)
        self._products.launch(stream, self._inputs, self._outputs, tiles)
        results = (self._outputs, self._bias, residual, y, tiles)
        self._kernels[1].launch("transform_output", grids[1], _THREADS, stream, *results)


class WinogradAlgorithm(Algorithm):
    """`Algorithm`: F(2x2, 3x3) or F(4x4, 3x3).

    Args:
        size: outputs of a tile in each direction, 2 or 4.
        chunk_bytes: scratch memory of a chunk of images.
        blocks: division of the products; None to select it for each shape.
    """

    def __init__(self, size: int, chunk_bytes: int = _CHUNK_BYTES, blocks: ProductBlocks | None = None) -> None:
        self._size = size
        self._chunk_bytes = chunk_bytes
        self._blocks = blocks
        self.name = f"winograd-f{size}"
        self.variant = "auto" if blocks is None else str(blocks)

    def variants(self, shape: ConvShape) -> list[Algorithm]:
        """Return the divisions of the products that are worth measuring for a shape."""
        tiling = Tiling.of(shape, self._size)
        return [WinogradAlgorithm(self._size, self._chunk_bytes, blocks) for blocks in proposals(tiling, shape)]

    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """Supports 3x3 kernels with stride 1 and one group."""
        if (shape.r, shape.s, shape.stride) != (3, 3, 1):
            return "it supports 3x3 kernels with stride 1 only: use implicit-gemm or simt-gemm"
        if shape.groups > 1:
            return "it supports one group only: use depthwise, simt-gemm or direct"
        if capability < (8, 0):
            return f"it needs cp.async, which compute capability {capability[0]}.{capability[1]} lacks: use direct"
        if is_half(dtype) and (shape.c % 8 or shape.k % 2):
            return f"{shape.c} and {shape.k} channels: float16 needs multiples of 8 and 2; pad the channels with zeros"
        return ""

    def prepared(self, resources: GpuResources, operation: ConvOperation) -> Convolution:
        """Prepare a supported shape with resources that are closed if this raises."""
        tiling = Tiling.of(operation.shape, self._size)
        return _WinogradConvolution(resources, operation, tiling, self._chunk_bytes, self._blocks)

    def sums(self, shape: ConvShape, dtype: npt.DTypeLike, x: Array, weights: Array) -> Floats:
        """Compute the algorithm's sums in float32 with NumPy, with its roundings, for `reference`. The same transforms and
        products.
        """
        inputs = transformed_input(shape, as_floats(x, dtype), self._size)
        transformed = transformed_weights(weights, self._size)
        if is_half(dtype):
            down = _INPUT_SHIFT[self._size]
            factors, shift = half_weights(transformed)
            rounded = as_floats(np.ldexp(inputs, -down), np.float16)
            products = np.ldexp(rounded @ factors.astype(np.float32).transpose(0, 2, 1), down - shift)
        else:
            products = inputs @ transformed
        return transformed_output(shape, products, self._size)
