"""Metrics under Triton's names: types, labels, units, and quantiles of the last minute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from headrace.core import errors
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.request import BatchTimes
from headrace.core.telemetry import TritonMetrics
from headrace.observability.counters import BatchRecord, Recorder
from headrace.observability.histograms import BUCKETS_S, Histogram, quantiles_ns
from headrace.observability.metrics_models import REASONS, CpuCollector, Row, TritonModels
from prometheus_client.metrics_core import Metric

SUMMARIES = ("request", "queue", "compute_input", "compute_infer", "compute_output")


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Page:
    """One version's recorder and its metrics under Triton's names, in virtual time."""

    def __init__(self, options: TritonMetrics | None = None) -> None:
        self.clock = Clock()
        self.recorder = Recorder()
        self._models = TritonModels(options or TritonMetrics(), self.clock)

    def count(self, total_ms: float, requests: int = 1) -> None:
        total_ns = int(total_ms * NS_PER_MS)
        times = BatchTimes(0, total_ns // 10, total_ns // 2, total_ns)
        self.recorder.record_batch(
            BatchRecord(requests, requests, "full", times, [total_ns // 4] * requests, [total_ns] * requests)
        )

    def scrape(self, after_s: float = 0) -> dict[tuple[str, ...], float]:
        self.clock.now_ns += int(after_s * NS_PER_S)
        families = list(self.families())
        return {
            (
                sample.name,
                *sorted(value for name, value in sample.labels.items() if name not in ("model", "version")),
            ): (sample.value)
            for family in families
            for sample in family.samples
        }

    def families(self) -> Iterator[Metric]:
        return self._models.collect([Row(("m", "1"), self.recorder, self.recorder.totals())])


def all_errors() -> Iterator[type[errors.HeadraceError]]:
    waiting = [errors.HeadraceError]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()


def test_every_reason_maps_to_a_triton_reason() -> None:
    page = Page()
    reasons = {kind.reason for kind in all_errors()}
    assert set(REASONS) <= reasons, "a reason that no error has"
    for reason in reasons:
        page.recorder.failure(reason, 1)
    scraped = {key[1]: value for key, value in page.scrape().items() if key[0] == "nv_inference_request_failure"}
    assert scraped == {"REJECTED": 5, "CANCELED": 1, "BACKEND": 2, "OTHER": len(reasons) - 8}


def test_counters_are_cumulative_microseconds() -> None:
    page = Page()
    page.count(2, requests=3)
    scraped = page.scrape()
    assert scraped["nv_inference_request_success",] == 3
    assert scraped["nv_inference_exec_count",] == 1
    assert scraped["nv_inference_request_duration_us",] == 6000
    assert scraped["nv_inference_queue_duration_us",] == 1500
    assert scraped["nv_inference_compute_infer_duration_us",] == 3 * 800


def test_summaries_agree_with_the_counters() -> None:
    page = Page()
    for total_ms in range(1, 101):
        page.count(total_ms)
    scraped = page.scrape()
    for name in SUMMARIES:
        assert scraped[f"nv_inference_{name}_summary_us_count",] == 100
        assert scraped[f"nv_inference_{name}_summary_us_sum",] == scraped[f"nv_inference_{name}_duration_us",]
        assert {key[1] for key in scraped if key[0] == f"nv_inference_{name}_summary_us"} == {
            "0.5", "0.9", "0.95", "0.99", "0.999",
        }  # fmt: skip
    assert scraped["nv_inference_request_summary_us", "0.5"] == pytest.approx(50_000, rel=0.09)
    assert scraped["nv_inference_request_summary_us", "0.99"] == pytest.approx(99_000, rel=0.09)
    assert scraped["nv_inference_queue_summary_us", "0.5"] == pytest.approx(12_500, rel=0.09)


def test_quantiles_are_those_of_the_last_minute() -> None:
    page = Page()
    page.count(100)
    median = ("nv_inference_request_summary_us", "0.5")
    assert page.scrape()[median] == pytest.approx(100_000, rel=0.09)
    for _ in range(3):
        assert page.scrape(15)[median] == pytest.approx(100_000, rel=0.09), "still within the minute"
    page.count(1, requests=10)
    assert page.scrape(15)[median] == pytest.approx(1000, rel=0.09)
    for _ in range(3):
        assert page.scrape(15)[median] == pytest.approx(1000, rel=0.09)
    scraped = page.scrape(30)
    assert math.isnan(scraped[median]), "nothing for a minute: Triton shows NaN too"
    assert scraped["nv_inference_request_summary_us_count",] == 11, "the count is that of the whole life"


def test_a_version_that_is_loaded_again_begins_anew() -> None:
    page = Page()
    page.count(100)
    page.scrape()
    page.recorder = Recorder()
    page.count(1)
    assert page.scrape(70)["nv_inference_request_summary_us", "0.5"] == pytest.approx(1000, rel=0.09)


def test_the_number_of_stored_snapshots_is_bounded() -> None:
    page = Page()
    for _ in range(500):
        page.scrape(0.5)
    (snapshots,) = page._models._windows._snapshots.values()
    assert len(snapshots) <= 14


@pytest.mark.parametrize("share", [0.001, 0.25, 0.5, 0.75, 0.999])
def test_an_estimate_is_within_nine_percent(share: float) -> None:
    values_ns = np.random.default_rng(1).lognormal(15, 1, 10_000).astype(np.int64)
    histogram = Histogram()
    histogram.observe(values_ns.tolist())
    assert quantiles_ns(histogram.fine, [share])[0] == pytest.approx(np.quantile(values_ns, share), rel=0.1)


def test_first_responses_are_counted_in_tritons_buckets() -> None:
    page = Page()
    for total_ms in (1, 100, 100.001, 2000, 4999, 6000):
        page.count(total_ms)
    scraped = {
        key[1]: value
        for key, value in page.scrape().items()
        if key[0] == "nv_inference_first_response_histogram_ms_bucket"
    }
    assert scraped == {"100.0": 2, "500.0": 3, "2000.0": 4, "5000.0": 5, "+Inf": 6}
    assert page.scrape()["nv_inference_first_response_histogram_ms_sum",] == pytest.approx(13_200.001)


def test_durations_are_counted_to_any_bound() -> None:
    histogram = Histogram()
    histogram.observe([int(bound_s * NS_PER_S) for bound_s in BUCKETS_S])
    for number, bound_s in enumerate(BUCKETS_S):
        assert histogram.count_to(int(bound_s * NS_PER_S)) == number + 1, "exact at bounds"
        assert histogram.count_to(int(bound_s * 1.2 * NS_PER_S)) == number + 1


@pytest.mark.parametrize(
    ("options", "absent", "present"),
    [
        (TritonMetrics(summary_latencies=False), "summary_us", "duration_us"),
        (TritonMetrics(counter_latencies=False), "duration_us", "summary_us"),
        (TritonMetrics(histogram_latencies=False), "first_response", "summary_us"),
    ],
)
def test_each_kind_can_be_switched_off(options: TritonMetrics, absent: str, present: str) -> None:
    names = [family.name for family in Page(options).families()]
    assert not any(absent in name for name in names)
    assert any(present in name for name in names)
    assert "nv_inference_request_success" in names


def test_quantiles_can_be_chosen() -> None:
    scraped = Page(TritonMetrics(summary_quantiles=(0.25,))).scrape()
    assert {key[1:] for key in scraped if key[0] == "nv_inference_queue_summary_us"} == {("0.25",)}


# --- The machine ------------------------------------------------------------------------------------------------------------


def write(proc: Path, busy: int, idle: int) -> None:
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 10 0 0 0 5 0\ncpu0 1 1 1 1\n")
    (proc / "meminfo").write_text(
        "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nBuffers: 1\n"
    )


def cpu(collector: CpuCollector) -> dict[str, float]:
    return {sample.name: sample.value for family in collector.collect() for sample in family.samples}


def test_processors_and_memory_of_the_machine(tmp_path: Path) -> None:
    clock = Clock()
    write(tmp_path, 100, 100)
    collector = CpuCollector(tmp_path, clock)
    memory = {"nv_cpu_memory_total_bytes": 1_024_000, "nv_cpu_memory_used_bytes": 614_400}
    assert cpu(collector) == {"nv_cpu_utilization": 0, **memory}
    write(tmp_path, 130, 190)
    clock.now_ns += 2 * NS_PER_S
    assert cpu(collector) == {"nv_cpu_utilization": 0.25, **memory}
    write(tmp_path, 131, 190)
    clock.now_ns += NS_PER_S // 10
    assert cpu(collector)["nv_cpu_utilization"] == 0.25, "two scrapers at once do not read a tick or two"


@pytest.mark.parametrize("text", [None, "", "cpu", "cpu a b c d e", "intr 1 2 3 4 5 6 7 8\n"])
def test_unknown_values_are_omitted(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
        (tmp_path / "meminfo").write_text(text)
    assert cpu(CpuCollector(tmp_path, Clock())) == {}


def test_this_machine_is_read() -> None:
    scraped = cpu(CpuCollector())
    assert 0 <= scraped["nv_cpu_utilization"] <= 1
    assert 0 < scraped["nv_cpu_memory_used_bytes"] < scraped["nv_cpu_memory_total_bytes"]


def test_a_model_may_have_its_own_buckets_of_the_first_response() -> None:
    recorder = Recorder()
    times = BatchTimes(0, 1, 2, 3)
    for total_ms in (5, 50):
        recorder.record_batch(BatchRecord(1, 1, "full", times, [0], [total_ms * NS_PER_MS]))
    rows = [Row(["m", "1"], recorder, recorder.totals(), first_response_ms=bounds) for bounds in ((), (1.5, 20.0))]
    (family,) = [each for each in TritonModels(TritonMetrics()).collect(rows) if "first_response" in each.name]
    found = [(each.labels["le"], each.value) for each in family.samples if each.name.endswith("_bucket")]
    assert found == [
        ("100.0", 2),
        ("500.0", 2),
        ("2000.0", 2),
        ("5000.0", 2),
        ("+Inf", 2),
        ("1.5", 0),
        ("20.0", 1),
        ("+Inf", 2),
    ]
