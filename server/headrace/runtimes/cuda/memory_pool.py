"""GPU memory by the calls of the driver's C library: plain, and stream-ordered from the device's memory pool.

PyCUDA has no stream-ordered allocation. `ctypes` releases the interpreter's lock during a call. Rules and attributes: CUDA driver
API, "Memory Management" and "Stream Ordered Memory Allocator". Everything here needs a current context (`driver.current`).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream, succeeded

# CUmemPool_attribute.
_RELEASE_THRESHOLD = 4
_RESERVED_CURRENT = 5
_RESERVED_HIGH = 6


def allocate(size_bytes: int) -> int:
    """Allocate GPU memory by cuMemAlloc and return its address.

    Raises:
        DeviceError: no memory is left.
    """
    address = ctypes.c_uint64()
    result = driver.library().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes))
    succeeded(result, f"allocating {size_bytes} bytes of GPU memory")
    return address.value


def free(address: int) -> None:
    """Free GPU memory of `allocate`; waits for all work of the GPU.

    Raises:
        DeviceError: the driver refuses.
    """
    succeeded(driver.library().cuMemFree_v2(ctypes.c_uint64(address)), "freeing GPU memory")


class StreamMemoryPool:
    """The default memory pool of a GPU.

    Args:
        gpu: number of the GPU.

    Raises:
        DeviceError: the GPU or the driver has no memory pools.
    """

    def __init__(self, gpu: int) -> None:
        device = ctypes.c_int()
        succeeded(driver.library().cuDeviceGet(ctypes.byref(device), ctypes.c_int(gpu)), "finding the GPU")
        self._pool = ctypes.c_void_p()
        result = driver.library().cuDeviceGetDefaultMemPool(ctypes.byref(self._pool), device)
        succeeded(result, "finding the memory pool of the GPU")

    def allocate(self, size_bytes: int, stream: CudaStream) -> int:
        """Allocate memory in the order of a stream and return its address; it is usable by later work of the stream.

        Raises:
            DeviceError: no memory is left.
        """
        address = ctypes.c_uint64()
        handle = ctypes.c_void_p(stream.handle)
        result = driver.library().cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(size_bytes), handle)
        succeeded(result, f"allocating {size_bytes} bytes from the memory pool")
        return address.value

    def free(self, address: int, stream: CudaStream) -> None:
        """Return memory to the pool in the order of a stream; does not wait.

        Raises:
            DeviceError: the driver refuses.
        """
        result = driver.library().cuMemFreeAsync(ctypes.c_uint64(address), ctypes.c_void_p(stream.handle))
        succeeded(result, "returning memory to the pool")

    @contextlib.contextmanager
    def keeping_memory(self) -> Iterator[None]:
        """Let the pool keep freed memory while the block runs; afterwards it is trimmed to what is in use.

        By default a pool returns its free memory to the driver at each synchronisation.
        """
        before = self._read(_RELEASE_THRESHOLD)
        self._write(_RELEASE_THRESHOLD, 2**64 - 1)
        self._write(_RESERVED_HIGH, 0)
        try:
            yield
        finally:
            self._write(_RELEASE_THRESHOLD, before)
            succeeded(driver.library().cuMemPoolTrimTo(self._pool, ctypes.c_size_t(0)), "trimming the memory pool")

    @property
    def reserved_bytes(self) -> int:
        """Memory that the pool holds, used or not."""
        return self._read(_RESERVED_CURRENT)

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest amount that the pool has held since `keeping_memory` began."""
        return self._read(_RESERVED_HIGH)

    def _read(self, attribute: int) -> int:
        value = ctypes.c_uint64()
        result = driver.library().cuMemPoolGetAttribute(self._pool, ctypes.c_int(attribute), ctypes.byref(value))
        succeeded(result, "reading the memory pool")
        return value.value

    def _write(self, attribute: int, number: int) -> None:
        value = ctypes.c_uint64(number)
        result = driver.library().cuMemPoolSetAttribute(self._pool, ctypes.c_int(attribute), ctypes.byref(value))
        succeeded(result, "configuring the memory pool")
