"""cuFFT without a GPU: the transforms by NumPy, on the host memory of the fake GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class HostFft:
    """cuFFT by NumPy.

    Attributes:
        plans: by handle, size, batch and type.
        failing: name of a function that fails.
    """

    def __init__(self) -> None:
        self.plans: dict[int, tuple[int, int, int]] = {}
        self.failing = ""
        self._created = 0

    def cufftCreate(self, plan: Any) -> int:  # noqa: N802
        self._created += 1
        plan._obj.value = self._created
        self.plans[self._created] = (0, 0, 0)
        return 0

    def cufftSetAutoAllocation(self, plan: Any, automatic: int) -> int:  # noqa: N802
        assert automatic == 0
        return 0

    def cufftMakePlanMany(  # noqa: N802
        self,
        plan: Any,
        rank: int,
        sizes: Any,
        a: Any,
        b: int,
        c: int,
        d: Any,
        e: int,
        f: int,
        kind: int,
        batch: int,
        work: Any,
    ) -> int:
        assert (rank, sizes[0], a, d) == (2, sizes[1], None, None)
        self.plans[plan.value] = sizes[0], batch, kind
        work._obj.value = 1024
        return 8 if self.failing == "cufftMakePlanMany" else 0

    def cufftSetWorkArea(self, plan: Any, address: Any) -> int:  # noqa: N802
        assert address.value
        return 0

    def cufftSetStream(self, plan: Any, stream: Any) -> int:  # noqa: N802
        assert stream.value == 77
        return 0

    def cufftExecR2C(self, plan: Any, source: Any, target: Any) -> int:  # noqa: N802
        real, spectra = self._arrays(plan, source, target)
        spectra[:] = np.fft.rfft2(real)
        return 6 if self.failing == "cufftExecR2C" else 0

    def cufftExecC2R(self, plan: Any, source: Any, target: Any) -> int:  # noqa: N802
        real, spectra = self._arrays(plan, target, source)
        real[:] = np.fft.irfft2(spectra, real.shape[1:], norm="forward")
        spectra[:] = np.nan
        return 0

    def cufftDestroy(self, plan: Any) -> int:  # noqa: N802
        del self.plans[plan.value]
        return 0

    def _arrays(self, plan: Any, real: Any, spectra: Any) -> Any:
        size, batch, _ = self.plans[plan.value]

        def at(pointer: Any, columns: int, dtype: Any) -> Any:
            count = batch * size * columns * np.dtype(dtype).itemsize
            content = (ctypes.c_char * count).from_address(pointer.value)
            return np.frombuffer(content, dtype).reshape(batch, size, columns)

        return at(real, size, np.float32), at(spectra, size // 2 + 1, np.complex64)
