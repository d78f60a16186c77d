"""Implicit GEMM with `wgmma` and the tensor copy engine (TMA), for GPUs of compute capability 9.0.

The product is that of `implicit_gemm`: a row for each output pixel, a column for each output channel. One warp copies, the
warpgroups of a block multiply: `wgmma` reads both tiles from shared memory, so that no thread loads fragments.

Layout: x (n, h, w, c), weights (k, r, s, c), y (n, out_h, out_w, k), all float16; float32 sums, bias and partial sums.
Copies: a step is BM output pixels and BN output channels by 64 input channels of one tap. For the input the copy engine is in
im2col mode: it goes over the output pixels with the convolution's stride, and fills the padding and rows behind the last pixel
with zeros. A convolution of 1x1 without padding and stride is a plain matrix and is copied as one. Rows of 128 bytes are swizzled
by 128 bytes, as the descriptors of `wgmma` say.
Pipeline: STAGES tiles in a ring, each with a barrier that counts copied bytes and one that counts the warpgroups that have read
it. A warpgroup keeps one step of products in flight.
Epilogue: behind the steps of a tile the ring has one or two places for its output. The residual is copied there while the
products run; the warpgroups add their sums, bias and ReLU in place, and the copy engine stores the result. A block takes one tile
after the other, so that the copies of the next tile start meanwhile.
Split: with few tiles, the blocks of a cluster share a tile. Each sums a part of the steps, then all read each other's shared
memory and finish a part of the rows. The parts are added in order.

Budget of a block, e.g. 128x256 with 2 warpgroups and 4 stages: 192 KiB of shared memory, 288 threads of 168 registers, 128 of
them sums; one block on a multiprocessor. `HopperTile.blocks` has the number for each tile. One warp copies, in place of a
warpgroup, so that all threads can have as many registers as they need: the kernel does without `setmaxnreg`.

Sources: PTX ISA, "wgmma.mma_async", "Matrix descriptor format", "im2col mode"; CUTLASS documentation, "Efficient GEMM in CUDA"
(warp specialization).
"""

from __future__ import annotations

import ctypes
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
from headrace_lab.kernels.tensor_maps import BOX_CHANNELS, TensorMap, encode_tiles, encode_windows

HOPPER = f"{FOLDER}/hopper.cuh"
_KERNEL = "implicit_gemm_hopper"
_CAPABILITY = (9, 0)
# Outputs of a tile that blocks share; larger ones leave too few blocks.
_MAX_SHARED_TILE = 64 * 128
# Corners of the window are numbers of 8 bits in im2col mode.
_MAX_PAD = 127
_MAX_STRIDE = 8
# Maps of the input that are kept, one for each buffer and batch.
_MAX_MAPS = 64


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Work of a block.

    Attributes:
        bm: output pixels; 64 or 128 for each warpgroup.
        bn: output channels: 64, 128 or 256.
        warpgroups: warpgroups that multiply, each with its part of the pixels.
        stages: tiles of the pipeline in shared memory.
        blocks: blocks on a multiprocessor.
    """

    bm: int
    bn: int
    warpgroups: int
    stages: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{BOX_CHANNELS} {self.warpgroups} warpgroups {self.stages} stages"

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups and the warp that copies."""
        return self.warpgroups * 128 + 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the stages, then the float32 sums in the same place."""
        return max(self.stages * (self.bm + self.bn) * BOX_CHANNELS * 2, self.bm * (self.bn + 8) * 4)


TILES: tuple[HopperTile, ...] = (
    HopperTile(128, 256, 2, 4, 1),
    HopperTile(256, 128, 2, 4, 1),
    HopperTile(128, 128, 2, 6, 1),
    HopperTile(128, 128, 2, 3, 2),
    HopperTile(128, 128, 1, 3, 2),
    HopperTile(256, 64, 2, 5, 1),
    HopperTile(128, 64, 2, 4, 2),
    HopperTile(64, 256, 1, 5, 1),
    HopperTile(64, 128, 1, 4, 2),
    HopperTile(64, 64, 1, 4, 3),
    HopperTile(64, 64, 1, 8, 1),
)
SPLITS = (1, 2, 4, 8)
"""Blocks of a cluster; 8 is the largest size that every GPU with clusters supports."""


def _steps(shape: ConvShape) -> int:
    return shape.r * shape.s * -(-shape.c // BOX_CHANNELS)


def _is_pointwise(shape: ConvShape) -> bool:
    """Return whether the input is copied as a matrix of pixels and channels."""
    return shape.r == shape.s == shape.stride == 1 and shape.pad == 0


class _HopperConvolution(PreparedConvolution):
    """`Convolution` with one tile."""

    def __init__(self, resources: GpuResources, operation: ConvOperation, tile: HopperTile, splits: int) -> None:
        super().__init__(resources, operation)
        shape = operation.shape
        self._tile, self._splits = tile, splits
        self._pointwise = _is_pointwise(shape)
        options = {
            **element_options(np.float16, operation.epilogue),
            "BM": tile.bm,
            "BN": tile.bn,
            "CONSUMERS": tile.warpgroups,
            "STAGES": tile.stages,
            "BLOCKS": tile.blocks,
            "POINTWISE": int(self._pointwise),
            "SPLITS": splits,
        }
        headers = (ELEMENTS, EPILOGUE, HOPPER)
        self._kernel = resources.load_with_structures(
            "implicit_gemm_hopper.cu", _KERNEL, options, headers, tile.shared_bytes
        )
        resources.kernels_complete()
        filters = np.ascontiguousarray(operation.weights, dtype=np.float16)
        address, self._bias = resources.constants(filters, operation.float_bias())
        sizes = shape.c, shape.r * shape.s, shape.k
        with resources.current():
            self._weights_map = encode_tiles(address, sizes, (BOX_CHANNELS, 1, tile.bn))
        self._maps: dict[tuple[int, int, int, int], tuple[TensorMap, TensorMap, TensorMap]] = {}
        self._has_residual = operation.epilogue.residual
        self._resident_blocks = tile.blocks * resources.multiprocessors()

    def launch(self, stream: CudaStream, x: int, y: int, residual: int = 0, rows: int | None = None) -> None:
        """Queue the convolution; allocates nothing and waits for nothing, so a CUDA graph can capture it."""
        shape = self._shape if rows is None else replace(self._shape, n=rows)
        tiles = tiles_of(shape, self._tile.bm, self._tile.bn)
        blocks = tiles * self._splits if self._splits > 1 else min(tiles, self._resident_blocks)
        x_map, residual_map, y_map = self._maps_of(shape, x, residual, y)
        pixels = shape.n * shape.out_h * shape.out_w
        sizes = pixels, shape.c, shape.k, shape.out_h, shape.out_w, shape.r, shape.s, shape.stride, shape.pad
        self._kernel.launch(
            blocks,
            self._tile.threads,
            stream,
            *(x_map, self._weights_map, residual_map, y_map),
            *map(ctypes.c_void_p, (self._bias, residual, y)),
            *map(ctypes.c_int, sizes),
        )

    def _maps_of(self, shape: ConvShape, x: int, residual: int, y: int) -> tuple[TensorMap, TensorMap, TensorMap]:
        """Maps of input, residual and output; the last ones are kept, since buffers are used again."""
        key = shape.n, x, residual, y
        maps = self._maps.get(key)
        if maps is None:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            rows = self._tile.bm // self._tile.warpgroups
            y_map = output_map(y, shape, rows)
            residual_map = output_map(residual, shape, rows) if self._has_residual else y_map
            maps = self._maps[key] = (input_map(x, shape, self._tile.bm, self._pointwise), residual_map, y_map)
        return maps


def input_map(x: int, shape: ConvShape, pixels: int, pointwise: bool) -> TensorMap:
    """Return the map of the input at an address, for copies of so many output pixels."""
    if pointwise:
        return encode_tiles(x, (shape.c, shape.n * shape.h * shape.w), (BOX_CHANNELS, pixels))
    sizes = shape.c, shape.w, shape.h, shape.n
    return encode_windows(x, sizes, (shape.s, shape.r), shape.stride, shape.pad, pixels)


def output_map(address: int, shape: ConvShape, rows: int) -> TensorMap:
    """Return the map of a tensor of the output's shape, for copies of so many pixels."""
    return encode_tiles(address, (shape.k, shape.n * shape.out_h * shape.out_w), (BOX_CHANNELS, rows))


