"""One loaded model version as the rest of the server uses it: `ModelHandle`.

The registry hands it out as a lease; a leased version is not closed. It is also the seam at which the engine can move to
another process. Ownership: `admit`, `infer`, `record_failure` and `release` are called on the event loop, `infer_blocking` and
`release` on any other thread of a program that holds a lease; the rest by the control thread.

`RequestTimeouts` ends a request's wait at its deadline or at its queue's timeout.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from headrace.backends.base import Execution, LoadedModel, ProcessStatus, is_pipelined
from headrace.core.clock import NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.completion import Completion, LoopCompletion, Mailbox, ThreadCompletion, settle_all
from headrace.core.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.core.limits import BodyMemory
from headrace.core.request import InferRequest, InferResponse, LevelLoad, ModelLoad
from headrace.core.tensor import BYTES, ModelSpec
from headrace.observability.counters import Recorder
from headrace.scheduling.admission import AdmissionController, Quotas
from headrace.scheduling.batching import CostModel
from headrace.scheduling.entries import EntryFactory, Sequencer
from headrace.scheduling.executor import BatchResults, InlineGate, OutputCheck, OutputMismatch, SerialRunner
from headrace.scheduling.instance import BatchRunner, ModelInstances, OnDeath, WarmUp
from headrace.scheduling.latency_table import LatencyTable
from headrace.scheduling.pipeline import LaunchPacing, Pipeline
from headrace.scheduling.policy import HandlePolicy, LevelPolicy
from headrace.scheduling.queue import FAR_NS, Entry, QueueOrder
from headrace.scheduling.scheduler import Scheduler

logger = logging.getLogger("headrace.model")

_DEADLINE_PASSED = "the request's deadline had passed before it was queued"


class ModelHandle:
    """A loaded version with its queue and its instances.

    Args:
        spec: what callers may send and get.
        policy: how requests are treated.
        model: what runs; owned by the handle, closed with it.
        mailbox: of the event loop on which callers wait.
        recorder: counts.
        on_dead: called from a dying instance's thread with the number of instances left, while the version serves.
        on_wanted: called with the handle, on any thread, when a request waits while it is parked; once for each parking, and
            perhaps once more than needed.
        on_back: called on a thread of its own with the number of instances that live, once one that had died serves again.
        clock: monotonic nanoseconds.
        bodies: counts requests in the front ends; None without front ends.

    Attributes:
        used_ns: when the last request came, monotonic; 0 if none has.
        latency_table: measured compute times by rows.
    """

    def __init__(
        self,
        spec: ModelSpec,
        policy: HandlePolicy,
        model: LoadedModel,
        mailbox: Mailbox,
        recorder: Recorder,
        on_dead: Callable[[int], None] = lambda _left: None,
        clock: Clock = monotonic_ns,
        on_wanted: Callable[[ModelHandle], None] = lambda _handle: None,
        on_back: Callable[[int], None] = lambda _living: None,
        bodies: BodyMemory | None = None,
    ) -> None:
        self.spec, self.policy, self.recorder = spec, policy, recorder
        self.used_ns = 0
        self._mailbox = mailbox
        self._on_wanted = on_wanted
        self._clock = clock
        order, defer = QueueOrder(policy.aging_ns, policy.sharing, policy.batch.max_rows), mailbox.loop.call_soon
        self._scheduler = Scheduler(policy.batch, policy.queue_limits, policy.levels, clock, defer, order)
        sequencer = Sequencer() if policy.preserve_ordering else None
        deliver = settle_all if sequencer is None else sequencer.deliver
        self._entry_factory = EntryFactory(
            spec,
            policy.batch.max_rows,
            policy.split_oversized,
            policy.limits.max_count,
            policy.levels,
            policy.default_level,
            self._scheduler.discard,
            sequencer,
            policy.batch.objective_ns,
        )
        name, bound_ns = f"{spec.name}/{spec.version}", policy.inline_bound_ns
        self.latency_table = table = LatencyTable(bound_ns)
        self._inline_gate = InlineGate(name, bound_ns, table, mailbox, recorder, bodies, clock)
        cost_model = CostModel(table, policy.batch)
        self._scheduler.set_cost_model(cost_model)
        self._admission = AdmissionController(
            cost_model,
            policy.batch,
            self._scheduler,
            lambda: self._instance_group.in_flight_work(),
            shared=policy.sharing is not None,
        )
        self._scheduler.on_dropped = self._admission.learn_dropped
        self._scheduler.retry_after_s = self._admission.retry_after_s
        self._batch_results = BatchResults(
            recorder, deliver, cost_model.batch, OutputCheck(spec), table, self._admission, self._stop_batching
        )
        self._timeouts = RequestTimeouts(policy, self._scheduler, clock)
        self._quotas = Quotas(policy.rate_limits) if policy.rate_limits is not None else None
        self._lock = threading.Lock()  # guards _leases, _closing, _restore_requested, and the first mismatch of outputs
        self._leases, self._restore_requested, self._closing = 0, False, False
        self._idle = threading.Event()  # set once the version is closing and has no leases
        self._instance_group = ModelInstances(
            name, policy.instances, model, self._scheduler, self._runner, on_dead, on_back, clock
        )

    def start(self, warm_up: WarmUp | None = None) -> None:
        """Start the instances and wait until each is open and warm.

        Args:
            warm_up: called with the execution of each instance, on the instance's own thread.

        Raises:
            ConfigError: an instance failed; the others have ended and the model is closed.
        """
        self._instance_group.start(warm_up)

    # On the event loop

    def lease(self) -> bool:
        """Take a lease; False if the version is being closed. The registry calls this."""
        with self._lock:
            if self._closing:
                return False
            self._leases += 1
        return True

    def release(self) -> None:
        """Give a lease back."""
        with self._lock:
            self._leases -= 1
            if self._closing and self._leases == 0:
                self._idle.set()

    def admit(self) -> None:
        """Refuse early, before a request is decoded.

        Raises:
            Unavailable: no instance is left, or the model's process is not to be had for some time.
        """
        instances = self._instance_group
        if instances.alive <= 0 and not instances.evicted:  # as `ready`, without its call
            raise instances.all_dead_error()
        if instances.isolated is not None:
            instances.admit()

    def infer(self, request: InferRequest) -> LoopCompletion:
        """Queue a request; await what is returned for the answer.

        Raises:
            BadRequest: more rows than a batch holds, and the model does not split.
            DeadlineExceeded: the deadline has passed already.
            Overloaded: the queue is full.
            WouldMiss: it would be answered too late.
            QuotaExceeded: its client asks for more than it may.
            Unavailable: the model is being unloaded or its instances have died.
        """
        now_ns = self._clock()
        completion = LoopCompletion(self._mailbox)
        entries = self._admit(request, completion, now_ns)
        at_once = len(entries) == 1 and self._inline_gate.allows(entries[0], self._leases)
        try:
            self._scheduler.enqueue(entries, at_once)
        except Unavailable:
            _withdraw(completion, entries)
            raise
        if self._instance_group.evicted:  # after the queueing: who parks it meanwhile sees what is queued
            self._request_restore()
        if (request.deadline_ns or self._timeouts.has_queue_timeouts) and not completion.done:
            self._timeouts.set(request, completion, entries, now_ns)
        return completion

    def infer_blocking(self, request: InferRequest) -> InferResponse:
        """Run a request and wait for its answer, on any thread that has nothing else to do (the event loop has).

        Where nothing else waits, an instance sleeps and its execution is `prompt`, the calling thread runs the request itself
        from beginning to end: no other is woken for it. Everything else waits in the queue, as with `infer`; so does a request
        with a deadline, since nobody could call this thread back from a device.

        Raises:
            HeadraceError: as `infer` raises, or as the request was answered.
        """
        now_ns = self._clock()
        completion = ThreadCompletion()
        entries = self._admit(request, completion, now_ns)
        try:
            self._scheduler.run(entries, caller_waits=not request.deadline_ns and len(entries) == 1)
            if self._instance_group.evicted:  # after the queueing, as in `infer`
                self._request_restore()
            self._timeouts.wait(request, completion, entries, now_ns)
        except BaseException:  # refused, or the caller is called off: nobody waits for an answer any more
            _withdraw(completion, entries)
            raise
        outcome = completion.outcome
        assert outcome is not None, "whoever is told has an outcome"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _admit(self, request: InferRequest, completion: Completion, now_ns: int) -> list[Entry]:
        """The entries of a request that is taken, for the queue; raises as `infer` does."""
        if request.deadline_ns and request.deadline_ns <= now_ns:
            raise DeadlineExceeded(_DEADLINE_PASSED)
        if self._quotas is not None:
            self._quotas.charge(request.client, now_ns)
        entries = self._entry_factory.entries(request, completion, now_ns)
        if entries[-1].due_ns != FAR_NS:
            try:
                self._admission.admit(entries, now_ns)
            except Unavailable:
                _withdraw(completion, entries)
                raise
        self.used_ns = now_ns
        return entries

    def record_failure(self, error: HeadraceError, received_ns: int) -> None:
        """Count a request that was answered with an error."""
        self.recorder.failure(error.reason, max(self._clock() - received_ns, 0))

    # From any thread

    @property
    def ready(self) -> bool:
        """True while at least one instance lives, or will once somebody asks."""
        return self._instance_group.alive > 0 or self._instance_group.evicted

    @property
    def process_status(self) -> ProcessStatus | None:
        """How the model's own process fares; None if it has none (now)."""
        return self._instance_group.process_status

    @property
    def alive(self) -> int:
        """Instances that live."""
        return self._instance_group.alive

    @property
    def restarts(self) -> int:
        """Instances that died and were started anew."""
        return self._instance_group.restarts

    @property
    def evicted(self) -> bool:
        """True while the model is out of memory and requests wait for `restore`."""
        return self._instance_group.evicted

    @property
    def closing(self) -> bool:
        """True once it is being closed: it takes no new leases."""
        return self._closing

    @property
    def in_flight(self) -> int:
        """Requests between lease and release."""
        return self._leases

    @property
    def depth(self) -> int:
        """Requests in the queue."""
        return self._scheduler.depth

    def load(self, by_level: bool = True) -> ModelLoad:
        """How busy it is.

        Args:
            by_level: each priority level by itself, too, which takes as long as there are levels.
        """
        now_ns, admission, scheduler = self._clock(), self._admission, self._scheduler
        in_flight_work = admission.in_flight_work()
        levels = tuple(
            LevelLoad(level, *scheduler.waiting(level - 1), admission.wait_ns(level - 1, now_ns))
            for level in range(1, self.policy.levels + 1 if by_level else 1)
        )
        return ModelLoad(
            depth=scheduler.depth,
            rows=scheduler.waiting_rows,
            in_flight=self._leases,
            running_rows=sum([rows for work in in_flight_work for _, rows in work.batches]),
            instances=self._instance_group.alive,
            wait_ns=admission.wait_ns(self.policy.default_level - 1, now_ns),
            drain_ns=admission.drain_ns(now_ns),
            rows_hz=admission.rows_hz,
            late=admission.late,
            levels=levels,
        )

    # By the control thread

    def close(self, timeout_s: float | None) -> bool:
        """Serve what is queued, end the instances, give the model back.

        A second thread may call it to set an end to a call that waits for ever.

        Args:
            timeout_s: how long all of it may take; None: as long as it does.

        Returns:
            False if something still ran after `timeout_s`; its callers have got an error, and its memory is not freed.
        """
        deadline_ns = None if timeout_s is None else self._clock() + int(timeout_s * NS_PER_S)
        with self._lock:
            self._closing = True
            if self._leases == 0:
                self._idle.set()
        self._instance_group.disable_death_callbacks()
        self._idle.wait(timeout_s)
        self._scheduler.close()
        remaining_s = None if deadline_ns is None else max((deadline_ns - self._clock()) / NS_PER_S, 0.0)
        error = Unavailable(f"the model '{self.spec.name}' was unloaded while the request waited")
        return self._instance_group.close(remaining_s, error)

    def evict(self, timeout_s: float) -> bool:
        """Answer what is being run, end the instances and close the model; leases, queue and counts stay.

        From here on a request waits in the queue, under all its limits, and `on_wanted` is called.

        Args:
            timeout_s: how long it may take.

        Returns:
            False if it was closed, has died, or something still ran after `timeout_s`: then it serves on.
        """
        with self._lock:
            self._restore_requested = False
        evicted = self._instance_group.evict(timeout_s)
        if evicted and self._scheduler.depth:
            self._request_restore()
        return evicted

    def restore(self, model: LoadedModel, warm_up: WarmUp | None = None) -> bool:
        """Serve again.

        Args:
            model: what runs from here on; owned by the handle, closed in any case.
            warm_up: as in `start`.

        Returns:
            False if there was no need: it is closed or not parked.

        Raises:
            ConfigError: an instance failed; it stays parked.
        """
        with self._lock:
            self._restore_requested = False
        try:
            return self._instance_group.restore(model, warm_up)
        finally:
            if self._instance_group.evicted and self._scheduler.depth:
                self._request_restore()

    def refuse(self, error: HeadraceError) -> None:
        """Answer what waits with an error, and take more: parked, it cannot be loaded now."""
        with self._lock:
            self._restore_requested = False
        settle_all([(entry.completion, error) for entry in self._scheduler.drop()])

    def _stop_batching(self, mismatch: OutputMismatch) -> None:
        """Neither merge nor split any more: the model's outputs are not those of the rows sent. From any thread."""
        with self._lock:
            is_repeated = self._entry_factory.mismatch is not None
            self._entry_factory.mismatch = mismatch
        if is_repeated:
            return
        self.policy = replace(self.policy, batch=replace(self.policy.batch, merge=False))
        self._scheduler.stop_merging()
        self._admission.stop_merging()
        logger.error(
            "model %s/%s runs every request alone until it is loaded again: %s",
            self.spec.name,
            self.spec.version,
            mismatch,
        )

    def _request_restore(self) -> None:
        with self._lock:
            is_repeated, self._restore_requested = self._restore_requested, True
        if not is_repeated:
            self._on_wanted(self)

    def _runner(self, name: str, execution: Execution, on_death: OnDeath) -> BatchRunner:
        """Batches overlap if the execution can do it, and the inputs are rows of numbers that can be copied into its memory."""
        scheduler, batch_results, clock = self._scheduler, self._batch_results, self._clock
        gate = self._inline_gate
        serial = SerialRunner(execution, scheduler, self.policy.batch.max_rows, batch_results, clock, gate)
        inputs = self.spec.inputs
        numbers = all(tensor.datatype is not BYTES for tensor in inputs.values())
        if not (is_pipelined(execution) and numbers):
            return serial
        batch = self.policy.batch
        pacing = LaunchPacing(min(batch.preferred_rows, default=batch.max_rows)) if batch.merge else None
        threads, batched = self.policy.fill_threads, self.spec.max_batch_size > 0
        return Pipeline(
            name, execution, scheduler, len(inputs), serial, batch_results, on_death, pacing, clock, threads, batched
        )


