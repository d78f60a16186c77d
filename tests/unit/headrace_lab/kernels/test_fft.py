"""FFT convolution, compiled for the host with NumPy's transforms in place of cuFFT, against the float64 reference."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from headrace.core.errors import Unsupported
from headrace.runtimes.cuda.driver import DeviceError
from headrace_lab.kernels import cufft, fft
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.kernels.fft import FftAlgorithm, fitting_planes

from tests.support.convolution_cases import EPILOGUES, FUSED, PLAIN, check, random_operands
from tests.support.fake_cuda import FakeCuda
from tests.support.host_fft import HostFft

SHAPES = [
    ConvShape(2, 5, 19, 23, 6, 11, 11, 1, 5),
    ConvShape(1, 33, 17, 9, 35, 7, 5, 1, 2),  # more channels than a block has
    ConvShape(3, 4, 30, 40, 3, 13, 13, 1, 0),
    ConvShape(1, 2, 3, 3, 2, 3, 3, 1, 1),
]
BOUNDS = {"float32": 1e-6, "float16": 6e-4}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, host_gpu: FakeCuda) -> HostFft:
    host = HostFft()
    monkeypatch.setattr(cufft, "find_cufft", lambda: host)
    monkeypatch.setattr(fft, "find_cufft", lambda: host)
    return host


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(library: HostFft, shape: ConvShape, dtype: str) -> None:
    check(FftAlgorithm(), shape, dtype, FUSED, BOUNDS[dtype])
    assert not library.plans


@pytest.mark.parametrize("size", [16, 24, 64])
def test_sizes_of_planes(library: HostFft, size: int) -> None:
    check(FftAlgorithm(size), SHAPES[0], "float32", FUSED, 1e-6)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_epilogues(library: HostFft, epilogue: Epilogue) -> None:
    check(FftAlgorithm(), SHAPES[3], "float32", epilogue, 1e-6)


@pytest.mark.parametrize("rows", [5, 3])
def test_chunks_of_images(library: HostFft, rows: int) -> None:
    shape = ConvShape(5, 4, 12, 11, 4, 7, 7, 1, 3)
    planes = fitting_planes(shape)[0]
    check(FftAlgorithm(chunk_bytes=2 * planes.image_bytes(shape)), shape, "float32", FUSED, 1e-6, rows)


def test_variants_are_sizes_of_planes(library: HostFft) -> None:
    variants = FftAlgorithm().variants(SHAPES[0])
    assert {variant.variant for variant in variants} == {"32x32", "48x48", "24x24", "16x16"}
    for variant in variants:
        assert not variant.refusal(SHAPES[0], "float32", (9, 0))


def test_refusals(library: HostFft, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FftAlgorithm()
    assert not algorithm.refusal(SHAPES[0], "float16", (7, 5))
    assert "stride 1" in algorithm.refusal(ConvShape(1, 4, 20, 20, 4, 11, 11, 2, 5), "float32", (9, 0))
    assert "one group" in algorithm.refusal(ConvShape(1, 4, 20, 20, 4, 11, 11, groups=2), "float32", (9, 0))
    assert "128 rows at most" in algorithm.refusal(ConvShape(1, 4, 200, 200, 4, 129, 3), "float32", (9, 0))
    assert "16 rows at most" in FftAlgorithm(16).refusal(ConvShape(1, 4, 20, 20, 4, 17, 17), "float32", (9, 0))

    def missing() -> None:
        raise Unsupported("cuFFT is not found")

    monkeypatch.setattr(fft, "find_cufft", missing)
    assert algorithm.refusal(SHAPES[0], "float32", (9, 0)) == "cuFFT is not found"


def test_errors_of_cufft(library: HostFft) -> None:
    weights = random_operands(SHAPES[3], "float32").weights
    library.failing = "cufftMakePlanMany"
    with pytest.raises(DeviceError, match=r"planning 2 transforms of 8x8 failed in cuFFT \(cufftResult 8\)"):
        FftAlgorithm().open(0, SHAPES[3], "float32", PLAIN, weights)
    assert not library.plans
    library.failing = "cufftExecR2C"
    with pytest.raises(DeviceError, match="launching transforms failed"):
        check(FftAlgorithm(), SHAPES[3], "float32", PLAIN, 1e-6)
    assert not library.plans


def test_without_cufft_the_error_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    cufft.find_cufft.cache_clear()
    with pytest.raises(Unsupported, match=r"libcufft\.so.* is not found: install the CUDA toolkit"):
        cufft.find_cufft()
    cufft.find_cufft.cache_clear()
