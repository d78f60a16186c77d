"""Overlapped batches in virtual time: the real scheduler, the real begin, fill, launch, finish and settle, no threads.

What the two threads would do is done here in the order of virtual time, so that throughput follows from the costs alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from headrace.core.request import InferResponse
from headrace.inference.scheduling.launch_pacing import LaunchPacing
from headrace.inference.scheduling.output_check import OutputCheck
from headrace.inference.scheduling.overlapped_runner import OverlappedRunner
from headrace.inference.scheduling.policy import BatchPolicy
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.scheduler import Scheduler
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.serial_runner import SerialRunner
from headrace.observability.counters import Recorder
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.completions import RecordedCompletion, request
from tests.support.examples import examples
from tests.support.fakes import SPEC
from tests.support.overlapped_bench import batch_results
from tests.support.virtual_overlapped import Cost, CostModel, VirtualOverlapped

US = 1_000


@dataclass
class World:
    """Overlapped instances on one queue, each on a device of its own."""

    costs: CostModel
    policy: BatchPolicy
    depth: int = 2
    instances: int = 1
    paced: bool = False
    now_ns: int = 0
    spent_ns: int = 0
    events: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    answered: int = 0
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = itertools.count()
        self.scheduler = Scheduler(self.policy, clock=self.clock)
        self.recorder = Recorder()
        self.devices = [
            VirtualOverlapped(self.costs, self.clock, self.spend, self.depth) for _ in range(self.instances)
        ]
        self.runners = [self._runner(device) for device in self.devices]
        self.filling_until_ns = [0] * self.instances
        self.entries: list[Entry] = []

    def clock(self) -> int:
        return self.now_ns + self.spent_ns

    def spend(self, time_ns: int) -> None:
        """A thread is busy for so long: what it does next is later than now, for itself alone."""
        self.spent_ns += time_ns

    def at(self, time_ns: int, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time_ns, next(self.order), what))

    def submit(self, rows: int = 1, then: Callable[[], None] = lambda: None) -> None:
        """A request now; `then` is called when it is answered."""
        entry = Entry(request(rows, value=float(len(self.entries))), RecordedCompletion(), 0, self.now_ns)
        entry.completion.after = then
        self.entries.append(entry)
        self.scheduler.enqueue([entry])

    def run(self, until_ns: int | None = None) -> None:
        self.pull()
        while self.events and (until_ns is None or self.events[0][0] <= until_ns):
            self.now_ns, _, what = heapq.heappop(self.events)
            what()
            self.pull()

    def pull(self) -> None:
        """Run each instance's thread, those with the fewest batches in flight first."""
        for index in sorted(range(self.instances), key=lambda i: self.runners[i]._open):
            runner = self.runners[index]
            while runner._open < self.depth and self.filling_until_ns[index] <= self.now_ns:
                pull_ns = runner.pacing.pull_ns(self.scheduler.waiting_rows) if runner.pacing is not None else 0
                if self.now_ns < pull_ns:
                    self.at(pull_ns, lambda: None)
                    break
                batch = self.scheduler.poll(self.now_ns)
                if not isinstance(batch, Batch):
                    break
                self._fly(index, batch)

    def _fly(self, index: int, run: Batch) -> None:
        runner, device = self.runners[index], self.devices[index]
        rows = sum(entry.rows for entry in run.entries)
        self.sizes.append(rows)
        runner._pending.add(run)
        assert runner._start(run)
        runner._launched.put(run)
        self.filling_until_ns[index], self.spent_ns = self.clock(), 0
        self.at(self.filling_until_ns[index], lambda: None)  # the thread is free again: look at the queue
        self.at(device.done_ns[-1], lambda: self._land(runner))

    def _land(self, runner: OverlappedRunner) -> None:
        run = runner._launched.get_nowait()
        assert run is not None
        runner._finished.put(runner._finish(run))
        runner._collect_finished()

    def _runner(self, device: VirtualOverlapped) -> OverlappedRunner:
        answers = batch_results(self.recorder, self.policy, OutputCheck(SPEC))
        serial = SerialRunner(device, self.scheduler, self.policy.max_rows, answers, self.clock, None)
        pace = LaunchPacing(self.policy.max_rows) if self.paced else None
        return OverlappedRunner(
            "virtual", device, self.scheduler, 1, serial, answers, lambda _: None, pace, self.clock, 1, True
        )


