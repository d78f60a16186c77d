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

from headrace.core.clock import NS_PER_S
from headrace.core.telemetry import TritonMetrics
from headrace.observability.counters import FIRST_NATIVE, SCHEMA, ZERO_S, Exemplar, Histogram
from headrace.observability.metrics_models import CpuCollector, ModelCollector, ScrapedModels
from headrace.observability.metrics_server import (
    GpuCollector,
    GpuMemory,
    GpuReader,
    MemoryCollector,
    ServerCollector,
    ServerFacts,
)
from headrace.observability.metrics_table import Durations, classic_buckets

_PROTOBUF = "application/vnd.google.protobuf"
_MESSAGE = "io.prometheus.client.MetricFamily"
PROTOBUF = f"{_PROTOBUF}; proto={_MESSAGE}; encoding=delimited"

# Unknown is a counter without the suffix that OpenMetrics demands; the other forms demand none.
_TYPES = {"counter": 0, "gauge": 1, "summary": 2, "unknown": 0, "histogram": 4}
# The field of a Metric that holds the value of each type.
_VALUES = {"gauge": 2, "counter": 3, "summary": 4, "unknown": 3}
_HISTOGRAM = 7
# Empty native buckets between two full ones are cheaper to name than a new span, up to so many.
_GAP = 2


def expose(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """The page in the form that a client likes best.

    Args:
        registry: what is collected.
        accept: the header of that name; the plain text is for whoever does not say.

    Returns:
        Content type and body.
    """
    form = _best(accept)
    if form == "protobuf":
        return PROTOBUF, b"".join(_delimited(metric) for metric in registry.collect())
    if form == "openmetrics":
        return OPENMETRICS, _page(registry, openmetrics=True)
    return CONTENT_TYPE_PLAIN_0_0_4, _page(registry, openmetrics=False)


def _page(registry: CollectorRegistry, openmetrics: bool) -> bytes:
    """The page as text.

    What prometheus-client writes for metrics and labels whose names are plain, in a third of the time: it looks at every name
    and value anew, while ours repeat from line to line.
    """
    labels: dict[tuple[tuple[str, str], ...], str] = {}
    lines: list[str] = []
    for metric in registry.collect():
        name, kind, text = metric.name, metric.type, metric.documentation.replace("\\", "\\\\").replace("\n", "\\n")
        if openmetrics:
            text = text.replace('"', '\\"')
        else:
            name += "_total" if kind == "counter" else ""
            kind = "counter" if kind == "unknown" else kind
        lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}\n")
        for sample in metric.samples:
            key = tuple(sample.labels.items())
            written = labels.get(key)
            if written is None:
                written = labels[key] = _label_text(sample.labels)
            exemplar = _exemplar_text(sample) if openmetrics and sample.exemplar is not None else ""
            lines.append(f"{sample.name}{written} {_go_text(sample.value)}{exemplar}\n")
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


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
    assert exemplar is not None, "the caller looks first"
    return f" # {_label_text(exemplar.labels)} {_go_text(exemplar.value)} {exemplar.timestamp}"


def _best(accept: str) -> str:
    best, weight = "text", 0.0
    for item in accept.split(","):
        media_type, *parameters = (part.strip() for part in item.lower().split(";"))
        document = dict(parameter.split("=", 1) for parameter in parameters if "=" in parameter)
        form = {_PROTOBUF: "protobuf", "application/openmetrics-text": "openmetrics", "text/plain": "text"}.get(
            media_type
        )
        if form == "protobuf" and (document.get("proto"), document.get("encoding")) != (_MESSAGE.lower(), "delimited"):
            continue
        if form == "openmetrics" and document.get("version", "1.0.0") not in ("0.0.1", "1.0.0"):
            continue
        if form is not None and (liking := _weight(document.get("q", "1"))) > weight:
            best, weight = form, liking
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
        parts += [_message(4, _native(metric, labels, histogram)) for labels, histogram in metric.natives]
    elif metric.type in ("histogram", "summary"):
        parts += [_message(4, series) for series in _compound(metric)]
    else:
        field = _VALUES[metric.type]
        for sample in metric.samples:
            value = _message(field, [_double(1, sample.value)])
            parts.append(_message(4, [*_labels(1, sample.labels), value]))
    if len(parts) == 2 + bool(_TYPES[metric.type]):
        return b""  # a family without series is none
    body = b"".join(parts)
    return _varint(len(body)) + body


