"""Metrics of the server: event loop lag, model states, labelled counters."""

from __future__ import annotations

import gc

from headrace.core.clock import NS_PER_S
from headrace.core.limits import ClientLimits, Limits
from headrace.inference.simulation.virtual_time import VirtualLoop
from headrace.observability.labelled_counter import LOADS
from headrace.observability.metrics import PROTOBUF, MetricsPage
from headrace.observability.metrics_server import LoopLag, ServerFacts
from prometheus_client.parser import text_string_to_metric_families


class States:
    def __init__(self, *unused: str) -> None:
        self._unused = unused

    def states(self) -> list[tuple[str, str, str, bool]]:
        used = [("broken", "", "UNAVAILABLE", False), ("m", "3", "READY", False)]
        return used + [(name, "1", "READY", True) for name in self._unused]

    def ready(self) -> bool:
        return False


def samples(page: MetricsPage) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(page.render()[1].decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_page_has_the_facts_of_the_server() -> None:
    LOADS.count("a-model-of-this-test", "failed")
    http, grpc = ClientLimits(Limits(max_chunks=5)), ClientLimits(protocol="grpc")
    http.connections = 7
    http.hit("max_chunks")
    facts = ServerFacts(States(), "1.2.3", LoopLag(), (http, grpc), lambda: 2e9, utilization=lambda: 1.25)
    values = samples(MetricsPage(list, facts=facts))
    assert values["headrace_server_utilization_ratio",] == 1.25
    assert values["headrace_ready",] == 0
    assert values["headrace_connections", "http"] == 7
    assert ("headrace_connections", "grpc") not in values, "it is not served"
    assert values["headrace_limit", "max_chunks"] == 5
    hits = {key[1:]: value for key, value in values.items() if key[0] == "headrace_limit_hits_total"}
    assert {key for key, value in hits.items() if value} == {("max_chunks", "http")}
    assert set(hits) == {(limit, protocol) for limit in http.limits.table() for protocol in ("grpc", "http")}
    assert values["headrace_tls_certificate_expiry_timestamp_seconds",] == 2e9
    assert values["headrace_model_loads_total", "a-model-of-this-test", "failed"] == 1
    assert any(key[0] == "headrace_build_info" and "1.2.3" in key for key in values)
    states = {key[1:]: value for key, value in values.items() if key[0] == "headrace_model_state"}
    assert len(states) == 2 * 6
    assert {key for key, value in states.items() if value} == {("broken", "UNAVAILABLE", ""), ("m", "READY", "3")}


def test_an_unused_model_has_few_series() -> None:
    LOADS.declare_each(("rests", result) for result in ("loaded", "reloaded", "unloaded", "failed"))
    LOADS.count("rests", "loaded")
    page = MetricsPage(list, facts=ServerFacts(States("rests"), "1", LoopLag()))

    def series() -> dict[tuple[str, ...], float]:
        return {key: value for key, value in samples(page).items() if "rests" in key}

    assert series() == {
        ("headrace_model_state", "rests", "READY", "1"): 1,
        ("headrace_model_loads_total", "rests", "failed"): 0,
    }
    LOADS.count("rests", "reloaded")
    assert series()["headrace_model_loads_total", "rests", "reloaded"] == 1
    for accept in ("application/openmetrics-text", PROTOBUF):
        assert page.render(accept)[1].count(b"rests") == 3
    used = MetricsPage(list, facts=ServerFacts(States(), "1", LoopLag()))
    assert samples(used)["headrace_model_loads_total", "rests", "loaded"] == 1


def test_a_page_of_thousands_of_unused_models_starts_no_garbage_collection() -> None:
    names = [f"parked{number}" for number in range(20_000)]
    page = MetricsPage(list, facts=ServerFacts(States(*names), "1", LoopLag()))
    page.render()
    collections: list[str] = []

    def observe(phase: str, _: object) -> None:
        collections.append(phase)

    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(50_000, *threshold[1:])  # of the server
    gc.callbacks.append(observe)
    try:
        assert page.render()[1].count(b"parked") == 20_000
    finally:
        gc.callbacks.remove(observe)
        gc.set_threshold(*threshold)
    assert not collections


def test_without_tls_there_is_no_certificate() -> None:
    values = samples(MetricsPage(list, facts=ServerFacts(States(), "1", LoopLag())))
    assert not any(key[0].startswith("headrace_tls") for key in values)


def test_a_blocked_loop_reports_its_lag() -> None:
    loop, blocked_ns = VirtualLoop(), 0
    lag = LoopLag(lambda: loop.now_ns + blocked_ns)
    lag.start(loop)  # type: ignore[arg-type]  # has the methods that it calls
    loop.advance(NS_PER_S)
    assert (lag.histogram().count, lag.histogram().sum_ns) == (4, 0)
    blocked_ns = 3 * NS_PER_S // 5  # what a handler must not do
    loop.advance(5 * NS_PER_S // 4)
    lag.stop()
    seen = lag.histogram()
    assert (seen.count, seen.sum_ns) == (5, blocked_ns)
    worst = seen.quantile_s(1.0)
    assert worst is not None
    assert 0.55 <= worst < 0.65
    loop.advance(5 * NS_PER_S)
    assert lag.histogram().count == 5, "it looks no more"
