"""Medians, ranges, ratios and rates of rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.bench.results import Comparison, Spread, at_least, at_most, completion_rate, differences, ratios
from loadtest.bench.session import interleave


def test_spread_is_median_and_range() -> None:
    assert Spread.of([5.0, 1.0, 3.0]) == Spread(median=3.0, low=1.0, high=5.0, rounds=3)
    assert Spread.of([1.0, 2.0]).median == 1.5


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        Spread.of([])


def test_ratios_are_computed_round_by_round() -> None:
    # The machine was half as fast in the second round: both slowed, the ratio did not.
    assert ratios([50.0, 25.0, 60.0], [100.0, 50.0, 100.0]) == Spread(0.5, 0.5, 0.6, 3)


def test_differences_are_computed_round_by_round() -> None:
    assert differences([130.0, 90.0, 150.0], [60.0, 60.0, 70.0]) == Spread(70.0, 30.0, 80.0, 3)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


@given(
    batch=st.integers(1, 32),
    period_s=st.floats(0.01, 2.0),
    batches=st.integers(3, 40),
)
def test_clumps_have_their_exact_rate(batch: int, period_s: float, batches: int) -> None:
    times = [number * period_s for number in range(batches) for _ in range(batch)]
    assert completion_rate(times) == pytest.approx(batch / period_s, rel=1e-6)


def test_rate_needs_time_to_pass() -> None:
    with pytest.raises(ValueError, match="two different times"):
        completion_rate([3.0, 3.0])
    with pytest.raises(ValueError, match="two different times"):
        completion_rate([3.0])


def test_interleaved_rounds_turn_the_order_round() -> None:
    order: list[str] = []

    def measure(name: str) -> int:
        order.append(name)
        return len(order)

    results = interleave({"a": lambda: measure("a"), "b": lambda: measure("b"), "c": lambda: measure("c")}, rounds=3)
    assert order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert results == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_the_median_is_judged_and_the_bound_itself_is_met() -> None:
    spread = Spread(median=0.5, low=0.4, high=0.6, rounds=3)
    assert Comparison("x", "", spread, at_least(0.5)).verdict == "PASS"
    assert Comparison("x", "", spread, at_least(0.51)).verdict == "MISS"
    assert Comparison("x", "", spread, at_most(0.5)).verdict == "PASS"
    assert Comparison("x", "", spread, at_most(0.49)).verdict == "MISS"
    assert Comparison("x", "", spread).verdict == "-"