def _compound(metric: Metric) -> Iterator[list[bytes]]:
    """The series of a histogram or summary, whose samples come one series after the other."""

    def series(sample: Sample) -> dict[str, str]:
        return {name: value for name, value in sample.labels.items() if name not in ("le", "quantile")}

    for labels, samples in groupby(metric.samples, series):
        of = list(samples)
        total = next(s.value for s in of if s.name.endswith("_sum"))
        buckets = [s for s in of if s.name.endswith("_bucket")]
        count = buckets[-1].value if buckets else next(s.value for s in of if s.name.endswith("_count"))
        document = [(s.labels["le"], int(s.value), None) for s in buckets]
        body = [_number(1, int(count)), _double(2, total), *_buckets(document)]
        quantiles = [s for s in of if "quantile" in s.labels]
        body += [_message(3, [_double(1, float(s.labels["quantile"])), _double(2, s.value)]) for s in quantiles]
        yield [*_labels(1, labels), _message(_HISTOGRAM if buckets else _VALUES["summary"], body)]


def _native(metric: Durations, values: Sequence[str], histogram: Histogram) -> list[bytes]:
    """A series with both kinds of buckets; Prometheus keeps the kind that it is set to keep."""
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
    """Runs of buckets as (distance from the run before, length), and what each bucket has more than the one before it."""
    spans: list[tuple[int, int]] = []
    kept: list[int] = []
    end = -FIRST_NATIVE  # where the run before ended: the first run's distance is its bucket's own number
    for place in [place for place, count in enumerate(counts) if count]:
        gap = place - end
        if spans and gap <= _GAP:
            spans[-1] = (spans[-1][0], spans[-1][1] + gap + 1)
            kept += [0] * gap
        else:
            spans.append((gap, 1))
        kept.append(counts[place])
        end = place + 1
    return spans, [count - before for before, count in zip([0, *kept], kept, strict=False)]


def _buckets(buckets: Iterable[tuple[str, int, Exemplar | None]]) -> Iterator[bytes]:
    for bound, count, exemplar in buckets:
        parts = [_number(1, count), _double(2, float(bound))]
        if exemplar is not None:
            parts.append(_message(3, _exemplar(exemplar)))
        yield _message(3, parts)


def _exemplar(example: Exemplar) -> list[bytes]:
    seconds = int(example.time_s)
    when = [_number(1, seconds), _number(2, int((example.time_s - seconds) * NS_PER_S))]
    labels = _labels(1, {"trace_id": example.trace_id})
    return [*labels, _double(2, example.value_ns / NS_PER_S), _message(3, when)]


def _labels(field: int, labels: Mapping[str, str]) -> list[bytes]:
    return [_message(field, [_text(1, name), _text(2, value)]) for name, value in labels.items()]


# The wire: a field's number with its type (0 varint, 1 eight bytes, 2 bytes with their length), then its value.


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
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


class MetricsPage:
    """The page that Prometheus scrapes.

    Args:
        sources: gives (model, version, source) of everything loaded.
        memory: of the GPUs; None: nobody tells.
        facts: of the server itself; None: nobody tells.
        gpus: what the driver tells of them; None: nobody asks it.
        triton: which metrics under Triton's names there are; None: the defaults.
    """

    def __init__(
        self,
        sources: ScrapedModels,
        memory: GpuMemory | None = None,
        facts: ServerFacts | None = None,
        gpus: GpuReader | None = None,
        triton: TritonMetrics | None = None,
    ) -> None:
        self._lock = threading.Lock()  # one scrape at a time
        self._registry = CollectorRegistry()
        self._registry.register(ModelCollector(sources, triton or TritonMetrics()))
        if memory is not None:
            self._registry.register(MemoryCollector(memory))
        if facts is not None:
            self._registry.register(ServerCollector(facts))
        if gpus is not None:
            self._registry.register(GpuCollector(gpus))
        self._registry.register(CpuCollector())
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body; takes milliseconds, so any thread but the event loop's should call it.

        Args:
            accept: the header of that name.
        """
        with self._lock:
            return expose(self._registry, accept)
