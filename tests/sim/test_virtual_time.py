"""The scheduler in virtual time: the real queue and decision, instances that take as long as we say, no threads.

Every run checks, after every event, that no idle instance leaves work undone, and at the end that every request was served
exactly once, in order, unless its caller had left.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from headrace.core.errors import Overloaded, QueueTimeout
from headrace.inference.scheduling.batching import Idle, WaitUntil
from headrace.inference.scheduling.policy import BatchPolicy, QueueLimits
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.scheduler import Scheduler
from headrace.inference.scheduling.selector import Batch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.completions import RecordedCompletion, request
from tests.support.examples import examples


@dataclass
class Arrival:
    at_ns: int
    rows: int
    shape: int
    level: int
    leaves_after_ns: int | None


@dataclass
class World:
    policy: BatchPolicy
    instances: int
    levels: int
    limit: int
    service_ns: int
    now_ns: int = 0
    batches: list[Batch] = field(default_factory=list)
    refused: int = 0

    def __post_init__(self) -> None:
        limits = QueueLimits(max_count=self.limit)
        self.scheduler = Scheduler(self.policy, limits, self.levels, clock=lambda: self.now_ns)
        self.entries: list[Entry] = []
        self.events: list[tuple[int, int, str, object]] = []
        self.order = itertools.count()
        self.idle = self.instances

    def at(self, time_ns: int, kind: str, what: object = None) -> None:
        heapq.heappush(self.events, (time_ns, next(self.order), kind, what))

    def run(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.at(arrival.at_ns, "arrive", arrival)
        while self.events:
            self.now_ns, _, kind, what = heapq.heappop(self.events)
            if isinstance(what, Arrival):
                self.arrive(what)
            elif isinstance(what, Entry):
                what.completion.abandon()
            elif kind == "free":
                self.idle += 1
            self.pull()

    def arrive(self, arrival: Arrival) -> None:
        new = Entry(request(arrival.rows, arrival.shape), RecordedCompletion(), arrival.level, self.now_ns)
        new.remove = self.scheduler.discard
        new.completion.after = new.on_settled
        try:
            self.scheduler.enqueue([new])
        except Overloaded as error:
            assert self.scheduler.depth == self.limit
            assert error.retry_after_s >= 1
            self.refused += 1
            return
        self.entries.append(new)
        if arrival.leaves_after_ns is not None:
            self.at(self.now_ns + arrival.leaves_after_ns, "leave", new)

    def pull(self) -> None:
        while self.idle:
            answer = self.scheduler.poll(self.now_ns)
            waiting = [each for each in self.entries if each.queued]
            if isinstance(answer, Batch):
                self.idle -= 1
                self.batches.append(answer)
                self.at(self.now_ns + self.service_ns, "free")
            elif isinstance(answer, WaitUntil):
                assert waiting
                assert (
                    self.now_ns < answer.time_ns <= min(each.enqueued_ns for each in waiting) + self.policy.max_delay_ns
                )
                self.at(answer.time_ns, "alarm")
                return
            else:
                assert isinstance(answer, Idle)
                assert not waiting, "an idle instance and work to do"
                return


arrivals = st.lists(
    st.builds(
        Arrival,
        at_ns=st.integers(0, 300),
        rows=st.integers(1, 5),
        shape=st.integers(0, 2),
        level=st.integers(0, 1),
        leaves_after_ns=st.none() | st.integers(0, 100),
    ),
    max_size=60,
)
worlds = st.builds(
    World,
    policy=st.builds(
        BatchPolicy,
        max_rows=st.integers(5, 12),
        preferred_rows=st.sampled_from([(), (4,), (2, 5)]),
        max_delay_ns=st.sampled_from([0, 10, 50]),
        merge=st.booleans(),
    ),
    instances=st.integers(1, 3),
    levels=st.just(2),
    limit=st.sampled_from([3, 1000]),
    service_ns=st.integers(1, 80),
)


@settings(max_examples=examples(300), deadline=None)
@given(worlds, arrivals)
def test_every_request_is_served_once_in_order(world: World, coming: list[Arrival]) -> None:
    world.run(coming)
    served = [each for batch in world.batches for each in batch.entries]
    assert len(served) == len(set(map(id, served))), "no request is served twice"
    assert world.scheduler.depth == 0
    for each in world.entries:
        assert (each in served) or each.completion.is_settled, "no request is lost"
    for batch in world.batches:
        assert len({each.shape_key for each in batch.entries}) == 1
        assert sum(each.rows for each in batch.entries) <= world.policy.max_rows
        if not world.policy.merge:
            assert len(batch.entries) == 1
    for shape, level in itertools.product(range(3), range(2)):
        mine = [each for each in served if (each.shape_key, each.level) == (shape, level)]
        accepted = [each for each in world.entries if each in mine]
        assert mine == accepted, "order kept within a priority"


@settings(max_examples=examples(100), deadline=None)
@given(arrivals, st.integers(1, 40))
def test_queue_timeouts_reject_only_waiting_requests(coming: list[Arrival], timeout_ns: int) -> None:
    world = World(BatchPolicy(5), instances=1, levels=2, limit=1000, service_ns=60)
    expire = world.scheduler.expire

    class Expiring(World):
        def arrive(self, arrival: Arrival) -> None:
            count = len(self.entries)
            super().arrive(arrival)
            if len(self.entries) > count:
                self.at(self.now_ns + timeout_ns, "expire", lambda new=self.entries[-1]: expire(new, False))

    world.__class__ = Expiring
    world.at(0, "start")
    for arrival in coming:
        world.at(arrival.at_ns, "arrive", arrival)
    while world.events:
        world.now_ns, _, kind, what = heapq.heappop(world.events)
        if isinstance(what, Arrival):
            world.arrive(what)
        elif kind == "expire":
            what()  # type: ignore[operator]
        elif isinstance(what, Entry):
            what.completion.abandon()
        elif kind == "free":
            world.idle += 1
        world.pull()
    served = {id(each) for batch in world.batches for each in batch.entries}
    taken_at = {id(each): batch.taken_ns for batch in world.batches for each in batch.entries}
    for each in world.entries:
        if id(each) in served:
            assert taken_at[id(each)] <= each.enqueued_ns + timeout_ns
        elif isinstance(each.completion.outcome, QueueTimeout):
            assert isinstance(each.completion, RecordedCompletion)
            assert len(each.completion.outcomes) == 1
