"""The metrics page: one registry, collected when Prometheus scrapes. The data plane does not import Prometheus.

Formats: text, OpenMetrics (with exemplars), or protobuf, the only one with native histograms. The protobuf fields are those of
`io.prometheus.client.MetricFamily` (Prometheus' client_model, metrics.proto), each message after its length. There are a dozen,
so they are written here without generated classes.

`metrics_table` defines the metrics; `metrics_models` and `metrics_server` collect their values.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from headrace.core.clock import NS_PER_S, pause, stepwise
from headrace.core.telemetry import TritonMetrics
from headrace.observability import metrics_server
from headrace.observability.custom_metrics import CustomMetrics
from headrace.observability.histograms import FIRST_NATIVE, SCHEMA, ZERO_S, Exemplar, Histogram
from headrace.observability.metrics_models import CpuCollector, ModelCollector, ScrapedModels
from headrace.observability.metrics_table import Durations, SampleStream, classic_buckets
from headrace.observability.metrics_traffic import HasTrafficRows, TrafficCollector

_PROTOBUF = "application/vnd.google.protobuf"
_MESSAGE = "io.prometheus.client.MetricFamily"
PROTOBUF = f"{_PROTOBUF}; proto={_MESSAGE}; encoding=delimited"

# `unknown` is a counter without the suffix that OpenMetrics requires; the other formats do not require it.
_TYPES = {"counter": 0, "gauge": 1, "summary": 2, "unknown": 0, "histogram": 4}
# Field number of the value in a Metric, by type.
_VALUES = {"gauge": 2, "counter": 3, "summary": 4, "unknown": 3}
_HISTOGRAM = 7
# Up to this many empty native buckets in a row take fewer bytes than the start of a new span.
_GAP = 2


def expose(registry: CollectorRegistry, accept: str, consume: bool = False) -> tuple[str, bytes]:
    """Render the page in the format that a client prefers.

    Args:
        registry: the collectors.
        accept: value of the `Accept` header; the format is plain text if it names none.
        consume: the collectors make their samples for this call; text frees them step by step.

    Returns:
        Content type and body.
    """
    form = _best(accept)
    if form == "protobuf":
        return PROTOBUF, b"".join([_delimited(metric) for metric in registry.collect()])
    if form == "openmetrics":
        return OPENMETRICS, _page(registry, True, consume)
    return CONTENT_TYPE_PLAIN_0_0_4, _page(registry, False, consume)


def canonical_accept(accept: str) -> str:
    """Return an `Accept` header for the same format as another; there are as many results as formats."""
    return {"protobuf": PROTOBUF, "openmetrics": OPENMETRICS}.get(_best(accept), "")


def _page(registry: CollectorRegistry, openmetrics: bool, consume: bool) -> bytes:
    """Render the page as text.

    The result is that of prometheus-client for plain names of metrics and labels, in a third of the time: it escapes every name
    and value again, and ours repeat from line to line.
    """
    labels: dict[tuple[tuple[str, str], ...], str] = {}
    parts: list[bytes] = []
    for metric in registry.collect():
        name, kind, text = metric.name, metric.type, metric.documentation.replace("\\", "\\\\").replace("\n", "\\n")
        if openmetrics:
            text = text.replace('"', '\\"')
        else:
            name += "_total" if kind == "counter" else ""
            kind = "counter" if kind == "unknown" else kind
        lines = [f"# HELP {name} {text}\n# TYPE {name} {kind}\n"]
        is_stream = isinstance(metric.samples, SampleStream)
        samples = metric.samples if is_stream else _taken(metric.samples if consume else list(metric.samples))
        for sample in samples:
            pause()
            if is_stream:  # of labels that no other metric has
                lines.append(f"{sample.name}{_label_text(sample.labels)} {_go_text(sample.value)}\n")
                continue
            key = tuple(sample.labels.items())
            written = labels.get(key)
            if written is None:
                written = labels[key] = _label_text(sample.labels)
            exemplar = _exemplar_text(sample) if openmetrics and sample.exemplar is not None else ""
            lines.append(f"{sample.name}{written} {_go_text(sample.value)}{exemplar}\n")
        parts.append("".join(lines).encode())
    if openmetrics:
        parts.append(b"# EOF\n")
    while labels:
        labels.popitem()
        pause()
    return b"".join(parts)


def _taken(samples: list[Sample]) -> Iterator[Sample]:
    """Yield samples and remove them: to free some hundred thousand at once would be one long step."""
    samples.reverse()
    while samples:
        yield samples.pop()


def _go_text(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _label_text(labels: Mapping[str, str]) -> str:
    pairs = [
        name + '="' + value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') + '"'
        for name, value in sorted(labels.items())
    ]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _exemplar_text(sample: Sample) -> str:
    exemplar = sample.exemplar
    assert exemplar is not None, "checked by the caller"
    return f" # {_label_text(exemplar.labels)} {_go_text(exemplar.value)} {exemplar.timestamp}"


def _best(accept: str) -> str:
    """Return the preferred format of an `Accept` header: text, openmetrics or protobuf."""
    best, weight = "text", 0.0
    for item in accept.split(","):
        media_type, *parameters = (part.strip() for part in item.lower().split(";"))
        options = dict(parameter.split("=", 1) for parameter in parameters if "=" in parameter)
        form = {_PROTOBUF: "protobuf", "application/openmetrics-text": "openmetrics", "text/plain": "text"}.get(
            media_type
        )
        if form == "protobuf" and (options.get("proto"), options.get("encoding")) != (_MESSAGE.lower(), "delimited"):
            continue
        if form == "openmetrics" and options.get("version", "1.0.0") not in ("0.0.1", "1.0.0"):
            continue
        if form is not None and (quality := _weight(options.get("q", "1"))) > weight:
            best, weight = form, quality
    return best


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _delimited(metric: Metric) -> bytes:
    name = metric.name + ("_total" if metric.type == "counter" else "")
    parts = [_text(1, name), _text(2, metric.documentation)]
    if _TYPES[metric.type]:
        parts.append(_number(3, _TYPES[metric.type]))
    if isinstance(metric, Durations):
        parts += [_message(4, _native(metric, labels, histogram)) for labels, histogram in stepwise(metric.natives)]
    elif metric.type in ("histogram", "summary"):
        parts += [_message(4, series) for series in stepwise(_compound(metric))]
    else:
        field = _VALUES[metric.type]
        for sample in stepwise(metric.samples):
            value = _message(field, [_double(1, sample.value)])
            parts.append(_message(4, [*_labels(1, sample.labels), value]))
    if len(parts) == 2 + bool(_TYPES[metric.type]):
        return b""  # families without series are left out
    body = b"".join(parts)
    return _varint(len(body)) + body


def _compound(metric: Metric) -> Iterator[list[bytes]]:
    """Yield the series of a histogram or summary; the samples of a series must be adjacent."""

    def series(sample: Sample) -> dict[str, str]:
        return {name: value for name, value in sample.labels.items() if name not in ("le", "quantile")}

    for labels, samples in groupby(metric.samples, series):
        group = list(samples)
        total = next(s.value for s in group if s.name.endswith("_sum"))
        buckets = [s for s in group if s.name.endswith("_bucket")]
        count = buckets[-1].value if buckets else next(s.value for s in group if s.name.endswith("_count"))
        bounds = [(s.labels["le"], int(s.value), None) for s in buckets]
        body = [_number(1, int(count)), _double(2, total), *_buckets(bounds)]
        quantiles = [s for s in group if "quantile" in s.labels]
        body += [_message(3, [_double(1, float(s.labels["quantile"])), _double(2, s.value)]) for s in quantiles]
        yield [*_labels(1, labels), _message(_HISTOGRAM if buckets else _VALUES["summary"], body)]


def _native(metric: Durations, values: Sequence[str], histogram: Histogram) -> list[bytes]:
    """Return a series with classic and native buckets; Prometheus stores the kind that its configuration selects."""
    labels = dict(zip(metric._labelnames, values, strict=True))
    counts = histogram.native.tolist()
    body = [_number(1, histogram.count), _double(2, histogram.sum_ns / NS_PER_S)]
    body += _buckets(classic_buckets(histogram))
    body += [_number(5, _zigzag(SCHEMA)), _double(6, ZERO_S), _number(7, counts[0])]
    spans, deltas = _spans(counts[1:])
    body += [_message(12, [_number(1, _zigzag(offset)), _number(2, length)]) for offset, length in spans]
    body += [_number(13, _zigzag(delta)) for delta in deltas]
    return [*_labels(1, labels), _message(_HISTOGRAM, body)]


def _spans(counts: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return runs of non-empty buckets as (distance from the end of the run before, length), and the change of count from
    each bucket to the next."""
    spans: list[tuple[int, int]] = []
    run_counts: list[int] = []
    end = -FIRST_NATIVE  # of the run before; the distance of the first run is the number of its first bucket
    for index in [index for index, count in enumerate(counts) if count]:
        gap = index - end
        if spans and gap <= _GAP:
            spans[-1] = (spans[-1][0], spans[-1][1] + gap + 1)
            run_counts += [0] * gap
        else:
            spans.append((gap, 1))
        run_counts.append(counts[index])
        end = index + 1
    return spans, [count - before for before, count in zip([0, *run_counts], run_counts, strict=False)]


