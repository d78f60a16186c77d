"""Eviction of a model version from memory, and its restore on the next request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, DeadlineExceeded, ModelFailed, Unavailable
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.observability.counters import Recorder

from tests.support.fake_overlapped import FakeOverlapped
from tests.support.fakes import DEATH, SPEC, FakeModel, error_of, infer_request, wait_started
from tests.support.virtual_time import advance_timers
from tests.support.waiting import until_async


class Served:
    """A handle on a fake model, with the calls of its callbacks."""

    def __init__(self, mailbox: Mailbox, model: Any, **policy: Any) -> None:
        self.deaths: list[int] = []
        self.restore_requests: list[ModelHandle] = []
        self.uses: list[bool] = []  # `is_unused` at each call of `on_first_use`
        self.handle = ModelHandle(
            SPEC,
            HandlePolicy(batch=BatchPolicy(8), **policy),
            model,
            mailbox,
            Recorder(),
            self.deaths.append,
            on_wanted=self.restore_requests.append,
            on_first_use=lambda handle: self.uses.append(handle.is_unused),
        )
        if model is not None:
            self.handle.start()

    async def evict(self, timeout_s: float = 10) -> bool:
        return await asyncio.to_thread(self.handle.evict, timeout_s)

    async def until_evicted(self) -> None:
        await until_async(lambda: self.handle.evicted)

    async def restore(self, model: Any) -> bool:
        return await asyncio.to_thread(self.handle.restore, model)

    async def close(self) -> None:
        assert await asyncio.to_thread(self.handle.close, 60)


async def answer(waiting: Any) -> float:
    return float((await waiting).outputs["y"][0, 0])


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fake/1#")]


class Overlapping(FakeOverlapped):
    @property
    def closed(self) -> bool:
        """The execution and the model behind it, which are one."""
        return self.log.count("close") == 2 and not self.violations


@pytest.mark.parametrize(("make", "instances"), [(FakeModel, 2), (Overlapping, 1)])
async def test_requests_wait_for_an_evicted_model_and_request_it_once(
    make: Callable[[], Any], instances: int, mailbox: Mailbox
) -> None:
    first, second = make(), make()
    served = Served(mailbox, first, instances=instances)
    assert await answer(served.handle.infer(infer_request(1))) == 2
    assert await served.evict()
    assert first.closed
    assert threads() == []
    assert (served.handle.ready, served.handle.evicted, served.handle.alive) == (True, True, 0)
    assert served.restore_requests == [], "no request has arrived yet"
    waiting = [served.handle.infer(infer_request(value)) for value in (3, 4, 5)]
    served.handle.admit()
    assert served.handle.depth == 3
    assert served.restore_requests == [served.handle]
    assert await served.restore(second)
    assert [await answer(completion) for completion in waiting] == [6, 8, 10]
    assert (served.handle.evicted, served.handle.alive) == (False, instances)
    # And once more: the callback runs again.
    assert await served.evict()
    again = served.handle.infer(infer_request(6))
    assert len(served.restore_requests) == 2
    assert await served.restore(make())
    assert await answer(again) == 12
    assert served.deaths == []
    await served.close()
    assert second.closed
    assert served.handle.recorder.totals().requests == 5, "the counts go on"


async def evict_while_running(served: Served, model: FakeModel) -> tuple[Any, Any, asyncio.Task[bool]]:
    """Start an eviction behind a running and a queued request; return the two and the eviction."""
    model.gate.clear()
    running = served.handle.infer(infer_request(1))
    await wait_started(model)
    waiting = served.handle.infer(infer_request(2))
    eviction = asyncio.create_task(served.evict())
    await served.until_evicted()
    return running, waiting, eviction


@pytest.mark.parametrize("by_request", [True, False])
async def test_the_first_use_is_reported_once(by_request: bool, mailbox: Mailbox) -> None:
    served = Served(mailbox, None)
    assert served.handle.is_unused
    waiting = served.handle.infer(infer_request(1)) if by_request else None
    assert served.uses == [False] * by_request
    assert await served.restore(FakeModel())
    if waiting is not None:
        await waiting
    await served.evict()
    assert await served.restore(FakeModel())
    assert served.uses == [False]
    await served.close()


async def test_running_requests_finish_before_eviction_and_queued_ones_reload_the_model(mailbox: Mailbox) -> None:
    model = FakeModel()
    served = Served(mailbox, model)
    running, waiting, eviction = await evict_while_running(served, model)
    late = served.handle.infer(infer_request(3))
    model.gate.set()
    assert await eviction
    assert await answer(running) == 2
    assert model.batches == [[1]]
    assert served.restore_requests == [served.handle]
    assert await served.restore(FakeModel())
    assert [await answer(waiting), await answer(late)] == [4, 6]
    await served.close()


async def test_requests_queued_before_the_eviction_reload_the_model(mailbox: Mailbox) -> None:
    model = FakeModel()
    served = Served(mailbox, model)
    running, waiting, eviction = await evict_while_running(served, model)
    assert served.restore_requests == []
    model.gate.set()
    assert await eviction
    assert served.restore_requests == [served.handle]
    assert await answer(running) == 2
    assert await served.restore(FakeModel())
    assert await answer(waiting) == 4
    await served.close()


async def test_a_model_that_cannot_be_evicted_in_time_serves_on_with_all_instances(mailbox: Mailbox) -> None:
    model = FakeModel()
    served = Served(mailbox, model, instances=2)
    model.gate.clear()
    stuck = served.handle.infer(infer_request(1))
    await wait_started(model)
    assert not await served.evict(0.05)
    assert (served.handle.evicted, served.handle.alive, len(threads())) == (False, 2, 2)
    other = served.handle.infer(infer_request(2))
    await wait_started(model)  # the instance that had ended for the eviction runs again
    model.gate.set()
    assert [await answer(stuck), await answer(other)] == [2, 4]
    assert served.deaths == []
    await served.close()


class Unopenable(FakeModel):
    """The second instance cannot be opened, and not before the first has served."""

    def execution(self, index: int) -> FakeModel:
        if index == 1:
            assert self.started.acquire(timeout=60)
            raise ModelFailed("no room")
        return self


async def test_a_model_that_cannot_be_restored_stays_evicted_and_is_retried(mailbox: Mailbox) -> None:
    served = Served(mailbox, FakeModel(), instances=2)
    assert await served.evict()
    served_meanwhile = served.handle.infer(infer_request(1))
    broken = Unopenable()
    with pytest.raises(ConfigError, match="could not be started: no room"):
        await served.restore(broken)
    assert broken.closed
    assert threads() == []
    assert await answer(served_meanwhile) == 2
    assert (served.handle.evicted, served.handle.ready) == (True, True)
    waiting = served.handle.infer(infer_request(2))
    assert served.restore_requests == [served.handle] * 2
    served.handle.refuse(Unavailable("cannot be loaded"))
    assert str(await error_of(waiting)) == "cannot be loaded"
    later = served.handle.infer(infer_request(3))
    assert served.restore_requests == [served.handle] * 3
    assert await served.restore(FakeModel())
    assert await answer(later) == 6
    assert served.deaths == []
    await served.close()


async def test_deadlines_and_limits_hold_while_it_is_evicted(mailbox: Mailbox) -> None:
    served = Served(mailbox, FakeModel())
    assert await served.evict()
    now = time.monotonic_ns()
    waiting = served.handle.infer(infer_request(1, received_ns=now, deadline_ns=now + 30 * NS_PER_S))
    advance_timers(30)
    assert isinstance(await error_of(waiting), DeadlineExceeded)
    assert served.handle.depth == 0
    cancelled = served.handle.infer(infer_request(2))
    cancelled.abandon()
    assert served.handle.depth == 0
    await served.close()


async def test_an_evicted_model_is_closed(mailbox: Mailbox) -> None:
    served = Served(mailbox, FakeModel())
    assert await served.evict()
    waiting = served.handle.infer(infer_request(1))
    await served.close()
    assert isinstance(await error_of(waiting), Unavailable)
    late = FakeModel()
    assert not await served.restore(late)
    assert late.closed
    assert not await served.evict()
    with pytest.raises(Unavailable):
        served.handle.infer(infer_request(2))


async def test_a_close_settles_the_requests_of_an_evicted_model(mailbox: Mailbox) -> None:
    served = Served(mailbox, FakeModel())
    assert await served.evict()
    assert served.handle.lease()
    waiting = served.handle.infer(infer_request(1))
    closing = asyncio.create_task(served.close())
    while served.handle.lease():
        served.handle.release()
        await asyncio.sleep(0.001)
    again = FakeModel()
    assert await served.restore(again)
    assert await answer(waiting) == 2
    served.handle.release()
    await closing
    assert again.closed


async def test_dead_instances_are_not_evicted(mailbox: Mailbox) -> None:
    served = Served(mailbox, FakeModel())
    assert isinstance(await error_of(served.handle.infer(infer_request(DEATH))), ModelFailed)
    assert served.deaths == [0]
    assert not await served.evict()
    assert not served.handle.ready
    with pytest.raises(Unavailable, match="have died"):
        served.handle.admit()
    await served.close()