def makespan_ns(costs: CostModel, depth: int, batches: int = 40, instances: int = 1) -> int:
    """Return the time for that many batches of one row, all queued at the start."""
    world = World(costs, BatchPolicy(1), depth, instances)
    for _ in range(batches):
        world.submit()
    world.run()
    assert world.recorder.totals().requests == batches
    return world.now_ns


def test_without_overlap_steps_add_up_and_with_it_the_slowest_counts() -> None:
    costs = CostModel(Cost(10 * US), Cost(20 * US), Cost(100 * US), Cost(15 * US))
    assert makespan_ns(costs, depth=1) == 40 * 145 * US
    assert makespan_ns(costs, depth=2) == 40 * 100 * US + 45 * US, "only the first in and the last out are not hidden"
    assert makespan_ns(costs, depth=3) == makespan_ns(costs, depth=2), (
        "two batches in flight hide copies shorter than the compute"
    )


def test_three_batches_in_flight_help_if_copies_take_as_long_as_compute() -> None:
    costs = CostModel(copy_in=Cost(100 * US), compute=Cost(100 * US), copy_out=Cost(100 * US))
    assert makespan_ns(costs, depth=1) == 40 * 300 * US
    assert makespan_ns(costs, depth=2) == 40 // 2 * 300 * US + 100 * US
    assert makespan_ns(costs, depth=3) == 40 * 100 * US + 200 * US


def test_two_devices_on_one_queue_take_half_the_time() -> None:
    costs = CostModel(Cost(10 * US), Cost(20 * US), Cost(100 * US), Cost(15 * US))
    one, two = makespan_ns(costs, 2, 400), makespan_ns(costs, 2, 400, instances=2)
    assert one / two > 1.9


def served_in_a_closed_loop(clients: int, depth: int, paced: bool) -> World:
    """Callers that send the next request 50 us after each response, for 200 ms.

    Costs as of a ResNet-50 in FP16 on a large GPU: half a millisecond for one picture, 37,000 a second in batches of 64.
    """
    costs = CostModel(Cost(20 * US, 8 * US), Cost(10 * US, 3 * US), Cost(450 * US, 20 * US), Cost(10 * US))
    world = World(costs, BatchPolicy(64), depth, paced=paced)

    def again() -> None:
        world.at(world.now_ns + 50 * US, lambda: world.submit(then=again))

    for _ in range(clients):
        world.submit(then=again)
    world.run(until_ns=200_000 * US)
    return world


@pytest.mark.parametrize(("clients", "gain"), [(4, 1.1), (16, 1.2), (64, 1.3), (128, 1.4), (256, 1.4)])
def test_overlap_helps_at_every_load_if_batches_are_pulled_late(clients: int, gain: float) -> None:
    served = {
        (depth, paced): served_in_a_closed_loop(clients, depth, paced).recorder.totals().requests
        for depth, paced in ((1, False), (2, False), (2, True))
    }
    assert served[2, True] >= served[1, False] * gain
    assert served[2, True] >= served[2, False] * 0.99


def test_at_saturation_the_device_does_not_idle() -> None:
    world = served_in_a_closed_loop(256, 2, paced=True)
    assert world.devices[0].computing_ns / world.now_ns > 0.97


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 4)), max_size=40),
    st.sampled_from([0, 40 * US]),
)
def test_every_request_gets_its_rows_and_waits_no_longer_than_it_must(
    depth: int, instances: int, arrivals: list[tuple[int, int]], delay_ns: int
) -> None:
    costs = CostModel(Cost(2 * US, US), Cost(5 * US, US), Cost(50 * US, 3 * US), Cost(4 * US))
    world = World(costs, BatchPolicy(6, (), delay_ns), depth, instances)
    for at_us, rows in arrivals:
        world.at(at_us * US, lambda rows=rows: world.submit(rows))  # type: ignore[misc]
        world.at(at_us * US + delay_ns, lambda: None)
    world.run()
    assert world.scheduler.depth == 0
    assert len(world.entries) == len(arrivals)
    for number, entry in enumerate(world.entries):
        outcome = entry.completion.outcome
        assert isinstance(outcome, InferResponse)
        assert outcome.outputs["y"].tolist() == [[2.0 * number] * 2] * entry.rows
        assert outcome.times is not None
        waited_ns = outcome.times.taken_ns - entry.enqueued_ns
        filling_ns = depth * costs.fill.ns(6)  # an instance's thread fills one batch after the other
        assert waited_ns <= delay_ns + filling_ns or depth * instances < len(arrivals), "a slot was free"
    assert sum(world.sizes) == sum(rows for _, rows in arrivals)
    assert np.all(np.array(world.sizes) <= 6)
