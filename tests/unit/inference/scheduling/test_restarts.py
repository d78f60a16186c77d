"""Restarts of dead instances, after growing pauses, but not of a version that is closed or evicted meanwhile."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import ModelFailed, Unavailable
from headrace.inference.scheduling import instance as restarts
from headrace.inference.scheduling.instance import LONGEST_PAUSE_S, RestartTimers
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution, ExecutionLost

from tests.support.fake_overlapped import DIES, FakeOverlapped
from tests.support.fakes import DEATH, SPEC, FakeModel, infer_request

LOST = -7.0
Scenario = Callable[[Mailbox], Coroutine[Any, Any, None]]


class Model(FakeModel):
    """One whose executions may be refused, or lost with their device.

    Attributes:
        opened: number of executions that were opened.
        refused: raised for the next executions, the last first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0
        self.refused: list[Exception] = []
        self.warmed = 0

    def execution(self, index: int) -> Execution:
        self.opened += 1
        if self.refused:
            raise self.refused.pop()
        return _Execution(self)

    def warm_up(self, execution: Execution) -> None:
        self.warmed += 1


class _Execution(Execution):
    def __init__(self, model: Model) -> None:
        self._model = model

    def run(self, inputs: Any) -> Any:
        if LOST in inputs["x"]:
            raise ExecutionLost("the GPU is gone")
        return self._model.run(inputs)

    def close(self) -> None:
        pass


class Served:
    def __init__(self, mailbox: Mailbox, instances: int = 1, model: Model | None = None) -> None:
        self.model = model or Model()
        self.deaths: list[int] = []
        self.back: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.handle = ModelHandle(
            SPEC,
            HandlePolicy(batch=BatchPolicy(1), instances=instances),
            self.model,
            mailbox,
            Recorder(),
            self.deaths.append,
            on_back=lambda living: loop.call_soon_threadsafe(self.back.put_nowait, living),
        )
        self.handle.start(self.model.warm_up)

    async def kill(self, value: float = DEATH) -> None:
        with pytest.raises(ModelFailed):
            await self.handle.infer(infer_request(value))

    async def answers(self) -> bool:
        return (await self.handle.infer(infer_request(3))).outputs["y"].tolist() == [[6, 6]]

    async def close(self) -> None:
        assert await asyncio.to_thread(self.handle.close, 60)
        assert not waiting_timers()


class RestartTimer(threading.Timer):
    """A timer that counts as finished from the moment its function begins; the standard one does so when that has returned."""

    def run(self) -> None:
        self.finished.wait(self.interval)
        if not self.finished.is_set():
            self.finished.set()
            self.function(*self.args, **self.kwargs)


def waiting_timers() -> list[threading.Timer]:
    """Timers of restarts that have not begun."""
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return [timer for timer in timers if timer.name.startswith("restart of") and not timer.finished.is_set()]


@contextmanager
def hearing(words: str) -> Iterator[threading.Semaphore]:
    """Yield a semaphore that is released for each log line with these words."""
    messages = threading.Semaphore(0)
    handler = logging.Handler()
    handler.emit = lambda record: messages.release() if words in record.getMessage() else None  # type: ignore[method-assign]
    logger = logging.getLogger("headrace.model")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def play(monkeypatch: pytest.MonkeyPatch, scenario: Scenario, pause_s: float = 0.01) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", pause_s)
    monkeypatch.setattr(threading, "Timer", RestartTimer)

    async def main() -> None:
        await scenario(Mailbox(asyncio.get_running_loop()))

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_only_instance_dies_and_restarts_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(mailbox: Mailbox) -> None:
        served = Served(mailbox)
        for times in (1, 2, 3):
            await served.kill()
            assert await served.back.get() == 1
            assert (served.handle.ready, served.handle.alive, served.handle.restarts) == (True, 1, times)
            assert await served.answers()
        assert served.deaths == [0, 0, 0]
        assert served.model.warmed == 4
        await served.close()
        assert served.model.closed

    play(monkeypatch, scenario)


