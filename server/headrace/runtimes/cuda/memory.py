"""GPU memory and pinned host memory: every block has one owner, which frees it explicitly.

Everything here needs a current context (`driver.current`). Blocks grow and never shrink, so repeated batches allocate
nothing. Blocks of an `Allocator` are booked in its account before they are allocated. A `PinnedMapping` is a mapping
registered with the driver, which every GPU reads directly. Flags and rules: CUDA driver API, "Memory Management",
cuMemHostRegister and cuMemHostGetDevicePointer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.ledger import HOST, Kind, MemoryAccount, Reservation
from headrace.core.tensor import PINNED, Array, ResidentRows
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream, DeviceError, check, current, loaded, succeeded


class DeviceBuffer:
    """Block of GPU memory.

    Args:
        size_bytes: initial size.
        reservation: booking of this block; None: not booked.

    Attributes:
        address: CUdeviceptr; changes when the block grows, 0 once it is freed.
        size_bytes: size of the block.
    """

    def __init__(self, size_bytes: int = 0, reservation: Reservation | None = None) -> None:
        self._block: Any = None
        self._reservation = reservation
        self.address = 0
        self.size_bytes = 0
        if size_bytes:
            self.reserve(size_bytes)

    def reserve(self, size_bytes: int) -> None:
        """Grow the block to at least `size_bytes`, at least one byte; growing loses its content.

        Raises:
            OutOfDeviceMemory: the GPU has no memory left; the block is then empty.
            NoRoom: the account has no room; the block is then empty.
        """
        size_bytes = max(size_bytes, 1)
        if size_bytes <= self.size_bytes:
            return
        self.free()
        with booked(self._reservation, size_bytes), check(f"allocating {size_bytes} bytes of GPU memory"):
            self._block = loaded().mem_alloc(size_bytes)
        self.address = int(self._block)
        self.size_bytes = size_bytes

    def free(self) -> None:
        """Free the block; it may be reserved again."""
        block, self._block = self._block, None
        self.address = self.size_bytes = 0
        if block is not None:
            block.free()
            _release(self._reservation)


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """GPU memory of another owner.

    Attributes:
        address: CUdeviceptr.
    """

    address: int


class PinnedBuffer:
    """Block of pinned host memory, which the GPU copies from and to directly.

    Args:
        reservation: booking of this block; None: not booked.

    Attributes:
        size_bytes: size of the block.
    """

    def __init__(self, reservation: Reservation | None = None) -> None:
        self._bytes: Array | None = None
        self._reservation = reservation
        self.size_bytes = 0

    @property
    def address(self) -> int:
        """Host address, 0 once the block is freed."""
        return 0 if self._bytes is None else int(self._bytes.ctypes.data)

    def reserve(self, size_bytes: int) -> None:
        """Grow the block to at least `size_bytes`, at least one byte; growing loses its content.

        Raises:
            OutOfDeviceMemory: the host cannot pin more.
        """
        size_bytes = max(size_bytes, 1)
        if size_bytes <= self.size_bytes:
            return
        self.free()
        with booked(self._reservation, size_bytes), check(f"pinning {size_bytes} bytes of host memory"):
            self._bytes = loaded().pagelocked_empty(size_bytes, np.uint8)
        self.size_bytes = size_bytes

    def view(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the front of the block as an array; valid until the block grows or is freed."""
        if self._bytes is None:
            raise RuntimeError("the buffer has no memory: call reserve() before view(), and no view() after free()")
        return self._bytes[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def free(self) -> None:
        """Free the block; views of it must not be used any more."""
        block, self._bytes = self._bytes, None
        self.size_bytes = 0
        if block is not None:
            # The array's base is PyCUDA's allocation, which has the method that frees it.
            base: Any = block.base
            base.free()
            _release(self._reservation)


@contextlib.contextmanager
def booked(reservation: Reservation | None, size_bytes: int) -> Iterator[None]:
    """Book a block while it is allocated inside; release the booking if that fails.

    Raises:
        NoRoom: the account has no room; the body does not run.
    """
    if reservation is None:
        yield
        return
    reservation.resize(size_bytes)
    try:
        yield
    except BaseException:
        reservation.release()
        raise


def _release(reservation: Reservation | None) -> None:
    if reservation is not None:
        reservation.release()


class Allocator:
    """Creates blocks for one owner on one GPU, all of them booked in the owner's account.

    Args:
        gpu: number of the GPU.
        account: of the owner; None: not booked.

    Attributes:
        gpu: number of the GPU.
    """

    def __init__(self, gpu: int, account: MemoryAccount | None = None) -> None:
        self.gpu = gpu
        self._account = account

    def device(self, kind: Kind = Kind.BUFFERS) -> DeviceBuffer:
        """Create an empty block of GPU memory."""
        return DeviceBuffer(0, self.reservation(kind))

    def pinned(self, kind: Kind = Kind.BUFFERS) -> PinnedBuffer:
        """Create an empty block of pinned memory."""
        return PinnedBuffer(None if self._account is None else self._account.reservation(HOST, kind))

    def reservation(self, kind: Kind, size_bytes: int = 0) -> Reservation | None:
        """Book GPU memory that other code allocates (e.g. TensorRT); None without an account.

        Raises:
            NoRoom: the account has no room for `size_bytes`.
        """
        return None if self._account is None else self._account.reservation(self.gpu, kind, size_bytes)


def upload(target: DeviceBuffer | DeviceBlock, source: Array, stream: CudaStream) -> None:
    """Queue a copy to the GPU; `source` is pinned, contiguous, and not written until the stream has passed the copy."""
    if source.nbytes:
        with check("copying to the GPU"):
            loaded().memcpy_htod_async(target.address, source, stream.stream)


def download(target: Array, source: DeviceBuffer | DeviceBlock, stream: CudaStream) -> None:
    """Queue a copy from the GPU; `target` is pinned, contiguous, and complete once the stream has passed the copy."""
    if target.nbytes:
        with check("copying from the GPU"):
            loaded().memcpy_dtoh_async(target, source.address, stream.stream)


def read_now(target: Array, address: int) -> None:
    """Wait for all work of the current GPU and copy from an address of it; `target` is contiguous."""
    if target.nbytes:
        with check("copying from the GPU"):
            loaded().Context.synchronize()
            loaded().memcpy_dtoh(target, address)


def copy_on_gpu(target: int, source: DeviceBuffer | DeviceBlock, size_bytes: int, stream: CudaStream) -> None:
    """Queue a copy of the first bytes of a block to another address on its GPU."""
    copy_address(target, source.address, size_bytes, stream)


def copy_address(target: int, source: int, size_bytes: int, stream: CudaStream) -> None:
    """Queue a copy between two addresses on the current GPU."""
    if size_bytes:
        with check("copying on the GPU"):
            loaded().memcpy_dtod_async(target, source, size_bytes, stream.stream)


def read_gpu(gpu: int, address: int, size_bytes: int) -> Array:
    """Return a host copy of GPU memory that no work writes any more, uint8[size_bytes]; any thread may call.

    Raises:
        DeviceError: the GPU has failed.
    """
    array = np.empty(size_bytes, np.uint8)
    if size_bytes:
        with current(gpu), check("copying from the GPU"):
            loaded().memcpy_dtoh(array, address)
    return array


# CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP: for all contexts, with a device address.
_FLAGS = 1 | 2

# Runs a callback that frees memory, at once or on another thread.
Release = Callable[[Callable[[], None]], None]


class PinnedMapping:
    """Memory mapping registered with the driver; its pages are pinned until the last reference to this object is gone.

    Registration takes time in proportion to the number of pages; the interpreter's lock is released meanwhile.

    Args:
        mapping: owned by this object from now on.
        device: number of the GPU whose context registers it.
        release: runs the callback that unregisters and unmaps; called on the thread that drops the last reference.

    Attributes:
        address: of the first byte, the same in host memory and on every GPU.

    Raises:
        DeviceError: the driver cannot register it, or the GPU would see another address; it is unmapped then.
        Unsupported: there is no such GPU.
    """

    __slots__ = ("__weakref__", "address")

    def __init__(self, mapping: mmap.mmap, device: int, release: Release) -> None:
        # The array only supplies the address. The mapping is never read here: a client may have truncated the file.
        self.address: int = np.frombuffer(mapping, np.uint8).ctypes.data
        try:
            with current(device):
                _register(self.address, len(mapping))
        except BaseException:
            mapping.close()
            raise
        release_job = functools.partial(_unregister, mapping, self.address, device)
        weakref.finalize(self, release, release_job).atexit = False


def pinned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike, device: int = 0) -> Array:
    """Return a new array in pinned memory, freed when nothing refers to it any more.

    Args:
        shape: of the array.
        dtype: of its elements.
        device: number of the GPU whose context registers it; every GPU can read it.

    Raises:
        DeviceError: the host cannot pin more.
        Unsupported: there is no such GPU.
    """
    kind: np.dtype[Any] = np.dtype(dtype)
    size_bytes = max(math.prod(shape) * kind.itemsize, 1)
    block = _Block(PinnedMapping(mmap.mmap(-1, size_bytes), device, _run_now), size_bytes)
    return np.asarray(block)[: math.prod(shape) * kind.itemsize].view(kind).reshape(shape)


