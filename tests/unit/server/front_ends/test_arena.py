"""The arena: blocks never overlap, slots are free once nothing reads them, and memory that could shrink is refused."""

from __future__ import annotations

import gc
import mmap
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headrace.core.scattered_rows import is_scattered
from headrace.core.tensor import NOWHERE, PINNED, is_resident
from headrace.server.front_ends.arena import ALIGNMENT, UNIT_BYTES, Arena, BuddyBlocks, MappedArena
from headrace.server.front_ends.frames import SLOT, FrameError, TensorPlace
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_blocks_never_overlap_and_join_again(units: int, steps: list[tuple[bool, int]]) -> None:
    blocks = BuddyBlocks(units)
    used: dict[int, int] = {}
    for is_free, number in steps:
        if is_free and used:
            start = sorted(used)[number % len(used)]
            blocks.free(start)
            del used[start]
            continue
        start = blocks.allocate(number)
        if start < 0:
            continue
        size = 1 << (number - 1).bit_length()
        assert size >= number
        assert start + size <= units
        assert all(start + size <= other or other + more <= start for other, more in used.items())
        used[start] = size
        assert {blocks.block(unit) for unit in range(start, start + size)} == {start}
    assert blocks.allocated == sum(used.values())
    for start in used:
        blocks.free(start)
    assert blocks.allocated == 0
    assert blocks.allocate(1 << units.bit_length() - 1) == 0


def test_a_slot_is_free_when_front_end_and_engine_have_ended_it() -> None:
    arena = Arena(4 * UNIT_BYTES)
    body = arena.allocate(100_000, head_bytes=77)
    assert body is not None
    assert body[77:].__array_interface__["data"][0] % ALIGNMENT == 0
    found = arena.find(body[77:])
    assert found is not None
    slot, generation, offset = found
    assert offset % ALIGNMENT == 0
    arena.use(slot)
    view = body[500:].view()
    del body
    assert arena.allocated_bytes == 2 * UNIT_BYTES
    del view
    assert arena.allocated_bytes == 2 * UNIT_BYTES
    arena.release(slot, generation + 1)  # of another generation: ignored
    assert arena.allocated_bytes == 2 * UNIT_BYTES
    arena.release(slot, generation)
    assert arena.allocated_bytes == 0
    arena.release(slot, generation)
    arena.release(99_999, 1)
    arena.close()


def in_slot(shape: tuple[int, ...], size_bytes: int, slot: int, generation: int, offset: int) -> TensorPlace:
    return TensorPlace(0, 0, shape, size_bytes, SLOT, offset, slot, generation)


def test_a_full_arena_allocates_nothing() -> None:
    arena = Arena(UNIT_BYTES)
    first = arena.allocate(10)
    assert first is not None
    assert arena.allocate(10) is None
    assert arena.find(np.zeros(10, np.uint8)) is None
    del first
    assert arena.allocate(10) is not None
    arena.close()


def test_the_engine_reads_a_slot_and_releases_it_once() -> None:
    arena = Arena(4 * UNIT_BYTES)
    body = arena.allocate(64)
    assert body is not None
    body[:] = np.arange(64)
    slot, generation, offset = arena.find(body) or (0, 0, 0)
    released: list[tuple[int, int]] = []
    engine = MappedArena(os.dup(arena.fd), released.extend)
    tensor = engine.tensor(in_slot((4, 4), 64, slot, generation, offset), np.dtype(np.float32), on_gpu=True)
    np.testing.assert_array_equal(tensor.view(np.uint8).reshape(-1), np.arange(64))
    part = tensor[1:]
    engine.close()
    del tensor
    assert released == []
    np.testing.assert_array_equal(part.copy().view(np.uint8).reshape(-1), np.arange(16, 64))
    del part
    gc.collect()
    assert released == [(slot, generation)]


def test_a_pinned_arena_gives_rows_for_kernels() -> None:
    class Pinned:
        address = 1 << 40

    arena = Arena(2 * UNIT_BYTES)
    body = arena.allocate(256)
    assert body is not None
    body[:] = np.arange(256)
    slot, generation, offset = arena.find(body) or (0, 0, 0)
    released: list[tuple[int, int]] = []
    engine = MappedArena(os.dup(arena.fd), released.extend)
    pins: list[tuple[int, int]] = []
    engine.start_pinning(lambda fd, start, size, device, done: (pins.append((size, device)), done(Pinned())), {3, 1})
    engine.start_pinning(lambda *_: pytest.fail("pinned twice"), {1})
    assert pins == [(2 * UNIT_BYTES, 1)]
    rows = engine.tensor(in_slot((8, 8), 256, slot, generation, offset), np.dtype("<f4"), on_gpu=True)
    assert is_resident(rows)
    assert (rows.address, rows.device, rows.shape) == (Pinned.address + offset, PINNED, (8, 8))
    np.testing.assert_array_equal(np.asarray(rows[2:4]).view(np.uint8).reshape(-1), np.arange(64, 128))
    del rows
    gc.collect()
    assert released == [(slot, generation)]
    engine.close()