def test_while_it_is_away_requests_are_refused_and_readiness_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(mailbox: Mailbox) -> None:
        served = Served(mailbox)
        await served.kill()
        assert not served.handle.ready
        with pytest.raises(Unavailable, match="died"):
            served.handle.admit()
        with pytest.raises(Unavailable, match="died"):
            served.handle.infer(infer_request(1))
        await served.close()
        assert served.model.opened == 1, "nothing comes back to a version that is closed"

    play(monkeypatch, scenario, pause_s=30)


def test_the_others_serve_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(mailbox: Mailbox) -> None:
        served = Served(mailbox, instances=3)
        await served.kill()
        assert await served.answers()
        assert await served.back.get() == 3
        assert served.deaths == [2]
        await served.close()

    play(monkeypatch, scenario, pause_s=0.1)


def test_a_failed_restart_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(mailbox: Mailbox) -> None:
        served = Served(mailbox)
        served.model.refused = [RuntimeError("no"), RuntimeError("no"), RuntimeError("no")]
        await served.kill()
        assert await served.back.get() == 1
        assert served.model.opened == 5
        assert await served.answers()
        assert (served.deaths, served.handle.restarts) == ([0], 1)
        await served.close()

    play(monkeypatch, scenario)


@pytest.mark.parametrize("opening", [False, True], ids=["serving", "coming back"])
def test_no_restart_on_a_device_that_has_failed_permanently(monkeypatch: pytest.MonkeyPatch, opening: bool) -> None:
    async def scenario(mailbox: Mailbox) -> None:
        served = Served(mailbox)
        if opening:
            served.model.refused = [ExecutionLost("the GPU is gone")]
        with hearing("is not restarted") as messages:
            await served.kill(DEATH if opening else LOST)
            assert await asyncio.to_thread(messages.acquire, timeout=10)
        assert not waiting_timers()
        assert served.model.opened == (2 if opening else 1)
        assert not served.handle.ready
        with pytest.raises(Unavailable, match="died"):
            served.handle.infer(infer_request(1))
        await served.close()

    play(monkeypatch, scenario)


def test_no_restart_before_the_old_instance_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(mailbox: Mailbox) -> None:
        first, then = FakeOverlapped(manual=True), FakeOverlapped()

        class Two(Model):
            def execution(self, index: int) -> Execution:
                self.opened += 1
                return first if self.opened == 1 else then

        served = Served(mailbox, model=Two())
        waiting = served.handle.infer(infer_request(1))
        await asyncio.to_thread(first.wait_for, "finishing 0")
        with hearing("restarts in") as messages:
            await served.kill(DIES["launch"])
            assert served.deaths == [0]
            with pytest.raises(ModelFailed):
                await waiting
            for _ in range(3):  # when it died, and each time that its timer came too early
                assert await asyncio.to_thread(messages.acquire, timeout=10)
        assert served.model.opened == 1, "the GPU still writes into its memory"
        first.let_go()
        assert await served.back.get() == 1
        assert await served.answers()
        assert then.log[0] == "begin 0"
        await served.close()

    play(monkeypatch, scenario)


def test_a_restore_starts_every_instance_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(mailbox: Mailbox) -> None:
        served = Served(mailbox, instances=2)
        with hearing("restarts in") as messages:
            await served.kill()
            assert await asyncio.to_thread(messages.acquire, timeout=10)
        (timer,) = waiting_timers()
        assert await asyncio.to_thread(served.handle.evict, 60)
        await asyncio.to_thread(timer.function, *timer.args)  # its time is up
        assert served.model.opened == 2
        assert await asyncio.to_thread(served.handle.restore, served.model)
        assert served.handle.alive == 2
        assert await served.answers()
        assert served.handle.restarts == 0
        await served.close()

    play(monkeypatch, scenario, pause_s=30)


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_long_life() -> None:
    timers = RestartTimers(lambda _index: None)
    pauses_s = [timers.schedule("m#0", 0, 0.0) for _ in range(8)]
    assert pauses_s == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert timers.schedule("m#1", 1, 0.0) == 1, "each has its own"
    assert timers.schedule("m#0", 0, LONGEST_PAUSE_S + 1) == 1
    timers.stop()
    assert timers.schedule("m#0", 0, 0.0) is None
