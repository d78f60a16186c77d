"""A model version with real instance threads and a fake model."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace

import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import (
    ModelFailed,
    Unavailable,
    Unsupported,
)
from headrace.inference.scheduling.policy import BatchPolicy, LevelPolicy
from headrace.inference.scheduling.scheduler import Scheduler

from tests.support.fakes import DEATH, POISON, FakeModel, error_of, handle, infer_request, wait_started
from tests.support.waiting import record_calls, until_async


async def test_rows_return_to_their_callers_from_one_batch(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    first = served.infer(infer_request(100))
    await wait_started(model)
    waiting = [served.infer(infer_request(value, rows=1 + value % 3)) for value in range(4)]
    model.gate.set()
    assert (await first).outputs["y"].tolist() == [[200, 200]]
    for value, completion in enumerate(waiting):
        assert (await completion).outputs["y"].tolist() == [[2 * value] * 2] * (1 + value % 3)
    assert model.batches == [[100], [0, 1, 1, 2, 2, 2, 3]]
    assert served.close(60)
    assert model.closed


async def test_one_poisoned_request_fails_alone(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    first = served.infer(infer_request(9))
    await wait_started(model)
    waiting = [served.infer(infer_request(value)) for value in (1, POISON, 3)]
    model.gate.set()
    await first
    assert (await waiting[0]).outputs["y"].tolist() == [[2, 2]]
    assert (await waiting[2]).outputs["y"].tolist() == [[6, 6]]
    error = await error_of(waiting[1])
    assert isinstance(error, ModelFailed)
    assert "secret" not in str(error), "the backend's text may hold paths"
    assert error.reference in str(error)
    served.close(60)
    totals = served.recorder.totals()
    assert (totals.requests, totals.executions) == (3, 5)


@pytest.mark.parametrize("position", range(4))
async def test_a_cancelled_request_is_dropped_at_any_queue_position(
    position: int, mailbox: Mailbox, model: FakeModel
) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    first = served.infer(infer_request(9))
    await wait_started(model)
    waiting = [served.infer(infer_request(value)) for value in range(4)]
    assert waiting[position].abandon()
    assert served.depth == 3
    model.gate.set()
    await first
    for value, completion in enumerate(waiting):
        if value != position:
            assert (await completion).outputs["y"].tolist() == [[2 * value] * 2]
    assert model.batches[1] == [float(value) for value in range(4) if value != position]


@pytest.mark.parametrize("position", range(3))
async def test_a_cancelled_request_in_a_batch_does_not_affect_the_others(
    position: int, mailbox: Mailbox, model: FakeModel
) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    first = served.infer(infer_request(9))
    await wait_started(model)
    waiting = [served.infer(infer_request(value)) for value in range(3)]
    model.pass_one()
    await wait_started(model)
    waiting[position].abandon()
    model.gate.set()
    await first
    for value, completion in enumerate(waiting):
        if value != position:
            assert (await completion).outputs["y"].tolist() == [[2 * value] * 2]


async def test_an_oversized_request_with_a_poisoned_part_fails_as_a_whole(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    big = infer_request(3, rows=20)
    big.inputs["x"][12] = POISON
    assert isinstance(await error_of(served.infer(big)), ModelFailed)
    assert (await served.infer(infer_request(4))).outputs["y"].tolist() == [[8, 8]]
    assert served.depth == 0


async def test_requests_delayed_by_the_queue_policy_are_served_last(
    monkeypatch: pytest.MonkeyPatch, mailbox: Mailbox, model: FakeModel
) -> None:
    expired = record_calls(monkeypatch, Scheduler, "expire")

    queue_policy = LevelPolicy(queue_timeout_ns=60_000_000_000, demote_on_timeout=True, timeout_override=True)
    served = handle(mailbox, model, batch=BatchPolicy(1), queue_policy=queue_policy)
    model.gate.clear()
    running = served.infer(infer_request(1))
    await wait_started(model)
    late = served.infer(infer_request(2, queue_timeout_ns=10_000_000))
    await until_async(lambda: expired)
    fresh = served.infer(infer_request(3))
    model.gate.set()
    for completion in (running, late, fresh):
        await completion
    assert model.batches == [[1], [3], [2]]


async def test_responses_have_arrival_order_over_several_instances(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model, batch=BatchPolicy(1), instances=4, preserve_ordering=True)
    answered: list[int] = []

    async def wait(value: int) -> None:
        await served.infer(infer_request(value))
        answered.append(value)

    model.gate.clear()
    waiters = [asyncio.ensure_future(wait(value)) for value in range(40)]
    await asyncio.sleep(0)
    cancelled = served.infer(infer_request(99))
    cancelled.abandon()
    model.gate.set()
    await asyncio.gather(*waiters)
    assert answered == sorted(answered)


async def test_a_dying_instance_fails_its_batch_and_the_others_serve_on(mailbox: Mailbox, model: FakeModel) -> None:
    died: list[int] = []
    served = handle(mailbox, model, instances=2, batch=BatchPolicy(1), on_dead=died.append)
    assert isinstance(await error_of(served.infer(infer_request(DEATH))), ModelFailed)
    assert (await served.infer(infer_request(1))).outputs["y"].tolist() == [[2, 2]]
    assert (served.alive, served.ready) == (1, True)
    model.gate.clear()
    last = served.infer(infer_request(DEATH))
    await wait_started(model)
    queued = served.infer(infer_request(5))
    model.gate.set()
    assert isinstance(await error_of(last), ModelFailed)
    assert isinstance(await error_of(queued), Unavailable), "no instance is left to serve it"
    assert not served.ready
    with pytest.raises(Unavailable, match="died"):
        served.admit()
    with pytest.raises(Unavailable, match="died"):
        served.infer(infer_request(6))
    assert died == [1, 0]


async def test_closing_serves_queued_requests_and_waits_for_leases(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model, batch=BatchPolicy(4, (), 10_000_000_000))
    assert served.lease()
    waiting = [served.infer(infer_request(value)) for value in range(2)]
    closing = asyncio.create_task(asyncio.to_thread(served.close, 60))
    while served.lease():
        served.release()
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert not closing.done(), "a leased version is not closed"
    served.release()
    for value, completion in enumerate(waiting):
        assert (await completion).outputs["y"].tolist() == [[2 * value] * 2], "served without its delay"
    assert await closing
    assert model.closed
    with pytest.raises(Unavailable):
        served.infer(infer_request(1))


async def test_closing_times_out_on_a_hanging_backend(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model, batch=BatchPolicy(1))
    model.gate.clear()
    running = served.infer(infer_request(1))
    await wait_started(model)
    queued = served.infer(infer_request(2))
    assert not await asyncio.to_thread(served.close, 0.1)
    assert isinstance(await error_of(queued), Unavailable)
    assert isinstance(await error_of(running), Unavailable), "what hangs is given up, not waited for"
    assert not model.closed, "its memory is still in use"
    model.gate.set()


async def test_many_callers_on_many_instances_get_their_own_results(mailbox: Mailbox, model: FakeModel) -> None:
    before = set(threading.enumerate())
    served = handle(mailbox, model, instances=3, batch=BatchPolicy(8, (4,), 300_000))
    instances = set(threading.enumerate()) - before
    assert len(instances) >= 3

    async def caller(number: int) -> None:
        for turn in range(20):
            value = number * 100 + turn
            completion = served.infer(infer_request(value, rows=1 + turn % 9))
            if turn % 7 == number % 7:
                completion.abandon()
                continue
            assert (await completion).outputs["y"].tolist() == [[2 * value] * 2] * (1 + turn % 9)

    await asyncio.gather(*(caller(number) for number in range(30)))
    assert await asyncio.to_thread(served.close, 60)
    assert served.depth == 0
    assert not any(thread.is_alive() for thread in instances)


async def test_a_served_request_creates_no_reference_cycles(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model, instances=2)
    for rows in (1, 3, 20):  # alone, and in parts
        await served.infer(infer_request(1, rows=rows))
    gc.collect()
    gc.disable()
    try:
        for rows in (1, 3, 20):
            await served.infer(infer_request(1, rows=rows))
        await asyncio.sleep(0.01)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if type(each).__module__.startswith("headrace.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_a_decoupled_model_refuses_a_request_for_one_response(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    served.spec = replace(served.spec, decoupled=True)
    with pytest.raises(Unsupported, match=r"any number of responses.*exactly one.*/generate_stream.*ModelStreamInfer"):
        served.infer(infer_request(1))
    with pytest.raises(Unsupported, match="decoupled"):
        served.infer_blocking(infer_request(1))
    assert served.depth == 0
