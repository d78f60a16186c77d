"""Runs several batches of one instance at a time: while one computes, the next is pulled, filled and launched.

Two threads: the instance's own thread pulls, begins, fills and launches; its finisher waits for each batch in the order of
launch, splits and settles. Two queues connect them: `_launched` to the finisher, `_finished` back. A batch that fails as a
whole comes back that way. Its members run again one by one, ahead of the queue, while later batches continue.

A caller that waits anyway may do the work of both threads for its own batch while they sleep (`run`), without waking a thread.

`Filler` copies rows into the memory of a batch, with several threads where they are many, or notes rows that the GPU fetches by
itself. One thread does not use the memory bandwidth of a server (measured: 6 GB/s of pictures into pinned memory on a machine
of 16 cores, where four threads copy 31 and eight no more), and a GPU takes 50.

`LaunchPacing` delays the next pull for as long as the device has work. A batch that is pulled as soon as there is a free slot
is small, and requests that arrive a moment later wait for the next one. Pulled just before the device runs out of work, it
holds all requests that have arrived by then, at no loss. Service times are learned by number of rows. An estimate that is too
long costs no more than the overlap (a finished batch ends the wait), one that is too short no more than a smaller batch. A
batch that cannot grow is never delayed.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from headrace.backends.base import ExecutionLost, InFlightBatch, PipelinedExecution, never_blocks
from headrace.core.clock import NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.request import BatchTimes
from headrace.core.tensor import PINNED, Array, ResidentRows, is_resident
from headrace.scheduling.admission import InFlightWork
from headrace.scheduling.batching import CloseReason
from headrace.scheduling.executor import BatchResults, SerialRunner
from headrace.scheduling.instance import OnDeath
from headrace.scheduling.queue import Entry
from headrace.scheduling.scheduler import Batch, Scheduler

# A request that is larger is copied by the instance's thread: the event loop has other callers.
_SHORT_BYTES = 1 << 18


class _PendingBatch:
    """A batch, or one member of a batch that failed, on its way.

    Ownership: the instance's thread until it is put into `_launched`, the finisher from then on.
    """

    __slots__ = ("assembled_ns", "entries", "in_flight", "instances", "reason", "rows", "taken_ns")

    def __init__(self, entries: list[Entry], reason: CloseReason, taken_ns: int) -> None:
        self.entries = entries
        self.rows = sum([entry.rows for entry in entries])
        self.reason = reason
        self.taken_ns = taken_ns
        self.assembled_ns = 0
        self.instances = 1  # at work when it was launched
        self.in_flight: InFlightBatch | None = None


class _Finished(NamedTuple):
    """A flight is over.

    Attributes:
        done_ns: monotonic, when its outputs were there; 0 if it failed.
        retries: its members, to be run singly, if it failed.
    """

    done_ns: int
    retries: list[_PendingBatch]


class Pipeline:
    """Runs an execution that overlaps batches; see `headrace.scheduling.instance.BatchRunner`.

    Batches go through the execution's `run`, with nothing else under way, if they lack an optional input. Of a model without a
    batch dimension a batch is one request.

    Ownership: `_open`, `_retries`, `_pacing` and `_last_done_ns` belong to one thread each, as noted below, or to the thread that
    runs in its place. A caller holds `_caller_lock` from before the launch of its batch until that batch is finished. `_pending`
    has no lock: each change, and the copy that `give_up` takes, is one step of the interpreter.

    Args:
        name: of the instance.
        execution: what runs.
        scheduler: where batches come from.
        inputs: how many inputs the model has.
        serial: runs on the same execution what cannot be pipelined.
        batch_results: settles what came of the batches.
        on_death: called from the thread that dies, before anything else is waited for.
        pacing: when to pull while flights are open; None: at once.
        clock: monotonic nanoseconds.
        fill_threads: that copy a large batch's rows at the same time at most.
        batched: False if the model has no batch dimension.
    """

    def __init__(
        self,
        name: str,
        execution: PipelinedExecution,
        scheduler: Scheduler,
        inputs: int,
        serial: SerialRunner,
        batch_results: BatchResults,
        on_death: OnDeath,
        pacing: LaunchPacing | None = None,
        clock: Clock = monotonic_ns,
        fill_threads: int = 1,
        batched: bool = True,
    ) -> None:
        self._execution = execution
        self._scheduler = scheduler
        self._inputs = inputs
        self._batched = batched
        self._serial = serial
        self._batch_results = batch_results
        self._on_death = on_death
        self._pacing = pacing
        self._clock = clock
        self._filler = Filler(name, fill_threads)
        self._pending: set[_PendingBatch] = set()
        self._launched: SimpleQueue[_PendingBatch | None] = SimpleQueue()
        self._finished: SimpleQueue[_Finished | BaseException] = SimpleQueue()
        self._prompt = never_blocks(execution)
        self._launched_inline = (
            False  # the instance's, as what follows: the event loop has launched a flight in its place
        )
        self._inline_error: BaseException | None = None  # and what it died of there
        self._open = 0  # flights that were launched and have not come back through _landed
        self._retries: deque[_PendingBatch] = deque()  # members to run singly
        self._last_done_ns = 0  # the finisher's: when the flight before was done
        self._caller_lock = threading.Lock()
        self._sleeper = threading.Lock()
        self._sleeper.acquire()
        self._finisher = threading.Thread(target=self._finish_all, name=name + " finisher", daemon=True)

    def serve(self) -> None:
        """Run batches until the scheduler is closed and empty and all flights have come back."""
        self._finisher.start()
        try:
            self._pull()
        except BaseException as error:
            self._on_death(error)  # now: the flights that are still open may take as long as the device does
            raise
        finally:
            self._filler.close()
            self._launched.put(None)
            self._finisher.join()
            self._await_caller()
            self._batch_results.busy_runners.discard(self)

    def give_up(self, error: Exception) -> None:
        """From any thread: answer everything that was pulled and is not settled with an error."""
        self._batch_results.give_up([entry for run in list(self._pending) for entry in run.entries], error)

    def in_flight_work(self) -> InFlightWork:
        """From any thread: what was pulled and is not settled."""
        pending_batches = list(self._pending)
        return InFlightWork(self._last_done_ns, sorted([(run.taken_ns, run.rows) for run in pending_batches]))

    # On the instance's thread

    def _pull(self) -> None:
        depth = self._execution.depth
        while self._inline_error is None:
            self._launched_inline = False
            while self._open >= depth or not self._finished.empty():
                self._collect_finished()
            if self._wait_to_pull():
                continue
            run = self._next()
            if run is not None:
                if self._start(run):
                    self._launched.put(run)
                del run  # it may hold a client's memory, and the next may be long in coming
            elif self._launched_inline or self._has_news():
                continue
            elif self._open:
                self._collect_finished()
            else:
                return
        raise self._inline_error

    def _has_news(self) -> bool:
        return not self._finished.empty() or bool(self._retries) or self._inline_error is not None

    def _collect_finished(self, timeout_s: float | None = None) -> None:
        """Wait for the finisher to be done with a flight.

        Raises:
            Empty: none has come back after `timeout_s`.
        """
        completed = self._finished.get(timeout=timeout_s)
        if isinstance(completed, BaseException):
            raise RuntimeError("the finisher died") from completed
        self._open -= 1
        if self._pacing is not None:
            self._pacing.completed(completed.done_ns)
        self._retries.extend(completed.retries)

    def _wait_to_pull(self) -> bool:
        """Wait until it is time to pull; True if a flight has landed first, which changes that time."""
        if self._pacing is None or not self._open or self._retries:
            return False
        wait_ns = self._pacing.pull_ns(self._scheduler.waiting_rows) - self._clock()
        if wait_ns <= 0:
            return False
        try:
            self._collect_finished(wait_ns / NS_PER_S)
        except Empty:
            return False
        return True

    def _next(self) -> _PendingBatch | None:
        """What to launch next; None if there is nothing more, or if there is news."""
        if self._retries:
            run = self._retries.popleft()
            run.taken_ns = self._clock()
            return run
        inline_dispatch = self if self._prompt else None
        begins_ns = self._pacing.free_ns if self._pacing is not None and self._open else 0
        batch = self._scheduler.next_batch(self._sleeper, self._has_news, self._open > 0, inline_dispatch, begins_ns)
        return None if batch is None else self._add_pending(batch)

    def _add_pending(self, batch: Batch) -> _PendingBatch:
        run = _PendingBatch(batch.entries, batch.reason, batch.taken_ns)
        self._pending.add(run)
        self._batch_results.begin(self)
        return run

    def _start(self, run: _PendingBatch) -> bool:
        """Launch a batch, or do with it what else is to be done; True if it is in the air and must be finished."""
        entries = [entry for entry in run.entries if not entry.completion.done]
        if len(entries) != len(run.entries):
            run.entries, run.rows = entries, sum([entry.rows for entry in entries])
        if not entries:
            self._remove_pending(run)
        elif len(entries[0].inputs) != self._inputs:
            while self._open:
                self._collect_finished()
            self._serial.execute(Batch(entries, run.reason, run.taken_ns))
            self._remove_pending(run)
        else:
            try:
                launched = self._launch(run)
            except ExecutionLost:
                raise
            except Exception as error:  # whatever else a backend raises belongs to this batch alone
                self._retries.extend(self._failed(run, error))
                return False
            if launched:
                self._open += 1
                if self._pacing is not None:
                    self._pacing.launched(run.rows, run.taken_ns, run.assembled_ns)
                return True
            self._remove_pending(run)
        return False

    def _launch(self, run: _PendingBatch) -> bool:
        """Begin, fill and launch; False if all callers have left meanwhile."""
        execution, entries = self._execution, run.entries
        in_flight = execution.begin(entries[0].inputs, run.rows if self._batched else 0)
        try:
            self._filler.fill(in_flight, entries)
        except Exception:
            execution.discard(in_flight)
            raise
        if all(entry.completion.done for entry in entries):
            execution.discard(in_flight)
            return False
        run.in_flight = in_flight
        run.instances = len(self._batch_results.busy_runners)
        run.assembled_ns = self._clock()
        execution.launch(in_flight)
        return True

    # In the place of the instance's thread, while that sleeps in `next_batch`; see `headrace.scheduling.scheduler.InlineDispatch`

    def accepts(self, entry: Entry, caller_waits: bool) -> bool:
        """True if nothing is under way, and the entry needs nothing but a flight, and is small or its caller stays with it."""
        try:
            while not self._finished.empty():
                self._collect_finished()
        except RuntimeError as error:
            self._inline_error = error
        busy = self._open or self._retries or self._inline_error is not None
        return not busy and len(entry.inputs) == self._inputs and (caller_waits or entry.size_bytes <= _SHORT_BYTES)

    def dispatch(self, batch: Batch) -> None:
        """Launch it from here: the thread need not wake up for it."""
        run = self._launch_inline(batch)
        if run is not None:
            self._launched.put(run)

    def run(self, batch: Batch, on_launched: Callable[[], None]) -> None:
        """Launch it from here and see to its landing too: neither thread need wake up for it."""
        with self._caller_lock:  # it is free while nothing is under way
            try:
                run = self._launch_inline(batch)
            finally:
                on_launched()
            if run is None:
                return
            try:
                self._complete(run)
            except BaseException as error:  # as on the finisher's own thread
                self._report_death(error)
                if isinstance(error, KeyboardInterrupt):  # it is the caller's own
                    raise

    def _launch_inline(self, batch: Batch) -> _PendingBatch | None:
        """The batch, if it is in the air now."""
        run = self._add_pending(batch)
        try:
            is_launched = self._start(run)
            self._launched_inline = True
            return run if is_launched else None
        except BaseException as error:  # as on the instance's own thread: it dies of it, and is woken to do so
            self._inline_error = error
            self._on_death(error)
            return None

    def needs_wake_up(self) -> bool:
        """True if the thread has something to do."""
        return self._has_news()

    # On the finisher's thread

    def _finish_all(self) -> None:
        try:
            while (run := self._launched.get()) is not None:
                self._await_caller()
                self._complete(run)
                del run  # its arrays may be large, and the next batch may come late
        except BaseException as error:  # every death is reported, whatever its cause
            self._report_death(error)

    # There, or in its place on the thread of a caller that waits for its own flight

    def _complete(self, run: _PendingBatch) -> None:
        """Finish a flight and tell the instance's thread."""
        finished = self._finish(run)
        self._finished.put(finished)
        if finished.retries:
            self._scheduler.interrupt(self._sleeper)

    def _report_death(self, error: BaseException) -> None:
        """Report the death of the finisher."""
        try:
            self._on_death(error)
        finally:
            self._finished.put(error)
            self._scheduler.interrupt(self._sleeper)

    def _finish(self, run: _PendingBatch) -> _Finished:
        """Wait for a flight and settle its members."""
        in_flight, run.in_flight = run.in_flight, None
        assert in_flight is not None, "a run is launched with its flight"
        try:
            outputs = self._execution.finish(in_flight)
            computed_ns = self._clock()
            results = self._batch_results.split(outputs, run.entries)
        except ExecutionLost:
            raise
        except Exception as error:
            return _Finished(0, self._failed(run, error))
        times = BatchTimes(run.taken_ns, run.assembled_ns, computed_ns, self._clock())
        # The time for which it kept the instance from others is what does not overlap with the flight before.
        busy_ns = times.split_ns - max(run.taken_ns, self._last_done_ns)
        self._last_done_ns = times.split_ns
        if len(self._pending) == 1:  # first: who has the answer may ask again before this thread goes on
            self._batch_results.busy_runners.discard(self)
        self._batch_results.settle(run.entries, run.reason, times, results, busy_ns, run.instances)
        self._remove_pending(run)
        return _Finished(computed_ns, [])

    # On either

    def _await_caller(self) -> None:
        """Return once no caller sees to a flight of its own, which was launched before all others."""
        with self._caller_lock:
            pass

    def _remove_pending(self, run: _PendingBatch) -> None:
        """Remove a batch that is settled or dropped."""
        self._pending.discard(run)
        if not self._pending:  # what is pulled in this moment counts as no work: the next one will
            self._batch_results.busy_runners.discard(self)

    def _failed(self, run: _PendingBatch, error: Exception) -> list[_PendingBatch]:
        singly = self._batch_results.failed(run.entries, run.reason, error)
        pending_batches = [_PendingBatch([entry], run.reason, run.taken_ns) for entry in singly]
        self._pending.update(pending_batches)
        self._remove_pending(run)
        return pending_batches


