"""Queue of a model version from which idle instances pull batches: one lock around queue, decision and sleeping threads.

There is no scheduler thread. `next_batch` is the loop of an instance: call `poll`, sleep until its result can change, call it
again. `poll` never blocks, so tests and the simulator call it in virtual time.

Ownership: every attribute of `Scheduler` is guarded by `_lock`. Lock order: no other lock is taken while it is held, and no
completion is settled under it. `BatchSelector` neither locks nor reads a clock.

`InlineDispatch` lets the thread that queues a request run it in place of a sleeping instance: fewer threads to wake up for a
single caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import Protocol

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.completion import settle_all
from headrace.core.errors import HeadraceError, Overloaded, QueueTimeout, Unavailable, WouldMiss
from headrace.engine.scheduling.assembly import Arrangement
from headrace.engine.scheduling.batching import IDLE, CloseReason, CostModel, Idle, Skip, Take, WaitUntil, decide
from headrace.engine.scheduling.policy import BatchPolicy, QueueLimits
from headrace.engine.scheduling.queue import FAR_NS, Entry, Queue, QueueOrder, ShapeQueue
from headrace.runtimes.base import Execution, InFlightBatch

_ROWS = attrgetter("rows")


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that run together, from pull to response.

    Ownership: the thread that pulled it; in a pipeline the finisher thread once it is launched.

    Attributes:
        entries: entries of one shape, in the order of serving.
        reason: reason for closing the batch.
        taken_ns: monotonic time at which the batch was closed.
        rows: rows of all entries.
        assembled_ns: monotonic time of its launch in a pipeline.
        instances: busy instances at its start, including its own.
        in_flight: the batch in the backend of a pipeline, from launch to finish.
        arrangement: way back from its outputs to requests of different length, from launch to finish; None for equal shapes.
    """

    entries: list[Entry]
    reason: CloseReason
    taken_ns: int
    rows: int
    assembled_ns: int = 0
    instances: int = 1
    in_flight: InFlightBatch | None = None
    arrangement: Arrangement | None = None

    def drop_settled(self) -> bool:
        """Drop entries that were cancelled or whose deadline has passed; False if none is left."""
        entries = self.entries
        if len(entries) > 1 or entries[0].completion.is_settled:
            live = [entry for entry in entries if not entry.completion.is_settled]
            if len(live) != len(entries):
                self.entries, self.rows = live, sum(map(_ROWS, live))
        return bool(self.entries)


def queue_full(requests: int, size_bytes: int, max_count: int, max_size_bytes: int, retry_after_s: float) -> Overloaded:
    """Return the error of a request for which the queue has no room.

    Args:
        requests, size_bytes: queued requests and their memory.
        max_count, max_size_bytes: bounds of the queue.
        retry_after_s: delay before a retry in seconds.
    """
    return Overloaded(
        f"the queue is full: {requests} requests of {size_bytes} bytes wait, "
        f"{max_count} requests of {max_size_bytes} bytes are allowed: retry later",
        retry_after_s,
    )


