"""Token buckets of clients."""

from __future__ import annotations

import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.errors import QuotaExceeded
from headrace.core.quota import Quota
from headrace.inference.scheduling.policy import RateLimits
from headrace.inference.scheduling.quotas import Quotas
from hypothesis import given
from hypothesis import strategies as st


def charge(quotas: Quotas, client: str, now_ns: int) -> float:
    """Charge a request; return the seconds to wait, 0 if it is allowed."""
    try:
        quotas.charge(client, now_ns)
    except QuotaExceeded as refused:
        assert refused.client == client
        assert refused.retry_after_s > 0
        return refused.retry_after_s
    return 0.0


def test_a_burst_passes_and_the_rest_at_the_rate() -> None:
    quotas = Quotas(RateLimits(default=Quota(10.0, burst=3)))
    assert [charge(quotas, "a", 0) for _ in range(5)] == [0, 0, 0, 0.1, 0.1]
    assert charge(quotas, "b", 0) == 0, "others have quotas of their own"
    assert charge(quotas, "a", NS_PER_S // 10) == 0
    assert charge(quotas, "a", NS_PER_S // 10) == pytest.approx(0.1)
    assert [charge(quotas, "a", 10 * NS_PER_S) for _ in range(4)] == [0, 0, 0, pytest.approx(0.1)]


def test_named_clients_have_their_own_quota_and_others_none_without_a_default() -> None:
    quotas = Quotas(RateLimits({"poor": Quota(1.0), "": Quota(2.0)}))
    assert charge(quotas, "poor", 0) == 0
    assert charge(quotas, "poor", 0) == 1.0
    assert [charge(quotas, "rich", 0) for _ in range(1000)] == [0] * 1000
    assert charge(quotas, "", 0) == 0
    with pytest.raises(QuotaExceeded, match=r"without a name \(counted together\) .* 2 requests/s"):
        quotas.charge("", 0)


@given(
    st.lists(st.integers(0, NS_PER_S // 5), max_size=200),
    st.floats(0.5, 1000),
    st.integers(1, 20),
)
def test_no_stretch_of_time_has_more_than_rate_and_burst_allow(steps_ns: list[int], rate_hz: float, burst: int) -> None:
    quotas = Quotas(RateLimits(default=Quota(rate_hz, burst)))
    now_ns, served_ns = 0, []
    for step_ns in steps_ns:
        now_ns += step_ns
        if not charge(quotas, "a", now_ns):
            served_ns.append(now_ns)
    for first in range(len(served_ns)):
        for last in range(first, len(served_ns)):
            allowed = burst + rate_hz * (served_ns[last] - served_ns[first]) / NS_PER_S * (1 + 1e-6)
            assert last - first + 1 <= allowed + 1e-3


def test_names_made_up_by_the_thousand_share_one_bucket() -> None:
    quotas = Quotas(RateLimits({"shop": Quota(1.0, 5)}, Quota(1.0, burst=2)), max_clients=100)
    served = sum(charge(quotas, f"bot {number}", number) == 0 for number in range(10_000))
    assert served == 100 + 2, "a hundred are remembered, the crowd behind them is one client"
    assert [charge(quotas, "shop", 20_000) for _ in range(6)] == [0, 0, 0, 0, 0, pytest.approx(1.0)]
    assert len(quotas._others) == 100
    assert charge(quotas, "bot 0", 20_000) == 0, "those that are remembered keep their own"
    # Once they have been quiet for long enough there is nothing to remember of them.
    assert charge(quotas, "other", 4 * NS_PER_S) == 0
    assert charge(quotas, "other", 4 * NS_PER_S) == 0
    assert charge(quotas, "other", 4 * NS_PER_S) == pytest.approx(1.0)
