"""Overlaps several batches of one instance: while one computes, the next is pulled, filled and launched.

An instance has two threads. Its first thread pulls, begins, fills and launches batches. Its finisher thread waits for each
batch in the order of launch, splits the outputs and settles the requests. Two queues connect them: `_launched` to the finisher,
`_finished` back. A batch that fails as a whole is returned that way. Its members run again one by one, ahead of the queue,
while later batches continue.

A brief batch takes the GPU less time than the hand-overs between the two threads take. Where no other batch of the instance is
in flight, its first thread does the work of both, and meanwhile the other instances pull no smaller batch (`Scheduler.hold`).

A caller that would block until its response may do the work of both threads for its batch while they sleep (`run`). No thread
is woken then.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock
from headrace.core.request import BatchTimes
from headrace.inference.scheduling.admission import InFlightWork
from headrace.inference.scheduling.batch_results import BatchResults, exceed_deadline
from headrace.inference.scheduling.filler import Filler
from headrace.inference.scheduling.inline_gate import InlineGate
from headrace.inference.scheduling.instance import OnDeath
from headrace.inference.scheduling.joining import RaggedLayout
from headrace.inference.scheduling.launch_pacing import LaunchPacing
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.ragged import PaddedLayout
from headrace.inference.scheduling.scheduler import CallerThread, Scheduler
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.serial_runner import SerialRunner
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.overlapped import OverlappedExecution

logger = logging.getLogger("headrace.instance")

# Larger requests are copied by the instance's thread, so that the event loop is not blocked for other callers.
_SHORT_BYTES = 1 << 18
# Those of a brief batch: a copy takes about as long as the GPU then.
_BRIEF_BYTES = 1 << 20
# Between two brief batches that the instance's thread leaves to the event loop, which may not take them.
_LEAVE_NS = 10 * NS_PER_MS


class _Finished(NamedTuple):
    """Result of an in-flight batch, for the instance's thread."""

    done_ns: int  # monotonic time at which its outputs were complete; 0 if it failed
    retries: list[Batch]  # its members, to be run one by one, if it failed


