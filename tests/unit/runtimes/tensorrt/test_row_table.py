"""Addresses of the rows of a batch, as the gather kernel reads them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from headrace.core.scattered_rows import ScatteredRows
from headrace.core.tensor import PINNED, ResidentRows
from headrace.runtimes.overlapped import ResidentInput
from headrace.runtimes.tensorrt import buffers
from headrace.runtimes.tensorrt.buffers import RowTable, copy_local_rows, fetch_from_peers
from hypothesis import given
from hypothesis import strategies as st

UINT8 = np.dtype(np.uint8)
ROW_BYTES = 100


class HostMemory:
    """Pinned memory of a test: an array of the host."""

    address = 1 << 20

    def reserve(self, size_bytes: int) -> None:
        self.array = np.zeros(size_bytes, np.uint8)
        self.size_bytes = size_bytes

    def view(self, _shape: tuple[int, ...], _dtype: Any) -> Any:
        return self.array


class HostAllocator:
    """Allocator of one block of `HostMemory`."""

    def __init__(self) -> None:
        self.memory = HostMemory()

    def pinned(self) -> HostMemory:
        return self.memory


def scattered(addresses: list[int], height: int) -> ScatteredRows:
    def no_piece(_address: int, _dtype: Any, _shape: tuple[int, ...]) -> Any:
        raise AssertionError("a table of addresses needs no piece as an input of its own")

    return ScatteredRows(tuple(addresses), PINNED, UINT8, (height, ROW_BYTES), no_piece)


def together(address: int, rows: int) -> ResidentRows:
    return ResidentRows(address, PINNED, UINT8, (rows, ROW_BYTES), None, lambda *_: np.empty(0, np.uint8))


# Rows of the host (None), rows in one place, and rows in several places, each with the number of rows of a piece.
parts = st.lists(
    st.tuples(st.sampled_from(["host", "together", "scattered"]), st.integers(1, 3), st.integers(2, 4)),
    min_size=1,
    max_size=8,
)


@given(parts, st.integers(0, 3))
def test_each_row_has_the_address_of_its_part(kinds: list[tuple[str, int, int]], padding: int) -> None:
    residents: list[ResidentInput] = []
    expected: list[int] = []
    for number, (kind, height, pieces) in enumerate(kinds, start=1):
        base, first = number << 32, len(expected)
        if kind == "host":
            expected += [7 + (first + row) * ROW_BYTES for row in range(height)]
        elif kind == "together":
            residents.append(("x", first, together(base, height)))
            expected += [base + row * ROW_BYTES for row in range(height)]
        else:
            starts = [base + (pieces - piece) * 10_000 for piece in range(pieces)]
            residents.append(("x", first, scattered(starts, height)))
            expected += [start + row * ROW_BYTES for start in starts for row in range(height)]
    residents.append(("other", 0, together(99, 1)))
    allocator: Any = HostAllocator()
    rows, total = len(expected), len(expected) + padding
    table = RowTable(["other", "x"], total, allocator)
    table.write("x", 7, ROW_BYTES, rows, total, residents)
    written = allocator.memory.array.view(np.uint64)[total:].tolist()
    assert written == expected + [expected[-1]] * padding
    assert table.address("x") == HostMemory.address + 8 * total


def test_rows_in_several_places_need_no_copy_between_gpus() -> None:
    residents: list[ResidentInput] = [("x", 0, scattered([10, 20], 1)), ("x", 2, together(30, 1))]
    stream: Any = None
    assert fetch_from_peers(residents, {}, {}, 0, stream) == residents


def on_gpu(address: int, rows: int, gpu: int = 0, owner: object = None) -> ResidentRows:
    return ResidentRows(address, gpu, UINT8, (rows, ROW_BYTES), owner, lambda *_: np.empty(0, np.uint8))


@pytest.mark.parametrize(
    ("pieces", "copies"),
    [
        # One piece elsewhere, and two that follow each other in one block.
        ([(0, on_gpu(5000, 4))], [(1000, 5000, 400)]),
        ([(0, on_gpu(5000, 2)), (2, on_gpu(5200, 2))], [(1000, 5000, 400)]),
        # In place: a copy from another GPU wrote them there.
        ([(0, on_gpu(1000, 4))], []),
        ([(0, on_gpu(1000, 2)), (2, on_gpu(9000, 2))], [(1200, 9000, 200)]),
        # Rows that are pinned, on another GPU, in several places or in the host's part of the batch: the kernel reads them.
        ([(0, together(5000, 4))], None),
        ([(0, on_gpu(5000, 4, gpu=1))], None),
        ([(0, scattered([5000, 6000, 7000, 8000], 1))], None),
        ([(0, on_gpu(5000, 3))], None),
        # More than two pieces.
        ([(row, on_gpu(5000 + 1000 * row, 1)) for row in range(4)], None),
    ],
)
def test_large_rows_on_the_gpu_itself_are_copied(
    monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[int, Any]], copies: list[tuple[int, int, int]] | None
) -> None:
    monkeypatch.setattr(buffers, "_COPIED_BYTES", 400)
    monkeypatch.setattr(buffers, "_MAX_COPIES", 2)
    queued: list[tuple[int, int, int]] = []
    monkeypatch.setattr(buffers, "copy_address", lambda *args: queued.append(args[:3]))
    values, stream = np.zeros((4, ROW_BYTES), np.uint8), cast("Any", None)
    resident: list[ResidentInput] = [("x", first, rows) for first, rows in pieces] + [("other", 0, on_gpu(1, 4))]
    assert copy_local_rows("x", values, 1000, 0, resident, stream) == (copies is not None)
    assert queued == (copies or [])


def test_small_rows_are_left_to_the_kernel_unless_they_are_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "copy_address", lambda *_: pytest.fail("nothing is copied"))
    values, stream = np.zeros((4, ROW_BYTES), np.uint8), cast("Any", None)
    assert not copy_local_rows("x", values, 1000, 0, [("x", 0, on_gpu(5000, 4))], stream)
    assert copy_local_rows("x", values, 1000, 0, [("x", 0, on_gpu(1000, 4))], stream)
