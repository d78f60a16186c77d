"""Executes batches one at a time, checks and splits their outputs, and settles each member's completion.

`SerialRunner` pulls, assembles, runs, splits and settles.
`OutputCheck` compares output shapes with their declaration once a batch, before any caller gets rows. `BatchResults` settles
members and counts. `headrace.engine.scheduling.open_requests` has requests that end after their batch.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from time import process_time_ns, thread_time_ns
from typing import cast

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.completion import Completion, Mailbox, Outcome
from headrace.core.errors import DeadlineExceeded, HeadraceError, ModelFailed
from headrace.core.limits import BodyMemory
from headrace.core.request import BatchTimes, InferResponse
from headrace.core.tensor import Array, ModelSpec, fits_shape
from headrace.engine.scheduling.admission import AdmissionController, InFlightWork
from headrace.engine.scheduling.assembly import BatchLayout, Staging, inputs_on_gpus
from headrace.engine.scheduling.latency_table import LatencyTable
from headrace.engine.scheduling.open_requests import Deliver, OpenEntry, StreamedEntry
from headrace.engine.scheduling.queue import FAR_NS, Entry
from headrace.engine.scheduling.row_sampler import RowSampler
from headrace.engine.scheduling.scheduler import CallerThread, Scheduler
from headrace.engine.scheduling.selector import Batch
from headrace.observability.counters import BatchRecord, Recorder
from headrace.runtimes.base import (
    BatchMember,
    Execution,
    ExecutionLost,
    LateResult,
    MemberExecution,
    MemberOutputs,
    MemberResult,
    Rescheduled,
    has_batch_memory,
    is_pipelined,
    reads_device_rows,
    runs_by_member,
    runs_on_any_thread,
)

_ROWS = attrgetter("rows")
ANY_ROWS = -1
"""Rows of outputs that may have any number of them."""
_UNTIL_RELOADED = "Its requests run alone until it is loaded again"


class OutputMismatch(ModelFailed):
    """Rows cannot be split out of a batch: its outputs have other shapes, or other values than those of the rows alone."""


class OutputCheck:
    """Checks the outputs of one version of a model; used by all its instances at once.

    A check compares a few whole numbers for each output of a batch. Its cost does not depend on the rows.

    Args:
        spec: spec of the model, with the declared outputs.
        unchecked: names of outputs that are not split by rows, and are checked where they are split.

    Attributes:
        names: names of the declared outputs, in the order of the configuration; clients get only these.
    """

    __slots__ = ("_batched", "_declared", "_name", "names")

    def __init__(self, spec: ModelSpec, unchecked: Container[str] = ()) -> None:
        self._name = spec.name
        self._batched = spec.max_batch_size > 0
        self._declared = tuple(
            (tensor.name, tensor.shape, tensor.shape[1:], -1 not in tensor.shape[1:])
            for tensor in spec.outputs.values()
            if tensor.name not in unchecked
        )
        self.names = tuple(spec.outputs)

    def check(
        self, outputs: Mapping[str, Array], rows: int, requested: tuple[str, ...] = (), by_member: bool = False
    ) -> None:
        """Compare the shapes of all declared outputs with the batch.

        Args:
            outputs: arrays by name, as the execution returned them.
            rows: rows of the batch, or `ANY_ROWS`; ignored for a model without a batch dimension.
            requested: names of the outputs that must be there; () for all.
            by_member: the outputs are those of one request: an error does not concern the others of its batch.

        Raises:
            OutputMismatch: an output is missing, has another number of rows, or differs from its declared dimensions.
        """
        batched = self._batched
        for name, declared, row_dims, fixed in self._declared:
            array = outputs.get(name)
            if array is None:
                if requested and name not in requested:
                    continue
                cure = "return it in its code" if by_member else "export the model again"
                raise OutputMismatch(
                    f"model '{self._name}' returned no output '{name}', which its configuration declares. The model is at "
                    f"fault, not the request: remove the output from the configuration, or {cure}"
                )
            shape = array.shape
            if batched:
                # The fast path of nearly every batch: its rows, then fixed dimensions.
                if (
                    shape
                    and shape[0] == rows
                    and (shape[1:] == row_dims or (not fixed and fits_shape(shape[1:], row_dims)))
                ):
                    continue
                if rows == ANY_ROWS and fits_shape(shape, declared):
                    continue
                raise self._mismatch(name, shape, (rows, *row_dims), max(rows, 0), by_member)
            if shape != declared and not fits_shape(shape, declared):
                raise self._mismatch(name, shape, declared, 0, by_member)

    def _mismatch(
        self, name: str, shape: tuple[int, ...], expected: tuple[int, ...], rows: int, by_member: bool
    ) -> OutputMismatch:
        came = f"model '{self._name}' returned output '{name}' with the shape {list(shape)}"
        if by_member:
            for_rows = f" for {rows} rows" if rows else ""
            return OutputMismatch(
                f"{came}{for_rows}, its configuration declares {list(expected)} (-1: any size). The model is at fault, not the "
                "request: correct its code, or the dims and max_batch_size of its configuration"
            )
        if not rows:
            return OutputMismatch(
                f"{came}, its configuration declares {list(expected)} (-1: any size). The model is at fault, not the request: "
                "write the dims that the model returns, or export it again"
            )
        if shape and shape[0] == rows:
            return OutputMismatch(
                f"{came} for {rows} rows, its configuration declares {list(expected)} (-1: any size). The model is at fault, "
                f"not the request. {_UNTIL_RELOADED}: write the dims that the model returns, or export it again"
            )
        return OutputMismatch(
            f"{came} for {rows} rows, expected {list(expected)}: the first dimension of '{name}' is not the batch dimension. The "
            f"model is at fault, not the request. {_UNTIL_RELOADED}: write max_batch_size: 0 in its configuration"
        )


logger = logging.getLogger("headrace.instance")

# Processor times of shorter batches are not measured: among those the largest batch is the best.
_MIN_WORK_NS = 200 * NS_PER_US


@dataclass(eq=False, repr=False)
class BatchResults:
    """Settles the members of batches and updates counters and latencies; any thread may call.

    Attributes:
        recorder: counters of the version.
        deliver: settles outcomes.
        report: callback with the busy time of a batch, in nanoseconds.
        check: check of the model's outputs.
        latency_table: records compute times.
        admission: records prediction errors.
        on_mismatch: callback for an output mismatch, called before any request is settled.
        busy_runners: runners with a batch in flight; each removes itself.
        layout: assembles batches of requests of different shapes; None if the requests of a batch have equal shapes.
        observe_work: callback with the rows of a batch and the processor time of its thread for it, in nanoseconds.
        clock: returns monotonic nanoseconds.
        sampler: copies rows of batches before they are settled; None for none.
    """

    recorder: Recorder
    deliver: Deliver
    report: Callable[[int], None]
    check: OutputCheck
    latency_table: LatencyTable
    admission: AdmissionController
    on_mismatch: Callable[[OutputMismatch], object]
    layout: BatchLayout | None = None
    observe_work: Callable[[int, int], object] = lambda _rows, _cpu_ns: None
    clock: Clock = monotonic_ns
    sampler: RowSampler | None = None

    def __post_init__(self) -> None:
        self.busy_runners: set[object] = set()

    def begin(self, runner: object) -> None:
        """Record that a runner has pulled a batch."""
        self.busy_runners.add(runner)
        self.admission.changed = True

    def split(self, outputs: dict[str, Array], batch: Batch) -> list[dict[str, Array]]:
        """Check the outputs of a batch and split them into views of each entry's rows.

        Args:
            outputs: arrays by name, of shape (rows of the batch, ...), as the execution returned them.
            batch: the batch; one of a single entry is checked, too.

        Raises:
            OutputMismatch: an output does not have one row per row of the input, or differs from its declaration.
        """
        self.check.check(outputs, batch.rows)
        if len(batch.entries) == 1:
            return [outputs]
        # Only declared outputs: an undeclared one may have no batch dimension.
        named = [(name, outputs[name]) for name in self.check.names]
        results: list[dict[str, Array]] = []
        start = 0
        for entry in batch.entries:
            stop = start + entry.rows
            rows: dict[str, Array] = {}
            for name, array in named:
                rows[name] = array[start:stop]
            results.append(rows)
            start = stop
        return results

    def check_members(self, results: list[MemberResult], members: Sequence[BatchMember]) -> None:
        """Check the outputs of each member; an error takes the place of outputs that do not fit its request.

        Args:
            results: outputs or error of each member; changed in place.
            members: the members, in order.
        """
        check = self.check
        for index, member in enumerate(members):
            outputs = results[index]
            if isinstance(outputs, dict):
                try:
                    check.check(outputs, member.rows, member.outputs, by_member=True)
                except OutputMismatch as error:
                    results[index] = error

    def settle(
        self,
        batch: Batch,
        times: BatchTimes,
        results: Sequence[MemberResult],
        busy_ns: int,
        defer: Callable[..., object] | None = None,
    ) -> None:
        """Settle the members of a batch with their rows, and record its times before a client can read an answer.

        Args:
            batch: the batch.
            times: times of its phases.
            results: outputs by name of each member, or its error.
            busy_ns: time for which the batch occupied its instance.
            defer: calls its arguments soon, after the responses are written and before the loop reads a request; None to record
                at once.
        """
        entries, closed = batch.entries, batch.reason.value
        batch_rows, sampler = batch.rows, self.sampler
        if sampler is not None and batch_rows > 1:
            sampler.left -= batch_rows
            if sampler.left <= 0:
                sampler.take(batch, results)
        pairs: list[tuple[Completion, Outcome]] = []
        all_succeed = True
        for entry, outputs in zip(entries, results, strict=True):
            if type(outputs) is dict:
                pairs.append((entry.completion, InferResponse(outputs, times, batch_rows, closed)))
            elif isinstance(outputs, MemberOutputs):
                response = InferResponse(outputs, times, batch_rows, closed, parameters=outputs.parameters)
                pairs.append((entry.completion, response))
            elif outputs is None or isinstance(outputs, (LateResult, Rescheduled)):
                all_succeed = False  # answered later, by `OpenEntry` or a later batch
                if isinstance(outputs, LateResult):
                    outputs.then(self.open_entry(batch, entry, times.assembled_ns).finish)
            else:
                all_succeed = False
                pairs.append((entry.completion, cast("HeadraceError", outputs)))
        # Requests that failed, and those cancelled while the batch ran, do not count as success.
        succeeded = None if all_succeed else {each for each, outcome in pairs if type(outcome) is InferResponse}
        if defer is None:
            self.deliver(pairs, partial(self._record, batch, succeeded, times, busy_ns))
        else:
            defer(self._record, batch, succeeded, times, busy_ns, self.deliver(pairs, None))

    def open_entry(self, batch: Batch, entry: Entry, assembled_ns: int) -> OpenEntry:
        """Return an entry whose request ends after its batch; `assembled_ns` is the monotonic start of its computation."""
        member, check = entry.member, self.check
        assert member is not None, "requests that end later are run as a list"
        responses, outputs = member.responses, member.outputs
        # A response of a decoupled model has any number of rows.
        check_outputs = partial(
            check.check, rows=ANY_ROWS if responses else entry.rows, requested=outputs, by_member=True
        )
        kind = OpenEntry if responses is None else StreamedEntry
        closed, taken_ns, recorder = batch.reason.value, batch.taken_ns, self.recorder
        return kind(
            entry,
            responses,
            check_outputs,
            recorder,
            self.deliver,
            self.clock,
            batch.rows,
            closed,
            taken_ns,
            assembled_ns,
        )

    def _record(
        self, batch: Batch, succeeded: set[Completion] | None, times: BatchTimes, busy_ns: int, lost: list[Completion]
    ) -> None:
        """Record a batch; `succeeded` are its completions with a response, None for all; `lost` had been settled before."""
        entries, instances, batch_rows = batch.entries, batch.instances, batch.rows
        answered, rows = entries, batch_rows
        if lost or succeeded is not None:
            answered = [
                each
                for each in entries
                if each.completion not in lost and (succeeded is None or each.completion in succeeded)
            ]
            rows = sum(map(_ROWS, answered))
        taken_ns, assembled_ns, computed_ns, split_ns = times
        queue_ns, total_ns = [], []
        received_ns: list[int] = []  # of members of groups
        for entry in answered:
            if entry.members is not None:
                received_ns += entry.members.received_ns
                queue_ns += [taken_ns - entry.enqueued_ns] * entry.requests
            elif entry.counts_as_request:
                queue_ns.append(taken_ns - entry.enqueued_ns)
                total_ns.append(split_ns - entry.received_ns)
        if received_ns:
            total_ns += [split_ns - each_ns for each_ns in received_ns]
        shape_key = entries[0].shape_key
        record = BatchRecord(rows, batch_rows, batch.reason.value, times, queue_ns, total_ns, busy_ns, shape_key)
        self.recorder.record_batch(record)
        # Behind another batch in flight the compute time is at most the busy time.
        compute_ns = min(computed_ns - assembled_ns, busy_ns)
        self.latency_table.observe(batch_rows, compute_ns, instances)
        self.report(busy_ns)
        admission = self.admission
        admission.changed = True
        if entries[0].predicted_ns and entries[0].due_ns == FAR_NS:
            admission.record_wait(entries[0], taken_ns)
        if admission.has_due_times:
            admission.record_batch(batch_rows, self.latency_table.estimate_ns(batch_rows, instances), busy_ns)
            admission.learn([entry for entry in answered if entry.counts_as_request], split_ns)

    def failed(self, batch: Batch, error: Exception, with_cancelled: bool = False) -> list[Batch]:
        """Settle the only request of a failed batch with the error; of several requests, one may have failed all.

        Args:
            batch: the batch.
            error: error of the backend.
            with_cancelled: return also the requests that were cancelled meanwhile.

        Returns:
            The requests to run again one by one.
        """
        self.recorder.failed_batch(batch.reason.value)
        self.admission.changed = True
        if isinstance(error, OutputMismatch):
            self.on_mismatch(error)
        entries = [part for entry in batch.entries for part in entry.apart()]
        if len(entries) > 1:
            logger.debug("a batch of %d requests failed: running them one by one", len(entries))
            return [
                Batch([entry], batch.reason, batch.taken_ns, entry.rows)
                for entry in entries
                if with_cancelled or not entry.completion.is_settled
            ]
        self.give_up(entries, _failure(error))
        return []

    def failed_all(self, batch: Batch, error: Exception) -> None:
        """Settle all members of a failed batch with the error; none is run again: the code may have had side effects."""
        self.recorder.failed_batch(batch.reason.value)
        self.admission.changed = True
        self.give_up(batch.entries, _failure(error))

    def give_up(self, entries: Iterable[Entry], error: Exception) -> None:
        """Settle all entries with an error."""
        self.deliver([(entry.completion, error) for entry in entries], None)


def _failure(error: Exception) -> HeadraceError:
    """Return the error for clients; the text of an error that is not Headrace's own goes only to the log."""
    if isinstance(error, HeadraceError):
        return error
    reference = uuid.uuid4().hex[:12]
    logger.error("request failed in the model (reference %s)", reference, exc_info=error)
    return ModelFailed(
        f"the model failed on this request: see the server log for the cause (reference {reference})", reference
    )


