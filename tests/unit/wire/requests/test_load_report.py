"""Load of the whole server, and the forms of load reports."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.request import ModelLoad
from headrace.wire.requests.load_report import FRESH_NS, WINDOW_NS, LoadHeaders, LoadMeter, LoadReports, ServerFigures

from tests.support.orca import orca_message

LOAD = ModelLoad(3, 5, 4, 2, 1, 1_500, 2_500_000, 100.0, 0, ())
WITHOUT_QUEUE = LOAD._replace(drain_ns=0)
FIGURES = ServerFigures(1.25, 12.5, 0.5)


class Recorder:
    def __init__(self) -> None:
        self.rows = self.busy_ns = 0

    def work(self) -> tuple[int, int]:
        return self.rows, self.busy_ns


@dataclass(eq=False)
class Version:
    """A served version with one instance that computes 100 rows a second."""

    serial: int = 1
    load_figures: ModelLoad = WITHOUT_QUEUE
    calls: frozenset[str] = frozenset()
    in_flight: int = 0
    recorder: Any = field(default_factory=Recorder)
    loads: int = 0

    def load(self, by_level: bool = True) -> ModelLoad:
        self.loads += 1
        return self.load_figures

    def queue_load(self, _now_ns: int) -> tuple[int, int]:
        load = self.load()
        return load.depth, load.wait_ns


class Measured:
    """A meter with versions, counts and a clock of the test."""

    def __init__(self, *versions: Version) -> None:
        self.versions = list(versions)
        self.counts = [0, 0]
        self.now_ns = NS_PER_S
        self.meter = LoadMeter(
            lambda: [("m", "1", version) for version in self.versions], self.counts, lambda: self.now_ns
        )

    def after(self, seconds: float) -> ServerFigures:
        self.now_ns += int(seconds * NS_PER_S)
        return self.meter.figures(self.now_ns)


def test_work_without_a_queue_is_a_share_of_the_capacity() -> None:
    version = Version()
    measured = Measured(version)
    version.recorder.rows, measured.counts[:] = 50, [25, 5]
    figures = measured.after(1)
    assert figures == pytest.approx((0.5, 25, 5))
    # Requests over the utilisation: two rows a request, 100 rows a second.
    assert figures.requests_hz / figures.utilization == pytest.approx(50)


def test_two_instances_do_twice_the_work() -> None:
    version = Version(load_figures=WITHOUT_QUEUE._replace(instances=2, rows_hz=200.0))
    measured = Measured(version)
    version.recorder.rows = 100
    assert measured.after(1).utilization == pytest.approx(0.5)


def test_requests_that_wait_count_by_the_time_that_they_take() -> None:
    version = Version(in_flight=4, load_figures=LOAD._replace(drain_ns=3 * NS_PER_S))
    measured = Measured(version)
    version.recorder.rows = 100
    assert measured.after(1).utilization == pytest.approx(1 + 3 * NS_PER_S / WINDOW_NS)


def test_models_add_up_and_pipelines_do_not_count_twice() -> None:
    first, second, pipeline = Version(1), Version(2), Version(3, calls=frozenset({"m"}))
    measured = Measured(first, second, pipeline)
    for version in (first, second, pipeline):
        version.recorder.rows = 30
    assert measured.after(1).utilization == pytest.approx(0.6)
    assert pipeline.loads == 0


def test_a_model_without_a_latency_table_counts_by_its_busy_time() -> None:
    version = Version(load_figures=LOAD._replace(rows_hz=0.0, drain_ns=0, instances=2))
    measured = Measured(version)
    version.recorder.rows, version.recorder.busy_ns = 10, NS_PER_S
    assert measured.after(1).utilization == pytest.approx(0.5)


def test_rates_are_those_of_the_last_two_seconds() -> None:
    version = Version()
    measured = Measured(version)
    for second in range(10):
        version.recorder.rows += 100 if second < 5 else 20
        measured.counts[0] += 10 if second < 5 else 2
        figures = measured.after(1)
    assert figures == pytest.approx((0.2, 2, 0))


def test_figures_are_cached_and_idle_versions_are_skipped() -> None:
    version = Version()
    measured = Measured(version)
    version.recorder.rows = 50
    first = measured.after(1)
    version.recorder.rows = 90
    assert measured.after(FRESH_NS / NS_PER_S / 2) is first
    assert measured.after(1) != first
    loads = version.loads
    for _ in range(20):
        measured.after(1)
    assert (version.loads, measured.after(1).utilization) == (loads, 0)


def test_a_sample_of_many_versions_takes_a_small_share_of_the_time() -> None:
    measured = Measured()

    def slow() -> list[tuple[str, str, Version]]:
        measured.now_ns += 20 * NS_PER_MS
        return []

    meter = LoadMeter(slow, measured.counts, lambda: measured.now_ns)
    meter.figures(measured.now_ns)
    sampled_ns = measured.now_ns
    for _ in range(90):
        measured.now_ns += 10 * NS_PER_MS
        meter.figures(measured.now_ns)
    assert measured.now_ns - sampled_ns == 900 * NS_PER_MS  # no other sample


def reports(when: Any = "always") -> LoadReports:
    return LoadReports(when, lambda _now_ns: FIGURES)


def test_reports_as_text_and_json() -> None:
    ((name, text),) = reports().headers(LOAD, 0, "text")
    assert (name, text.decode()) == (
        b"endpoint-load-metrics",
        "TEXT named_metrics.queue_depth=3, named_metrics.queue_rows=5, named_metrics.in_flight=4, "
        "named_metrics.running_rows=2, named_metrics.predicted_wait_us=1, named_metrics.drain_us=2500, "
        "application_utilization=1.25, rps_fractional=12.5, eps=0.5",
    )
    ((_, text),) = reports().headers(LOAD, 0, "json")
    assert text.decode() == (
        'JSON {"named_metrics":{"queue_depth":3,"queue_rows":5,"in_flight":4,"running_rows":2,"predicted_wait_us":1,'
        '"drain_us":2500},"application_utilization":1.25,"rps_fractional":12.5,"eps":0.5}'
    )
    assert reports().headers(LOAD, 0, "other") == []
    ((_, text),) = LoadReports().headers(LOAD, 0, "text")
    assert b"application_utilization" not in text


def test_the_serialized_report_is_the_protobuf_message() -> None:
    message = orca_message().FromString(reports().message(LOAD, 0))
    assert (message.application_utilization, message.rps_fractional, message.eps) == FIGURES
    assert (message.cpu_utilization, message.mem_utilization) == (0, 0)
    assert message.named_metrics == {
        "queue_depth": 3,
        "queue_rows": 5,
        "in_flight": 4,
        "running_rows": 2,
        "predicted_wait_us": 1,
        "drain_us": 2500,
    }
    server = orca_message().FromString(reports().message(None, 0))
    assert (server.application_utilization, dict(server.named_metrics)) == (1.25, {})
    # The smallest serialization: a field is a tag of one byte and a double.
    assert reports().message(None, 0)[:9] == b"\x49" + struct.pack("<d", 1.25)


def test_responses_without_a_request_for_it_have_a_report_with_always_only() -> None:
    version = Version()
    always, on_request = LoadHeaders(reports()), LoadHeaders(reports("on-request"))
    names = [name for name, _ in always.at(1, version).pairs]
    assert names == [b"headrace-queue-depth", b"headrace-predicted-wait-us", b"endpoint-load-metrics"]
    assert always.brief == on_request.at(1, version)
    loads = version.loads
    always.at(FRESH_NS, version)
    assert version.loads == loads
    always.at(FRESH_NS + 1, version)
    assert version.loads == loads + 1


def test_the_message_of_a_version_is_kept_for_a_while() -> None:
    version, kept = Version(), reports()
    first = kept.cached_message(version, 1)
    assert kept.cached_message(version, FRESH_NS) is first
    assert version.loads == 1
    kept.cached_message(version, FRESH_NS + 1)
    assert version.loads == 2
