"""A slot never has more than one live sequence, and no sequence reads another's state, in any order of events."""

from __future__ import annotations

import pytest
from headrace.inference.scheduling.policy import SequencePolicy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.examples import examples
from tests.support.virtual_sequences import VirtualSequences, VirtualVersion, random_run

POLICIES = [
    SequencePolicy(slots=2, is_direct=True, max_rows=2, idle_ns=100),
    SequencePolicy(slots=3, is_direct=True, max_rows=3, idle_ns=100, max_delay_ns=20, min_utilization=0.5),
    SequencePolicy(slots=3, is_direct=False, max_rows=2, idle_ns=100),
    SequencePolicy(slots=2, is_direct=False, max_rows=4, idle_ns=100, max_delay_ns=20, preferred_rows=(2,)),
    SequencePolicy(slots=1, is_direct=True, max_rows=1, idle_ns=100),
]
ITERATIVE = [
    SequencePolicy(slots=2, is_direct=True, max_rows=2, idle_ns=100, is_iterative=True),
    SequencePolicy(slots=4, is_direct=False, max_rows=2, idle_ns=100, is_iterative=True),
    SequencePolicy(slots=2, is_direct=False, max_rows=4, idle_ns=100, max_delay_ns=20, is_iterative=True),
]
IDS = st.sampled_from([1, 2, "1", "a", 2**64 - 1])


class Sequences(RuleBasedStateMachine):
    """Clients, timers, instances that take and end batches, die and restart, and reloads."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds = [VirtualSequences(policy) for policy in POLICIES[:1] + POLICIES[2:3] + ITERATIVE[:2]]

    def version(self, world: VirtualSequences, index: int) -> VirtualVersion:
        return world.versions[index % len(world.versions)]

    @rule(correlation_id=IDS, start=st.booleans(), end=st.booleans())
    def send(self, correlation_id: int | str, start: bool, end: bool) -> None:
        for world in self.worlds:
            world.send(correlation_id, start, end)

    @rule(index=st.integers(0, 30))
    def cancel(self, index: int) -> None:
        for world in self.worlds:
            entries = list(world.expected)
            if entries:
                world.cancel(entries[index % len(entries)])

    @rule(duration_ns=st.sampled_from([1, 50, 99, 100]))
    def advance(self, duration_ns: int) -> None:
        for world in self.worlds:
            world.advance(duration_ns)

    @rule(version=st.integers(0, 2), instance=st.integers(0, 1))
    def begin_batch(self, version: int, instance: int) -> None:
        for world in self.worlds:
            world.begin_batch(self.version(world, version), instance)

    @rule(version=st.integers(0, 2), instance=st.integers(0, 1))
    def end_batch(self, version: int, instance: int) -> None:
        for world in self.worlds:
            world.end_batch(self.version(world, version), instance)

    @rule(version=st.integers(0, 2), instance=st.integers(0, 1))
    def crash(self, version: int, instance: int) -> None:
        for world in self.worlds:
            world.crash(self.version(world, version), instance)

    @rule(version=st.integers(0, 2), instance=st.integers(0, 1))
    def lose_state(self, version: int, instance: int) -> None:
        for world in self.worlds:
            world.lose_state(self.version(world, version), instance)

    @rule(version=st.integers(0, 2), instance=st.integers(0, 1))
    def reopen(self, version: int, instance: int) -> None:
        for world in self.worlds:
            world.reopen(self.version(world, version), instance)

    @rule(index=st.integers(0, 30))
    def read(self, index: int) -> None:
        for world in self.worlds:
            entries = list(world.held)
            if entries:
                world.read(entries[index % len(entries)])

    @precondition(lambda self: all(len(world.versions) < 3 for world in self.worlds))
    @rule()
    def reload(self) -> None:
        for world in self.worlds:
            world.reload()

    @invariant()
    def slots_and_sequences_agree(self) -> None:
        for world in self.worlds:
            world.check()

    def teardown(self) -> None:
        for world in self.worlds:
            world.finish()


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", POLICIES)
def test_random_interleavings(policy: SequencePolicy) -> None:
    runs = [random_run(seed, policy) for seed in range(100)]
    assert sum(run.answers for run in runs) > 300
    assert sum(run.refusals for run in runs) > 30


@pytest.mark.parametrize("policy", ITERATIVE)
def test_random_steps(policy: SequencePolicy) -> None:
    runs = [random_run(seed, policy) for seed in range(100)]
    assert sum(run.answers for run in runs) > 300
    assert sum(run.later_steps for run in runs) > 300


@pytest.mark.parametrize("policy", POLICIES + ITERATIVE)
def test_refusals_of_admission_leave_the_table_as_it_is(policy: SequencePolicy) -> None:
    runs = [random_run(seed, policy, max_wait_ns=policy.idle_ns // 2) for seed in range(50)]
    assert sum(run.answers for run in runs) > 100


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES + ITERATIVE)
def test_ten_thousand_random_interleavings(policy: SequencePolicy) -> None:
    for seed in range(1000, 1000 + examples(2000)):
        random_run(seed, policy)
