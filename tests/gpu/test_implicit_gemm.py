"""Implicit GEMM on a real GPU: every tile against the float64 reference."""

from __future__ import annotations

import pytest
from headrace.runtimes.cuda import devices, driver
from headrace.runtimes.cuda.driver import loaded
from headrace_lab.kernels import implicit_gemm, implicit_gemm_hopper
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.kernels.implicit_gemm import ImplicitGemm
from headrace_lab.kernels.implicit_gemm_hopper import ImplicitGemmHopper
from headrace_lab.kernels.resources import Algorithm

from tests.support.convolution_cases import FUSED, PLAIN, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not devices.count(), reason="needs an NVIDIA GPU and PyCUDA"),
]

BOUND = 1e-3
SHAPES = [
    ConvShape(1, 64, 8, 8, 64, 1, 1),
    ConvShape(2, 64, 7, 5, 40, 3, 3, 1, 1),
    ConvShape(1, 40, 9, 8, 72, 3, 3, 2, 1),
    ConvShape(3, 8, 8, 7, 8, 1, 1, 2, 0),
    ConvShape(2, 24, 5, 5, 16, 7, 7, 2, 3),
    ConvShape(1, 16, 11, 6, 24, 5, 3, 1, 2),
    ConvShape(1, 64, 33, 47, 264, 2, 2, 2, 1),
    ConvShape(3, 256, 14, 14, 512, 1, 1),
    ConvShape(1, 512, 7, 7, 512, 3, 3, 1, 1),
]
VARIANTS: list[Algorithm] = [
    *(ImplicitGemm(tile, splits) for tile in implicit_gemm.TILES for splits in (1, 3)),
    *(ImplicitGemmHopper(tile, splits) for tile in implicit_gemm_hopper.TILES for splits in (1, 3)),
    ImplicitGemm(),
    ImplicitGemmHopper(),
]


def _skip_unsupported(algorithm: Algorithm, shape: ConvShape) -> None:
    with driver.current():
        major, minor = loaded().Device(0).compute_capability()
    reason = algorithm.refusal(shape, "float16", (major, minor))
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=lambda algorithm: f"{algorithm.name} {algorithm.variant}")
def test_every_tile(algorithm: Algorithm) -> None:
    for shape in SHAPES:
        _skip_unsupported(algorithm, shape)
        check(algorithm, shape, "float16", FUSED, BOUND, launches=2)
    check(algorithm, SHAPES[1], "float16", PLAIN, BOUND)
    check(algorithm, SHAPES[7], "float16", Epilogue(bias=True), BOUND, rows=2)
