"""Memory that the server and the process of a model instance share: the tensors of one batch.

A slot is a memory file (memfd), sealed against shrinking: either side may grow it, and no access beyond its end can raise
SIGBUS. It has no name, so nothing remains after a crash. Layout:

    0      u64  number of the batch that the model's process has begun, written before it reads the batch
    8      u64  number of the batch that it has finished, written before it sends the answer
    64     u8   cancel flag of each member, written by the server
    4096   inputs at offsets that the server chooses; outputs behind them, at offsets that the model's process chooses
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections import deque
from typing import Any

import numpy as np

from headrace_model.protocol import (
    BYTES,
    DTYPES,
    MAX_MEMBERS,
    SPILL,
    SPILL_BYTES,
    SPILLED,
    ProtocolError,
    pack_texts,
)

CANCEL_START = 64
START = 4096
ALIGNMENT = 64
_NUMBER = struct.Struct("<Q")
_SMALLEST_BYTES = 1 << 16
_LARGE_BYTES = 1 << 26
_RELEASE_BYTES = 1 << 22  # in one step, which other threads wait for
# fcntl(2); the module fcntl has these names from Python 3.9 on.
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SEAL = 1
_F_SEAL_SHRINK = 2
_MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_NO_FLAGS = bytes(MAX_MEMBERS)


def aligned(offset: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Slot:
    """One end's view of a slot.

    Ownership: one thread. Arrays of an earlier, smaller map stay valid: they show the same memory.

    Args:
        fd: descriptor of the memory file; owned by the slot.

    Attributes:
        fd: see above.
        memory: all bytes that this end has mapped, uint8[size].
        address: address of the memory.
        interface: NumPy's array interface of the memory.
        size: bytes that this end has mapped.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = 0
        self._map()

    @classmethod
    def create(cls, name: str, size: int) -> Slot:
        """Create a slot.

        Args:
            name: name of the memory file in /proc, for diagnosis.
            size: initial size in bytes.

        Raises:
            OSError: there is no memory, or the machine is not Linux.
        """
        import fcntl

        fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        slot = cls.__new__(cls)
        slot.fd = fd  # closed with the slot
        os.ftruncate(fd, max(aligned(size), _SMALLEST_BYTES))
        # The other end must not add seals: with one against growth no larger batch could be written.
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_SEAL)
        slot.size = 0
        slot._map()
        return slot

    @classmethod
    def received(cls, fd: int) -> Slot:
        """Return a slot that another process has created.

        Args:
            fd: descriptor of its memory file; owned, also if this raises.

        Raises:
            ProtocolError: it is no memory file, or can be made smaller: a read behind its end would raise SIGBUS.
        """
        import fcntl

        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError:
            seals = 0
        # In huge pages a write raises SIGBUS if no page is left.
        if not seals & _F_SEAL_SHRINK or os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            os.close(fd)
            raise ProtocolError("a descriptor that is no memory file, or is not sealed against shrinking")
        return cls(fd)

    def _map(self) -> None:
        self._mmap = mmap.mmap(self.fd, 0)
        self.size = len(self._mmap)
        self.memory: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(self._mmap, np.uint8)
        # Kept, since reading it takes 1 us, and each batch needs it.
        self.interface: dict[str, Any] = self.memory.__array_interface__
        self.address: int = self.interface["data"][0]

    def reserve(self, end: int) -> None:
        """Grow the memory so that `end` bytes can be used; at least by doubling.

        Raises:
            OSError: there is no memory.
        """
        if end > self.size:
            if end > _MACHINE_BYTES:  # writing it would take all memory before the kernel ends this process
                raise OSError(errno.ENOMEM, f"a batch of {end} bytes, the machine has {_MACHINE_BYTES} bytes of memory")
            if end > os.fstat(self.fd).st_size:
                os.ftruncate(self.fd, aligned(max(end, 2 * self.size)))
            self._map()

    def reach(self, offset: int, size: int) -> None:
        """Map a range that the other end has written.

        Raises:
            ProtocolError: the range is not in the memory.
        """
        end = offset + size
        if end > self.size:
            if offset < 0 or size < 0 or end > os.fstat(self.fd).st_size:
                raise ProtocolError(f"a range of {size} bytes at {offset} exceeds the shared memory")
            self._map()

    def check_written(self, size: int) -> None:
        """Check that the memory of a large range exists: a file with holes costs the other end nothing, a copy of it does.

        Raises:
            ProtocolError: the file has less memory than the range.
        """
        if size > _LARGE_BYTES and size > os.fstat(self.fd).st_blocks * 512:
            raise ProtocolError(f"a range of {size} bytes has holes")

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of a range; raises ProtocolError if it is not in the memory."""
        self.reach(offset, size)
        return self.memory[offset : offset + size].tobytes()

    def write(self, offset: int, content: bytes) -> None:
        """Write bytes into reserved memory."""
        self._mmap[offset : offset + len(content)] = content

    def put(self, offset: int, array: np.ndarray[Any, Any], code: int) -> int:
        """Copy a tensor to an offset, growing the memory if needed; return its size in bytes.

        Args:
            offset: where it begins.
            array: the tensor.
            code: its datatype code.

        Raises:
            OSError: there is no memory.
            WrongResultError: see `pack_texts`.
        """
        if code == BYTES:
            content = pack_texts(array)
            self.reserve(offset + len(content))
            self.write(offset, content)
            return len(content)
        self.reserve(offset + array.nbytes)
        np.copyto(np.ndarray(array.shape, DTYPES[code], self.memory, offset), array)
        return array.nbytes

    def spill(self, body: bytes, end: int) -> tuple[bytes, int]:
        """Return body and flags of a frame; a body that is too large for a frame is written into the memory at `end`."""
        if len(body) <= SPILL_BYTES:
            return body, 0
        self.reserve(end + len(body))
        self.write(end, body)
        return SPILL.pack(end, len(body)), SPILLED

    def release(self) -> None:
        """Return the memory of a free slot to the system, but its first part."""
        size = os.fstat(self.fd).st_size
        if size > _SMALLEST_BYTES:
            self.reach(0, size)
            for start in range(_SMALLEST_BYTES, self.size, _RELEASE_BYTES):
                self._mmap.madvise(mmap.MADV_REMOVE, start, min(_RELEASE_BYTES, self.size - start))

    def begin(self, number: int) -> None:
        """Store that a batch is begun."""
        _NUMBER.pack_into(self._mmap, 0, number)

    def finish(self, number: int) -> None:
        """Store that a batch is finished."""
        _NUMBER.pack_into(self._mmap, 8, number)

    @property
    def begun(self) -> int:
        """Number of the batch that was begun last; 0 if none was."""
        number: int = _NUMBER.unpack_from(self._mmap, 0)[0]
        return number

    def clear_cancelled(self, members: int) -> None:
        """Clear the cancel flags of the first members."""
        self._mmap[CANCEL_START : CANCEL_START + members] = _NO_FLAGS[:members]

    def cancel(self, member: int) -> None:
        """Set the cancel flag of a member."""
        self._mmap[CANCEL_START + member] = 1

    def is_cancelled(self, member: int) -> bool:
        """Return the cancel flag of a member, which the server writes."""
        return self._mmap[CANCEL_START + member] != 0

    def __del__(self) -> None:
        """Close the descriptor; the kernel frees the memory once no array and no other process uses it."""
        os.close(self.fd)


class SlotLease:
    """Use of a slot; the slot is free again once the lease and all arrays of it are gone.

    Args:
        free: free slots of the pool; any thread may append.
        index: index of the slot.
        slot: the slot.
        is_new: the other process does not have the slot yet.
    """

    __slots__ = ("_free", "index", "is_new", "slot")

    def __init__(self, free: deque[int], index: int, slot: Slot, is_new: bool = False) -> None:
        self._free = free
        self.index = index
        self.slot = slot
        self.is_new = is_new

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the slot's memory, uint8[size], as an array that holds the lease."""
        return np.asarray(_LeasedMemory(self))

    def __del__(self) -> None:
        self._free.append(self.index)


class _LeasedMemory:
    """NumPy's array interface of a slot's memory; an array of it holds the lease."""

    __slots__ = ("__array_interface__", "_lease", "_memory")

    def __init__(self, lease: SlotLease) -> None:
        slot = lease.slot
        self._lease = lease
        self._memory = slot.memory
        self.__array_interface__ = slot.interface