def _withdraw(completion: Completion, entries: list[Entry]) -> None:
    """Nobody waits for a request: it leaves the queue if it is there, a sequencer waits for none of its entries, and nothing
    keeps its inputs."""
    completion.withdraw()
    for entry in entries:
        entry.completion.withdraw()


# uvloop and asyncio take delays as floats of seconds; beyond a day a deadline means none.
_MAX_DELAY_NS = 86_400 * NS_PER_S


class RequestTimeouts:
    """Ends waiting requests: with timers of the event loop, or on the thread of a blocked caller.

    Args:
        policy: with the timeouts of the levels.
        scheduler: told of entries that have waited too long.
        clock: monotonic nanoseconds.

    Attributes:
        has_queue_timeouts: False if no level has a timeout.
    """

    def __init__(self, policy: HandlePolicy, scheduler: Scheduler, clock: Clock) -> None:
        self._levels = _policies(policy)
        self._scheduler = scheduler
        self._clock = clock
        self.has_queue_timeouts = any(level.queue_timeout_ns for level in self._levels)

    def set(self, request: InferRequest, completion: LoopCompletion, entries: list[Entry], now_ns: int) -> None:
        """Start the timers of a request."""
        deadline_ns = request.deadline_ns
        if deadline_ns:
            after_ns = deadline_ns - request.received_ns
            completion.call_after(min(deadline_ns - now_ns, _MAX_DELAY_NS), _exceed, completion, after_ns)
            if not self.has_queue_timeouts:
                return
        level = self._levels[entries[0].level]
        timeout_ns = _timeout_ns(level, request, now_ns)
        if timeout_ns:
            for entry in entries:
                completion.call_after(timeout_ns, self._scheduler.expire, entry, level.demote_on_timeout)

    def wait(self, request: InferRequest, completion: ThreadCompletion, entries: list[Entry], now_ns: int) -> None:
        """The same for a thread that waits, which sees to them itself; returns once the completion is settled and told."""
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


def _policies(policy: HandlePolicy) -> list[LevelPolicy]:
    """Of each level, its own or the handle's."""
    common = LevelPolicy(
        queue_timeout_ns=policy.queue_timeout_ns,
        demote_on_timeout=policy.demote_on_timeout,
        timeout_override=policy.timeout_override,
    )
    return [policy.level_policies.get(level, common) for level in range(1, policy.levels + 1)]


def _timeout_ns(level: LevelPolicy, request: InferRequest, now_ns: int) -> int:
    """How long a request may wait in its queue, nanoseconds; 0 for no limit, or if its deadline passes before that.

    As in Triton a request's own timeout can only shorten the policy's, so it has no effect where the policy has none. Deadlines
    never replace the policy: they have timers of their own.
    """
    timeout_ns = level.queue_timeout_ns
    if level.timeout_override and 0 < request.queue_timeout_ns < timeout_ns:
        timeout_ns = request.queue_timeout_ns
    return 0 if 0 < request.deadline_ns <= now_ns + timeout_ns else timeout_ns


def _exceed(completion: Completion, after_ns: int) -> None:
    """The request's deadline has passed, so long after the request arrived."""
    completion.settle(DeadlineExceeded(f"the request's deadline passed after {after_ns // NS_PER_US} us"))