class BatchSelector:
    """Selects the next batch from the queue of one model version.

    Args:
        policy: batching rules.
        limits: bounds of the queue.
        levels: number of priority levels.
        order: order of serving.
        retry_s: returns the delay in seconds after which a client should retry if the queue is full.

    Attributes:
        cost_model: durations of batches; None to ignore due times.
        dropped: dropped entries with their errors; the caller settles them after it has released the lock.
    """

    def __init__(
        self, policy: BatchPolicy, limits: QueueLimits, levels: int, order: QueueOrder, retry_s: Callable[[], float]
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.queue = Queue(levels, order)
        self._retry_s = retry_s
        self.cost_model: CostModel | None = None
        self.dropped: list[tuple[Entry, HeadraceError]] = []

    def push(self, entries: list[Entry]) -> None:
        """Queue all entries of one request or none.

        Raises:
            Overloaded: the queue is full.
        """
        queue, limits, first = self.queue, self.limits, entries[0]
        if limits.level_counts:
            self._check_level(entries)
        if len(entries) == 1:
            size_bytes, added = first.size_bytes, first.requests
        else:
            size_bytes, added = sum([entry.size_bytes for entry in entries]), len(entries)
        full = queue.count + queue.joined + added > limits.max_count or (
            queue.count and queue.size_bytes + size_bytes > limits.max_size_bytes
        )
        if full and not self._make_room(entries, size_bytes):
            raise queue_full(queue.requests, queue.size_bytes, limits.max_count, limits.max_size_bytes, self._retry_s())
        for entry in entries:
            queue.push(entry)

    def poll(self, now_ns: int, begins_ns: int, closed: bool) -> Batch | WaitUntil | Idle:
        """Select the next batch, or the time at which to poll again.

        Args:
            now_ns: monotonic.
            begins_ns: monotonic start of the batch's compute, if later than `now_ns`.
            closed: True if no request will arrive, so that waiting gains nothing.
        """
        at_ns = begins_ns if begins_ns > now_ns else now_ns
        shape_queues = self.queue.shape_queues
        while self.queue.count:
            if len(shape_queues) == 1:  # the fast path of most models: no comparison
                shape_queue = next(iter(shape_queues))
                answer = self._decide(shape_queue, at_ns, closed)
            else:
                shape_queue, answer = self._first(at_ns, closed)
            if type(answer) is Take:
                queued_rows = self.queue.total_rows
                entries = self.queue.take(shape_queue, answer.count)
                rows = queued_rows - self.queue.total_rows
                if self.queue.joined or entries[0].members is not None:
                    rows = self._divide_groups(shape_queue, entries, answer.reason, queued_rows)
                if shape_queue.due_count and shape_queue.last_rows:
                    self._refuse_overdue(shape_queue, now_ns)
                return Batch(entries, answer.reason, now_ns, rows)
            if type(answer) is Skip:
                self._skip(shape_queue, answer.positions)
            elif type(answer) is WaitUntil:
                return answer
        return IDLE

    def _divide_groups(
        self, shape_queue: ShapeQueue, entries: list[Entry], reason: CloseReason, queued_rows: int
    ) -> int:
        """Leave members of a group in the queue for which a batch is too small, or fill a batch with members of the next group.

        Args:
            shape_queue: queue of the batch.
            entries: of the batch; changed in place.
            reason: why the batch closed.
            queued_rows: rows in the queue before the batch was taken.

        Returns:
            Rows of the batch.
        """
        rows: int = sum(map(_ROWS, entries))
        target = self.policy.max_rows if self.policy.merge else 1
        costs = None if self.cost_model is None or not self.policy.merge else self.cost_model.current
        first = entries[0]
        if costs is not None and first.due_ns != FAR_NS:
            target = costs.best[min(queued_rows, target)]
        if len(entries) == 1 and first.requests > 1 and rows > target:
            entries[0] = first.split(max(first.fitting(target), 1))
            self.queue.push(first)
            return entries[0].rows
        if rows < target and reason is CloseReason.FULL and shape_queue.count and not shape_queue.front.last:
            part = self.queue.take_part(shape_queue, target - rows)
            if part is not None:
                entries.append(part)
                rows += part.rows
        return rows

    def batch_of_one(self, entry: Entry) -> Batch | None:
        """Return the batch that `poll` would return if this entry were queued; None if that depends on more than the entry."""
        queue, policy, rows = self.queue, self.policy, entry.rows
        if queue.count or not queue.order.plain or entry.due_ns != FAR_NS:
            return None
        if not policy.merge:
            reason = CloseReason.SINGLE
        elif rows in policy.preferred_rows:
            reason = CloseReason.PREFERRED
        elif rows >= policy.max_rows:
            reason = CloseReason.FULL
        elif policy.max_delay_ns <= 0:
            reason = CloseReason.IDLE
        else:
            return None
        return Batch([entry], reason, entry.enqueued_ns, rows)

    def ready(self, now_ns: int) -> bool:
        """Return True if `poll` would return a batch."""
        return any(
            isinstance(self._decide(shape_queue, now_ns, False), Take | Skip) for shape_queue in self.queue.shape_queues
        )

    def _decide(self, shape_queue: ShapeQueue, at_ns: int, closed: bool) -> Take | Skip | WaitUntil | Idle:
        cost_model, order = self.cost_model, self.queue.order
        if shape_queue.due_count and cost_model is not None:
            if not order.plain:
                cost_model.crowded = order.crowded
            answer = decide(shape_queue, at_ns, self.policy, cost_model.current)
        else:
            efficient_rows = 0 if cost_model is None else cost_model.efficient_rows
            answer = decide(shape_queue, at_ns, self.policy, None, efficient_rows)
        if closed and type(answer) is WaitUntil:
            return Take(shape_queue.count, CloseReason.DRAIN)
        return answer

    def _first(self, at_ns: int, closed: bool) -> tuple[ShapeQueue, Take | Skip | WaitUntil | Idle]:
        """Return the most urgent shape queue that is ready, with its decision; else the one whose wait ends first."""
        answers = [
            (shape_queue, self._decide(shape_queue, at_ns, closed))
            for shape_queue in self.queue.shape_queues
            if shape_queue.count
        ]
        ready = [each for each in answers if type(each[1]) is not WaitUntil]
        if ready:
            return min(ready, key=lambda each: each[0].rank)
        return min(answers, key=lambda each: each[1].time_ns if type(each[1]) is WaitUntil else 0)

    def _skip(self, shape_queue: ShapeQueue, positions: Sequence[int]) -> None:
        """Serve entries of a shape queue last, or reject them if their deadline will have passed."""
        for entry in self.queue.skip(shape_queue, positions):
            if entry.requests > 1:  # some of a group may still be in time
                for part in entry.apart():
                    self.queue.push(part)
            elif entry.deadline_ns > entry.due_ns:
                entry.last = True
                self.queue.push(entry)
            else:
                self._drop(
                    entry,
                    WouldMiss(
                        "the request can no longer complete before its deadline: retry, or set a longer deadline"
                    ),
                )

    def _refuse_overdue(self, shape_queue: ShapeQueue, now_ns: int) -> None:
        """Under overload, drop entries that have waited longer than the objective beyond their due time."""
        before_ns = now_ns - self.policy.objective_ns
        while (entry := shape_queue.overdue(before_ns)) is not None:
            self.queue.discard(entry)
            self._drop(
                entry,
                WouldMiss("the request can no longer complete within twice the model's latency objective: retry later"),
            )

    def _make_room(self, entries: list[Entry], size_bytes: int) -> bool:
        """Drop the entry that would be served last, if clients share the model and the new request goes before it."""
        queue, limits = self.queue, self.limits
        if queue.order.shares is None or len(entries) > 1:
            return False
        entry = entries[0]
        key = queue.order.key(entry.level, entry.due_ns, entry.enqueued_ns, entry.client)
        last_entries = [
            last_entry for shape_queue in queue.shape_queues if (last_entry := shape_queue.last_entry) is not None
        ]
        last_entry = max(last_entries, key=lambda each: (each.last, each.key), default=None)
        if last_entry is None or (not last_entry.last and last_entry.key <= key):
            return False
        if queue.size_bytes - last_entry.size_bytes + size_bytes > limits.max_size_bytes:
            return False
        queue.discard(last_entry)
        self._drop(
            last_entry,
            Overloaded("the queue is full, and this client uses more than its share: retry later", self._retry_s()),
        )
        return True

    def _check_level(self, entries: list[Entry]) -> None:
        level = entries[0].level
        max_count = self.limits.level_counts.get(level, 0)
        count = self.queue.level(level)[0]
        if max_count and count + len(entries) > max_count:
            raise Overloaded(
                f"the queue of priority level {level + 1} is full: {count} requests wait, {max_count} are allowed: retry later",
                self._retry_s(),
            )

    def _drop(self, entry: Entry, error: HeadraceError) -> None:
        entry.inputs = {}
        self.dropped.append((entry, error))


class CallerThread(Enum):
    """The thread that queued a request.

    Attributes:
        LOOP: the event loop, or what `Scheduler.defer` stands for.
        WAITS: a thread that would block until the response.
        BUSY: any other.
    """

    LOOP = auto()
    WAITS = auto()
    BUSY = auto()


class InlineDispatch(Protocol):
    """Runs a batch for an instance whose thread sleeps, on the thread that queued the request. Saves one or two wake-ups.

    Attributes:
        asynchronous: batches are in flight when `dispatch` and `run` return, and the instance's thread collects them. False:
            the batch is settled by then, and the state of the instance is as before.
    """

    asynchronous: bool

    def accepts(self, entry: Entry, caller: CallerThread) -> bool:
        """Return True if this entry may be passed to `dispatch` (or `run`, if WAITS) now. Called under the queue's lock."""

    def dispatch(self, batch: Batch) -> None:
        """Launch the batch, or run one that takes a few microseconds; must not raise."""

    def run(self, batch: Batch, on_launched: Callable[[], None]) -> None:
        """Run the batch to completion, on a thread that may block.

        Calls `on_launched` in every case, once other batches may run behind this one.
        """

    def needs_wake_up(self) -> bool:
        """Return True if the instance's thread must wake up. Called under the queue's lock, after `dispatch` or in `on_launched`.

        If the thread continues to sleep, its next wake-up makes `next_batch` return None if the dispatcher is asynchronous,
        since the state of the instance has changed.
        """


IdleTask = Callable[[Execution], None]
"""Runs on the thread of an idle instance, with its execution."""
InlineClaim = tuple[threading.Lock, InlineDispatch, Batch]
"""Lock of a sleeping instance, dispatcher that runs a batch without waking it, and the batch, which is one lone request."""


def _do_nothing(_execution: Execution) -> None:
    """Stand for an offered task that is dropped."""


_FOREVER = -1.0  # timeout of `Lock.acquire`
_UNLOADING = "the model is being unloaded and accepts no requests: retry once it is loaded"


class Scheduler:
    """The queue of one model version and the instances that pull from it; any thread may call.

    Args:
        policy: batching rules.
        limits: bounds of the queue.
        levels: number of priority levels; one more is added for demoted requests.
        clock: returns monotonic nanoseconds.
        defer: schedules a callback after the caller of `enqueue` has finished its work at hand. On an event loop this is
            `call_soon`: requests that arrive together cause one wake-up and share a batch.
        order: order of serving; by default priority, then due time.

    Attributes:
        on_dropped: callback for entries that were dropped because they would miss their due time; called without the lock.
        queue: the waiting entries; guarded by the lock, but its totals may be read without.
        retry_after_s: returns the retry delay in seconds for a full queue, given the monotonic time; called under the lock.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        limits: QueueLimits | None = None,
        levels: int = 1,
        clock: Clock = monotonic_ns,
        defer: Callable[[Callable[[], None]], object] = lambda callback: callback(),
        order: QueueOrder | None = None,
    ) -> None:
        self.on_dropped: Callable[[list[Entry]], object] = lambda _entries: None
        self.retry_after_s: Callable[[int], float] = lambda _now_ns: 1.0
        self._clock = clock
        self._lock = threading.Lock()
        self._selector = BatchSelector(policy, limits or QueueLimits(), levels, order or QueueOrder(), self._retry_s)
        self.queue = self._selector.queue
        self._defer = defer
        self._waking = False  # a call of `_wake` is scheduled
        self._sleepers: list[threading.Lock] = []
        self._timed_sleepers = 0
        self._inline_dispatches: dict[threading.Lock, InlineDispatch] = {}  # of sleepers without a timeout
        self._asynchronous = False  # those dispatchers are
        self._dispatched: set[threading.Lock] = set()  # sleepers in whose place a batch was run
        self._recent: threading.Lock | None = None  # the latest of them
        self._offers: dict[threading.Lock, IdleTask] = {}  # tasks of sleepers that are waking up for them
        self._closed = False
        self._paused = False
        self._failure: Exception | None = None

    # Called by front ends

    def enqueue(self, entries: list[Entry], at_once: bool = False) -> None:
        """Queue all entries of one request or none.

        Args:
            entries: the entries of one request.
            at_once: True if there is one entry, and it may run before this returns: if an instance sleeps, nothing is queued,
                and no batching rule holds it.

        Raises:
            Overloaded: the queue is full.
            Unavailable: the model is being unloaded, or all its instances have failed.
        """
        with self._lock:
            if self._closed:
                raise self._failure or Unavailable(_UNLOADING)
            claim = self._claim_alone(entries[0]) if at_once else None
            if claim is None:
                self._selector.push(entries)
                waking, self._waking = self._waking, True
        if claim is not None:
            _, inline_dispatch, batch = claim
            inline_dispatch.dispatch(batch)
            self._return_sleeper(claim)
            return
        if self._selector.dropped:
            self._settle_dropped()
        if not waking:
            self._defer(self._wake)

    def run(self, entries: list[Entry], caller_waits: bool) -> None:
        """Queue all entries of one request or none, and wake an instance at once instead of through `defer`.

        Args:
            entries: the entries of one request.
            caller_waits: True if the calling thread would block until the response. If there is one entry, and an instance's
                dispatcher accepts it, this thread runs it. On return the entry is settled or passed to the sequencer.

        Raises:
            Overloaded: the queue is full.
            Unavailable: the model is being unloaded, or all its instances have failed.
        """
        with self._lock:
            if self._closed:
                raise self._failure or Unavailable(_UNLOADING)
            self._selector.push(entries)
            claim = self._claim(CallerThread.WAITS) if caller_waits else None
        if self._selector.dropped:
            self._settle_dropped()
        if claim is None:
            self._wake(CallerThread.BUSY)
        else:
            _, inline_dispatch, batch = claim
            inline_dispatch.run(batch, partial(self._return_sleeper, claim))

    def _wake(self, caller: CallerThread = CallerThread.LOOP) -> None:
        """Wake one instance for all requests queued since the last call; it wakes the next if requests remain queued."""
        with self._lock:
            self._waking = False
            if not self._sleepers or not self._should_wake():
                return
            claim = self._claim(caller)
            sleeper = None if claim else self._sleepers.pop()
        if self._selector.dropped:
            self._settle_dropped()
        if claim is not None:
            _, inline_dispatch, batch = claim
            inline_dispatch.dispatch(batch)
            self._return_sleeper(claim)
        elif sleeper is not None:
            sleeper.release()

    def _claim(self, caller: CallerThread) -> InlineClaim | None:
        """Remove the only queued request, if an instance's dispatcher accepts it now."""
        entry = None if self._paused else self.queue.only
        if entry is None or not (entry.inline or self._asynchronous or caller is CallerThread.WAITS):
            return None
        for sleeper in self._dispatch_candidates():
            inline_dispatch = self._inline_dispatches.get(sleeper)
            if inline_dispatch is None or not inline_dispatch.accepts(entry, caller):
                continue
            answer = self._selector.poll(self._clock(), 0, self._closed)
            if not isinstance(answer, Batch):
                return None
            self._sleepers.remove(sleeper)
            if inline_dispatch.asynchronous:
                self._dispatched.add(sleeper)
            self._recent = sleeper
            return sleeper, inline_dispatch, answer
        return None

    def _claim_alone(self, entry: Entry) -> InlineClaim | None:
        """Like `_claim`, for an entry that is not queued: spares a lone request the way through the queue."""
        sleepers, sleeper = self._sleepers, self._recent
        if self._paused or not sleepers:
            return None
        if sleeper not in sleepers:
            sleeper = sleepers[-1]
        assert sleeper is not None
        inline_dispatch = self._inline_dispatches.get(sleeper)
        if inline_dispatch is None:
            return None
        if inline_dispatch.asynchronous and not inline_dispatch.accepts(entry, CallerThread.LOOP):
            return None
        batch = self._selector.batch_of_one(entry)
        if batch is None:
            return None
        sleepers.remove(sleeper)
        self._recent = sleeper
        return sleeper, inline_dispatch, batch

    def _dispatch_candidates(self) -> Iterable[threading.Lock]:
        """Return the sleepers, the most recently dispatched first: its memory is warm in the caches for a single caller."""
        recent, sleepers = self._recent, self._sleepers
        if recent is None or recent not in sleepers:
            return reversed(sleepers)
        return (recent, *reversed(sleepers)) if len(sleepers) > 1 else sleepers

    def _return_sleeper(self, claim: InlineClaim) -> None:
        """Return the claimed thread to the sleepers, or wake it up."""
        sleeper, inline_dispatch, _ = claim
        with self._lock:
            must_wake = inline_dispatch.needs_wake_up()
            # A wake-up meanwhile did not find this thread among the sleepers, so its reason is checked here.
            if not (must_wake or self._closed or self._paused or self.queue.count):
                if inline_dispatch.asynchronous:
                    self._sleepers.insert(0, sleeper)  # busy: idle instances are woken first
                else:
                    self._sleepers.append(sleeper)
                return
            if must_wake:
                self._dispatched.add(sleeper)
        sleeper.release()

    def discard(self, entry: Entry) -> None:
        """Remove an entry that was cancelled or whose deadline has passed; a no-op once it is in a batch."""
        with self._lock:
            self.queue.discard(entry)

    def expire(self, entry: Entry, demote: bool) -> None:
        """Reject an entry after the queue policy's timeout, or serve it last; a no-op once it is in a batch.

        Args:
            entry: the entry.
            demote: True to serve it after all others.
        """
        with self._lock:
            if demote:
                self.queue.put_last(entry)
                return
            if not self.queue.discard(entry):
                return
            retry_after_s = self._retry_s()
        entry.completion.settle(
            QueueTimeout(
                "the request exceeded the timeout of the queue policy before it ran: retry later", retry_after_s
            )
        )

    @property
    def depth(self) -> int:
        """Number of queued requests."""
        return self.queue.requests

    @property
    def size_bytes(self) -> int:
        """Memory of the queued requests."""
        return self.queue.size_bytes

    # Called by instances

    @property
    def waiting_rows(self) -> int:
        """Number of queued rows."""
        return self.queue.total_rows

    def waiting(self, level: int) -> tuple[int, int]:
        """Return the queued requests of a priority level, and their rows."""
        with self._lock:
            return self.queue.level(level)

    def locate(self, entry: Entry) -> tuple[int, int, int]:
        """Call `Queue.locate` under the lock."""
        with self._lock:
            return self.queue.locate(entry)

    def rows_ahead(self, level: int, due_ns: int, client: str) -> int:
        """Estimate the queued rows that would be served before such a request.

        Args:
            level: priority level, from 0.
            due_ns: monotonic due time; `FAR_NS` for none.
            client: name of the client.
        """
        with self._lock:
            return self.queue.rows_ahead(level, due_ns, self._clock(), client)

    def poll(self, now_ns: int, begins_ns: int = 0) -> Batch | WaitUntil | Idle:
        """Return the action of an idle instance at `now_ns`; never blocks.

        Of the shape queues that are ready, the one with the most urgent request is selected; see `scheduling.queue`.

        Args:
            now_ns: monotonic.
            begins_ns: monotonic start of the batch's compute, if later than `now_ns`.
        """
        with self._lock:
            answer = self._selector.poll(now_ns, begins_ns, self._closed)
        if self._selector.dropped:
            self._settle_dropped()
        return answer

    def next_batch(
        self,
        sleeper: threading.Lock,
        interrupted: Callable[[], bool] | None = None,
        busy: bool = False,
        inline_dispatch: InlineDispatch | None = None,
        begins_ns: int = 0,
    ) -> Batch | None:
        """Block until there is a batch to run.

        Args:
            sleeper: a lock that the calling thread owns and holds, and on which it sleeps.
            interrupted: called under the lock before the thread sleeps, and again after `interrupt`; True ends the wait.
            busy: True if the instance has batches in flight: instances without any are woken first.
            inline_dispatch: runs a batch in place of the sleeping thread, on the thread that calls `enqueue` or the
                callback of `defer`.
            begins_ns: monotonic start of the batch's compute, if later than now.

        Returns:
            The batch. None if the scheduler is closed and empty, paused, or interrupted.
        """
        while True:
            if self._selector.dropped:
                self._settle_dropped()
            with self._lock:
                self._inline_dispatches.pop(sleeper, None)
                dispatched = sleeper in self._dispatched
                self._dispatched.discard(sleeper)
                if self._paused:
                    return None
                answer = IDLE if dispatched else self._selector.poll(self._clock(), begins_ns, self._closed)
                if type(answer) is Batch or dispatched or (interrupted is not None and interrupted()):
                    # This thread leaves: another one must run the remaining requests or keep the timeout for them.
                    if self.queue.count and self._sleepers and self._should_wake():
                        self._sleepers.pop().release()
                    return answer if type(answer) is Batch else None
                if self._closed:
                    return None
                timeout_s = _FOREVER
                if type(answer) is WaitUntil:
                    timeout_s = max(answer.time_ns - self._clock(), 0) / NS_PER_S
                    self._timed_sleepers += 1
                elif inline_dispatch is not None:
                    self._inline_dispatches[sleeper] = inline_dispatch
                    self._asynchronous = inline_dispatch.asynchronous
                self._sleepers.insert(0 if busy else len(self._sleepers), sleeper)  # threads are woken from the end
            woken = sleeper.acquire(timeout=timeout_s)
            if timeout_s is not _FOREVER:
                with self._lock:
                    self._timed_sleepers -= 1
                    if woken:
                        continue
                    if sleeper in self._sleepers:
                        self._sleepers.remove(sleeper)
                        continue
                sleeper.acquire()  # a wake-up arrived just after the timeout: consume it

    def interrupt(self, sleeper: threading.Lock) -> None:
        """Make a `next_batch` that sleeps on `sleeper` call its `interrupted` again; any thread may call."""
        with self._lock:
            if sleeper not in self._sleepers:
                return  # it is awake or waking up, and calls `interrupted` before it sleeps
            self._sleepers.remove(sleeper)
        sleeper.release()

    def offer(self, task: IdleTask) -> None:
        """Wake a sleeping instance for a task, if no request waits: its `next_batch` returns None, and `take_offer` the task."""
        with self._lock:
            if self.is_ending() or self.queue.count or not self._sleepers:
                return
            sleeper = self._sleepers.pop()
            self._offers[sleeper] = task
            self._dispatched.add(sleeper)
        sleeper.release()

    def take_offer(self, sleeper: threading.Lock) -> IdleTask | None:
        """Return the task for which an instance was woken, one that does nothing if a request waits by now; None without one."""
        with self._lock:
            task = self._offers.pop(sleeper, None)
            return task if task is None or not (self.is_ending() or self.queue.count) else _do_nothing

    def set_cost_model(self, cost_model: CostModel) -> None:
        """Decide by due times and measured latencies from now on."""
        self._selector.cost_model = cost_model

    @property
    def merges(self) -> bool:
        """True while requests may share a batch."""
        return self._selector.policy.merge

    def set_merging(self, merge: bool) -> None:
        """Let requests share batches, or run each alone; batches that are closed already are not affected."""
        with self._lock:
            self._selector.policy = replace(self._selector.policy, merge=merge)

    def set_instances(self, count: int) -> None:
        """Set the number of instances that pull."""
        if self._selector.cost_model is not None:
            self._selector.cost_model.instances = max(count, 1)

    # Called by the owner

    def pause(self) -> None:
        """Return no batch until `resume`: `next_batch` returns None. Requests are queued as before."""
        with self._lock:
            self._paused = True
            self._release_sleepers()

    def resume(self) -> None:
        """End `pause`; instances call `next_batch` after it."""
        with self._lock:
            self._paused = False

    def is_ending(self) -> bool:
        """Return True if instances end: the scheduler is closed or paused."""
        return self._closed or self._paused

    def next_waiting(self) -> tuple[str, int] | None:
        """Return client and monotonic arrival of the request that would be served next; None without one."""
        with self._lock:
            fronts = [shape_queue.front for shape_queue in self.queue.shape_queues if shape_queue.count]
            entry = min(fronts, key=lambda each: (each.last, each.key), default=None)
            return None if entry is None else (entry.client, entry.enqueued_ns)

    def drop(self) -> list[Entry]:
        """Remove and return all queued entries, for the caller to settle; new requests are accepted."""
        with self._lock:
            return self.queue.clear()

    def close(self) -> None:
        """Accept no more requests; queued ones are served without delay."""
        with self._lock:
            self._closed = True
            self._release_sleepers()

    def fail(self, error: Exception) -> list[Entry]:
        """Accept no more requests; remove and return all queued entries, for the caller to settle.

        Args:
            error: error of later requests.
        """
        with self._lock:  # for all steps: no request may be queued after `clear`
            self._closed, self._failure = True, error
            self._release_sleepers()
            return self.queue.clear()

    def reopen(self) -> None:
        """Accept requests again after `fail`; a no-op after `close` alone."""
        with self._lock:
            if self._failure is not None:
                self._closed, self._failure = False, None

    def _release_sleepers(self) -> None:
        """Wake all sleepers; called under the lock, for which they wait."""
        for sleeper in self._sleepers:
            sleeper.release()
        self._sleepers.clear()

    def _should_wake(self) -> bool:
        """Return True if a batch is ready, or if requests wait and no thread sleeps with a timeout for them."""
        if not self._timed_sleepers:
            return bool(self.queue.count)
        return self._selector.ready(self._clock())

    def _settle_dropped(self) -> None:
        """Settle dropped entries with their errors; called without the lock."""
        with self._lock:
            dropped, self._selector.dropped = self._selector.dropped, []
        settle_all([(entry.completion, error) for entry, error in dropped])
        self.on_dropped([entry for entry, _ in dropped if entry.due_ns != FAR_NS])

    def _retry_s(self) -> float:
        return self.retry_after_s(self._clock())
