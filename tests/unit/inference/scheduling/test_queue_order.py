"""Order of serving: due times, levels that age, clients that share."""

from __future__ import annotations

from collections import Counter

import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.inference.scheduling.fair_shares import FairShares
from headrace.inference.scheduling.policy import Sharing
from headrace.inference.scheduling.queue import FAR_NS, HORIZON_NS, Entry, Queue, QueueOrder
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.completions import RecordedCompletion, request
from tests.support.examples import examples

AGING_NS = 100 * NS_PER_MS


def entry(enqueued_ns: int = 0, due_ns: int = FAR_NS, level: int = 0, client: str = "", rows: int = 1) -> Entry:
    new = Entry(request(rows, client=client), RecordedCompletion(), level, enqueued_ns)
    new.due_ns = due_ns
    return new


def served(queue: Queue, count: int = 1 << 30) -> list[Entry]:
    lane = next(iter(queue.shape_queues))
    return queue.take(lane, min(count, lane.count))


def test_earliest_deadlines_first_and_no_deadline_after_the_horizon() -> None:
    queue = Queue()
    never, late, soon = entry(), entry(1, due_ns=50), entry(2, due_ns=40)
    after_the_horizon = entry(HORIZON_NS - 10, due_ns=HORIZON_NS + 5)
    for each in (never, late, soon, after_the_horizon):
        queue.push(each)
    assert served(queue) == [soon, late, never, after_the_horizon]


def test_a_far_due_does_not_undo_a_priority() -> None:
    queue = Queue(2, QueueOrder(AGING_NS))
    low, high = entry(0, due_ns=NS_PER_MS, level=1), entry(1, due_ns=3600 * NS_PER_S, level=0)
    queue.push(low)
    queue.push(high)
    assert served(queue) == [high, low]


def test_levels_that_do_not_age_are_strict() -> None:
    queue = Queue(3)
    low, high = entry(0, level=2), entry(10**18, level=0)
    queue.push(low)
    queue.push(high)
    assert served(queue) == [high, low]


@given(st.integers(0, 3), st.integers(1, 5), st.integers(0, 3 * AGING_NS))
def test_entries_that_waited_longer_overtake_a_higher_level(level: int, below: int, late_ns: int) -> None:
    queue = Queue(10, QueueOrder(AGING_NS))
    old, young = entry(0, level=level + below), entry(late_ns, level=level)
    queue.push(old)
    queue.push(young)
    first = old if late_ns >= below * AGING_NS else young
    assert served(queue)[0] is first


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_no_request_starves_behind_a_flood_of_higher_priority(level: int, sizes: list[int]) -> None:
    queue, clock = Queue(4, QueueOrder(AGING_NS)), 0
    patient = entry(level=level)
    queue.push(patient)
    while patient.queued:
        for _ in range(5):  # five come, four are served: there is always something more urgent
            queue.push(entry(clock, due_ns=clock + NS_PER_MS, level=sizes[clock % len(sizes)] % level))
        served(queue, 4)
        clock += NS_PER_MS
        # Nothing that comes after its key is served before it, and what came until then takes 5/4 of the time.
        assert clock <= (level + 1) * AGING_NS * 5 // 4 + 2 * NS_PER_MS


@pytest.mark.parametrize("small", [1, 2, 4])
def test_rows_ahead_include_future_requests_of_busy_clients(small: int) -> None:
    queue = Queue(1, QueueOrder(0, Sharing(), credit_rows=8))
    for number in range(1000):
        queue.push(entry(number, client="flood"))
    for number in range(100):  # of each batch so many rows are the other client's
        for _ in range(small):
            queue.push(entry(number, client="small"))
        served(queue, 8)
    waiting, (rows, overtakers, _) = queue.total_rows, queue.locate(entry(1000, client="flood"))
    assert rows == waiting
    assert overtakers == pytest.approx(waiting * small / (8 - small), rel=0.1)
    rows, overtakers, _ = queue.locate(entry(1000, client="small"))
    assert rows + overtakers <= 8


def test_a_client_below_its_share_has_a_whole_burst_served_at_once() -> None:
    queue = Queue(1, QueueOrder(0, Sharing(), credit_rows=8))
    for number in range(1000):
        queue.push(entry(number, client="flood"))
    served(queue, 100)
    burst = [entry(2000, client="calm") for _ in range(8)]
    for each in burst:
        queue.push(each)
    assert set(burst) <= set(served(queue, 9))


def test_idle_clients_accumulate_no_credit() -> None:
    queue = Queue(1, QueueOrder(0, Sharing()))
    for number in range(200):
        queue.push(entry(number, client="busy"))
    served(queue, 100)
    for number in range(100):
        queue.push(entry(1000 + number, client="late"))
    got = Counter(each.client for each in served(queue, 100))
    assert abs(got["busy"] - got["late"]) <= 2, "but for the credit of a batch, which is none here"


@pytest.mark.parametrize("first", ["flood", "calm"])
def test_the_first_client_of_an_empty_queue_has_no_advantage(first: str) -> None:
    queue = Queue(1, QueueOrder(0, Sharing(), credit_rows=8))
    for _ in range(10):  # each batch is all that waits
        for number in range(16):
            queue.push(entry(number, client="calm" if number % 8 == 0 else "flood"))
        assert len(served(queue)) == queue.total_rows + 16
    calm = [entry(client="calm") for _ in range(4)]
    flood = [entry(client="flood") for _ in range(12)]
    for each in [*flood, *calm] if first == "flood" else [calm[0], *flood, *calm[1:]]:
        queue.push(each)
    assert served(queue) == [*calm, *flood]


def test_several_clients_are_detected() -> None:
    order = QueueOrder(0, Sharing())
    queue = Queue(1, order)
    queue.push(entry(client=""))
    queue.push(entry(client=""))
    assert not order.crowded
    queue.push(entry(client="a"))
    assert order.crowded
    served(queue, 2)
    assert order.crowded, "it was so since something waits"
    served(queue)
    assert not order.crowded


def test_removed_requests_do_not_count_against_their_client() -> None:
    queue = Queue(1, QueueOrder(0, Sharing()))
    mine = [entry(number, client="mine") for number in range(50)]
    for each in mine:
        queue.push(each)
    queue.push(entry(60, client="other"))
    for each in mine[1:]:
        queue.discard(each)
    again = entry(70, client="mine")
    queue.push(again)
    assert served(queue)[-1] is again
    assert again.key <= 2 * NS_PER_MS


def test_cleared_requests_do_not_count_against_their_client() -> None:
    queue = Queue(1, QueueOrder(0, Sharing()))
    for number in range(100):
        queue.push(entry(number, client="mine"))
    queue.clear()
    for client in ("mine", "other"):
        queue.push(entry(200, client=client))
    assert max(each.key for each in served(queue)) <= 2 * NS_PER_MS


def test_names_without_end_are_not_remembered() -> None:
    shares = FairShares(Sharing())
    for number in range(100_000):
        shares.queued(f"name {number}", 1)
        shares.advance(shares.start("idle"), 1)
    assert len(shares._ends) < 20_000
