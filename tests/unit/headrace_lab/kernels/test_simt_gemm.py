"""FP32 implicit GEMM, compiled for the host, against the float64 reference."""

from __future__ import annotations

import pytest
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.kernels.simt_gemm import (
    TILES,
    SimtGemmAlgorithm,
    Tile,
    fitting_tile,
    split_count,
)

from tests.support.convolution_cases import EPILOGUES, FUSED, check
from tests.support.fake_cuda import FakeCuda

SHAPES = [
    ConvShape(2, 8, 9, 7, 8, 3, 3, 1, 1),
    ConvShape(2, 3, 13, 11, 5, 7, 7, 2, 3),  # reads and stores of single floats
    ConvShape(3, 20, 6, 6, 132, 1, 1, 2, 0),  # more than one tile of columns
    ConvShape(1, 24, 12, 12, 8, 5, 3, 1, 2, groups=2),
    ConvShape(1, 12, 10, 9, 18, 3, 3, 1, 1, groups=3),
]
BOUND = 1e-6


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(host_gpu: FakeCuda, shape: ConvShape, tile: Tile) -> None:
    check(SimtGemmAlgorithm(tile, splits=1), shape, "float32", FUSED, BOUND)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_split_sums(host_gpu: FakeCuda, shape: ConvShape) -> None:
    check(SimtGemmAlgorithm(Tile(64, 64), splits=3), shape, "float32", FUSED, BOUND)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_epilogues(host_gpu: FakeCuda, epilogue: Epilogue, splits: int) -> None:
    check(SimtGemmAlgorithm(Tile(64, 64), splits), SHAPES[0], "float32", epilogue, BOUND)


@pytest.mark.parametrize("tile", [Tile(32, 64, 16, 4, 4), Tile(16, 64, 16, 4, 2)], ids=str)
def test_tiles_of_few_rows(host_gpu: FakeCuda, tile: Tile) -> None:
    for shape in SHAPES:
        check(SimtGemmAlgorithm(tile, splits=2), shape, "float32", FUSED, BOUND)
    check(SimtGemmAlgorithm(Tile(64, 64, 8, 3), 1), SHAPES[0], "float32", FUSED, BOUND)  # three stages


@pytest.mark.parametrize("splits", [1, 2])
def test_a_batch_smaller_than_the_largest(host_gpu: FakeCuda, splits: int) -> None:
    shape = ConvShape(5, 4, 6, 5, 4, 3, 3, 1, 1)
    check(SimtGemmAlgorithm(Tile(64, 64), splits), shape, "float32", FUSED, BOUND, rows=3)


def test_sums_are_split_if_the_output_does_not_fill_the_gpu() -> None:
    tile = Tile(128, 128)
    assert split_count(tile, 49, 512, 4608, 1, 132) == 16
    assert split_count(tile, 784, 128, 1152, 1, 132) == 16
    assert split_count(tile, 784, 128, 64, 1, 132) == 1
    assert split_count(tile, 64 * 3136, 64, 576, 1, 132) == 1


def test_the_tile_follows_the_output() -> None:
    assert fitting_tile(64 * 196, 64, 36, 132) == Tile(128, 64)
    assert fitting_tile(64 * 49, 256, 36, 132) == Tile(128, 128)
    assert fitting_tile(49, 64, 16, 132).m == 16
    assert fitting_tile(3, 5, 1, 132).m == 16


def test_refusals() -> None:
    algorithm = SimtGemmAlgorithm(TILES[0])
    assert "float16" in algorithm.refusal(SHAPES[0], "float16", (9, 0))
    assert "cp.async" in algorithm.refusal(SHAPES[0], "float32", (7, 5))
    assert "reduce the batch" in algorithm.refusal(ConvShape(1 << 20, 1, 64, 64, 1, 1, 1), "float32", (9, 0))
    assert "groups" in algorithm.refusal(ConvShape(1, 8192, 4, 4, 8192, 3, 3, groups=8192), "float32", (9, 0))
    assert not algorithm.refusal(SHAPES[0], "float32", (8, 0))
