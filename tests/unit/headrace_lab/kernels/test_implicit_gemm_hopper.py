"""Implicit GEMM with `wgmma`: its arithmetic, refusals, choice of a tile and maps. The kernel itself runs on a GPU only."""

from __future__ import annotations

from typing import Any

import pytest
from headrace.core.errors import Unsupported
from headrace_lab.kernels import implicit_gemm_hopper
from headrace_lab.kernels.base import ConvShape
from headrace_lab.kernels.implicit_gemm_hopper import TILES, ImplicitGemmHopper, input_map

from tests.support.convolution_cases import EPILOGUES, FUSED, error, expected, random_operands
from tests.support.fake_cuda import FakeCuda

SHAPE = ConvShape(2, 40, 9, 8, 72, 3, 3, 2, 1)


def test_the_arithmetic_of_numpy() -> None:
    operands = random_operands(SHAPE, "float16")
    for epilogue in EPILOGUES:
        result = ImplicitGemmHopper().reference(
            SHAPE, "float16", epilogue, operands.x, operands.weights, operands.bias, operands.residual
        )
        assert result.dtype == "float16"
        assert error(result, expected(SHAPE, "float16", epilogue, operands)) < 1e-3


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "reason"),
    [
        (SHAPE, "float32", (9, 0), "float32: Tensor Cores"),
        (SHAPE, "float16", (8, 6), r"compute capability 8\.6: the kernel needs 9\.0"),
        (SHAPE, "float16", (10, 0), r"compute capability 10\.0: `wgmma` is of 9\.0 only"),
        (ConvShape(1, 8, 64, 64, 8, 3, 3, 9, 1), "float16", (9, 0), "padding 1 and stride 9"),
        (ConvShape(1, 8, 8, 8, 8, 3, 3, 1, 128), "float16", (9, 0), "padding 128 and stride 1"),
        (ConvShape(1, 12, 8, 8, 8, 3, 3), "float16", (9, 0), "12 and 8 channels"),
    ],
)
def test_refusals(shape: ConvShape, dtype: str, capability: tuple[int, int], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(ImplicitGemmHopper().refusal(shape, dtype, capability))
    assert not ImplicitGemmHopper().refusal(SHAPE, "float16", (9, 0))


def test_a_compiler_without_the_instructions_is_reported(host_gpu: FakeCuda) -> None:
    operands = random_operands(SHAPE, "float16")
    with pytest.raises(Unsupported, match="instructions"):
        ImplicitGemmHopper().open(0, SHAPE, "float16", FUSED, operands.weights, operands.bias)
    assert not host_gpu.live


def test_blocks_fit_on_a_multiprocessor() -> None:
    for tile in TILES:
        # Barriers and the system's own share are less than 3 KiB for each block.
        assert tile.blocks * (tile.shared_bytes + (3 << 10)) <= 228 << 10, tile
        assert tile.blocks * tile.threads <= 2048
        assert tile.bm // tile.warpgroups in (64, 128)


def test_small_outputs_are_split_and_large_ones_are_not() -> None:
    small = ImplicitGemmHopper().variants(ConvShape(1, 512, 7, 7, 512, 3, 3, 1, 1))
    assert small[0].splits > 1
    large = ImplicitGemmHopper().variants(ConvShape(256, 256, 14, 14, 256, 3, 3, 1, 1))
    assert large[0].splits == 1
    assert {variant.tile for variant in large} == set(TILES)
    assert ImplicitGemmHopper().variant == "auto"
    assert ImplicitGemmHopper(TILES[0], 2).variant == "128x256x64 2 warpgroups 4 stages split 2"


def test_a_convolution_of_one_pixel_is_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(implicit_gemm_hopper, "encode_tiles", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(implicit_gemm_hopper, "encode_windows", lambda *arguments: calls.append(arguments))
    input_map(4096, ConvShape(2, 64, 9, 8, 72, 1, 1), 128, True)
    input_map(4096, SHAPE, 64, False)
    assert calls == [(4096, (64, 144), (64, 128)), (4096, (40, 8, 9, 2), (3, 3), 2, 1, 64)]
