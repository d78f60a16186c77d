"""Exact totals, and histograms that agree with prometheus_client's own."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.request import BatchTimes, LevelLoad, ModelLoad
from headrace.core.tensor import ModelSpec
from headrace.observability.counters import BatchRecord, Recorder
from headrace.observability.histograms import BUCKETS_S, Histogram
from headrace.observability.metrics import MetricsPage
from headrace.runtimes.base import ProcessStatus
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as ReferenceHistogram

from tests.support.prometheus import read_page
from tests.support.waiting import on_threads


@given(st.lists(st.tuples(st.integers(0, 20 * NS_PER_S), st.integers(1, 5)), max_size=50))
def test_buckets_are_those_of_the_reference(values: list[tuple[int, int]]) -> None:
    reference = ReferenceHistogram("x", "x", buckets=BUCKETS_S, registry=CollectorRegistry())
    ours = Histogram()
    pending: list[tuple[int, int]] = []
    for index, (value_ns, weight) in enumerate(values):
        pending.append((value_ns, weight))
        for _ in range(weight):
            reference.observe(value_ns / NS_PER_S)
        if index % 7 == 0 or index == len(values) - 1:
            ours.observe(*zip(*pending, strict=True))
            pending.clear()
    samples = next(iter(reference.collect())).samples
    expected = [int(sample.value) for sample in samples if sample.name == "x_bucket"]
    assert ours.counts.cumsum().tolist() == expected
    assert ours.sum_ns == sum(value * weight for value, weight in values)


def _times() -> BatchTimes:
    return BatchTimes(taken_ns=100, assembled_ns=130, computed_ns=230, split_ns=235)


def test_totals_are_exact_from_many_threads() -> None:
    recorder = Recorder()

    def work(_: int) -> None:
        for _ in range(5000):
            recorder.record_batch(BatchRecord(3, 3, "full", _times(), [10, 20], [150, 160]))
            recorder.record_codec_times(4, 6)
            recorder.failure("deadline", 7)

    on_threads(work, range(4))
    totals = recorder.totals()
    assert (totals.requests, totals.rows, totals.executions) == (40_000, 60_000, 20_000)
    assert totals.queue_ns == 30 * 20_000
    assert totals.request_ns == 310 * 20_000
    assert totals.compute_ns == 100 * 40_000
    assert totals.failures == {"deadline": 20_000}
    assert totals.failure_ns == 140_000
    assert int(totals.phases["queue"].counts.sum()) == 40_000
    assert totals.phases["decode"].count == totals.phases["encode"].count == 20_000
    assert (totals.phases["decode"].sum_ns, totals.phases["encode"].sum_ns) == (20_000 * 4, 20_000 * 6)
    assert totals.sizes[3].count == 20_000


def test_without_histograms_the_counts_stay() -> None:
    recorder = Recorder(histograms=False)
    recorder.record_batch(BatchRecord(1, 1, "idle", _times(), [10], [150]))
    recorder.record_codec_times(4, 6)
    recorder.add_codec_times(bytes(16))
    assert recorder.totals().requests == 1
    assert not any(phase.count for phase in recorder.totals().phases.values())


def test_few_durations_are_sorted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting takes a microsecond for each duration, on the event loop: 2,048 of each phase at once took milliseconds."""
    pending: list[int] = []
    fold = Recorder._fold

    def count(recorder: Recorder) -> None:
        pending.append(len(recorder._queue_ns))
        fold(recorder)

    monkeypatch.setattr(Recorder, "_fold", count)
    recorder = Recorder(clock=lambda: NS_PER_S)
    for _ in range(3000):
        recorder.record_batch(BatchRecord(1, 1, "idle", BatchTimes(1, 2, 3, 4), [1], [2]))
    assert sum(pending) + len(recorder._queue_ns) == 3000
    assert max(pending) <= 512


NANOSECONDS = st.integers(0, 1 << 40)
BATCHES = st.tuples(
    st.tuples(NANOSECONDS, NANOSECONDS, NANOSECONDS),
    st.lists(st.tuples(NANOSECONDS, NANOSECONDS), min_size=1, max_size=5),
)


