"""Return of free heap memory: when it happens, and that all of it goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest
from headrace.core.heap import HeapTrimmer, heap_bytes

MIB = 1 << 20


class Heap:
    """Memory in use and free memory that is resident, in bytes."""

    def __init__(self) -> None:
        self.used, self.free, self.trims = 40 * MIB, 0, 0
        self.trimmer = HeapTrimmer(lambda: 100 * MIB + self.used + self.free, lambda: self.used, self._trim)
        self.look(3)
        self.trims = 0

    def look(self, times: int) -> None:
        for _ in range(times):
            self.trimmer.look()

    def _trim(self) -> None:
        self.free, self.trims = 0, self.trims + 1


def test_free_memory_is_returned_once_the_heap_is_quiet() -> None:
    heap = Heap()
    heap.used += 64 * MIB  # a large body comes
    heap.look(3)
    assert heap.trims == 0, "nothing is free"
    heap.used, heap.free = heap.used - 64 * MIB, 64 * MIB
    heap.look(1)
    assert heap.trims == 0
    heap.look(2)
    assert (heap.trims, heap.free) == (1, 0)
    heap.look(10)
    assert heap.trims == 1


def test_memory_that_a_load_uses_again_and_again_stays() -> None:
    heap = Heap()
    heap.free = 64 * MIB
    for index in range(50):
        change = (8 * MIB) * (1 if index % 2 else -1)
        heap.used, heap.free = heap.used + change, heap.free - change
        heap.look(1)
    assert heap.trims == 0
    heap.look(3)
    assert heap.trims == 1


def test_memory_that_is_free_after_it_was_in_use_at_the_last_look_is_returned() -> None:
    heap = Heap()
    for _ in range(5):
        heap.used += 32 * MIB
        heap.look(2)
        heap.used, heap.free = heap.used - 32 * MIB, heap.free + 32 * MIB
        heap.look(3)
        assert heap.free == 0


def test_another_allocator_is_left_alone() -> None:
    trimmer = HeapTrimmer(lambda: 100 * MIB, lambda: None, lambda: pytest.fail("trimmed"))
    trimmer.look()
    trimmer.look()


@pytest.mark.skipif(heap_bytes() is None, reason="the C library is not glibc")
def test_blocks_that_a_thread_has_freed_return_to_the_system() -> None:
    """Several blocks of 16 MiB on a thread: without `use_one_arena`, up to 64 MiB stay."""
    program = """
import os, threading
from headrace.core.heap import trim_heap, use_one_arena
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
use_one_arena()
first = resident()
def allocate():
    blocks = [b"x" * (16 << 20)]  # the first raises the size from which glibc maps blocks
    blocks.clear()
    blocks += [b"x" * (12 << 20) for _ in range(4)]
    blocks.clear()
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
trim_heap()
print((resident() - first) >> 20)
"""
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert int(output) < 8
