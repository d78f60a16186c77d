"""Runs batches of sequences on an instance: a row or a request for each sequence, with the control tensors of the model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from headrace.core.clock import Clock
from headrace.core.request import BatchTimes
from headrace.core.sequence_state import BatchSlots, SlotStates
from headrace.core.tensor import BYTES, Array, ModelSpec
from headrace.inference.scheduling.batch_results import BatchResults
from headrace.inference.scheduling.policy import SequencePolicy
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.sequences.controls import control_rows
from headrace.inference.scheduling.sequences.live_sequence import SequenceEntry
from headrace.inference.scheduling.sequences.scheduler import SequenceScheduler
from headrace.inference.scheduling.sequences.state import HostStates
from headrace.inference.scheduling.serial_runner import SerialRunner
from headrace.runtimes.base import Execution
from headrace.runtimes.members import MemberResult, Rescheduled

_DIED = "the instance that has its state died"


class SequenceRunner(SerialRunner):
    """Runs the batches of one instance; see `headrace.inference.scheduling.instance.BatchRunner`.

    A request that is cancelled while its batch runs is computed all the same: the state of its sequence has it.

    Attributes:
        runs_cancelled: True.

    Args:
        index: index of the instance.
        execution: the loaded model.
        scheduler: source of batches.
        policy: rules of sequences.
        spec: tensor specs of the model.
        batch_results: settles the requests of batches.
        clock: returns monotonic nanoseconds.
    """

    runs_cancelled = True

    def __init__(
        self,
        index: int,
        execution: Execution,
        scheduler: SequenceScheduler,
        policy: SequencePolicy,
        spec: ModelSpec,
        batch_results: BatchResults,
        clock: Clock,
    ) -> None:
        super().__init__(execution, scheduler, max(policy.max_rows, 1), batch_results, clock, None)
        self._index, self._policy = index, policy
        self._sequences = scheduler
        self._spec = spec
        self._batched = spec.max_batch_size > 0
        self._renew_state = execution.renew_state
        self._states: SlotStates | None = None
        if policy.states:
            self._states = execution.slot_states or HostStates(policy.states, policy.slots, self._batched, spec.name)

    def serve(self) -> None:
        """Run batches until the scheduler is closed and empty; the sequences of the instance end with it."""
        scheduler, index = self._sequences, self._index
        wait_ready = None if self._members is None else self._members.wait_ready
        scheduler.open_instance(index)
        try:
            while True:
                if wait_ready is not None:
                    wait_ready(scheduler.is_ending, scheduler.next_waiting)
                if self._renew_state is not None and self._renew_state():
                    scheduler.lose_state(index, _DIED)
                batch = scheduler.take_batch(index)
                if batch is None:
                    task = scheduler.take_task(index)
                    if task is None:
                        return
                    task(self.execution)
                    continue
                self._run_sequences(batch)
                scheduler.finish_batch(index)
                del batch  # its arrays may be large, and the next batch may come late
        finally:
            scheduler.close_instance(index, _DIED)

    def _run_sequences(self, batch: Batch) -> None:
        self._running = batch
        self.batch_results.begin(self)
        try:
            if self._states is None:
                self.execute(batch)
            else:
                self._run_with_states(batch, self._states)
        finally:
            self.batch_results.busy_runners.discard(self)
        self._running = None

    def _run_with_states(self, batch: Batch, states: SlotStates) -> None:
        """Run the requests of a batch whose states have equal shapes together."""
        _release_ended(states, batch.entries[0])
        groups: dict[Hashable, list[Entry]] = {}
        for entry in batch.entries:
            assert isinstance(entry, SequenceEntry), "a model with sequences queues their requests only"
            if entry.is_start:
                states.reset(entry.slot)
            groups.setdefault(states.key(entry.slot), []).append(entry)
        if len(groups) == 1:
            self.execute(batch)
        else:
            for entries in groups.values():
                self.execute(Batch(entries, batch.reason, self.clock(), len(entries)))
        for entry in batch.entries:
            if isinstance(entry, SequenceEntry) and entry.is_end:
                states.release(entry.slot)

    def _run(self, batch: Batch) -> tuple[BatchTimes, Sequence[MemberResult]]:
        if self._members is not None:
            for entry in batch.entries:
                entry.inputs = {**entry.inputs, **self._controls([entry])}
            times, member_results = self._run_members(self._members, batch)
            for entry, result in zip(batch.entries, member_results, strict=True):
                if isinstance(result, Rescheduled):
                    self._sequences.reschedule(entry, result)
            return times, member_results
        rows = self._rows(batch.entries)
        inputs = self._stack(rows) | self._controls(rows)
        states, slots = self._states, None
        if states is not None:
            slots = self._slots(rows)
            inputs |= states.load(slots)
        assembled_ns = self.clock()
        outputs = self.execution.run(inputs)
        computed_ns = self.clock()
        self.batch_results.check.check(outputs, len(rows))
        if states is not None and slots is not None:
            states.save(outputs, slots)
        if self._batched:
            positions = {id(entry): row for row, entry in enumerate(rows) if entry is not None}
            results: list[MemberResult] = []
            for entry in batch.entries:
                row = positions[id(entry)]
                results.append({name: outputs[name][row : row + 1] for name in self.batch_results.check.names})
        else:
            results = [{name: outputs[name] for name in self.batch_results.check.names}]
        return BatchTimes(batch.taken_ns, assembled_ns, computed_ns, self.clock()), results

    def _rows(self, entries: Sequence[Entry]) -> list[Entry | None]:
        """Return the request of each row: that of its slot for the strategy "direct", else in the order of arrival."""
        if not self._policy.is_direct or not self._batched:
            # States of neighbouring slots are read in place.
            return list(entries) if self._states is None else sorted(entries, key=_slot)
        by_slot = {entry.slot: entry for entry in entries if isinstance(entry, SequenceEntry)}
        return [by_slot.get(slot) for slot in range(max(by_slot) + 1)]

    def _slots(self, rows: Sequence[Entry | None]) -> BatchSlots:
        """Return the slot of each row: with the strategy "direct" its index, also without a request."""
        ready = [row for row, entry in enumerate(rows) if entry is not None]
        is_by_slot = self._policy.is_direct and self._batched
        return BatchSlots(range(len(rows)) if is_by_slot else [_slot(entry) for entry in rows], ready)

    def _stack(self, rows: Sequence[Entry | None]) -> dict[str, Array]:
        """Return the inputs of a batch; rows without a request are zeros, or empty texts."""
        entries = [entry for entry in rows if entry is not None]
        if len(entries) == len(rows):
            return dict(self._staging.stack(entries, len(entries)))
        stacked: dict[str, Array] = {}
        for name, array in entries[0].inputs.items():
            is_text = self._spec.inputs[name].datatype is BYTES
            values = np.full((len(rows), *array.shape[1:]), b"" if is_text else 0, array.dtype)
            for row, entry in enumerate(rows):
                if entry is not None:
                    values[row] = np.asarray(entry.inputs[name])[0]
            stacked[name] = values
        return stacked

    def _controls(self, rows: Sequence[Entry | None]) -> dict[str, Array]:
        return {control.name: control_rows(control, rows, self._batched) for control in self._policy.controls}


def _release_ended(states: SlotStates, entry: Entry) -> None:
    """Release the states of sequences that have ended without an END; `entry` is of a batch of the instance.

    The slots are read without the lock of the scheduler: a free slot gets a sequence whose first request resets its states.
    """
    instance = entry.sequence.instance if isinstance(entry, SequenceEntry) and entry.sequence is not None else None
    if instance is not None and len(states.live) > instance.used:
        for slot in [each for each in states.live if instance.sequences[each] is None]:
            states.release(slot)


def _slot(entry: Entry | None) -> int:
    assert isinstance(entry, SequenceEntry), "a row of a sequence has its request"
    return entry.slot
