"""Batched two-dimensional Fourier transforms by cuFFT, called with `ctypes`.

cuFFT is part of the CUDA toolkit and one of NVIDIA's wheels (cuFFT documentation, "cuFFT API Reference").
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from headrace.core.errors import Unsupported
from headrace.runtimes.cuda.driver import CudaStream, DeviceError
from headrace.runtimes.cuda.kernels.loading import library_files

_NAMES = ("libcufft.so", "libcufft.so.12", "libcufft.so.11", "libcufft.so.10")
_CURE = "install the CUDA toolkit, or NVIDIA's wheel of it: pip install nvidia-cufft-cu12"
_R2C, _C2R = 0x2A, 0x2C  # CUFFT_R2C, CUFFT_C2R


@functools.cache
def find_cufft() -> Any:
    """Load cuFFT by its usual names.

    Raises:
        Unsupported: the library is not found.
    """
    for name in (*_NAMES, *map(str, library_files("libcufft.so*", "cufft/lib"))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Unsupported(f"cuFFT (libcufft.so), which computes Fourier transforms on the GPU, is not found: {_CURE}")


def _check(result: int, doing: str) -> None:
    if result:
        raise DeviceError(f"{doing} failed in cuFFT (cufftResult {result}): see its codes in the cuFFT documentation")


class PlaneTransform:
    """Plan of the transforms of a batch of square planes; the device must be current.

    Args:
        size: rows and columns of a plane.
        batch: number of planes.
        inverse: True: from (size, size / 2 + 1) complex64 to (size, size) float32, not divided by the number of elements, and
            the input is overwritten; False: the other direction.

    Attributes:
        work_bytes: scratch memory of one transform.

    Raises:
        Unsupported: there is no cuFFT.
        DeviceError: cuFFT refuses.
    """

    def __init__(self, size: int, batch: int, inverse: bool) -> None:
        self._library = find_cufft()
        self._inverse = inverse
        plan, work_bytes = ctypes.c_int(), ctypes.c_size_t()
        _check(self._library.cufftCreate(ctypes.byref(plan)), "making a plan")
        self._plan: ctypes.c_int | None = plan
        try:
            _check(self._library.cufftSetAutoAllocation(plan, 0), "making a plan")
            sizes = (ctypes.c_int * 2)(size, size)
            kind = _C2R if inverse else _R2C
            arguments = (plan, 2, sizes, None, 1, 0, None, 1, 0, kind, batch, ctypes.byref(work_bytes))
            _check(self._library.cufftMakePlanMany(*arguments), f"planning {batch} transforms of {size}x{size}")
        except BaseException:
            self.close()
            raise
        self.work_bytes = int(work_bytes.value)

    def set_work_area(self, address: int) -> None:
        """Set the scratch memory, `work_bytes` at a multiple of 256."""
        _check(self._library.cufftSetWorkArea(self._plan, ctypes.c_void_p(address)), "setting a plan's memory")

    def launch(self, stream: CudaStream, source: int, target: int) -> None:
        """Queue the transforms from one address to another; addresses are multiples of 8."""
        _check(self._library.cufftSetStream(self._plan, ctypes.c_void_p(stream.handle)), "setting a plan's stream")
        run = self._library.cufftExecC2R if self._inverse else self._library.cufftExecR2C
        _check(run(self._plan, ctypes.c_void_p(source), ctypes.c_void_p(target)), "launching transforms")

    def close(self) -> None:
        """Destroy the plan."""
        plan, self._plan = self._plan, None
        if plan is not None:
            self._library.cufftDestroy(plan)
