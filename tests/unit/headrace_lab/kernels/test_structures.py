"""Kernels with structures among their arguments: the calls of the driver's library."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream, DeviceError
from headrace.runtimes.cuda.kernels import loading
from headrace_lab.kernels import structures
from headrace_lab.kernels.structures import StructureKernel
from headrace_lab.kernels.tensor_maps import TensorMap

from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda


class Library:
    """The driver's library as far as modules need it.

    Attributes:
        calls: names of the calls and what they were called with.
        failing: name of a call that fails.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing = ""

    def _done(self, *call: Any) -> int:
        self.calls.append(call)
        return 1 if call[0] == self.failing else 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:  # noqa: N802
        module._obj.value = 11
        return self._done("load", code)

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = 22
        return self._done("find", module.value, name)

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        return self._done("reserve", function.value, attribute, value)

    def cuLaunchKernel(self, function: Any, *arguments: Any) -> int:  # noqa: N802
        *sizes, stream, pointers, extra = arguments
        values = ctypes.string_at(pointers[0], 128), ctypes.c_int.from_address(pointers[1]).value
        return self._done("launch", function.value, sizes, stream.value, values, extra)

    def cuModuleUnload(self, module: Any) -> int:  # noqa: N802
        return self._done("unload", module.value)

    def cuGetErrorName(self, result: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    library = Library()
    fake_cuda.install(monkeypatch, FakeCuda())
    monkeypatch.setattr(structures, "library", lambda: library)
    monkeypatch.setattr("headrace.runtimes.cuda.driver.library", lambda: library)
    monkeypatch.setattr(loading, "read_source", lambda file, headers: f"{headers} {file}")
    monkeypatch.setattr(loading, "compile_cuda", lambda *arguments, **options: repr((arguments, options)).encode())
    return library


def kernel() -> StructureKernel:
    return StructureKernel(0, "a.cu", "multiply", {"BM": 64}, ("b.cuh",), 100_000)


def test_a_kernel_is_loaded_launched_and_unloaded(library: Library) -> None:
    loaded = kernel()
    content = bytes(range(128))
    with driver.current(0):
        stream = CudaStream()
        loaded.launch(7, 160, stream, TensorMap.from_buffer_copy(content), ctypes.c_int(-3))
    loaded.close()
    loaded.close()
    code = repr((("('b.cuh',) a.cu", "a.cu", (9, 0), ["-DBM=64"]), {"own_instructions": True})).encode()
    assert library.calls == [
        ("load", code),
        ("find", 11, b"multiply"),
        ("reserve", 22, 8, 100_000),
        ("launch", 22, [7, 1, 1, 160, 1, 1, 100_000], stream.handle, (content, -3), None),
        ("unload", 11),
    ]


@pytest.mark.parametrize("call", ["load", "find", "reserve"])
def test_a_kernel_that_cannot_be_loaded_is_unloaded(library: Library, call: str) -> None:
    library.failing = call
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel()
    assert (library.calls[-1] == ("unload", 11)) == (call != "load")


def test_a_refused_launch_names_the_kernel(library: Library) -> None:
    loaded = kernel()
    library.failing = "launch"
    with driver.current(0), pytest.raises(DeviceError, match="launching the kernel multiply failed"):
        loaded.launch(1, 32, CudaStream(), TensorMap(), ctypes.c_int(1))
