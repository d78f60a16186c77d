"""Start and end of a model version: instances that cannot be opened, warm-ups, and two threads that close it."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, ModelFailed, Unavailable
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import HandlePolicy
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution

from tests.support.fakes import (
    DEATH,
    POISON,
    SPEC,
    FakeModel,
    InstanceKilledError,
    error_of,
    handle,
    infer_request,
    wait_started,
)


class Unopenable(FakeModel):
    """Some of its instances cannot be opened."""

    def __init__(self, error: BaseException, broken: int = 1) -> None:
        super().__init__()
        self.error = error
        self.broken = broken

    def execution(self, index: int) -> FakeModel:
        if index == self.broken:
            raise self.error
        return self


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("/secret/path"), "RuntimeError"),
        (InstanceKilledError(), "InstanceKilledError"),
        (ModelFailed("too little memory"), "too little memory"),
    ],
)
async def test_an_instance_that_cannot_be_opened_fails_the_start(
    error: BaseException, message: str, mailbox: Mailbox
) -> None:
    model = Unopenable(error)
    deaths: list[int] = []
    with pytest.raises(ConfigError, match=message) as failure:
        handle(mailbox, model, deaths.append, instances=3)
    assert "secret" not in str(failure.value)
    assert model.closed
    assert deaths == [], "it never served"
    assert not any(thread.name.startswith("fake/1#") for thread in threading.enumerate())


async def test_a_thread_that_cannot_be_started_fails_the_start(
    monkeypatch: pytest.MonkeyPatch, mailbox: Mailbox, model: FakeModel
) -> None:
    start = threading.Thread.start

    def start_all_but_one(thread: threading.Thread) -> None:
        if thread.name == "fake/1#1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_all_but_one)
    with pytest.raises(ConfigError, match="no more threads"):
        handle(mailbox, model, instances=3)
    assert model.closed
    assert not any(thread.name.startswith("fake/1#") for thread in threading.enumerate())


async def test_every_instance_warms_up_on_its_own_thread_before_the_start_returns(
    mailbox: Mailbox, model: FakeModel
) -> None:
    threads: set[str] = set()

    def warm_up(execution: Execution) -> None:
        threads.add(threading.current_thread().name)
        execution.run({"x": np.zeros((2, 2), np.float32)})

    served = ModelHandle(SPEC, HandlePolicy(instances=2), model, mailbox, Recorder())
    served.start(warm_up)
    assert threads == {"fake/1#0", "fake/1#1"}
    assert len(model.batches) == 2
    totals = served.recorder.totals()
    assert (totals.requests, totals.rows, totals.executions) == (0, 0, 0), "a warm-up is no request"
    assert served.close(60)


async def test_a_warm_up_that_fails_fails_the_start(mailbox: Mailbox, model: FakeModel) -> None:
    def warm_up(execution: Execution) -> None:
        execution.run({"x": np.full((1, 2), POISON, np.float32)})

    served = ModelHandle(SPEC, HandlePolicy(instances=2), model, mailbox, Recorder())
    with pytest.raises(ConfigError, match="could not be started"):
        served.start(warm_up)
    assert model.closed


async def test_a_close_that_waits_for_ever_is_ended_by_another(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    running = served.infer(infer_request(1))
    await wait_started(model)
    waiting = served.infer(infer_request(2))
    closing = asyncio.create_task(asyncio.to_thread(served.close, None))
    await asyncio.sleep(0.05)
    assert not closing.done()
    assert not await asyncio.to_thread(served.close, 0.0)
    for cancelled in (running, waiting):
        assert isinstance(await error_of(cancelled), Unavailable)
    assert not model.closed, "it still computes"
    model.gate.set()
    assert await closing
    assert model.closed


async def test_an_instance_that_dies_during_close_is_not_reported(mailbox: Mailbox, model: FakeModel) -> None:
    deaths: list[int] = []
    served = handle(mailbox, model, deaths.append)
    assert served.lease()
    model.gate.clear()
    running = served.infer(infer_request(DEATH))
    await wait_started(model)
    closing = asyncio.create_task(asyncio.to_thread(served.close, 60))
    while served.lease():
        served.release()
        await asyncio.sleep(0.001)
    model.gate.set()
    assert isinstance(await error_of(running), ModelFailed)
    served.release()
    assert await closing
    assert deaths == [], "a listener would mistake it for the version that serves now"