def scattered_arena(
    pieces: int, shift: int = 0
) -> tuple[Arena, list[np.ndarray[Any, Any]], list[tuple[int, int, int]]]:
    """An arena with a slot for each piece of 4 x 3 numbers, `shift` bytes behind an aligned address, and the places of these."""
    arena = Arena(16 * UNIT_BYTES)
    bodies, slots = [], []
    for number in range(pieces):
        body = arena.allocate(48 + shift)
        assert body is not None
        body[shift:].view(np.uint8)[:] = np.arange(48, dtype=np.uint8) + number
        slot, generation, offset = arena.find(body) or (0, 0, 0)
        bodies.append(body)
        slots.append((slot, generation, offset + shift))
    return arena, bodies, slots


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_slots_of_a_group_are_released_with_its_last_rows(is_pinned: bool, shift: int) -> None:
    arena, bodies, slots = scattered_arena(4, shift)
    released: list[tuple[int, int]] = []
    engine = MappedArena(os.dup(arena.fd), released.extend)
    if is_pinned:
        engine.pinned = SimpleNamespace(address=1 << 40)
    dtype = np.dtype(np.float32)
    rows = engine.scattered(in_slot((4, 3), 48, 0, 0, 0), slots, dtype, on_gpu=True)
    assert is_scattered(rows)
    assert (rows.shape, rows.dtype, rows.nbytes, len(rows)) == ((16, 3), dtype, 192, 16)
    assert rows.device == (PINNED if is_pinned and not shift else NOWHERE)
    if is_pinned:
        assert rows.addresses == tuple((1 << 40) + offset for _, _, offset in slots)
    whole = np.concatenate([body[shift:].copy().view(dtype).reshape(4, 3) for body in bodies])
    np.testing.assert_array_equal(np.asarray(rows), whole)
    single, half, cut = rows[4:8], rows[8:16], rows[2:6]
    nested = rows.reshape(16, 3, 1)
    assert is_scattered(nested)
    assert nested.piece_shape == (4, 3, 1)
    np.testing.assert_array_equal(np.asarray(nested), whole.reshape(16, 3, 1))
    np.testing.assert_array_equal(rows.reshape(-1), whole.reshape(-1))
    del nested
    engine.close()
    del rows
    gc.collect()
    assert released == []
    assert is_resident(single) == is_pinned
    assert is_scattered(half)
    np.testing.assert_array_equal(np.asarray(single), whole[4:8])
    np.testing.assert_array_equal(np.asarray(half), whole[8:16])
    np.testing.assert_array_equal(cut, whole[2:6])
    del half
    gc.collect()
    assert released == []
    del single
    gc.collect()
    assert released == [slot[:2] for slot in slots]


def test_pieces_outside_the_arena_are_refused() -> None:
    arena, _, slots = scattered_arena(2)
    engine = MappedArena(os.dup(arena.fd), lambda *_: None)
    piece, dtype = in_slot((4, 3), 48, 0, 0, 0), np.dtype(np.float32)
    for offset in (arena.size_bytes - 47, 1 << 63):
        with pytest.raises(FrameError):
            engine.scattered(piece, [slots[0], (1, 1, offset)], dtype, on_gpu=False)
    with pytest.raises(FrameError):
        engine.scattered(in_slot((0, 3), 0, 0, 0, 0), slots, dtype, on_gpu=False)


def test_memory_that_can_shrink_and_ranges_outside_are_refused() -> None:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, UNIT_BYTES)
    with pytest.raises(FrameError, match="sealed"):
        MappedArena(fd, lambda *_: None)
    arena = Arena(UNIT_BYTES)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.fd, 0)
    engine = MappedArena(os.dup(arena.fd), lambda *_: None)
    with pytest.raises(FrameError):
        engine.view(0, 0, UNIT_BYTES - 8, 9)
    outside = in_slot((9,), 9, 0, 0, UNIT_BYTES - 8)
    for on_gpu in (False, True):
        with pytest.raises(FrameError):
            engine.tensor(outside, np.dtype(np.uint8), on_gpu)
        engine.pinned = SimpleNamespace(address=0)
    assert mmap.PAGESIZE <= UNIT_BYTES
