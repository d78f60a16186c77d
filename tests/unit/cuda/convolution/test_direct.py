"""Direct convolution, compiled for the host, against the float64 reference."""

from __future__ import annotations

import pytest
from headrace.core.errors import Unsupported
from headrace.cuda.kernels.convolution.algorithms import ALGORITHMS
from headrace.cuda.kernels.convolution.base import ConvShape
from headrace.cuda.kernels.convolution.direct import DirectAlgorithm

from tests.support.convolution_cases import EPILOGUES, FUSED, PLAIN, check, random_operands
from tests.support.fake_cuda import FakeCuda

SHAPES = [
    ConvShape(2, 8, 9, 7, 8, 3, 3, 1, 1),
    ConvShape(2, 3, 13, 11, 5, 7, 7, 2, 3),
    ConvShape(3, 4, 6, 6, 6, 1, 1, 2, 0),
    ConvShape(2, 6, 8, 8, 6, 3, 3, 1, 1, groups=6),
    ConvShape(1, 4, 12, 12, 8, 5, 3, 1, 2, groups=2),
    ConvShape(1, 16, 5, 3, 8, 3, 3, 3, 2, groups=2),
]
BOUNDS = {"float32": 1e-6, "float16": 6e-4}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(host_gpu: FakeCuda, shape: ConvShape, dtype: str) -> None:
    check(DirectAlgorithm(), shape, dtype, FUSED, BOUNDS[dtype])


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_epilogues(host_gpu: FakeCuda, epilogue: object) -> None:
    for dtype, bound in BOUNDS.items():
        check(DirectAlgorithm(), SHAPES[0], dtype, epilogue, bound)  # type: ignore[arg-type]


def test_a_batch_smaller_than_the_largest(host_gpu: FakeCuda) -> None:
    check(DirectAlgorithm(), ConvShape(5, 4, 6, 5, 4, 3, 3, 1, 1), "float32", FUSED, 1e-6, rows=3)


def test_a_bias_must_be_given(host_gpu: FakeCuda) -> None:
    operands = random_operands(SHAPES[0], "float32")
    with pytest.raises(ValueError, match=r"no bias: the epilogue adds one of shape \(8,\)"):
        DirectAlgorithm().open(0, SHAPES[0], "float32", FUSED, operands.weights)


def test_a_refused_shape_is_not_opened(host_gpu: FakeCuda) -> None:
    shape = ConvShape(1 << 30, 1, 32, 32, 64, 1, 1)
    assert "reduce the batch" in DirectAlgorithm().refusal(shape, "float32", (9, 0))
    with pytest.raises(Unsupported, match="direct does not support n 1073741824"):
        DirectAlgorithm().open(0, shape, "float32", PLAIN, random_operands(SHAPES[0], "float32").weights)


def test_the_algorithm_is_in_the_list() -> None:
    assert any(algorithm.name == "direct" for algorithm in ALGORITHMS)
