"""Resident rows behave as arrays where the data plane needs it, and become host copies by NumPy's own means."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from headrace.core.tensor import PINNED, as_input, is_resident

from tests.support.resident_rows import HostOwner, read, resident

ARRAY = np.arange(24, dtype=np.float32).reshape(4, 3, 2)


def test_their_attributes_match_the_array() -> None:
    rows = resident(ARRAY)
    assert (rows.shape, rows.dtype, rows.ndim, rows.size, rows.nbytes, len(rows)) == (
        ARRAY.shape,
        ARRAY.dtype,
        ARRAY.ndim,
        ARRAY.size,
        ARRAY.nbytes,
        4,
    )
    assert rows.device == PINNED
    assert is_resident(rows)
    assert is_resident(as_input(rows))
    assert not is_resident(ARRAY)


@pytest.mark.parametrize("cut", [slice(None), slice(1, 3), slice(2, None), slice(0, 99), slice(-1, None), slice(3, 1)])
def test_a_slice_is_the_same_rows_of_the_same_owner(cut: slice) -> None:
    rows = resident(ARRAY, device=2)
    part = rows[cut]
    assert np.array_equal(read(part), ARRAY[cut])
    assert part.shape == ARRAY[cut].shape
    assert part.owner is rows.owner
    assert part.device == 2


@pytest.mark.parametrize("index", [0, slice(0, 4, 2), slice(None, None, -1), (0, 1)])
def test_non_contiguous_rows_are_refused(index: object) -> None:
    with pytest.raises(TypeError, match="resident rows take"):
        resident(ARRAY)[index]  # type: ignore[index]


@pytest.mark.parametrize("shape", [(4, 6), (4, -1), (2, 2, 3, 2), (24,)])
def test_a_reshape_keeps_the_elements(shape: tuple[int, ...]) -> None:
    rows = resident(ARRAY)
    assert np.array_equal(read(rows.reshape(shape)), ARRAY.reshape(shape))
    assert np.array_equal(read(rows.reshape(*shape)), ARRAY.reshape(shape))


def test_a_reshape_to_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot reshape"):
        resident(ARRAY).reshape(5, 5)


def test_numpy_reads_host_copies() -> None:
    rows = resident(ARRAY)
    owner = rows.owner
    assert isinstance(owner, HostOwner)
    copy = np.asarray(rows)
    assert np.array_equal(copy, ARRAY)
    assert not np.shares_memory(copy, owner.array)
    out = np.empty((7, 3, 2), np.float32)
    np.concatenate([as_input(rows[1:]), as_input(rows)], out=out, casting="equiv")
    assert np.array_equal(out, np.concatenate([ARRAY[1:], ARRAY]))
    assert np.asarray(rows, dtype=np.float64).dtype == np.float64
    assert owner.copies == [ARRAY.nbytes, ARRAY.nbytes * 3 // 4, ARRAY.nbytes, ARRAY.nbytes]


def test_there_is_no_view_of_them() -> None:
    with pytest.raises(ValueError, match="only be copied"):
        resident(ARRAY).__array__(copy=False)


def test_the_owner_lives_as_long_as_a_slice() -> None:
    rows = resident(ARRAY)
    owner = weakref.ref(rows.owner)  # type: ignore[arg-type]
    part = rows[1:2].reshape(1, 6)
    del rows
    assert owner() is not None
    assert np.array_equal(read(part), ARRAY[1:2].reshape(1, 6))
    del part
    assert owner() is None