@given(st.lists(BATCHES, max_size=30), st.lists(st.tuples(NANOSECONDS, NANOSECONDS), max_size=30))
def test_every_phase_has_the_histogram_of_its_durations(
    batches: list[tuple[tuple[int, int, int], list[tuple[int, int]]]], responses: list[tuple[int, int]]
) -> None:
    recorder = Recorder(clock=lambda: NS_PER_S)
    expected = {phase: Histogram() for phase in ("queue", "total", "assemble", "compute", "split", "decode", "encode")}
    for phase_ns, requests in batches:
        queue_ns, total_ns = [list(times) for times in zip(*requests, strict=True)]
        ends = BatchTimes(0, *np.cumsum(phase_ns).tolist())
        recorder.record_batch(BatchRecord(len(requests), len(requests), "idle", ends, queue_ns, total_ns))
        expected["queue"].observe(queue_ns)
        expected["total"].observe(total_ns)
        for phase, time_ns in zip(("assemble", "compute", "split"), phase_ns, strict=True):
            expected[phase].observe([time_ns], [len(requests)])
    for index, (decode_ns, encode_ns) in enumerate(responses):
        if index % 2:
            recorder.record_codec_times(decode_ns, encode_ns)
        else:
            recorder.add_codec_times(array("q", (decode_ns, encode_ns)).tobytes())
        expected["decode"].observe([decode_ns])
        expected["encode"].observe([encode_ns])
    for phase, histogram in recorder.totals().phases.items():
        assert histogram.sum_ns == expected[phase].sum_ns, phase
        assert histogram.fine.tolist() == expected[phase].fine.tolist(), phase


ENGINE = {"engine.file": "model.0123456789ab.onnx", "engine.precision": "int8", "engine.below_accuracy_bar": True}


class _Profile:
    def summary(self) -> list[tuple[int, int, int]]:
        return [(1, 2_000, 3_500), (8, 9_000, 12_000)]


class _Source:
    alive, restarts, evicted = 2, 3, False
    policy = SimpleNamespace(instances=4, batch=SimpleNamespace(objective_ns=50_000_000))
    spec = ModelSpec("m", "1", "test", {}, {}, 8, ENGINE)
    process_status = ProcessStatus(False, "", 6)
    cache = None
    sequence_figures = None
    row_differences = 2
    calls = frozenset[str]()
    steps = dict
    latency_table = _Profile()

    def __init__(self) -> None:
        self.recorder = Recorder()

    def load(self) -> ModelLoad:
        levels = (LevelLoad(1, 4, 9, 30_000_000), LevelLoad(2, 0, 0, 70_000_000))
        return ModelLoad(4, 9, 5, 8, 2, 30_000_000, 20_000_000, 1500.0, 6, levels)


def test_the_page_is_valid_prometheus_text() -> None:
    source = _Source()
    source.recorder.record_batch(BatchRecord(3, 3, "full", _times(), [10_000_000, 20_000_000], [150, 160]))
    source.recorder.failure("overloaded", 9)
    _, body = MetricsPage(lambda: [("m", "1", source)]).render()
    samples = {
        (sample.name, sample.labels.get("le") or sample.labels.get("reason") or sample.labels.get("closed_by")): sample
        for family in read_page(body.decode())
        for sample in family.samples
    }
    assert samples["headrace_queue_seconds_bucket", "0.01"].value == 1
    assert samples["headrace_queue_seconds_bucket", "+Inf"].value == 2
    assert samples["headrace_queue_seconds_sum", None].value == 0.03
    assert samples["headrace_requests_total", None].value == 2
    assert samples["headrace_instance_restarts_total", None].value == 3
    assert samples["headrace_model_process_up", None].value == 0
    assert samples["headrace_model_process_restarts_total", None].value == 6
    assert samples["headrace_failures_total", "overloaded"].value == 1
    assert samples["headrace_batches_total", "full"].value == 1
    assert samples["headrace_batch_rows_bucket", "2.0"].value == 0
    assert samples["headrace_batch_rows_bucket", "4.0"].value == 1
    assert samples["headrace_queue_depth", None].value == 4
    assert samples["headrace_in_flight", None].value == 5
    assert samples["headrace_drain_seconds", None].value == 0.02
    assert samples["headrace_capacity_rows_per_second", None].value == 1500
    assert samples["headrace_objective_seconds", None].value == 0.05
    assert samples["headrace_late_total", None].value == 6
    assert samples["headrace_instances", None].value == 2
    assert samples["headrace_instances_wanted", None].value == 4
    profile = {
        (sample.labels["rows"], sample.labels["percentile"]): sample.value
        for family in read_page(body.decode())
        for sample in family.samples
        if sample.name == "headrace_profile_seconds"
    }
    assert profile == {("1", "50"): 2e-6, ("1", "95"): 3.5e-6, ("8", "50"): 9e-6, ("8", "95"): 12e-6}
    (engine,) = [sample for (name, _), sample in samples.items() if name == "headrace_engine_info"]
    engine_labels = {"precision": "int8", "file": "model.0123456789ab.onnx", "below_accuracy_bar": "true"}
    assert engine.labels == {"model": "m", "version": "1", **engine_labels}
    assert samples["nv_inference_count", None].value == 3
    assert samples["nv_inference_request_success", None].labels == {"model": "m", "version": "1"}
