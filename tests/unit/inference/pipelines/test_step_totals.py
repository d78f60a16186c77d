"""Counts and times of the steps of a pipeline."""

from __future__ import annotations

import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.request import BatchTimes, PipelineStepTimes
from headrace.inference.pipelines.step_totals import StepTotals, slowest_step


def step(name: str, ms: float, outcome: str = "ok", times: BatchTimes | None = None) -> PipelineStepTimes:
    return PipelineStepTimes(name, "m", "1", 1_000, 1_000 + int(ms * NS_PER_MS), times, 1, outcome)


def test_requests_are_counted_by_their_outcome() -> None:
    totals = StepTotals()
    for outcome in ("ok", "ok", "cached", "fallback", "skipped", "deadline", "error"):
        totals.record([step("a", 1, outcome)], 0)
    counted = totals.totals()["a"]
    assert (counted.requests, counted.fallbacks, counted.skipped, counted.failures) == (4, 1, 1, 2)
    assert counted.latency.count == 4


@pytest.mark.parametrize("count", [1, 255, 256, 600])
def test_every_duration_is_in_the_histogram_once(count: int) -> None:
    totals = StepTotals()
    for _ in range(count):
        totals.record([step("a", 1), step("b", 8)], 0)
    first, second = totals.totals(), totals.totals()
    assert first["a"].latency.count == second["a"].latency.count == count
    assert first["b"].latency.sum_ns == count * 8 * NS_PER_MS
    assert first["b"].latency.quantile_s(0.5) == pytest.approx(8e-3, rel=0.1)
    assert first["a"] is not second["a"]


def test_the_step_with_the_longest_mean_time_of_the_last_seconds_is_the_slowest() -> None:
    totals = StepTotals()
    assert slowest_step(totals.recent(0)) == ""
    totals.record([step("a", 5), step("b", 1)], 100 * NS_PER_S)
    assert slowest_step(totals.recent(100 * NS_PER_S)) == "a"
    for _ in range(9):
        totals.record([step("a", 0.1), step("b", 1)], 100 * NS_PER_S)
    assert totals.recent(100 * NS_PER_S)["b"].count == 10
    totals.record([step("b", 1, "error")], 100 * NS_PER_S)
    assert totals.recent(100 * NS_PER_S)["b"].count == 10, "an error says nothing of the time of the step"
    assert slowest_step(totals.recent(100 * NS_PER_S)) == "b"
    assert slowest_step(totals.recent(111 * NS_PER_S)) == "", "they are too old"
    assert totals.totals()["b"].requests == 10


def test_a_step_without_a_batch_counts_with_its_time() -> None:
    totals = StepTotals()
    totals.record([step("inner", 4), step("model", 2, times=BatchTimes(0, 1, 2, 3))], 0)
    assert slowest_step(totals.recent(0)) == "inner"


def test_a_failed_request_wastes_its_share_of_the_batches_of_its_steps() -> None:
    totals = StepTotals()
    batch = BatchTimes(0, 1_000, 9_000, 9_500)
    done = PipelineStepTimes("a", "m", "1", 0, 10_000, batch, 8, "ok", 2)
    skipped = PipelineStepTimes("b", "m", "1", 0, 10_000, None, 0, "skipped")
    failed = PipelineStepTimes("c", "m", "1", 0, 10_000, None, 0, "would_miss")
    assert totals.record([done, skipped], 0) == 0
    assert totals.record([done, skipped, failed], 0, is_failed=True) == 2_000
    assert {name: total.wasted_ns for name, total in totals.totals().items()} == {"a": 2_000, "b": 0, "c": 0}
    assert totals.totals()["a"].requests == 2
