"""The queue of a model version, from which idle instances pull batches: a lock around queue, decision and sleeping threads.

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
from functools import partial
from typing import NamedTuple, Protocol

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.completion import settle_all
from headrace.core.errors import HeadraceError, Overloaded, QueueTimeout, Unavailable, WouldMiss
from headrace.scheduling.batching import IDLE, CloseReason, CostModel, Idle, Skip, Take, WaitUntil, decide
from headrace.scheduling.policy import BatchPolicy, QueueLimits
from headrace.scheduling.queue import FAR_NS, Entry, Queue, QueueOrder, ShapeQueue


@dataclass(slots=True)
class Batch:
    """Requests that run together.

    Attributes:
        entries: live entries of one shape, in the order of serving.
        reason: why the batch was closed.
        taken_ns: monotonic, when it was closed.
    """

    entries: list[Entry]
    reason: CloseReason
    taken_ns: int


class BatchSelector:
    """Selects the next batch from the queue of one model version.

    Args:
        policy: how requests may be merged.
        limits: what may wait at most.
        levels: number of priority levels.
        order: which goes first.
        retry_s: when it makes sense to come back, in seconds, if the queue is full.

    Attributes:
        cost_model: knows what batches take; None: nobody does, and it does not matter when anything is due.
        dropped: entries that were given up and why, for the caller to settle once the lock is released.
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
        """Queue the entries of one request together, or none of them.

        Raises:
            Overloaded: the queue is full.
        """
        size_bytes = entries[0].size_bytes if len(entries) == 1 else sum([entry.size_bytes for entry in entries])
        queue, limits = self.queue, self.limits
        if limits.level_counts:
            self._check_level(entries)
        full = queue.count + len(entries) > limits.max_count or (
            queue.count and queue.size_bytes + size_bytes > limits.max_size_bytes
        )
        if full and not self._make_room(entries, size_bytes):
            raise Overloaded(
                f"the queue is full: {queue.count} requests of {queue.size_bytes} bytes wait; "
                f"{limits.max_count} requests of {limits.max_size_bytes} bytes may",
                self._retry_s(),
            )
        if len(entries) == 1:
            queue.push(entries[0])
        else:
            for entry in entries:
                queue.push(entry)

    def poll(self, now_ns: int, begins_ns: int, closed: bool) -> Batch | WaitUntil | Idle:
        """What to run.

        Args:
            now_ns: monotonic.
            begins_ns: when it would begin to be computed, if that is later.
            closed: nothing more will come: there is nothing to wait for.
        """
        at_ns = begins_ns if begins_ns > now_ns else now_ns
        shape_queues = self.queue.shape_queues
        while self.queue.count:
            if len(shape_queues) == 1:  # as for most models: there is nothing to compare
                shape_queue = next(iter(shape_queues))
                answer = self._decide(shape_queue, at_ns, closed)
            else:
                shape_queue, answer = self._first(at_ns, closed)
            if type(answer) is Take:
                batch = Batch(self.queue.take(shape_queue, answer.count), answer.reason, now_ns)
                if shape_queue.due_count and shape_queue.last_rows:
                    self._refuse_overdue(shape_queue, now_ns)
                return batch
            if type(answer) is Skip:
                self._skip(shape_queue, answer.places)
            elif type(answer) is WaitUntil:
                return answer
        return IDLE

    def ready(self, now_ns: int) -> bool:
        """True if `poll` would find something to run."""
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
            answer = decide(shape_queue, at_ns, self.policy)
        if closed and type(answer) is WaitUntil:
            return Take(shape_queue.count, CloseReason.DRAIN)
        return answer

    def _first(self, at_ns: int, closed: bool) -> tuple[ShapeQueue, Take | Skip | WaitUntil | Idle]:
        """The lane that goes first of those that are ready, and what to do with it; else that whose time comes first."""
        answers = [
            (shape_queue, self._decide(shape_queue, at_ns, closed))
            for shape_queue in self.queue.shape_queues
            if shape_queue.count
        ]
        ready = [each for each in answers if type(each[1]) is not WaitUntil]
        if ready:
            return min(ready, key=lambda each: each[0].rank)
        return min(answers, key=lambda each: each[1].time_ns if type(each[1]) is WaitUntil else 0)

    def _skip(self, shape_queue: ShapeQueue, places: Sequence[int]) -> None:
        """Put entries of a lane last, or refuse them if nobody would wait for the answer."""
        for entry in self.queue.skip(shape_queue, places):
            if entry.deadline_ns > entry.due_ns:
                entry.last = True
                self.queue.push(entry)
            else:
                self._drop(entry, WouldMiss("the request can no longer be answered before its deadline"))

    def _refuse_overdue(self, shape_queue: ShapeQueue, now_ns: int) -> None:
        """There is more to do than can be done in time: those who come twice as late as promised need not wait any longer."""
        before_ns = now_ns - self.policy.objective_ns
        while (entry := shape_queue.overdue(before_ns)) is not None:
            self.queue.discard(entry)
            self._drop(entry, WouldMiss("the request can no longer be answered in the time that the model promises"))

    def _make_room(self, entries: list[Entry], size_bytes: int) -> bool:
        """Where clients share, a full queue refuses who would be served last, not who comes last."""
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
        self._drop(last_entry, Overloaded("the queue is full, and other clients have less in it", self._retry_s()))
        return True

    def _check_level(self, entries: list[Entry]) -> None:
        level = entries[0].level
        most = self.limits.level_counts.get(level, 0)
        count = self.queue.level(level)[0]
        if most and count + len(entries) > most:
            raise Overloaded(
                f"the queue of priority level {level + 1} is full: {count} requests wait, {most} may", self._retry_s()
            )

    def _drop(self, entry: Entry, error: HeadraceError) -> None:
        entry.inputs = {}
        self.dropped.append((entry, error))


