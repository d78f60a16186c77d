"""Switching the response cache off and on by what it saves and costs."""

from __future__ import annotations

import pytest
from headrace.core.clock import NS_PER_S
from headrace.inference.caching.cache_switch import (
    FIRST_REQUESTS,
    OFF_REQUESTS,
    TRIAL_REQUESTS,
    WINDOW_REQUESTS,
    CacheBenefit,
)


def drive(benefit: CacheBenefit, requests: int, hit_rate: float, saved_ns: int, cost_ns: int, now_ns: int = 0) -> int:
    """Count requests of which a share are hits; returns the number that were looked up."""
    lookups = hits = 0
    for number in range(1, requests + 1):
        if benefit.passing:  # as in `VersionCache.infer`
            benefit.rest -= 1
            if benefit.rest <= 0 or now_ns >= benefit.trial_ns:
                benefit.begin_trial()
        if benefit.passing:
            continue
        lookups += 1
        if hits < int(number * hit_rate):
            hits += 1
            benefit.count_hit(saved_ns)
        else:
            benefit.add_cost(cost_ns)
        benefit.count_lookup(now_ns)
    return lookups


@pytest.mark.parametrize(
    ("hit_rate", "saved_ns", "cost_ns", "state"),
    [
        (0.0, 0, 6000, "off"),
        (0.5, 20_000, 6000, "on"),
        (0.1, 20_000, 6000, "off"),  # saves 2 us a request, costs 5.4
        (0.01, 40_000_000, 110_000, "on"),  # a slow model: one hit in a hundred pays for the hashes of large images
        (0.9, -500, 6000, "off"),  # a hit takes longer than the model
    ],
)
def test_it_is_on_while_hits_save_more_than_misses_cost(
    hit_rate: float, saved_ns: int, cost_ns: int, state: str
) -> None:
    benefit = CacheBenefit("m/1")
    drive(benefit, FIRST_REQUESTS + 4 * WINDOW_REQUESTS, hit_rate, saved_ns, cost_ns)
    assert benefit.state == state
    assert benefit.switches == (state == "off")


def test_nothing_is_decided_while_the_cache_fills() -> None:
    benefit = CacheBenefit("m/1")
    assert drive(benefit, FIRST_REQUESTS - 1, 0.0, 0, 6000) == FIRST_REQUESTS - 1
    assert benefit.state == "on"
    assert benefit.reason() == f"it is first judged after {FIRST_REQUESTS} requests"


def test_one_request_in_64_is_looked_up_while_it_is_off() -> None:
    benefit = CacheBenefit("m/1")
    drive(benefit, FIRST_REQUESTS, 0.0, 0, 6000)
    lookups = drive(benefit, 10 * OFF_REQUESTS, 0.0, 0, 6000)
    assert lookups == pytest.approx(10 * OFF_REQUESTS / 64, rel=0.1)
    assert benefit.switches == 1, "a trial that fails is not another switch"


def test_a_trial_switches_it_on_again() -> None:
    benefit = CacheBenefit("m/1")
    drive(benefit, FIRST_REQUESTS, 0.0, 0, 6000)
    assert benefit.state == "off"
    drive(benefit, OFF_REQUESTS, 0.8, 20_000, 6000)
    assert benefit.state == "trial"
    drive(benefit, TRIAL_REQUESTS, 0.8, 20_000, 6000)
    assert benefit.state == "on"
    assert "at 80.1 % hits a request saved 16.0 us" in benefit.reason()
    assert drive(benefit, 500, 0.8, 20_000, 6000) == 500


def test_few_requests_get_a_trial_after_a_minute() -> None:
    benefit = CacheBenefit("m/1")
    drive(benefit, FIRST_REQUESTS, 0.0, 0, 6000, now_ns=NS_PER_S)
    assert drive(benefit, 10, 0.0, 0, 6000, now_ns=60 * NS_PER_S) == 0
    assert drive(benefit, 10, 0.0, 0, 6000, now_ns=61 * NS_PER_S) == 10


def test_one_bad_window_does_not_switch_a_good_cache_off() -> None:
    benefit = CacheBenefit("m/1")
    drive(benefit, FIRST_REQUESTS + 3 * WINDOW_REQUESTS, 0.9, 20_000, 6000)
    drive(benefit, WINDOW_REQUESTS, 0.0, 0, 6000)
    assert benefit.state == "on"
    drive(benefit, 3 * WINDOW_REQUESTS, 0.0, 0, 6000)
    assert benefit.state == "off"
