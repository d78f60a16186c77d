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
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Protocol

from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from headrace.core.completion import settle_all
from headrace.core.errors import QueueTimeout, Unavailable
from headrace.inference.scheduling.admission import AdmissionController
from headrace.inference.scheduling.batching import IDLE, CostModel, Idle, WaitUntil
from headrace.inference.scheduling.policy import BatchPolicy, QueueLimits
from headrace.inference.scheduling.queue import FAR_NS, Entry, QueueOrder
from headrace.inference.scheduling.selector import Batch, BatchSelector
from headrace.runtimes.base import Execution


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

    def accepts_batch(self, entry: Entry, rows: int, size_bytes: int) -> bool:
        """Return True if a batch may be passed to `dispatch` on the event loop. Called under the queue's lock.

        Args:
            entry: first entry of the batch.
            rows: of the batch.
            size_bytes: of the batch.
        """

    def leaves(self, entry: Entry, rows: int, size_bytes: int, wake: Callable[[], None]) -> bool:
        """Return True if the instance's thread, which calls this under the queue's lock, leaves a batch to the event loop.

        Args:
            entry: first entry of the batch.
            rows: of the batch.
            size_bytes: of the batch.
            wake: is called on the event loop then, if no batch is in flight.
        """

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
"""Lock of a sleeping instance, dispatcher that runs a batch without waking it, and the batch."""


def _do_nothing(_execution: Execution) -> None:
    """Stand for an offered task that is dropped."""


_FOREVER = -1.0  # timeout of `Lock.acquire`
# A brief batch of fewer rows holds no others back: few callers gain from two batches at the same time. A hold ends after a time
# that no brief batch takes on a GPU that works.
_HOLD_ROWS, _HOLD_NS = 16, 2 * NS_PER_MS
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
        delay: schedules a callback after a number of seconds; None holds no requests back.
        cost_model: durations of batches; None to ignore due times.
        admission: predicts when a client should retry, and learns from entries that were dropped because they would miss their
            due time; None for retries after a second.

    Attributes:
        queue: the waiting entries; guarded by the lock, but its totals may be read without.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        limits: QueueLimits | None = None,
        levels: int = 1,
        clock: Clock = monotonic_ns,
        defer: Callable[[Callable[[], None]], object] = lambda callback: callback(),
        order: QueueOrder | None = None,
        delay: Callable[[float, Callable[[], None]], object] | None = None,
        cost_model: CostModel | None = None,
        admission: AdmissionController | None = None,
    ) -> None:
        self._admission = admission
        self._clock = clock
        self._lock = threading.Lock()
        self._selector = BatchSelector(
            policy, limits or QueueLimits(), levels, order or QueueOrder(), self._retry_s, cost_model
        )
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
        self._delay = delay
        self._held_rows = 0  # of brief batches that run: fewer queued rows wait for the end of one
        self._hold_ends_ns = 0
        self._is_guarded = False  # `_wake` is scheduled for the end of the hold
        self._closed = False
        self._paused = False
        self._failure: Exception | None = None

    # Called by protocols

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
            if self._held_rows >= _HOLD_ROWS and self._is_held():
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

    def _is_held(self) -> bool:
        """Return True if the queued requests wait for a brief batch, whose thread pulls them; called under the lock.

        Another batch at once would be a smaller one. Each costs a time of its own under the interpreter's lock, more than the
        GPU needs for it.
        """
        if self._delay is None or self.queue.total_rows >= min(self._held_rows, self._selector.policy.max_rows):
            return False
        if self._clock() >= self._hold_ends_ns:
            return False
        if not self._is_guarded:
            self._is_guarded = True
            self._delay(_HOLD_NS / NS_PER_S, self._end_guard)
        return True

    def _end_guard(self) -> None:
        self._is_guarded = False
        self._wake()

    def hold(self, rows: int) -> None:
        """Let fewer requests wait while a brief batch of `rows` runs; the calling thread pulls after `end_hold`."""
        with self._lock:
            self._held_rows += rows
            self._hold_ends_ns = self._clock() + _HOLD_NS

    def end_hold(self, rows: int, wake: bool) -> None:
        """End a `hold`; `wake`: the calling thread does not pull now, so another instance has to."""
        with self._lock:
            self._held_rows -= rows
            sleeper = self._sleepers.pop() if wake and self._sleepers and self._should_wake() else None
        if sleeper is not None:
            sleeper.release()

    def _claim(self, caller: CallerThread) -> InlineClaim | None:
        """Remove the only queued request, or a batch for the event loop, if an instance's dispatcher accepts it now."""
        if self._paused:
            return None
        is_loop_batch, queue = caller is CallerThread.LOOP and self._asynchronous, self.queue
        entry = queue.front if is_loop_batch else queue.only
        if entry is None or not (entry.inline or self._asynchronous or caller is CallerThread.WAITS):
            return None
        rows = min(queue.total_rows, self._selector.policy.max_rows)
        for sleeper in self._dispatch_candidates():
            inline_dispatch = self._inline_dispatches.get(sleeper)
            if inline_dispatch is None:
                continue
            accepted = is_loop_batch and inline_dispatch.accepts_batch(entry, rows, queue.size_bytes)
            if not accepted and not (queue.count == 1 and inline_dispatch.accepts(entry, caller)):
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
            interrupted: called under the lock before a batch is pulled, and again after `interrupt`; True ends the wait.
            busy: True if the instance has batches in flight: instances without any are woken first.
            inline_dispatch: runs a batch in place of the sleeping thread, on the thread that calls `enqueue` or the
                callback of `defer`.
            begins_ns: monotonic start of the batch's compute, if later than now.

        Returns:
            The batch. None if the scheduler is closed and empty, paused, interrupted, or if the event loop takes the batch.
        """
        while True:
            if self._selector.dropped:
                self._settle_dropped()
            with self._lock:
                self._inline_dispatches.pop(sleeper, None)
                leaves = sleeper in self._dispatched or (interrupted is not None and interrupted())
                self._dispatched.discard(sleeper)
                if self._paused:
                    return None
                is_left = not leaves and self._is_left_to_loop(inline_dispatch)
                if is_left and busy:
                    return None  # once no batch is in flight
                answer = IDLE if leaves or is_left else self._selector.poll(self._clock(), begins_ns, self._closed)
                if type(answer) is Batch or leaves:
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

    def _is_left_to_loop(self, inline_dispatch: InlineDispatch | None) -> bool:
        """Return True if an instance's thread leaves the queued batch to the event loop; called under the lock."""
        queue = self.queue
        if inline_dispatch is None or not inline_dispatch.asynchronous or self._closed or queue.front is None:
            return False
        rows = min(queue.total_rows, self._selector.policy.max_rows)
        return inline_dispatch.leaves(queue.front, rows, queue.size_bytes, self._wake)

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
        if self._admission is not None:
            self._admission.learn_dropped([entry for entry, _ in dropped if entry.due_ns != FAR_NS])

    def _retry_s(self) -> float:
        return 1.0 if self._admission is None else self._admission.retry_after_s(self, self._clock())