logger = logging.getLogger("headrace.instance")

# A smaller share is copied by the time that another thread has woken up.
_SHARE_BYTES = 1 << 19

# Where to, and what, one below the other.
_Copy = tuple[Array, list[Array]]


class Filler:
    """Fills an instance's flights, large ones with helpers: daemon threads, which are started for the first of them.

    Ownership: the instance's thread makes every call. A helper has work only during `fill`, which waits for it; whatever it
    raises is raised there.

    Args:
        name: of the instance.
        threads: that copy at the same time at most, the instance's included.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self._helpers: list[_Helper] = []

    def fill(self, in_flight: InFlightBatch, entries: list[Entry]) -> None:
        """Copy the rows of all entries, one below the other, straight from where they lie into the flight.

        Rows that the flight's GPU reads by itself are not copied but noted in `in_flight.resident_inputs`. NumPy releases the
        interpreter's lock while it copies a part of some 500 elements or more, aligned or not; smaller ones are copied faster
        than the lock changes hands.

        Args:
            in_flight: of exactly as many rows as the entries have together.
            entries: all with the same inputs, of the same row shape.

        Raises:
            ValueError, TypeError: the flight's inputs are of another shape or dtype.
            KeyError: an entry lacks an input.
            HeadraceError: rows on a GPU that is not the flight's cannot be copied.
        """
        copies = _copies(in_flight, entries)
        shares = 1
        if self._threads > 1:
            shares = min(sum([buffer.nbytes for buffer, _ in copies]) // _SHARE_BYTES, self._threads)
        if shares > 1 and all(_parts_fit(*copy) for copy in copies):
            self._fill_parallel(copies, shares)
        else:
            _copy_all(copies)

    def close(self) -> None:
        """End the helpers."""
        for helper in self._helpers:
            helper.tasks.put(None)
        self._helpers.clear()

    def _fill_parallel(self, copies: list[_Copy], shares: int) -> None:
        # A share has none of an input that is a few numbers.
        cut = zip(*(_shares(*copy, shares) for copy in copies), strict=True)
        work = [[copy for copy in share if copy[1]] for share in cut]
        helpers = self._start_helpers(shares - 1)
        for helper, share in zip(helpers, work, strict=False):
            helper.tasks.put(share)
        outcomes: list[BaseException | None] = []
        for share in work[len(helpers) :]:
            try:
                _copy_all(share)
            except BaseException as error:  # raised below: nobody may leave while others write into the flight
                outcomes.append(error)
        outcomes += [helper.done.get() for helper in helpers]
        try:
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        finally:
            outcome = None  # an error and its frames in a circle would keep the arrays
            outcomes.clear()

    def _start_helpers(self, number: int) -> list[_Helper]:
        """So many helpers, or as many as there can be."""
        while len(self._helpers) < number:
            try:
                self._helpers.append(_Helper(f"{self._name} filler {len(self._helpers)}"))
            except RuntimeError as error:
                logger.warning("%s copies with %d threads: %s", self._name, len(self._helpers) + 1, error)
                self._threads = len(self._helpers) + 1
                break
        return self._helpers[:number]


class _Helper:
    """A thread that copies what it finds in `tasks`, and puts the error, or None, into `done`; None in `tasks` ends it."""

    def __init__(self, name: str) -> None:
        self.tasks: SimpleQueue[list[_Copy] | None] = SimpleQueue()
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (copies := self.tasks.get()) is not None:
            failure: BaseException | None = None
            try:
                _copy_all(copies)
            except BaseException as error:  # raised again in the thread that waits
                failure = error
            del copies  # the arrays may be large, and the next batch may come late
            self.done.put(failure)
            del failure


def _copy_all(copies: list[_Copy]) -> None:
    for buffer, parts in copies:
        np.concatenate(parts, out=buffer, casting="equiv")


def _copies(in_flight: InFlightBatch, entries: list[Entry]) -> list[_Copy]:
    """What is to be copied, once that is noted which is not."""
    accepts_residents = in_flight.device is not None
    copies: list[_Copy] = []
    for name, buffer in in_flight.inputs.items():
        parts = [entry.inputs[name] for entry in entries]
        if accepts_residents and ResidentRows in set(map(type, parts)):
            copies += _copies_around_residents(in_flight, name, buffer, parts)
        elif not buffer.ndim:  # a single number, of a model without a batch dimension
            copies.append((buffer.reshape(1), [part.reshape(1) for part in parts]))
        else:
            copies.append((buffer, parts))
    return copies


def _copies_around_residents(in_flight: InFlightBatch, name: str, buffer: Array, parts: list[Array]) -> list[_Copy]:
    """Note the parts that the flight's GPU reads by itself; the others between them are copied, neighbours together."""
    dtype, row_shape, places = buffer.dtype, buffer.shape[1:], (PINNED, in_flight.device)
    start = row = 0  # where the parts to be copied begin, and how far we are
    copied: list[Array] = []
    copies: list[_Copy] = []
    for part in parts:
        stop = row + part.shape[0]
        if is_resident(part) and part.device in places and part.dtype == dtype and part.shape[1:] == row_shape:
            in_flight.resident_inputs.append((name, row, part))
            if copied:
                copies.append((buffer[start:row], copied))
                copied = []
            start = stop
        else:
            copied.append(part)
        row = stop
    if row != buffer.shape[0]:
        raise ValueError(f"input '{name}' has {row} rows for a flight of {buffer.shape[0]}")
    if copied:
        copies.append((buffer[start:], copied))
    return copies