@dataclass(eq=False, repr=False)
class OverlappedRunner:
    """Runs an execution that overlaps batches; see `headrace.inference.scheduling.instance.BatchRunner`.

    A batch that lacks an optional input, or whose requests of different length cannot be padded yet, runs through the execution's
    `run`, with no other batch in flight. For a model without a batch dimension a batch is one request.

    Ownership: `_open`, `_retries`, `pacing` and `_last_done_ns` belong to one thread each, as noted below, or to the thread that
    runs in its place. A caller holds `_caller_lock` from before the launch of its batch until that batch is finished. `_pending`
    needs no lock: each change, and the copy in `give_up`, is atomic under the interpreter's lock.

    Attributes:
        name: name of the instance, for its threads and log lines.
        execution: the loaded model.
        scheduler: source of batches.
        inputs: number of inputs of the model.
        serial: runs batches that cannot be overlapped on the same execution.
        batch_results: settles the requests of batches.
        on_death: callback of a thread that fails, called before the thread waits for anything.
        pacing: delays pulls while batches are in flight; None pulls at once.
        clock: returns monotonic nanoseconds.
        fill_threads: most threads that copy the rows of a large batch.
        batched: False if the model has no batch dimension, or joins its requests.
        layout: pads or joins requests of different shapes; None if the requests of a batch have equal shapes.
        inline_gate: decides which requests the event loop waits for; None for none.
        asynchronous: see `scheduler.InlineDispatch`.
    """

    asynchronous = True

    name: str
    execution: OverlappedExecution
    scheduler: Scheduler
    inputs: int
    serial: SerialRunner
    batch_results: BatchResults
    on_death: OnDeath
    pacing: LaunchPacing | None
    clock: Clock
    fill_threads: int
    batched: bool
    layout: PaddedLayout | RaggedLayout | None = None
    inline_gate: InlineGate | None = None

    def __post_init__(self) -> None:
        self._filler = Filler(self.name, self.fill_threads)
        self._pending: set[Batch] = set()
        self._launched: SimpleQueue[Batch | None] = SimpleQueue()
        self._finished: SimpleQueue[_Finished | BaseException] = SimpleQueue()
        self._prompt = self.execution.prompt
        self._brief_rows = self.execution.brief_rows
        self._defer: Callable[..., object] | None = None  # while the event loop waits for a batch
        # These five belong to the instance's thread:
        self._launched_inline = False  # another thread has launched a batch in its place
        self._inline_error: BaseException | None = None  # error of that launch
        self._open = 0  # batches in flight: launched and not returned through `_finished`
        self._retries: deque[Batch] = deque()  # members to run one by one, and further groups of a batch
        self._leaves_ns = 0  # earliest monotonic time of the next batch that this thread leaves to the event loop
        self._last_done_ns = 0  # the finisher's: completion of the batch before
        self._caller_lock = threading.Lock()
        self._sleeper = threading.Lock()
        self._sleeper.acquire()
        self._finisher = threading.Thread(target=self._finish_all, name=self.name + " finisher", daemon=True)

    def serve(self) -> None:
        """Run batches until the scheduler is closed and empty and no batch is in flight."""
        self._finisher.start()
        if self._prompt and self.inline_gate is not None:
            self.inline_gate.support(self.execution)
        try:
            self._pull()
        except BaseException as error:
            self.on_death(error)  # now, since batches in flight may take long to finish
            raise
        finally:
            self._filler.close()
            self._launched.put(None)
            self._finisher.join()
            self._await_caller()
            self.batch_results.busy_runners.discard(self)

    def give_up(self, error: Exception) -> None:
        """Settle every pulled request that is not settled with `error`; any thread may call."""
        self.batch_results.give_up([entry for batch in list(self._pending) for entry in batch.entries], error)

    def end(self, error: Exception) -> None:
        """End the instance with `error` before it pulls another batch; any thread may call."""
        self._inline_error = error
        self.scheduler.interrupt(self._sleeper)

    def in_flight_work(self) -> InFlightWork:
        """Return the batches that were pulled and are not settled; any thread may call."""
        pending = list(self._pending)
        return InFlightWork(self._last_done_ns, sorted([(batch.taken_ns, batch.rows) for batch in pending]))

    # On the instance's thread

    def _pull(self) -> None:
        depth = self.execution.depth
        while self._inline_error is None:
            self._launched_inline = False
            while self._open >= depth or not self._finished.empty():
                self._collect_finished()
            if self._wait_to_pull():
                continue
            batch = self._next()
            if batch is not None:
                if self._start(batch):
                    if self._open == 1 and batch.rows <= self._brief_rows:
                        self._finish_brief(batch)
                    else:
                        self._launched.put(batch)
                del batch  # it may hold a client's memory, and the next batch may come late
            elif (task := self.scheduler.take_offer(self._sleeper)) is not None:
                while self._open:
                    self._collect_finished()
                if not self._retries:
                    task(self.execution)
            elif self._launched_inline or self.needs_wake_up():
                continue
            elif self._open:
                self._collect_finished()
            else:
                return
        raise self._inline_error

    def _collect_finished(self, timeout_s: float | None = None) -> None:
        """Wait until the finisher returns a batch.

        Raises:
            Empty: none was returned within `timeout_s`.
            RuntimeError: the finisher thread failed.
        """
        completed = self._finished.get(timeout=timeout_s)
        if isinstance(completed, BaseException):
            raise RuntimeError("the finisher thread failed") from completed
        self._collect(completed)

    def _finish_brief(self, batch: Batch) -> None:
        """Finish the only batch in flight on this thread; no other instance pulls a smaller batch meanwhile."""
        rows, is_complete = batch.rows, False
        self.scheduler.hold(rows)
        try:
            self._collect(self._finish(batch))
            is_complete = not self._retries
        finally:
            self.scheduler.end_hold(rows, wake=not is_complete)

    def _collect(self, completed: _Finished) -> None:
        self._open -= 1
        if self.pacing is not None:
            self.pacing.completed(completed.done_ns)
        self._retries.extend(completed.retries)

    def _wait_to_pull(self) -> bool:
        """Wait until it is time to pull; True if a batch finished first, which changes that time."""
        if self.pacing is None or not self._open or self._retries:
            return False
        wait_ns = self.pacing.pull_ns(self.scheduler.waiting_rows) - self.clock()
        if wait_ns <= 0:
            return False
        try:
            self._collect_finished(wait_ns / NS_PER_S)
        except Empty:
            return False
        return True

    def _next(self) -> Batch | None:
        """Return the next batch to launch; None if there is none, or if a finished batch or an error must be handled first."""
        if self._retries:
            batch = self._retries.popleft()
            batch.taken_ns = self.clock()
            return batch
        inline_dispatch = self if self._prompt else None
        begins_ns = self.pacing.free_ns if self.pacing is not None and self._open else 0
        next_batch = self.scheduler.next_batch(
            self._sleeper, self.needs_wake_up, self._open > 0, inline_dispatch, begins_ns
        )
        if next_batch is not None:
            self._add_pending(next_batch)
        return next_batch

    def _add_pending(self, batch: Batch) -> None:
        self._pending.add(batch)
        self.batch_results.begin(self)

    def _start(self, batch: Batch) -> bool:
        """Launch a batch, run it serially, or drop it if no caller waits; True if it is in flight."""
        layout = self.layout
        is_live = batch.drop_settled()
        if is_live and isinstance(layout, RaggedLayout):
            self._divide(batch, layout)
        if not is_live:
            self._remove_pending(batch)
        elif len(batch.entries[0].inputs) != self.inputs or (
            layout is not None and layout.runs_in_groups(batch.entries)
        ):
            while self._open:
                self._collect_finished()
            if layout is None:
                self.serial.execute(batch)
            else:
                self.serial.execute_groups(batch, layout)
            self._remove_pending(batch)
        else:
            try:
                launched = self._launch(batch)
            except ExecutionLost:
                raise
            except Exception as error:  # every other error of a backend fails this batch only
                self._retries.extend(self._failed(batch, error))
                return False
            if launched:
                self._open += 1
                if self.pacing is not None:
                    self.pacing.launched(batch.rows, batch.taken_ns, batch.assembled_ns)
                return True
            self._remove_pending(batch)
        return False

    def _divide(self, batch: Batch, layout: RaggedLayout) -> None:
        """Reduce a batch to the first of its groups; the others run next, ahead of the queue."""
        first, *others = layout.divide(batch.entries).groups
        if not others:
            return
        batch.entries, batch.rows = first, sum([entry.rows for entry in first])
        rest = [Batch(group, batch.reason, batch.taken_ns, sum([entry.rows for entry in group])) for group in others]
        self._pending.update(rest)
        self._retries.extendleft(reversed(rest))

    def _launch(self, batch: Batch) -> bool:
        """Begin, fill and launch; False if every request was settled meanwhile."""
        execution, entries = self.execution, batch.entries
        arrangement, layout = None, self.layout
        if layout is not None and not layout.is_plain(entries, batch.taken_ns):
            arrangement = layout.arrange([entry.inputs for entry in entries])
        like = entries[0].inputs if arrangement is None else arrangement.like()
        in_flight = execution.begin(like, batch.rows if self.batched else 0)
        try:
            if arrangement is None:
                self._filler.fill(in_flight, entries)
            else:
                arrangement.fill(in_flight.inputs)
        except Exception:
            execution.discard(in_flight)
            raise
        if all(entry.completion.is_settled for entry in entries):
            execution.discard(in_flight)
            return False
        batch.in_flight, batch.arrangement = in_flight, arrangement
        batch.instances = len(self.batch_results.busy_runners)
        if arrangement is None and in_flight.device is not None and entries[0].resident_outputs:
            in_flight.resident_outputs = entries[0].resident_outputs.intersection(
                *[entry.resident_outputs for entry in entries[1:]]
            )
        batch.assembled_ns = self.clock()
        execution.launch(in_flight)
        return True

    # On another thread, while the instance's thread sleeps in `next_batch`; see `scheduler.InlineDispatch`

    def accepts(self, entry: Entry, caller: CallerThread) -> bool:
        """Return True if no batch is in flight, and the entry has all inputs and is small or its caller blocks."""
        is_short = caller is CallerThread.WAITS or entry.inline or entry.size_bytes <= _SHORT_BYTES
        return self._is_free(entry) and is_short

    def accepts_batch(self, entry: Entry, rows: int, size_bytes: int) -> bool:
        """Return True if a batch of `rows` rows with this first entry is brief, and may run on the event loop."""
        gate = self.inline_gate
        if gate is None or rows > self._brief_rows or size_bytes > _BRIEF_BYTES or not self._is_free(entry):
            return False
        entry.inline = gate.allows_batch()
        return entry.inline

    def leaves(self, entry: Entry, rows: int, size_bytes: int, wake: Callable[[], None]) -> bool:
        """Return True on the instance's thread if the queued batch is brief, and the event loop may run it if none is in flight.

        Under constant load this thread would take each next batch itself, and runs on the loop would never begin again.
        """
        gate, now_ns = self.inline_gate, self.clock()
        if gate is None or rows > self._brief_rows or size_bytes > _BRIEF_BYTES:
            return False
        if now_ns < self._leaves_ns or not gate.is_open(now_ns) or not (self._open or self._is_free(entry)):
            return False
        if not self._open:
            self._leaves_ns = now_ns + _LEAVE_NS
            try:
                gate.mailbox.loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop is closed
                return False
        return True

    def _is_free(self, entry: Entry) -> bool:
        """Return True if no batch is in flight, and the entry has all inputs."""
        try:
            while not self._finished.empty():
                self._collect_finished()
        except RuntimeError as error:
            self._inline_error = error
        is_busy = self._open or self._retries or self._inline_error is not None
        return not is_busy and len(entry.inputs) == self.inputs

    def dispatch(self, batch: Batch) -> None:
        """Launch a batch on the event loop, without waking the instance's thread; finish it there too if it is short."""
        gate = self.inline_gate
        if gate is None or not batch.entries[0].inline:
            if self._launch_inline(batch):
                self._launched.put(batch)
            return
        gate.begin()
        self._defer = gate.mailbox.loop.call_soon
        try:
            self.run(batch, _nothing)
            while not self._finished.empty():
                self._collect_finished()
        except BaseException as error:  # ends the instance's thread, which is woken for it
            self._inline_error = error
        finally:
            self._defer = None
            gate.end(batch.taken_ns, len(batch.entries) == batch.entries[0].requests == 1)

    def run(self, batch: Batch, on_launched: Callable[[], None]) -> None:
        """Launch and finish a batch on the calling thread, without waking a thread of the instance."""
        with self._caller_lock:  # free while no batch is in flight
            try:
                is_launched = self._launch_inline(batch)
            finally:
                on_launched()
            if not is_launched:
                return
            try:
                self._complete(batch)
            except BaseException as error:  # as in `_finish_all`
                self._report_death(error)
                if isinstance(error, KeyboardInterrupt):  # meant for the calling thread
                    raise

    def _launch_inline(self, batch: Batch) -> bool:
        """Launch a batch for the instance's thread; True if it is in flight."""
        self._add_pending(batch)
        try:
            is_launched = self._start(batch)
            self._launched_inline = True
            return is_launched
        except BaseException as error:  # ends the instance's thread, as if raised there: `needs_wake_up` wakes it
            self._inline_error = error
            self.on_death(error)
            return False

    def needs_wake_up(self) -> bool:
        """Return True if the instance's thread has a result, a retry or an error to handle."""
        return not self._finished.empty() or bool(self._retries) or self._inline_error is not None

    # On the finisher's thread

    def _finish_all(self) -> None:
        try:
            while (batch := self._launched.get()) is not None:
                self._await_caller()
                self._complete(batch)
                del batch  # its arrays may be large, and the next batch may come late
        except BaseException as error:  # every failure of the thread is reported
            self._report_death(error)

    # On the finisher's thread, or on the thread of a caller that finishes its own batch

    def _complete(self, batch: Batch) -> None:
        """Finish a batch and pass the result to the instance's thread."""
        finished = self._finish(batch)
        self._finished.put(finished)
        if finished.retries:
            self.scheduler.interrupt(self._sleeper)

    def _report_death(self, error: BaseException) -> None:
        """Report a failure of the finisher; no batch is pulled after it."""
        self._inline_error = error
        try:
            self.on_death(error)
        finally:
            self._finished.put(error)
            self.scheduler.interrupt(self._sleeper)

    def _finish(self, batch: Batch) -> _Finished:
        """Wait for the outputs of a batch and settle its members."""
        in_flight, batch.in_flight = batch.in_flight, None
        assert in_flight is not None, "a launched batch has an InFlightBatch"
        try:
            outputs = self.execution.finish(in_flight)
            computed_ns = self.clock()
            arrangement, batch.arrangement = batch.arrangement, None
            if arrangement is None:
                results = self.batch_results.split(outputs, batch)
            else:
                results = arrangement.split(outputs, self.batch_results.check.check)
                arrangement.record(outputs, 0, 0)
        except ExecutionLost:
            raise
        except Exception as error:
            return _Finished(0, self._failed(batch, error))
        times = BatchTimes(batch.taken_ns, batch.assembled_ns, computed_ns, self.clock())
        # Busy time counts once: the overlap with the batch before is excluded.
        busy_ns = times.split_ns - max(batch.taken_ns, self._last_done_ns)
        self._last_done_ns = times.split_ns
        if len(self._pending) == 1:  # before `settle`: its caller may send the next request at once
            self.batch_results.busy_runners.discard(self)
        for entry in batch.entries if self._defer is not None else ():
            if entry.deadline_ns <= times.split_ns:
                exceed_deadline(entry)  # the loop was blocked, and its timer with it
        self.batch_results.settle(batch, times, results, busy_ns, self._defer)
        self._remove_pending(batch)
        return _Finished(computed_ns, [])

    # On either thread

    def _await_caller(self) -> None:
        """Wait until no caller finishes a batch of its own, which was launched before all others."""
        with self._caller_lock:
            pass

    def _remove_pending(self, batch: Batch) -> None:
        """Remove a batch that is settled or dropped."""
        self._pending.discard(batch)
        if not self._pending:  # a batch that is pulled at this moment is not counted; the next one is
            self.batch_results.busy_runners.discard(self)

    def _failed(self, batch: Batch, error: Exception) -> list[Batch]:
        retries = self.batch_results.failed(batch, error)
        self._pending.update(retries)
        self._remove_pending(batch)
        return retries


def _nothing() -> None:
    """Other batches wait until the event loop goes on."""
