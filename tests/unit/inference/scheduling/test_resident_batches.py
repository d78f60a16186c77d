"""Batches of rows that are copied and rows that the GPU reads in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace.core.completion import Completion
from headrace.core.request import InferRequest
from headrace.core.scattered_rows import ScatteredRows, is_scattered, keep_apart
from headrace.core.tensor import NOWHERE, PINNED, Array, as_input
from headrace.inference.scheduling.assembly import Staging
from headrace.inference.scheduling.entries import split_request
from headrace.inference.scheduling.filler import Filler
from headrace.inference.scheduling.queue import Entry
from headrace.runtimes.overlapped import InFlightBatch

from tests.support.resident_rows import HostOwner, read, resident

NONE = np.float32(-1)


def _entry(**inputs: Any) -> Entry:
    rows = next(iter(inputs.values())).shape[0]
    return Entry(InferRequest(inputs=inputs, rows=rows, shape_key=None, received_ns=0), Completion(), 0, 0)


def _rows(first: int, count: int) -> Array:
    return np.arange(first * 2, (first + count) * 2, dtype=np.float32).reshape(count, 2)


def _in_flight(rows: int, device: int | None) -> InFlightBatch:
    return InFlightBatch({"x": np.full((rows, 2), NONE)}, rows, None, device)


def _seen(in_flight: InFlightBatch) -> Array:
    """Return the rows that the GPU computes on."""
    x = in_flight.inputs["x"].copy()
    for name, first, rows in in_flight.resident_inputs:
        assert name == "x"
        assert (x[first : first + len(rows)] == NONE).all(), "rows that are resident were copied too"
        pieces = rows.pieces() if is_scattered(rows) else [rows]
        x[first : first + len(rows)] = np.concatenate([read(piece) for piece in pieces])
    return x


def _scattered(array: Array, device: int) -> ScatteredRows:
    """The rows of an array, each in memory of its own."""
    memory = {row.ctypes.data: row for row in (array[index : index + 1].copy() for index in range(len(array)))}

    def piece(address: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        assert (dtype, shape) == (array.dtype, (1, *array.shape[1:]))
        return memory[address] if device == NOWHERE else resident(memory[address])

    return ScatteredRows(tuple(memory), device, array.dtype, (1, *array.shape[1:]), piece)


# h: host, p: pinned, 0 and 1: on that GPU, u: unaligned, s: pinned in several places, g: in several places of the host, m: on two
# GPUs in turns; each part has as many rows as its place in the batch says.
@pytest.mark.parametrize(
    "kinds",
    [
        "h",
        "p",
        "0",
        "hp",
        "ph",
        "php",
        "hhphh",
        "p0p",
        "h1h",
        "1p1",
        "huh",
        "hph0h1huhp",
        "s",
        "g",
        "hshgps",
        "gg",
        "ghs",
        "hmhm",
        "m",
    ],
)
@pytest.mark.parametrize("device", [0, None])
def test_every_row_is_at_its_device_offset(kinds: str, device: int | None) -> None:
    entries, first, expected = [], 0, []
    for count, kind in enumerate(kinds, start=1):
        array = _rows(first, count)
        devices = {"p": PINNED, "u": NOWHERE, "0": 0, "1": 1}
        if kind in "sg":
            entries.append(_entry(x=_scattered(array, PINNED if kind == "s" else NOWHERE)))
        elif kind == "m":
            rows = [resident(array[index : index + 1].copy(), index % 2) for index in range(count)]
            entries.append(_entry(x=keep_apart([as_input(row) for row in rows])))
        else:
            entries.append(_entry(x=array if kind == "h" else resident(array, devices[kind])))
        if kind in "p01s" and device == 0:
            expected.append(first)
        if kind == "m" and device == 0:
            expected += range(first, first + count)
        first += count
    in_flight = _in_flight(first, device)
    Filler("test").fill(in_flight, entries)
    assert np.array_equal(_seen(in_flight), _rows(0, first))
    assert [row for _, row, _ in in_flight.resident_inputs] == expected


def test_each_input_is_resident_or_copied_separately() -> None:
    a, b = _rows(0, 2), _rows(5, 3)
    entries = [_entry(x=resident(a), y=a), _entry(x=resident(b), y=b)]
    in_flight = InFlightBatch({name: np.full((5, 2), NONE) for name in "xy"}, 5, None, 0)
    Filler("test").fill(in_flight, entries)
    assert np.array_equal(in_flight.inputs["y"], np.concatenate([a, b]))
    assert [(name, row) for name, row, _ in in_flight.resident_inputs] == [("x", 0), ("x", 2)]


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.float32), np.zeros((2, 2), np.int32)], ids=["shape", "dtype"])
def test_rows_of_another_kind_are_no_residents_either(array: Array) -> None:
    in_flight = _in_flight(2, 0)
    with pytest.raises((ValueError, TypeError)):
        Filler("test").fill(in_flight, [_entry(x=resident(array))])
    assert not in_flight.resident_inputs


@pytest.mark.parametrize("rows", [1, 3])
def test_wrong_row_counts_are_detected(rows: int) -> None:
    with pytest.raises(ValueError, match="input 'x' has 2 rows"):
        Filler("test").fill(_in_flight(rows, 0), [_entry(x=resident(_rows(0, 2)))])


def test_a_batch_on_the_cpu_gets_copies() -> None:
    staging, rows = Staging(8), resident(_rows(0, 2))
    assert np.array_equal(staging.stack([_entry(x=rows)], 2)["x"], _rows(0, 2))
    assert np.array_equal(staging.stack([_entry(x=rows), _entry(x=_rows(2, 3))], 5)["x"], _rows(0, 5))
    for device in (PINNED, NOWHERE):
        group = _scattered(_rows(2, 3), device)
        assert np.array_equal(staging.stack([_entry(x=group)], 3)["x"], _rows(2, 3))
        assert np.array_equal(staging.stack([_entry(x=_rows(0, 2)), _entry(x=group)], 5)["x"], _rows(0, 5))
    owner = rows.owner
    assert isinstance(owner, HostOwner)
    assert len(owner.copies) == 2


def test_an_oversized_request_is_split_in_place() -> None:
    request = InferRequest(inputs={"x": as_input(resident(_rows(0, 5)))}, rows=5, shape_key=None, received_ns=0)
    parts = split_request(request, 2)
    in_flight = _in_flight(5, 0)
    Filler("test").fill(in_flight, [_entry(**part.inputs) for part in parts])
    assert np.array_equal(_seen(in_flight), _rows(0, 5))
    assert len(in_flight.resident_inputs) == 3


def test_parts_of_a_request_share_all_attributes_but_the_rows() -> None:
    request = InferRequest(
        inputs={"x": _rows(0, 5)},
        rows=5,
        shape_key=("x",),
        received_ns=7,
        id="id",
        priority=3,
        deadline_ns=11,
        queue_timeout_ns=13,
        size_bytes=90,
        client="shop",
    )
    parts = split_request(request, 2)
    assert [part.rows for part in parts] == [2, 2, 1]
    assert sum(part.size_bytes for part in parts) == 90
    assert np.array_equal(np.concatenate([part.inputs["x"] for part in parts]), _rows(0, 5))
    for name in set(InferRequest.__slots__) - {"inputs", "rows", "size_bytes"}:
        assert [getattr(part, name) for part in parts] == [getattr(request, name)] * 3, name
