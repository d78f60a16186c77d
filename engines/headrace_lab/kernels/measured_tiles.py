"""Tiles that were the fastest for the layers of ResNet-50 in FP16 at batches of 1, 8, 64 and 256 on an H200.

Each row of `measured_tiles.csv` is a layer with its tile: output pixels, output channels, inner elements (taps times input
channels) and blocks that share the tile. The selection for another shape is that of the nearest row, by the logarithms of the
three sizes.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

from headrace_lab.kernels.base import ConvShape


class MeasuredTile(NamedTuple):
    """Fastest tile of a measured layer.

    Attributes:
        tile: its name.
        blocks: blocks that share it.
        sizes: output pixels, output channels and inner elements of the layer.
    """

    tile: str
    blocks: int
    sizes: tuple[int, int, int]


def measured_tiles(algorithm: str) -> list[MeasuredTile]:
    """Return the measured layers of an algorithm, by its name."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["algorithm"] == algorithm]
    return [
        MeasuredTile(row["tile"], int(row["blocks"]), (int(row["pixels"]), int(row["channels"]), int(row["inner"])))
        for row in rows
    ]


def nearest(measured: list[MeasuredTile], shape: ConvShape) -> tuple[str, int]:
    """Return the name of the tile, and the blocks that share it, of the measured layer that is most like a shape."""
    sizes = shape.n * shape.out_h * shape.out_w, shape.k, shape.r * shape.s * shape.c

    def distance(layer: MeasuredTile) -> float:
        return sum(abs(math.log(size / other)) for size, other in zip(sizes, layer.sizes, strict=True))

    found = min((distance(layer), layer.tile, layer.blocks) for layer in measured)
    return found[1], found[2]
