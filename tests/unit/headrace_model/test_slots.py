"""Shared memory of batches: growth by either end, ranges, numbers and flags."""

from __future__ import annotations

import os

import numpy as np
import pytest
from headrace_model.protocol import ProtocolError
from headrace_model.slots import START, Slot, aligned


@pytest.fixture
def ends() -> tuple[Slot, Slot]:
    slot = Slot.create("headrace test", 1000)
    return slot, Slot(os.dup(slot.fd))


def test_both_ends_see_the_same_bytes(ends: tuple[Slot, Slot]) -> None:
    left, right = ends
    np.ndarray((4,), np.float32, left.memory, START)[:] = [1, 2, 3, 4]
    assert np.ndarray((4,), np.float32, right.memory, START).tolist() == [1, 2, 3, 4]


def test_either_end_grows_it_and_arrays_of_the_smaller_map_stay_valid(ends: tuple[Slot, Slot]) -> None:
    left, right = ends
    before = np.ndarray((4,), np.uint8, left.memory, START)
    size = left.size
    right.reserve(size + 10)
    right.write(size, b"0123456789")
    right.write(START, b"abcd")
    assert left.size == size < right.size
    assert left.read(size, 10) == b"0123456789"
    assert before.tobytes() == b"abcd"
    assert left.size == right.size


def test_ranges_outside_of_the_memory_are_refused(ends: tuple[Slot, Slot]) -> None:
    left, _right = ends
    for offset, size in ((0, left.size + 1), (left.size, 1), (1 << 62, 1 << 62)):
        with pytest.raises(ProtocolError):
            left.read(offset, size)


def test_the_memory_cannot_be_made_smaller(ends: tuple[Slot, Slot]) -> None:
    left, right = ends
    with pytest.raises(PermissionError):
        os.ftruncate(right.fd, 10)
    assert left.read(0, 8) == bytes(8)


def test_numbers_and_cancel_flags(ends: tuple[Slot, Slot]) -> None:
    left, right = ends
    right.begin(7)
    assert left.begun == 7
    left.cancel(5)
    assert right.is_cancelled(5)
    left.clear_cancelled(6)
    assert not right.is_cancelled(5)


def test_tensors_are_aligned() -> None:
    assert [aligned(offset) for offset in (0, 1, 64, 65)] == [0, 64, 64, 128]
