"""Exactly once, from any thread, with one wake-up."""

from __future__ import annotations

import asyncio
import threading

import pytest
from headrace.core.completion import Completion, LoopCompletion, Mailbox, settle_all
from headrace.core.errors import Cancelled, ModelFailed
from headrace.core.request import InferResponse
from headrace.inference.scheduling.entries import Sequencer

from tests.support.completions import RecordedCompletion
from tests.support.waiting import on_threads, until_async


def test_the_first_wins_among_racing_threads() -> None:
    for _ in range(200):
        slot = RecordedCompletion()
        barrier = threading.Barrier(4)
        wins: list[bool] = []

        def race(
            _: int, slot: RecordedCompletion = slot, barrier: threading.Barrier = barrier, wins: list[bool] = wins
        ) -> None:
            barrier.wait()
            wins.append(slot.settle(InferResponse({})))

        on_threads(race, range(4))
        assert wins.count(True) == 1
        assert len(slot.outcomes) == 1


async def test_waiters_get_values_and_errors() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    good, bad, cancelled = (LoopCompletion(mailbox) for _ in range(3))
    answer = InferResponse({})
    threading.Thread(target=lambda: settle_all([(good, answer), (bad, ModelFailed("no")), (cancelled, answer)])).start()
    assert cancelled.abandon() or cancelled.is_settled
    assert await good is answer
    with pytest.raises(ModelFailed):
        await bad
    if isinstance(cancelled.outcome, Cancelled):
        with pytest.raises(Cancelled):
            await cancelled


def test_each_batch_wakes_the_loop_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop)
        wakes = 0
        wake = loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            nonlocal wakes
            wakes += 1
            return wake(*args)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
        for batch in (1, 2):
            waiting = [LoopCompletion(mailbox) for _ in range(64)]
            settle_all([(each, InferResponse({})) for each in waiting])
            assert wakes == batch
            await asyncio.gather(*[asyncio.ensure_future(_wait(each)) for each in waiting])
            assert wakes == batch

    asyncio.run(main())


def test_the_sequencer_keeps_no_outcome_of_a_request_that_has_left() -> None:
    sequencer, answer = Sequencer(lambda requests, time_ns: None), InferResponse({})
    slots = [RecordedCompletion() for _ in range(3)]
    sequencer.admit(slots, 1)
    assert slots[0].abandon()
    counted: list[list[Completion]] = []
    sequencer.deliver([(slots[2], answer)], counted.append)
    assert slots[2].outcome is None, "the second one is not settled yet"
    sequencer.deliver([(slots[1], answer)], counted.append)
    assert [slot.outcome for slot in slots[1:]] == [answer, answer]
    sequencer.deliver([(slots[0], answer)], counted.append)
    assert counted == [[], [], [slots[0]]]
    assert not sequencer._outcomes


@pytest.mark.parametrize("in_order", [False, True])
def test_answers_are_counted_before_a_waiter_is_notified(in_order: bool) -> None:
    sequencer = Sequencer(lambda requests, time_ns: None)
    waiting, left = RecordedCompletion(), RecordedCompletion()
    sequencer.admit([waiting, left], 1)
    left.abandon()
    notified_before = len(waiting.outcomes)
    seen: list[tuple[list[Completion], int]] = []
    deliver = sequencer.deliver if in_order else settle_all
    pairs = [(each, InferResponse({})) for each in (waiting, left)]
    deliver(pairs, lambda lost: seen.append((lost, len(waiting.outcomes))))
    assert seen == [([left], notified_before)]
    assert len(waiting.outcomes) == 1


@pytest.mark.parametrize("in_order", [False, True])
def test_an_error_while_answers_are_counted_loses_none(in_order: bool) -> None:
    sequencer, waiting = Sequencer(lambda requests, time_ns: None), RecordedCompletion()
    sequencer.admit([waiting], 1)
    with pytest.raises(ZeroDivisionError):
        (sequencer.deliver if in_order else settle_all)([(waiting, InferResponse({}))], lambda _: 1 / 0)
    assert len(waiting.outcomes) == 1


async def _wait(completion: LoopCompletion) -> InferResponse:
    return await completion


def test_settling_after_the_loop_is_closed_is_no_error() -> None:
    async def main() -> LoopCompletion:
        return LoopCompletion(Mailbox(asyncio.get_running_loop()))

    left = asyncio.run(main())
    assert left.settle(InferResponse({}))


async def test_a_settled_completion_stops_its_timers() -> None:
    fired: list[int] = []
    completion = LoopCompletion(Mailbox(asyncio.get_running_loop()))
    completion.call_after(5_000_000, fired.append, 1)
    completion.settle(InferResponse({}))
    await completion
    await asyncio.sleep(0.03)
    assert not fired


async def test_a_callback_replaces_the_waiter_and_runs_once() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    early, late, left = (LoopCompletion(mailbox) for _ in range(3))
    calls: list[str] = []
    answer = InferResponse({})
    early.settle(answer)
    early.then(lambda: calls.append("early"))
    late.then(lambda: calls.append("late"))
    left.then(lambda: calls.append("left"))
    assert calls == []  # never from within `then` or `settle`
    threading.Thread(target=lambda: settle_all([(late, answer), (early, answer)])).start()
    left.abandon()
    await until_async(lambda: len(calls) == 3)
    assert sorted(calls) == ["early", "late", "left"]
    assert (early.outcome, late.outcome) == (answer, answer)
    assert isinstance(left.outcome, Cancelled)
    mailbox.post([late])  # a second wake-up finds no completion
    await asyncio.sleep(0.01)
    assert len(calls) == 3


async def test_late_and_repeated_awaits_return_the_outcome() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    answered, refused = LoopCompletion(mailbox), LoopCompletion(mailbox)
    answer = InferResponse({})
    answered.settle(answer)
    refused.settle(ModelFailed("no"))
    await asyncio.sleep(0.01)  # the loop has drained its mailbox without a waiter
    assert await answered is answer
    assert await answered is answer
    for _ in range(2):
        with pytest.raises(ModelFailed):
            await refused


async def test_a_completion_ends_the_rest_of_the_loop() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    completion = LoopCompletion(mailbox)
    thread = threading.Thread(target=completion.settle, args=(InferResponse({}),))
    asyncio.get_running_loop().call_soon(thread.start)
    asyncio.get_running_loop().call_soon(mailbox.rest, 60.0)
    assert (await completion).outputs == {}, "not after a minute"
    thread.join()
    settled = LoopCompletion(mailbox)
    settled.settle(InferResponse({}))
    mailbox.rest(60.0)  # it is posted already
    await settled


async def test_a_rest_ends_by_itself() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    mailbox.rest(0.001)
    completion = LoopCompletion(mailbox)
    completion.settle(InferResponse({}))
    await completion


async def test_the_lag_follows_repeated_delays_and_forgets_single_ones() -> None:
    now_ns = [0]
    mailbox = Mailbox(asyncio.get_running_loop(), lambda: now_ns[0])
    mailbox.measures_lag = True

    def deliver(lag_ns: int) -> int:
        now_ns[0] += 1
        LoopCompletion(mailbox).settle(InferResponse({}))
        now_ns[0] += lag_ns
        mailbox.deliver()
        return mailbox.lag_ns

    assert deliver(100_000_000) == 50_000, "a stall of 100 ms"
    for _ in range(40):
        deliver(2_000_000)
    assert mailbox.lag_ns == 2_000_000
    assert 1_900_000 < deliver(0) < 2_000_000
