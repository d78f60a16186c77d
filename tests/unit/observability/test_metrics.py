"""Formats of the metrics page: an independent parser reads each, and all have the same values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from headrace.core.clock import NS_PER_S
from headrace.core.request import BatchTimes, ModelLoad
from headrace.core.tensor import ModelSpec
from headrace.observability.counters import BatchRecord, Recorder
from headrace.observability.histograms import FIRST_NATIVE
from headrace.observability.metrics import OPENMETRICS, PROTOBUF, MetricsPage, expose
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from tests.support.prometheus import read_page

# `Accept` headers of Prometheus without and with native histograms.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_NATIVE = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,"
    "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
TRACE = "0123456789abcdef0123456789abcdef"

# Of Prometheus' client_model, metrics.proto: field numbers and types, ? for optional, * for repeated, S for signed.
MESSAGES = {
    "LabelPair": "name:1:string? value:2:string?",
    "Gauge": "value:1:double?",
    "Stamp": "seconds:1:int64? nanos:2:int32?",
    "Exemplar": "label:1:LabelPair* value:2:double? timestamp:3:Stamp?",
    "Counter": "value:1:double? exemplar:2:Exemplar?",
    "Quantile": "quantile:1:double? value:2:double?",
    "Summary": "sample_count:1:uint64? sample_sum:2:double? quantile:3:Quantile*",
    "Untyped": "value:1:double?",
    "Bucket": "cumulative_count:1:uint64? upper_bound:2:double? exemplar:3:Exemplar?",
    "BucketSpan": "offset:1:sint32? length:2:uint32?",
    "Histogram": "sample_count:1:uint64? sample_sum:2:double? bucket:3:Bucket* schema:5:sint32? zero_threshold:6:double? "
    "zero_count:7:uint64? positive_span:12:BucketSpan* positive_delta:13:sint64*",
    "Metric": "label:1:LabelPair* gauge:2:Gauge? counter:3:Counter? summary:4:Summary? untyped:5:Untyped? "
    "histogram:7:Histogram?",
    "MetricFamily": "name:1:string? help:2:string? type:3:int32? metric:4:Metric*",
}


def family_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", package="m", syntax="proto2")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            field, number, kind = text.split(":")
            repeated, kind = kind.endswith("*"), kind.rstrip("?*")
            added = message.field.add(name=field, number=int(number), label=3 if repeated else 1)
            if kind in MESSAGES:
                added.type, added.type_name = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, f".m.{kind}"
            else:
                added.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("m.MetricFamily"))


MetricFamily = family_class()


def read_protobuf(body: bytes) -> Iterator[Any]:
    at = 0
    while at < len(body):
        size, shift = 0, 0
        while True:
            byte = body[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        yield MetricFamily.FromString(body[at : at + size])
        at += size


def native_counts(histogram: Any) -> dict[int, int]:
    """Buckets by number, as Prometheus reads spans and deltas."""
    bucket_counts: dict[int, int] = {}
    number, count, deltas = 0, 0, iter(histogram.positive_delta)
    for span in histogram.positive_span:
        number += span.offset
        for _ in range(span.length):
            count += next(deltas)
            bucket_counts[number] = count
            number += 1
    assert next(deltas, None) is None
    return {number: count for number, count in bucket_counts.items() if count}


def page(totals_ns: list[int]) -> MetricsPage:
    recorders = []
    for _ in range(2):
        recorder = Recorder()
        recorder.record_batch(
            BatchRecord(
                len(totals_ns), len(totals_ns), "full", BatchTimes(0, 10, 20, 30), [5] * len(totals_ns), totals_ns
            )
        )
        recorder.failure("deadline", 7)
        recorders.append(recorder)
    recorders[0].add_exemplar(totals_ns[0], TRACE)
    sources = [
        SimpleNamespace(
            recorder=recorder, load=lambda: ModelLoad(1, 1, 2, 0, 1, 0, 0, 0.0, 0, ()),
            alive=1, restarts=0, evicted=False, process_status=None, cache=None, steps=dict,
            policy=SimpleNamespace(instances=1, batch=SimpleNamespace(objective_ns=0)),
            latency_table=SimpleNamespace(summary=list),
            sequence_figures=None, row_differences=None,
            calls=frozenset(),
            spec=ModelSpec(name, "1", "test", {}, {}, 8),
        )
        for name, recorder in zip(('hostile"\n\\näme', "second"), recorders, strict=True)
    ]  # fmt: skip
    return MetricsPage(lambda: [(source.spec.name, "1", source) for source in sources])


TOTALS_NS = [300, NS_PER_S // 1000, NS_PER_S // 1000 + 1, NS_PER_S // 4, 3 * NS_PER_S, 5 * NS_PER_S, 900_000 * NS_PER_S]


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text/plain"),
        (PROMETHEUS, OPENMETRICS),
        (PROMETHEUS_NATIVE, PROTOBUF),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=text", "text/plain"),
        ("application/openmetrics-text;version=2.0.0", "text/plain"),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.5", "text/plain"),
        (";;;q=,=,,application/openmetrics-text;q=x", "text/plain"),
    ],
)
def test_the_form_is_the_one_that_is_liked_best(accept: str, form: str) -> None:
    assert page(TOTALS_NS).render(accept)[0].startswith(form)


def is_ours(name: str) -> bool:
    """Samples from recorders; those of the machine change between scrapes."""
    return name.startswith(("headrace", "nv_")) and not name.startswith("nv_cpu")


def test_all_formats_agree() -> None:
    created = page(TOTALS_NS)

    def samples(families: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        ours = [s for family in families for s in family.samples if is_ours(s.name)]
        return {(s.name, frozenset(s.labels.items())): s.value for s in ours}

    text = samples(read_page(created.render()[1].decode()))
    assert samples(read_openmetrics(created.render(PROMETHEUS)[1].decode())) == text
    decoded: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in read_protobuf(created.render(PROMETHEUS_NATIVE)[1]):
        if not is_ours(family.name):
            continue
        for metric in family.metric:
            labels = {pair.name: pair.value for pair in metric.label}
            key = frozenset(labels.items())
            kind = ("counter", "gauge", "summary", "untyped", "histogram")[family.type]
            assert metric.HasField(kind)
            if kind == "histogram":
                decoded[family.name + "_sum", key] = metric.histogram.sample_sum
                decoded[family.name + "_count", key] = metric.histogram.sample_count
                for bucket in metric.histogram.bucket:
                    bound = "+Inf" if bucket.upper_bound == float("inf") else str(bucket.upper_bound)
                    key_of = frozenset({**labels, "le": bound}.items())
                    decoded[family.name + "_bucket", key_of] = bucket.cumulative_count
            elif kind == "summary":
                decoded[family.name + "_sum", key] = metric.summary.sample_sum
                decoded[family.name + "_count", key] = metric.summary.sample_count
                for one in metric.summary.quantile:
                    decoded[family.name, frozenset({**labels, "quantile": f"{one.quantile:g}"}.items())] = one.value
            else:
                decoded[family.name, key] = getattr(metric, kind).value
    assert decoded == text


def test_text_matches_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte; but for counters without the suffix, which it has no type for in the old text."""
    registry = CollectorRegistry()
    monkeypatch.setattr(registry, "collect", lambda: families)
    gauge = GaugeMetricFamily("hostile", 'a "text"\n\\', labels=["b", "a"])
    for value in (float("nan"), float("inf"), -float("inf"), 0, 1e300, 123456789, 0.1, True):
        gauge.add_metric([f'"\n\\ä{value}', ""], value)
    created = page(TOTALS_NS)
    families = [gauge, *(family for family in created._registry.collect() if is_ours(family.name))]
    assert any(sample.exemplar for family in families for sample in family.samples)
    assert expose(registry, PROMETHEUS)[1] == generate_openmetrics(registry)  # type: ignore[no-untyped-call]
    expected = re.sub(rb"(?m)^(# TYPE nv_\w+) untyped$", rb"\1 counter", generate_latest(registry))
    assert expose(registry, "")[1] == expected


