"""Collects the metrics of traffic over the versions of models: shares, states, shadow requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from prometheus_client.metrics_core import Metric

from headrace.core.clock import stepwise
from headrace.core.response_bodies import TRAFFIC_STATES
from headrace.observability import metrics_table as table

RULES = ("max_error_rate", "max_p99_ms", "min_agreement")


class TrafficRow(NamedTuple):
    """Traffic of one version of a model.

    Attributes:
        model, version: of the row.
        state: one of `TRAFFIC_STATES`.
        share: of the requests that name no version, from 0 to 1.
        routed: requests that named no version and reached it.
        undone: number of times that each rule has taken the share of the version.
        shadow: shadow requests by outcome; None for a version that is no shadow.
        rows, agreeing: compared rows, and those that agree with the stable version.
        difference: largest absolute difference of two outputs.
    """

    model: str
    version: str
    state: str
    share: float
    routed: int
    undone: Mapping[str, int]
    shadow: Mapping[str, int] | None
    rows: int
    agreeing: int
    difference: float


class HasTrafficRows(Protocol):
    """Traffic of all models; see `headrace.traffic.router.TrafficRouter`."""

    def rows(self) -> Iterable[TrafficRow]:
        """Return a row for each version of each model with traffic."""


class TrafficCollector(table.ScrapeCollector):
    """Collects the metrics of traffic; `traffic` has the rows."""

    def __init__(self, traffic: HasTrafficRows) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        share, state = table.gauges("headrace_traffic_share", "headrace_traffic_state")
        routed, undone = table.counters("headrace_traffic_routed_total", "headrace_traffic_undone_total")
        shadow, rows = table.counters("headrace_shadow_requests_total", "headrace_shadow_rows_total")
        difference = table.FAMILIES["headrace_shadow_max_difference"].gauge()
        agreeing = table.FAMILIES["headrace_shadow_agreeing_rows_total"].counter()
        for row in stepwise(self._traffic.rows()):
            labels = [row.model, row.version]
            share.add_metric(labels, row.share)
            routed.add_metric(labels, row.routed)
            for name in TRAFFIC_STATES:
                state.add_metric([*labels, name], row.state == name)
            for name in RULES:
                undone.add_metric([*labels, name], row.undone.get(name, 0))
            if row.shadow is not None:
                for outcome, count in {"compared": 0, "failed": 0, **row.shadow}.items():
                    shadow.add_metric([*labels, outcome], count)
                rows.add_metric(labels, row.rows)
                agreeing.add_metric(labels, row.agreeing)
                difference.add_metric(labels, row.difference)
        yield from (share, state, routed, undone, shadow, rows, agreeing, difference)
