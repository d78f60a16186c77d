"""Scheduler of a model version with sequences: the table under one lock, and the instances' threads that wait for batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.completion import settle_all
from headrace.core.errors import QueueTimeout, Unavailable
from headrace.core.response_bodies import SequenceFigures
from headrace.inference.scheduling.admission import AdmissionController
from headrace.inference.scheduling.batching import CostModel, WaitUntil
from headrace.inference.scheduling.policy import BatchPolicy, QueueLimits, SequencePolicy
from headrace.inference.scheduling.queue import FAR_NS, Entry
from headrace.inference.scheduling.scheduler import IdleTask, Scheduler
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.sequences.live_sequence import CorrelationId, SequenceEntry, SequenceKey
from headrace.inference.scheduling.sequences.sequence_table import FLAGS_PARAMETER, SequenceTable
from headrace.runtimes.members import Rescheduled

_UNLOADING = "the model is being unloaded and accepts no requests: retry once it is loaded"


class SequenceScheduler(Scheduler):
    """The sequences of one model version and the instances that run them; any thread may call.

    Ownership: `_lock` guards the table and every attribute; no completion is settled under it.

    Args:
        policy: rules of sequences.
        limits: bounds of all queued requests.
        clock: returns monotonic nanoseconds.
        defer: as in `Scheduler`: requests that arrive together share a batch.
        cost_model: durations of batches; None to ignore due times.
        on_ended: called with a number of sequences that have ended, on any thread, without the lock.
        admission: as in `Scheduler`.
    """

    def __init__(
        self,
        policy: SequencePolicy,
        limits: QueueLimits,
        clock: Clock = monotonic_ns,
        defer: Callable[[Callable[[], None]], object] = lambda callback: callback(),
        cost_model: CostModel | None = None,
        on_ended: Callable[[int], object] = lambda _count: None,
        admission: AdmissionController | None = None,
    ) -> None:
        rules = BatchPolicy(merge=False)
        super().__init__(rules, limits, clock=clock, defer=defer, cost_model=cost_model, admission=admission)
        self._table = SequenceTable(policy, limits, self._retry_s)
        self._work: dict[int, threading.Condition] = {}
        self._tasks: dict[int, IdleTask] = {}
        self._on_ended = on_ended

    # Called by protocols

    def accepts(self, key: SequenceKey) -> bool:
        """Return True if a request without START may follow for this id."""
        with self._lock:
            self._table.expire(self._clock())
            result = self._table.accepts(key)
        self._settle()
        return result

    def supersede(self, key: SequenceKey) -> None:
        """End the live sequence of an id: another version has a new sequence of that id."""
        with self._lock:
            self._table.supersede(key)
        self._settle()
        self._wake_instances()

    def enqueue(self, entries: Sequence[Entry], at_once: bool = False) -> None:
        """Queue the entry of one request of a sequence; raises as `SequenceTable.add`. `at_once` has no effect."""
        if not self._add(entries):
            self._defer(self._wake_instances)

    def run(self, entries: Sequence[Entry], caller_waits: bool) -> None:
        """Queue the entry of one request, and wake its instance at once; `caller_waits` has no effect."""
        self._add(entries)
        self._wake_instances()

    def _add(self, entries: Sequence[Entry]) -> bool:
        """Queue the entry of one request; returns True if the instances will be woken by an earlier call."""
        (entry,) = entries
        assert isinstance(entry, SequenceEntry), "a model with sequences queues their requests only"
        table = self._table
        try:
            with self._lock:
                if self._closed:
                    raise self._failure or Unavailable(_UNLOADING)
                table.add(entry, self._clock())
                waking, self._waking = self._waking, True
                return waking
        finally:
            if table.refused or table.ended:
                self._settle()

    def discard(self, entry: Entry) -> None:
        """End the sequence of a queued request that was cancelled or timed out; a no-op once the request runs."""
        assert isinstance(entry, SequenceEntry), "a model with sequences queues their requests only"
        with self._lock:
            self._table.discard(entry)
        self._settle()
        self._wake_instances()

    def expire(self, entry: Entry, demote: bool = False) -> None:
        """End a request whose time in the queue is over, and its sequence; a no-op once it runs. `demote` has no effect."""
        assert isinstance(entry, SequenceEntry), "a model with sequences queues their requests only"
        if entry.queued and not entry.steps:
            text = "the request exceeded its timeout in the queue before it ran, and its sequence has ended: start it again"
            entry.completion.settle(QueueTimeout(text, self._retry_s()))  # which calls `discard`

    # Figures

    @property
    def depth(self) -> int:
        """Number of queued requests."""
        return self._table.count

    @property
    def size_bytes(self) -> int:
        """Memory of the queued requests."""
        return self._table.size_bytes

    @property
    def waiting_rows(self) -> int:
        """Number of queued rows."""
        return self._table.count

    def waiting(self, level: int) -> tuple[int, int]:
        """Return the queued requests, and their rows."""
        return self._table.count, self._table.count

    def locate(self, entry: Entry) -> tuple[int, int, int]:
        """Return an estimate of the rows ahead of an entry; see `Scheduler.locate`."""
        return self._table.count, FAR_NS, 0

    def rows_ahead(self, level: int, due_ns: int, client: str) -> int:
        """Estimate the queued rows ahead of a request."""
        return self._table.count

    def figures(self) -> SequenceFigures:
        """Return the figures of the sequences."""
        with self._lock:
            table = self._table
            # Plain text: orjson writes no member of an enumeration as a key, and the fallback is slow.
            ends = {str(reason): count for reason, count in table.ends.items()}
            refusals = {str(reason): count for reason, count in table.refusals.items()}
            return SequenceFigures(table.live, table.slots, table.used_slots, table.backlog, ends, refusals)

    # Called by instances

    def open_instance(self, index: int) -> None:
        """Add the slots of an instance, on its thread."""
        with self._lock:
            self._work[index] = threading.Condition(self._lock)
            self._table.open_instance(index)

    def close_instance(self, index: int, reason: str) -> None:
        """Remove the slots of an instance; its sequences end with the reason."""
        with self._lock:
            self._work.pop(index, None)
            self._table.close_instance(index, reason)
        self._settle()
        self._wake_instances()

    def lose_state(self, index: int, reason: str) -> None:
        """End the sequences of an instance that has lost their state."""
        with self._lock:
            self._table.lose_state(index, reason)
        self._settle()

    def reschedule(self, entry: Entry, result: Rescheduled) -> None:
        """Record that the model has scheduled a request of the running batch again; on the thread of its instance."""
        assert isinstance(entry, SequenceEntry), "a model with sequences queues their requests only"
        assert entry.member is not None, "a Python model runs its requests as a list"
        member, entry.is_start = entry.member, False
        parameters, sink = {**member.parameters, FLAGS_PARAMETER: 0}, None if result.open is None else result.open.sink
        entry.member = member._replace(parameters=parameters, sink=sink, open=result.open)
        entry.is_rescheduled = entry.is_held = True
        if result.open is None or result.open.when_room(lambda: self._release(entry)):
            entry.is_held = False

    def _release(self, entry: SequenceEntry) -> None:
        """Let the next step of a request run; called once, perhaps before `finish_batch`."""
        with self._lock:
            self._table.release(entry)
        self._wake_instances()

    def slot_wait_ns(self, key: SequenceKey, now_ns: int) -> int:
        """Predict the wait of a sequence that starts now for a slot; see `SequenceTable.slot_wait_ns`."""
        with self._lock:
            wait_ns = self._table.slot_wait_ns(key, now_ns)
        self._settle()
        return wait_ns

    def new_id(self, limit: int, is_text: bool) -> CorrelationId:
        """Return an id for a request without one; see `SequenceTable.new_id`."""
        with self._lock:
            return self._table.new_id(limit, is_text)

    def finish_batch(self, index: int) -> None:
        """Record the end of the running batch of an instance, once its requests are settled."""
        with self._lock:
            self._table.finish_batch(index, self._clock())
        self._settle()
        self._wake_instances()

    def offer(self, task: IdleTask) -> None:
        """Wake an instance for a task, if no sequence is live: its `take_batch` returns None, and `take_task` the task."""
        with self._lock:
            if self._work and not (self.is_ending() or self._table.live or self._tasks):
                index, condition = next(iter(self._work.items()))
                self._tasks[index] = task
                condition.notify()

    def take_task(self, index: int) -> IdleTask | None:
        """Return the task for which an instance was woken; None without one."""
        with self._lock:
            return self._tasks.pop(index, None)

    def take_batch(self, index: int) -> Batch | None:
        """Block until there is a batch for an instance; None for an offer, once closed and empty, or paused."""
        while True:
            with self._lock:
                table, now_ns = self._table, self._clock()
                table.expire(now_ns)
                if self._paused or index in self._tasks:
                    return None
                answer = table.take(index, now_ns, self._closed)
                is_done = isinstance(answer, Batch) or (self._closed and not table.count)
                if not (is_done or table.refused or table.ended or table.touched - {index}):
                    until_ns = answer.time_ns if isinstance(answer, WaitUntil) else FAR_NS
                    expiry_ns = table.next_expiry_ns
                    until_ns = until_ns if expiry_ns is None else min(until_ns, expiry_ns)
                    table.touched.discard(index)
                    self._work[index].wait(None if until_ns == FAR_NS else max(until_ns - now_ns, 0) / NS_PER_S)
            self._settle()
            self._wake_instances()
            if is_done:
                return answer if isinstance(answer, Batch) else None

    # Called by the owner

    def drain_sequences(self) -> None:
        """Start no sequence any more; sequences end once they have no queued request, without an END."""
        with self._lock:
            self._table.drain()
        self._settle()
        self._wake_instances()

    def drop(self) -> list[Entry]:
        """End all sequences, remove and return all queued entries, for the caller to settle; new sequences are accepted."""
        with self._lock:
            entries = self._table.clear("the model could not be loaded")
        self._settle()
        return list(entries)

    def fail(self, error: Exception) -> list[Entry]:
        """Accept no more requests, end all sequences; remove and return all queued entries, for the caller to settle."""
        with self._lock:
            self._closed, self._failure = True, error
            self._release_sleepers()
            entries = self._table.clear(str(error))
        self._settle()
        return list(entries)

    def _release_sleepers(self) -> None:
        for condition in self._work.values():
            condition.notify()

    def _wake_instances(self) -> None:
        """Wake the threads of instances with new work."""
        with self._lock:
            self._waking = False
            for index in self._table.touched:
                if index in self._work:
                    self._work[index].notify()
            self._table.touched.clear()

    def _settle(self) -> None:
        """Settle refused requests and report ended sequences; called without the lock."""
        table = self._table
        if not (table.refused or table.ended):
            return
        with self._lock:
            refused, table.refused = table.refused, []
            ended, table.ended = table.ended, 0
        settle_all([(entry.completion, error) for entry, error in refused])
        if ended:
            self._on_ended(ended)