def _parts_fit(buffer: Array, parts: list[Array]) -> bool:
    """True if the parts are just the buffer's rows; if they are not, NumPy finds the words."""
    row_shape = buffer.shape[1:]
    return all(part.shape[1:] == row_shape for part in parts) and sum(len(part) for part in parts) == len(buffer)


def _shares(buffer: Array, parts: list[Array], number: int) -> Iterator[_Copy]:
    """A copy cut into so many of about the same size: between rows, or within them where they are fewer."""
    if len(buffer) < number:
        buffer, parts = buffer.reshape(-1), [part.reshape(-1) for part in parts]
    total = len(buffer)
    rest = iter(parts)
    part, first, last = buffer[:0], 0, 0  # the part we are in, and the rows of the buffer that it fills
    for share in range(number):
        start, stop = total * share // number, total * (share + 1) // number
        parts_of_share: list[Array] = []
        row = start
        while row < stop:
            if row == last:
                part = next(rest)
                first, last = last, last + len(part)
            end = min(stop, last)
            parts_of_share.append(part if end - row == last - first else part[row - first : end - first])
            row = end
        yield buffer[start:stop], parts_of_share


# From pulling to the first row on the device, besides filling: a thread that wakes, a launch, the head of the copy.
_LEAD_NS = 150 * NS_PER_US
_SMOOTHING = 4  # a new measurement counts for one in so many


