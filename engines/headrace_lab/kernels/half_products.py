"""A batch of matrix products of float16 on Tensor Cores with float32 results, for Winograd's positions.

A block of 4 or 8 warps computes 64x64 or 128x128 results; `cp.async` fills two or three stages of 64 inner elements in 32 to
96 KiB of shared memory, `ldmatrix` and `mma.sync.m16n8k16` multiply them, about 128 registers a thread. The results leave
the registers as they are: four threads store 32 bytes of a row.

Sources: as for `implicit_gemm`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from headrace.runtimes.cuda.driver import CudaStream

from headrace_lab.kernels.implicit_gemm import TENSOR_CORES
from headrace_lab.kernels.resources import GpuResources

Halves = npt.NDArray[np.float16]

_DEPTH = 64
_KERNEL = "multiply_halves"


@dataclass(frozen=True, slots=True)
class HalfTile:
    """Work of a block: `m` x `n` results by `warps_m` x `warps_n` warps."""

    m: int
    n: int
    warps_m: int
    warps_n: int

    def blocks(self, rows: int, columns: int) -> int:
        """Blocks of a product."""
        return -(-rows // self.m) * -(-columns // self.n)

    def splits(self, rows: int, columns: int, batch: int, depth: int, multiprocessors: int) -> int:
        """Parts of a sum with which the blocks fill a GPU: at least two steps each, at most 4."""
        missing = 2 * multiprocessors // (self.blocks(rows, columns) * batch)
        return max(1, min(missing, -(-depth // _DEPTH) // 2, 4))


TILES = (
    HalfTile(128, 128, 2, 4),
    HalfTile(128, 64, 2, 2),
    HalfTile(64, 64, 2, 2),
    HalfTile(32, 64, 1, 4),
    HalfTile(16, 64, 1, 4),
)


def fitting_half_tile(rows: int, columns: int, batch: int, multiprocessors: int) -> HalfTile:
    """Return the largest tile of which a GPU's multiprocessors have two blocks each, the smallest if there is none.

    Tiles with twice as many rows as the product are left out.
    """
    fitting = [tile for tile in TILES if (tile.n == 64 or tile.n < 2 * columns) and (tile.m == 16 or tile.m < 2 * rows)]
    for tile in fitting:
        if tile.blocks(rows, columns) * batch >= 2 * multiprocessors:
            return tile
    return fitting[-1]


class HalfProducts:
    """Products (rows, depth) * (depth, columns), the second factors being constant.

    Args:
        resources: of the convolution.
        tile: of a block.
        factors: float16 (batch, columns, depth); depth is a multiple of 8, columns are even.
        splits: parts of a sum, which the reader of the products adds up.

    Attributes:
        splits: parts of a sum.
    """

    def __init__(self, resources: GpuResources, tile: HalfTile, factors: Halves, splits: int = 1) -> None:
        self._batch, self._columns, depth = factors.shape
        self._tile, self.splits = tile, splits
        stages = min(3 if tile.m > 32 else 4, max(2, -(-depth // _DEPTH)))
        options = {
            "DEPTH": depth,
            "COLUMNS": self._columns,
            "BM": tile.m,
            "BN": tile.n,
            "BK": _DEPTH,
            "WARPS_M": tile.warps_m,
            "WARPS_N": tile.warps_n,
            "STAGES": stages,
            "SPLITS": splits,
        }
        shared = {_KERNEL: stages * (tile.m + tile.n) * _DEPTH * 2}
        self._kernels = resources.load("half_products.cu", options, {_KERNEL: "PPPi"}, (TENSOR_CORES,), shared)
        (self._factors,) = resources.constants(np.ascontiguousarray(factors))

    def launch(self, stream: CudaStream, x: int, y: int, rows: int) -> None:
        """Queue the products.

        Args:
            stream: stream to queue on.
            x: address of float16 (batch, rows, depth).
            y: address of float32 (splits, batch, rows, columns).
            rows: of each product.
        """
        grid = self._tile.blocks(rows, self._columns), self._batch * self.splits
        threads = self._tile.warps_m * self._tile.warps_n * 32
        self._kernels.launch(_KERNEL, grid, threads, stream, x, self._factors, y, rows)
