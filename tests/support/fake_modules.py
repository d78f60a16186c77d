"""Modules of kernels in the fake libcuda: libraries that `kernels_on_host` has compiled, launched by handle."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.fake_cuda import FakeCuda


class DriverModules:
    """Modules of kernels as libcuda loads and launches them.

    Args:
        cuda: where launches are submitted.

    Attributes:
        functions: the kernels of loaded modules and their argument types, by handle.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._modules: dict[int, ctypes.CDLL] = {}
        self.functions: dict[int, tuple[Any, str]] = {}

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:  # noqa: N802
        assert self._cuda.depth > 0
        assert self._cuda.captured is None, "a module is loaded during a capture"
        number = max(self._modules, default=500) + 1
        self._modules[number] = ctypes.CDLL(code.decode())
        module._obj.value = number
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        library = self._modules[module.value]
        types = getattr(library, f"types_{name.decode()}")
        types.restype = ctypes.c_char_p
        number = max(self.functions, default=9000) + 1
        self.functions[number] = getattr(library, f"run_{name.decode()}"), types().decode()
        function._obj.value = number
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        assert (function.value in self.functions, attribute) == (True, 8)
        return 0

    def cuModuleUnload(self, module: Any) -> int:  # noqa: N802
        assert self._cuda.depth > 0
        del self._modules[module.value]
        return 0

    def cuLaunchKernel(self, function: Any, *launch: Any) -> int:  # noqa: N802
        gx, gy, gz, threads, ty, tz, _shared, stream, parameters, extra = launch
        assert (gz, ty, tz, parameters) == (1, 1, 1, None)
        assert (extra[0], extra[2], extra[4]) == (1, 2, None)
        run, types = self.functions[function.value]
        size = ctypes.c_size_t.from_address(extra[3]).value
        assert size == struct.calcsize(types), f"{size} bytes of arguments, the kernel takes {types}"
        values = struct.unpack(types, ctypes.string_at(extra[1], size))
        handed = [ctypes.c_ulonglong(value) for value in values]
        self._cuda.submit(lambda: run(*map(ctypes.c_uint, (gx, gy, threads)), *handed), stream.value)
        return 0