def test_counters_without_the_suffix_are_typed_where_the_format_allows_it() -> None:
    created = page(TOTALS_NS)
    assert "\n# TYPE nv_inference_count counter\n" in created.render()[1].decode()
    assert "untyped" not in created.render()[1].decode()
    assert "\n# TYPE nv_inference_count unknown\n" in created.render(PROMETHEUS)[1].decode()
    families = {family.name: family for family in read_protobuf(created.render(PROMETHEUS_NATIVE)[1])}
    assert families["nv_inference_request_failure"].type == 0
    assert families["nv_inference_request_summary_us"].type == 2


def test_native_buckets_match_the_prometheus_schema() -> None:
    families = {family.name: family for family in read_protobuf(page(TOTALS_NS).render(PROMETHEUS_NATIVE)[1])}
    histogram = families["headrace_total_seconds"].metric[0].histogram
    assert (histogram.schema, histogram.zero_threshold, histogram.zero_count) == (3, 2.0**-20, 1)
    counts = native_counts(histogram)
    assert sum(counts.values()) + histogram.zero_count == histogram.sample_count == len(TOTALS_NS)
    for value_s in (0.001, 0.25, 3, 5):  # bucket i ends at 2 ** (i / 8)
        assert any(2 ** ((i - 1) / 8) < value_s <= 2 ** (i / 8) for i in counts), value_s
    assert counts[-16] == 1, "a quarter of a second ends bucket -16"
    assert min(counts) >= FIRST_NATIVE
    empty = families["headrace_batch_rows"].metric[0].histogram
    assert not empty.HasField("schema"), "rows are no durations"


def test_an_idle_histogram_is_native_all_the_same() -> None:
    recorder_page = page([1])
    (family,) = [
        f for f in read_protobuf(recorder_page.render(PROMETHEUS_NATIVE)[1]) if f.name == "headrace_total_seconds"
    ]
    histogram = family.metric[0].histogram
    assert histogram.zero_threshold > 0
    assert native_counts(histogram) == {}


def test_a_traced_request_is_an_example_of_its_bucket() -> None:
    created = page([NS_PER_S // 5])
    (line,) = [line for line in created.render(PROMETHEUS)[1].decode().splitlines() if TRACE in line]
    assert line.startswith("headrace_total_seconds_bucket{")
    assert 'le="0.25"' in line
    (family,) = [f for f in read_protobuf(created.render(PROMETHEUS_NATIVE)[1]) if f.name == "headrace_total_seconds"]
    (bucket,) = [b for b in family.metric[0].histogram.bucket if b.HasField("exemplar")]
    assert (bucket.upper_bound, bucket.exemplar.value) == (0.25, 0.2)
    assert [(pair.name, pair.value) for pair in bucket.exemplar.label] == [("trace_id", TRACE)]
    assert bucket.exemplar.timestamp.seconds > 1_700_000_000
    assert TRACE not in created.render()[1].decode(), "the old text has no place for examples"
