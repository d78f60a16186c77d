"""The list of algorithms; direct and depthwise convolution, compiled for the host, against the float64 reference."""

from __future__ import annotations

import pytest
from headrace.core.errors import Unsupported
from headrace_lab.kernels.algorithms import ALGORITHMS
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.kernels.depthwise import DepthwiseAlgorithm
from headrace_lab.kernels.direct import DirectAlgorithm
from headrace_lab.kernels.resources import Algorithm

from tests.support.convolution_cases import EPILOGUES, FUSED, PLAIN, check, random_operands
from tests.support.fake_cuda import FakeCuda

DIRECT, DEPTHWISE = DirectAlgorithm(), DepthwiseAlgorithm()
DIRECT_SHAPES = [
    ConvShape(2, 8, 9, 7, 8, 3, 3, 1, 1),
    ConvShape(2, 3, 13, 11, 5, 7, 7, 2, 3),
    ConvShape(3, 4, 6, 6, 6, 1, 1, 2, 0),
    ConvShape(2, 6, 8, 8, 6, 3, 3, 1, 1, groups=6),
    ConvShape(1, 4, 12, 12, 8, 5, 3, 1, 2, groups=2),
    ConvShape(1, 16, 5, 3, 8, 3, 3, 3, 2, groups=2),
]
DEPTHWISE_SHAPES = [
    ConvShape(2, 8, 9, 7, 8, 3, 3, 1, 1, groups=8),
    ConvShape(2, 6, 13, 11, 6, 5, 5, 2, 2, groups=6),
    ConvShape(1, 3, 6, 6, 3, 3, 3, 1, 0, groups=3),
    ConvShape(1, 4, 20, 17, 4, 13, 9, 1, 6, groups=4),
    ConvShape(1, 8, 1, 2, 8, 3, 3, 1, 2, groups=8),
    ConvShape(1, 8, 9, 9, 8, 9, 9, 3, 4, groups=8),
]
BOUNDS = {"float32": 1e-6, "float16": 6e-4}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [*((DIRECT, shape) for shape in DIRECT_SHAPES), *((DEPTHWISE, shape) for shape in DEPTHWISE_SHAPES)],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_shapes(host_gpu: FakeCuda, algorithm: Algorithm, shape: ConvShape, dtype: str) -> None:
    check(algorithm, shape, dtype, FUSED, BOUNDS[dtype])


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_epilogues(host_gpu: FakeCuda, epilogue: Epilogue) -> None:
    for dtype, bound in BOUNDS.items():
        check(DIRECT, DIRECT_SHAPES[0], dtype, epilogue, bound)
        check(DEPTHWISE, DEPTHWISE_SHAPES[0], dtype, epilogue, bound)


def test_a_batch_smaller_than_the_largest(host_gpu: FakeCuda) -> None:
    check(DIRECT, ConvShape(5, 4, 6, 5, 4, 3, 3, 1, 1), "float32", FUSED, 1e-6, rows=3)
    check(DEPTHWISE, ConvShape(5, 4, 6, 5, 4, 3, 3, 1, 1, 4), "float32", FUSED, 1e-6, rows=3)


def test_a_bias_must_be_given(host_gpu: FakeCuda) -> None:
    operands = random_operands(DIRECT_SHAPES[0], "float32")
    with pytest.raises(ValueError, match=r"no bias: the epilogue adds one of shape \(8,\)"):
        DIRECT.open(0, DIRECT_SHAPES[0], "float32", FUSED, operands.weights)


def test_a_refused_shape_is_not_opened(host_gpu: FakeCuda) -> None:
    shape = ConvShape(1 << 30, 1, 32, 32, 64, 1, 1)
    assert "reduce the batch" in DIRECT.refusal(shape, "float32", (9, 0))
    with pytest.raises(Unsupported, match="direct does not support n 1073741824"):
        DIRECT.open(0, shape, "float32", PLAIN, random_operands(DIRECT_SHAPES[0], "float32").weights)


def test_refusals_of_depthwise() -> None:
    for shape in (ConvShape(1, 4, 8, 8, 4, 3, 3), ConvShape(1, 4, 8, 8, 8, 3, 3, groups=4)):
        assert "as many groups" in DEPTHWISE.refusal(shape, "float32", (9, 0))
    large = ConvShape(1 << 30, 64, 64, 64, 64, 3, 3, groups=64)
    assert "reduce the batch" in DEPTHWISE.refusal(large, "float32", (9, 0))
    assert not DEPTHWISE.refusal(DEPTHWISE_SHAPES[0], "float16", (7, 5))


def test_the_list() -> None:
    assert [(one.name, one.variant) for one in ALGORITHMS] == [
        ("direct", ""),
        *(("simt-gemm", tile) for tile in ("128x128x16", "128x64x16", "64x64x16")),
        *((name, "auto") for name in ("implicit-gemm", "implicit-gemm-hopper", "winograd-f2", "winograd-f4", "fft")),
        ("depthwise", ""),
    ]
