"""Memory of the GPU and pinned memory of the host: every block has one owner, which frees it when it is told.

All of it needs a current context (`driver.current`). Blocks grow and never shrink, so that a caller who repeats himself
allocates nothing. Blocks that an `Allocator` makes are booked in its account before they are allocated.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.core.ledger import HOST, Account, Kind, Reservation
from headrace.core.tensor import Array
from headrace.cuda.driver import Stream, check, loaded


class DeviceBuffer:
    """A block of the GPU's memory.

    Args:
        size_bytes: to begin with.
        reservation: the block's own; None: nobody counts.

    Attributes:
        address: CUdeviceptr; changes when the block grows. 0 once it is freed.
        size_bytes: of the block.
    """

    def __init__(self, size_bytes: int = 0, reservation: Reservation | None = None) -> None:
        self._block: Any = None
        self._reservation = reservation
        self.address = 0
        self.size_bytes = 0
        if size_bytes:
            self.reserve(size_bytes)

    def reserve(self, size_bytes: int) -> None:
        """Make room for so much, at least one byte; what was in the block is lost when it grows.

        Raises:
            OutOfDeviceMemory: there is none; the block is then empty.
            NoRoom: the account has none; the block is then empty.
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
        """Give the block back; it may be reserved anew."""
        block, self._block = self._block, None
        self.address = self.size_bytes = 0
        if block is not None:
            block.free()
            _give_back(self._reservation)


class PinnedBuffer:
    """A block of the host's memory that the GPU copies from and to without a detour.

    Args:
        reservation: the block's own; None: nobody counts.

    Attributes:
        size_bytes: of the block.
    """

    def __init__(self, reservation: Reservation | None = None) -> None:
        self._bytes: Array | None = None
        self._reservation = reservation
        self.size_bytes = 0

    @property
    def address(self) -> int:
        """Where it is in the host's memory, 0 once it is freed."""
        return 0 if self._bytes is None else int(self._bytes.ctypes.data)

    def reserve(self, size_bytes: int) -> None:
        """Make room for so much, at least one byte; what was in the block is lost when it grows.

        Raises:
            OutOfDeviceMemory: the host can pin no more.
        """
        size_bytes = max(size_bytes, 1)
        if size_bytes <= self.size_bytes:
            return
        self.free()
        with booked(self._reservation, size_bytes), check(f"pinning {size_bytes} bytes of host memory"):
            self._bytes = loaded().pagelocked_empty(size_bytes, np.uint8)
        self.size_bytes = size_bytes

    def view(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The front of the block as an array; valid until the block grows or is freed."""
        if self._bytes is None:
            raise RuntimeError("the buffer was freed, or never reserved")
        return self._bytes[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def free(self) -> None:
        """Give the block back; views of it must not be used any more."""
        block, self._bytes = self._bytes, None
        self.size_bytes = 0
        if block is not None:
            # PyCUDA hangs the allocation, which knows how to free itself, below the array.
            base: Any = block.base
            base.free()
            _give_back(self._reservation)


@contextlib.contextmanager
def booked(reservation: Reservation | None, size_bytes: int) -> Iterator[None]:
    """Book a block while it is allocated inside; if that fails it is given back.

    Raises:
        NoRoom: the account has no room; nothing is tried then.
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


def _give_back(reservation: Reservation | None) -> None:
    if reservation is not None:
        reservation.release()


class Allocator:
    """Makes blocks for one owner on one GPU, all of them booked in the owner's account.

    Args:
        gpu: number of the GPU.
        account: of the owner; None: nobody counts.

    Attributes:
        gpu: number of the GPU.
    """

    def __init__(self, gpu: int, account: Account | None = None) -> None:
        self.gpu = gpu
        self._account = account

    def device(self, kind: Kind = Kind.BUFFERS) -> DeviceBuffer:
        """An empty block of the GPU's memory."""
        return DeviceBuffer(0, self.reservation(kind))

    def pinned(self, kind: Kind = Kind.BUFFERS) -> PinnedBuffer:
        """An empty block of pinned memory."""
        return PinnedBuffer(None if self._account is None else self._account.reservation(HOST, kind))

    def reservation(self, kind: Kind, size_bytes: int = 0) -> Reservation | None:
        """Book GPU memory that somebody else allocates; None if nobody counts.

        Raises:
            NoRoom: there is no room for so much.
        """
        return None if self._account is None else self._account.reservation(self.gpu, kind, size_bytes)


def upload(target: DeviceBuffer, source: Array, stream: Stream) -> None:
    """Queue a copy to the GPU; `source` is pinned, contiguous and left alone until the stream is there."""
    if source.nbytes:
        with check("copying to the GPU"):
            loaded().memcpy_htod_async(target.address, source, stream.stream)


def download(target: Array, source: DeviceBuffer, stream: Stream) -> None:
    """Queue a copy from the GPU; `target` is pinned, contiguous and complete once the stream is there."""
    if target.nbytes:
        with check("copying from the GPU"):
            loaded().memcpy_dtoh_async(target, source.address, stream.stream)