def pinned_rows(array: Array, device: int = 0) -> ResidentRows:
    """Wrap an array in pinned memory as rows that a model reads without a copy.

    Args:
        array: C-contiguous, in pinned and portable memory (e.g. of `pinned_empty`). It must not change before the
            response.
        device: number of the GPU whose context resolves the address.

    Raises:
        ValueError: the array is not contiguous, or has no dimensions.
        DeviceError: its memory is not pinned.
    """
    if not array.flags.c_contiguous or not array.ndim:
        raise ValueError("pinned rows are a C-contiguous array of at least one dimension")
    start = array.ctypes.data
    with current(device):
        address = _device_address(start)
    flat = array.reshape(-1).view(np.uint8)

    def copy(start_address: int, size_bytes: int) -> Array:
        return flat[start_address - address : start_address - address + size_bytes].copy()

    return ResidentRows(address, PINNED, array.dtype, array.shape, array, copy)


class _Block:
    """Exposes a mapping to NumPy and lives as long as arrays on it."""

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
        driver.library().cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _FLAGS), doing
    )
    try:
        device_address = _device_address(address)
        if device_address != address:
            # Each GPU could then have its own address (CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0).
            raise DeviceError(f"{doing} failed: the GPU sees it under another address")
    except DeviceError:
        driver.library().cuMemHostUnregister(ctypes.c_void_p(address))
        raise


def _device_address(address: int) -> int:
    device_address = ctypes.c_ulonglong()
    result = driver.library().cuMemHostGetDevicePointer_v2(ctypes.byref(device_address), ctypes.c_void_p(address), 0)
    succeeded(result, "resolving the address of pinned memory")
    return device_address.value


def _unregister(mapping: mmap.mmap, address: int, device: int) -> None:
    # A GPU that has failed permanently cannot unregister memory.
    with contextlib.suppress(DeviceError), current(device):
        succeeded(driver.library().cuMemHostUnregister(ctypes.c_void_p(address)), "unregistering pinned memory")
    mapping.close()


def _run_now(job: Callable[[], None]) -> None:
    job()