class ImplicitGemmHopper(HalfGemm[HopperTile]):
    """Implicit GEMM with `wgmma`; arguments as for `HalfGemm`."""

    name = "implicit-gemm-hopper"
    tiles = TILES
    split_counts = SPLITS
    measured = measured_tiles(name)
    convolution = _HopperConvolution

    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """Return the reason why the algorithm does not support a shape; "" if it does."""
        if capability[0] > _CAPABILITY[0]:
            return f"compute capability {capability[0]}.{capability[1]}: `wgmma` is of 9.0 only; use implicit-gemm"
        if shape.pad > _MAX_PAD or shape.stride > _MAX_STRIDE:
            return (
                f"padding {shape.pad} and stride {shape.stride}: the copy engine supports at most {_MAX_PAD} and "
                f"{_MAX_STRIDE}; use implicit-gemm"
            )
        return refusal(shape, dtype, capability, _CAPABILITY)

    def kernel_key(self, shape: ConvShape) -> tuple[object, ...]:
        """Return the properties of a shape that the compiled kernel depends on: whether the input is a matrix."""
        return (_is_pointwise(shape),)

    def can_split(self, shape: ConvShape, tile: HopperTile, splits: int) -> bool:
        """Return whether so many blocks may share a tile. As for `ImplicitGemm`, and the tile is small."""
        if tile.bm * tile.bn > _MAX_SHARED_TILE or splits > _steps(shape) // 2:
            return False
        return tiles_of(shape, tile.bm, tile.bn) * splits <= 4 * MULTIPROCESSORS

    def cycles(self, shape: ConvShape, tile: HopperTile, splits: int) -> float:
        """Return the estimated time in cycles. Rounds of blocks, each with its steps, and what a block does besides."""
        blocks = tiles_of(shape, tile.bm, tile.bn) * splits
        rounds = -(-blocks // (MULTIPROCESSORS * tile.blocks))
        used = min(tile.blocks, -(-blocks // MULTIPROCESSORS))
        products = tile.bm * tile.bn * BOX_CHANNELS / (4096 * 0.8) * used
        bytes_loaded = (tile.bm + tile.bn) * BOX_CHANNELS * 2 / 50 * used
        step = max(products, bytes_loaded, 100.0)
        finish = 1500 + tile.bm * tile.bn * (2 if splits == 1 else 4) / 30 * used
        return float(rounds * (-(-_steps(shape) // splits) * step + finish))
