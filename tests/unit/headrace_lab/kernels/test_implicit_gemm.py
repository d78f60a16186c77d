"""Implicit GEMM with `mma.sync` on the fake GPU, its refusals and its choice of a tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace.core.errors import Unsupported
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.kernels.half_gemm import HalfGemm
from headrace_lab.kernels.implicit_gemm import TILES, GemmTile, ImplicitGemm
from headrace_lab.kernels.implicit_gemm_hopper import ImplicitGemmHopper

from tests.support import fake_cuda
from tests.support.convolution_cases import EPILOGUES, FUSED, PLAIN, check, random_operands
from tests.support.fake_cuda import FakeCuda

SMALL = GemmTile(32, 32, 32, 1, 2, 3)
SHAPES = [
    ConvShape(1, 32, 6, 6, 32, 1, 1),
    ConvShape(2, 64, 7, 5, 40, 3, 3, 1, 1),
    ConvShape(1, 40, 9, 8, 72, 3, 3, 2, 1),
    ConvShape(3, 8, 8, 7, 8, 1, 1, 2, 0),
    ConvShape(1, 16, 11, 6, 24, 5, 3, 1, 2),
    ConvShape(2, 24, 5, 5, 16, 7, 7, 2, 3),
    ConvShape(1, 8, 4, 20, 8, 16, 16, 3, 15),
]
BOUND = 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("host_gpu")
def test_the_kernel_and_its_reference(shape: ConvShape) -> None:
    check(ImplicitGemm(SMALL), shape, "float16", FUSED, BOUND)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.usefixtures("host_gpu")
def test_epilogues(epilogue: Epilogue) -> None:
    check(ImplicitGemm(SMALL), SHAPES[1], "float16", epilogue, BOUND)
    check(ImplicitGemm(SMALL, 3), SHAPES[1], "float16", epilogue, BOUND)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.usefixtures("host_gpu")
def test_every_tile(tile: GemmTile) -> None:
    check(ImplicitGemm(tile), ConvShape(1, 72, 9, 17, 136, 3, 3, 1, 1), "float16", Epilogue(bias=True), BOUND)


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.usefixtures("host_gpu")
def test_blocks_that_share_a_tile(splits: int) -> None:
    check(ImplicitGemm(SMALL, splits), SHAPES[1], "float16", FUSED, BOUND)
    check(ImplicitGemm(SMALL, splits), SHAPES[2], "float16", FUSED, BOUND, launches=2)
    check(ImplicitGemm(SMALL, splits), SHAPES[0], "float16", FUSED, BOUND)  # fewer steps than blocks


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.usefixtures("host_gpu")
def test_fewer_rows_than_the_largest_batch(splits: int) -> None:
    check(ImplicitGemm(SMALL, splits), ConvShape(4, 16, 5, 5, 24, 3, 3, 1, 1), "float16", FUSED, BOUND, rows=3)


@pytest.mark.usefixtures("host_gpu")
def test_scratch_memory_is_counted() -> None:
    shape = SHAPES[1]
    operands = random_operands(shape, "float16")
    opened = ImplicitGemm(SMALL, 3).open(0, shape, "float16", PLAIN, operands.weights)
    assert opened.workspace_bytes == 3 * 4 * np.prod(shape.y_shape)
    opened.close()


@pytest.mark.usefixtures("host_gpu")
def test_everything_is_freed_if_memory_is_full(host_gpu: FakeCuda) -> None:
    host_gpu.room_bytes = 20 << 10
    shape = ConvShape(4, 16, 16, 16, 24, 3, 3, 1, 1)
    with pytest.raises(Exception, match="memory is full"):
        ImplicitGemm(SMALL, 4).open(0, shape, "float16", PLAIN, np.zeros(shape.weights_shape, np.float32))


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "reason"),
    [
        (ConvShape(1, 8, 8, 8, 8, 3, 3), "float32", (9, 0), "float32: Tensor Cores"),
        (ConvShape(1, 8, 8, 8, 8, 3, 3), "float16", (7, 5), r"compute capability 7\.5: the kernel needs 8\.0"),
        (ConvShape(1, 8, 8, 8, 8, 3, 3, groups=8), "float16", (9, 0), "8 groups"),
        (ConvShape(1, 3, 8, 8, 8, 3, 3), "float16", (9, 0), "3 and 8 channels"),
        (ConvShape(1, 8, 8, 8, 12, 3, 3), "float16", (9, 0), "8 and 12 channels"),
        (ConvShape(1, 8, 32, 32, 8, 17, 3), "float16", (9, 0), "kernel 17x3"),
        (ConvShape(9999, 256, 56, 56, 64, 1, 1), "float16", (9, 0), "more than 2"),
    ],
)
def test_unsupported_shapes_are_refused(
    shape: ConvShape, dtype: str, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda()
    cuda.capability = capability
    fake_cuda.install(monkeypatch, cuda)
    with pytest.raises(Unsupported, match=reason):
        ImplicitGemm().open(0, shape, dtype, PLAIN, np.zeros(shape.weights_shape[1:], np.float32))


@pytest.mark.parametrize("algorithm", [ImplicitGemm(), ImplicitGemmHopper()], ids=lambda one: one.name)
def test_measured_layers_have_their_fastest_tile_first(algorithm: HalfGemm[Any]) -> None:
    tiles = {str(tile) for tile in algorithm.tiles}
    assert len(algorithm.measured) == 76
    for name, splits, (pixels, k, inner) in algorithm.measured:
        assert name in tiles, f"{name} is not a tile any more: measure again"
        first = algorithm.variants(ConvShape(1, inner, 1, pixels, k, 1, 1))[0]
        assert (str(first.tile), first.splits) == (name, splits)


def test_small_outputs_are_split_and_large_ones_are_not() -> None:
    small = ImplicitGemm().variants(ConvShape(1, 512, 7, 7, 512, 3, 3, 1, 1))
    assert small[0].splits > 1
    assert {variant.variant for variant in small} >= {"64x64x64 4 warps 4 stages", "64x64x64 4 warps 4 stages split 8"}
    large = ImplicitGemm().variants(ConvShape(200, 240, 15, 15, 280, 3, 3, 1, 1))
    assert large[0].splits == 1
    assert {variant.tile for variant in large} == set(TILES)
    assert ImplicitGemm().variant == "auto"


def test_a_split_of_a_measured_layer_is_not_used_where_there_are_too_few_steps() -> None:
    shape = ConvShape(1, 64, 7, 7, 512, 1, 1)
    assert [variant.splits for variant in ImplicitGemm().variants(shape)].count(1) == len(TILES)
    assert ImplicitGemm().variants(shape)[0].splits == 1
