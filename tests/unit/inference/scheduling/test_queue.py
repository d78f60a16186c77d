"""Lanes: order, dead entries, exact counts."""

from __future__ import annotations

import itertools

from headrace.inference.scheduling.queue import FAR_NS, Entry, Queue, QueueOrder
from hypothesis import given
from hypothesis import strategies as st

from tests.support.completions import entry


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


def test_a_removed_entry_releases_its_tensors_at_once() -> None:
    queue = Queue()
    head, leaver = entry(), entry(rows=3)
    lane = queue.push(head)
    queue.push(leaver)
    assert queue.discard(leaver)
    assert not leaver.inputs
    assert (lane.count, lane.total_rows, list(lane.row_counts())) == (1, 1, [1])
    assert not queue.discard(leaver), "only once"
    assert queue.take(lane, 1) == [head]


def test_cancelled_entries_behind_a_stalled_front_do_not_accumulate() -> None:
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
    assert len(queue.shape_queues) == 1


def test_demoted_entries_are_last() -> None:
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
            lanes = [lane for lane in queue.shape_queues if lane.count]
            if lanes:
                lane = lanes[number % len(lanes)]
                for used in queue.take(lane, min(number + 1, lane.count)):
                    model.remove(used)
        elif model:
            chosen = model[number % len(model)]
            if step == "discard":
                assert queue.discard(chosen)
                model.remove(chosen)
            else:
                assert queue.put_last(chosen)
        assert queue.count == len(model)
        assert queue.total_rows == sum(waiting.rows for waiting in model)
        for lane in queue.shape_queues:
            if lane.count:
                assert list(lane.row_counts())
                assert lane.oldest_ns <= max(waiting.enqueued_ns for waiting in model)
    left = queue.clear()
    assert sorted(map(id, left)) == sorted(map(id, model))


ACTIONS = st.sampled_from(["push", "push", "push", "take", "skip", "discard", "put_last"])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 30)), max_size=120))
def test_a_lane_is_served_in_the_order_of_its_keys_and_loses_nothing(steps: list[tuple[str, int]]) -> None:
    queue = Queue(levels=3, order=QueueOrder(aging_ns=10))
    line: list[Entry] = []  # in the order of serving
    last: list[Entry] = []
    for now_ns, (step, number) in enumerate(steps):
        lane = next(iter(queue.shape_queues), None)
        if step == "push":
            new = entry(rows=number % 4 + 1, level=number % 3, enqueued_ns=now_ns)
            new.due_ns = now_ns + number if number % 2 else FAR_NS
            queue.push(new)
            line.append(new)
            line.sort(key=lambda each: each.key)  # a stable sort: equal keys in the order of arrival
        elif step in ("take", "skip") and lane is not None and lane.count:
            count = min(number % 5 + 1, lane.count)
            if step == "take":
                expected, line, last = (line + last)[:count], line[count:], last[max(count - len(line), 0) :]
                assert queue.take(lane, count) == expected
            elif line:
                places = list(range(number % 2, len(line), number % 3 + 1))[:count]
                expected = [line[index] for index in places]
                if places:
                    assert queue.skip(lane, places) == expected
                    line = [each for each in line if each not in expected]
        elif step == "discard" and line + last:
            chosen = (line + last)[number % len(line + last)]
            assert queue.discard(chosen)
            (line if chosen in line else last).remove(chosen)
        elif step == "put_last" and line:
            chosen = line.pop(number % len(line))
            assert queue.put_last(chosen)
            last.append(chosen)
        if lane is not None:
            dues = [each.due_ns for each in line] + [FAR_NS] * len(last)
            assert list(lane.members()) == list(zip([each.rows for each in line + last], dues, strict=True))
            assert list(lane.row_counts()) == [each.rows for each in line + last]
            for count in (1, 3, len(line)):
                assert lane.due_from_ns(count) <= min([each.due_ns for each in line[:count]], default=FAR_NS)
            assert (lane.count, lane.total_rows) == (len(line + last), sum(each.rows for each in line + last))
            assert lane.last_rows == sum(each.rows for each in last)
            assert lane.due_count == sum(each.due_ns != FAR_NS for each in line)
        if lane is not None and lane.count:
            assert lane.oldest_ns == min(each.enqueued_ns for each in line + last)
            assert lane.front is (line + last)[0]
            assert lane.last_entry is (line + last)[-1]
        for level in range(3):
            mine = [each for each in line + last if each.level == level]
            assert queue.level(level) == (len(mine), sum(each.rows for each in mine))
