"""Groups: requests that are queued as one entry, run together or in parts, and are answered and counted each by itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.completion import GroupCompletion, Mailbox
from headrace.core.errors import ModelFailed, Overloaded, QueueTimeout
from headrace.core.request import GroupMembers, InferRequest, InferResponse
from headrace.inference.scheduling.batching import CloseReason
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.output_check import OutputMismatch
from headrace.inference.scheduling.policy import BatchPolicy, LevelPolicy, QueueLimits, RateLimits, Sharing
from headrace.inference.scheduling.queue import Entry

from tests.support.fakes import POISON, FakeModel, handle, infer_request, wait_started
from tests.support.virtual_time import advance_timers

Answer = list[list[float]] | Exception


def group_of(values: Sequence[tuple[float, int]], received_ns: int = 1) -> InferRequest:
    """A group with a member for each pair of value and rows."""
    rows = [count for _, count in values]
    x = np.concatenate([np.full((count, 2), value, np.float32) for value, count in values])
    members = GroupMembers([received_ns] * len(rows), rows)
    return InferRequest(
        inputs={"x": x}, rows=sum(rows), shape_key=None, received_ns=received_ns, members=members, size_bytes=x.nbytes
    )


class Answers:
    """Answers of the members of one group, by place; waits for all."""

    def __init__(self, served: ModelHandle, values: Sequence[tuple[float, int]], received_ns: int = 1) -> None:
        self.values = values
        self.of: dict[int, Answer] = {}
        self.parts: list[tuple[int, int]] = []
        self._all = asyncio.Event()
        self.completions = served.infer_group(group_of(values, received_ns), self._settled)

    def _settled(self, completion: GroupCompletion) -> None:
        rows, first, outcome = completion.members.rows, completion.first, completion.outcome
        self.parts.append((first, len(rows)))
        stops = list(accumulate(rows))
        for index, (stop, count) in enumerate(zip(stops, rows, strict=True)):
            assert first + index not in self.of, "a member is answered once"
            if isinstance(outcome, InferResponse):
                self.of[first + index] = outcome.outputs["y"][stop - count : stop].tolist()
            else:
                assert outcome is not None
                self.of[first + index] = outcome
        if len(self.of) == len(self.values):
            self._all.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self._all.wait(), 10)

    def check(self) -> None:
        for index, (value, rows) in enumerate(self.values):
            assert self.of[index] == [[2 * value] * 2] * rows


async def test_every_member_gets_its_rows_from_one_batch(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    answers = Answers(served, [(1, 1), (2, 3), (3, 2)])
    await answers.wait()
    answers.check()
    assert model.batches == [[1, 2, 2, 2, 3, 3]]
    served.close(60)
    totals = served.recorder.totals()
    assert (totals.requests, totals.rows, totals.executions) == (3, 6, 1)


async def test_a_group_fills_the_room_that_a_batch_has_left(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    first = served.infer(infer_request(100))
    await wait_started(model)
    groups = [Answers(served, [(10 * each + place, 1) for place in range(5)]) for each in range(1, 5)]
    assert served.depth == 20
    model.gate.set()
    await first
    for each in groups:
        await each.wait()
        each.check()
    assert [len(batch) for batch in model.batches] == [1, 8, 8, 4]
    assert served.depth == 0
    served.close(60)
    totals = served.recorder.totals()
    assert (totals.requests, totals.rows, totals.executions) == (21, 21, 4)
    assert totals.reasons[CloseReason.FULL.value] == 2


async def test_members_are_split_between_requests_only(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    first = served.infer(infer_request(100))
    await wait_started(model)
    groups = [Answers(served, [(1, 3), (2, 3)]), Answers(served, [(3, 1), (4, 3), (5, 1)])]
    model.gate.set()
    await first
    for each in groups:
        await each.wait()
        each.check()
    assert model.batches[1:] == [[1, 1, 1, 2, 2, 2, 3], [4, 4, 4, 5]]
    assert groups[1].parts == [(0, 1), (1, 2)]


async def test_a_poisoned_member_fails_alone(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    answers = Answers(served, [(1, 2), (POISON, 1), (3, 1)])
    await answers.wait()
    assert answers.of[0] == [[2, 2], [2, 2]]
    assert isinstance(answers.of[1], ModelFailed)
    assert answers.of[2] == [[6, 6]]
    served.close(60)
    assert served.recorder.totals().requests == 2


async def test_a_full_queue_takes_the_members_that_fit_and_refuses_the_others(
    mailbox: Mailbox, model: FakeModel
) -> None:
    served = handle(mailbox, model, limits=QueueLimits(max_count=5))
    model.gate.clear()
    first = served.infer(infer_request(100))
    await wait_started(model)
    answers = Answers(served, [(value, 1) for value in range(1, 9)])
    assert served.depth == 5
    model.gate.set()
    await first
    await answers.wait()
    refused = [place for place, answer in answers.of.items() if isinstance(answer, Overloaded)]
    assert len(refused) == 3
    for place in set(range(8)) - set(refused):
        assert answers.of[place] == [[2 * (place + 1)] * 2]


async def test_cancelled_groups_leave_the_queue(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    first = served.infer(infer_request(100))
    await wait_started(model)
    kept, dropped = Answers(served, [(1, 1), (2, 1)]), Answers(served, [(3, 1), (4, 1)])
    for completion in dropped.completions:
        assert completion.abandon()
    assert served.depth == 2
    model.gate.set()
    await first
    await kept.wait()
    kept.check()
    assert model.batches[1:] == [[1, 2]]


async def test_a_queue_timeout_refuses_the_members_that_still_wait(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model, queue_policy=LevelPolicy(queue_timeout_ns=30 * NS_PER_S))
    model.gate.clear()
    first = served.infer(infer_request(100))
    await wait_started(model)
    answers = Answers(served, [(1, 1), (2, 1)])
    advance_timers(30)
    await answers.wait()
    assert all(isinstance(answer, QueueTimeout) for answer in answers.of.values())
    model.gate.set()
    await first
    assert model.batches == [[100]]


async def test_a_group_runs_one_by_one_once_the_model_has_returned_other_rows(
    mailbox: Mailbox, model: FakeModel
) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    first = served.infer(infer_request(100))
    await wait_started(model)
    answers = Answers(served, [(1, 1), (2, 2), (3, 1)])
    served.stop_batching(OutputMismatch("mixed"))
    assert served.max_group_rows == 1
    model.gate.set()
    await first
    await answers.wait()
    answers.check()
    assert model.batches[1:] == [[1], [2, 2], [3]]


@pytest.mark.parametrize(
    "policy",
    [
        {"levels": 2, "default_level": 1},
        {"preserve_ordering": True},
        {"sharing": Sharing({}, 1.0)},
        {"rate_limits": RateLimits(None, {})},
        {"batch": BatchPolicy(8, preferred_rows=(4,))},
        {"batch": BatchPolicy(8, merge=False)},
    ],
)
async def test_policies_of_single_requests_allow_no_groups(
    policy: dict[str, object], mailbox: Mailbox, model: FakeModel
) -> None:
    served = handle(mailbox, model, **policy)  # type: ignore[arg-type]
    assert served.max_group_rows == 1


async def test_a_group_counts_as_in_time_by_its_earliest_due_time(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model, batch=BatchPolicy(8, objective_ns=10_000_000_000))
    model.gate.clear()
    first = served.infer(infer_request(100, received_ns=served._clock()))
    await wait_started(model)
    answers = Answers(served, [(1, 1), (2, 1)], served._clock())
    model.gate.set()
    await first
    await answers.wait()
    answers.check()
    assert served.load().late == 0


@pytest.mark.parametrize("seed", range(20))
async def test_random_groups_and_requests_are_answered_as_alone(seed: int, mailbox: Mailbox, model: FakeModel) -> None:
    draw = random.Random(seed)

    served = handle(mailbox, model, instances=draw.choice([1, 2, 3]))
    groups, singles, requests = [], [], 0
    for _ in range(40):
        if draw.random() < 0.7:
            rows = [draw.choice([1, 1, 1, 2, 3]) for _ in range(draw.randint(1, 8))]
            while sum(rows) > served.max_group_rows:
                rows.pop()
            values = [(draw.choice([draw.randint(1, 1000)] * 12 + [POISON]), count) for count in rows]
            groups.append(Answers(served, values))
            requests += len(values)
        else:
            value = draw.randint(1, 1000)
            singles.append((value, served.infer(infer_request(value))))
            requests += 1
        if draw.random() < 0.3:
            await asyncio.sleep(0)
    poisoned = 0
    for answers in groups:
        await answers.wait()
        for place, (value, rows) in enumerate(answers.values):
            if value == POISON:
                assert isinstance(answers.of[place], ModelFailed)
                poisoned += 1
            else:
                assert answers.of[place] == [[2 * value] * 2] * rows
    for value, completion in singles:
        assert (await completion).outputs["y"].tolist() == [[2 * value] * 2]
    served.close(60)
    assert served.recorder.totals().requests == requests - poisoned
    assert served.depth == 0


def test_the_parts_of_an_entry_have_its_rows_and_memory() -> None:
    class _Loop:
        def call_soon_threadsafe(self, *_args: object) -> None: ...

    request = group_of([(1, 2), (2, 1), (3, 4)])
    assert request.members is not None
    completion = GroupCompletion(Mailbox(_Loop()), request.members, lambda _each: None)  # type: ignore[arg-type]
    entry = Entry(request, completion, 0, 5)
    front = entry.split(2)
    assert (front.rows, entry.rows, front.requests, entry.requests) == (3, 4, 2, 1)
    assert front.size_bytes + entry.size_bytes == request.size_bytes
    assert front.inputs["x"][:, 0].tolist() == [1, 1, 2]
    assert entry.inputs["x"][:, 0].tolist() == [3] * 4
    assert isinstance(front.completion, GroupCompletion)
    assert (front.completion.first, completion.first) == (0, 2)
    assert front.completion.members.rows == [2, 1]
    assert (entry.fitting(3), entry.fitting(4), front.fitting(2)) == (0, 1, 1)
