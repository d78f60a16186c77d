"""Who comes up most often, whatever names others make up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.clock import NS_PER_S
from server.dataplane.heavy_hitters import HeavyHitters


@given(st.lists(st.sampled_from("aaaaabbbcdefghijklmnopqrstuvwxyz"), min_size=1, max_size=300), st.integers(1, 8))
def test_nobody_s_share_is_overstated_and_nobody_who_comes_often_is_missing(names: list[str], kept: int) -> None:
    hitters = HeavyHitters(NS_PER_S, kept)
    for name in names:
        hitters.add(name, 5)
    exact = Counter(names)
    told = hitters.top(5, most=100)
    assert len(told) <= kept
    assert all(0 < share <= exact[name] / len(names) for name, share in told)
    assert {name for name, count in exact.items() if count * kept > len(names)} <= {name for name, _ in told}
    if len(exact) <= kept:
        assert dict(told) == pytest.approx({name: count / len(names) for name, count in exact.items()})
    assert [share for _, share in told] == sorted([share for _, share in told], reverse=True)


def test_who_is_refused_again_and_again_stands_out_among_made_up_names() -> None:
    hitters = HeavyHitters(NS_PER_S, kept=16)
    for number in range(10_000):
        hitters.add(f"bot {number}", 5)
        if number % 3 == 0:
            hitters.add("greedy", 5)
    (name, share), *others = hitters.top(5)
    assert (name, share) == ("greedy", pytest.approx(0.25, abs=0.01))
    assert all(share < 0.01 for _, share in others)


def test_what_was_long_ago_is_forgotten() -> None:
    hitters = HeavyHitters(10, kept=4)
    assert hitters.top(0) == []
    for now_ns in (101, 102, 109):
        hitters.add("early", now_ns)
    hitters.add("late", 110)
    assert hitters.top(119) == [("early", 0.75), ("late", 0.25)]
    assert hitters.top(129) == [("late", 1)]
    assert hitters.top(130) == []
    hitters.add("later", 131)
    assert hitters.top(131, most=0) == []
    assert hitters.top(1000) == []
