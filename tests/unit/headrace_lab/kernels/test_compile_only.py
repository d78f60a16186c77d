"""Compilation ahead: the kernels of a later `open`, without memory on the GPU."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import HeadraceError
from headrace.runtimes.cuda.kernels import loading
from headrace_lab.kernels import cufft, fft
from headrace_lab.kernels.algorithms import ALGORITHMS
from headrace_lab.kernels.base import ConvShape
from headrace_lab.kernels.resources import compile_only

from tests.support.convolution_cases import FUSED, PLAIN, random_operands
from tests.support.fake_cuda import FakeCuda
from tests.support.host_fft import HostFft
from tests.support.kernels_on_host import StandInModule

SHAPES = [
    ConvShape(1, 64, 8, 8, 64, 3, 3, 1, 1),
    ConvShape(5, 64, 8, 8, 64, 3, 3, 1, 1),
    ConvShape(3, 64, 8, 8, 128, 1, 1),
    ConvShape(1, 12, 8, 8, 12, 3, 3, 1, 1, groups=12),
]
CASES = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: f"{one.name} {one.variant}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
    library = HostFft()
    monkeypatch.setattr(cufft, "find_cufft", lambda: library)
    monkeypatch.setattr(fft, "find_cufft", lambda: library)
    monkeypatch.setattr(sys.modules["pycuda.driver"], "module_from_buffer", lambda code: StandInModule(), raising=False)
    return cuda


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the compiler: name, capability and options."""
    calls: list[tuple[Any, ...]] = []

    def compile_cuda(source: str, name: str, capability: Any, options: Any = (), **specific: Any) -> bytes:
        calls.append((name, capability, tuple(options), *specific.items()))
        return b"code"

    monkeypatch.setattr(loading, "compile_cuda", compile_cuda)
    return calls


@CASES
def test_the_same_kernels_are_compiled_and_no_memory_is_allocated(
    algorithm: Any, cuda: FakeCuda, compiled: list[Any]
) -> None:
    for shape in SHAPES:
        for dtype in ("float16", "float32"):
            if algorithm.refusal(shape, dtype, (9, 0)):
                continue
            operands = random_operands(shape, dtype)
            for epilogue in (PLAIN, FUSED):
                arguments = 0, shape, dtype, epilogue, operands.weights, operands.bias
                compiled.clear()
                with compile_only():
                    algorithm.open(*arguments)
                ahead = set(compiled)
                assert ahead
                assert not cuda.live
                compiled.clear()
                # The driver's library, which `wgmma` needs besides, is not there.
                with contextlib.suppress(HeadraceError, OSError):
                    algorithm.open(*arguments).close()
                assert set(compiled) == ahead
    assert cuda.depth == 0


@CASES
def test_equal_keys_have_equal_kernels(algorithm: Any, cuda: FakeCuda, compiled: list[Any]) -> None:
    kernels: dict[Any, set[Any]] = {}
    for shape, dtype in itertools.product(SHAPES, ("float16", "float32")):
        if algorithm.refusal(shape, dtype, (9, 0)):
            continue
        for variant in algorithm.variants(shape)[:4]:
            compiled.clear()
            with compile_only():
                variant.open(0, shape, dtype, PLAIN, np.zeros(shape.weights_shape, np.float32))
            key = dtype, variant.variant, *variant.kernel_key(shape)
            assert kernels.setdefault(key, set(compiled)) == set(compiled)
    assert kernels


def test_an_error_within_ends_it(cuda: FakeCuda, compiled: list[Any]) -> None:
    with pytest.raises(ValueError, match="mine"), compile_only():
        raise ValueError("mine")
    operands = random_operands(SHAPES[0], "float32")
    ALGORITHMS[0].open(0, SHAPES[0], "float32", PLAIN, operands.weights).close()
