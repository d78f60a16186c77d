"""Windows of a version's figures, and the rules that read them."""

from __future__ import annotations

import pytest
from headrace.config.traffic_config import TrafficRules
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.models.traffic.figures import Sums, VersionFigures, broken_rule, missing_evidence
from hypothesis import given, settings
from hypothesis import strategies as st

RULES = TrafficRules(max_error_rate="1%", max_p99_ms=50.0, min_agreement="99%", min_requests=100, window_s=10.0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4000), max_size=60))
def test_a_window_has_what_came_in_its_time(gaps_ms: list[int]) -> None:
    """With the resolution of a tenth of the window."""
    figures, now_ns, arrivals = VersionFigures(RULES), 10**12, list[int]()
    for gap_ms in gaps_ms:
        now_ns += gap_ms * NS_PER_MS
        arrivals.append(now_ns)
        figures.add_answer(NS_PER_MS, now_ns)
        least = sum(now_ns - arrival < 9 * NS_PER_S for arrival in arrivals)
        most = sum(now_ns - arrival < 10 * NS_PER_S for arrival in arrivals)
        assert least <= figures.window(now_ns).requests <= most
    assert figures.totals.requests == len(gaps_ms)


def test_an_empty_time_empties_the_window() -> None:
    figures = VersionFigures(RULES)
    figures.add_error(10**12, was_answered=False)
    assert figures.window(10**12) == Sums(1, 1)
    assert figures.window(10**12 + 10 * NS_PER_S) == Sums()


def test_an_answer_that_fails_later_is_one_request() -> None:
    figures = VersionFigures(RULES)
    figures.add_answer(NS_PER_MS, 10**12)
    figures.add_error(10**12, was_answered=True)
    assert (figures.totals.requests, figures.totals.errors) == (1, 1)


def test_p99_is_that_of_the_latest_answers() -> None:
    figures = VersionFigures(None)
    assert figures.p99_ms() is None
    for duration_ms in range(1, 201):
        figures.add_answer(duration_ms * NS_PER_MS, 10**12)
    assert figures.p99_ms() == 198.0


@pytest.mark.parametrize(
    ("window", "rule"),
    [
        (Sums(requests=100, errors=1), None),  # as many as allowed
        (Sums(requests=100, errors=2), "max_error_rate"),
        (Sums(requests=99, errors=99), None),  # too few requests
        (Sums(requests=100, slow=1), None),
        (Sums(requests=100, slow=2), "max_p99_ms"),
        (Sums(comparisons=100, rows=400, agreeing=396), None),
        (Sums(comparisons=100, rows=400, agreeing=395), "min_agreement"),
        (Sums(comparisons=99, rows=400), None),
    ],
)
def test_a_rule_is_broken_beyond_its_bound_with_enough_requests(window: Sums, rule: str | None) -> None:
    broken = broken_rule(RULES, window)
    assert (None if broken is None else broken[0]) == rule


def test_a_promotion_needs_requests_for_each_rule() -> None:
    assert "it has answered 99 requests" in missing_evidence(RULES, Sums(requests=99, comparisons=100))
    assert "99 of its shadow answers" in missing_evidence(RULES, Sums(requests=100, comparisons=99))
    assert missing_evidence(RULES, Sums(requests=100, comparisons=100)) == ""
    agreement = RULES.model_copy(update={"max_error_rate": None, "max_p99_ms": None})
    assert missing_evidence(agreement, Sums(comparisons=100)) == ""


def test_slow_answers_are_counted_by_the_bound_of_the_rules() -> None:
    figures = VersionFigures(RULES)
    for duration_ms in (49, 50, 51):
        figures.add_answer(duration_ms * NS_PER_MS, 10**12)
    assert figures.window(10**12).slow == 1
    figures.apply(RULES)
    assert figures.window(10**12).requests == 3
    figures.apply(RULES.model_copy(update={"max_p99_ms": 10.0}))  # the counts were those of another bound
    assert figures.window(10**12).requests == 0
