"""(f) Latency and throughput against offered load: random arrivals at 50, 80, 95 and 110 % of the capacity.

Latencies count from the moment when a request should have begun: a client that falls behind hides nothing.
"""

from __future__ import annotations

import math

from loadtest.gpu.crowd import Crowd
from loadtest.gpu.messages import Reporter
from loadtest.gpu.setup import REQUEST_ROWS, Setup
from loadtest.gpu.subject import Variant, variant
from loadtest.gpu.wire import open_way, saturate, server, way_called

SHARES = (50, 80, 95, 110)
# Of a sample's length elsewhere: tails need more requests than throughput does.
_LONGER = 4.0
# So many requests may be under way that the clients never hold one back before the server would refuse it.
_SLOTS, _FEW_SLOTS = 512, 64


def run(setup: Setup, reporter: Reporter) -> None:
    """Find the capacity, then offer shares of it."""
    model = variant(setup, Variant(setup.instances))
    way = way_called(setup.best_way)
    with server(setup, model, way.engine) as served, Crowd(setup.clients, setup.scratch) as crowd:
        at_once = max(setup.clients, setup.in_flight // REQUEST_ROWS)
        key = open_way(setup, crowd, way, served, model, REQUEST_ROWS, at_once)
        watched = [saturate(crowd, key, served, model, setup.seconds) for _ in range(max(2, setup.rounds))]
        capacity = max(one.taken.per_s for one in watched)
        crowd.shut(key)
        reporter.sample(f"capacity over {way.name}, closed loop", "images/s", capacity * REQUEST_ROWS)
        slots = _FEW_SLOTS if setup.small else _SLOTS
        key = open_way(setup, crowd, way, served, model, REQUEST_ROWS, slots, key="sweep")
        for share in SHARES:
            rate = capacity * share / 100
            outcome = crowd.open_loop(key, rate, _LONGER * setup.seconds)
            offered, name = round(rate * REQUEST_ROWS, 1), f"{share} % of capacity"
            reporter.sample(name, "images/s offered", offered)
            lost = {"failed": outcome.wrong, "never_begun": outcome.unanswered, "begun_late": outcome.late}
            reporter.sample(name, "images/s", outcome.per_s * REQUEST_ROWS, 0, share=share, offered=offered, **lost)
            if outcome.first_error:
                reporter.note(f"{name}: {outcome.wrong} requests failed, the first with {outcome.first_error}")
            for percent in (50, 95, 99):
                value = outcome.percentile_ms(percent)
                if math.isfinite(value):
                    reporter.sample(name, f"p{percent} ms", value, 0, share=share, offered=offered)
