"""A CUDA driver for the process of a Python model that opens memory of another process: a CUDA IPC handle names a file.

The GPU's memory is a mapping of /dev/shm/NAME under its real address. After the close it is unmapped, so that a later read ends
the process. Runs in model processes, too.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from headrace_model import device

HANDLE_BYTES = 64
_READ_WRITE, _SHARED = 3, 1
_OPEN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), device._IpcHandle, ctypes.c_uint)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class FakeIpcDriver:
    """The functions of libcuda that `headrace_model.device` calls.

    Attributes:
        opened: number of successful opens.
        sizes: bytes of the open mappings by address.
        depth: number of pushed contexts.
        devices: number of GPUs.
    """

    def __init__(self) -> None:
        self.opened = 0
        self.sizes: dict[int, int] = {}
        self.depth = 0
        self.devices = 1
        # A C function, so that the handle is passed by value as to the real one.
        self.cuIpcOpenMemHandle_v2 = _OPEN(self._open)

    def _open(self, address: Any, handle: Any, flags: int) -> int:
        if self.depth < 1 or flags != 1:
            return 201
        name = bytes(handle.reserved).rstrip(b"\0").decode()
        try:
            file = os.open("/dev/shm/" + name, os.O_RDWR)
        except OSError:
            return 400
        size = os.fstat(file).st_size
        mapping = _libc.mmap(None, size, _READ_WRITE, _SHARED, file, 0)
        os.close(file)
        self.opened += 1
        self.sizes[mapping] = size
        address[0] = mapping
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:  # noqa: N802
        assert self.depth > 0
        return int(_libc.munmap(address.value, self.sizes.pop(address.value)))

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, size: Any) -> int:  # noqa: N802
        assert self.depth > 0
        ctypes.memmove(target.value, source.value, size.value)
        return 0

    def cuDeviceGet(self, _device: Any, number: int) -> int:  # noqa: N802
        return 0 if number < self.devices else 101

    def cuDevicePrimaryCtxRetain(self, _context: Any, _device: Any) -> int:  # noqa: N802
        return 0

    def cuCtxPushCurrent_v2(self, _context: Any) -> int:  # noqa: N802
        self.depth += 1
        return 0

    def cuCtxPopCurrent_v2(self, _context: Any) -> int:  # noqa: N802
        self.depth -= 1
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        return 0


def install() -> FakeIpcDriver:
    """Replace the driver of this process."""
    driver = FakeIpcDriver()
    device._driver = lambda: driver  # type: ignore[assignment]
    device._primary_context.cache_clear()
    return driver


def host_array(capsule: Any) -> Any:
    """Return the values of a capsule of the fake GPU, as an array of a framework over the same memory."""
    from headrace_model.python_tensors import Tensor

    tensor = device.read_capsule(capsule)
    assert tensor.device_type == device.CUDA
    tensor.device_type, tensor.device_id = device.CPU, 0
    return Tensor.from_dlpack("", capsule).as_numpy()
