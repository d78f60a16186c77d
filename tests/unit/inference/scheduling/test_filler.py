"""Large batches are filled by several threads: every byte in its place, errors of any of them, and their end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import Completion, Mailbox
from headrace.core.errors import BadRequest
from headrace.core.request import InferRequest
from headrace.core.tensor import FP32, Array, ResidentRows, TensorSpec
from headrace.inference.scheduling import overlapped_runner as filling
from headrace.inference.scheduling.filler import Filler, _shares
from headrace.inference.scheduling.queue import Entry
from headrace.runtimes.overlapped import InFlightBatch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_overlapped import FakeOverlapped
from tests.support.fakes import SPEC
from tests.support.resident_rows import read, resident
from tests.unit.inference.scheduling.test_handle_overlapped import served

MIB = 1 << 20


@pytest.fixture
def filler() -> Iterator[Filler]:
    created = Filler("m#0", threads=4)
    yield created
    created.close()
    for thread in helpers():
        thread.join(60)
    assert not helpers()


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("m#0 filler")]


def entry(**inputs: Any) -> Entry:
    rows = next(iter(inputs.values())).shape[0]
    return Entry(InferRequest(inputs=inputs, rows=rows, shape_key=None, received_ns=0), Completion(), 0, 0)


def parts(rows: list[int], row_bytes: int) -> list[Array]:
    values = np.random.default_rng(0).integers(0, 256, (sum(rows), row_bytes), np.uint8)
    return np.split(values, np.cumsum(rows)[:-1])


@pytest.mark.parametrize(
    ("rows", "row_bytes", "busy"),
    [
        ([1] * 64, MIB // 16, 3),
        ([30, 1, 33], MIB // 16, 3),
        ([1], 5 * MIB + 13, 3),
        ([2], MIB + 1, 3),
        ([1, 1, 1], MIB // 3 + 7, 1),
        ([1] * 8, MIB // 8 - 1, 0),
    ],
)
def test_every_byte_is_copied_to_its_offset(filler: Filler, rows: list[int], row_bytes: int, busy: int) -> None:
    cut = parts(rows, row_bytes)
    for _ in range(3):
        buffer: Array = np.zeros((sum(rows), row_bytes), np.uint8)
        filler.fill(InFlightBatch({"x": buffer}, sum(rows)), [entry(x=part) for part in cut])
        assert np.array_equal(buffer, np.concatenate(cut))
    assert len(helpers()) == busy


def test_inputs_of_all_sizes_and_rows_that_the_gpu_reads(filler: Filler) -> None:
    large, small = parts([1] * 40, MIB // 8), parts([1] * 40, 1)
    entries = [
        entry(x=resident(a) if index % 10 == 3 else a, y=b)
        for index, (a, b) in enumerate(zip(large, small, strict=True))
    ]
    in_flight = InFlightBatch({"x": np.zeros((40, MIB // 8), np.uint8), "y": np.zeros((40, 1), np.uint8)}, 40, None, 0)
    filler.fill(in_flight, entries)
    assert [row for _, row, _ in in_flight.resident_inputs] == [3, 13, 23, 33]
    for _, row, rows in in_flight.resident_inputs:
        assert not in_flight.inputs["x"][row].any()
        in_flight.inputs["x"][row] = read(rows)[0]
    assert np.array_equal(in_flight.inputs["x"], np.concatenate(large))
    assert np.array_equal(in_flight.inputs["y"], np.concatenate(small))
    assert helpers()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 5))
@settings(deadline=None)
def test_shares_are_the_whole_in_order(rows: list[int], width: int, number: int) -> None:
    cut = parts(rows, width)
    buffer: Array = np.zeros((sum(rows), width), np.uint8)
    shares = list(_shares(buffer, cut, number))
    assert len(shares) == number
    sizes = []
    for target, used in shares:
        sizes.append(sum(part.size for part in used))
        assert target.size == sizes[-1]
        if used:
            np.concatenate(used, out=target)
    assert np.array_equal(buffer, np.concatenate(cut))
    assert max(sizes) - min(sizes) <= width


def rows_that_are_gone() -> ResidentRows:
    def gone(address: int, size_bytes: int) -> Array:
        raise BadRequest("the memory is gone")

    return ResidentRows(0, 5, np.dtype(np.uint8), (1, MIB), None, gone)


@pytest.mark.parametrize("position", range(8))
def test_an_error_of_one_thread_fails_the_fill_once_the_others_have_ended(filler: Filler, position: int) -> None:
    arrays: list[Any] = parts([1] * 8, MIB)
    expected = np.concatenate(arrays)
    arrays[position] = rows_that_are_gone()
    buffer: Array = np.zeros((8, MIB), np.uint8)
    with pytest.raises(BadRequest, match="gone"):
        filler.fill(InFlightBatch({"x": buffer}, 8), [entry(x=array) for array in arrays])
    # Two rows a share: the other three are complete, and no thread writes.
    others = [row for row in range(8) if row // 2 != position // 2]
    assert np.array_equal(buffer[others], expected[others])
    arrays[position] = expected[position : position + 1]
    filler.fill(InFlightBatch({"x": buffer}, 8), [entry(x=array) for array in arrays])
    assert np.array_equal(buffer, expected)


def test_a_failure_releases_all_arrays(filler: Filler) -> None:
    arrays: list[Any] = [part.copy() for part in parts([1] * 8, MIB)]
    references = [weakref.ref(array) for array in arrays]
    arrays[5] = rows_that_are_gone()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(BadRequest):
            filler.fill(InFlightBatch({"x": np.zeros((8, MIB), np.uint8)}, 8), [entry(x=array) for array in arrays])
        arrays.clear()
        assert [ref() for ref in references if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "array", [np.zeros((4, MIB + 1), np.uint8), np.zeros((3, MIB), np.uint8), np.zeros((4, MIB), np.int8)]
)
def test_rows_of_another_kind_are_refused(filler: Filler, array: Array) -> None:
    with pytest.raises((ValueError, TypeError)):
        filler.fill(InFlightBatch({"x": np.zeros((4, MIB), np.uint8)}, 4), [entry(x=array)])


def test_without_threads_the_instance_copies_alone(
    filler: Filler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(filling.threading, "Thread", NoThread)
    cut = parts([1] * 8, MIB)
    for _ in range(2):
        buffer: Array = np.zeros((8, MIB), np.uint8)
        filler.fill(InFlightBatch({"x": buffer}, 8), [entry(x=part) for part in cut])
        assert np.array_equal(buffer, np.concatenate(cut))
    assert caplog.text.count("continuing with 1 of") == 1


async def test_an_instance_hires_them_for_its_large_batches_and_ends_them_with_itself(mailbox: Mailbox) -> None:
    model = FakeOverlapped()
    spec = replace(SPEC, outputs={"y": TensorSpec("y", FP32, (-1, 1 << 18))})
    handle = served(mailbox, model, spec=spec, fill_threads=3)
    for rows in (1, 4):
        x: Array = np.full((rows, 1 << 18), 3, np.float32)
        sent = InferRequest(inputs={"x": x}, rows=rows, shape_key=None, received_ns=1)
        assert (await handle.infer(sent)).outputs["y"].tolist() == (x * 2).tolist()
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("fake/1#0 filler")]
    assert len(mine) == 2
    assert await asyncio.to_thread(handle.close, 60)
    for thread in mine:
        thread.join(60)
        assert not thread.is_alive()
