"""Runs batches one at a time on the thread of an instance: pulls, assembles, runs, splits and settles them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import process_time_ns, thread_time_ns
from typing import cast

from headrace.core.clock import NS_PER_US, Clock
from headrace.core.errors import HeadraceError
from headrace.core.request import BatchTimes
from headrace.inference.scheduling.admission import InFlightWork
from headrace.inference.scheduling.assembly import BatchLayout, Staging, inputs_on_gpus
from headrace.inference.scheduling.batch_results import BatchResults, exceed_deadline
from headrace.inference.scheduling.inline_gate import InlineGate
from headrace.inference.scheduling.open_requests import StreamedEntry
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.scheduler import CallerThread, Scheduler
from headrace.inference.scheduling.selector import Batch
from headrace.runtimes.base import Execution, ExecutionLost, has_batch_memory
from headrace.runtimes.members import MemberExecution, MemberResult, runs_by_member

logger = logging.getLogger("headrace.instance")

_ROWS = attrgetter("rows")
# Processor times of shorter batches are not measured: among those the largest batch is the best.
_MIN_WORK_NS = 200 * NS_PER_US


@dataclass(eq=False, repr=False)
class SerialRunner:
    """Runs an execution that takes one batch after the other; see `headrace.inference.scheduling.instance.BatchRunner`.

    Attributes:
        execution: the loaded model; used from the thread that calls `serve` (or `execute`).
        scheduler: source of batches.
        max_rows: rows of the largest batch.
        batch_results: settles the requests of batches.
        clock: returns monotonic nanoseconds.
        inline_gate: decides which requests run on the event loop; None for none.
        asynchronous: see `scheduler.InlineDispatch`.
        runs_cancelled: run requests again that were cancelled while their batch failed.
    """

    asynchronous = False
    runs_cancelled = False

    execution: Execution
    scheduler: Scheduler
    max_rows: int
    batch_results: BatchResults
    clock: Clock
    inline_gate: InlineGate | None

    def __post_init__(self) -> None:
        self._members = self.execution if runs_by_member(self.execution) else None  # read for each batch
        self._reads_device_rows = self.execution.reads_device_rows
        self._staging = Staging(self.max_rows)
        # Error of a run on another thread; the instance's thread ends with it.
        self._inline_error: BaseException | None = None
        self._busy_ns = 0  # of the latest batch
        self._on_loop = False  # a run blocks the event loop and its timers
        self._running: Batch | None = None

    def serve(self) -> None:
        """Run batches until the scheduler is closed and empty."""
        sleeper = threading.Lock()
        sleeper.acquire()
        inline_dispatch = None
        if self.execution.any_thread:
            inline_dispatch = self
            if self.inline_gate is not None:
                self.inline_gate.support(self.execution)
        wait_ready = None if self._members is None else self._members.wait_ready
        observe_work, cpu_ns = self.batch_results.observe_work, 0
        while True:
            if wait_ready is not None:
                wait_ready(self.scheduler.is_ending, self.scheduler.next_waiting)
            batch = self.scheduler.next_batch(sleeper, inline_dispatch=inline_dispatch)
            if batch is None:
                task = self.scheduler.take_offer(sleeper)
                if task is None:
                    break
                task(self.execution)
                cpu_ns = 0
                continue
            self._run_batch(batch)
            if self._busy_ns >= _MIN_WORK_NS:
                before_ns, cpu_ns = cpu_ns, thread_time_ns()
                if before_ns:
                    observe_work(batch.rows, cpu_ns - before_ns)
            else:
                cpu_ns = 0
            del batch  # its arrays may be large, and the next batch may come late
        if self._inline_error is not None:
            raise self._inline_error

    def _run_batch(self, batch: Batch) -> None:
        if batch.drop_settled():
            batch_results = self.batch_results
            self._running = batch
            batch_results.begin(self)
            try:
                if batch_results.layout is None:
                    self.execute(batch)
                else:
                    self.execute_groups(batch, batch_results.layout)
            finally:
                batch_results.busy_runners.discard(self)
            self._running = None

    # On another thread, while the instance's thread sleeps in `next_batch`; see `scheduler.InlineDispatch`

    def accepts(self, entry: Entry, caller: CallerThread) -> bool:
        """Return True if the caller's thread would block anyway, or the run is short enough for the event loop."""
        if self._inline_error is not None:
            return False
        return entry.inline if caller is CallerThread.LOOP else caller is CallerThread.WAITS

    def accepts_batch(self, _entry: Entry, _rows: int, _size_bytes: int) -> bool:
        """Return False: on a CPU the loop would decode nothing while several requests compute."""
        return False

    def leaves(self, _entry: Entry, _rows: int, _size_bytes: int, _wake: Callable[[], None]) -> bool:
        """Return False, as `accepts_batch` does."""
        return False

    def dispatch(self, batch: Batch) -> None:
        """Run the batch on the event loop and resume its caller."""
        gate = self.inline_gate
        assert gate is not None, "a runner without a gate accepts nothing on the event loop"
        gate.begin()
        self._on_loop = True
        try:
            self._run_batch(batch)
        except BaseException as error:  # ends the instance, as on its own thread, which is woken for it
            self._inline_error = error
        finally:
            self._on_loop = False
            gate.end(batch.taken_ns)

    def run(self, batch: Batch, on_launched: Callable[[], None]) -> None:
        """Run the batch on the thread of a blocked caller."""
        try:
            self._run_batch(batch)
        except BaseException as error:
            self._inline_error = error
            if isinstance(error, KeyboardInterrupt):  # the caller's own
                raise
        finally:
            on_launched()

    def needs_wake_up(self) -> bool:
        """Return True if the instance's thread must end."""
        return self._inline_error is not None

    def give_up(self, error: Exception) -> None:
        """Settle the running requests with an error; any thread may call."""
        running = self._running
        if running is not None:
            self.batch_results.give_up(running.entries, error)
        if self._members is not None and isinstance(error, HeadraceError):
            self._members.give_up(error)

    def end(self, error: Exception) -> None:
        """The next batch on a device that has failed ends the instance."""

    def in_flight_work(self) -> InFlightWork:
        """Return the running batch; any thread may call."""
        running = self._running
        return InFlightWork(0, () if running is None else [(running.taken_ns, running.rows)])

    def execute(self, batch: Batch) -> None:
        """Run a batch and settle every member; if it fails as a whole, run its members one by one."""
        batch.instances = len(self.batch_results.busy_runners) or 1
        try:
            times, results = self._run(batch)
        except ExecutionLost:
            raise
        except Exception as error:  # every other error of a backend fails this batch only
            if self._members is not None:
                self.batch_results.failed_all(batch, error)
                return
            for retry in self.batch_results.failed(batch, error, self.runs_cancelled):
                if self.runs_cancelled or retry.drop_settled():
                    retry.taken_ns = self.clock()
                    self.execute(retry)
            return
        if self._on_loop and batch.entries[0].deadline_ns <= times.split_ns:
            exceed_deadline(batch.entries[0])  # the loop was blocked, and its timer with it
        busy_ns = self._busy_ns = times.split_ns - times.taken_ns
        self.batch_results.busy_runners.discard(self)  # before `settle`: its caller may send the next request at once
        gate = self.inline_gate if self._on_loop else None
        self.batch_results.settle(batch, times, results, busy_ns, None if gate is None else gate.mailbox.loop.call_soon)

    def _run(self, batch: Batch) -> tuple[BatchTimes, Sequence[MemberResult]]:
        if self._members is not None:
            return self._run_members(self._members, batch)
        layout = self.batch_results.layout
        if layout is not None and not layout.is_plain(batch.entries, batch.taken_ns):
            return self._run_arranged(batch, layout)
        inputs = self._staging.stack(batch.entries, batch.rows)
        assembled_ns = self.clock()
        outputs = self.execution.run(inputs)
        computed_ns = self.clock()
        results = self.batch_results.split(outputs, batch)
        return BatchTimes(batch.taken_ns, assembled_ns, computed_ns, self.clock()), results

    def _run_members(self, execution: MemberExecution, batch: Batch) -> tuple[BatchTimes, Sequence[MemberResult]]:
        """Run the requests of a batch as a list: each has its own outputs or error."""
        members = [member for entry in batch.entries if (member := entry.member) is not None]
        if has_batch_memory(execution):
            separate = inputs_on_gpus(batch.entries) if self._reads_device_rows else ()
            if separate:
                inputs_of = [{name: entry.inputs[name] for name in separate} for entry in batch.entries]
                members = [member._replace(inputs=own) for member, own in zip(members, inputs_of, strict=True)]
            inputs = self._staging.stack_into(execution, batch.entries, batch.rows, separate)
        else:
            inputs = self._staging.stack(batch.entries, batch.rows)
        assembled_ns = self.clock()
        for index, (entry, member) in enumerate(zip(batch.entries, members, strict=True)):
            if member.responses is not None and member.sink is None:  # a later step has that of the first one
                sink = cast("StreamedEntry", self.batch_results.open_entry(batch, entry, assembled_ns))
                members[index] = member._replace(sink=sink)
        results = execution.run_members(inputs, members)
        computed_ns = self.clock()
        self.batch_results.check_members(results, members)
        return BatchTimes(batch.taken_ns, assembled_ns, computed_ns, self.clock()), results

    def execute_groups(self, batch: Batch, layout: BatchLayout) -> None:
        """Run the entries of a batch in the groups of a layout, one group after the other."""
        if len(batch.entries) == 1:
            self.execute(batch)
            return
        begun_ns = self.clock()
        division = layout.divide(batch.entries)
        if len(division.groups) == 1 and not division.apart_ns:
            self.execute(batch)
            return
        cpu_ns = process_time_ns() if division.apart_ns else 0
        for group in division.groups:
            part = Batch(group, batch.reason, self.clock(), 0)
            part.rows = sum(map(_ROWS, group))
            if part.drop_settled():
                self.batch_results.begin(self)
                self.execute(part)
        if division.apart_ns:
            layout.record_division(division, self.clock() - begun_ns, process_time_ns() - cpu_ns)
        if division.check is not None:
            division.check(self.execution)

    def _run_arranged(self, batch: Batch, layout: BatchLayout) -> tuple[BatchTimes, Sequence[MemberResult]]:
        """Run a batch of requests whose shapes may differ."""
        begun_ns = self.clock()
        arrangement = layout.arrange([entry.inputs for entry in batch.entries])
        inputs = arrangement.stack(self._staging)
        assembled_ns = self.clock()
        outputs = self.execution.run(inputs)
        computed_ns = self.clock()
        results = arrangement.split(outputs, self.batch_results.check.check)
        times = BatchTimes(batch.taken_ns, assembled_ns, computed_ns, self.clock())
        arrangement.record(outputs, computed_ns - assembled_ns, times.split_ns - computed_ns + assembled_ns - begun_ns)
        return times, results
