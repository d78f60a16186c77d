"""Splits the outputs of a batch, settles the completion of each member, and counts the batch."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import cast

from headrace.core.clock import NS_PER_US, Clock, monotonic_ns
from headrace.core.completion import Completion, Outcome
from headrace.core.errors import DeadlineExceeded, HeadraceError, ModelFailed
from headrace.core.request import BatchTimes, InferResponse
from headrace.core.tensor import Array
from headrace.inference.scheduling.admission import AdmissionController
from headrace.inference.scheduling.assembly import BatchLayout
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.open_requests import Deliver, OpenEntry, StreamedEntry
from headrace.inference.scheduling.output_check import ANY_ROWS, OutputCheck, OutputMismatch
from headrace.inference.scheduling.queue import FAR_NS, Entry
from headrace.inference.scheduling.row_sampler import RowSampler
from headrace.inference.scheduling.selector import Batch
from headrace.observability.counters import BatchRecord, Recorder
from headrace.runtimes.members import BatchMember, LateResult, MemberOutputs, MemberResult, Rescheduled

logger = logging.getLogger("headrace.instance")

_ROWS = attrgetter("rows")


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
        in_flight: returns the number of requests of the version in the server.
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
    in_flight: Callable[[], int] = lambda: 0

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
        record.in_flight = self.in_flight()
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


def exceed_deadline(entry: Entry) -> None:
    """Settle an entry whose deadline has passed."""
    after_us = (entry.deadline_ns - entry.received_ns) // NS_PER_US
    entry.completion.settle(DeadlineExceeded(f"the request's deadline passed after {after_us} us"))
