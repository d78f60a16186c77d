"""Sequences in virtual time: versions with instances whose accumulators are compared with a dictionary.

Each instance keeps one sum for each slot (strategy direct) or for each correlation id (oldest), reset by START and lost with the
instance, as a real model would. The oracle has the sum of the accepted requests of each sequence. An answer that differs has
read another sequence's state, or a state that lacks a request.

With iterative rules each request runs for one to four steps, and adds its value to the state of its sequence with each. Some wait
for their reader between two steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import BadRequest, Cancelled, HeadraceError, Overloaded
from headrace.core.request import InferRequest, InferResponse
from headrace.inference.scheduling.policy import QueueLimits, SequencePolicy
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.sequences.live_sequence import SequenceEntry
from headrace.inference.scheduling.sequences.sequence_table import SequenceTable


@dataclass(eq=False)
class VirtualInstance:
    """One instance: its sums and its running batch."""

    sums: dict[object, int] = field(default_factory=dict)
    batch: Batch | None = None
    is_open: bool = True


@dataclass(eq=False)
class VirtualVersion:
    """One version: its table, its instances, and the slot that each of its sequences has used."""

    table: SequenceTable
    instances: list[VirtualInstance]
    places: dict[object, tuple[int, int]] = field(default_factory=dict)


class VirtualSequences:
    """Versions of a model, the latest last, and the oracle.

    Args:
        policy: rules of the sequences.
        instances: instances of each version.
        limits: bounds of the queue.
    """

    def __init__(self, policy: SequencePolicy, instances: int = 2, limits: QueueLimits | None = None) -> None:
        self.policy, self._count, self._limits = policy, instances, limits or QueueLimits(max_count=24)
        self.now_ns = 0
        self.versions: list[VirtualVersion] = []
        self.expected: dict[SequenceEntry, int] = {}  # entries in the queue or in a batch
        self._sums: dict[object, int] = {}  # by sequence
        self._latest: dict[int | str, object] = {}  # the sequence that was started last, by id
        self._value = 0
        self.answers = self.refusals = self.later_steps = 0
        self.max_wait_ns = 1 << 62  # START is refused if its predicted wait for a slot is longer
        self.held: dict[SequenceEntry, VirtualVersion] = {}  # requests that wait for their reader between two steps
        self.reload()

    # Steps

    def send(
        self, correlation_id: int | str, start: bool = False, end: bool = False, fails: bool = False
    ) -> SequenceEntry | None:
        """Send a request, which fails in the model or not; None if it is refused, which must agree with the live sequences."""
        self._value += 1
        start, end = start or self.policy.is_iterative, end and not self.policy.is_iterative
        request = InferRequest(inputs=self._inputs(fails), rows=1, shape_key=None, received_ns=self.now_ns)
        completion = ThreadCompletion()
        entry = SequenceEntry(request, completion, self.now_ns, correlation_id, start, end)
        versions = [self.versions[-1]]
        if not start:
            versions = [each for each in reversed(self.versions) if self._accepts(each, correlation_id)] or versions
        version = versions[0]
        entry.remove = lambda settled: self._discard(version, settled)
        completion.after = entry.on_settled
        was_live = self._accepts(version, correlation_id)
        is_new = start and correlation_id not in version.table._sequences
        wait_ns, live = version.table.slot_wait_ns(correlation_id, self.now_ns), version.table.live
        assert version.table.live == live
        if start and wait_ns > self.max_wait_ns:  # refused by admission: the table must be as before
            return None
        try:
            version.table.add(entry, self.now_ns)
        except Overloaded:
            self._settle()
            return None
        except BadRequest:
            assert not start, "START was refused"
            assert not was_live, "a request of a live sequence was refused"
            self._settle()
            return None
        assert start or was_live, "a request without START was accepted"
        sequence = entry.sequence
        assert sequence is not None
        if is_new and any(each.is_open for each in version.instances):
            assert (wait_ns == 0) == (sequence.instance is not None), "the prediction disagrees with the slots"
        if start:
            assert sequence not in self._sums, "START begins a sequence of its own"
            for other in self.versions[:-1]:
                other.table.supersede(correlation_id)
            self._latest[correlation_id] = sequence
        assert self._latest[correlation_id] is sequence, "a request continues the latest sequence of its id"
        added = 0 if fails else self._value
        self._sums[sequence] = self.expected[entry] = self._sums.get(sequence, 0) + added
        self._settle()
        return entry

    def cancel(self, entry: SequenceEntry) -> None:
        """Cancel a request, queued or running, as its client or a timer does."""
        entry.completion.settle(Cancelled("cancelled"))
        self._settle()

    def advance(self, duration_ns: int) -> None:
        """Let time pass."""
        self.now_ns += duration_ns
        for version in self.versions:
            version.table.expire(self.now_ns)
        self._settle()

    def begin_batch(self, version: VirtualVersion, index: int) -> bool:
        """Let an idle instance take a batch."""
        instance = version.instances[index]
        if instance.batch is not None or not instance.is_open:
            return False
        answer = version.table.take(index, self.now_ns)
        self._settle()
        if not isinstance(answer, Batch):
            return False
        instance.batch = answer
        ids = [entry.correlation_id for entry in answer.entries]
        assert len(ids) == len(set(ids)) <= self.policy.max_rows, "two requests of one sequence share a batch"
        for entry in answer.entries:
            assert isinstance(entry, SequenceEntry)
            place = version.places.setdefault(entry.sequence, (index, entry.slot))
            assert place == (index, entry.slot), "a sequence stays on its slot"
        return True

    def end_batch(self, version: VirtualVersion, index: int) -> None:
        """Compute and answer the running batch of an instance."""
        instance = version.instances[index]
        batch, instance.batch = instance.batch, None
        if batch is None:
            return
        again = self._compute(instance, batch)
        version.table.finish_batch(index, self.now_ns)
        for entry in again:
            if entry.queued:
                self.later_steps += 1
                if entry.is_held:
                    self.held[entry] = version
            elif entry.completion.is_settled:
                self.expected.pop(entry, None)
        self._settle()

    def _inputs(self, fails: bool) -> dict[str, np.ndarray]:
        """Return the inputs of the request of number `_value`."""
        assert not fails, "the accumulators do not fail"
        return {"x": np.array([[self._value]])}

    def _compute(self, instance: VirtualInstance, batch: Batch) -> list[SequenceEntry]:
        """Compute and answer the requests of a batch, compare the answers with the oracle; return those scheduled again."""
        again: list[SequenceEntry] = []
        for entry in batch.entries:
            assert isinstance(entry, SequenceEntry)
            value = int(entry.inputs["x"][0, 0])
            key: object = entry.slot if self.policy.is_direct else entry.correlation_id
            before = 0 if entry.is_start else instance.sums[key]
            instance.sums[key] = before + value
            if self.policy.is_iterative:
                assert instance.sums[key] == value * entry.steps, "the step has another state"
                instance.sums[key], entry.is_start = value * entry.steps, False
                if entry.steps <= value % 4:
                    entry.is_rescheduled, entry.is_held = True, value % 3 == 0
                    again.append(entry)
                    continue
                instance.sums[key] = value  # what the request expects
            assert instance.sums[key] == self.expected.pop(entry), "the answer has another state"
            self.answers += 1
            entry.completion.settle(InferResponse({}))
        return again

    def read(self, entry: SequenceEntry) -> None:
        """Let the reader of a request that waits for it read its responses."""
        version = self.held.pop(entry)
        version.table.release(entry)

    def crash(self, version: VirtualVersion, index: int) -> None:
        """End an instance with its state; its running requests fail."""
        instance = version.instances[index]
        if not instance.is_open:
            return
        self._fail_batch(instance)
        instance.is_open, instance.sums = False, {}
        version.table.close_instance(index, "it died")
        self._settle()

    def lose_state(self, version: VirtualVersion, index: int) -> None:
        """Replace the process of an idle instance: its state is gone."""
        instance = version.instances[index]
        if instance.is_open and instance.batch is None:
            instance.sums = {}
            version.table.lose_state(index, "it died")
            self._settle()

    def reopen(self, version: VirtualVersion, index: int) -> None:
        """Restart an instance."""
        if not version.instances[index].is_open:
            version.instances[index] = VirtualInstance()
            version.table.open_instance(index)

    def reload(self) -> None:
        """Start a version; the earlier ones end with their sequences."""
        table = SequenceTable(self.policy, self._limits)
        version = VirtualVersion(table, [VirtualInstance() for _ in range(self._count)])
        for index in range(self._count):
            table.open_instance(index)
        self.versions = [*(each for each in self.versions if each.table.live), version]

    def finish(self) -> None:
        """Run all requests; afterwards every request has an outcome and every sequence without END expires."""
        for version in self.versions:
            for index in range(self._count):
                self.reopen(version, index)
                self.end_batch(version, index)
        while self.expected:
            for entry in list(self.held):
                self.read(entry)
            self.advance(self.policy.max_delay_ns)
            begun = [
                (version, index)
                for version in self.versions
                for index in range(self._count)
                if self.begin_batch(version, index)
            ]
            for version, index in begun:
                self.end_batch(version, index)
            if not begun:  # the slots belong to sequences without a request
                assert any(version.table.next_expiry_ns is not None for version in self.versions), "nothing can run"
                self.advance(self.policy.idle_ns)
        self.advance(self.policy.idle_ns)
        for version in self.versions:
            assert (version.table.live, version.table.count, version.table.size_bytes, version.table.backlog) == (
                0,
            ) * 4
            assert not version.table._sequences
            assert not version.table._idle

    # Checks

    def check(self) -> None:
        """Check that slots and sequences belong to each other, and that no counter has drifted."""
        for version in self.versions:
            table, holders = version.table, []
            for instance in table._instances.values():
                used = [each for each in instance.sequences if each is not None]
                assert len(used) == instance.used == len(set(used))
                for sequence in used:
                    assert sequence.instance is instance
                    assert instance.sequences[sequence.slot] is sequence
                    assert not sequence.is_over
                holders += used
            ids = [sequence.correlation_id for sequence in holders]
            assert len(ids) == len(set(ids)), "two sequences of one id have a slot"
            assert not any(sequence in waiting for waiting in table._backlog.clients.values() for sequence in holders)
            queued = [entry for entry in self.expected if entry.queued and self._owner(entry) is version]
            assert table.count == len(queued)
            assert table.size_bytes == sum(entry.size_bytes for entry in queued)
            if table._backlog.count:
                assert all(instance.used == self.policy.slots for instance in table._instances.values())

    def _owner(self, entry: SequenceEntry) -> VirtualVersion | None:
        for version in self.versions:
            sequence = version.table._sequences.get(entry.correlation_id)
            while sequence is not None:
                if sequence is entry.sequence:
                    return version
                sequence = sequence.before
        return None

    def _accepts(self, version: VirtualVersion, correlation_id: int | str) -> bool:
        version.table.expire(self.now_ns)
        return version.table.accepts(correlation_id)

    def _discard(self, version: VirtualVersion, entry: object) -> None:
        assert isinstance(entry, SequenceEntry)
        version.table.discard(entry)
        self.expected.pop(entry, None)

    def _fail_batch(self, instance: VirtualInstance) -> None:
        batch, instance.batch = instance.batch, None
        for entry in batch.entries if batch is not None else ():
            assert isinstance(entry, SequenceEntry)
            self.expected.pop(entry)
            entry.completion.settle(HeadraceError("it died"))

    def _settle(self) -> None:
        for version in self.versions:
            refused, version.table.refused = version.table.refused, []
            for entry, error in refused:
                assert not entry.queued
                del self.expected[entry]
                self.refusals += 1
                entry.completion.settle(error)


def random_run(
    seed: int,
    policy: SequencePolicy,
    steps: int = 60,
    ids: int = 4,
    make: Callable[..., VirtualSequences] = VirtualSequences,
    failing: float = 0.0,
    max_wait_ns: int = 1 << 62,
) -> VirtualSequences:
    """Run random steps on a few ids, checking after each, and finish; returns what ran.

    Args:
        seed: of the random steps.
        policy: rules of the sequences.
        steps: number of steps.
        ids: number of correlation ids.
        make: creates the model.
        failing: share of the requests that fail in the model.
        max_wait_ns: longest predicted wait for a slot with which a sequence is admitted.
    """
    choose = random.Random(seed)
    world = make(policy, instances=choose.randint(1, 2), limits=QueueLimits(max_count=choose.randint(2, 12)))
    world.max_wait_ns = max_wait_ns
    for _ in range(steps):
        version, index = choose.choice(world.versions), choose.randrange(world._count)
        kind = choose.choices(
            ("send", "begin", "end", "cancel", "advance", "crash", "lose", "reopen", "reload", "read"),
            (40, 20, 20, 6, 6, 2, 2, 6, 1, 6),
        )[0]
        if kind == "send":
            correlation_id, start, end = choose.randint(1, ids), choose.random() < 0.3, choose.random() < 0.2
            world.send(correlation_id, start, end, choose.random() < failing)
        elif kind == "begin":
            world.begin_batch(version, index)
        elif kind == "end":
            world.end_batch(version, index)
        elif kind == "cancel" and world.expected:
            world.cancel(choose.choice(list(world.expected)))
        elif kind == "advance":
            world.advance(choose.choice((1, policy.idle_ns // 2, policy.idle_ns)))
        elif kind == "crash":
            world.crash(version, index)
        elif kind == "lose":
            world.lose_state(version, index)
        elif kind == "reopen":
            world.reopen(version, index)
        elif kind == "reload":
            world.reload()
        elif kind == "read" and world.held:
            world.read(choose.choice(list(world.held)))
        world.check()
    world.finish()
    return world
