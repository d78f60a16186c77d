"""Winograd's algorithm, compiled for the host, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace_lab.kernels import winograd
from headrace_lab.kernels.base import ConvShape, Epilogue, convolve
from headrace_lab.kernels.half_products import TILES as HALF_TILES
from headrace_lab.kernels.half_products import HalfTile
from headrace_lab.kernels.resources import GpuResources
from headrace_lab.kernels.winograd import WinogradAlgorithm

from tests.support.convolution_cases import EPILOGUES, FUSED, PLAIN, check, error, random_operands
from tests.support.fake_cuda import FakeCuda

SHAPES = [
    ConvShape(2, 8, 9, 7, 8, 3, 3, 1, 1),
    ConvShape(2, 3, 4, 4, 5, 3, 3, 1, 0),  # single channels
    ConvShape(1, 20, 12, 13, 70, 3, 3, 1, 1),
    ConvShape(1, 6, 1, 3, 4, 3, 3, 1, 2),  # more padding than image
]
BOUNDS = {2: 2e-6, 4: 4e-6}
HALF_SHAPES = [
    ConvShape(2, 8, 9, 7, 8, 3, 3, 1, 1),
    ConvShape(1, 72, 12, 13, 70, 3, 3, 1, 1),
    ConvShape(1, 200, 6, 5, 130, 3, 3, 1, 0),  # more steps than stages
]
HALF_BOUNDS = {2: 1e-3, 4: 5e-3}


@pytest.mark.parametrize("size", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(host_gpu: FakeCuda, shape: ConvShape, size: int) -> None:
    check(WinogradAlgorithm(size), shape, "float32", FUSED, BOUNDS[size])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_split_products(host_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    shape = ConvShape(1, 264, 5, 6, 70, 3, 3, 1, 1)
    options: list[dict[str, int]] = []
    load = GpuResources.load

    def noting(self: GpuResources, file: str, values: dict[str, int], *rest: Any) -> Any:
        options.append(values)
        return load(self, file, values, *rest)

    monkeypatch.setattr(GpuResources, "load", noting)
    for size, bounds in {2: (2e-6, 1e-3), 4: (4e-6, 5e-3)}.items():
        check(WinogradAlgorithm(size), shape, dtype, FUSED, bounds[dtype == "float16"])
    assert all(values["SPLITS"] > 1 for values in options)


@pytest.mark.parametrize("size", HALF_BOUNDS)
@pytest.mark.parametrize("shape", HALF_SHAPES, ids=str)
def test_float16(host_gpu: FakeCuda, shape: ConvShape, size: int) -> None:
    check(WinogradAlgorithm(size), shape, "float16", FUSED, HALF_BOUNDS[size])
    check(WinogradAlgorithm(size), shape, "float16", PLAIN, HALF_BOUNDS[size])


@pytest.mark.parametrize("tile", HALF_TILES, ids=str)
def test_tiles_of_half_products(host_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, tile: HalfTile) -> None:
    monkeypatch.setattr(winograd, "fitting_half_tile", lambda *_: tile)
    check(WinogradAlgorithm(2), ConvShape(1, 16, 26, 26, 136, 3, 3, 1, 1), "float16", FUSED, HALF_BOUNDS[2])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_variants_divide_the_products(host_gpu: FakeCuda, dtype: str) -> None:
    few, many = ConvShape(1, 128, 7, 6, 72, 3, 3, 1, 1), ConvShape(2, 16, 66, 67, 136, 3, 3, 1, 1)
    assert {str(blocks) for blocks in winograd.proposals(winograd.Tiling.of(few, 4), few)} == {
        "16x64",
        "16x64 2 splits",
    }
    assert [variant.variant for variant in WinogradAlgorithm(4).variants(many)] == ["128x128", "128x64", "64x64"]
    # The large tiles of float16 are those of `test_tiles_of_half_products`.
    two_blocks_each_way = [(many, ConvShape(1, 16, 46, 47, 136, 3, 3, 1, 1))] if dtype == "float32" else []
    for proposed, shape in [(few, few), *two_blocks_each_way]:
        for variant in WinogradAlgorithm(4).variants(proposed):
            check(variant, shape, dtype, FUSED, 4e-6 if dtype == "float32" else 5e-3)


def test_every_shape_has_a_variant() -> None:
    for n in (1, 8, 64):
        for channels in (1, 32, 64, 512):
            for size in (1, 7, 56):
                assert WinogradAlgorithm(4).variants(ConvShape(n, channels, size, size, channels, 3, 3, 1, 1))


@pytest.mark.parametrize("size", HALF_BOUNDS)
def test_large_values_of_float16(size: int) -> None:
    shape = ConvShape(1, 8, 8, 8, 8, 3, 3, 1, 1)
    operands = random_operands(shape, "float16")
    operands.x[:] = np.clip(operands.x.astype(np.float32) * 30_000, -65_504, 65_504)
    for scale in (1e-6, 0.1):
        weights = operands.weights * np.float32(scale)
        exact = convolve(shape, PLAIN, operands.x, weights)
        result = WinogradAlgorithm(size).reference(shape, "float16", PLAIN, operands.x, weights)
        assert error(result, exact) < HALF_BOUNDS[size]


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_epilogues(host_gpu: FakeCuda, epilogue: Epilogue) -> None:
    check(WinogradAlgorithm(4), SHAPES[0], "float32", epilogue, BOUNDS[4])


@pytest.mark.parametrize("rows", [5, 3])
def test_chunks_of_images(host_gpu: FakeCuda, rows: int) -> None:
    shape = ConvShape(5, 4, 6, 5, 4, 3, 3, 1, 1)
    algorithm = WinogradAlgorithm(4, chunk_bytes=36 * 4 * (4 + 4) * 4 * 2)  # of two images
    check(algorithm, shape, "float32", FUSED, BOUNDS[4], rows)
    assert host_gpu.launches == 3 * -(-rows // 2)


def test_refusals() -> None:
    algorithm = WinogradAlgorithm(4)
    for shape in (ConvShape(1, 4, 8, 8, 4, 3, 3, 2, 1), ConvShape(1, 4, 8, 8, 4, 5, 5, 1, 2)):
        assert "3x3 kernels with stride 1 only" in algorithm.refusal(shape, "float32", (9, 0))
    assert "one group" in algorithm.refusal(ConvShape(1, 4, 8, 8, 4, 3, 3, groups=2), "float32", (9, 0))
    assert "cp.async" in algorithm.refusal(SHAPES[0], "float32", (7, 5))
    assert not algorithm.refusal(SHAPES[0], "float32", (8, 0))
    assert "multiples of 8 and 2" in algorithm.refusal(ConvShape(1, 12, 8, 8, 4, 3, 3), "float16", (9, 0))
