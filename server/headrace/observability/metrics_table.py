"""Every metric of the server, as metrics.toml lists it: name, kind, labels and meaning.

`python -m deploy.metrics_page docs` writes docs/metrics.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as OpenMetricsExemplar
from prometheus_client.samples import Sample

from headrace.core.clock import NS_PER_S
from headrace.observability.histograms import BUCKETS_S, Exemplar, Histogram

Kind = Literal["counter", "gauge", "histogram", "summary"]
MODEL = ("model", "version")
_LE = [*(str(bound) for bound in BUCKETS_S), "+Inf"]


class ScrapeCollector(Collector):
    """A collector that runs at a scrape only, not at its registration: models and GPUs change, and reading them takes time."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registry does not collect."""
        return ()


class Durations(HistogramMetricFamily):
    """A histogram with classic and native buckets.

    Attributes:
        natives: label values and histogram of each series.
    """

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, text, labels=labels)
        self.natives: list[tuple[list[str], Histogram]] = []

    def add(self, labels: list[str], histogram: Histogram) -> None:
        """Add a series; the histogram must not change afterwards."""
        self.natives.append((labels, histogram))
        buckets = [_sample(bucket) for bucket in classic_buckets(histogram)]
        self.add_metric(labels, buckets, histogram.sum_ns / NS_PER_S)


@dataclass(frozen=True, slots=True)
class SampleStream:
    """Samples that are made while the page is rendered: tens of thousands at once would start the garbage collector.

    Attributes:
        name: of the samples.
        labels: names of the labels.
        rows: label values and value of each sample; read once.
    """

    name: str
    labels: tuple[str, ...]
    rows: Iterable[tuple[Sequence[str], float]]

    def __iter__(self) -> Iterator[Sample]:
        for values, value in self.rows:
            yield Sample(self.name, dict(zip(self.labels, values, strict=True)), value)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        section: of docs/metrics.md.
        name: as Prometheus stores it.
        kind: Prometheus' type. A counter without the suffix `_total`, as Triton's are, is `unknown` in OpenMetrics, which
            requires the suffix.
        text: help text, one or two sentences.
        labels: names of the labels, without `le` of histograms and `quantile` of summaries.
        native: a histogram of durations that also has native buckets.
        when: condition under which it has series; "" if it always has.
    """

    section: str
    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    native: bool = False
    when: str = ""

    def counter(self) -> CounterMetricFamily:
        """Return the family without series, for `add_metric`."""
        return CounterMetricFamily(self.name.removesuffix("_total"), self.text, labels=self.labels)

    def gauge(self) -> GaugeMetricFamily:
        """Return the family without series, for `add_metric`."""
        return GaugeMetricFamily(self.name, self.text, labels=self.labels)

    def summary(self) -> SummaryMetricFamily:
        """Return the family without series, for `add_metric`."""
        return SummaryMetricFamily(self.name, self.text, labels=self.labels)

    def histogram(self) -> HistogramMetricFamily:
        """Return the family without series, for `add_metric`."""
        return HistogramMetricFamily(self.name, self.text, labels=self.labels)

    def durations(self) -> Durations:
        """Return the family without series, for `add`."""
        return Durations(self.name, self.text, self.labels)

    def unknown(self) -> Metric:
        """Return a counter without the suffix `_total`, without series, for `add_sample`."""
        return Metric(self.name, self.text, "unknown")

    def stream(self, rows: Iterable[tuple[Sequence[str], float]]) -> Metric:
        """Return a counter or gauge whose series are read while the page is rendered.

        Args:
            rows: label values and value of each series.
        """
        family = self.counter() if self.kind == "counter" else self.gauge()
        family.samples = SampleStream(self.name, self.labels, rows)  # type: ignore[assignment]  # is only iterated
        return family

    def any_summary(self) -> Metric:
        """Return a summary with quantiles, without series, for `add_sample`; samples of a series must be adjacent."""
        return Metric(self.name, self.text, "summary")


def classic_buckets(histogram: Histogram) -> list[tuple[str, int, Exemplar | None]]:
    """Return upper bound as text, cumulative count and exemplar of each classic bucket."""
    cumulative: list[int] = histogram.counts.cumsum().tolist()
    return [
        (bound, count, histogram.exemplars.get(index))
        for index, (bound, count) in enumerate(zip(_LE, cumulative, strict=True))
    ]


def _sample(bucket: tuple[str, int, Exemplar | None]) -> tuple[str, float] | tuple[str, float, OpenMetricsExemplar]:
    bound, count, exemplar = bucket
    if exemplar is None:
        return bound, count
    return (
        bound,
        count,
        OpenMetricsExemplar({"trace_id": exemplar.trace_id}, exemplar.value_ns / NS_PER_S, exemplar.time_s),
    )


def _read_families() -> Iterator[Family]:
    text = files("headrace.observability").joinpath("metrics.toml").read_text(encoding="utf-8")
    for title, section in tomllib.loads(text).items():
        for name, entry in section["metrics"].items():
            values: dict[str, Any] = {"text": entry} if isinstance(entry, str) else entry
            labels = values.get("labels", [*section.get("labels", ()), *values.get("more", ())])
            kind = values.get("kind", "counter" if name.endswith("_total") else "gauge")
            when = values.get("when", section.get("when", ""))
            yield Family(title, name, kind, values["text"], tuple(labels), values.get("native", False), when)


FAMILIES = {family.name: family for family in _read_families()}


def counters(*names: str) -> list[CounterMetricFamily]:
    """Return counters without series, for `add_metric`."""
    return [FAMILIES[name].counter() for name in names]


def gauges(*names: str) -> list[GaugeMetricFamily]:
    """Return gauges without series, for `add_metric`."""
    return [FAMILIES[name].gauge() for name in names]
