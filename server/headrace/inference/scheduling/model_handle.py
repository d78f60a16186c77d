"""A loaded model version with its queue and instances: `ModelHandle`, the interface of the data plane.

Leases, counters and the response cache in front of it are those of `VersionHandle`. It is also the seam at which the engine can
move to another process.

`RequestTimeouts` ends a request's wait at its deadline or at its queue's timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from headrace.core.clock import NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.completion import Completion, GroupCompletion, LoopCompletion, Mailbox, ThreadCompletion, settle_all
from headrace.core.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.core.limits import BodyMemory
from headrace.core.request import GroupMembers, InferRequest, InferResponse, LevelLoad, ModelLoad, Probe
from headrace.core.tensor import BYTES, ModelSpec
from headrace.inference.scheduling.admission import AdmissionController
from headrace.inference.scheduling.batch_results import BatchResults
from headrace.inference.scheduling.batching import CostModel
from headrace.inference.scheduling.entries import EntryFactory, Sequencer
from headrace.inference.scheduling.inline_gate import InlineGate
from headrace.inference.scheduling.instance import (
    BatchRunner,
    Instance,
    ModelInstances,
    OnDeath,
    WarmUp,
    in_flight_work,
)
from headrace.inference.scheduling.joining import RaggedLayout
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.launch_pacing import LaunchPacing
from headrace.inference.scheduling.loop_rest import LoopRest
from headrace.inference.scheduling.output_check import OutputCheck, OutputMismatch
from headrace.inference.scheduling.overlapped_runner import OverlappedRunner
from headrace.inference.scheduling.policy import HandlePolicy, LevelPolicy
from headrace.inference.scheduling.queue import FAR_NS, Entry, QueueOrder
from headrace.inference.scheduling.quotas import Quotas
from headrace.inference.scheduling.ragged import PaddedLayout, batch_layout
from headrace.inference.scheduling.row_sampler import RowSampler
from headrace.inference.scheduling.scheduler import IdleTask, Scheduler
from headrace.inference.scheduling.serial_runner import SerialRunner
from headrace.inference.scheduling.version_handle import OverloadFigures, Prediction, VersionHandle, decoupled_error
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution, LoadedModel, ProcessStatus
from headrace.runtimes.overlapped import is_overlapped

logger = logging.getLogger("headrace.model")

DEADLINE_PASSED = "the request's deadline had passed before it was queued"


class ModelHandle(VersionHandle):
    """A loaded version with its queue and its instances.

    Args:
        spec: tensor specs of the model.
        policy: serving policy.
        model: the loaded model; owned by the handle, closed with it. None: the version begins evicted, and the first request
            loads it.
        mailbox: mailbox of the event loop on which callers wait.
        recorder: counters of the version.
        on_dead: callback with the number of live instances after a failure; called from the thread that failed.
        on_wanted: callback with the handle, on any thread, for a request that waits while the version is evicted; called once
            for each eviction, or once more than needed.
        on_back: callback with the number of live instances after a restart; called from a timer's thread.
        clock: returns monotonic nanoseconds.
        bodies: counts requests in the front ends; None without front ends.
        on_first_use: called with the handle once `is_unused` ends, by the thread that ends it; must not wait.
    """

    def __init__(
        self,
        spec: ModelSpec,
        policy: HandlePolicy,
        model: LoadedModel | None,
        mailbox: Mailbox,
        recorder: Recorder,
        on_dead: Callable[[int], None] = lambda _left: None,
        clock: Clock = monotonic_ns,
        on_wanted: Callable[[ModelHandle], None] = lambda _handle: None,
        on_back: Callable[[int], None] = lambda _living: None,
        bodies: BodyMemory | None = None,
        on_first_use: Callable[[ModelHandle], None] = lambda _handle: None,
    ) -> None:
        bound_ns = policy.inline_bound_ns
        super().__init__(spec, policy, recorder, table := LatencyTable(bound_ns), clock)
        self._mailbox, self._on_wanted, self._on_first_use, self.is_unused = (
            mailbox,
            on_wanted,
            on_first_use,
            model is None,
        )
        self._cost_model = cost_model = CostModel(table, policy.batch)
        instances: list[Instance] = []
        works, shared = partial(in_flight_work, instances), policy.sharing is not None
        self._admission = AdmissionController(cost_model, policy.batch, works, shared, mailbox, policy.max_wait_ns)
        self._scheduler = self._create_scheduler(policy, clock, mailbox, self._admission)
        undelivered = recorder.record_undelivered
        sequencer = Sequencer(undelivered) if policy.preserve_ordering else None
        deliver = settle_all if sequencer is None else sequencer.deliver
        self.layout = layout = batch_layout(policy, spec, recorder)
        queue_key = None if layout is None else layout.queue_key
        self._entry_factory = EntryFactory(spec, policy, self._scheduler.discard, sequencer, undelivered, queue_key)
        name = f"{spec.name}/{spec.version}"
        self._inline_gate = InlineGate(name, bound_ns, table, mailbox, recorder, bodies, clock)
        self._instance_group = ModelInstances(
            name, policy.instances, model, self._scheduler, instances, self._runner, on_dead, on_back, clock
        )
        check = OutputCheck(spec, () if policy.ragged is None else policy.ragged.scattered)
        self._batch_results = BatchResults(
            recorder,
            deliver,
            cost_model.batch,
            check,
            table,
            self._admission,
            self.stop_batching,
            layout,
            cost_model.thread_work.observe,
            clock,
            in_flight=partial(getattr, self, "_leases"),
        )
        self._timeouts = RequestTimeouts(policy, self._scheduler, clock)
        self._quotas = Quotas(policy.rate_limits) if policy.rate_limits is not None else None
        self._rest = LoopRest(mailbox, policy.batch.objective_ns)
        self._merges, self._takes_groups = policy.batch.merge, layout is None and _takes_groups(policy, spec)
        self._restore_requested = False  # guarded by _lock, as the first mismatch of outputs

    def _create_scheduler(
        self, policy: HandlePolicy, clock: Clock, mailbox: Mailbox, admission: AdmissionController
    ) -> Scheduler:
        order, defer = QueueOrder(policy.aging_ns, policy.sharing, policy.batch.max_rows), mailbox.loop.call_soon
        delay = mailbox.loop.call_later
        limits, costs = policy.queue_limits, admission.cost_model
        return Scheduler(policy.batch, limits, policy.levels, clock, defer, order, delay, costs, admission)

    @property
    def padding(self) -> Mapping[str, str] | None:
        """State of padding and its reason; None if the model has no `pad`."""
        return self.layout.report() if isinstance(self.layout, PaddedLayout) else None

    def start(self, warm_up: WarmUp | None = None) -> None:
        """Start the instances and wait until each is open and warm.

        Args:
            warm_up: called with the execution of each instance, on the instance's thread.

        Raises:
            ConfigError: an instance failed to start; the others have ended and the model is closed.
        """
        self._instance_group.start(warm_up)

    # On the event loop

    def admit(self) -> None:
        """Check that the version can serve, before a request is decoded.

        Raises:
            Unavailable: all instances have died, or the model's process does not run and will not restart soon.
        """
        instances = self._instance_group
        if instances.alive <= 0 and not instances.evicted:  # as `ready`, without its call
            raise instances.all_dead_error()
        if instances.isolated is not None:
            instances.admit()

    def check_load(self, received_ns: int, deadline_ns: int, client: str) -> None:
        """Reject a request that the latest rejection applies to; not with a response cache, which may have its response."""
        if self._admission.standing is not None and self._cache is None and self.policy.levels == 1:
            now_ns = self._clock()
            error = self._admission.standing_error(self._scheduler, received_ns, deadline_ns, now_ns)
            if error is not None:
                if self._quotas is not None:
                    self._quotas.charge(client, now_ns)
                self._rest.schedule()
                raise error

    def compute(self, request: InferRequest) -> LoopCompletion:
        """Queue a request and return its completion, to be awaited.

        Raises:
            BadRequest: the request has more rows than a batch, and the model does not split.
            DeadlineExceeded: the deadline has passed.
            Overloaded: the queue is full.
            WouldMiss: the predicted completion is after the due time.
            QuotaExceeded: the client exceeded its quota.
            Unavailable: the model is being unloaded or its instances have died.
            Unsupported: the model is decoupled, and the caller takes one response only.
        """
        now_ns = self._clock()
        if self.spec.decoupled and request.responses is None:
            raise decoupled_error(self.spec.name)
        completion = LoopCompletion(self._mailbox)
        entries = self._admit(request, completion, now_ns)
        if self._leases > 1:  # requests in flight together run as batches
            at_once = False
            self._inline_gate.crowd(now_ns)
        else:
            at_once = len(entries) == 1 and self._inline_gate.allows(entries[0])
        try:
            self._scheduler.enqueue(entries, at_once)
        except Unavailable:
            _withdraw(completion, entries)
            raise
        if self._instance_group.evicted:  # after `enqueue`: a concurrent eviction sees the queued request
            self._request_restore()
        # The pipeline of a step has the timer of its deadline.
        timed = request.deadline_ns and not request.due_ns
        if (timed or self._timeouts.has_queue_timeouts) and not completion.is_settled:
            self._timeouts.set(request, completion, entries, now_ns)
        return completion

    @property
    def max_group_rows(self) -> int:
        """Most rows of a group for `infer_group`; 1 while the queue orders requests one by one, or they run alone."""
        batch = self.policy.batch
        return batch.max_rows if self._takes_groups and self._cache is None and batch.merge else 1

    def infer_group(
        self, request: InferRequest, on_settled: Callable[[GroupCompletion], object]
    ) -> list[GroupCompletion]:
        """Queue requests of equal shape as one entry; each member counts in all limits and metrics.

        A group that is rejected is divided, until the members that are admitted are queued. Never raises for a rejected request:
        its completion has the error.

        Args:
            request: inputs of all members, at most `max_group_rows`, without options of single requests: client, priority,
                deadline and parameters.
            on_settled: called on the event loop for each part of the group that is answered or fails, after this returns.

        Returns:
            Completions with all members. A later split of one leaves members to completions that only `on_settled` gets.
        """
        assert request.members is not None, "a group has members"
        completion = GroupCompletion(self._mailbox, request.members, on_settled)
        try:
            self._start_group(request, completion)
        except Unavailable as error:
            return self._start_halves(request, on_settled, error)
        return [completion]

    def _start_halves(
        self, request: InferRequest, on_settled: Callable[[GroupCompletion], object], error: Unavailable
    ) -> list[GroupCompletion]:
        """Queue the members of a rejected group that are admitted alone or in smaller groups."""
        completions: list[GroupCompletion] = []
        parts = _halves(request, 0)
        if not parts:
            completion = self._group_completion(request, on_settled, 0)
            completion.settle(error)
            return [completion]
        while parts:
            part, first = parts.pop()
            completion = self._group_completion(part, on_settled, first)
            try:
                self._start_group(part, completion)
            except Unavailable as rejected:
                halves = _halves(part, first)
                parts += halves
                if halves:
                    continue
                completion = self._group_completion(part, on_settled, first)
                completion.settle(rejected)
            completions.append(completion)
        return completions

    def _group_completion(
        self, request: InferRequest, on_settled: Callable[[GroupCompletion], object], first: int
    ) -> GroupCompletion:
        assert request.members is not None, "a group has members"
        return GroupCompletion(self._mailbox, request.members, on_settled, first)

    def _start_group(self, request: InferRequest, completion: GroupCompletion) -> None:
        """Queue a group; raises Unavailable if it is rejected, and its completion is withdrawn."""
        now_ns = self._clock()
        entries = self._admit(request, completion, now_ns)
        self._inline_gate.crowd(now_ns)
        try:
            self._scheduler.enqueue(entries)
        except Unavailable:
            _withdraw(completion, entries)
            raise
        if self._instance_group.evicted:  # after `enqueue`, as in `compute`
            self._request_restore()
        if self._timeouts.has_queue_timeouts and not completion.is_settled:
            self._timeouts.set(request, completion, entries, now_ns)

    def charge(self, client: str, now_ns: int) -> None:
        """Charge a request that the response cache serves to the client's quota; raises QuotaExceeded."""
        if self._quotas is not None:
            self._quotas.charge(client, now_ns)

    def infer_blocking(self, request: InferRequest) -> InferResponse:
        """Run a request and block until its response; any thread but that of the event loop may call.

        If the queue is empty, an instance sleeps and its execution is `prompt`, the calling thread runs the request itself and
        wakes no other thread. Every other request is queued, as with `infer`. So is a request with a deadline, since this
        thread cannot be interrupted in a device call.

        Raises:
            HeadraceError: an error of `infer`, or the outcome of the request.
        """
        if self.spec.decoupled:
            raise decoupled_error(self.spec.name)
        now_ns = self._clock()
        completion = ThreadCompletion()
        entries = self._admit(request, completion, now_ns)
        try:
            self._scheduler.run(entries, caller_waits=not request.deadline_ns and len(entries) == 1)
            if self._instance_group.evicted:  # after `run`, as in `infer`
                self._request_restore()
            self._timeouts.wait(request, completion, entries, now_ns)
        except BaseException:  # rejected, or the caller is interrupted: nothing waits for the response
            _withdraw(completion, entries)
            raise
        return completion.result()

    def _admit(self, request: InferRequest, completion: Completion, now_ns: int) -> list[Entry]:
        """Check a request and return its entries for the queue; raises as `infer` does."""
        if request.deadline_ns and request.deadline_ns <= now_ns:
            raise DeadlineExceeded(DEADLINE_PASSED)
        if self._quotas is not None:
            self._quotas.charge(request.client, now_ns)
        entries = self._entry_factory.entries(request, completion, now_ns)
        admission, queue = self._admission, self._scheduler
        has_due_time, waiting_rows = entries[-1].due_ns != FAR_NS, queue.queue.total_rows
        if has_due_time or (
            waiting_rows >= admission.short_rows and waiting_rows and admission.max_wait_ns and not request.internal
        ):
            try:
                (admission.admit if has_due_time else admission.check_wait)(queue, entries, now_ns)
            except Unavailable:
                _withdraw(completion, entries)
                raise
        self.used_ns = now_ns
        return entries

    # From any thread

    @property
    def ready(self) -> bool:
        """True while an instance is live, or the version is evicted and restores on the next request."""
        return self._instance_group.alive > 0 or self._instance_group.evicted

    def probes(self) -> Sequence[Probe]:
        """Start the readiness checks of a Python model, without waiting; empty if its code has none."""
        return self._instance_group.probes()

    @property
    def process_status(self) -> ProcessStatus | None:
        """Status of the child process of the model; None without one, and while the model is evicted."""
        return self._instance_group.process_status

    @property
    def alive(self) -> int:
        """Number of live instances."""
        return self._instance_group.alive

    def end_on(self, gpus: Collection[int]) -> None:
        """End the instances on GPUs that have failed; the others take the queue."""
        self._instance_group.end_on(gpus)

    def shortage(self) -> str:
        """Return which part of the instances serves, for the index; "" if all do, or none."""
        instances = self._instance_group
        is_short = 0 < instances.alive < instances.size and not instances.evicted
        return f"{instances.alive} of {instances.size} instances live" if is_short else ""

    @property
    def restarts(self) -> int:
        """Number of restarted instances."""
        return self._instance_group.restarts

    @property
    def evicted(self) -> bool:
        """True while the model is out of memory and requests wait for `restore`."""
        return self._instance_group.evicted

    @property
    def depth(self) -> int:
        """Number of queued requests."""
        return self._scheduler.depth

    def load(self, by_level: bool = True) -> ModelLoad:
        """Return the load of the version.

        Args:
            by_level: include each priority level; the cost grows with the number of levels.
        """
        now_ns, admission, scheduler = self._clock(), self._admission, self._scheduler
        running, instances = admission.in_flight_work(), self._instance_group.alive
        levels = tuple(
            LevelLoad(level, *scheduler.waiting(level - 1), admission.wait_ns(scheduler, level - 1, now_ns))
            for level in range(1, self.policy.levels + 1 if by_level else 1)
        )
        return ModelLoad(
            depth=scheduler.depth,
            rows=scheduler.waiting_rows,
            in_flight=self._leases,
            running_rows=sum([rows for work in running for _, rows in work.batches]),
            instances=instances,
            wait_ns=admission.wait_ns(scheduler, self.policy.default_level - 1, now_ns),
            drain_ns=admission.drain_ns(scheduler, now_ns),
            rows_hz=admission.rows_hz * instances,
            late=admission.late,
            levels=levels,
        )

    def queue_load(self, now_ns: int) -> tuple[int, int]:
        """Return depth and wait in nanoseconds without the other figures of `load`: responses have only these two."""
        scheduler, level = self._scheduler, self.policy.default_level - 1
        return scheduler.depth, self._admission.wait_ns(scheduler, level, now_ns)

    def overload(self, now_ns: int) -> OverloadFigures | None:
        """Return figures for rejections in front-end processes.

        None where a rejection depends on more than the time of arrival: on the client, the priority level, or a cached response.
        """
        policy, limits = self.policy, self.policy.limits
        has_shares = policy.sharing is not None or policy.rate_limits is not None or policy.levels > 1
        if has_shares or self.has_cache or self._instance_group.evicted:
            return None
        scheduler, admission = self._scheduler, self._admission
        rows = scheduler.queue.total_rows
        is_checked = rows and rows >= admission.short_rows  # as in `_admit`
        return OverloadFigures(
            admission.forecast(scheduler, now_ns),
            scheduler.depth,
            scheduler.size_bytes,
            limits.max_count,
            limits.max_size_bytes,
            policy.batch.objective_ns,
            admission.forecast_wait(scheduler, now_ns) if is_checked else None,
        )

    def learn_rejections(self, count: int, kind: int) -> None:
        """Learn from requests of an urgency class that front ends have rejected because of the margin."""
        self._admission.learn_rejections(count, kind)

    def predict_ns(self, rows: int, level: int, now_ns: int) -> Prediction:
        """Predict queue and compute time of a request behind `announced_rows`; zeros while latencies are unmeasured."""
        costs, policy = self._cost_model.current, self.policy
        if costs is None:
            return Prediction(0, 0)
        level = (level if 0 < level <= policy.levels else policy.default_level) - 1
        batches, max_rows = -(-rows // policy.batch.max_rows), policy.batch.max_rows
        wait_ns = self._admission.wait_ns(self._scheduler, level, now_ns, self.announced_rows, rows)
        return Prediction(wait_ns, costs.estimates_ns[min(rows, max_rows)] * batches)

    # By the control thread

    def close(self, timeout_s: float | None) -> bool:
        """Serve the queued requests, end the instances and close the model.

        A second thread may call it with a limit, to end a call without one.

        Args:
            timeout_s: limit in seconds; None for no limit.

        Returns:
            False if a batch still ran after `timeout_s`: its requests got an error, and its memory is not freed.
        """
        deadline_ns = None if timeout_s is None else self._clock() + int(timeout_s * NS_PER_S)
        self.end_leases()
        self._instance_group.disable_death_callbacks()
        self._idle.wait(timeout_s)
        self._close_cache()
        self._scheduler.close()
        remaining_s = None if deadline_ns is None else max((deadline_ns - self._clock()) / NS_PER_S, 0.0)
        error = Unavailable(
            f"the model '{self.spec.name}' was unloaded while the request waited: retry once it is loaded"
        )
        return self._instance_group.close(remaining_s, error)

    def evict(self, timeout_s: float) -> bool:
        """Finish the running batches, end the instances and close the model; leases, queue and counters are kept.

        Afterwards requests are queued under the usual limits, and the first one calls `on_wanted`.

        Args:
            timeout_s: limit in seconds.

        Returns:
            False if the version is closed, has died, or still ran a batch after `timeout_s`: it is served as before.
        """
        with self._lock:
            self._restore_requested = False
        evicted = self._instance_group.evict(timeout_s)
        if evicted and self._scheduler.depth:
            self._request_restore()
        return evicted

    def restore(self, model: LoadedModel, warm_up: WarmUp | None = None) -> bool:
        """Start the instances again after `evict`.

        Args:
            model: the loaded model; owned by the handle, closed in any case.
            warm_up: as in `start`.

        Returns:
            False if the version is closed or not evicted.

        Raises:
            ConfigError: an instance failed to start; the version stays evicted.
        """
        with self._lock:
            self._restore_requested = False
        try:
            is_restored = self._instance_group.restore(model, warm_up)
            if is_restored:
                self._set_used()
            return is_restored
        finally:
            if self._instance_group.evicted and self._scheduler.depth:
                self._request_restore()

    def refuse(self, error: HeadraceError) -> None:
        """Settle the queued requests with an error, because the evicted model cannot be loaded; new requests are accepted."""
        with self._lock:
            self._restore_requested = False
        settle_all([(entry.completion, error) for entry in self._scheduler.drop()])

    def stop_batching(self, mismatch: OutputMismatch) -> None:
        """Stop merging and splitting requests, because their outputs depend on their batch; any thread may call."""
        with self._lock:
            is_repeated = self._entry_factory.mismatch is not None
            self._entry_factory.mismatch = mismatch
        if is_repeated:
            return
        self._set_merging(False)
        logger.error(
            "model %s/%s runs every request alone until it is reloaded: %s",
            self.spec.name,
            self.spec.version,
            mismatch,
        )

    def resume_batching(self, mismatch: OutputMismatch) -> None:
        """End `stop_batching` for a reason that holds no longer; a no-op if batching stopped for another reason."""
        with self._lock:
            if self._entry_factory.mismatch is not mismatch:
                return
            self._entry_factory.mismatch = None
        self._set_merging(self._merges)

    def _set_merging(self, merge: bool) -> None:
        self.policy = replace(self.policy, batch=replace(self.policy.batch, merge=merge))
        self._scheduler.set_merging(merge)
        self._admission.set_merging(merge)

    def offer(self, task: IdleTask) -> None:
        """Run a task on an instance that sleeps, with its execution; dropped if none sleeps, or a request waits."""
        self._scheduler.offer(task)

    def set_sampler(self, sampler: RowSampler | None) -> None:
        """Let a sampler copy rows of the batches from now on; None for none."""
        self._batch_results.sampler = sampler

    @property
    def is_ending(self) -> bool:
        """True if the instances end: the version is being closed or evicted."""
        return self.closing or self._scheduler.is_ending()

    def reopen_executions(self) -> None:
        """Replace the executions of the loaded model by new ones; returns at once, and no batch begins on the old ones."""
        self._instance_group.reopen()

    def _set_used(self) -> None:
        if self.is_unused:
            self.is_unused = False
            self._on_first_use(self)

    def _request_restore(self) -> None:
        self._set_used()
        with self._lock:
            is_repeated, self._restore_requested = self._restore_requested, True
        if not is_repeated:
            self._on_wanted(self)

    def _runner(self, name: str, execution: Execution, on_death: OnDeath) -> BatchRunner:
        """Create the runner of an instance: an overlapped one if the execution supports it and no input is BYTES."""
        scheduler, batch_results, clock = self._scheduler, self._batch_results, self._clock
        gate = self._inline_gate
        serial = SerialRunner(execution, scheduler, self.policy.batch.max_rows, batch_results, clock, gate)
        inputs = self.spec.inputs
        numbers = all(tensor.datatype is not BYTES for tensor in inputs.values())
        if not (is_overlapped(execution) and numbers):
            return serial
        batch = self.policy.batch
        pacing = LaunchPacing(min(batch.preferred_rows, default=batch.max_rows)) if batch.merge else None
        layout = self.layout if isinstance(self.layout, PaddedLayout | RaggedLayout) else None
        threads, batched = self.policy.fill_threads, self.spec.max_batch_size > 0 and self.policy.ragged is None
        return OverlappedRunner(
            name,
            execution,
            scheduler,
            len(inputs),
            serial,
            batch_results,
            on_death,
            pacing,
            clock,
            threads,
            batched,
            layout,
            gate,
        )


def _takes_groups(policy: HandlePolicy, spec: ModelSpec) -> bool:
    """Return False if the queue orders requests one by one, or charges a quota for each, or none shares a batch."""
    is_ordered = policy.levels > 1 or policy.sharing is not None or policy.preserve_ordering or policy.by_member
    is_plain = policy.rate_limits is None and not policy.batch.preferred_rows
    return is_plain and not is_ordered and spec.max_batch_size >= 2


def _withdraw(completion: Completion, entries: list[Entry]) -> None:
    """Withdraw a request for which nothing waits: it leaves the queue and the sequencer, and its inputs are released."""
    completion.withdraw()
    for entry in entries:
        entry.completion.withdraw()


def _halves(request: InferRequest, first: int) -> list[tuple[InferRequest, int]]:
    """Divide a group into two, the first half last, each with the place of its first member; [] for a group of one member."""
    assert request.members is not None
    received_ns, rows = request.members
    count = len(rows) // 2
    if not count:
        return []
    front_rows = sum(rows[:count])
    halves = []
    for members, part in ((slice(count, None), slice(front_rows, None)), (slice(count), slice(front_rows))):
        own = GroupMembers(received_ns[members], rows[members])
        half = request.replace(
            inputs={name: array[part] for name, array in request.inputs.items()},
            rows=sum(own.rows),
            members=own,
            size_bytes=request.size_bytes * sum(own.rows) // request.rows,
            received_ns=min(own.received_ns),
        )
        halves.append((half, first + (members.start or 0)))
    return halves


# uvloop and asyncio accept delays as floats of seconds; a deadline beyond a day counts as a day.
_MAX_DELAY_NS = 86_400 * NS_PER_S


def set_deadline(request: InferRequest, completion: LoopCompletion, now_ns: int) -> None:
    """Start the timer of a request's deadline; call it on the loop."""
    after_ns = request.deadline_ns - request.received_ns
    completion.call_after(min(request.deadline_ns - now_ns, _MAX_DELAY_NS), _exceed, completion, after_ns)


class RequestTimeouts:
    """Ends waiting requests: with timers of the event loop, or on the thread of a blocked caller.

    Args:
        policy: policy with the timeouts of the levels.
        scheduler: the queue; its `expire` is called after a queue timeout.
        clock: returns monotonic nanoseconds.

    Attributes:
        has_queue_timeouts: True if a level has a queue timeout.
    """

    def __init__(self, policy: HandlePolicy, scheduler: Scheduler, clock: Clock) -> None:
        levels = range(1, policy.levels + 1)
        self._levels = [policy.level_policies.get(level, policy.queue_policy) for level in levels]
        self._scheduler = scheduler
        self._clock = clock
        self.has_queue_timeouts = any(level.queue_timeout_ns for level in self._levels)

    def set(self, request: InferRequest, completion: LoopCompletion, entries: list[Entry], now_ns: int) -> None:
        """Start the timers of a request."""
        deadline_ns = request.deadline_ns
        if deadline_ns and not request.due_ns:
            set_deadline(request, completion, now_ns)
            if not self.has_queue_timeouts:
                return
        level = self._levels[entries[0].level]
        timeout_ns = _timeout_ns(level, request, now_ns)
        if timeout_ns:
            for entry in entries:
                completion.call_after(timeout_ns, self._scheduler.expire, entry, level.demote_on_timeout)

    def wait(self, request: InferRequest, completion: ThreadCompletion, entries: list[Entry], now_ns: int) -> None:
        """Block until the completion has notified, and apply its timeouts on the calling thread."""
        deadline_ns = request.deadline_ns
        level = self._levels[entries[0].level]
        timeout_ns = _timeout_ns(level, request, now_ns)
        if timeout_ns:
            if completion.wait(self._remaining_s(now_ns + timeout_ns)):
                return
            for entry in entries:
                self._scheduler.expire(entry, level.demote_on_timeout)
        if deadline_ns and completion.wait(self._remaining_s(deadline_ns)):
            return
        if deadline_ns:
            _exceed(completion, deadline_ns - request.received_ns)
        completion.wait()

    def _remaining_s(self, time_ns: int) -> float:
        return min(max(time_ns - self._clock(), 0), _MAX_DELAY_NS) / NS_PER_S


def _timeout_ns(level: LevelPolicy, request: InferRequest, now_ns: int) -> int:
    """Return the queue timeout of a request in nanoseconds; 0 for no limit, or if its deadline is earlier.

    As in Triton the timeout of a request can only shorten that of the policy, so it has no effect without one. Deadlines have
    separate timers.
    """
    timeout_ns = level.queue_timeout_ns
    if level.timeout_override and 0 < request.queue_timeout_ns < timeout_ns:
        timeout_ns = request.queue_timeout_ns
    return 0 if 0 < request.deadline_ns <= now_ns + timeout_ns else timeout_ns


def _exceed(completion: Completion, after_ns: int) -> None:
    """Settle a request whose deadline passed `after_ns` after its arrival."""
    completion.settle(DeadlineExceeded(f"the request's deadline passed after {after_ns // NS_PER_US} us"))