# A longer run on the event loop disables such runs for INLINE_PAUSE times its duration, at most INLINE_MAX_PAUSE_NS: so they
# block the loop for 1 / INLINE_PAUSE of the time at most. On a busy machine most of them are fast runs that another program
# interrupted.
INLINE_MAX_RUN_NS = 2 * NS_PER_MS
INLINE_PAUSE = 200
# Of a brief batch: the requests of a crowd wait for others of the same version only, and by threads they take longer.
INLINE_BATCH_PAUSE = 20
INLINE_MAX_PAUSE_NS = 60 * NS_PER_S
# No runs on the event loop so long after two requests of the model were in flight: together they run faster, as a batch.
INLINE_QUIET_NS = 10 * NS_PER_MS
_SMOOTHING = 3  # a run counts 1/8
# Bound of GPU models: a thread that waits for a GPU takes no processor time from other threads.
INLINE_DEVICE_BOUND_NS = 2 * NS_PER_MS


@dataclass(eq=False, repr=False)
class InlineGate:
    """Decides whether a lone request runs on the event loop; see docs/decisions/0008-inline-runs.md.

    Ownership: the event loop. Only `support` is called by an instance's thread, before it serves.

    Attributes:
        name: name of the version, for log lines.
        bound_ns: largest allowed 95th percentile of the compute time for the rows of the request; 0 disables runs on the loop.
        mailbox: delivers completions to the event loop.
        recorder: counters of the version.
        bodies: counts requests in the front ends; None without front ends.
        clock: returns monotonic nanoseconds.
        quiet_ns: monotonic time before which no request runs on the loop: two were in flight together.
    """

    name: str
    bound_ns: int
    latency_table: LatencyTable
    mailbox: Mailbox
    recorder: Recorder
    bodies: BodyMemory | None
    clock: Clock

    def __post_init__(self) -> None:
        self._supported = self._on_device = False
        self._usual_ns = 0  # smoothed duration of a run
        self._iteration_open = False  # a request has run in this iteration of the loop
        self._handled_stalls = 0  # `latency_table.stalls` of which a pause is over or runs
        self.quiet_ns = self._enabled_ns = -FAR_NS

    def support(self, execution: Execution) -> None:
        """Allow runs on the event loop if the execution runs on any thread; with the bound of GPUs if it is pipelined."""
        self._supported = self.bound_ns > 0 and runs_on_any_thread(execution)
        self._on_device = self._supported and is_pipelined(execution)
        if self._on_device:
            self.bound_ns = self.latency_table.tail_bound_ns = max(self.bound_ns, INLINE_DEVICE_BOUND_NS)

    def allows(self, entry: Entry) -> bool:
        """Return True if a request may run before the loop reads others that arrived with it; also sets `entry.inline`.

        At most one request does so in an iteration of the loop. A second one shows that requests arrive together: it is queued,
        and runs with those behind it, or on the loop if there is none.

        Args:
            entry: the only entry of the request, which is the only one of the version between lease and release.
        """
        now_ns, bodies = entry.enqueued_ns, self.bodies
        entry.inline = (
            self._is_enabled(now_ns)
            and now_ns >= self.quiet_ns
            and (bodies is None or bodies.cells[BodyMemory.REQUESTS] <= 1)
            and entry.deadline_ns - now_ns > self.bound_ns
            and self.latency_table.is_fast(entry.rows)
        )
        return entry.inline and not self._iteration_open

    def crowd(self, now_ns: int) -> None:
        """Record that several requests are in flight at `now_ns` (monotonic): none of them runs on the loop alone for a while."""
        self.quiet_ns = now_ns + INLINE_QUIET_NS
        if self.mailbox.latest is not self.name:
            self._note(now_ns)

    def allows_batch(self) -> bool:
        """Return True if a batch of several requests, which its device computes in a short time, may run on the loop.

        Threads that take turns under the interpreter's lock would cost more than such a batch. That another program uses the
        device shows in the smoothed time of such runs.
        """
        return self._on_device and self._is_enabled(self.clock())

    def _note(self, now_ns: int) -> None:
        """Record that the latest request is of this version."""
        mailbox = self.mailbox
        mailbox.mixed_ns = now_ns + INLINE_QUIET_NS if mailbox.latest else 0
        mailbox.latest = self.name

    def _is_enabled(self, now_ns: int) -> bool:
        mailbox, stalls = self.mailbox, self.latency_table.stalls
        if mailbox.latest is not self.name:
            self._note(now_ns)
        if stalls != self._handled_stalls:
            # A run on an instance was that slow: the time may depend on the values in the request.
            self._handled_stalls = stalls
            self._enabled_ns = max(self._enabled_ns, now_ns + _inline_pause_ns(self.latency_table.stall_ns))
        is_mixed = self._on_device and now_ns < mailbox.mixed_ns
        return self._supported and now_ns >= self._enabled_ns and not is_mixed

    def begin(self) -> None:
        """Begin a run: completions are collected until its end."""
        self.mailbox.is_armed = True
        self._iteration_open = True

    def end(self, begun_ns: int, is_lone: bool = True) -> None:
        """Resume the callers after a run, and disable such runs for a while if it took too long.

        Args:
            begun_ns: monotonic start of the run.
            is_lone: it was of one request.
        """
        run_ns = self.clock() - begun_ns
        self.mailbox.deliver()
        self.mailbox.loop.call_soon(self._end_iteration)  # after the batch is recorded
        limit_ns = max(INLINE_MAX_RUN_NS, 2 * self.bound_ns)
        self._usual_ns += (run_ns - self._usual_ns) >> _SMOOTHING
        is_usual = self._on_device and self._usual_ns > self.bound_ns
        disables = run_ns > limit_ns or is_usual
        self.recorder.record_inline_run(disables)
        if disables:
            pause_ns = _inline_pause_ns(run_ns) if is_lone or is_usual else INLINE_BATCH_PAUSE * run_ns
            self._enabled_ns, self._usual_ns = begun_ns + run_ns + pause_ns, 0
            logger.log(
                logging.INFO if is_lone or is_usual else logging.DEBUG,
                "model %s: a run on the event loop took %d us, more than %d us: its requests run on instances for %.1f s",
                self.name,
                run_ns // NS_PER_US,
                limit_ns // NS_PER_US,
                pause_ns / NS_PER_S,
            )

    def _end_iteration(self) -> None:
        self._iteration_open = False
        self._handled_stalls = self.latency_table.stalls


def _inline_pause_ns(run_ns: int) -> int:
    """Return how long no request runs on the event loop after a slow run of a model."""
    return min(INLINE_PAUSE * run_ns, INLINE_MAX_PAUSE_NS)


@dataclass(eq=False, repr=False)
class SerialRunner:
    """Runs an execution that takes one batch after the other; see `headrace.engine.scheduling.instance.BatchRunner`.

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
        self._reads_device_rows = reads_device_rows(self.execution)
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
        if runs_on_any_thread(self.execution):
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


def exceed_deadline(entry: Entry) -> None:
    """Settle an entry whose deadline has passed."""
    after_us = (entry.deadline_ns - entry.received_ns) // NS_PER_US
    entry.completion.settle(DeadlineExceeded(f"the request's deadline passed after {after_us} us"))
