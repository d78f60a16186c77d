"""Lanes: order, dead entries, exact counts."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from server.dataplane.queue import Entry, Queue
from tests.slots import entry


def test_shapes_wait_apart_and_levels_in_order() -> None:
    queue = Queue(levels=2)
    late, first, other = entry(level=1), entry(level=0, enqueued_ns=5), entry(shape_key="b")
    lane = queue.push(late)
    queue.push(first)
    queue.push(other)
    assert queue.count == 3
    assert lane.count == 2
    assert lane.oldest_ns == 0
    assert lane.front is first
    assert queue.take(lane, 2) == [first, late]
    assert queue.count == 1


def test_an_entry_that_leaves_gives_its_tensors_back_at_once() -> None:
    queue = Queue()
    head, leaver = entry(), entry(rows=3)
    lane = queue.push(head)
    queue.push(leaver)
    assert queue.discard(leaver)
    assert not leaver.inputs
    assert (lane.count, lane.total_rows, list(lane.row_counts())) == (1, 1, [1])
    assert not queue.discard(leaver), "only once"
    assert queue.take(lane, 1) == [head]


def test_leavers_behind_a_stalled_head_do_not_pile_up() -> None:
    queue = Queue()
    lane = queue.push(entry())
    for _ in range(10_000):
        leaver = entry()
        queue.push(leaver)
        queue.discard(leaver)
    assert queue.count == 1
    assert len(lane._entries) < 200


def test_lanes_of_rare_shapes_are_forgotten() -> None:
    queue = Queue()
    for key in range(1000):
        queue.take(queue.push(entry(shape_key=key)), 1)
    assert len(queue.lanes) == 1


def test_demoted_entries_come_last() -> None:
    queue = Queue(levels=2)
    slow, quick = entry(), entry()
    lane = queue.push(slow)
    queue.push(quick)
    assert queue.put_last(slow)
    assert queue.take(lane, 2) == [quick, slow]
    assert not queue.put_last(slow)


@given(st.lists(st.tuples(st.sampled_from(["push", "take", "discard", "demote"]), st.integers(0, 5)), max_size=80))
def test_counts_stay_exact(steps: list[tuple[str, int]]) -> None:
    queue = Queue(levels=3)
    model: list[Entry] = []  # what should be waiting
    clock = itertools.count()
    for step, number in steps:
        if step == "push":
            new = entry(rows=number + 1, shape_key=number % 2, level=number % 2, enqueued_ns=next(clock))
            queue.push(new)
            model.append(new)
        elif step == "take":
            lanes = [lane for lane in queue.lanes if lane.count]
            if lanes:
                lane = lanes[number % len(lanes)]
                for taken in queue.take(lane, min(number + 1, lane.count)):
                    model.remove(taken)
        elif model:
            chosen = model[number % len(model)]
            if step == "discard":
                assert queue.discard(chosen)
                model.remove(chosen)
            else:
                assert queue.put_last(chosen)
        assert queue.count == len(model)
        assert queue.total_rows == sum(waiting.rows for waiting in model)
        for lane in queue.lanes:
            if lane.count:
                assert list(lane.row_counts())
                assert lane.oldest_ns <= max(waiting.enqueued_ns for waiting in model)
    left = queue.clear()
    assert sorted(map(id, left)) == sorted(map(id, model))
