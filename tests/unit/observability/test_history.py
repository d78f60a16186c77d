"""Rings with the request rates of the last ten minutes."""

from __future__ import annotations

from headrace.core.clock import NS_PER_S
from headrace.observability.history import LENGTH, PERIOD_NS, RequestHistory


class Version:
    """A version, which is also its own recorder."""

    def __init__(self) -> None:
        self.requests = self.failures = 0

    @property
    def recorder(self) -> Version:
        return self

    def request_counts(self) -> tuple[int, int]:
        return self.requests, self.failures


def test_rates_follow_from_the_counts_of_two_samples() -> None:
    history, version = RequestHistory(), Version()
    version.requests = 1_000  # before the first sample: its time is unknown
    for second, requests, failures in ((10, 0, 0), (15, 50, 5), (25, 50, 0), (30, 0, 0)):
        version.requests += requests
        version.failures += failures
        history.sample([("m", "1", version)], second * NS_PER_S)
    assert history.rates(version) == {"requests_per_s": [10.0, 5.0, 0.0], "failures_per_s": [1.0, 0.0, 0.0]}
    assert history.rates(Version()) == {"requests_per_s": [], "failures_per_s": []}


def test_the_ring_is_bounded_and_an_idle_version_sends_nothing() -> None:
    history, busy, idle = RequestHistory(), Version(), Version()
    for sample in range(LENGTH + 20):
        busy.requests += 5 * sample
        history.sample([("busy", "1", busy), ("idle", "1", idle)], (sample + 1) * PERIOD_NS)
    assert history.rates(busy)["requests_per_s"] == [float(sample) for sample in range(20, LENGTH + 20)]
    assert history.rates(idle)["requests_per_s"] == []


def test_a_reload_keeps_the_ring_and_an_unload_drops_it() -> None:
    history, first, second = RequestHistory(), Version(), Version()
    history.sample([("m", "1", first)], PERIOD_NS)
    first.requests = 10
    history.sample([("m", "1", first)], 2 * PERIOD_NS)
    second.requests = 5  # the counts of a version that is loaded again begin at zero
    history.sample([("m", "1", second)], 3 * PERIOD_NS)
    assert history.rates(second)["requests_per_s"] == [2.0, 1.0]
    assert history.rates(first)["requests_per_s"] == []
    history.sample([], 4 * PERIOD_NS)
    history.sample([("m", "1", second)], 5 * PERIOD_NS)
    assert history.rates(second)["requests_per_s"] == [1.0]
