"""The thread that queues the only request launches it in place of a sleeping instance with no batch in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import pytest
from headrace.core.errors import Cancelled, ModelFailed, Unavailable
from headrace.core.request import InferRequest, InferResponse
from headrace.inference.scheduling.launch_pacing import LaunchPacing
from headrace.inference.scheduling.overlapped_runner import _SHORT_BYTES
from headrace.inference.scheduling.policy import BatchPolicy
from headrace.inference.scheduling.queue import Entry
from headrace.runtimes.base import ExecutionLost

from tests.support.fake_overlapped import DIES, LOST, RAISES, FakeOverlapped
from tests.support.fakes import InstanceKilledError
from tests.support.overlapped_bench import Bench, Caller
from tests.support.sleepers import inline_dispatches, sleepers
from tests.support.waiting import until


class Prompt(FakeOverlapped):
    """A prompt execution that remembers who launched."""

    def __init__(self, **more: bool) -> None:
        super().__init__(prompt=True, **more)
        self.launchers: list[bool] = []

    def launch(self, in_flight: object) -> None:
        self.launchers.append(threading.current_thread() is threading.main_thread())
        super().launch(in_flight)  # type: ignore[arg-type]


Make = Callable[..., Bench]


@pytest.fixture
def benches() -> Iterator[Make]:
    created: list[Bench] = []

    def make(model: FakeOverlapped, batch: BatchPolicy | None = None, pace: LaunchPacing | None = None) -> Bench:
        bench = Bench(model, batch, pace=pace)
        created.append(bench)
        asleep(bench)
        return bench

    yield make
    for bench in created:
        bench.close()


def asleep(bench: Bench) -> None:
    """Return once the instance's thread sleeps without a timeout."""

    def sleeps() -> bool:
        with bench.scheduler._lock:  # the thread enters two collections, one after the other
            return bool(inline_dispatches(bench.scheduler))

    until(sleeps)


def rows_of(caller: Caller) -> list[list[float]]:
    answer = caller.answer()
    assert isinstance(answer, InferResponse), answer
    return cast("list[list[float]]", answer.outputs["y"].tolist())


def one(bench: Bench, value: float) -> Caller:
    (caller,) = bench.submit(value)
    return caller


def test_sequential_callers_never_wake_the_thread(benches: Make) -> None:
    model = Prompt(manual=True)
    bench = benches(model)
    sleeper = sleepers(bench.scheduler)[0]
    for value in range(20):
        caller = one(bench, value)
        # Not before: a batch that has finished when `enqueue` returns the sleeper wakes the thread, which is right.
        model.land()
        assert rows_of(caller) == [[2 * value] * 2]
        until(lambda: not bench.instance._runner._finished.empty())  # type: ignore[union-attr]
        assert sleepers(bench.scheduler) == [sleeper]
        assert bench.instance._runner._open == 1, "the thread has not looked"  # type: ignore[union-attr]
    assert model.launchers == [True] * 20
    assert model.most_open == 1
    assert bench.recorder.totals().requests == 20


def test_a_request_during_a_batch_in_flight_is_run_by_the_thread(benches: Make) -> None:
    model = Prompt(manual=True)
    bench = benches(model, BatchPolicy(1))
    first, second, third = one(bench, 1), one(bench, 2), one(bench, 3)
    model.wait_for("finishing 0", "launch 1")
    assert model.launchers == [True, False]
    model.let_go()
    assert [rows_of(each) for each in (first, second, third)] == [[[2, 2]], [[4, 4]], [[6, 6]]]
    asleep(bench)
    assert rows_of(one(bench, 4)) == [[8, 8]]
    assert model.launchers == [True, False, False, True]


def test_the_thread_paces_launches_behind_a_dispatched_batch(benches: Make) -> None:
    model = Prompt(manual=True)
    pace = LaunchPacing(8)
    bench = benches(model, BatchPolicy(8), pace)
    pace.pull_ns = lambda _rows: 1 << 62  # type: ignore[method-assign]  # never, before a batch in flight has ended
    first = one(bench, 1)
    rest = [one(bench, value) for value in (2, 3)]
    model.wait_for("finishing 0")
    model.let_go()
    for value, caller in enumerate([first, *rest], 1):
        assert rows_of(caller) == [[2 * value] * 2]
    assert model.batches == [[1], [2, 3]], "they were pulled together once the first had landed"


