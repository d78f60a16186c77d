"""Each case of docs/sequences.md, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import BadRequest, Cancelled, Overloaded, Unavailable
from headrace.core.limits import GIVE_WAY_NS
from headrace.core.request import InferRequest, InferResponse
from headrace.inference.scheduling.batching import CloseReason, WaitUntil
from headrace.inference.scheduling.policy import QueueLimits, SequencePolicy
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.sequences.live_sequence import EndReason, RefusalReason, SequenceEntry
from headrace.inference.scheduling.sequences.sequence_table import SequenceTable

OLDEST = SequencePolicy(slots=2, is_direct=False, max_rows=4, idle_ns=100)


class Table:
    """A table with instances; each request is named by a letter."""

    def __init__(self, policy: SequencePolicy = OLDEST, instances: int = 1, max_count: int = 100) -> None:
        self.table = SequenceTable(policy, QueueLimits(max_count=max_count))
        for index in range(instances):
            self.table.open_instance(index)

    def send(
        self,
        correlation_id: int,
        start: bool = False,
        end: bool = False,
        now_ns: int = 0,
        columns: int = 1,
        client: str = "",
    ) -> SequenceEntry:
        inputs = {"x": np.zeros((1, columns))}
        request = InferRequest(inputs=inputs, rows=1, shape_key=columns, received_ns=now_ns, client=client)
        entry = SequenceEntry(request, ThreadCompletion(), now_ns, correlation_id, start, end)
        entry.remove = self.discard
        entry.completion.after = entry.on_settled
        self.table.add(entry, now_ns)
        return entry

    def discard(self, entry: object) -> None:
        assert isinstance(entry, SequenceEntry)
        self.table.discard(entry)

    def run(self, index: int = 0, now_ns: int = 0) -> list[SequenceEntry]:
        """Run a batch; returns its requests."""
        batch = self.table.take(index, now_ns)
        if not isinstance(batch, Batch):
            return []
        for entry in batch.entries:
            entry.completion.settle(InferResponse({}))
        self.table.finish_batch(index, now_ns)
        return [entry for entry in batch.entries if isinstance(entry, SequenceEntry)]

    def refused(self) -> dict[SequenceEntry, str]:
        """Requests that will not run, with their errors."""
        result = {entry: str(error) for entry, error in self.table.refused}
        self.table.refused = []
        return result


def test_requests_of_a_sequence_run_one_by_one_in_order() -> None:
    table = Table()
    first, second, third = table.send(1, start=True), table.send(1), table.send(1, end=True)
    assert [table.run(), table.run(), table.run(), table.run()] == [[first], [second], [third], []]
    assert (table.table.live, table.table.ended, table.table.count) == (0, 1, 0)


def test_a_batch_has_one_request_of_each_sequence() -> None:
    table = Table()
    entries = [table.send(1, start=True), table.send(1), table.send(2, start=True), table.send(2)]
    assert [table.run(), table.run()] == [[entries[0], entries[2]], [entries[1], entries[3]]]
    assert [entry.slot for entry in entries] == [0, 0, 1, 1]


def test_without_start_or_after_end_a_request_is_refused() -> None:
    table = Table()
    with pytest.raises(BadRequest, match=r"must specify the START flag.*sequence 1 is not live"):
        table.send(1)
    table.send(1, start=True, end=True)
    with pytest.raises(BadRequest, match="START"):
        table.send(1)
    assert len(table.run()) == 1
    with pytest.raises(BadRequest, match="it was not started, or has ended"):
        table.send(1)


def test_start_on_a_live_sequence_follows_its_queued_requests() -> None:
    table = Table(SequencePolicy(slots=1, is_direct=False, max_rows=4, idle_ns=100))
    entries = [table.send(1, start=True), table.send(1), table.send(1, start=True), table.send(1)]
    waiting = table.send(2, start=True)
    assert table.table.backlog == 1
    assert [table.run() for _ in range(4)] == [[entry] for entry in entries]
    assert entries[1].sequence is not entries[2].sequence
    assert table.run() == []  # the new sequence has taken over the slot, and is live
    table.send(1, end=True)
    assert len(table.run()) == 1
    assert table.run() == [waiting]


def test_start_after_end_joins_the_backlog() -> None:
    table = Table(SequencePolicy(slots=1, is_direct=False, max_rows=4, idle_ns=100))
    first, other = table.send(1, start=True, end=True), table.send(2, start=True, end=True)
    again = table.send(1, start=True)
    assert [table.run(), table.run(), table.run()] == [[first], [other], [again]]


def test_the_backlog_is_served_in_the_order_of_arrival() -> None:
    table = Table()
    entries = [table.send(each, start=True, end=True) for each in range(1, 8)]
    assert (table.table.live, table.table.backlog, table.table.slots) == (7, 5, 2)
    assert [table.run() for _ in range(4)] == [entries[0:2], entries[2:4], entries[4:6], entries[6:]]


def test_an_idle_sequence_ends_and_frees_its_slot() -> None:
    table = Table(SequencePolicy(slots=1, is_direct=False, max_rows=4, idle_ns=100))
    table.send(1, start=True)
    waiting = table.send(2, start=True)
    assert len(table.run(now_ns=50)) == 1
    assert table.table.next_expiry_ns == 150
    table.table.expire(149)
    assert table.run(now_ns=149) == []
    table.table.expire(150)
    assert table.run(now_ns=150) == [waiting]
    assert table.table.ends[EndReason.IDLE] == 1
    with pytest.raises(BadRequest, match="had no request for 0 us"):
        table.send(1, now_ns=150)


def test_a_queued_or_running_request_is_not_idle() -> None:
    table = Table()
    table.send(1, start=True)
    table.table.expire(10_000)
    assert isinstance(table.table.take(0, 10_000), Batch)
    table.table.expire(20_000)
    table.send(1, now_ns=20_000)
    table.table.finish_batch(0, 20_000)
    assert len(table.run(now_ns=30_000)) == 1


@pytest.mark.parametrize("in_backlog", [True, False])
def test_a_cancelled_queued_request_ends_its_sequence(in_backlog: bool) -> None:
    table = Table(SequencePolicy(slots=1, is_direct=False, max_rows=4, idle_ns=100))
    if in_backlog:
        table.send(9, start=True)
    first, second, third = table.send(1, start=True), table.send(1), table.send(1)
    if not in_backlog:
        assert table.run() == [first]
    second.completion.settle(Cancelled("cancelled"))
    refused = table.refused()
    assert set(refused) == ({first, third} if in_backlog else {third})
    assert all("a queued request of it was cancelled or timed out; start it again" in text for text in refused.values())
    with pytest.raises(BadRequest, match="cancelled or timed out"):
        table.send(1)
    again = table.send(1, start=True)
    if not in_backlog:
        assert table.run() == [again]


def test_a_running_request_that_is_cancelled_leaves_its_sequence_alive() -> None:
    table = Table()
    first = table.send(1, start=True)
    assert isinstance(table.table.take(0, 0), Batch)
    first.completion.settle(Cancelled("cancelled"))
    table.table.finish_batch(0, 0)
    assert table.run() == []
    second = table.send(1)
    assert table.run() == [second]


def test_a_cancelled_request_behind_a_running_one_keeps_the_slot_until_that_ends() -> None:
    table = Table(SequencePolicy(slots=1, is_direct=False, max_rows=4, idle_ns=100))
    table.send(1, start=True)
    second = table.send(1)
    waiting = table.send(2, start=True)
    assert isinstance(table.table.take(0, 0), Batch)
    second.completion.settle(Cancelled("cancelled"))
    assert table.table.backlog == 1
    with pytest.raises(BadRequest):
        table.send(1)
    table.table.finish_batch(0, 0)
    assert table.run() == [waiting]


def test_a_lost_instance_ends_its_sequences_only() -> None:
    table = Table(instances=2)
    table.send(1, start=True)
    table.send(2, start=True)
    running, kept = table.table.take(0, 0), table.table.take(1, 0)
    assert isinstance(running, Batch)
    assert isinstance(kept, Batch)
    queued = table.send(1)
    table.table.close_instance(0, "it died")
    assert "it died; start it again with sequence_start" in table.refused()[queued]
    with pytest.raises(BadRequest, match=r"START flag.*it died"):
        table.send(1)
    table.table.finish_batch(0, 0)  # of the instance that is gone
    table.table.finish_batch(1, 0)
    alive = table.send(2)
    assert table.run(1) == [alive]
    again = table.send(1, start=True)
    assert table.run(1) == [again]


def test_without_an_instance_sequences_wait() -> None:
    table = Table(instances=1)
    table.table.close_instance(0, "it died")
    entry = table.send(1, start=True)
    table.table.open_instance(0)
    assert table.run() == [entry]


@pytest.mark.parametrize("index", [0, 1])
def test_a_sequence_without_a_state_outlives_the_loss_of_its_instance(index: int) -> None:
    table = Table()
    first, second = table.send(1, start=True), table.send(1)
    table.table.close_instance(0, "it died")
    table.table.open_instance(index)
    assert [table.run(index), table.run(index)] == [[first], [second]]
    table.table.lose_state(index, "it died")
    assert table.refused() == {}
    assert table.table.backlog == table.table.used_slots == 0


def test_lost_state_leaves_the_instance_open() -> None:
    table = Table()
    table.send(1, start=True)
    assert len(table.run()) == 1
    table.table.lose_state(0, "it died")
    with pytest.raises(BadRequest, match="it died"):
        table.send(1)
    again = table.send(1, start=True)
    assert table.run() == [again]


def test_a_full_queue_leaves_the_sequence_as_it_was() -> None:
    table = Table(max_count=2)
    first, second = table.send(1, start=True), table.send(1)
    with pytest.raises(Overloaded, match="the queue is full: 2 requests"):
        table.send(1)
    with pytest.raises(Overloaded):
        table.send(2, start=True)
    assert table.table.live == 1
    assert [table.run(), table.run()] == [[first], [second]]
    third = table.send(1)
    assert table.run() == [third]


def test_draining_ends_sequences_without_requests() -> None:
    table = Table()
    table.send(1, start=True)
    table.send(2, start=True)
    queued = [table.send(2)]
    table.run()
    table.table.drain()
    assert table.table.live == 1
    with pytest.raises(Unavailable, match="starts no sequences"):
        table.send(3, start=True)
    with pytest.raises(BadRequest, match="the model was unloaded"):
        table.send(1)
    assert table.run() == queued
    assert table.table.live == 0


def test_clear_returns_the_queued_requests_of_all_sequences() -> None:
    table = Table()
    running, queued = table.send(1, start=True), [table.send(1), table.send(1, start=True), table.send(3, start=True)]
    batch = table.table.take(0, 0)
    assert isinstance(batch, Batch)
    assert running in batch.entries
    assert set(table.table.clear("all died")) == set(queued) - set(batch.entries)
    assert table.table.count == 0
    table.table.finish_batch(0, 0)
    assert table.table.live == 0


def test_requests_of_different_shapes_do_not_share_a_batch() -> None:
    table = Table()
    entries = [table.send(1, start=True, columns=1), table.send(2, start=True, columns=2)]
    assert [table.run(), table.run()] == [[entries[0]], [entries[1]]]


def test_sequences_go_to_the_instance_with_the_fewest() -> None:
    table = Table(instances=2)
    for each in range(1, 5):
        table.send(each, start=True)
    assert [[entry.correlation_id for entry in table.run(index)] for index in (0, 1)] == [[1, 3], [2, 4]]


def test_oldest_takes_the_oldest_requests() -> None:
    table = Table(SequencePolicy(slots=4, is_direct=False, max_rows=2, idle_ns=1000))
    entries = [table.send(each, start=True) for each in (1, 2, 3)]
    assert table.run() == entries[:2]
    late = table.send(1)
    assert table.run() == [entries[2], late]


@pytest.mark.parametrize(
    ("ready", "now_ns", "expected"),
    [
        (1, 0, WaitUntil(20)),
        (1, 20, CloseReason.DELAY),
        (2, 0, CloseReason.PREFERRED),
        (3, 0, CloseReason.PREFERRED),
        (4, 0, CloseReason.FULL),
    ],
)
def test_preferred_sizes_and_delay(ready: int, now_ns: int, expected: object) -> None:
    policy = SequencePolicy(slots=8, is_direct=False, max_rows=4, idle_ns=1000, max_delay_ns=20, preferred_rows=(2,))
    table = Table(policy)
    for each in range(ready):
        table.send(each + 1, start=True)
    answer = table.table.take(0, now_ns)
    if isinstance(expected, WaitUntil):
        assert answer == expected
        return
    assert isinstance(answer, Batch)
    assert (answer.reason, answer.rows) == (expected, {1: 1, 2: 2, 3: 2, 4: 4}[ready])


@pytest.mark.parametrize(
    ("utilization", "ready", "expected"),
    [
        (0.0, 1, CloseReason.IDLE),
        (0.5, 1, None),
        (0.5, 2, CloseReason.IDLE),
        (1.0, 3, None),
        (1.0, 4, CloseReason.FULL),
    ],
)
def test_slot_utilization(utilization: float, ready: int, expected: CloseReason | None) -> None:
    policy = SequencePolicy(slots=4, max_rows=4, idle_ns=1000, max_delay_ns=20, min_utilization=utilization)
    table = Table(policy)
    for each in range(ready):
        table.send(each + 1, start=True)
    answer = table.table.take(0, 0)
    assert (answer.reason if isinstance(answer, Batch) else None) == expected
    if expected is None:
        assert isinstance(table.table.take(0, 0, closed=True), Batch)


def counted(counts: dict[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count}


def test_ends_are_counted_by_reason() -> None:
    table = Table(SequencePolicy(slots=8, is_direct=False, max_rows=8, idle_ns=100))
    for each in range(1, 7):
        table.send(each, start=True)
    table.run()
    table.send(1, end=True)
    table.send(2, start=True)
    queued, follower = table.send(3), table.send(3)
    queued.completion.settle(Cancelled("cancelled"))
    assert list(table.refused()) == [follower]
    table.run()
    table.table.expire(100)  # 2 (again), 4, 5 and 6
    table.send(7, start=True, now_ns=100)
    table.run(now_ns=100)
    table.table.lose_state(0, "it died")
    table.send(8, start=True, now_ns=100)
    table.run(now_ns=100)
    table.send(9, start=True, now_ns=100)
    table.table.drain()
    table.run(now_ns=100)
    assert counted(table.table.ends) == {
        EndReason.END: 1,
        EndReason.RESTART: 1,
        EndReason.CANCELLED: 1,
        EndReason.IDLE: 4,
        EndReason.DIED: 1,
        EndReason.UNLOADED: 2,
    }
    assert (table.table.live, table.table.used_slots) == (0, 0)


def test_refused_requests_are_counted_by_reason() -> None:
    table = Table(max_count=2)
    with pytest.raises(BadRequest):
        table.send(1)
    first, _ = table.send(1, start=True), table.send(1)
    with pytest.raises(Overloaded):
        table.send(2, start=True)
    first.completion.settle(Cancelled("cancelled"))
    table.table.drain()
    with pytest.raises(Unavailable):
        table.send(2, start=True)
    assert table.table.refusals == dict.fromkeys(RefusalReason, 1)


def test_a_free_slot_and_a_restart_need_no_wait() -> None:
    table = Table()
    assert table.table.slot_wait_ns(1, 0) == 0
    for each in (1, 2):
        table.send(each, start=True)
    assert table.table.slot_wait_ns(2, 0) == 0  # takes over its slot
    assert table.table.slot_wait_ns(3, 0) == 101  # no lifetime is known: the idle time
    assert SequenceTable(OLDEST, QueueLimits()).slot_wait_ns(3, 0) == 0  # without instances


def test_the_wait_for_a_slot_follows_lifetimes_idle_time_and_backlog() -> None:
    table = Table(SequencePolicy(slots=2, is_direct=False, max_rows=4, idle_ns=1000))
    for each, (begin_ns, end_ns) in {1: (0, 40), 2: (0, 120)}.items():
        table.send(each, start=True, now_ns=begin_ns)
        table.run(now_ns=begin_ns)
        table.send(each, end=True, now_ns=end_ns)
        table.run(now_ns=end_ns)
    assert table.table._lifetime_ns == 40 + (120 - 40) / 8
    table.send(3, start=True, now_ns=200)
    table.send(4, start=True, now_ns=220)
    assert table.table.slot_wait_ns(5, 220) == 30 + 1  # 3 ends at 250
    table.send(5, start=True, now_ns=220)
    assert table.table.slot_wait_ns(6, 220) == 50 + 1  # 4 ends at 270
    table.send(6, start=True, now_ns=220)
    assert table.table.slot_wait_ns(7, 220) == 30 + 50 + 1  # and 5 lives for 50
    assert table.table.slot_wait_ns(7, 225) == 25 + 50 + 1  # the ends are used again
    table.send(3, end=True, now_ns=230)
    table.run(now_ns=230)
    table.run(now_ns=230)
    assert table.table.slot_wait_ns(7, 230) < 30 + 50  # 5 has the slot of 3


def test_an_old_sequence_lives_for_the_mean_again_and_an_idle_one_until_its_idle_time() -> None:
    table = Table(SequencePolicy(slots=1, is_direct=False, max_rows=4, idle_ns=1000))
    table.send(1, start=True, end=True, now_ns=0)
    table.run(now_ns=0)
    table.send(2, start=True, now_ns=0)
    table.send(2, end=True, now_ns=400)
    table.run(now_ns=400)
    table.run(now_ns=400)
    mean_ns = int(table.table._lifetime_ns)
    table.send(3, start=True, now_ns=1000)
    assert table.table.slot_wait_ns(4, 1000) == mean_ns + 1
    assert table.table.slot_wait_ns(4, 20_000_000 + 1000) == mean_ns + 1
    table.run(now_ns=20_000_000 + 1000)
    assert table.table.slot_wait_ns(4, 40_000_000) == 0  # it was idle for too long
    table.send(5, start=True, end=True, now_ns=40_000_000)
    assert table.table.slot_wait_ns(6, 40_000_000) == 1  # END has arrived


LONG = SequencePolicy(slots=2, is_direct=False, max_rows=4, idle_ns=600 * NS_PER_S)


def test_a_client_with_fewer_slots_is_served_first() -> None:
    """Slots that become free go to the clients in turn, not in the order of arrival."""
    table = Table(LONG)
    for number in range(1, 9):
        table.send(number, start=True, end=True, client="many")
    other = [table.send(number, start=True, end=True, client="other") for number in (11, 12)]
    third = table.send(21, start=True, end=True, client="third")
    table.run()  # of the client with many, which came first
    assert other[0] in table.run()
    assert set(table.run()) == {third, other[1]}
    while table.run():
        pass
    assert table.table.live == table.table.backlog == 0
    assert not table.table._backlog.slots


def test_a_client_with_many_slots_gives_way() -> None:
    """After two seconds, and not to itself: first an idle sequence, else the one that started last, down to equal shares."""
    table = Table(LONG)
    for number in (1, 2):
        table.send(number, start=True, client="many", now_ns=number)
    table.send(3, start=True, client="many", now_ns=3)
    table.run(now_ns=4)
    table.send(1, client="many", now_ns=5)
    table.table.expire(100 * NS_PER_S)
    assert table.table.live == 3, "no other client waits"
    first = table.send(11, start=True, client="other", now_ns=100 * NS_PER_S)
    second = table.send(12, start=True, client="other", now_ns=100 * NS_PER_S)
    assert table.table.next_expiry_ns == 100 * NS_PER_S + GIVE_WAY_NS
    table.table.expire(100 * NS_PER_S + GIVE_WAY_NS - 1)
    assert table.table.ends[EndReason.SHARE] == 0
    table.table.expire(100 * NS_PER_S + GIVE_WAY_NS)
    assert table.table.ends[EndReason.SHARE] == 1
    assert first in table.run(now_ns=103 * NS_PER_S)
    table.table.expire(200 * NS_PER_S)
    assert table.table.ends[EndReason.SHARE] == 1, "both have one slot"
    assert second.queued
    with pytest.raises(BadRequest, match="its client uses more than its share of the slots"):
        table.send(2, client="many", now_ns=200 * NS_PER_S)
    table.send(1, client="many", now_ns=200 * NS_PER_S)


def test_a_running_request_does_not_give_way() -> None:
    table = Table(LONG)
    running = [table.send(number, start=True, client="many") for number in (1, 2)]
    assert isinstance(table.table.take(0, 1), Batch)
    other = table.send(11, start=True, client="other", now_ns=2)
    table.table.expire(10 * NS_PER_S)
    assert table.table.ends[EndReason.SHARE] == 0
    assert table.table.next_expiry_ns is None, "the instance looks again after its batch"
    for entry in running:
        entry.completion.settle(InferResponse({}))
    table.table.finish_batch(0, 11 * NS_PER_S)
    table.table.expire(11 * NS_PER_S)
    assert table.table.ends[EndReason.SHARE] == 1
    assert table.run(now_ns=11 * NS_PER_S) == [other]


def test_a_full_queue_has_room_for_another_client() -> None:
    table = Table(LONG, max_count=6)
    many = [table.send(number, start=True, client="many") for number in range(1, 7)]
    with pytest.raises(Overloaded):
        table.send(7, start=True, client="many")
    other = table.send(11, start=True, client="other")
    assert other.queued
    assert list(table.refused()) == [many[-1]]
