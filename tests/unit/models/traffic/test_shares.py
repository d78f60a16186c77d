"""Shares are exact at every moment, and sticky values are the same everywhere."""

from __future__ import annotations

import pytest
from headrace.config.traffic_config import ALL_SHARES
from headrace.models.traffic.split import ShareSelector, sticky_index
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, ...]:
    """Up to six shares that sum up to `ALL_SHARES`, small and zero ones among them."""
    cuts = draw(st.lists(st.one_of(st.integers(0, ALL_SHARES), st.integers(0, 20)), max_size=5))
    bounds = [0, *sorted(cuts), ALL_SHARES]
    return tuple(bounds[index + 1] - bounds[index] for index in range(len(bounds) - 1))


@settings(deadline=None, max_examples=60)
@given(shares(), st.integers(1, 600))
def test_each_target_has_its_share_at_every_moment(values: tuple[int, ...], requests: int) -> None:
    selector, counts = ShareSelector(values), [0] * len(values)
    for number in range(1, requests + 1):
        counts[selector.next()] += 1
        for share, count in zip(values, counts, strict=True):
            assert abs(count * ALL_SHARES - share * number) < ALL_SHARES, "off by a request or more"


def test_a_whole_cycle_has_exactly_the_shares() -> None:
    values = (ALL_SHARES // 20, ALL_SHARES // 3, 1, ALL_SHARES - ALL_SHARES // 20 - ALL_SHARES // 3 - 1)
    selector, counts = ShareSelector(values), [0] * len(values)
    for _ in range(ALL_SHARES):
        counts[selector.next()] += 1
    assert tuple(counts) == values


def test_shares_must_sum_up() -> None:
    with pytest.raises(ValueError, match="must sum up to 100000"):
        ShareSelector((5, 6))


@settings(deadline=None)
@given(shares(), st.text())
def test_a_value_selects_a_target_with_a_share(values: tuple[int, ...], value: str) -> None:
    index = sticky_index("model", value, values)
    assert values[index] > 0
    assert index == sticky_index("model", value, values)


def test_sticky_values_are_spread_by_the_shares() -> None:
    values = (ALL_SHARES // 4, ALL_SHARES - ALL_SHARES // 4)
    selected = [sticky_index("model", f"user-{number}", values) for number in range(10_000)]
    assert selected.count(0) == 2434  # of this hash and these names, so in every process and every release


@settings(deadline=None)
@given(st.text(), st.integers(0, ALL_SHARES), st.integers(0, ALL_SHARES))
def test_a_larger_share_keeps_the_values_that_a_canary_has(value: str, first: int, second: int) -> None:
    small, large = sorted((first, second))
    if sticky_index("model", value, (small, ALL_SHARES - small)) == 0:
        assert sticky_index("model", value, (large, ALL_SHARES - large)) == 0
