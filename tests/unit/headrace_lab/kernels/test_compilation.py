"""The convolution kernels by the real compiler, where there is one; no GPU is needed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from headrace.runtimes.cuda.kernels import loading
from headrace_lab.kernels import cufft, fft
from headrace_lab.kernels.algorithms import ALGORITHMS
from headrace_lab.kernels.base import ConvShape

from tests.support.convolution_cases import FUSED, PLAIN, random_operands
from tests.support.fake_cuda import FakeCuda
from tests.support.host_fft import HostFft
from tests.support.kernels_on_host import StandInModule, needs_nvrtc

SHAPES = [
    ConvShape(1, 64, 8, 8, 64, 3, 3, 1, 1),
    ConvShape(1, 3, 12, 12, 5, 5, 5, 2, 2),
    ConvShape(1, 6, 16, 16, 7, 11, 11, 1, 5),
    ConvShape(1, 12, 8, 8, 12, 3, 3, 1, 1, groups=12),
]
COMPILE = loading.compile_cuda


@needs_nvrtc
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: f"{algorithm.name} {algorithm.variant}")
def test_the_kernels_compile(host_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, algorithm: Any) -> None:
    def module(code: bytes) -> StandInModule:
        assert code.startswith(b"\x7fELF")
        return StandInModule()

    library = HostFft()
    monkeypatch.setattr(loading, "compile_cuda", COMPILE)
    monkeypatch.setattr(cufft, "find_cufft", lambda: library)
    monkeypatch.setattr(fft, "find_cufft", lambda: library)
    monkeypatch.setattr(sys.modules["pycuda.driver"], "module_from_buffer", module)
    opened = 0
    for shape in SHAPES:
        for dtype in ("float32", "float16"):
            if not algorithm.refusal(shape, dtype, (9, 0)):
                operands = random_operands(shape, dtype)
                for epilogue in (PLAIN, FUSED):
                    algorithm.open(0, shape, dtype, epilogue, operands.weights, operands.bias).close()
                    opened += 1
    assert opened
