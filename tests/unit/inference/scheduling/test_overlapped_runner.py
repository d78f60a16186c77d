"""An overlapped instance on real threads, with flights that land when the test says so; nothing here sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import pytest
from headrace.core.errors import Cancelled, HeadraceError, ModelFailed
from headrace.core.request import InferResponse
from headrace.inference.scheduling.policy import BatchPolicy

from tests.support.fake_overlapped import DIES, LOST, RAISES, FakeOverlapped
from tests.support.overlapped_bench import Bench, Caller


@pytest.fixture
def benches() -> Iterator[Callable[..., Bench]]:
    created: list[Bench] = []

    def make(model: FakeOverlapped, batch: BatchPolicy | None = None, last: bool = True) -> Bench:
        created.append(Bench(model, batch, last))
        return created[-1]

    yield make
    for bench in created:
        bench.close()


Make = Callable[..., Bench]


def rows_of(caller: Caller) -> list[list[float]]:
    answer = caller.answer()
    assert isinstance(answer, InferResponse), answer
    return cast("list[list[float]]", answer.outputs["y"].tolist())


def doubled(value: float, rows: int = 1) -> list[list[float]]:
    return [[2 * value] * 2] * rows


# Overlap, order, depth


def test_the_next_batch_is_launched_while_the_one_before_is_in_the_air(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, BatchPolicy(1))
    first, second = bench.submit(1, 2)
    model.wait_for("finishing 0", "launch 1")
    assert "finish 0" not in model.log
    assert not first.is_settled
    model.land(2)
    assert (rows_of(first), rows_of(second)) == (doubled(1), doubled(2))


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_batches_respect_the_depth_and_finish_in_order(benches: Make, depth: int) -> None:
    model = FakeOverlapped(depth=depth, manual=True)
    bench = benches(model, BatchPolicy(1))
    callers = bench.submit(*range(12))
    for number in range(12):
        model.wait_for(f"launch {min(number + depth, 12) - 1}")
        assert number == 11 or not callers[number].is_settled
        model.land()
        assert rows_of(callers[number]) == doubled(number)
    assert model.most_open == depth
    for event in ("begin", "launch", "finish"):
        assert [line for line in model.log if line.startswith(event + " ")] == [f"{event} {n}" for n in range(12)]
    for number in range(depth, 12):
        assert model.log.index(f"begin {number}") > model.log.index(f"finish {number - depth}")


def test_the_next_batch_grows_while_batches_are_in_flight(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model)
    callers = bench.submit(0)
    model.wait_for("launch 0")
    callers += bench.submit(1)
    model.wait_for("launch 1")
    for value in range(2, 8):
        callers += bench.submit(value)
    assert bench.scheduler.depth == 6, "back-pressure: what cannot be launched waits in the queue"
    model.land(3)
    assert [rows_of(caller) for caller in callers] == [doubled(value) for value in range(8)]
    assert model.batches == [[0], [1], [2, 3, 4, 5, 6, 7]]


def test_pulls_report_whether_batches_are_in_flight(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model)
    bench.log_pulls()
    (first,) = bench.submit(1)
    model.wait_for("pull busy")
    model.land()
    first.answer()
    bench.submit(2)
    bench.close()
    assert "pull" in model.log, "the last time, with nothing open"


def test_rows_are_read_in_place_and_returned_to_their_callers(benches: Make) -> None:
    bench = benches(FakeOverlapped())
    body = np.zeros(1 + 3 * 2 * 4, np.uint8)
    unaligned = body[1:].view(np.float32).reshape(3, 2)
    unaligned[:] = [[1, 2], [3, 4], [5, 6]]
    assert not unaligned.flags.aligned
    strided = np.arange(8, dtype=np.float32).reshape(2, 4)[:, ::2]
    callers = bench.queue([unaligned, np.full((1, 2), 7, np.float32), strided])
    assert rows_of(callers[0]) == [[2, 4], [6, 8], [10, 12]]
    assert rows_of(callers[1]) == [[14, 14]]
    assert rows_of(callers[2]) == [[0, 4], [8, 12]]


def test_a_batch_that_does_not_fit_its_buffers_fails_without_a_leak(benches: Make) -> None:
    model = FakeOverlapped()
    bench = benches(model)
    odd, good = bench.queue([np.zeros((1, 2), np.float64), np.ones((1, 2), np.float32)])
    assert rows_of(odd) == doubled(0)
    assert rows_of(good) == doubled(1)
    assert model.log[:2] == ["begin 0", "discard 0"]


# Failures


@pytest.mark.parametrize("call", ["begin", "launch", "finish"])
def test_one_bad_request_in_a_batch_fails_alone(benches: Make, call: str) -> None:
    model = FakeOverlapped()
    bench = benches(model)
    bad, good, fine = bench.submit(RAISES[call], 1, 2)
    assert (rows_of(good), rows_of(fine)) == (doubled(1), doubled(2))
    error = bad.answer()
    assert isinstance(error, ModelFailed)
    assert "secret" not in str(error)
    assert rows_of(bench.submit(3)[0]) == doubled(3), "the instance serves on"
    totals = bench.recorder.totals()
    assert (totals.requests, totals.executions) == (3, 5)


def test_members_of_a_failed_batch_rerun_before_the_queue_and_after_batches_in_flight(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, BatchPolicy(3))
    spoilt = bench.submit(1, RAISES["finish"], 3)
    model.wait_for("launch 0")
    later = bench.submit(4, 5, 6)
    model.wait_for("launch 1")
    waiting = bench.submit(7)
    model.land()
    model.wait_for("launch 2")
    assert not later[0].is_settled
    model.land(5)
    assert [rows_of(each) for each in (*spoilt[::2], *later, *waiting)] == [doubled(n) for n in (1, 3, 4, 5, 6, 7)]
    assert isinstance(spoilt[1].answer(), ModelFailed)
    assert model.batches == [[1, RAISES["finish"], 3], [4, 5, 6], [1], [RAISES["finish"]], [3], [7]]


def test_a_member_cancelled_before_its_retry_is_not_run_again(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, BatchPolicy(3))
    spoilt = bench.submit(1, RAISES["finish"], 3)
    model.wait_for("launch 0")
    bench.submit(4, 5, 6)
    model.wait_for("launch 1")
    model.land()
    model.wait_for("launch 2")
    assert spoilt[2].abandon()
    model.land(3)
    assert isinstance(spoilt[1].answer(), ModelFailed)
    last = bench.submit(7)
    model.land()
    assert rows_of(last[0]) == doubled(7)
    assert [3.0] not in model.batches
    assert "discard" not in " ".join(model.log)


# Callers who leave


def test_a_batch_of_cancelled_requests_is_not_launched(benches: Make) -> None:
    model = FakeOverlapped()
    callers: list[Caller] = []
    ready = threading.Event()

    def leave() -> None:
        assert ready.wait(60)
        for caller in callers:
            caller.abandon()

    model.during_fill = leave
    bench = benches(model)
    callers += bench.submit(1, 2)
    ready.set()
    model.wait_for("discard 0")
    callers.clear()
    assert rows_of(bench.submit(3)[0]) == doubled(3)
    assert model.batches == [[3]]


@pytest.mark.parametrize("position", range(3))
def test_a_request_cancelled_in_flight_does_not_affect_the_others(benches: Make, position: int) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model)
    callers = bench.submit(0, 1, 2)
    model.wait_for("finishing 0")
    assert callers[position].abandon()
    model.land()
    for value, caller in enumerate(callers):
        if value != position:
            assert rows_of(caller) == doubled(value)
    bench.close()
    totals = bench.recorder.totals()
    assert (totals.requests, totals.rows, list(totals.sizes)) == (2, 2, [3])


def test_a_request_whose_cancellation_is_still_being_written_does_not_count_as_answered(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model)
    cancelled, other = bench.submit(0, 1)
    model.wait_for("finishing 0")
    assert cancelled._once.acquire(False)  # as another thread within `claim`, before it sets the outcome
    model.land()
    assert rows_of(other) == doubled(1)
    cancelled.outcome = Cancelled("the client disconnected")
    bench.close()
    totals = bench.recorder.totals()
    assert (totals.requests, totals.rows, list(totals.sizes)) == (1, 1, [2])


# Death


@pytest.mark.parametrize("how", [DIES, LOST])
@pytest.mark.parametrize("call", ["begin", "launch"])
def test_the_death_of_the_thread_fails_batches_in_flight_at_once(
    benches: Make, how: dict[str, float], call: str
) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, BatchPolicy(1))
    in_the_air = bench.submit(1)
    model.wait_for("finishing 0")
    deadly = bench.submit(how[call])
    for caller in (*in_the_air, *deadly):
        assert isinstance(caller.answer(), ModelFailed)
    assert len(bench.exits) == 1, (
        "the callback runs before any request is settled and before the batch in flight has finished"
    )
    assert "close" not in model.log, "the batch still uses its memory"
    model.let_go()
    assert bench.instance.join(60)
    assert len(bench.exits) == 1
    assert model.log[-2:] == ["finish 0", "close"]


@pytest.mark.parametrize("how", [DIES, LOST])
def test_the_finisher_s_death_ends_the_instance(benches: Make, how: dict[str, float]) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, BatchPolicy(1))
    deadly = bench.submit(how["finish"])
    model.wait_for("finishing 0")
    in_the_air = bench.submit(1)
    model.wait_for("launch 1")
    model.land()
    for caller in (*deadly, *in_the_air):
        assert isinstance(caller.answer(), ModelFailed)
    assert bench.instance.join(60)
    assert len(bench.exits) == 1
    assert "finishing 1" not in model.log


def test_a_sleeping_thread_ends_with_its_finisher_and_others_serve_the_queue(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, last=False)
    (deadly,) = bench.submit(DIES["finish"])
    model.wait_for("finishing 0")
    model.land()
    assert isinstance(deadly.answer(), ModelFailed)
    assert bench.instance.join(60)
    (waits,) = bench.submit(1)
    assert bench.scheduler.depth == 1
    assert not waits.is_settled


def test_the_finisher_s_death_is_reported_while_the_other_thread_hangs(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, BatchPolicy(1))
    deadly = bench.submit(DIES["finish"])
    model.wait_for("finishing 0")
    model.hanging = "launch"
    hangs = bench.submit(1)
    model.wait_for("launch hangs")
    model.land()
    for caller in (*deadly, *hangs):
        assert isinstance(caller.answer(), ModelFailed)
    assert len(bench.exits) == 1


def test_giving_up_answers_everything_that_was_pulled(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, BatchPolicy(3))
    spoilt = bench.submit(1, RAISES["finish"], 3)
    model.wait_for("launch 0")
    later = bench.submit(4, 5, 6)
    model.wait_for("launch 1")
    model.land()
    model.wait_for("launch 2")  # in the air: 4, 5, 6 and 1; to be run again: the two others
    bench.instance.give_up(ModelFailed("given up"))
    for caller in (*spoilt, *later):
        answer = caller.answer()
        assert isinstance(answer, HeadraceError)
        assert "given up" in str(answer)


def test_close_waits_for_batches_in_flight_and_retries(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, BatchPolicy(2))
    spoilt = bench.submit(1, RAISES["finish"])
    model.wait_for("launch 0")
    bench.scheduler.close()
    assert not bench.instance.join(0)
    model.land(3)
    assert rows_of(spoilt[0]) == doubled(1)
    assert isinstance(spoilt[1].answer(), ModelFailed)
    assert bench.instance.join(60)
    assert bench.exits == [None]
    assert model.log[-1] == "close"


# Figures


def test_stage_times_are_those_of_the_batch(benches: Make) -> None:
    bench = benches(FakeOverlapped())
    (caller,) = bench.submit(1, rows=3)
    answer = caller.answer()
    assert isinstance(answer, InferResponse)
    times = answer.times
    assert times is not None
    assert times.taken_ns < times.assembled_ns < times.computed_ns < times.split_ns
    bench.close()
    totals = bench.recorder.totals()
    assert (totals.requests, totals.rows, totals.executions) == (1, 3, 1)
    assert totals.sizes[3].compute_ns == times.computed_ns - times.assembled_ns


def test_an_instance_is_busy_for_the_time_that_does_not_overlap(benches: Make) -> None:
    model = FakeOverlapped(manual=True)
    bench = benches(model, BatchPolicy(1))
    first, second = bench.submit(1, 2)
    model.wait_for("launch 1")
    model.land(2)
    answers = [first.answer(), second.answer()]
    bench.close()
    one, two = (each.times for each in answers if isinstance(each, InferResponse))
    assert one is not None
    assert two is not None
    assert bench.reports == [one.split_ns - one.taken_ns, two.split_ns - one.split_ns]


# Outputs that stay on the GPU


@pytest.mark.parametrize("device", [0, None])
def test_an_output_stays_on_the_gpu_if_every_request_of_the_batch_allows_it(benches: Make, device: int | None) -> None:
    model, all_of, some, none = FakeOverlapped(device=device), frozenset("yz"), frozenset("y"), frozenset[str]()
    bench = benches(model, BatchPolicy(3))
    for allowed in ([all_of, some, all_of], [all_of, all_of, none], [none, some, some]):
        for caller in bench.queue([np.full((1, 2), value, np.float32) for value in range(3)], allowed):
            rows_of(caller)
    assert model.resident_outputs == [some if device == 0 else none, none, none]


# Brief batches


def test_the_thread_that_launches_a_brief_batch_finishes_it(benches: Make) -> None:
    model = FakeOverlapped(prompt=True, brief_rows=8)
    bench = benches(model)
    for value in range(3):
        (caller,) = bench.submit(value, value)[:1]
        assert rows_of(caller) == doubled(value)
    assert {thread.name for thread in model.finishers} == {"bench"}
    assert model.most_open == 1
    assert not bench.scheduler._held_rows


@pytest.mark.parametrize("number", [RAISES["finish"], LOST["finish"]], ids=["fails", "is lost"])
def test_a_brief_batch_that_fails_holds_nothing_back(benches: Make, number: float) -> None:
    model = FakeOverlapped(prompt=True, brief_rows=8)
    bench = benches(model)
    for caller in bench.submit(number, 1):
        answer = caller.answer()
        assert isinstance(answer, HeadraceError) or rows_of(caller) == doubled(1)
    assert not bench.scheduler._held_rows
