"""Tasks that a sleeping instance runs with its execution, and instances that get new executions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.runtimes.base import Execution

from tests.support.fake_overlapped import FakeOverlapped
from tests.support.fakes import FakeModel, handle, infer_request, wait_started
from tests.support.sleepers import sleepers
from tests.support.waiting import until_async


class Overlapping(FakeOverlapped):
    """An overlapped model for `handle`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handles: list[Any] = []


MAKERS: list[Callable[[], Any]] = [FakeModel, Overlapping]


class Task:
    """A task that takes until `gate` is opened."""

    def __init__(self) -> None:
        self.gate, self.began = threading.Event(), threading.Event()
        self.executions: list[Execution] = []
        self.threads: list[str] = []

    def __call__(self, execution: Execution) -> None:
        self.executions.append(execution)
        self.threads.append(threading.current_thread().name)
        self.began.set()
        assert self.gate.wait(20), "the test forgot to open the gate"


async def answer(waiting: Any) -> float:
    return float((await waiting).outputs["y"][0, 0])


async def begin(served: Any, task: Task) -> None:
    """Offer a task until an instance sleeps and takes it."""

    def has_begun() -> bool:
        if not task.began.is_set():
            served.offer(task)
        return task.began.wait(0.05)

    await until_async(lambda: asyncio.to_thread(has_begun))


@pytest.mark.parametrize("make", MAKERS)
async def test_a_sleeping_instance_runs_a_task_and_then_the_requests_that_came_meanwhile(
    make: Callable[[], Any], mailbox: Mailbox
) -> None:
    model, task = make(), Task()
    served = handle(mailbox, model)
    assert await answer(served.infer(infer_request(1))) == 2
    await begin(served, task)
    assert task.threads[0].startswith("fake/1#0")
    assert isinstance(task.executions[0], type(model))
    waiting = [served.infer(infer_request(value)) for value in (2, 3)]
    assert served.depth == 2
    task.gate.set()
    assert [await answer(each) for each in waiting] == [4, 6]
    assert await asyncio.to_thread(served.close, 10)
    assert len(task.executions) == 1


async def test_another_instance_serves_while_one_runs_a_task(mailbox: Mailbox) -> None:
    task = Task()
    served = handle(mailbox, FakeModel(), instances=2)
    await begin(served, task)
    assert await answer(served.infer(infer_request(1))) == 2
    task.gate.set()
    assert await asyncio.to_thread(served.close, 10)


async def test_no_task_is_offered_to_an_instance_that_runs_a_batch_or_ends(mailbox: Mailbox) -> None:
    model, task = FakeModel(), Task()
    served = handle(mailbox, model)
    model.gate.clear()
    running = served.infer(infer_request(1))
    await wait_started(model)
    served.offer(task)
    model.gate.set()
    assert await answer(running) == 2
    assert await asyncio.to_thread(served.close, 10)
    served.offer(task)
    assert task.executions == []


async def test_a_task_is_dropped_for_a_request_that_comes_before_it_begins(mailbox: Mailbox) -> None:
    model, task = FakeModel(), Task()
    served = handle(mailbox, model)
    scheduler = served._scheduler
    await until_async(lambda: bool(sleepers(scheduler)))
    with scheduler._lock:  # the instance wakes up, and waits for the lock
        sleeper = sleepers(scheduler).pop()
        scheduler._offers[sleeper] = task
        scheduler._dispatched.add(sleeper)
        sleeper.release()
        scheduler._selector.push(served._entry_factory.entries(infer_request(1), done := LoopCompletion(mailbox), 1))
    assert await answer(done) == 2
    assert await asyncio.to_thread(served.close, 10)
    assert task.executions == []


@pytest.mark.parametrize("make", MAKERS)
async def test_a_version_that_is_closed_waits_for_a_task(make: Callable[[], Any], mailbox: Mailbox) -> None:
    model, task = make(), Task()
    served = handle(mailbox, model)
    await begin(served, task)
    assert not served.is_ending
    closing = asyncio.create_task(asyncio.to_thread(served.close, 10))
    await until_async(lambda: served.is_ending)
    task.gate.set()
    assert await closing
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("fake/1#")]


class Renewed(FakeModel):
    """A model whose executions are numbered."""

    opened = 0

    def execution(self, index: int) -> Any:
        self.opened += 1
        return self


async def test_executions_are_opened_again_after_the_running_batch_and_before_the_queued_ones(mailbox: Mailbox) -> None:
    model = Renewed()
    served = handle(mailbox, model)
    model.gate.clear()
    running = served.infer(infer_request(1))
    await wait_started(model)
    waiting = served.infer(infer_request(2))
    served.reopen_executions()
    assert model.opened == 1
    model.gate.set()
    assert [await answer(running), await answer(waiting)] == [2, 4]
    assert (model.opened, served.alive) == (2, 1)
    served.reopen_executions()
    assert await asyncio.to_thread(served.close, 10), "the end may come first"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("fake/1")]