@pytest.mark.parametrize(
    ("several", "rows", "size_bytes"), [(2, 1, 8), (1, 1, _SHORT_BYTES + 1)], ids=["two at once", "large"]
)
def test_slower_requests_run_on_the_thread(benches: Make, several: int, rows: int, size_bytes: int) -> None:
    model = Prompt()
    bench = benches(model)
    entries = []
    for _ in range(several):
        x = np.ones((rows, 2), np.float32)
        request = InferRequest(inputs={"x": x}, rows=rows, shape_key=None, received_ns=0, size_bytes=size_bytes)
        entries.append(Entry(request, Caller(), 0, 0))
    bench.scheduler.enqueue(entries)
    for entry in entries:
        assert rows_of(cast("Caller", entry.completion)) == [[2, 2]]
    assert model.launchers == [False]


def test_a_request_without_an_optional_input_runs_on_the_thread(benches: Make) -> None:
    model = Prompt()
    bench = benches(model)
    bench.instance._runner.inputs = 2  # type: ignore[union-attr]
    assert rows_of(one(bench, 1)) == [[2, 2]]
    assert model.log[0] == "run"


def test_requests_with_a_batching_delay_wait(benches: Make) -> None:
    model = Prompt()
    bench = benches(model, BatchPolicy(2, (), 3_600_000_000_000))
    callers = [one(bench, 1)]
    until(lambda: bench.scheduler._timed_sleepers)
    callers.append(one(bench, 2))
    assert [rows_of(each) for each in callers] == [[[2, 2]], [[4, 4]]]
    assert model.launchers == [False]


@pytest.mark.parametrize("call", RAISES)
def test_an_error_is_the_request_s_alone(benches: Make, call: str) -> None:
    model = Prompt()
    bench = benches(model)
    assert isinstance(one(bench, RAISES[call]).answer(), ModelFailed)
    asleep(bench)
    assert rows_of(one(bench, 3)) == [[6, 6]]
    assert bench.recorder.totals().executions == 2


@pytest.mark.parametrize("how", [DIES, LOST], ids=["dies", "lost"])
@pytest.mark.parametrize("call", ["begin", "launch"])
def test_a_fatal_error_in_the_caller_ends_the_instance(benches: Make, how: dict[str, float], call: str) -> None:
    model = Prompt()
    bench = benches(model)
    assert isinstance(one(bench, how[call]).answer(), ModelFailed)
    assert isinstance(bench.exits[0], InstanceKilledError if how is DIES else ExecutionLost), (
        "the callback gets the cause at once"
    )
    with pytest.raises(Unavailable):
        bench.submit(1)
    assert bench.instance.join(60), "the thread wakes up and ends"


def test_a_request_cancelled_while_filling_is_not_launched(benches: Make) -> None:
    model = Prompt()
    bench = benches(model)
    x = np.ones((1, 2), np.float32)
    entry = Entry(InferRequest(inputs={"x": x}, rows=1, shape_key=None, received_ns=0), Caller(), 0, 0)
    model.during_fill = lambda: entry.completion.abandon() and None
    bench.scheduler.enqueue([entry])
    assert isinstance(entry.completion.outcome, Cancelled)
    assert model.log == ["begin 0", "discard 0"]
    model.during_fill = lambda: None
    assert rows_of(one(bench, 3)) == [[6, 6]]


@pytest.mark.parametrize("end", ["close", "pause", "interrupt"])
def test_a_wake_up_during_a_dispatch_is_not_lost(benches: Make, end: str) -> None:
    """The sleeping thread is in no list during the dispatch."""
    model = Prompt()
    bench = benches(model)

    def meanwhile() -> None:
        model.during_fill = lambda: None
        if end == "interrupt":  # as the finisher does when members are to be run again
            bench.instance._runner._inline_error = RuntimeError("woken to die")  # type: ignore[union-attr]
            bench.scheduler.interrupt(bench.instance._runner._sleeper)  # type: ignore[union-attr]
        else:
            getattr(bench.scheduler, end)()

    model.during_fill = meanwhile
    caller = one(bench, 1)
    assert bench.instance.join(60), "it did not wake up"
    assert caller.notified.wait(60)
