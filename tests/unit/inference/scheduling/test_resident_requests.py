"""Requests with resident rows through a model version: overlapped, serial, reshaped, split and failing."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import BadRequest
from headrace.core.request import InferRequest
from headrace.core.tensor import NOWHERE, PINNED, Array, ResidentRows, as_input
from headrace.inference.scheduling.policy import BatchPolicy
from headrace.inference.scheduling.reshaping import ReshapingExecution
from headrace.runtimes.base import LoadedModel

from tests.support.fake_overlapped import RAISES, FakeOverlapped
from tests.support.fakes import FakeModel, error_of, infer_request
from tests.support.resident_rows import HostOwner, resident
from tests.support.waiting import until_async
from tests.unit.inference.scheduling.test_handle_overlapped import served


def located(value: float, rows: int = 1, device: int = PINNED) -> InferRequest:
    """Return a request with resident rows."""
    return request(resident(np.full((rows, 2), value, np.float32), device))


def request(rows: ResidentRows) -> InferRequest:
    return InferRequest(inputs={"x": as_input(rows)}, rows=len(rows), shape_key=None, received_ns=1)


def copies(sent: InferRequest) -> list[int]:
    rows: Any = sent.inputs["x"]
    owner = rows.owner
    assert isinstance(owner, HostOwner)
    return owner.copies


async def test_they_share_a_batch_with_rows_that_are_copied_and_are_not_copied_themselves(mailbox: Mailbox) -> None:
    model = FakeOverlapped(device=3, manual=True)
    handle = served(mailbox, model)
    first = handle.infer(infer_request(1))
    await asyncio.to_thread(model.wait_for, "finishing 0")
    sent = [
        located(2),
        infer_request(3, 2),
        located(4, 2, device=3),
        located(5, device=1),
        located(6, device=NOWHERE),
    ]
    waiting = [handle.infer(each) for each in sent]
    model.let_go()
    await first
    answers = [(await completion).outputs["y"][:, 0].tolist() for completion in waiting]
    assert answers == [[4], [6, 6], [8, 8], [10], [12]]
    # Only what no GPU can read goes through the host.
    assert [copies(sent[number]) for number in (0, 2, 3, 4)] == [[], [], [], [8]]
    assert not model.violations
    await asyncio.to_thread(handle.close, 60)


@pytest.mark.parametrize("model", [FakeModel, FakeOverlapped], ids=["serial", "overlapped"])
async def test_a_model_without_resident_inputs_gets_copies(model: Any, mailbox: Mailbox) -> None:
    handle = served(mailbox, model())
    sent = located(4, 3)
    assert (await handle.infer(sent)).outputs["y"].tolist() == [[8, 8]] * 3
    assert copies(sent) == [24]
    await asyncio.to_thread(handle.close, 60)


async def test_behind_a_reshape_they_are_read_by_the_gpu_too(mailbox: Mailbox) -> None:
    inner = FakeOverlapped(device=0)

    class Model(LoadedModel):
        def execution(self, index: int) -> ReshapingExecution:
            return ReshapingExecution(inner, {"x": (2,)}, {}, batched=True)

        def close(self) -> None:
            pass

    handle = served(mailbox, Model())
    sent = request(resident(np.full((2, 1, 2), 7, np.float32)))
    assert (await handle.infer(sent)).outputs["y"].tolist() == [[14, 14]] * 2
    assert copies(sent) == []
    assert not inner.violations
    await asyncio.to_thread(handle.close, 60)


async def test_an_oversized_request_is_split_in_place(mailbox: Mailbox) -> None:
    model = FakeOverlapped(device=0)
    handle = served(mailbox, model, batch=BatchPolicy(4))
    sent = request(resident(np.arange(20, dtype=np.float32).reshape(10, 2)))
    assert np.array_equal((await handle.infer(sent)).outputs["y"], np.arange(20).reshape(10, 2) * 2)
    assert copies(sent) == []
    await asyncio.to_thread(handle.close, 60)


async def test_memory_that_cannot_be_read_fails_its_own_request_and_no_other(mailbox: Mailbox) -> None:
    def gone(address: int, size_bytes: int) -> Array:
        raise BadRequest("the memory is gone")

    model = FakeOverlapped(manual=True)
    handle = served(mailbox, model)
    first = handle.infer(infer_request(1))
    await asyncio.to_thread(model.wait_for, "finishing 0")
    rows = ResidentRows(1, PINNED, np.dtype(np.float32), (1, 2), None, gone)
    waiting = [handle.infer(each) for each in (infer_request(2), request(rows), infer_request(3))]
    model.let_go()
    await first
    assert (await waiting[0]).outputs["y"].tolist() == [[4, 4]]
    assert isinstance(await error_of(waiting[1]), BadRequest)
    assert (await waiting[2]).outputs["y"].tolist() == [[6, 6]]
    assert not model.violations
    await asyncio.to_thread(handle.close, 60)


@pytest.mark.parametrize("value", [1.0, RAISES["launch"], RAISES["finish"]], ids=["well", "launch", "finish"])
async def test_the_memory_is_referenced_until_the_batch_ends_and_no_longer(
    value: float, monkeypatch: pytest.MonkeyPatch, mailbox: Mailbox
) -> None:
    monkeypatch.setattr(
        logging.getLogger("headrace.instance"), "disabled", True
    )  # what pytest keeps of it holds frames

    model = FakeOverlapped(device=0, manual=True)
    handle = served(mailbox, model)
    rows = resident(np.full((1, 2), value, np.float32))
    owner = weakref.ref(rows.owner)  # type: ignore[arg-type]
    waiting = handle.infer(request(rows))
    del rows
    if value != RAISES["launch"]:
        await asyncio.to_thread(model.wait_for, "finishing 0")
        gc.collect()
        assert owner() is not None
    model.let_go()
    await asyncio.wait([asyncio.ensure_future(error_of_or_none(waiting))])
    del waiting
    await handle.infer(infer_request(5))  # its batch replaces the other
    await asyncio.to_thread(handle.close, 60)
    gc.collect()
    assert owner() is None


@pytest.mark.parametrize(
    "model", [FakeModel, lambda: FakeOverlapped(device=0), lambda: FakeOverlapped(device=0, prompt=True)]
)
async def test_an_idle_instance_references_no_request_memory(model: Any, mailbox: Mailbox) -> None:
    handle = served(mailbox, model())
    gc.collect()
    gc.disable()
    try:
        for rows in (1, 1, 3, 3):
            values = resident(np.full((rows, 2), 7, np.float32))
            owner = weakref.ref(values.owner)  # type: ignore[arg-type]
            waiting = handle.infer(request(values))
            del values
            await waiting
            del waiting
            await until_async(lambda owner=owner: owner() is None)
    finally:
        gc.enable()
    await asyncio.to_thread(handle.close, 60)


async def error_of_or_none(waiting: Any) -> None:
    try:
        await waiting
    except Exception as error:
        assert "failed" in str(error)
