"""Requests that are due some time, in virtual time: what is promised is kept, at loads that cannot all be served, too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from headrace.core.errors import HeadraceError, WouldMiss
from headrace.core.request import InferResponse
from headrace.inference.scheduling.admission import AdmissionController
from headrace.inference.scheduling.batching import CostModel, WaitUntil
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy, QueueLimits, Sharing
from headrace.inference.scheduling.queue import FAR_NS, Entry, QueueOrder
from headrace.inference.scheduling.scheduler import Scheduler
from headrace.inference.scheduling.selector import Batch
from headrace.inference.simulation.replay import ANSWERED, SimulatedModel, StepLatency, replay
from headrace.inference.simulation.replay import LatencyProfile as Simulated
from headrace.inference.simulation.report import Figures, report
from headrace.inference.simulation.traces import ArrivalPattern, Workload, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.completions import RecordedCompletion, request
from tests.support.examples import MORE_EXAMPLES, examples

MS = 1_000_000
ROWS = 32
SECONDS = 1.5


@dataclass
class Arrival:
    at_ns: int
    rows: int
    level: int
    client: str
    deadline_ns: int
    """0: none; else after its arrival"""


@dataclass
class World:
    """Instances that take 10 ns a batch and 2 ns a row, and a scheduler with these costs."""

    instances: int
    objective_ns: int
    order: QueueOrder = field(default_factory=QueueOrder)
    levels: int = 1
    now_ns: int = 0

    def __post_init__(self) -> None:
        policy = BatchPolicy(8, objective_ns=self.objective_ns)
        profile = LatencyTable()
        profile.seed({rows: [self.takes_ns(rows)] for rows in range(1, 9)})
        costs, clock = CostModel(profile, policy), lambda: self.now_ns
        self.scheduler = Scheduler(policy, QueueLimits(), self.levels, clock, order=self.order, cost_model=costs)
        self.scheduler.set_instances(self.instances)
        self.free_ns = [0] * self.instances
        self.entries: list[Entry] = []
        self.done_ns: dict[Entry, int] = {}
        self.batches: list[Batch] = []

    @staticmethod
    def takes_ns(rows: int) -> int:
        return 10 + 2 * rows

    def run(self, arrivals: list[Arrival]) -> None:
        coming = sorted(arrivals, key=lambda each: each.at_ns)
        while coming or self.scheduler.depth:
            times = [*(each.at_ns for each in coming[:1]), *(free for free in self.free_ns if free > self.now_ns)]
            if times:
                self.now_ns = max(self.now_ns, min(times))
            while coming and coming[0].at_ns <= self.now_ns:
                self.arrive(coming.pop(0))
            self.pull()

    def arrive(self, arrival: Arrival) -> None:
        deadline_ns = arrival.at_ns + arrival.deadline_ns if arrival.deadline_ns else 0
        new_request = request(arrival.rows, client=arrival.client, deadline_ns=deadline_ns)
        new_request.received_ns = arrival.at_ns
        new = Entry(new_request, RecordedCompletion(), arrival.level, self.now_ns, self.objective_ns)
        new.remove = self.scheduler.discard
        new.completion.after = new.on_settled
        self.entries.append(new)
        self.scheduler.enqueue([new])

    def pull(self) -> None:
        for instance, free_ns in enumerate(self.free_ns):
            if free_ns > self.now_ns:
                continue
            answer = self.scheduler.poll(self.now_ns)
            assert not isinstance(answer, WaitUntil), "an idle instance never waits without an allowed delay"
            if isinstance(answer, Batch):
                rows = sum(entry.rows for entry in answer.entries)
                assert rows <= 8
                self.free_ns[instance] = self.now_ns + self.takes_ns(rows)
                self.batches.append(answer)
                for entry in answer.entries:
                    assert entry.completion.settle(InferResponse({}))
                    self.done_ns[entry] = self.free_ns[instance]
            else:
                assert not self.scheduler.depth, "an idle instance and work to do"


some_arrival = st.builds(
    Arrival,
    at_ns=st.integers(0, 300),
    rows=st.integers(1, 5),
    level=st.integers(0, 2),
    client=st.sampled_from(["a", "b", "c"]),
    deadline_ns=st.sampled_from([0, 0, 5, 15, 40, 100]),
)
worlds = st.builds(
    World,
    instances=st.integers(1, 3),
    objective_ns=st.sampled_from([0, 30, 80]),
    order=st.builds(
        QueueOrder, aging_ns=st.sampled_from([0, 50]), sharing=st.sampled_from([None, Sharing({"a": 3.0})])
    ),
    levels=st.just(3),
)


@settings(max_examples=examples(300), deadline=None)
@given(worlds, st.lists(some_arrival, max_size=80))
def test_every_request_gets_one_response_in_time_or_an_error(world: World, arrivals: list[Arrival]) -> None:
    world.run(arrivals)
    assert len(world.entries) == len(arrivals)
    for entry in world.entries:
        (outcome,) = entry.completion.outcomes  # type: ignore[attr-defined]
        if isinstance(outcome, HeadraceError):
            assert isinstance(outcome, WouldMiss)
            assert entry.due_ns != FAR_NS
            assert entry not in world.done_ns
            assert not entry.inputs, "what it held is free"
        else:
            assert entry in world.done_ns
    queue = world.scheduler.queue
    assert (queue.count, queue.total_rows, queue.size_bytes) == (0, 0, 0)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 3), st.lists(some_arrival, max_size=80))
def test_batches_started_before_their_deadline_finish_in_time(instances: int, arrivals: list[Arrival]) -> None:
    for each in arrivals:
        each.level, each.client = 0, ""
    world = World(instances, 0)
    world.run(arrivals)
    for entry, done_ns in world.done_ns.items():
        assert done_ns <= entry.deadline_ns, "times do not vary here: nothing is run in vain"


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 3), st.lists(some_arrival, min_size=1, max_size=80))
def test_no_request_is_rejected_if_the_time_suffices(instances: int, arrivals: list[Arrival]) -> None:
    for each in arrivals:
        each.deadline_ns = 10_000
    world = World(instances, 0, levels=3)
    world.run(arrivals)
    assert len(world.done_ns) == len(arrivals)


def test_a_flood_does_not_reduce_the_share_of_the_other_client() -> None:
    world = World(1, 200, QueueOrder(0, Sharing()))
    flood = [Arrival(at_ns, 1, 0, "flood", 0) for at_ns in range(4000)]  # a row a ns: 3 can be served in 10 ns
    calm = [Arrival(at_ns, 1, 0, "calm", 0) for at_ns in range(50, 4000, 40)]
    world.run(flood + calm)
    waits = [done_ns - entry.received_ns for entry, done_ns in world.done_ns.items() if entry.client == "calm"]
    assert len(waits) == len(calm)
    assert max(waits) <= 2 * World.takes_ns(8), "the batch under way, and its own"
    served = Counter(entry.client for entry in world.done_ns if entry.due_ns >= world.done_ns[entry])
    assert served["flood"] > 0.9 * (4000 / World.takes_ns(8) * 8 - len(calm))


def test_two_flooding_clients_share_by_weight() -> None:
    world = World(2, 300, QueueOrder(0, Sharing({"big": 3.0})))
    arrivals = [Arrival(at_ns, 1, 0, client, 0) for at_ns in range(4000) for client in ("big", "small")]
    world.run(arrivals)
    early = [entry for entry, done_ns in world.done_ns.items() if 1000 < done_ns < 4000]
    share = Counter(entry.client for entry in early)
    assert share["big"] / share["small"] == pytest.approx(3, rel=0.1)


# With admission, by the simulator


@pytest.mark.parametrize("calm", [0.1, pytest.param(0.3, marks=MORE_EXAMPLES)])
@pytest.mark.parametrize(
    ("batch_us", "row_us", "slo_ms"),
    [
        (8000, 500, 50),
        *(pytest.param(*device, marks=MORE_EXAMPLES) for device in ((4000, 250, 25), (5900, 159, 25))),
    ],
)
@pytest.mark.parametrize("variation", [0.0, 0.08])
def test_a_quiet_client_meets_an_objective_of_two_batches_beside_a_flood(
    batch_us: float, row_us: float, slo_ms: int, calm: float, variation: float
) -> None:
    capacity_hz, seconds = ROWS / (batch_us + ROWS * row_us) * 1e6, 4.0
    policy = HandlePolicy(BatchPolicy(ROWS, objective_ns=slo_ms * MS), QueueLimits(1 << 20), sharing=Sharing())
    model = SimulatedModel(policy, Simulated(StepLatency.line(batch_us, row_us), variation=variation))
    load = Workload((calm + 2.0) * capacity_hz, seconds, clients=(("calm", calm), ("flood", 2.0)))
    trace = make_trace(load, ["m"], np.random.default_rng(0))
    assert trace.clients is not None
    quiet = trace.clients == 0
    alone, beside = replay(trace.of(quiet), [model]), replay(trace, [model])
    answered = np.array(beside.outcomes) == ANSWERED
    assert Counter(alone.outcomes) == {ANSWERED: int(quiet.sum())}
    assert answered[quiet].mean() > 0.98
    assert np.percentile(np.array(beside.latency_ns)[quiet & answered], 99) < slo_ms * MS
    assert answered.sum() / seconds > (0.8 if variation else 0.9) * capacity_hz


def figures(
    load: float, slo_ms: float | None, instances: int = 1, depth: int = 1, delay_us: int = 0, kind: str = "poisson"
) -> tuple[Figures, float]:
    """A model that runs 32 rows in 2.37 ms, loaded with a share of its capacity; and that capacity in rows a second."""
    simulated = Simulated(StepLatency.line(450, 60), variation=0.05)
    capacity_hz = instances * ROWS / (450e-6 + ROWS * 60e-6)
    policy = BatchPolicy(ROWS, (), delay_us * 1000, objective_ns=int((slo_ms or 0) * MS))
    model = SimulatedModel(HandlePolicy(policy, instances=instances), simulated, depth)
    trace = make_trace(Workload(load * capacity_hz, SECONDS, ArrivalPattern(kind)), ["m"], np.random.default_rng(7))
    return report(replay(trace, [model]), [slo_ms or 20.0], 300 * MS).total, capacity_hz


@pytest.mark.parametrize(
    ("load", "instances", "depth"),
    [(1.5, 1, 1), (2.0, 1, 1), (2.0, 1, 2), pytest.param(1.5, 3, 1, marks=pytest.mark.slow)],
)
def test_goodput_stays_at_capacity_beyond_it(load: float, instances: int, depth: int) -> None:
    result, capacity_hz = figures(load, 20, instances, depth)
    assert result.goodput_hz is not None
    assert result.goodput_hz > 0.95 * capacity_hz
    assert result.percentiles_us[2] < 20_000
    assert set(result.errors) == {"would_miss"}


def test_without_a_promise_nothing_is_good_at_that_load() -> None:
    result, capacity_hz = figures(1.5, None)
    assert result.goodput_hz is not None
    assert result.goodput_hz < 0.2 * capacity_hz


@pytest.mark.parametrize("load", [1.5, 2.0])
def test_early_timeouts_preserve_most_goodput_without_admission_control(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdmissionController, "admit", lambda *_: None)
    result, capacity_hz = figures(load, 20)
    assert result.goodput_hz is not None
    assert result.goodput_hz > 0.95 * capacity_hz


@pytest.mark.parametrize("slo_ms", [6, 12, 50])
@pytest.mark.parametrize("instances", [1, pytest.param(3, marks=MORE_EXAMPLES)])
def test_below_capacity_the_promise_costs_nothing(slo_ms: float, instances: int) -> None:
    result, _ = figures(0.8, slo_ms, instances)
    assert result.answered > 0.995 * result.requests
    assert result.percentiles_us[2] <= slo_ms * 1000


def test_an_allowed_delay_is_used_as_far_as_dues_allow() -> None:
    patient, _ = figures(0.3, 20, delay_us=4000)
    hasty, _ = figures(0.3, 20)
    hurried, _ = figures(0.3, 5, delay_us=4000)
    assert patient.mean_rows > 2 * hasty.mean_rows
    assert patient.percentiles_us[2] < 20_000
    assert hurried.percentiles_us[2] < 5_000
    assert "deadline" in hurried.reasons
