"""Implicit GEMM of float16: the refusals, the choice of a tile and the reference that all kernels share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from headrace_lab.kernels.base import Convolution, ConvShape
from headrace_lab.kernels.measured_tiles import MeasuredTile, nearest
from headrace_lab.kernels.resources import (
    FOLDER,
    Algorithm,
    ConvOperation,
    GpuResources,
)

EPILOGUE = f"{FOLDER}/gemm_epilogue.cuh"
# Multiprocessors of an H100 SXM and of an H200.
MULTIPROCESSORS = 132
# Addresses are 32-bit numbers of elements.
_MAX_ELEMENTS = (1 << 31) - 1
# The taps inside of the input are 16 bits for rows and for columns.
_MAX_KERNEL = 16
# 16 bytes of float16.
_CHANNELS = 8

TileT = TypeVar("TileT")


class HalfGemm(Algorithm, Generic[TileT]):
    """An algorithm with one tile, or with the tile of the nearest measured layer for each shape.

    Args:
        tile: work of a block; None to select it.
        splits: blocks that share a tile.

    Attributes:
        name: of the algorithm.
        tiles: all tiles of the kernel.
        split_counts: numbers of blocks that `variants` proposes for a tile.
        measured: the fastest tile of measured layers.
        convolution: class of a prepared convolution.
        variant: the tile and the split, "auto" if they are selected for each shape.
        tile: work of a block; None if it is selected for each shape.
        splits: blocks that share a tile.
    """

    name: str
    tiles: tuple[TileT, ...]
    split_counts: tuple[int, ...]
    measured: list[MeasuredTile]
    convolution: Callable[[GpuResources, ConvOperation, TileT, int], Convolution]

    def __init__(self, tile: TileT | None = None, splits: int = 1) -> None:
        self.tile, self.splits = tile, splits
        self.variant = "auto" if tile is None else f"{tile}" + (f" split {splits}" if splits > 1 else "")

    @abstractmethod
    def can_split(self, shape: ConvShape, tile: TileT, splits: int) -> bool:
        """Return whether so many blocks may share a tile."""

    @abstractmethod
    def cycles(self, shape: ConvShape, tile: TileT, splits: int) -> float:
        """Return the estimated time in cycles."""

    def variants(self, shape: ConvShape) -> list[Self]:
        """Return the tiles and splits that are worth measuring for a shape.

        The first is that of the nearest measured layer; the others are in the order of a cost model.
        """
        fastest = nearest(self.measured, shape)
        candidates = [
            (tile, splits)
            for tile in self.tiles
            for splits in self.split_counts
            if splits == 1 or self.can_split(shape, tile, splits)
        ]
        candidates.sort(key=lambda each: ((str(each[0]), each[1]) != fastest, self.cycles(shape, *each)))
        return [type(self)(*each) for each in candidates]

    def prepared(self, resources: GpuResources, operation: ConvOperation) -> Convolution:
        """Prepare a supported shape with resources that are closed if this raises."""
        selected = self if self.tile is not None else self.variants(operation.shape)[0]
        assert selected.tile is not None
        return self.convolution(resources, operation, selected.tile, selected.splits)


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