class InlineDispatch(Protocol):
    """Runs a batch for an instance whose thread sleeps, on the thread that queued the request: one or two wake-ups fewer."""

    def accepts(self, entry: Entry, caller_waits: bool) -> bool:
        """Under the scheduler's lock: True if `dispatch` (or `run`, if `caller_waits`) may be called now with this entry."""

    def dispatch(self, batch: Batch) -> None:
        """Launch the batch; must not block or raise."""

    def run(self, batch: Batch, on_launched: Callable[[], None]) -> None:
        """Run the batch to its end, on a thread that may block.

        Calls `on_launched` in every case, once other batches may run behind this one.
        """

    def needs_wake_up(self) -> bool:
        """Under the scheduler's lock, after `dispatch` or in `on_launched`: True if the instance's thread must wake up now.

        If it sleeps on, its next wake-up makes `next_batch` return None, since the state of the instance has changed.
        """


class InlineClaim(NamedTuple):
    """A sleeping instance, the batch that runs in its place, and the dispatcher that runs it."""

    sleeper: threading.Lock
    inline_dispatch: InlineDispatch
    batch: Batch


_FOREVER = -1.0


class Scheduler:
    """The queue of one model version and the instances that pull from it.

    Args:
        policy: how requests may be merged.
        limits: what may wait at most.
        levels: number of priority levels (one more is kept for demoted requests).
        clock: monotonic nanoseconds.
        defer: calls back once the caller of `enqueue` is done with what it has at hand: on an event loop `call_soon`, so that
            requests which arrive together are woken for once and run together.
        order: which request goes first; by priority, then by when it is due, if absent.

    Attributes:
        on_dropped: told of entries that were given up since they could not be in time any more; called without the lock.
        retry_after_s: when who finds the queue full should come back, in seconds; given the time, and called under the lock.
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
        self._queue = self._selector.queue
        self._defer = defer
        self._waking = False  # `_wake` is about to be called
        self._sleepers: list[threading.Lock] = []
        self._timed_sleepers = 0
        self._inline_dispatches: dict[threading.Lock, InlineDispatch] = {}  # of sleepers without an alarm
        self._dispatched: set[threading.Lock] = set()  # sleepers whose shortcut was taken
        self._recent: threading.Lock | None = None  # the last of them
        self._closed = False
        self._paused = False
        self._failure: Exception | None = None

    # Called by front ends

    def enqueue(self, entries: list[Entry]) -> None:
        """Queue the entries of one request together, or none of them.

        Raises:
            Overloaded: the queue is full.
            Unavailable: the model is being unloaded, or all its instances have died.
        """
        with self._lock:
            if self._closed:
                raise self._failure or Unavailable("the model is being unloaded")
            self._selector.push(entries)
            waking, self._waking = self._waking, True
        if self._selector.dropped:
            self._settle_dropped()
        if not waking:
            self._defer(self._wake)

    def run(self, entries: list[Entry], caller_waits: bool) -> None:
        """As `enqueue`, from any thread, and without waiting for others that may come.

        Args:
            entries: of one request.
            caller_waits: the calling thread has nothing else to do. If there is only one entry, and an instance's dispatcher
                accepts it, this thread runs it. On return it is settled, or handed to the sequencer.
        """
        with self._lock:
            if self._closed:
                raise self._failure or Unavailable("the model is being unloaded")
            self._selector.push(entries)
            claim = self._claim(caller_waits=True) if caller_waits else None
        if self._selector.dropped:
            self._settle_dropped()
        if claim is None:
            self._wake()
        else:
            claim.inline_dispatch.run(claim.batch, partial(self._return_sleeper, claim))

    def _wake(self) -> None:
        """Wake one instance for all that was queued since the last time; it wakes the next if it leaves work behind."""
        with self._lock:
            self._waking = False
            if not self._sleepers or not self._should_wake():
                return
            claim = self._claim(caller_waits=False)
            sleeper = None if claim else self._sleepers.pop()
        if self._selector.dropped:
            self._settle_dropped()
        if claim is not None:
            claim.inline_dispatch.dispatch(claim.batch)
            self._return_sleeper(claim)
        elif sleeper is not None:
            sleeper.release()

    def _claim(self, caller_waits: bool) -> InlineClaim | None:
        """The only request that waits, taken out, if it may be run at once by a shortcut."""
        entry = None if self._paused else self._queue.only
        if entry is None:
            return None
        for sleeper in self._dispatch_candidates():
            inline_dispatch = self._inline_dispatches.get(sleeper)
            if inline_dispatch is None or not inline_dispatch.accepts(entry, caller_waits):
                continue
            answer = self._selector.poll(self._clock(), 0, self._closed)
            if not isinstance(answer, Batch):
                return None
            self._sleepers.remove(sleeper)
            self._dispatched.add(sleeper)
            self._recent = sleeper
            return InlineClaim(sleeper, inline_dispatch, answer)
        return None

    def _dispatch_candidates(self) -> Iterable[threading.Lock]:
        """Those who sleep, first the one whose shortcut was taken last: a single caller finds its threads and memory warm."""
        recent, sleepers = self._recent, self._sleepers
        if recent is None or recent not in sleepers:
            return reversed(sleepers)
        return (recent, *reversed(sleepers)) if len(sleepers) > 1 else sleepers

    def _return_sleeper(self, claim: InlineClaim) -> None:
        """Let the thread sleep on, or wake it up."""
        with self._lock:
            # Whoever had to wake it meanwhile did not find it asleep.
            if not (self._closed or self._paused or self._queue.count or claim.inline_dispatch.needs_wake_up()):
                self._sleepers.insert(0, claim.sleeper)  # busy: those that are not are woken first
                return
        claim.sleeper.release()

    def discard(self, entry: Entry) -> None:
        """Remove an entry whose caller has disconnected or whose deadline has passed; a no-op once it is being run."""
        with self._lock:
            self._queue.discard(entry)

    def expire(self, entry: Entry, demote: bool) -> None:
        """The queue policy's timeout of an entry has passed: refuse it, or serve it after all others.

        A no-op once the entry is being run.
        """
        with self._lock:
            if demote:
                self._queue.put_last(entry)
                return
            if not self._queue.discard(entry):
                return
            retry_after_s = self._retry_s()
        entry.completion.settle(QueueTimeout("the request waited longer than the queue policy allows", retry_after_s))

    @property
    def depth(self) -> int:
        """Requests waiting now."""
        return self._queue.count

    # Called by instances

    @property
    def waiting_rows(self) -> int:
        """Rows waiting now."""
        return self._queue.total_rows

    def waiting(self, level: int) -> tuple[int, int]:
        """Requests of a priority level that wait, and their rows."""
        with self._lock:
            return self._queue.level(level)

    def place(self, entry: Entry) -> tuple[int, int, int]:
        """As `Queue.place`."""
        with self._lock:
            return self._queue.place(entry)

    def rows_ahead(self, level: int, due_ns: int, client: str) -> int:
        """About how many rows would be served before such a request, if it were queued now.

        Args:
            level: its priority, from 0.
            due_ns: monotonic; `FAR_NS`: never.
            client: who asks.
        """
        with self._lock:
            return self._queue.rows_ahead(level, due_ns, self._clock(), client)

    def poll(self, now_ns: int, begins_ns: int = 0) -> Batch | WaitUntil | Idle:
        """What an idle instance should do at `now_ns`; never blocks.

        Of the lanes that are ready, that with the most urgent request wins; see `headrace.scheduling.queue`.

        Args:
            now_ns: monotonic.
            begins_ns: when a batch would begin to be computed, if that is later.
        """
        with self._lock:
            answer = self._selector.poll(now_ns, begins_ns, self._closed)
        if self._selector.dropped:
            self._settle_dropped()
        return answer

    def next_batch(
        self,
        sleeper: threading.Lock,
        interrupted: Callable[[], bool] = lambda: False,
        busy: bool = False,
        inline_dispatch: InlineDispatch | None = None,
        begins_ns: int = 0,
    ) -> Batch | None:
        """Block until there is a batch to run; None when the scheduler is closed and empty, or paused, or if there is none
        and `interrupted` says so.

        Args:
            sleeper: a lock that the calling thread owns and holds, on which it sleeps.
            interrupted: asked under the lock before the thread sleeps; `interrupt` has it asked again.
            busy: the instance has batches under way: those that have none are woken first.
            inline_dispatch: runs a batch in place of the sleeping thread, on the thread that calls `enqueue` or that `defer`
                uses.
            begins_ns: when a batch would begin to be computed, if it would not at once.
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
                if type(answer) is Batch or dispatched or interrupted():
                    # Somebody must run what is left or keep the alarm for it, and it is not this thread any more.
                    if self._queue.count and self._sleepers and self._should_wake():
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
                self._sleepers.insert(0 if busy else len(self._sleepers), sleeper)  # woken from the end
            woken = sleeper.acquire(timeout=timeout_s)
            if timeout_s is not _FOREVER:
                with self._lock:
                    self._timed_sleepers -= 1
                    if woken:
                        continue
                    if sleeper in self._sleepers:
                        self._sleepers.remove(sleeper)
                        continue
                sleeper.acquire()  # somebody woke us in the moment our time was up: consume that

    def interrupt(self, sleeper: threading.Lock) -> None:
        """From any thread: have the `next_batch` that sleeps on `sleeper`, if one does, ask whether it is interrupted."""
        with self._lock:
            if sleeper not in self._sleepers:
                return  # it is awake, or about to be: it asks anyway
            self._sleepers.remove(sleeper)
        sleeper.release()

    def set_cost_model(self, cost_model: CostModel) -> None:
        """Keep to what requests are due, by what is known of the times of batches."""
        self._selector.cost_model = cost_model

    def stop_merging(self) -> None:
        """Run every request alone from here on; batches that were taken already are not affected."""
        with self._lock:
            self._selector.policy = replace(self._selector.policy, merge=False)

    def set_instances(self, count: int) -> None:
        """How many instances pull."""
        if self._selector.cost_model is not None:
            self._selector.cost_model.instances = max(count, 1)

    # Called by the owner

    def pause(self) -> None:
        """Hand out nothing more until `resume`: `next_batch` answers None, whatever waits; requests are queued as before."""
        with self._lock:
            self._paused = True
            sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.release()

    def resume(self) -> None:
        """Hand out again; whoever is to pull asks `next_batch` from here on."""
        with self._lock:
            self._paused = False

    def drop(self) -> list[Entry]:
        """Give up what waits, and take more: the caller settles the entries returned."""
        with self._lock:
            return self._queue.clear()

    def close(self) -> None:
        """Accept nothing more; what waits is still served, without delay."""
        with self._lock:
            sleepers = self._shut()
        for sleeper in sleepers:
            sleeper.release()

    def fail(self, error: Exception) -> list[Entry]:
        """Accept nothing more and give up what waits: the caller settles the entries returned."""
        with self._lock:
            self._failure = error
            entries = self._queue.clear()
            sleepers = self._shut()  # under the same lock: nothing may be queued after the clearing
        for sleeper in sleepers:
            sleeper.release()
        return entries

    def reopen(self) -> None:
        """Accept again after `fail`; a no-op after `close` alone."""
        with self._lock:
            if self._failure is not None:
                self._closed, self._failure = False, None

    def _shut(self) -> list[threading.Lock]:
        """Close, and give the sleepers to wake once the lock is released."""
        self._closed = True
        sleepers, self._sleepers = self._sleepers, []
        return sleepers

    def _should_wake(self) -> bool:
        """A sleeper can run something now, or something waits and nobody has set an alarm for it yet."""
        if not self._timed_sleepers:
            return bool(self._queue.count)
        return self._selector.ready(self._clock())

    def _settle_dropped(self) -> None:
        """Without the lock: tell those whose requests were given up."""
        with self._lock:
            dropped, self._selector.dropped = self._selector.dropped, []
        settle_all([(entry.completion, error) for entry, error in dropped])
        self.on_dropped([entry for entry, _ in dropped if entry.due_ns != FAR_NS])

    def _retry_s(self) -> float:
        return self.retry_after_s(self._clock())
