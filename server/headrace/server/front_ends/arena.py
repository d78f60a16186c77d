"""Shared memory of a front end and the engine: the arena with large tensors.

The front end allocates the arena and its slots; the engine maps it. A slot is free again when no view of it is left in the front
end, and the engine has released every request that named it. Each allocation has a generation, so that a late release cannot free
a slot that is in use again. An arena belongs to one connection of the two: after a reconnect there is a new one.

Slots are blocks of a buddy allocator (K. C. Knowlton, "A fast storage allocator", CACM 8(10), 1965): powers of two times
`UNIT_BYTES`. Memory that was never used takes no pages.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.scattered_rows import ScatteredRows, as_group_input
from headrace.core.tensor import NOWHERE, PINNED, Array, HostCopy, ResidentRows, as_input
from headrace.models.shared_memory import Pin, Pinned
from headrace.server.front_ends.frames import FrameError, TensorPlace

UNIT_BYTES = 64 << 10
DEFAULT_ARENA_BYTES = 256 << 20
# Tensors start at multiples of this, for vector loads of CPU and GPU.
ALIGNMENT = 64

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class BuddyBlocks:
    """Allocates blocks of 2^n units.

    Args:
        units: number of units.
    """

    def __init__(self, units: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(max(units.bit_length(), 1))]
        self._orders: dict[int, int] = {}
        start = 0
        for order in range(len(self._free) - 1, -1, -1):
            if units >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    @property
    def allocated(self) -> int:
        """Number of allocated units."""
        return sum([1 << order for order in self._orders.values()])

    def allocate(self, units: int) -> int:
        """Allocate at least `units` units, at the lowest address of the smallest block; returns the first, -1 for no room."""
        wanted = (units - 1).bit_length()
        for order in range(wanted, len(self._free)):
            if self._free[order]:
                start = min(self._free[order])
                self._free[order].remove(start)
                while order > wanted:
                    order -= 1
                    self._free[order].add(start + (1 << order))
                self._orders[start] = order
                return start
        return -1

    def free(self, start: int) -> None:
        """Free the block that starts at this unit, and join it with free neighbours."""
        order = self._orders.pop(start)
        while order + 1 < len(self._free) and (buddy := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)

    def block(self, unit: int) -> int:
        """Return the first unit of the allocated block that contains `unit`, -1 for none."""
        for order in range(len(self._free)):
            start = unit >> order << order
            if self._orders.get(start, -1) >= order:
                return start
        return -1


class _Memory:
    """A range of mapped memory as a NumPy buffer; `end` is called when the last array of it is gone, on any thread."""

    __slots__ = ("__array_interface__", "_end", "_mapping")

    def __init__(self, mapping: mmap.mmap, address: int, size_bytes: int, end: Callable[[], None]) -> None:
        self._mapping, self._end = mapping, end
        self.__array_interface__ = {"version": 3, "shape": (size_bytes,), "typestr": "|u1", "data": (address, False)}

    def __del__(self) -> None:
        self._end()


def _view(mapping: mmap.mmap, address: int, size_bytes: int, end: Callable[[], None]) -> npt.NDArray[np.uint8]:
    return np.asarray(_Memory(mapping, address, size_bytes, end))


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class Arena:
    """The front end's side. Ownership: the event loop, but views may end on any thread.

    Args:
        size_bytes: of the arena, rounded up to whole units.

    Attributes:
        fd: its memory file, sealed against a change of its size.
    """

    def __init__(self, size_bytes: int = DEFAULT_ARENA_BYTES) -> None:
        units = -(-size_bytes // UNIT_BYTES)
        self.size_bytes = units * UNIT_BYTES
        self.fd = os.memfd_create("headrace-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        self._mapping = mmap.mmap(self.fd, self.size_bytes)
        self._base = _address(self._mapping)
        self._blocks = BuddyBlocks(units)
        self._generations = [0] * units
        self._users: dict[
            int, int
        ] = {}  # views of the front end (one at most) and requests in the engine, by first unit
        self._ended: deque[int] = deque()  # slots whose view has ended, appended by any thread

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as views of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the slots in use."""
        self._collect()
        return self._blocks.allocated * UNIT_BYTES

    def allocate(self, size_bytes: int, head_bytes: int = 0) -> npt.NDArray[np.uint8] | None:
        """Allocate a slot.

        Args:
            size_bytes: of the result.
            head_bytes: the byte behind these is aligned to `ALIGNMENT`: the tensors behind a header.

        Returns:
            uint8[size_bytes], or None if there is no room. The slot is in use while a view of the result is.
        """
        self._collect()
        shift = -head_bytes % ALIGNMENT
        start = self._blocks.allocate(-(-(size_bytes + shift) // UNIT_BYTES))
        if start < 0:
            return None
        self._generations[start] = self._generations[start] + 1 & 0xFFFFFFFF
        self._users[start] = 1
        address = self._base + start * UNIT_BYTES + shift

        def end(ended: deque[int] = self._ended) -> None:
            ended.append(start)

        return _view(self._mapping, address, size_bytes, end)

    def find(self, array: Array) -> tuple[int, int, int] | None:
        """Return slot, generation and offset in the arena of a C-contiguous array in a slot; None for other arrays."""
        offset = array.__array_interface__["data"][0] - self._base
        if not 0 <= offset < self.size_bytes or not array.flags.c_contiguous:
            return None
        start = self._blocks.block(offset // UNIT_BYTES)
        return None if start < 0 else (start, self._generations[start], offset)

    def use(self, slot: int) -> None:
        """Count a request that names a slot, before it is sent."""
        self._users[slot] += 1

    def release(self, slot: int, generation: int) -> None:
        """End a request's use of a slot; ignored for an earlier generation."""
        if slot < len(self._generations) and self._generations[slot] == generation and slot in self._users:
            self._end_use(slot)

    def _collect(self) -> None:
        while self._ended:
            self._end_use(self._ended.popleft())

    def _end_use(self, slot: int) -> None:
        self._users[slot] -= 1
        if not self._users[slot]:
            del self._users[slot]
            self._blocks.free(slot)


OnRelease = Callable[[Sequence[tuple[int, int]]], None]
"""Releases slots, each with its generation; any thread may call."""


class _SlotOwner:
    """Releases slots when the last rows in them are gone, on any thread."""

    __slots__ = ("_on_release", "_slots")

    def __init__(self, on_release: OnRelease, slots: Sequence[tuple[int, int]]) -> None:
        self._on_release, self._slots = on_release, slots

    def __del__(self) -> None:
        self._on_release(self._slots)


class MappedArena:
    """The engine's side of a front end's arena. Ownership: the event loop, but views may end on any thread.

    Args:
        fd: memory file of the arena, owned from now on.
        on_release: called on any thread with slots and their generations when the last view of a request in them has ended.

    Raises:
        FrameError: the file could shrink or has no whole units: reading it could end this process.
    """

    def __init__(self, fd: int, on_release: OnRelease) -> None:
        self.fd = fd
        self._on_release = on_release
        self.pinned: Pinned | None = None  # written once, by the pinning thread
        self._is_pinning = False
        try:
            self.size_bytes = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or not self.size_bytes or self.size_bytes % UNIT_BYTES:
                raise FrameError(
                    f"an arena has {self.size_bytes} bytes and seals {seals:#x}; it must have units of {UNIT_BYTES} bytes and be "
                    "sealed against shrinking: it is refused"
                )
            self._mapping = mmap.mmap(fd, self.size_bytes)
        except (OSError, FrameError):
            os.close(fd)
            raise
        self._base = _address(self._mapping)

    def start_pinning(self, pin: Pin, devices: Collection[int]) -> None:
        """Pin the arena for kernels, on another thread, if models on GPUs read inputs; that takes all its memory.

        Until then, and if it fails, inputs are copied to GPUs by the host.
        """
        if devices and not self._is_pinning:
            self._is_pinning = True
            os.posix_fallocate(self.fd, 0, self.size_bytes)
            pin(self.fd, 0, self.size_bytes, min(devices), self._on_pinned)

    def _on_pinned(self, pinned: Pinned | None) -> None:
        self.pinned = pinned

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def view(self, slot: int, generation: int, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a range as uint8[size_bytes]; the slot is released when its last view has ended.

        Raises:
            FrameError: the range exceeds the arena.
        """
        self._check(offset, size_bytes)
        end = partial(self._on_release, ((slot, generation),))
        return _view(self._mapping, self._base + offset, size_bytes, end)

    def tensor(self, place: TensorPlace, dtype: np.dtype[Any], on_gpu: bool) -> Array:
        """Return a tensor in a slot, which is released when its last view has ended.

        Args:
            place: slot, range and shape of the tensor.
            dtype: of its elements.
            on_gpu: a model on a GPU reads it: rows in pinned memory once the arena is pinned, else an array.

        Raises:
            FrameError: the range exceeds the arena.
        """
        pinned, shape = self.pinned, place.shape
        if on_gpu and pinned is not None:
            self._check(place.offset, place.size_bytes)
            address = pinned.address + place.offset
            owner = (pinned, _SlotOwner(self._on_release, ((place.slot, place.generation),)))
            device = NOWHERE if address % dtype.alignment else PINNED
            return as_input(ResidentRows(address, device, dtype, shape, owner, self._copy))
        view = self.view(place.slot, place.generation, place.offset, place.size_bytes)
        array: Array = np.ndarray(shape, dtype, view.data) if len(view) else np.empty(shape, dtype)
        return array

    def scattered(
        self, piece: TensorPlace, slots: Sequence[tuple[int, int, int]], dtype: np.dtype[Any], on_gpu: bool
    ) -> Array:
        """Return the input of a group, one piece for each request; all slots are released when its last view has ended.

        Args:
            piece: shape and size of each piece.
            slots: slot, generation and offset in the arena of each piece.
            dtype, on_gpu: as of `tensor`.

        Raises:
            FrameError: a range exceeds the arena, or a piece has no elements.
        """
        offsets, size_bytes = [offset for _, _, offset in slots], piece.size_bytes
        if not size_bytes:
            raise FrameError("a piece of a group's tensor has no elements")
        self._check(max(offsets), size_bytes)
        ends, pinned = [(slot, generation) for slot, generation, _ in slots], self.pinned
        if on_gpu and pinned is not None:
            base = pinned.address
            addresses = tuple([base + offset for offset in offsets])
            device = NOWHERE if reduce(or_, addresses) % dtype.alignment else PINNED
            make = partial(_resident_piece, device, (pinned, _SlotOwner(self._on_release, ends)), self._copy)
        else:
            addresses, device = tuple(offsets), NOWHERE
            memory = _view(self._mapping, self._base, self.size_bytes, partial(self._on_release, ends))
            make = partial(_array_piece, memory.data)
        return as_group_input(ScatteredRows(addresses, device, dtype, piece.shape, make))

    def _check(self, offset: int, size_bytes: int) -> None:
        if offset + size_bytes > self.size_bytes:
            raise FrameError(f"{size_bytes} bytes at {offset} exceed an arena of {self.size_bytes} bytes")

    def _copy(self, address: int, size_bytes: int) -> Array:
        """Copy rows in pinned memory, uint8[size_bytes]."""
        assert self.pinned is not None
        return np.ndarray((size_bytes,), np.uint8, self._mapping, address - self.pinned.address).copy()


def _resident_piece(
    device: int, owner: object, copy: HostCopy, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Array:
    return as_input(ResidentRows(address, device, dtype, shape, owner, copy))


def _array_piece(memory: memoryview, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    array: Array = np.ndarray(shape, dtype, memory, offset)
    return array
