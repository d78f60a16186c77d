"""Replays sequences against the server's `SequenceTable` in virtual time.

A client starts a sequence at its arrival, and sends each further request a think time after the response to the one before. It
gives its sequence up at the first error. Slots, backlog, batches, idle times and limits are the server's code; time, devices and
clients are simulated.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.clock import NS_PER_MS, NS_PER_US
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import HeadraceError, QueueTimeout
from headrace.core.request import InferRequest, InferResponse
from headrace.inference.scheduling.batching import WaitUntil
from headrace.inference.scheduling.policy import SequencePolicy
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.sequences.live_sequence import RefusalReason, SequenceEntry
from headrace.inference.scheduling.sequences.sequence_table import SequenceTable
from headrace.inference.simulation.replay import BatchHistory, SimulatedModel, StepTimes, Variation, VirtualDevice
from headrace.inference.simulation.virtual_time import VirtualLoop

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLoad:
    """Sequences in the order of their arrival.

    Attributes:
        starts_ns: arrival times, shape (sequences,), ascending from 0.
        requests: requests of each sequence, at least 1.
        think_ns: mean time from a response to the next request of its sequence.
        think_variation: its standard deviation over its mean: 0 for constant times, 1 for exponential ones.
        timeout_ns: longest time of a request in queue and backlog, 0 for no limit.
        duration_ns: length of the arrivals.
    """

    starts_ns: Integers
    requests: Integers
    think_ns: int
    think_variation: float
    timeout_ns: int
    duration_ns: int


@dataclass
class SequenceReplay:
    """Outcome of a load.

    Attributes:
        load: the load.
        slots: slots of all instances.
        arrived_ns, latency_ns: of each response, in the order of completion.
        sequence: number of the sequence of each response.
        backlog_ns: time from START to the slot of each sequence; -1 without a slot.
        outcomes: reason of the first error of each sequence; "" if it was completed.
        batches: batches of the model.
        busy_ns: compute time of each device.
        used_ns: slots in use, integrated over the arrivals.
        max_backlog: most sequences that waited for a slot.
        ends: sequences that ended in the server, by reason.
        end_ns: time of the last response or error.
    """

    load: SequenceLoad
    slots: int
    arrived_ns: array[int] = field(default_factory=partial(array, "q"))
    latency_ns: array[int] = field(default_factory=partial(array, "q"))
    sequence: array[int] = field(default_factory=partial(array, "q"))
    backlog_ns: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    outcomes: list[str] = field(default_factory=list)
    batches: BatchHistory = field(default_factory=BatchHistory)
    busy_ns: list[int] = field(default_factory=list)
    used_ns: int = 0
    max_backlog: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    end_ns: int = 0


def replay_sequences(load: SequenceLoad, model: SimulatedModel, seed: int = 0) -> SequenceReplay:
    """Replay a load against a simulated model.

    Args:
        load: the sequences.
        model: the model; its policy has rules of sequences.
        seed: seed of compute and think times.
    """
    return _SequenceRun(load, model, seed).run()


@dataclass(slots=True, eq=False)
class _Instance:
    """An instance of the model."""

    device: VirtualDevice  # its device; instances may share one
    batch: Batch | None = None  # the running batch; None while it is idle
    alarm_ns: int = 0  # time of its next look at a batch that waits for more sequences; 0 for none


class _SequenceRun:
    """One replay; see `replay_sequences`."""

    def __init__(self, load: SequenceLoad, model: SimulatedModel, seed: int) -> None:
        rules, policy = model.policy.sequences, model.policy
        assert rules is not None, "the policy of a model with sequences has their rules"
        self._load, self._rules = load, rules
        self._loop = VirtualLoop()
        self._table = SequenceTable(rules, policy.limits)
        compute, think = np.random.default_rng(seed).spawn(2)
        max_rows = rules.slots if rules.is_direct else rules.max_rows
        self._times = StepTimes(model.profile, max_rows, Variation(model.profile.variation, compute))
        self._think = Variation(load.think_variation, think)
        devices = {number: VirtualDevice() for number in set(model.devices)}
        own = [devices[number] for number in model.devices] or [VirtualDevice() for _ in range(policy.instances)]
        self._instances = [_Instance(device) for device in own]
        self._result = SequenceReplay(load, rules.slots * len(own))
        self._backlog_ns = np.full(len(load.starts_ns), -1, np.int64)
        self._remaining: list[int] = load.requests.tolist()
        self._without_slot: deque[SequenceEntry] = (
            deque()
        )  # START of each sequence in the backlog, in the order of arrival
        self._expiry_ns = self._counted_ns = 0

    def run(self) -> SequenceReplay:
        """Replay all sequences to their ends."""
        loop, result = self._loop, self._result
        result.outcomes = [""] * len(self._remaining)
        for index in range(len(self._instances)):
            self._table.open_instance(index)
        for number, start_ns in enumerate(self._load.starts_ns.tolist()):
            loop.advance(start_ns)
            self._send(number, is_start=True)
        loop.finish()
        self._count_slots()
        result.backlog_ns, result.ends = self._backlog_ns, dict(self._table.ends)
        devices = {id(instance.device): instance.device for instance in self._instances}
        result.busy_ns = [device.busy_ns for device in devices.values()]
        return result

    # Clients

    def _send(self, number: int, is_start: bool = False) -> None:
        """Send the next request of a sequence, whose correlation id is its number + 1."""
        now_ns, table = self._loop.now_ns, self._table
        self._count_slots()
        self._remaining[number] -= 1
        request = InferRequest(inputs={}, rows=1, shape_key=None, received_ns=now_ns)
        completion = ThreadCompletion()
        is_end = not self._remaining[number]
        entry = SequenceEntry(request, completion, now_ns, number + 1, is_start, is_end)
        entry.remove = self._discard
        completion.after = entry.on_settled
        try:
            table.add(entry, now_ns)
        except HeadraceError as error:
            self._fail(number, error.reason)
        else:
            if is_start:
                self._without_slot.append(entry)
            if self._load.timeout_ns:
                self._loop.at(now_ns + self._load.timeout_ns, partial(self._time_out, entry))
        self._step()

    def _discard(self, entry: object) -> None:
        assert isinstance(entry, SequenceEntry)
        self._table.discard(entry)

    def _time_out(self, entry: SequenceEntry) -> None:
        if entry.queued:
            self._count_slots()
            entry.completion.settle(QueueTimeout("the request exceeded its timeout in the queue", 0.0))
            self._fail(_number(entry), QueueTimeout.reason)
            self._step()

    def _answer(self, entry: SequenceEntry) -> None:
        now_ns, number, result = self._loop.now_ns, _number(entry), self._result
        entry.completion.settle(InferResponse({}))
        result.arrived_ns.append(entry.enqueued_ns)
        result.latency_ns.append(now_ns - entry.enqueued_ns)
        result.sequence.append(number)
        result.end_ns = now_ns
        if self._remaining[number]:
            self._loop.at(now_ns + self._think.apply(self._load.think_ns), partial(self._send, number))

    def _fail(self, number: int, reason: str) -> None:
        self._result.outcomes[number] = reason
        self._result.end_ns = self._loop.now_ns

    # The server

    def _step(self) -> None:
        """Settle refused requests, note new slots and start batches, after every event."""
        table, now_ns = self._table, self._loop.now_ns
        refused, table.refused = table.refused, []
        for entry, error in refused:
            entry.completion.settle(error)
            self._fail(_number(entry), RefusalReason.ENDED)
        waiting = self._without_slot
        while waiting and (sequence := waiting[0].sequence) is not None and (sequence.instance or sequence.is_over):
            entry = waiting.popleft()
            if sequence.instance is not None:
                self._backlog_ns[_number(entry)] = now_ns - entry.enqueued_ns
        self._result.max_backlog = max(self._result.max_backlog, table.backlog)
        for index, instance in enumerate(self._instances):
            if instance.batch is None:
                self._take(index, instance)
        table.touched.clear()
        expiry_ns = table.next_expiry_ns
        if expiry_ns is not None and not self._expiry_ns:
            self._expiry_ns = expiry_ns
            self._loop.at(expiry_ns, self._expire)

    def _take(self, index: int, instance: _Instance) -> None:
        loop, times = self._loop, self._times
        answer = self._table.take(index, loop.now_ns)
        if isinstance(answer, WaitUntil):
            if not loop.now_ns < instance.alarm_ns <= answer.time_ns:
                instance.alarm_ns = answer.time_ns
                loop.at(answer.time_ns, self._step)
        elif answer is not None:
            instance.batch = answer
            rows = self._computed_rows(answer)
            launched_ns = loop.now_ns + times.fill[rows]
            compute_ns = times.vary(times.compute[rows])
            done_ns = instance.device.run(launched_ns, times.copy_in[rows], compute_ns, times.copy_out[rows])
            loop.at(done_ns, partial(self._finish, index, instance))

    def _computed_rows(self, batch: Batch) -> int:
        """Return the rows of a batch: with the strategy "direct" those up to the highest slot."""
        if not self._rules.is_direct:
            return batch.rows
        return 1 + max(entry.slot for entry in batch.entries if isinstance(entry, SequenceEntry))

    def _finish(self, index: int, instance: _Instance) -> None:
        batch, instance.batch = instance.batch, None
        assert batch is not None, "a batch ends once"
        self._count_slots()
        history = self._result.batches
        history.taken_ns.append(batch.taken_ns)
        history.rows.append(batch.rows)
        history.reasons[batch.reason.value] += 1
        for entry in batch.entries:
            assert isinstance(entry, SequenceEntry)
            self._answer(entry)
        self._table.finish_batch(index, self._loop.now_ns)
        self._step()

    def _expire(self) -> None:
        self._expiry_ns = 0
        self._count_slots()
        self._table.expire(self._loop.now_ns)
        self._step()

    def _count_slots(self) -> None:
        """Add the slots in use since the last call, within the length of the arrivals; called before each change."""
        now_ns = min(self._loop.now_ns, self._load.duration_ns)
        self._result.used_ns += (now_ns - self._counted_ns) * self._table.used_slots
        self._counted_ns = now_ns


def _number(entry: SequenceEntry) -> int:
    """Return the number of the sequence of a request."""
    assert isinstance(entry.correlation_id, int)
    return entry.correlation_id - 1


def sequence_rules(rules: SequencePolicy | None, options: Mapping[str, Any]) -> SequencePolicy:
    """Return the rules of a model with the command's options.

    Args:
        rules: those of its configuration; None without a model.
        options: any of `slots`, `strategy`, `idle_ms`, `max_batch_size`, `delay_us` and `preferred`.
    """
    slots = options.get("slots", rules.slots if rules else options.get("max_batch_size", 8))
    is_direct = options["strategy"] == "direct" if "strategy" in options else rules is None or rules.is_direct
    max_rows = options.get("max_batch_size", rules.max_rows if rules else slots)
    base = rules or SequencePolicy(slots)
    return SequencePolicy(
        slots=slots,
        is_direct=is_direct,
        max_rows=slots if is_direct else max_rows,
        idle_ns=round(options["idle_ms"] * NS_PER_MS) if "idle_ms" in options else base.idle_ns,
        max_delay_ns=round(options["delay_us"] * NS_PER_US) if "delay_us" in options else base.max_delay_ns,
        preferred_rows=tuple(options.get("preferred", base.preferred_rows)),
        min_utilization=base.min_utilization,
    )
