"""Totals of the last seconds: exactly the events within the window, at any time of the call."""

from __future__ import annotations

import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.request import BatchTimes
from headrace.observability.counters import BatchRecord, Recorder
from headrace.observability.totals import SECONDS
from hypothesis import given
from hypothesis import strategies as st


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def batch(
    recorder: Recorder, end_ns: int, rows: int = 4, waits_ms: tuple[int, ...] = (2, 4), shape: object = None
) -> None:
    """A batch that took 10 ms to compute, for requests of which each waited so long."""
    times = BatchTimes(end_ns - 12 * NS_PER_MS, end_ns - 11 * NS_PER_MS, end_ns - NS_PER_MS, end_ns)
    waited_ns = [wait_ms * NS_PER_MS for wait_ms in waits_ms]
    total_ns = [wait_ns + 12 * NS_PER_MS for wait_ns in waited_ns]
    recorder.record_batch(BatchRecord(rows, rows, "full", times, waited_ns, total_ns, 12 * NS_PER_MS, shape))


def test_old_samples_are_excluded() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    for second in range(100, 130):
        clock.now_ns = second * NS_PER_S + 500 * NS_PER_MS
        batch(recorder, clock.now_ns, rows=4 if second < 125 else 8)
        recorder.failure("overloaded", 5)
    clock.now_ns += 100 * NS_PER_MS
    recent = recorder.recent()
    assert recent.seconds == pytest.approx(9.6)  # the second that began 9.6 s ago is the first within 10
    recent_totals = recent.totals
    assert (recent_totals.executions, recent_totals.requests, recent_totals.rows) == (10, 20, 5 * 4 + 5 * 8)
    assert (recent_totals.queue_ns, recent_totals.request_ns) == (10 * 6 * NS_PER_MS, 10 * 30 * NS_PER_MS)
    assert (recent_totals.busy_ns, recent_totals.failure_ns) == (10 * 12 * NS_PER_MS, 50)
    assert {rows: size.count for rows, size in recent_totals.sizes.items()} == {4: 5, 8: 5}
    assert recent_totals.sizes[8].compute_ns == 5 * 10 * NS_PER_MS
    assert (recent_totals.reasons, recent_totals.failures) == ({"full": 10}, {"overloaded": 10})
    assert recent_totals.phases["total"].count == 20
    assert recent_totals.phases["total"].quantile_s(0.99) == pytest.approx(0.016, rel=0.1)
    assert recorder.totals().requests == 60


def test_after_a_pause_there_is_nothing() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    assert (recorder.recent().totals.requests, recorder.recent().seconds) == (0, SECONDS)
    clock.now_ns = 50 * NS_PER_S
    batch(recorder, clock.now_ns)
    clock.now_ns += (SECONDS + 2) * NS_PER_S
    assert (recorder.recent().totals.requests, recorder.recent().seconds) == (0, SECONDS)


def test_a_load_that_just_started_is_not_averaged_over_the_whole_window() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    for at_ms in range(60_000, 61_500, 100):
        clock.now_ns = at_ms * NS_PER_MS
        batch(recorder, clock.now_ns)
    recent = recorder.recent()
    assert recent.totals.executions / recent.seconds == pytest.approx(10, rel=0.1)


def test_changes_of_shape_are_counted() -> None:
    recorder = Recorder(clock=Clock())
    for shape in (None, None, (3,), (3,), (4,), (3,), None):
        batch(recorder, 5 * NS_PER_S, shape=shape)
    assert recorder.totals().shape_changes == 4


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 4), st.booleans()), max_size=60), st.integers(0, 20_000))
def test_the_window_contains_its_events(events: list[tuple[int, int, bool]], then_ms: int) -> None:
    """Events: how long after the one before (ms), rows, whether it is a failure."""
    clock = Clock()
    recorder = Recorder(histograms=False, clock=clock)
    happened: list[tuple[int, int]] = []  # ns, rows (0: a failure)
    for pause_ms, rows, fails in events:
        clock.now_ns += pause_ms * NS_PER_MS
        if fails:
            recorder.failure("deadline", 1)
        else:
            batch(recorder, clock.now_ns, rows, (1,))
        happened.append((clock.now_ns, 0 if fails else rows))
    clock.now_ns += then_ms * NS_PER_MS
    recent = recorder.recent()
    seconds = [at_ns // NS_PER_S for at_ns, _ in happened]
    first = next((second for second in seconds if second > clock.now_ns / NS_PER_S - SECONDS), None)
    inside = [
        rows for (_, rows), second in zip(happened, seconds, strict=True) if first is not None and second >= first
    ]
    assert recent.totals.rows == sum(inside)
    assert recent.totals.failures.total() == inside.count(0)
    assert recent.totals.reasons.total() == len(inside) - inside.count(0)
    assert 0 < recent.seconds <= SECONDS
