"""The example deploy/envoy/headrace.yaml in a real Envoy, before three servers of different speed.

Ports and the times of the weighted policy are the test's; everything else is as it is shipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.load_balancing import POLICIES, measure, replicas

ATTEMPTS = 3


@pytest.mark.slow
def test_envoy_sends_less_to_the_slow_server_by_its_load_reports(tmp_path: Path) -> None:
    with replicas(tmp_path, "--orca", "always") as servers:
        # The slow server gets twice what it can serve from round robin, and the others have room. A machine that stands still for
        # a second hides that: there are several attempts.
        for _ in range(ATTEMPTS):
            plain = measure(tmp_path, servers, POLICIES[0], seconds=5, warm_up_s=2)
            weighted = measure(tmp_path, servers, POLICIES[1], seconds=5, warm_up_s=4)
            sends_less = weighted.requests[2] < 0.6 * plain.requests[2]
            is_faster = weighted.percentile_ms(0.99) < plain.percentile_ms(0.99)
            if sends_less and is_faster and weighted.goodput_hz > 1.2 * plain.goodput_hz:
                return
    raise AssertionError(f"{plain} is no worse than {weighted}")
