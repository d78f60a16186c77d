"""Depthwise convolution, compiled for the host, against the float64 reference."""

from __future__ import annotations

import pytest
from headrace.cuda.kernels.convolution.algorithms import ALGORITHMS
from headrace.cuda.kernels.convolution.base import ConvShape, Epilogue
from headrace.cuda.kernels.convolution.depthwise import DepthwiseAlgorithm

from tests.support.convolution_cases import EPILOGUES, FUSED, check
from tests.support.fake_cuda import FakeCuda

SHAPES = [
    ConvShape(2, 8, 9, 7, 8, 3, 3, 1, 1, groups=8),
    ConvShape(2, 6, 13, 11, 6, 5, 5, 2, 2, groups=6),
    ConvShape(1, 3, 6, 6, 3, 3, 3, 1, 0, groups=3),
    ConvShape(1, 4, 20, 17, 4, 13, 9, 1, 6, groups=4),
    ConvShape(1, 8, 1, 2, 8, 3, 3, 1, 2, groups=8),
    ConvShape(1, 8, 9, 9, 8, 9, 9, 3, 4, groups=8),
]
BOUNDS = {"float32": 1e-6, "float16": 6e-4}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(host_gpu: FakeCuda, shape: ConvShape, dtype: str) -> None:
    check(DepthwiseAlgorithm(), shape, dtype, FUSED, BOUNDS[dtype])


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_epilogues(host_gpu: FakeCuda, epilogue: Epilogue) -> None:
    for dtype, bound in BOUNDS.items():
        check(DepthwiseAlgorithm(), SHAPES[0], dtype, epilogue, bound)


def test_a_batch_smaller_than_the_largest(host_gpu: FakeCuda) -> None:
    check(DepthwiseAlgorithm(), ConvShape(5, 4, 6, 5, 4, 3, 3, 1, 1, 4), "float32", FUSED, 1e-6, rows=3)


def test_refusals() -> None:
    algorithm = DepthwiseAlgorithm()
    assert "as many groups" in algorithm.refusal(ConvShape(1, 4, 8, 8, 4, 3, 3), "float32", (9, 0))
    assert "as many groups" in algorithm.refusal(ConvShape(1, 4, 8, 8, 8, 3, 3, groups=4), "float32", (9, 0))
    assert "reduce the batch" in algorithm.refusal(
        ConvShape(1 << 30, 64, 64, 64, 64, 3, 3, groups=64), "float32", (9, 0)
    )
    assert not algorithm.refusal(SHAPES[0], "float16", (7, 5))


def test_the_algorithm_is_in_the_list() -> None:
    assert any(algorithm.name == "depthwise" for algorithm in ALGORITHMS)
