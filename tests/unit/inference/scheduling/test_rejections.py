"""Rejections and load reports of a handle, with real instance threads and a fake model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

import pytest
from headrace.core.clock import NS_PER_MS as MS
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.errors import DeadlineExceeded, Overloaded, QueueTimeout, WouldMiss
from headrace.core.request import InferRequest
from headrace.inference.scheduling.admission import WaitForecast
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, LevelPolicy, QueueLimits

from tests.support.fakes import FakeModel, handle, infer_request, wait_started

# The time of the handles of `slow`: it stands still, so that a pause of the process uses up no promise.
NOW_NS = 1000 * NS_PER_S
SLOW = {rows: [250 * MS] for rows in (1, 2, 4, 8)}


def slow(mailbox: Mailbox, model: FakeModel, objective_ms: int = 600, **policy: object) -> ModelHandle:
    """A handle that believes that batches take 250 ms, and whose first batch is held."""
    served = handle(
        mailbox, model, batch=BatchPolicy(8, objective_ns=objective_ms * MS), clock=lambda: NOW_NS, **policy
    )
    served.latency_table.seed(SLOW)
    model.gate.clear()
    return served


@pytest.mark.parametrize("instances", [1, 3])
async def test_the_capacity_is_that_of_all_live_instances(instances: int, mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model, batch=BatchPolicy(8), instances=instances)
    served.latency_table.seed(SLOW)
    load = served.load()
    assert (load.instances, load.rows_hz) == (instances, pytest.approx(32 * instances))


def now(value: float, **more: Any) -> InferRequest:
    return infer_request(value, received_ns=NOW_NS, **more)


async def test_requests_that_would_miss_the_objective_are_refused_before_queueing(
    mailbox: Mailbox, model: FakeModel
) -> None:
    served = slow(mailbox, model)
    first = served.infer(now(1))
    await wait_started(model)
    waiting = [served.infer(now(value)) for value in range(8)]
    with pytest.raises(WouldMiss, match="complete in 750 ms, due in 600 ms") as refused:
        served.infer(now(99))
    assert refused.value.retry_after_s == 0.5, "the running batch and the queued ones"
    with pytest.raises(WouldMiss):
        await asyncio.to_thread(served.infer_blocking, now(99))
    load = served.load()
    assert (load.depth, load.rows, load.running_rows, load.instances) == (8, 8, 1, 1)
    assert load.wait_ns == 500 * MS
    assert load.rows_hz == pytest.approx(32)
    model.gate.set()
    for completion in (first, *waiting):
        await completion
    assert await served.infer(now(5)), "there is time again"
    assert served.close(60)
    assert 99 not in {value for batch in model.batches for value in batch}


async def test_the_retry_time_of_a_full_queue_is_its_drain_time(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model, batch=BatchPolicy(8), limits=QueueLimits(max_count=16))
    served.latency_table.seed(SLOW)
    model.gate.clear()
    first = served.infer(now(1))
    await wait_started(model)
    waiting = [served.infer(now(value)) for value in range(16)]
    with pytest.raises(Overloaded, match="16 requests") as full:
        served.infer(now(99))
    assert 0.5 <= full.value.retry_after_s <= 0.75, "the running batch and two in the queue"
    model.gate.set()
    for completion in (first, *waiting):
        await completion


async def test_front_ends_reject_long_waits_only_where_the_queue_checks_them(
    monkeypatch: pytest.MonkeyPatch, mailbox: Mailbox, model: FakeModel
) -> None:
    """With few rows in the queue it checks no prediction: one of them may be wrong."""

    served, forecast = slow(mailbox, model, 0), WaitForecast(2, 1)
    monkeypatch.setattr(served._admission, "forecast_wait", lambda queue, now_ns: forecast)
    first = served.infer(now(1))
    await wait_started(model)
    assert served.overload(NOW_NS).wait is None  # type: ignore[union-attr]
    waiting = [served.infer(now(value)) for value in range(16)]
    for short_rows, expected in ((17, None), (16, forecast)):
        served._admission.short_rows = short_rows
        assert served.overload(NOW_NS).wait is expected  # type: ignore[union-attr]
    model.gate.set()
    for completion in (first, *waiting):
        await completion


async def test_rejections_do_not_delay_ordered_responses(mailbox: Mailbox, model: FakeModel) -> None:
    served = slow(mailbox, model, preserve_ordering=True)
    first = served.infer(now(1))
    await wait_started(model)
    waiting = [served.infer(now(value)) for value in range(8)]
    with pytest.raises(WouldMiss):
        served.infer(now(99))
    model.gate.set()
    for completion in (first, *waiting):
        await completion
    assert await served.infer(now(5))


async def test_a_request_deadline_is_enforced_without_an_objective(mailbox: Mailbox, model: FakeModel) -> None:
    served = slow(mailbox, model, objective_ms=0)
    first = served.infer(now(1))
    await wait_started(model)
    with pytest.raises(WouldMiss, match="complete in 500 ms, due in 300 ms"):
        served.infer(now(2, deadline_ns=NOW_NS + 300 * MS))
    patient = served.infer(now(3, deadline_ns=NOW_NS + 10 * NS_PER_S))
    waiting = [served.infer(now(value)) for value in range(20)]
    model.gate.set()
    for completion in (first, patient, *waiting):
        await completion


async def test_no_request_is_rejected_as_late_while_the_model_is_evicted(mailbox: Mailbox, model: FakeModel) -> None:
    served = slow(mailbox, model)
    assert await asyncio.to_thread(served.evict, 60)
    waiting = [served.infer(now(value)) for value in range(20)]
    impatient = served.infer(now(99, deadline_ns=NOW_NS + 20 * MS))
    assert served.load().wait_ns == 0, "latencies are unmeasured"
    with pytest.raises(DeadlineExceeded):
        await impatient
    again = FakeModel()
    assert await asyncio.to_thread(served.restore, again)
    for completion in waiting:
        await completion  # late, but answered


async def test_levels_have_separate_timeouts_and_bounds(mailbox: Mailbox, model: FakeModel) -> None:
    policies = {
        1: LevelPolicy(queue_timeout_ns=20 * MS),
        2: LevelPolicy(max_count=2, queue_timeout_ns=10 * MS, demote_on_timeout=True),
    }
    served = handle(mailbox, model, batch=BatchPolicy(1), levels=3, level_policies=policies)
    model.gate.clear()
    first = served.infer(now(0, priority=3))
    await wait_started(model)
    urgent = served.infer(now(1, priority=1))
    demoted = [served.infer(now(value, priority=2)) for value in (20, 21)]
    with pytest.raises(Overloaded, match="level 2"):
        served.infer(now(22, priority=2))
    common = [served.infer(now(value, priority=3)) for value in (30, 31)]
    load = served.load(by_level=True)
    assert [(each.level, each.depth, each.rows) for each in load.levels] == [(1, 1, 1), (2, 2, 2), (3, 2, 2)]
    with pytest.raises(QueueTimeout):
        await urgent
    threading.Timer(0.05, model.gate.set).start()
    for completion in (first, *demoted, *common):
        await completion
    assert served.close(60)
    assert model.batches == [[0], [30], [31], [20], [21]], "level 2 had waited too long, and goes last"


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("policy_ms", "override", "requested_ms", "expires"),
    [
        (20, True, 0, True),
        (60_000, True, 20, True),
        (20, True, 60_000, True),
        (60_000, False, 20, False),
        (0, True, 20, False),
    ],
    ids=["no timeout of its own", "shorter", "longer: the policy's holds", "no override", "no timeout to shorten"],
)
@pytest.mark.parametrize("deadline_ns", [0, 50 * NS_PER_S])
async def test_the_queue_timeout_is_the_shorter_one_and_no_deadline_replaces_it(
    policy_ms: int,
    override: bool,
    requested_ms: int,
    expires: bool,
    deadline_ns: int,
    blocking: bool,
    mailbox: Mailbox,
    model: FakeModel,
) -> None:
    queue_policy = LevelPolicy(queue_timeout_ns=policy_ms * MS, timeout_override=override)
    served = handle(mailbox, model, batch=BatchPolicy(1), queue_policy=queue_policy)
    model.gate.clear()
    first = served.infer(now(0))
    while not await asyncio.to_thread(model.started.acquire, timeout=0.5):
        first = served.infer(now(0))  # on a busy machine the instance pulls after the timeout of the one before
    request = now(1, queue_timeout_ns=requested_ms * MS, deadline_ns=deadline_ns and monotonic_ns() + deadline_ns)
    second = asyncio.to_thread(served.infer_blocking, request) if blocking else served.infer(request)
    if expires:
        with pytest.raises(QueueTimeout):
            await second
        model.gate.set()
    else:
        answer = asyncio.ensure_future(_awaited(second))
        await asyncio.sleep(0.05)  # more than the shorter timeout
        assert not answer.done()
        model.gate.set()
        assert (await answer).outputs["y"].tolist() == [[2, 2]]
    if policy_ms != 20:
        await first


async def _awaited(completion: Awaitable[Any]) -> Any:
    return await completion


async def test_a_blocking_caller_heeds_the_timeout_of_its_level(mailbox: Mailbox, model: FakeModel) -> None:
    policies = {2: LevelPolicy(queue_timeout_ns=10 * MS)}
    served = handle(mailbox, model, batch=BatchPolicy(1), levels=2, level_policies=policies)
    model.gate.clear()
    first = served.infer(now(0, priority=1))
    await wait_started(model)
    with pytest.raises(QueueTimeout):
        await asyncio.to_thread(served.infer_blocking, now(1, priority=2))
    patient = asyncio.create_task(asyncio.to_thread(served.infer_blocking, now(2, priority=1)))
    await asyncio.sleep(0.05)
    model.gate.set()
    assert await first
    assert await patient
