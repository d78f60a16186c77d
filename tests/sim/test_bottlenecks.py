"""Bottlenecks of loads with a known limit, replayed in virtual time by the server's data plane."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from headrace.core.clock import NS_PER_MS
from headrace.core.request import BatchTimes
from headrace.inference.scheduling.bottlenecks import Bottleneck, LoadSnapshot, find_bottlenecks, snapshot_figures
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy, QueueLimits
from headrace.inference.simulation import replay
from headrace.inference.simulation.replay import BatchHistory, BatchRecorder, SimulatedModel, StepLatency
from headrace.inference.simulation.replay import LatencyProfile as Steps
from headrace.inference.simulation.traces import ArrivalPattern, Workload, make_trace
from headrace.observability.counters import BatchRecord, Recorder
from headrace.observability.processor import ProcessorUse

MS = NS_PER_MS


class ListedRecorder(BatchRecorder):
    """Records totals as a server does, read at the end of virtual time."""

    made: list[ListedRecorder]
    now_ns = 0

    def __init__(self, batches: BatchHistory) -> None:
        super().__init__(batches)
        Recorder.__init__(self, True, lambda: self.now_ns)
        ListedRecorder.made = [self]

    def record_batch(self, batch: BatchRecord) -> None:
        super().record_batch(batch)
        Recorder.record_batch(self, batch)


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> object:
    """Replays a load for some seconds and gives the situation after it."""
    monkeypatch.setattr(replay, "BatchRecorder", ListedRecorder)

    def explain(
        rate_hz: float,
        policy: HandlePolicy,
        batch_us: float = 1000,
        row_us: float = 100,
        shapes: int = 1,
        **load: object,
    ) -> LoadSnapshot:
        trace = make_trace(Workload(rate_hz, 5.0, **load), ["m"], np.random.default_rng(1))  # type: ignore[arg-type]
        if shapes > 1:
            trace = dataclasses.replace(trace, shapes=np.arange(len(trace)) % shapes)
        done = replay.replay(trace, [SimulatedModel(policy, Steps(StepLatency.line(batch_us, row_us)))])
        (recorder,) = ListedRecorder.made
        recorder.now_ns = int(trace.times_ns[-1])
        for outcome in done.outcomes:
            if outcome != replay.ANSWERED:
                recorder.failure(outcome, MS)
        profile, most = LatencyTable(), policy.batch.max_rows
        for rows in {most, *(1 << power for power in range(most.bit_length()))}:
            profile.seed({rows: [int((batch_us + rows * row_us) * 1000)]})
        return LoadSnapshot(recorder.recent(), policy, profile, policy.instances)

    return explain


def first(now: LoadSnapshot) -> Bottleneck:
    return find_bottlenecks(now)[0]


def policy(max_rows: int = 16, delay_ms: float = 0, queue: int = 4096, **more: object) -> HandlePolicy:
    batch = BatchPolicy(max_rows, max_delay_ns=int(delay_ms * MS))
    handle = {name: more.pop(name) for name in list(more) if name == "instances"}
    return HandlePolicy(dataclasses.replace(batch, **more), QueueLimits(max_count=queue), **handle)  # type: ignore[arg-type]


def test_a_model_without_requests_is_idle() -> None:
    now = LoadSnapshot(Recorder().recent(), policy(), LatencyTable(), 1)
    assert [limit.kind for limit in find_bottlenecks(now)] == ["idle"]
    assert snapshot_figures(now)["requests_per_s"] == 0


def test_arrivals_too_sparse_to_batch(explained) -> None:  # type: ignore[no-untyped-def]
    now = explained(50, policy())
    limit = first(now)
    assert (limit.kind, limit.setting) == ("arrivals", "")
    assert "0.1 requests are in the server at a time" in limit.explanation
    assert limit.expected == f"up to {16 / 0.0026:,.0f} rows/s, now {now.per_s(now.recent.totals.rows):,.0f}"
    assert snapshot_figures(now)["busy"] == pytest.approx(0.055, rel=0.2)


def test_requests_that_are_not_merged(explained) -> None:  # type: ignore[no-untyped-def]
    now = explained(1500, policy(merge=False))
    assert [limit.kind for limit in find_bottlenecks(now)] == ["unmerged"]
    assert first(now).setting == "dynamic_batching {}"
    gain = (16 / 2.6) / (1 / 1.1)
    assert first(now).expected.startswith(
        f"{gain:.1f} times the throughput: 6,154 rows/s in batches of 16, 909 at present"
    )


def test_a_full_queue_is_reported_with_its_cause(explained) -> None:  # type: ignore[no-untyped-def]
    now = explained(3000, policy(merge=False, queue=50))
    assert [limit.kind for limit in find_bottlenecks(now)] == ["overloaded", "unmerged"]
    assert "the capacity is 6,154 rows/s, in batches of 16" in first(now).explanation


def test_shapes_split_batches(explained) -> None:  # type: ignore[no-untyped-def]
    now = explained(6000, policy(queue=16), shapes=8)
    result = {limit.kind: limit for limit in find_bottlenecks(now)}
    assert list(result)[:2] == ["overloaded", "shapes"]
    assert "had another shape than the one before" in result["shapes"].explanation


def test_a_preferred_size_that_is_too_small(explained) -> None:  # type: ignore[no-untyped-def]
    result = {limit.kind: limit for limit in find_bottlenecks(explained(6000, policy(preferred_rows=(4,), queue=200)))}
    assert result["preferred"].cure == "prefer 16 rows, or remove the preferred sizes"
    assert "in batches of 16, 2,857 at present" in result["preferred"].expected


def test_batches_that_close_too_soon(explained) -> None:  # type: ignore[no-untyped-def]
    now = explained(3500, policy())
    limit = first(now)
    assert (limit.kind, limit.setting) == ("delay_too_short", "dynamic_batching.max_queue_delay_microseconds")
    assert now.utilization > 0.9
    assert now.mean_rows < 8


def test_full_batches_on_a_busy_instance(explained) -> None:  # type: ignore[no-untyped-def]
    result = {limit.kind: limit for limit in find_bottlenecks(explained(8000, policy(queue=300)))}
    assert (next(iter(result)), result["compute"].setting) == ("overloaded", "max_batch_size")
    assert result["compute"].cure == "allow 32 rows in a batch"
    # Where a row costs as much in any batch, size is no cure.
    result = {
        limit.kind: limit for limit in find_bottlenecks(explained(2000, policy(queue=300), batch_us=10, row_us=1000))
    }
    assert result["compute"].setting == "instance_group"


def test_instances_that_slow_each_other_down_are_reported(explained) -> None:  # type: ignore[no-untyped-def]
    now = explained(6000, policy(queue=300, instances=2), batch_us=10, row_us=1000)
    now.latency_table.seed({rows: [(10 + rows * 1900) * 1000] for rows in (1, 2, 4, 8, 16)}, 2)
    (limit,) = [limit for limit in find_bottlenecks(now) if limit.kind == "compute"]
    assert "2 instances have 1.1 times the throughput of one" in limit.explanation
    assert limit.cure.startswith("use one instance")


def test_a_delay_without_other_requests(explained) -> None:  # type: ignore[no-untyped-def]
    limit = first(explained(20, policy(delay_ms=10)))
    assert (limit.kind, limit.cure) == ("delay_too_long", "shorten the delay")
    assert "too sparse for a delay of 10 ms" in limit.explanation
    assert limit.expected.startswith("responses 9.")


def test_bursts_wait_though_there_is_time(explained) -> None:  # type: ignore[no-untyped-def]
    now = explained(250, policy(max_rows=1), shape=ArrivalPattern("bursty", 10.0, 0.05, 0.3))
    assert now.utilization < 0.6
    assert (first(now).kind, first(now).cure) == ("queue", "try a second instance")


def test_an_objective_that_is_missed(explained) -> None:  # type: ignore[no-untyped-def]
    now = explained(50, policy())
    late = dataclasses.replace(now, policy=policy(objective_ns=MS // 2))
    assert (
        "the objective 0.5 ms: a single row takes 1.1 ms"
        in {limit.kind: limit for limit in find_bottlenecks(late)}["late"].explanation
    )
    met = dataclasses.replace(now, policy=policy(objective_ns=10 * MS))
    assert [limit.kind for limit in find_bottlenecks(met)] == ["arrivals"]


def batches(
    rows: int,
    reason: str,
    assemble_ms: float = 0,
    queue_ms: float = 0,
    count: int = 900,
    in_flight: tuple[int, ...] = (0,),
) -> Recorder:
    """A second of batches of 1 ms each."""
    recorder = Recorder(clock=lambda: 101 * 1000 * MS)
    for number in range(count):
        end_ns = 100_000 * MS + number * MS
        times = BatchTimes(end_ns - int((1 + assemble_ms) * MS), end_ns - MS, end_ns, end_ns)
        wait_ns = int(queue_ms * MS)
        total_ns = [wait_ns + end_ns - times.taken_ns]
        present = in_flight[number % len(in_flight)]
        recorder.record_batch(BatchRecord(rows, rows, reason, times, [wait_ns], total_ns, MS, in_flight=present))
    return recorder


def test_padding_copies_and_quotas() -> None:
    profile = LatencyTable()
    profile.seed({1: [MS], 5: [MS], 8: [MS]})
    profile.buckets = (1, 2, 4, 8)
    padded = LoadSnapshot(batches(5, "full").recent(), policy(8), profile, 1)
    limit = {limit.kind: limit for limit in find_bottlenecks(padded)}["padding"]
    assert (limit.expected, "38 % of the rows" in limit.explanation) == ("up to 1.6 times the throughput", True)
    copied = LoadSnapshot(batches(4, "idle", assemble_ms=2, count=300).recent(), policy(), profile, 1)
    assert first(copied).kind == "copies"
    recorder = batches(4, "idle", count=100)
    for _ in range(20):
        recorder.failure("quota", 1)
    limit = first(LoadSnapshot(recorder.recent(), policy(), profile, 1))
    assert (limit.kind, limit.setting) == ("quota", "rate_limits")
    assert limit.explanation == "17 % of the requests were rejected because their client exceeded its quota"


def test_an_objective_that_limits_the_batch_size() -> None:
    profile = LatencyTable()
    profile.seed({1: [MS], 2: [MS], 32: [4 * MS]})
    now = LoadSnapshot(batches(2, "deadline", count=960).recent(), policy(32, objective_ns=5 * MS), profile, 1)
    limit = {limit.kind: limit for limit in find_bottlenecks(now)}["promise"]
    assert (limit.setting, limit.cure) == ("slo.p99_ms", "raise the objective to 8 ms or more")
    assert limit.expected.startswith("4.0 times the throughput")


def test_every_load_has_an_explanation() -> None:
    now = LoadSnapshot(batches(8, "full", queue_ms=0.1, count=600).recent(), policy(8), LatencyTable(), 1)
    assert find_bottlenecks(now)
    assert snapshot_figures(now)["rows_per_batch"] == 8


def test_an_objective_causes_refusals_with_an_explanation(explained) -> None:  # type: ignore[no-untyped-def]
    now = explained(12_000, policy(objective_ns=20 * MS, queue=100_000))
    result = {limit.kind: limit for limit in find_bottlenecks(now)}
    assert next(iter(result)) == "overloaded"
    assert "would_miss" in result["overloaded"].explanation
    assert "late" not in result, "what is answered is in time"
    assert now.utilization > 0.9
    assert result.keys() & {"compute", "promise"}


def test_evicted_models_and_dead_instances_come_first() -> None:
    recent = batches(8, "full", count=500).recent()
    assert first(LoadSnapshot(recent, policy(instances=2), LatencyTable(), 0, evicted=True)).kind == "parked"
    dead = first(LoadSnapshot(recent, policy(instances=2), LatencyTable(), 1))
    assert (dead.kind, "1 of 2 instances are running" in dead.explanation) == ("instances", True)


def test_late_threads_are_distinguished_from_bursts() -> None:
    profile = LatencyTable()
    profile.seed({1: [MS]})
    limit = first(LoadSnapshot(batches(1, "idle", queue_ms=5, count=100).recent(), policy(), profile, 1))
    assert (limit.kind, "a batch takes 1 ms" in limit.explanation) == ("processor", True)
    assert limit.expected == "responses up to 4 ms sooner on average"
    for changed in (policy(merge=False), policy(max_rows=1)):  # one waits for the other
        assert (
            first(LoadSnapshot(batches(1, "idle", queue_ms=5, count=100).recent(), changed, profile, 1)).kind == "queue"
        )


def test_a_full_processor_comes_first_and_more_instances_are_not_advised() -> None:
    profile = LatencyTable()
    profile.seed({1: [MS]})
    for count in (300, 900):  # idle and busy instances
        recent = batches(1, "full", queue_ms=5, count=count, in_flight=(8, 7, 8)).recent()
        now = LoadSnapshot(recent, policy(max_rows=1), profile, 1, processor=ProcessorUse(2.0, 1.96, 0.7))
        limits = find_bottlenecks(now)
        assert limits[0].kind == "processor"
        assert limits[0].explanation == (
            "the processor is full: 2.0 of 2 cores are busy, 0.7 with the server; a closed loop of 8 requests keeps it so, "
            "and would at any speed"
        )
        assert "more instances do not help" in limits[0].cure
        assert not [each for each in limits if "bursts" in each.explanation or each.setting == "instance_group"]
        free = find_bottlenecks(dataclasses.replace(now, processor=ProcessorUse(2.0, 1.2, 0.7)))
        assert "processor" not in {each.kind for each in free}
    figures = snapshot_figures(now)
    assert (figures["cores"], figures["busy_cores"], figures["server_cores"], figures["closed_loop"]) == (
        2,
        1.96,
        0.7,
        7.7,
    )


def test_a_closed_loop_is_distinguished_from_bursts() -> None:
    profile = LatencyTable()
    profile.seed({1: [MS]})
    for in_flight, kind in (((4, 3, 4), "closed_loop"), ((1, 9, 5, 2), "queue"), ((1,), "queue")):
        recent = batches(1, "full", queue_ms=5, count=300, in_flight=in_flight).recent()
        limit = first(LoadSnapshot(recent, policy(max_rows=1), profile, 1))
        assert (limit.kind, "bursts" in limit.explanation) == (kind, kind == "queue")
        assert (limit.setting == "instance_group") == (kind == "queue")
