"""Kernels with structures among their arguments, e.g. tensor maps.

PyCUDA hands the driver one buffer with all arguments in the layout of C. Compilers place a structure that is aligned to 64 bytes
at an offset that depends on the GPU, so this module passes a pointer to each argument (CUDA driver API, cuLaunchKernel), which
PyCUDA cannot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream, library, succeeded
from headrace.runtimes.cuda.kernels import loading

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class StructureKernel:
    """A kernel of a file, loaded on a GPU; compiled for the GPU's exact architecture.

    Args:
        device: number of the GPU.
        file: its path.
        name: of the kernel.
        options: values of the file's macros.
        headers: paths of files that precede the kernel's file.
        shared_bytes: dynamic shared memory of a block.

    Raises:
        Unsupported: there is no GPU, or no compiler for it.
        DeviceError: the driver or the compiler refuses.
    """

    def __init__(
        self,
        device: int,
        file: str,
        name: str,
        options: Mapping[str, int],
        headers: Sequence[str],
        shared_bytes: int,
    ) -> None:
        self._device, self._name, self._shared_bytes = device, name, shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with driver.current(device):
            code = loading.compile_file(device, file, options, headers, own_instructions=True)
            cuda = library()
            succeeded(cuda.cuModuleLoadData(ctypes.byref(self._module), code), f"loading {file}")
            try:
                result = cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode())
                succeeded(result, f"finding {name} in {file}")
                result = cuda.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
                succeeded(result, f"reserving {shared_bytes} bytes of shared memory for {name}")
            except BaseException:
                self.close()
                raise

    def launch(self, blocks: int, threads: int, stream: CudaStream, *arguments: Any) -> None:
        """Queue the kernel; the device must be current.

        Args:
            blocks: of the grid, in one dimension.
            threads: of a block.
            stream: stream to queue on.
            arguments: values of `ctypes`, which the driver copies, in the order and of the types of the kernel's.

        Raises:
            DeviceError: the driver refuses.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        result = library().cuLaunchKernel(
            *(self._function, blocks, 1, 1, threads, 1, 1, self._shared_bytes),
            *(ctypes.c_void_p(stream.handle), pointers, None),
        )
        if result:
            succeeded(result, f"launching the kernel {self._name}")

    def close(self) -> None:
        """Unload the kernel; all work must be done."""
        module, self._module = self._module, ctypes.c_void_p()
        if module:
            with driver.current(self._device):
                library().cuModuleUnload(module)