class LaunchPacing:
    """Belongs to the instance's thread.

    Args:
        full_rows: rows that make a batch worth launching at once.
    """

    def __init__(self, full_rows: int) -> None:
        self._full_rows = full_rows
        self._open: deque[tuple[int, int]] = deque()  # (launched, rows) of the flights under way, oldest first
        self._done_ns = 0
        self._service_ns: dict[
            int, int
        ] = {}  # by rows: smoothed time on the device, without waiting for the flight before
        self._measured_rows: list[int] = []  # its keys, ascending
        self._fill_ns = 0.0  # smoothed, a row

    def launched(self, rows: int, taken_ns: int, launched_ns: int) -> None:
        """A flight has begun.

        Args:
            rows: in its batch.
            taken_ns, launched_ns: monotonic, when it was pulled, and when it was filled.
        """
        self._open.append((launched_ns, rows))
        fill_ns = (launched_ns - taken_ns) / rows
        self._fill_ns += (fill_ns - self._fill_ns) / _SMOOTHING if self._fill_ns else fill_ns

    def completed(self, done_ns: int) -> None:
        """The oldest flight is over: at `done_ns`, or 0 if it failed and nothing can be learned from it."""
        launched_ns, rows = self._open.popleft()
        if not done_ns:
            return
        service_ns = done_ns - max(launched_ns, self._done_ns)
        self._done_ns = done_ns
        smoothed_ns = self._service_ns.get(rows)
        if smoothed_ns is None:
            insort(self._measured_rows, rows)
            self._service_ns[rows] = service_ns
        else:
            self._service_ns[rows] = smoothed_ns + (service_ns - smoothed_ns) // _SMOOTHING

    @property
    def free_ns(self) -> int:
        """When the device will have done what is open: monotonic, in the past if nothing is."""
        done_ns = self._done_ns
        for launched_ns, rows in self._open:
            done_ns = max(launched_ns, done_ns) + self._estimate_ns(rows)
        return done_ns

    def pull_ns(self, waiting_rows: int) -> int:
        """When to pull: monotonic, in the past if at once.

        Args:
            waiting_rows: rows in the queue.
        """
        if not self._open or waiting_rows >= self._full_rows:
            return 0
        return self.free_ns - _LEAD_NS - int(self._fill_ns * waiting_rows)

    def _estimate_ns(self, rows: int) -> int:
        """That of the next smaller batch known, if need be: rather too short than too long."""
        place = bisect_right(self._measured_rows, rows)
        return self._service_ns[self._measured_rows[place - 1]] if place else 0