def _buckets(buckets: Iterable[tuple[str, int, Exemplar | None]]) -> Iterator[bytes]:
    for bound, count, exemplar in buckets:
        parts = [_number(1, count), _double(2, float(bound))]
        if exemplar is not None:
            parts.append(_message(3, _exemplar(exemplar)))
        yield _message(3, parts)


def _exemplar(exemplar: Exemplar) -> list[bytes]:
    seconds = int(exemplar.time_s)
    timestamp = [_number(1, seconds), _number(2, int((exemplar.time_s - seconds) * NS_PER_S))]
    labels = _labels(1, {"trace_id": exemplar.trace_id})
    return [*labels, _double(2, exemplar.value_ns / NS_PER_S), _message(3, timestamp)]


def _labels(field: int, labels: Mapping[str, str]) -> list[bytes]:
    return [_message(field, [_text(1, name), _text(2, value)]) for name, value in labels.items()]


# Wire format: the field's number and type (0 varint, 1 eight bytes, 2 bytes after their length), then its value.


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _text(field: int, value: str) -> bytes:
    content = value.encode("utf-8", "replace")
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _message(field: int, parts: Iterable[bytes]) -> bytes:
    body = b"".join(parts)
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


class MetricsPage:
    """The page that Prometheus scrapes.

    Args:
        sources: returns (model, version, source) of every loaded version.
        memory: GPU memory of models; None leaves its metrics out.
        facts: of the server; None leaves its metrics out.
        gpus: reads the driver; None leaves the metrics of GPUs out.
        triton: selects metrics under Triton's names; None for the defaults.
        custom: custom metrics of Python models; None leaves them out.
        traffic: traffic over the versions of models; None leaves its metrics out.
    """

    def __init__(
        self,
        sources: ScrapedModels,
        memory: metrics_server.GpuMemory | None = None,
        facts: metrics_server.ServerFacts | None = None,
        gpus: metrics_server.GpuReader | None = None,
        triton: TritonMetrics | None = None,
        custom: CustomMetrics | None = None,
        traffic: HasTrafficRows | None = None,
    ) -> None:
        self._lock = threading.Lock()  # one scrape at a time
        self._registry = CollectorRegistry()
        self._registry.register(ModelCollector(sources, triton or TritonMetrics()))
        if memory is not None:
            self._registry.register(metrics_server.MemoryCollector(memory))
        if facts is not None:
            self._registry.register(metrics_server.ServerCollector(facts))
        if gpus is not None:
            self._registry.register(metrics_server.GpuCollector(gpus))
        if traffic is not None:
            self._registry.register(TrafficCollector(traffic))
        if custom is not None:
            self._registry.register(custom)
        self._registry.register(CpuCollector())
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return content type and body. Takes milliseconds, so call it on another thread than the event loop's.

        Args:
            accept: value of the `Accept` header, "" for plain text.
        """
        with self._lock:
            return expose(self._registry, accept, consume=True)
