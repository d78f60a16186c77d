"""Heap of the C library (glibc): one arena, and free memory that returns to the system once the heap is quiet.

glibc keeps freed memory for the next request. It returns the end of an arena by itself, but no memory below a block that is in
use, and `malloc_trim` returns no memory at the end of an arena other than the main one. So after a few large bodies, each thread
that decoded one would keep up to 64 MB for ever. With one arena for all threads, `malloc_trim` returns everything that is free.

All functions are no-ops with another C library. A preloaded allocator is left as it is.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

# Of malloc.h.
_M_ARENA_MAX = -8
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MIB = 1 << 20
# Time between two looks at the heap, in seconds.
_INTERVAL_S = 0.5
# The heap is quiet if the memory in use differs by less than this, in bytes, between this many looks and the ones before them.
_QUIET_BYTES = _MIB
_QUIET_LOOKS = 2
# Free memory that is worth returning, in bytes.
_LARGE_BYTES = 2 * _MIB
# Largest value that glibc takes; larger blocks return to the system when they are freed.
_KEPT_BLOCK_BYTES = 32 * _MIB


class IdleMemory(Protocol):
    """Memory that a pool keeps for its next user."""

    def trim(self) -> None:
        """Return it to the system if it was not used since the last call; any thread may call."""


IDLE_MEMORY: WeakSet[IdleMemory] = WeakSet()
"""Pools that are trimmed with each look at the heap."""


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    ))  # fmt: skip


def use_one_arena() -> None:
    """Let all threads of this process allocate from one arena. Call it before threads start.

    Threads wait for one another only where they allocate at the same time more than their own caches have. That is not measurable
    for requests of 64 KiB to 4 MiB: most threads wait for the interpreter lock anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory(size_bytes: int) -> None:
    """Keep up to so many freed bytes at the end of the heap, in blocks of up to 32 MiB, for the next allocations.

    For a process that allocates blocks of the same sizes again and again: by default glibc returns blocks of some hundred
    kilobytes each time, and the page faults of the next ones take longer than the work in them. A photograph of 500 x 375
    pixels was decoded and resized in 2.4 ms in place of 3.3 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, size_bytes)


def heap_bytes() -> int | None:
    """Return the bytes of the heap's blocks in use; None with another C library or a preloaded allocator."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    heap = mallinfo2()
    return int(heap.uordblks + heap.hblkhd) or None


def trim_heap() -> None:
    """Return the free memory of the heap to the system."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


@dataclass(eq=False, repr=False)
class HeapTrimmer:
    """Returns free memory of the heap to the system once the heap is quiet: memory that a steady load needs again stays.

    A timer of the event loop starts each look, which runs on the loop's pool and takes some 50 us. Returning 64 MB takes about
    5 ms; meanwhile, threads that allocate more than a kilobyte wait.

    Ownership: `start` and `stop` are called on the event loop; the other attributes are those of the look that runs.

    Attributes:
        resident_bytes: returns the resident memory of the process.
        used_bytes: returns the bytes of the heap in use, None if they are not known.
        trim: returns the free memory.
    """

    resident_bytes: Callable[[], int]
    used_bytes: Callable[[], int | None] = heap_bytes
    trim: Callable[[], None] = trim_heap

    def __post_init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._last_used_bytes = 0
        self._quiet_looks = 0
        # Resident memory that is no block in use: code, stacks, small objects of Python, and free memory. The smallest seen.
        self._other_bytes: int | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to look at the heap; a no-op if the C library does not report its use."""
        if self.used_bytes() is not None:
            self._timer = loop.call_later(_INTERVAL_S, self._start_look, loop)

    def stop(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _start_look(self, loop: asyncio.AbstractEventLoop) -> None:
        look = loop.run_in_executor(None, self.look)
        look.add_done_callback(lambda _: self.start(loop) if self._timer is not None else None)

    def look(self) -> None:
        """Return the free memory if it is large and the heap is quiet, and that of idle pools."""
        with suppress(RuntimeError):  # a pool is added just now
            for pool in IDLE_MEMORY:
                pool.trim()
        used = self.used_bytes()
        if used is None:
            return
        is_quiet = abs(used - self._last_used_bytes) < _QUIET_BYTES
        self._last_used_bytes = used
        self._quiet_looks = self._quiet_looks + 1 if is_quiet else 0
        other = self.resident_bytes() - used
        if self._other_bytes is not None:
            self._other_bytes = min(self._other_bytes, other)
        if self._quiet_looks >= _QUIET_LOOKS and (
            self._other_bytes is None or other - self._other_bytes >= _LARGE_BYTES
        ):
            self.trim()
            self._other_bytes = self.resident_bytes() - used
            self._quiet_looks = 0
