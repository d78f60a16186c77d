"""The simulator against queueing theory, and against the schedulers in virtual time that tests/sim drives by itself.

Formulas: Kleinrock, Queueing Systems, volume 1 (M/M/1: 3.2; M/M/m and Erlang's C: 3.5; Pollaczek and Khinchine's mean: 5.6).
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from headrace.core.request import InferResponse
from headrace.inference.scheduling import latency_table as dataplane
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy, LevelPolicy, QueueLimits
from headrace.inference.simulation.replay import LatencyProfile, Replay, SimulatedModel, StepLatency, replay
from headrace.inference.simulation.report import report
from headrace.inference.simulation.traces import Trace, Workload, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim import test_overlapped_time, test_virtual_time
from tests.support.examples import MORE_EXAMPLES, examples
from tests.support.virtual_overlapped import Cost, CostModel

MS = 1_000_000
ENDLESS = QueueLimits(max_count=1 << 30)


def poisson_trace(rate_hz: float, seconds: float, seed: int = 1, models: int = 1, **more: object) -> Trace:
    load = Workload(rate_hz, seconds, **more)  # type: ignore[arg-type]
    return make_trace(load, [f"m{number}" for number in range(models)], np.random.default_rng(seed))


def model(
    max_rows: int = 1, instances: int = 1, profile: LatencyProfile | None = None, **more: object
) -> SimulatedModel:
    """By default it takes 1 ms, whatever comes."""
    policy = HandlePolicy(BatchPolicy(max_rows), ENDLESS, instances)
    return SimulatedModel(policy, profile or LatencyProfile(StepLatency.line(1000)), **more)  # type: ignore[arg-type]


def mean_wait_ms(done: Replay, service_ms: float = 1.0) -> float:
    return float(np.mean(done.latency_ns)) / MS - service_ms


# Queueing theory


# The mean is a function of the load times one of the variation: each value of both is there.
@pytest.mark.parametrize(
    ("variation", "load"),
    [
        (0.0, 0.3),
        (1.0, 0.3),
        *(pytest.param(*values, marks=MORE_EXAMPLES) for values in ((0.5, 0.6), (0.0, 0.8), (1.0, 0.8))),
    ],
)
def test_mean_waits_are_those_of_pollaczek_and_khinchine(load: float, variation: float) -> None:
    trace = poisson_trace(load * 1000, 60)
    done = replay(trace, [model(profile=LatencyProfile(StepLatency.line(1000), variation=variation))], seed=2)
    assert mean_wait_ms(done) == pytest.approx(load * (1 + variation**2) / (2 * (1 - load)), rel=0.06)


@pytest.mark.slow
def test_the_percentiles_of_m_m_1_are_exponential() -> None:
    trace = poisson_trace(600, 100)
    done = replay(trace, [model(profile=LatencyProfile(StepLatency.line(1000), variation=1.0))], seed=3)
    result = report(done, [None]).total
    mean_us = 1e6 / (1000 - 600)
    assert result.mean_us == pytest.approx(mean_us, rel=0.04)
    expected = [-math.log(1 - percentile) * mean_us for percentile in (0.5, 0.9, 0.99)]
    assert result.percentiles_us[:3] == pytest.approx(expected, rel=0.06)


@pytest.mark.slow
def test_several_instances_match_the_erlang_formula() -> None:
    servers, load = 3, 2.4
    done = replay(
        poisson_trace(load * 1000, 50),
        [model(1, servers, LatencyProfile(StepLatency.line(1000), variation=1.0))],
        seed=4,
    )
    busy = load**servers / math.factorial(servers) * servers / (servers - load)
    erlang_c = busy / (sum(load**k / math.factorial(k) for k in range(servers)) + busy)
    assert mean_wait_ms(done) == pytest.approx(erlang_c / (servers - load), rel=0.08)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_rows", [1, 16])
def test_a_saturated_batcher_reaches_the_throughput_of_its_device(depth: int, max_rows: int) -> None:
    batch_us, row_us = 400, 100
    capacity_hz = max_rows / (batch_us + row_us * max_rows) * 1e6
    policy = HandlePolicy(BatchPolicy(max_rows), QueueLimits(max_count=256))
    trace = poisson_trace(2 * capacity_hz, 4)
    done = replay(trace, [SimulatedModel(policy, LatencyProfile(StepLatency.line(batch_us, row_us)), depth)])
    result = report(done, [1000.0], warm_up_ns=1000 * MS)
    assert result.total.throughput_hz == pytest.approx(capacity_hz, rel=0.01)
    assert result.total.mean_rows == pytest.approx(max_rows, rel=0.001)
    assert result.total.errors == {"overloaded": result.total.requests - result.total.answered}
    assert result.total.errors["overloaded"] / result.total.requests == pytest.approx(0.5, abs=0.03)
    assert result.busy > 0.97


def test_an_idle_server_adds_no_time_to_the_batch() -> None:
    steps = LatencyProfile(StepLatency.line(100, 10), StepLatency.line(5), StepLatency.line(7), StepLatency.line(3))
    spaced = trace_of([(at_ns, 1, 0) for at_ns in range(0, 50 * MS, MS)])
    for depth in (1, 2):
        done = replay(spaced, [model(8, 1, steps, depth=depth)])
        assert set(done.latency_ns) == {125_000}


def test_models_that_share_a_device_share_its_time() -> None:
    trace = poisson_trace(2000, 5, models=4)
    alone = report(replay(trace, [model() for _ in range(4)]), [None] * 4).total
    shared = report(replay(trace, [model(devices=(0,)) for _ in range(4)]), [None] * 4).total
    assert alone.throughput_hz == pytest.approx(2000, rel=0.03)
    assert shared.throughput_hz == pytest.approx(1000, rel=0.01)


@pytest.mark.slow
def test_a_thousand_models_are_as_good_as_one_each() -> None:
    trace = poisson_trace(50_000, 1, models=1000)
    result = report(replay(trace, [model() for _ in range(1000)]), [5.0] * 1000)
    assert (result.total.requests, result.total.answered) == (len(trace), len(trace))
    assert sum(each.answered for each in result.models) == len(trace)
    waits_us = result.total.mean_us - 1000
    assert waits_us == pytest.approx(0.05 / (2 * 0.95) * 1000, rel=0.1), "M/D/1 at a load of 0.05"


def test_the_data_plane_has_the_latency_table_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dataplane.LatencyTable] = []
    seed = dataplane.LatencyTable.seed
    monkeypatch.setattr(dataplane.LatencyTable, "seed", lambda self, times: (seen.append(self), seed(self, times)))
    steps = LatencyProfile(StepLatency.line(100, 10), StepLatency.line(5), StepLatency.line(7), StepLatency.line(3))
    replay(poisson_trace(2000, 1), [model(8, 1, steps)])
    (row,) = seen
    assert [row.estimate_ns(rows) for rows in (1, 4, 8)] == [120_000, 150_000, 190_000]
    assert sum(each.observations for each in row.entries()) > 1000, "and learns on"


# Seeds


def test_equal_seeds_give_equal_replays_and_others_do_not() -> None:
    varying = model(4, 2, LatencyProfile(StepLatency.line(1000, 50), variation=0.4))
    first, again = (replay(poisson_trace(1500, 2, seed=5), [varying], seed=6) for _ in range(2))
    assert first.latency_ns == again.latency_ns
    assert first.outcomes == again.outcomes
    other = replay(poisson_trace(1500, 2, seed=5), [varying], seed=7)
    assert other.trace.times_ns.tolist() == first.trace.times_ns.tolist(), "arrivals have a seed of their own"
    assert other.latency_ns != first.latency_ns
    assert poisson_trace(1500, 2, seed=8).times_ns.tolist() != first.trace.times_ns.tolist()


# The same batches as tests/sim's own schedulers. No two requests come at the same time, nor does one as a batch ends.

arrivals = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 5), st.integers(0, 1)), min_size=1, max_size=60).map(
    lambda drawn: [(at * 1000 + number, rows, level) for number, (at, rows, level) in enumerate(drawn)]
)


def trace_of(coming: list[tuple[int, int, int]]) -> Trace:
    times_ns, rows, levels = (np.array(column, np.int64) for column in zip(*sorted(coming), strict=True))
    nothing = np.zeros(len(coming), np.int64)
    return Trace(times_ns, nothing, rows, levels + 1, nothing, int(times_ns[-1]) + 1, ("m",))


@settings(max_examples=examples(150), deadline=None)
@given(
    coming=arrivals,
    policy=st.builds(
        BatchPolicy,
        max_rows=st.integers(5, 12),
        preferred_rows=st.sampled_from([(), (4,), (2, 5)]),
        max_delay_ns=st.sampled_from([0, 10_000, 50_000]),
        merge=st.booleans(),
    ),
    instances=st.integers(1, 3),
    limit=st.sampled_from([3, 1000]),
    service_us=st.integers(1, 80),
)
def test_serial_instances_run_the_batches_of_the_virtual_scheduler(
    coming: list[tuple[int, int, int]], policy: BatchPolicy, instances: int, limit: int, service_us: int
) -> None:
    world = test_virtual_time.World(policy, instances, 2, limit, service_us * 1000)
    world.run([test_virtual_time.Arrival(at_ns, rows, 0, level, None) for at_ns, rows, level in coming])
    handled = HandlePolicy(policy, QueueLimits(max_count=limit), instances, levels=2)
    done = replay(trace_of(coming), [SimulatedModel(handled, LatencyProfile(StepLatency.line(service_us)))])
    (batches,) = done.batches
    assert sorted(zip(batches.taken_ns, batches.rows, strict=True)) == sorted(
        (batch.taken_ns, sum(entry.rows for entry in batch.entries)) for batch in world.batches
    )
    assert done.outcomes.count("overloaded") == world.refused
    for reason, count in batches.reasons.items():
        assert count == sum(batch.reason.value == reason for batch in world.batches)


@settings(max_examples=examples(100), deadline=None)
@given(arrivals, st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, 40_000]))
def test_overlapping_batches_match_virtual_time(
    coming: list[tuple[int, int, int]], depth: int, instances: int, delay_ns: int
) -> None:
    policy = BatchPolicy(6, (), delay_ns)
    costs = CostModel(Cost(2000, 1000), Cost(5000, 1000), Cost(50_000, 3000), Cost(4000))
    world = test_overlapped_time.World(costs, policy, depth, instances)
    for at_ns, rows, _ in coming:
        world.at(at_ns, lambda rows=rows: world.submit(rows))  # type: ignore[misc]
        world.at(at_ns + delay_ns, lambda: None)
    world.run()
    reference: dict[int, tuple[int, int]] = {}
    for entry in world.entries:
        assert isinstance(entry.completion.outcome, InferResponse)
        times = entry.completion.outcome.times
        assert times is not None
        reference[id(times)] = (times.taken_ns, reference.get(id(times), (0, 0))[1] + entry.rows)
    steps = LatencyProfile(StepLatency.line(50, 3), StepLatency.line(2, 1), StepLatency.line(5, 1), StepLatency.line(4))
    simulated_batches = SimulatedModel(HandlePolicy(policy, ENDLESS, instances), steps, depth)
    (batches,) = unpaced(trace_of(coming), simulated_batches).batches
    assert sorted(zip(batches.taken_ns, batches.rows, strict=True)) == sorted(reference.values())


def unpaced(trace: Trace, simulated: SimulatedModel) -> Replay:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.inference.simulation.replay.LaunchPacing", lambda _rows: None)
        return replay(trace, [simulated])


# What the front of the data plane does


def test_hopeless_requests_are_refused_at_once_and_all_others_meet_their_deadline() -> None:
    trace = poisson_trace(2000, 2, timeout_ns=20 * MS)
    done = replay(trace, [model()])
    count = Counter(done.outcomes)
    assert set(count) == {"answered", "would_miss"}
    assert count["answered"] > 0.99 * 2000, "the device has no pause"
    assert max(done.latency_ns) <= 20 * MS
    assert {
        latency for latency, outcome in zip(done.latency_ns, done.outcomes, strict=True) if outcome != "answered"
    } == {0}


def test_deadlines_and_queue_timeouts_pass_in_virtual_time() -> None:
    trace = poisson_trace(2000, 2, timeout_ns=20 * MS)
    done = replay(trace, [model(profile=LatencyProfile(StepLatency.line(1000), variation=1.0))])
    late = [latency for latency, outcome in zip(done.latency_ns, done.outcomes, strict=True) if outcome == "deadline"]
    assert set(late) == {20 * MS}
    assert max(done.latency_ns) == 20 * MS
    assert Counter(done.outcomes)["answered"] > 0.9 * 2000, "times that vary as much as they can are not predicted"
    impatient = SimulatedModel(
        HandlePolicy(BatchPolicy(1), ENDLESS, queue_policy=LevelPolicy(queue_timeout_ns=5 * MS)),
        LatencyProfile(StepLatency.line(1000)),
    )
    done = replay(poisson_trace(2000, 2), [impatient])
    assert set(done.outcomes) == {"answered", "queue_timeout"}
    assert max(done.latency_ns) <= 6 * MS


def test_urgent_requests_pass_the_others() -> None:
    trace = poisson_trace(900, 20)
    urgent = np.random.default_rng(9).random(len(trace)) < 0.25
    mixed = Trace(
        trace.times_ns,
        trace.models,
        trace.rows,
        np.where(urgent, 1, 2),
        trace.timeouts_ns,
        trace.duration_ns,
        trace.names,
    )
    policy = HandlePolicy(BatchPolicy(1), ENDLESS, levels=2, default_level=2)
    latency_ns = np.array(replay(mixed, [SimulatedModel(policy, LatencyProfile(StepLatency.line(1000)))]).latency_ns)
    # Cobham's formula: half a residual service, over (1 - urgent load) for the urgent and over both for the rest.
    assert latency_ns[urgent].mean() / MS - 1 == pytest.approx(0.45 / (1 - 0.225), rel=0.1)
    assert latency_ns[~urgent].mean() / MS - 1 == pytest.approx(0.45 / (1 - 0.225) / (1 - 0.9), rel=0.2)


def test_a_request_larger_than_a_batch_is_answered_once_all_its_parts_are() -> None:
    trace = poisson_trace(1, 20, rows=((20, 1.0),))
    done = replay(trace, [model(8, 1)])
    assert set(done.latency_ns) == {3 * MS}
    assert list(done.batches[0].rows) == [8, 8, 4] * len(trace)
