"""Our convolutions on a real GPU, each against the float64 reference."""

from __future__ import annotations

from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import check as check_driver
from headrace.runtimes.cuda.driver import loaded
from headrace_lab.kernels.algorithms import ALGORITHMS
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.kernels.fft import FftAlgorithm
from headrace_lab.kernels.resources import Algorithm
from headrace_lab.kernels.winograd import WinogradAlgorithm

from tests.support.convolution_cases import EPILOGUES, FUSED, PLAIN, check
from tests.support.gpu_marks import gpu_marks

pytestmark = gpu_marks(120)

SHAPES = [
    ConvShape(2, 64, 14, 14, 64, 3, 3, 1, 1),
    ConvShape(3, 72, 15, 13, 136, 3, 3, 1, 1),
    ConvShape(1, 256, 7, 7, 128, 1, 1, 1, 0),
    ConvShape(2, 3, 31, 33, 64, 7, 7, 2, 3),
    ConvShape(2, 5, 9, 11, 7, 3, 3, 1, 1),
    ConvShape(2, 5, 19, 23, 6, 11, 11, 1, 5),
    ConvShape(1, 40, 70, 66, 24, 15, 13, 1, 6),
    ConvShape(2, 32, 12, 12, 64, 5, 3, 1, 2, groups=2),
    ConvShape(2, 48, 17, 15, 48, 3, 3, 1, 1, groups=48),
    ConvShape(1, 24, 20, 20, 24, 5, 5, 2, 2, groups=24),
    ConvShape(1, 7, 33, 31, 7, 31, 31, 1, 15, groups=7),
    ConvShape(1, 8, 1, 1, 8, 3, 3, 1, 1),
]
# Relative errors. Weights of transforms are rounded less than the reference's, inputs of F(4x4) in FP16 more.
BOUNDS = {"float32": 5e-6, "float16": 1e-3}
_WINOGRAD_HALF_BOUND = 5e-3


def _bound(algorithm: Algorithm, dtype: str) -> float:
    return _WINOGRAD_HALF_BOUND if "winograd" in algorithm.name and dtype == "float16" else BOUNDS[dtype]


def _run(algorithm: Algorithm, shape: ConvShape, dtype: str, epilogue: Epilogue, rows: int | None = None) -> None:
    with driver.current(0), check_driver("reading the properties of the GPU"):
        major, minor = loaded().Device(0).compute_capability()
    name = f"{algorithm.name} {algorithm.variant} {dtype} {shape}"
    reason = algorithm.refusal(shape, dtype, (major, minor))
    if reason:
        return
    error = check(algorithm, shape, dtype, epilogue, _bound(algorithm, dtype), rows)
    print(f"{name}: relative error {error:.1e}")


def test_every_algorithm_on_every_shape() -> None:
    failures = []
    for algorithm in ALGORITHMS:
        for dtype in BOUNDS:
            for shape in SHAPES:
                try:
                    _run(algorithm, shape, dtype, FUSED)
                except AssertionError as error:
                    failures.append(str(error))
    assert not failures, "\n".join(failures)


def test_every_epilogue() -> None:
    for algorithm in ALGORITHMS:
        for dtype in BOUNDS:
            for epilogue in EPILOGUES:
                _run(algorithm, SHAPES[0], dtype, epilogue)
                _run(algorithm, SHAPES[8], dtype, epilogue)


def test_a_batch_smaller_than_the_largest() -> None:
    shape = ConvShape(5, 16, 11, 9, 16, 3, 3, 1, 1)
    for algorithm in ALGORITHMS:
        for dtype in BOUNDS:
            _run(algorithm, shape, dtype, FUSED, rows=3)


def test_chunks_of_images() -> None:
    shape = ConvShape(7, 16, 21, 19, 24, 3, 3, 1, 1)
    for rows in (7, 4):
        _run(WinogradAlgorithm(4, 1 << 18), shape, "float32", FUSED, rows)
        _run(WinogradAlgorithm(2, 1 << 18), shape, "float32", PLAIN, rows)
        _run(FftAlgorithm(chunk_bytes=1 << 18), shape, "float32", FUSED, rows)
