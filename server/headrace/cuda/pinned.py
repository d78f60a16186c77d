"""Pinned memory of the host that every GPU reads by itself: mappings that are registered with the driver.

Flags and rules: CUDA driver API, "Memory Management", cuMemHostRegister and cuMemHostGetDevicePointer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.resident import PINNED, ResidentRows
from headrace.core.tensor import Array
from headrace.cuda import libcuda
from headrace.cuda.driver import DeviceError, current
from headrace.cuda.libcuda import succeeded

# CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP: for all contexts, and with an address on the device.
_FLAGS = 1 | 2

# Takes what gives memory back, and does it at once or elsewhere.
Release = Callable[[Callable[[], None]], None]


class PinnedMapping:
    """A mapping that the driver has registered. Its pages stay where they are until the last reference to this is gone.

    Registering a mapping takes time in proportion to its pages; the interpreter's lock is given away meanwhile.

    Attributes:
        address: of its first byte, in the host's memory and on every GPU alike.

    Args:
        mapping: not closed by anybody else from now on.
        device: number of a GPU whose context registers it.
        release: runs what unregisters and unmaps it; on whatever thread drops the last reference.

    Raises:
        DeviceError: the driver cannot register it, or the GPU would see it elsewhere; it is unmapped then.
        Unsupported: there is no such GPU.
    """

    __slots__ = ("__weakref__", "address")

    def __init__(self, mapping: mmap.mmap, device: int, release: Release) -> None:
        # The array is only asked for its address: what is mapped is never touched here, since a client may have truncated it.
        self.address: int = np.frombuffer(mapping, np.uint8).ctypes.data
        try:
            with current(device):
                _register(self.address, len(mapping))
        except BaseException:
            mapping.close()
            raise
        give_back = functools.partial(_give_back, mapping, self.address, device)
        weakref.finalize(self, release, give_back).atexit = False


def pinned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike, device: int = 0) -> Array:
    """A new array in pinned memory, given back when nothing refers to it any more.

    Args:
        shape: of the array.
        dtype: of its elements.
        device: number of a GPU whose context registers it; all of them read it.

    Raises:
        DeviceError: the host can pin no more.
        Unsupported: there is no such GPU.
    """
    kind: np.dtype[Any] = np.dtype(dtype)
    size_bytes = max(math.prod(shape) * kind.itemsize, 1)
    block = _Block(PinnedMapping(mmap.mmap(-1, size_bytes), device, _now), size_bytes)
    return np.asarray(block)[: math.prod(shape) * kind.itemsize].view(kind).reshape(shape)


def pinned_rows(array: Array, device: int = 0) -> ResidentRows:
    """Rows in pinned memory of this process, to be given to a model without a copy.

    Args:
        array: C-contiguous, in memory that is pinned and portable: of `pinned_empty`, say. It must not change before the
            request is answered.
        device: number of a GPU whose context is asked for the address.

    Raises:
        ValueError: it is not contiguous, or has no dimensions.
        DeviceError: its memory is not pinned.
    """
    if not array.flags.c_contiguous or not array.ndim:
        raise ValueError("pinned rows are a C-contiguous array of at least one dimension")
    start = array.ctypes.data
    with current(device):
        address = _device_address(start)
    flat = array.reshape(-1).view(np.uint8)

    def copy(asked: int, size_bytes: int) -> Array:
        return flat[asked - address : asked - address + size_bytes].copy()

    return ResidentRows(address, PINNED, array.dtype, array.shape, array, copy)


class _Block:
    """Lends a mapping to NumPy, and lives as long as arrays on it."""

    def __init__(self, mapping: PinnedMapping, size_bytes: int) -> None:
        self._mapping = mapping
        self.__array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (mapping.address, False),
            "version": 3,
        }


def _register(address: int, size_bytes: int) -> None:
    doing = f"pinning {size_bytes} bytes of the host's memory"
    succeeded(
        libcuda.library().cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _FLAGS), doing
    )
    try:
        seen = _device_address(address)
        if seen != address:
            # Then each GPU might have an address of its own for it (CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0).
            raise DeviceError(f"{doing} failed: the GPU sees it under another address")
    except DeviceError:
        libcuda.library().cuMemHostUnregister(ctypes.c_void_p(address))
        raise


def _device_address(address: int) -> int:
    found = ctypes.c_ulonglong()
    result = libcuda.library().cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
    succeeded(result, "looking for pinned memory")
    return found.value


def _give_back(mapping: mmap.mmap, address: int, device: int) -> None:
    # A GPU that has failed for good cannot unregister anything any more.
    with contextlib.suppress(DeviceError), current(device):
        succeeded(libcuda.library().cuMemHostUnregister(ctypes.c_void_p(address)), "letting go of pinned memory")
    mapping.close()


def _now(job: Callable[[], None]) -> None:
    job()
