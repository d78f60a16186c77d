"""Callers that wait on their own thread, which does all the work where it may."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.errors import BadRequest, DeadlineExceeded, HeadraceError, ModelFailed, QueueTimeout, Unavailable
from headrace.core.request import InferRequest
from headrace.core.tensor import Array
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.overlapped_runner import _SHORT_BYTES, OverlappedRunner
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy, LevelPolicy
from headrace.inference.scheduling.scheduler import Scheduler
from headrace.observability.counters import Recorder
from headrace.runtimes.base import LoadedModel

from tests.support.fake_overlapped import DIES, LOST, RAISES, FakeOverlapped
from tests.support.fakes import SPEC, FakeModel, infer_request
from tests.support.sleepers import inline_dispatches, sleepers
from tests.support.waiting import record_calls, until


class Watched(FakeOverlapped):
    """A prompt execution that remembers who launched."""

    def __init__(self, prompt: bool = True, **more: Any) -> None:
        super().__init__(prompt=prompt, **more)
        self.launchers: list[threading.Thread] = []

    def launch(self, in_flight: object) -> None:
        self.launchers.append(threading.current_thread())
        super().launch(in_flight)  # type: ignore[arg-type]


class Several(LoadedModel):
    """A model of several executions."""

    def __init__(self, *executions: FakeOverlapped) -> None:
        self.executions = executions

    def execution(self, index: int) -> FakeOverlapped:
        return self.executions[index]

    def close(self) -> None:
        pass


Make = Callable[..., ModelHandle]


@pytest.fixture
def handles() -> Iterator[Make]:
    """Handles without a running loop; closed at the end, which reports violations."""
    created: list[tuple[ModelHandle, Any]] = []
    loop = asyncio.new_event_loop()

    def make(model: Any, batch: BatchPolicy | None = None, **policy: Any) -> ModelHandle:
        handle = ModelHandle(SPEC, HandlePolicy(batch or BatchPolicy(8), **policy), model, Mailbox(loop), Recorder())
        handle.start()
        created.append((handle, model))
        return handle

    yield make
    for handle, model in created:
        for execution in getattr(model, "executions", [model]):
            if isinstance(execution, FakeOverlapped):
                execution.let_go()
        assert handle.close(10)
        for execution in getattr(model, "executions", [model]):
            assert not getattr(execution, "violations", None)
    loop.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def asleep(handle: ModelHandle, instances: int = 1) -> None:
    """Return once that many instance threads sleep without a timeout."""
    scheduler = handle._scheduler  # an instance that has been woken has its dispatch until it pulls the next batch
    until(lambda: len(inline_dispatches(scheduler).keys() & list(sleepers(scheduler))) >= instances)


def is_finishing(handle: ModelHandle) -> bool:
    """Return whether an instance has a batch in flight, or one that it has recorded and not passed back."""
    runners = [cast("OverlappedRunner", each) for each in inline_dispatches(handle).values()]
    return any(each._open and each._finished.empty() for each in runners)


def waiting(handle: ModelHandle, number: int) -> None:
    until(lambda: handle.depth >= number)


def first(handle: ModelHandle, request: InferRequest) -> float:
    return float(handle.infer_blocking(request).outputs["y"][0, 0])


def later(threads: ThreadPoolExecutor, handle: ModelHandle, value: float, **more: Any) -> Future[float]:
    return threads.submit(first, handle, infer_request(value, **more))


def test_a_single_caller_runs_its_batch_and_wakes_no_thread(handles: Make) -> None:
    model = Watched()
    handle = handles(model)
    asleep(handle)
    sleeper = sleepers(handle)[0]
    for value in range(20):
        assert first(handle, infer_request(value)) == 2 * value
        assert sleepers(handle) == [sleeper]
    here = threading.current_thread()
    assert model.launchers == model.finishers == [here] * 20
    assert model.most_open == 1
    totals = handle.recorder.totals()
    assert (totals.requests, totals.executions, totals.rows) == (20, 20, 20)
    assert handle.used_ns


@pytest.mark.parametrize("prompt", [True, False])
def test_an_answer_has_its_stations(handles: Make, prompt: bool) -> None:
    handle = handles(Watched(prompt))
    times = handle.infer_blocking(infer_request(1)).times
    assert times is not None
    assert list(times) == sorted(times)


def test_later_requests_are_launched_behind_it_and_finish_after_it(handles: Make, threads: ThreadPoolExecutor) -> None:
    model = Watched(manual=True)
    handle = handles(model, BatchPolicy(1))
    asleep(handle)
    own = later(threads, handle, 1)
    model.wait_for("finishing 0")
    others = [later(threads, handle, 2), later(threads, handle, 3)]
    model.wait_for("launch 1")
    assert "finishing 1" not in model.log
    model.let_go()
    assert [each.result(60) for each in (own, *others)] == [2, 4, 6]
    assert [thread.name.endswith("finisher") for thread in model.finishers] == [False, True, True]
    assert [thread.name for thread in model.launchers[1:]] == ["fake/1#0"] * 2
    asleep(handle)
    assert first(handle, infer_request(4)) == 8
    assert model.finishers[-1] is model.launchers[-1] is threading.current_thread()


def test_a_large_request_is_copied_by_its_caller(handles: Make) -> None:
    model = Watched()
    handle = handles(model)
    asleep(handle)
    assert first(handle, infer_request(1, 3, size_bytes=_SHORT_BYTES + 1)) == 2
    assert model.finishers == [threading.current_thread()]


@pytest.mark.parametrize(
    ("model", "policy"),
    [(FakeModel(), {}), (Watched(prompt=False), {}), (Watched(), {"batch": BatchPolicy(8, (), 1_000_000)})],
    ids=["serial", "not prompt", "waits for company"],
)
def test_requests_that_may_not_run_inline_are_queued(handles: Make, model: Any, policy: dict[str, Any]) -> None:
    handle = handles(model, **policy)
    assert [first(handle, infer_request(value)) for value in range(5)] == [0, 2, 4, 6, 8]
    assert threading.current_thread() not in getattr(model, "finishers", [])


def test_a_request_larger_than_a_batch_returns_all_rows(handles: Make) -> None:
    handle = handles(Watched())
    assert handle.infer_blocking(infer_request(3, 20)).outputs["y"].tolist() == [[6, 6]] * 20
    with pytest.raises(BadRequest):
        handles(Watched(), split_oversized=False).infer_blocking(infer_request(3, 20))


def test_responses_are_ordered_across_instances(handles: Make, threads: ThreadPoolExecutor) -> None:
    slow, quick = Watched(manual=True), Watched()
    handle = handles(Several(quick, slow), instances=2, preserve_ordering=True)
    asleep(handle, 2)
    while inline_dispatches(handle)[sleepers(handle)[-1]].execution is not slow:  # type: ignore[attr-defined]
        sleepers(handle).reverse()
    held = later(threads, handle, 1)
    slow.wait_for("finishing 0")
    overtaking = later(threads, handle, 2)
    quick.wait_for("finish 0")
    assert not overtaking.done()
    slow.land()
    assert (held.result(60), overtaking.result(60)) == (2, 4)


@pytest.mark.parametrize("call", RAISES)
def test_an_error_is_the_request_s_alone(handles: Make, call: str) -> None:
    handle = handles(Watched())
    asleep(handle)
    with pytest.raises(ModelFailed):
        handle.infer_blocking(infer_request(RAISES[call]))
    assert first(handle, infer_request(3)) == 6


@pytest.mark.parametrize("how", [DIES, LOST], ids=["dies", "lost"])
@pytest.mark.parametrize("call", ["begin", "launch", "finish"])
def test_a_fatal_error_in_the_caller_ends_the_instance(handles: Make, how: dict[str, float], call: str) -> None:
    model = Watched()
    handle = handles(model)
    asleep(handle)
    with pytest.raises(ModelFailed):
        handle.infer_blocking(infer_request(how[call]))
    assert handle.alive == 0, "the callback runs before the caller gets the error"
    with pytest.raises(Unavailable):
        handle.infer_blocking(infer_request(1))
    model.wait_for("close")


def test_the_execution_is_not_closed_under_a_caller_that_waits(handles: Make, threads: ThreadPoolExecutor) -> None:
    model = Watched(manual=True)
    handle = handles(model, BatchPolicy(1))
    asleep(handle)
    own = later(threads, handle, 1)
    model.wait_for("finishing 0")
    deadly = later(threads, handle, LOST["launch"])
    assert isinstance(deadly.exception(10), ModelFailed)
    until(lambda: "fake/1#0 finisher" not in [thread.name for thread in threading.enumerate()])
    threading.Event().wait(0.05)  # time to close it, if there were no wait
    assert "close" not in model.log
    model.land()
    assert isinstance(own.exception(10), ModelFailed), "it was given up with the instance"
    model.wait_for("close")


def test_a_cancelled_caller_leaves_no_batch_in_flight(handles: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Watched()
    handle = handles(model)
    asleep(handle)
    with monkeypatch.context() as patch:

        def called_off(in_flight: object) -> dict[str, Array]:
            raise KeyboardInterrupt

        patch.setattr(model, "finish", called_off)
        with pytest.raises(KeyboardInterrupt):
            handle.infer_blocking(infer_request(1))
        model.wait_for("close")
    assert handle.alive == 0


@pytest.mark.parametrize("end", ["close", "evict"])
def test_the_end_waits_for_it(handles: Make, threads: ThreadPoolExecutor, end: str) -> None:
    model = Watched(manual=True)
    handle = handles(model)
    asleep(handle)
    own = later(threads, handle, 1)
    model.wait_for("finishing 0")
    ending = threads.submit(getattr(handle, end), 10)
    until(lambda: handle._scheduler._closed or handle._scheduler._paused)
    model.land()
    assert own.result(60) == 2
    assert ending.result(60)


def test_a_caller_of_an_evicted_model_waits_for_the_restore(handles: Make, threads: ThreadPoolExecutor) -> None:
    handle = handles(Watched())
    assert handle.evict(10)
    requested: list[ModelHandle] = []
    handle._on_wanted = requested.append
    own = later(threads, handle, 1)
    waiting(handle, 1)
    until(lambda: requested)
    assert handle.restore(Watched())
    assert own.result(60) == 2


def test_a_deadline_applies_even_if_the_device_hangs(handles: Make, threads: ThreadPoolExecutor) -> None:
    model = Watched(manual=True)
    handle = handles(model)
    asleep(handle)
    own = later(threads, handle, 1, deadline_ns=monotonic_ns() + NS_PER_S // 20)
    assert isinstance(own.exception(10), DeadlineExceeded)
    with pytest.raises(DeadlineExceeded):
        handle.infer_blocking(infer_request(1, deadline_ns=1))
    in_time = later(threads, handle, 2, deadline_ns=monotonic_ns() + 60 * NS_PER_S)
    model.let_go()
    assert in_time.result(60) == 4


@pytest.mark.parametrize("demote", [False, True])
@pytest.mark.parametrize("deadline", [0, 60 * NS_PER_S])
def test_overdue_requests_are_refused_or_served_last(
    handles: Make, threads: ThreadPoolExecutor, demote: bool, deadline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired = record_calls(monkeypatch, Scheduler, "expire")
    model = Watched(manual=True, depth=2)
    queue_policy = LevelPolicy(queue_timeout_ns=60 * NS_PER_S, demote_on_timeout=demote, timeout_override=True)
    handle = handles(model, BatchPolicy(1), queue_policy=queue_policy)
    asleep(handle)
    ahead = [later(threads, handle, 1)]
    model.wait_for("finishing 0")
    ahead.append(later(threads, handle, 2))
    model.wait_for("launch 1")
    deadline_ns = deadline and monotonic_ns() + deadline
    late = later(threads, handle, 3, deadline_ns=deadline_ns, queue_timeout_ns=20_000_000)
    if not demote:
        assert isinstance(late.exception(10), QueueTimeout)
    else:
        until(lambda: expired)
        assert not late.done()
    model.let_go()
    assert [each.result(60) for each in ahead] == [2, 4]
    assert not demote or late.result(60) == 6


@pytest.mark.parametrize("blocking", [True, False])
def test_a_single_caller_uses_one_of_several_instances(handles: Make, blocking: bool) -> None:
    models = [Watched(), Watched(), Watched()]
    handle = handles(Several(*models), instances=3)
    for value in range(12):
        asleep(handle, 3)
        if blocking:
            assert first(handle, infer_request(value)) == 2 * value
        else:
            handle.infer(infer_request(value))
            loop = handle._mailbox.loop
            while handle.recorder.totals().requests <= value or is_finishing(handle):
                loop.call_later(0.001, loop.stop)
                loop.run_forever()
    assert sorted(len(model.batches) for model in models) == [0, 0, 12]


def test_many_threads_get_their_own_results(handles: Make, threads: ThreadPoolExecutor) -> None:
    models = [Watched(), Watched()]
    handle = handles(Several(*models), BatchPolicy(4), instances=2)

    def calls(seed: int) -> int:
        chance, right = random.Random(seed), 0
        for step in range(150):
            value, rows = float(1000 * seed + step), chance.randint(1, 6)
            poison = chance.random() < 0.1
            try:
                outputs = handle.infer_blocking(infer_request(RAISES["finish"] if poison else value, rows)).outputs
                right += not poison and bool(np.array_equal(outputs["y"], np.full((rows, 2), 2 * value)))
            except HeadraceError as error:
                right += poison and isinstance(error, ModelFailed)
        return right

    assert [each.result(60) for each in [threads.submit(calls, seed) for seed in range(6)]] == [150] * 6
    assert handle.depth == 0
