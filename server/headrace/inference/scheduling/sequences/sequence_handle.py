"""A loaded model version whose requests belong to sequences: `SequenceHandle`, beside the plain `ModelHandle`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headrace.core.clock import NS_PER_S, Clock
from headrace.core.completion import Completion, LoopCompletion, Mailbox, ThreadCompletion
from headrace.core.errors import BadRequest, DeadlineExceeded, Unavailable
from headrace.core.request import InferRequest, InferResponse, SequenceFields
from headrace.core.response_bodies import SequenceFigures
from headrace.inference.scheduling.admission import AdmissionController, rejection
from headrace.inference.scheduling.entries import member_of
from headrace.inference.scheduling.instance import BatchRunner, OnDeath
from headrace.inference.scheduling.model_handle import DEADLINE_PASSED, ModelHandle, set_deadline
from headrace.inference.scheduling.policy import HandlePolicy, SequencePolicy
from headrace.inference.scheduling.queue import FAR_NS, Entry
from headrace.inference.scheduling.scheduler import Scheduler
from headrace.inference.scheduling.sequences.controls import MAX_ID, check_correlation_id, max_number
from headrace.inference.scheduling.sequences.directory import SequenceDirectory
from headrace.inference.scheduling.sequences.live_sequence import CorrelationId, SequenceEntry
from headrace.inference.scheduling.sequences.runner import SequenceRunner
from headrace.inference.scheduling.sequences.scheduler import SequenceScheduler
from headrace.inference.scheduling.sequences.sequence_table import END_FLAG, FLAGS_PARAMETER, ID_PARAMETER, START_FLAG
from headrace.inference.scheduling.version_handle import OverloadFigures, decoupled_error
from headrace.runtimes.base import Execution

NO_SLOT_TEXT = (
    "no slot is free for the sequence, predicted to complete in {0:.3g} ms, due in {1:.3g} ms; retry later, allow a longer "
    "deadline, or configure more slots"
)
MAX_ID_LENGTH = 128
"""Most characters of a text id, as in Triton."""


class SequenceHandle(ModelHandle):
    """A loaded version with sequences, their slots and its instances. Each live sequence keeps the version open.

    Args:
        arguments: those of `ModelHandle`.
        directory: finds the version of a sequence that was started before a reload.
        keywords: those of `ModelHandle`.
    """

    _scheduler: SequenceScheduler

    def __init__(self, *arguments: Any, directory: SequenceDirectory, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._directory = directory
        rules = self._rules(self.policy)
        self._max_id, self._is_iterative = max_number(rules.controls), rules.is_iterative
        directory.add(self)

    def _create_scheduler(
        self, policy: HandlePolicy, clock: Clock, mailbox: Mailbox, admission: AdmissionController
    ) -> Scheduler:
        rules, limits, defer = self._rules(policy), policy.queue_limits, mailbox.loop.call_soon
        return SequenceScheduler(rules, limits, clock, defer, admission.cost_model, self._end_holds, admission)

    @staticmethod
    def _rules(policy: HandlePolicy) -> SequencePolicy:
        assert policy.sequences is not None, "the policy of a model with sequences has their rules"
        return policy.sequences

    def _end_holds(self, count: int) -> None:
        for _ in range(count):
            self.end_hold()

    # On the event loop

    def check_load(self, received_ns: int, deadline_ns: int, client: str) -> None:
        """Reject nothing before the request is read: only its sequence says whether it starts one."""

    def compute(self, request: InferRequest) -> LoopCompletion:
        """Queue a request of a sequence and return its completion, to be awaited.

        Raises:
            BadRequest: the request has no valid sequence, more than one row, or no START although its sequence is not live.
            DeadlineExceeded: the deadline has passed.
            Overloaded: the queue is full.
            QuotaExceeded: the client exceeded its quota.
            Unavailable: the model is being unloaded or its instances have died.
            WouldMiss: the request starts a sequence, and its predicted response is after its due time.
            Unsupported: the model is decoupled, and the caller takes one response only.
        """
        if self.spec.decoupled and request.responses is None:
            raise decoupled_error(self.spec.name)
        correlation_id, is_start, is_end = self._checked(request)
        if not is_start and self._directory.has_others(self):
            other = self._other(request, correlation_id)
            if other is not None:
                return other.compute(request)
        now_ns = self._clock()
        completion = LoopCompletion(self._mailbox)
        entry = self._queued(request, completion, now_ns, correlation_id, is_start, is_end, self._scheduler.enqueue)
        if not completion.is_settled:
            if request.deadline_ns and not request.due_ns:
                set_deadline(request, completion, now_ns)
            if request.queue_timeout_ns:
                completion.call_after(request.queue_timeout_ns, self._scheduler.expire, entry)
        return completion

    def infer_blocking(self, request: InferRequest) -> InferResponse:
        """Run a request of a sequence and block until its response; any thread but that of the event loop may call.

        Raises:
            HeadraceError: an error of `compute`, or the outcome of the request.
        """
        if self.spec.decoupled:
            raise decoupled_error(self.spec.name)
        correlation_id, is_start, is_end = self._checked(request)
        now_ns = self._clock()
        completion = ThreadCompletion()

        def enqueue(entries: list[Entry]) -> None:
            self._scheduler.run(entries, caller_waits=False)

        try:
            entry = self._queued(request, completion, now_ns, correlation_id, is_start, is_end, enqueue)
            self._timeouts.wait(request, completion, [entry], now_ns)
        except BaseException:  # rejected, or the caller is interrupted: nothing waits for the response
            completion.withdraw()
            raise
        return completion.result()

    def _queued(
        self,
        request: InferRequest,
        completion: Completion,
        now_ns: int,
        correlation_id: CorrelationId,
        is_start: bool,
        is_end: bool,
        enqueue: Callable[[list[Entry]], object],
    ) -> SequenceEntry:
        """Queue a checked request."""
        if request.deadline_ns and request.deadline_ns <= now_ns:
            raise DeadlineExceeded(DEADLINE_PASSED)
        if self._quotas is not None:
            self._quotas.charge(request.client, now_ns)
        objective_ns = self.policy.batch.objective_ns
        entry = SequenceEntry(
            request, completion, now_ns, correlation_id, is_start, is_end, objective_ns, self._client(request)
        )
        if is_start and entry.due_ns != FAR_NS:
            self._admit_start(entry, now_ns)
        entry.remove = self._scheduler.discard
        if self.policy.by_member:
            flags = START_FLAG * is_start + END_FLAG * is_end
            own = {ID_PARAMETER: correlation_id, FLAGS_PARAMETER: flags}
            member = member_of(request, completion, self.spec.decoupled)
            entry.member = member._replace(parameters={**member.parameters, **own})
        completion.after = entry.on_settled
        if is_start and not self.hold():
            raise Unavailable(
                f"model '{self.spec.name}' is being unloaded and starts no sequences: start it again once the model is loaded"
            )
        try:
            enqueue([entry])
        except BaseException:
            completion.withdraw()
            if is_start:
                self.end_hold()
            raise
        if is_start and self._directory.has_others(self):
            for other in self._replaced():
                other._scheduler.supersede(entry.sequence_key)
        self.used_ns = now_ns
        if self._instance_group.evicted:  # after `enqueue`: a concurrent eviction sees the queued request
            self._request_restore()
        return entry

    def _admit_start(self, entry: SequenceEntry, now_ns: int) -> None:
        """Admit or reject a sequence by the predicted response to its first request; later requests are not rejected.

        Raises:
            WouldMiss: the predicted response is after the due time; it has the time until a slot should be free.
        """
        wait_ns = self._scheduler.slot_wait_ns(entry.sequence_key, now_ns)
        if not wait_ns:
            self._admission.admit(self._scheduler, [entry], now_ns)
            return
        self._admission.has_due_times = True
        costs = self._cost_model.current
        done_ns = now_ns + wait_ns + (0 if costs is None else costs.estimates_ns[1])
        if done_ns > entry.due_ns:
            raise rejection(NO_SLOT_TEXT, done_ns, entry.due_ns, now_ns, wait_ns / NS_PER_S)

    def overload(self, now_ns: int) -> OverloadFigures | None:
        """Return None: a rejection depends on the sequence of a request."""
        return None

    def _checked(self, request: InferRequest) -> tuple[CorrelationId, bool, bool]:
        """Return correlation id, START and END of a request."""
        fields, name = request.sequence or SequenceFields(0), self.spec.name
        correlation_id = fields.id
        if (  # the common case, in one expression
            type(correlation_id) is int
            and 0 < correlation_id <= self._max_id
            and request.rows == 1
            and type(fields.start) is bool
            and type(fields.end) is bool
        ):
            return correlation_id, fields.start, fields.end and not self._is_iterative
        if self._is_iterative and correlation_id in (0, ""):
            self._check_rows(request)
            return self._scheduler.new_id(self._max_id or MAX_ID, is_text=not self._max_id), True, False
        for flag, value in (("sequence_start", fields.start), ("sequence_end", fields.end)):
            if not isinstance(value, bool):
                raise BadRequest(f"parameter '{flag}' is {value!r:.64}, it must be true or false: correct the request")
        is_number = isinstance(correlation_id, int) and not isinstance(correlation_id, bool)
        if not is_number and not isinstance(correlation_id, str):
            raise BadRequest(
                f"parameter 'sequence_id' is a {type(correlation_id).__name__}, it must be a number or a text: correct it"
            )
        if correlation_id in (0, ""):
            raise BadRequest(
                f"inference request to model '{name}' must specify a non-zero or non-empty correlation ID: it came without a "
                "sequence_id, and every request of the model belongs to a sequence: send sequence_id"
            )
        if isinstance(correlation_id, int) and not 0 < correlation_id <= MAX_ID:
            raise BadRequest(
                f"parameter 'sequence_id' is {correlation_id}, it must be a number from 1 to {MAX_ID}: correct the request"
            )
        if isinstance(correlation_id, str) and len(correlation_id) > MAX_ID_LENGTH:
            raise BadRequest(
                f"parameter 'sequence_id' has {len(correlation_id)} characters, at most {MAX_ID_LENGTH} are allowed: send a "
                "shorter text"
            )
        self._check_rows(request)
        assert isinstance(correlation_id, int | str), "checked above"
        check_correlation_id(self._rules(self.policy).controls, correlation_id, name)
        return correlation_id, bool(fields.start), bool(fields.end) and not self._is_iterative

    @staticmethod
    def _check_rows(request: InferRequest) -> None:
        if request.rows > 1:
            raise BadRequest(
                f"the request has {request.rows} rows, a request of a sequence has one: send the rows one after the other"
            )

    def _client(self, request: InferRequest) -> str:
        """Return the client that the ids of a request belong to; "" for all clients."""
        return request.client if self._directory.by_client else ""

    def _replaced(self) -> Iterator[SequenceHandle]:
        """Yield the versions that are being replaced by this one."""
        for other in self._directory.versions(self.spec.name):
            if other is self or not isinstance(other, SequenceHandle):
                continue
            if other.closing or other.spec.version == self.spec.version:
                yield other

    def _other(self, request: InferRequest, correlation_id: CorrelationId) -> SequenceHandle | None:
        """Return the version that is being replaced by this one and has the live sequence; None if there is none."""
        key = (request.client, correlation_id) if self._client(request) else correlation_id
        if self._scheduler.accepts(key):
            return None
        for other in self._replaced():
            if other._scheduler.accepts(key):
                if (other.spec.inputs, other.spec.outputs) == (self.spec.inputs, self.spec.outputs):
                    return other
                raise BadRequest(
                    f"the sequence was started before a reload of model '{self.spec.name}' that changed its inputs or outputs: "
                    "start it again with sequence_start"
                )
        return None

    @property
    def max_group_rows(self) -> int:
        """1: each request belongs to another sequence."""
        return 1

    # From any thread

    @property
    def live_sequences(self) -> int:
        """Number of live sequences."""
        return self.sequence_figures.live

    @property
    def sequence_figures(self) -> SequenceFigures:
        """Figures of the sequences."""
        return self._scheduler.figures()

    # By the control thread

    def drain_sequences(self) -> None:
        """End the live sequences at the end of the process: each once its queued requests have run."""
        self._scheduler.drain_sequences()

    def close(self, timeout_s: float | None) -> bool:
        """End the version once its live sequences have ended; see `ModelHandle.close`."""
        try:
            return super().close(timeout_s)
        finally:
            self._directory.discard(self)

    def evict(self, timeout_s: float) -> bool:
        """Free the memory of the model; False while it has live sequences."""
        return not self.live_sequences and super().evict(timeout_s)

    def _runner(self, name: str, execution: Execution, on_death: OnDeath) -> BatchRunner:
        index = int(name.rpartition("#")[2])
        rules = self._rules(self.policy)
        return SequenceRunner(index, execution, self._scheduler, rules, self.spec, self._batch_results, self._clock)
