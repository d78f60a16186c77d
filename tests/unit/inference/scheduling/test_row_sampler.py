"""Copies of rows of batches: choice of the row, bound of the memory, rows that are left out."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import ModelFailed
from headrace.core.request import InferRequest
from headrace.core.tensor import as_input
from headrace.inference.scheduling import row_sampler
from headrace.inference.scheduling.batching import CloseReason
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.row_sampler import RowSampler
from headrace.inference.scheduling.selector import Batch

from tests.support.completions import RecordedCompletion
from tests.support.fakes import FakeModel, handle, infer_request
from tests.support.resident_rows import resident


def batch(*rows: int) -> tuple[Batch, list[object]]:
    """Return a batch of requests with so many rows each, numbered in order, and outputs of ten times the inputs."""
    entries, results, start = [], list[object](), 0
    for count in rows:
        x = np.arange(start, start + count, dtype=np.float32)[:, None]
        request = InferRequest(inputs={"x": x}, rows=count, shape_key=None, received_ns=0)
        entries.append(Entry(request, RecordedCompletion(), 0, 0))
        results.append({"y": x * 10})
        start += count
    return Batch(entries, CloseReason.FULL, 0, start), results


def sampler(slots: int = 1) -> RowSampler:
    return RowSampler(100, threading.Semaphore(slots))


def test_each_place_of_a_batch_is_taken_in_turn_with_the_whole_batch() -> None:
    each = sampler()
    for place in (1, 2, 3, 4, 5, 0):
        requests, results = batch(1, 3, 2)
        each.take(requests, results)
        sample = each.sample
        assert sample is not None
        assert (sample.size, sample.place) == (6, place)
        np.testing.assert_array_equal(sample.row["x"], [[place]])
        np.testing.assert_array_equal(sample.outputs["y"], [[place * 10]])
        np.testing.assert_array_equal(sample.batch()["x"][:, 0], range(6))
        each.clear()


def test_a_sample_is_a_copy() -> None:
    each = sampler()
    requests, results = batch(4)
    each.take(requests, results)
    requests.entries[0].inputs["x"][:] = 7  # type: ignore[index]
    results[0]["y"][:] = 7  # type: ignore[index]
    assert each.sample is not None
    np.testing.assert_array_equal(each.sample.batch()["x"][:, 0], range(4))
    np.testing.assert_array_equal(each.sample.outputs["y"], [[10]])


def test_of_a_large_batch_the_row_alone_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sampler, "MAX_SAMPLE_BYTES", 12)
    each = sampler()
    each.take(*batch(1, 3))
    assert each.sample is not None
    assert each.sample.inputs["x"].nbytes == 4
    np.testing.assert_array_equal(each.sample.row["x"], [[1]])
    np.testing.assert_array_equal(each.sample.batch()["x"][:, 0], [1] * 4)
    monkeypatch.setattr(row_sampler, "MAX_SAMPLE_BYTES", 7)
    each.clear()
    each.take(*batch(1, 3))
    assert each.sample is None


def test_samples_are_dropped_while_one_waits_and_beyond_those_of_the_server() -> None:
    slots, taken = threading.Semaphore(1), list[str]()
    one, other = RowSampler(100, slots), RowSampler(100, slots)
    one.on_taken, other.on_taken = lambda: taken.append("one"), lambda: taken.append("other")
    one.take(*batch(2))
    first = one.sample
    one.take(*batch(3))
    other.take(*batch(2))
    assert first is not None
    assert one.sample is first
    assert other.sample is None
    assert (taken, other.left) == (["one", "one"], 100)
    one.clear()
    one.clear()
    other.take(*batch(2))
    assert other.sample is not None
    assert not slots.acquire(blocking=False)


def test_the_bytes_of_text_count(monkeypatch: pytest.MonkeyPatch) -> None:
    each, text = sampler(), np.array([[b"long text"], [b"b"]], dtype=object)
    requests, _ = batch(2)
    monkeypatch.setattr(row_sampler, "MAX_SAMPLE_BYTES", 8 + 16 + 10)
    each.take(requests, [{"y": text}])
    assert each.sample is not None
    assert len(each.sample.inputs["x"]) == 2
    assert each.sample.outputs["y"].tolist() == [[b"b"]]
    each.clear()
    monkeypatch.setattr(row_sampler, "MAX_SAMPLE_BYTES", 4 + 8)
    each.take(requests, [{"y": text}])
    assert each.sample is None


def test_rows_in_the_memory_of_a_gpu_are_copied_to_the_host() -> None:
    each = sampler()
    requests, results = batch(1, 2)
    requests.entries[1].inputs = {"x": as_input(resident(np.array([[1.0], [2.0]], np.float32)))}
    results[1] = {"y": as_input(resident(np.array([[10.0], [20.0]], np.float32)))}
    each.take(requests, results)
    assert each.sample is not None
    assert (each.sample.place, each.sample.is_shared) == (1, True)
    np.testing.assert_array_equal(each.sample.inputs["x"], [[0], [1], [2]])
    np.testing.assert_array_equal(each.sample.outputs["y"], [[10]])


@pytest.mark.parametrize(
    "result",
    [
        ModelFailed("no"),
        {"y": memoryview(b"device")},
        {"y": np.float32(1)},
    ],
)
def test_what_cannot_be_compared_is_left_out(result: Any) -> None:
    each = sampler()
    requests, _ = batch(2)
    each.take(requests, [result])
    assert each.sample is None
    each.take(*batch(2))
    assert each.sample is not None, "the slot is free"


async def test_rows_of_batches_are_counted_and_lone_rows_are_not(mailbox: Mailbox) -> None:
    model = FakeModel()
    served = handle(mailbox, model)
    each = RowSampler(7, threading.Semaphore(1))
    each.left = 7
    served.set_sampler(each)
    for rows, left in ((1, 7), (3, 4), (1, 4), (2, 2), (2, 7), (3, 4)):
        await served.infer(infer_request(1, rows))
        assert each.left == left
    assert each.sample is not None
    assert each.sample.size == 2
    served.close(10)
