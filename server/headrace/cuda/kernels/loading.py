"""Kernels of a file: compiled for a GPU, loaded there, launched on a stream."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.cuda import driver
from headrace.cuda.driver import Stream, check, loaded
from headrace.cuda.nvrtc import compile_cuda

_FOLDER = Path(__file__).parent
# Of a block, where a kernel has no reason for another number.
THREADS = 256


class Kernels:
    """The kernels of one file of this folder, loaded on a GPU.

    Args:
        device: its ordinal.
        file: name of the file.
        options: what the file's names stand for.
        types: by kernel, the types of its arguments as `struct` writes them.

    Raises:
        Unsupported: no GPU, or no compiler for it.
        DeviceError: the driver or the compiler refuses.
    """

    def __init__(self, device: int, file: str, options: Mapping[str, int], types: Mapping[str, str]) -> None:
        self._device = device
        source = (_FOLDER / "half.cuh").read_text(encoding="utf-8") + (_FOLDER / file).read_text(encoding="utf-8")
        told = [f"-D{name}={value}" for name, value in options.items()]
        self._kernels: dict[str, Any] = {}
        with driver.current(device):
            with check("asking what the GPU is"):
                capability = loaded().Device(device).compute_capability()
            code = compile_cuda(source, file, tuple(capability), told)
            with check(f"loading {file}"):
                self._module: Any = loaded().module_from_buffer(code)
                for name, arguments in types.items():
                    kernel = self._kernels[name] = self._module.get_function(name)
                    kernel.prepare(arguments)

    def launch(self, name: str, grid: tuple[int, int], threads: int, stream: Stream, *arguments: int) -> None:
        """Queue a kernel; the device is current.

        Raises:
            DeviceError: the driver refuses.
        """
        with check(f"launching the kernel {name}"):
            self._kernels[name].prepared_async_call(grid, (threads, 1, 1), stream.stream, *arguments)

    def close(self) -> None:
        """Unload them; all work must be done."""
        # PyCUDA unloads a module in whatever thread lets go of it, if its device is current there.
        with driver.current(self._device):
            self._kernels.clear()
            self._module = None


def is_half(dtype: npt.DTypeLike) -> int:
    """What HALF stands for.

    Raises:
        ValueError: kernels do not read or write this.
    """
    kind = np.dtype(dtype)
    if kind not in (np.float16, np.float32):
        raise ValueError(f"kernels read and write float32 and float16, not {kind}")
    return int(kind == np.float16)
