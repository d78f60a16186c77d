"""A served pipeline: `PipelineHandle`, which runs requests through the versions of other models.

It leases every version that a request needs before any step starts, so a request sees one version of each model, and fails before
any work if one of them is not served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from headrace.config.config_base import Problem
from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from headrace.core.completion import Completion, LoopCompletion, Mailbox, ThreadCompletion
from headrace.core.errors import (
    BadRequest,
    DeadlineExceeded,
    HeadraceError,
    Unavailable,
    WouldMiss,
)
from headrace.core.request import BatchTimes, InferRequest, InferResponse, ModelLoad, PipelineStepTimes, Probe
from headrace.core.tensor import BF16, ModelSpec
from headrace.inference.pipelines.decoupled_rules import DecoupledRoute, changed_step_problem, split_route
from headrace.inference.pipelines.decoupled_run import DecoupledRun, RunEvents
from headrace.inference.pipelines.graph import PipelineGraph, Step
from headrace.inference.pipelines.row_runs import RowRuns
from headrace.inference.pipelines.run import (
    BoundStep,
    Fit,
    PipelineRoute,
    PipelineRun,
    StepLimit,
    find_route,
    fit_between,
    set_resident_outputs,
    step_error,
)
from headrace.inference.pipelines.step_totals import StepTotals
from headrace.inference.scheduling.admission import SafetyMargins
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.model_handle import set_deadline
from headrace.inference.scheduling.policy import HandlePolicy
from headrace.inference.scheduling.queue import FAR_NS
from headrace.inference.scheduling.quotas import Quotas
from headrace.inference.scheduling.version_handle import Prediction, VersionHandle, decoupled_error
from headrace.observability.counters import Recorder
from headrace.observability.totals import StepTotal

# Sets of requested outputs with a cached route.
_MAX_ROUTES = 64

CheckSpecs = Callable[[Mapping[int, ModelSpec]], Iterable[Problem]]
"""Compares the pipeline with the specs of its models by index of the step; see `graph.check_members`."""


class Members(Protocol):
    """The versions that a pipeline calls; see `headrace.models.registry.Registry`."""

    def lease(self, name: str, version: str) -> VersionHandle:
        """Lease a version, "" for the latest; raises NotFound or Unavailable."""

    def serving(self, name: str, version: str) -> VersionHandle | None:
        """Return the version that serves now, without a lease; None if there is none."""


class PipelineHandle(VersionHandle):
    """A served pipeline.

    Ownership: as `VersionHandle`. `_steps`, `_routes` and `_problem` belong to the event loop.

    Args:
        spec: tensor specs of the pipeline.
        graph: its steps.
        members: the versions that it calls.
        policy: objective and quotas of the pipeline; its other values have no effect.
        mailbox: mailbox of the event loop on which callers wait.
        recorder: counters of the pipeline.
        check: compares the pipeline with its models whenever one of them is replaced.
        clock: returns monotonic nanoseconds.
        builtins: its built-in steps, which `members` leases too; owned by the handle, closed with it.
        decoupled: index of the decoupled step, with which `spec` is decoupled too; None for a pipeline with one response.

    Attributes:
        graph: its steps.
        step_totals: counts and times of the steps.
    """

    def __init__(
        self,
        spec: ModelSpec,
        graph: PipelineGraph,
        members: Members,
        policy: HandlePolicy,
        mailbox: Mailbox,
        recorder: Recorder,
        check: CheckSpecs = lambda _specs: (),
        clock: Clock = monotonic_ns,
        builtins: Sequence[VersionHandle] = (),
        decoupled: int | None = None,
    ) -> None:
        super().__init__(spec, policy, recorder, LatencyTable(), clock)
        self.graph = graph
        self._decoupled = None if decoupled is None else graph.steps[decoupled]
        self._decoupled_routes: dict[tuple[str, ...], DecoupledRoute] = {}
        self._builtins = builtins
        called = [each for step in graph.steps for each in ((step.model, step.version), step.fallback_model)]
        self._callees = tuple(dict.fromkeys(each for each in called if any(each)))
        self._members, self._mailbox, self._check = members, mailbox, check
        self._quotas = Quotas(policy.rate_limits) if policy.rate_limits is not None else None
        self._routes: dict[tuple[str, ...], PipelineRoute] = {(): find_route(graph, ())}
        self._steps: list[BoundStep | None] = [None] * len(graph.steps)
        self._fits: dict[str, Fit] = {}
        self._problem: Problem | None = None
        self._bind_step: Callable[[Step, ModelSpec], BoundStep] = lambda step, spec: BoundStep(step, spec, {})
        self._fallbacks: dict[int, BoundStep] = {}
        self._has_fallbacks = any(step.fallback for step in graph.steps)
        self._limits = [StepLimit(graph.max_inflight) for _ in graph.steps] if graph.max_inflight else []
        self._create_run = self._run_factory()
        self.step_totals = StepTotals()
        self._probed_ns = -NS_PER_S
        self._margins, self._cycle_ns = SafetyMargins(), 0  # compute time of the slowest step, the unit of the margins

    # On the event loop

    def admit(self) -> None:
        """Check that every model of the pipeline can serve, before a request is decoded; raises Unavailable."""
        for step in self.graph.steps:
            member = self._members.serving(step.model, step.version)
            if member is None:
                if self._fallback_serves(step):
                    continue
                raise Unavailable(f"{self.graph.kind} '{self.spec.name}' cannot be served: {_not_served(step)}")
            try:
                member.admit()
            except HeadraceError as error:
                if not self._fallback_serves(step):
                    raise self._member_error(step, error) from None

    def compute(self, request: InferRequest) -> LoopCompletion:
        """Start a request and return its completion, to be awaited.

        Raises:
            BadRequest: the request has more rows than `max_batch_size`.
            DeadlineExceeded: the deadline has passed.
            QuotaExceeded: the client exceeded its quota.
            WouldMiss: the predicted completion is after the deadline; names the step that takes the longest.
            Unavailable: a model that the request needs is not served, or no longer fits.
            Unsupported: the pipeline is decoupled, and the caller takes one response only.
        """
        now_ns = self._clock()
        if self._decoupled is not None and request.responses is None:
            raise decoupled_error(self.spec.name)
        if request.deadline_ns and request.deadline_ns <= now_ns:
            raise DeadlineExceeded("the request's deadline had passed before its first step")
        if request.rows > self.spec.max_batch_size > 0:
            raise BadRequest(
                f"the request has {request.rows} rows, {self.graph.kind} '{self.spec.name}' accepts at most "
                f"{self.spec.max_batch_size}: send fewer rows in one request"
            )
        if self._quotas is not None:
            self._quotas.charge(request.client, now_ns)
        route = self._routes.get(request.outputs) or self._add_route(request.outputs)
        members = self._lease(route)
        try:
            self._bind(members)
            due_ns, predicted_ns = self._due_ns(request, route, members, now_ns)
            completion = LoopCompletion(self._mailbox)
            run: PipelineRun | RowRuns | DecoupledRun
            if self._decoupled is not None:
                run = self._decoupled_run(request, completion, route, members, self._decoupled)
            elif self.graph.rows_run_alone:
                run = self._row_runs(request, completion, route, members, due_ns)
            else:
                run = self._create_run(members, route, self._fits, due_ns, self._end, request, completion)
        except BaseException:
            _release(members)
            raise
        self.used_ns, run.predicted_ns = now_ns, predicted_ns
        run.start()
        # A pipeline that is a step of another one has the timer of that one.
        if request.deadline_ns and not request.due_ns and not run.is_over:
            set_deadline(request, completion, now_ns)
        return completion

    def _run_factory(self) -> Callable[..., PipelineRun]:
        """Return a function that creates runs on the models as they are bound now."""
        return partial(PipelineRun, self.graph, self._limits, self._clock, self._bind_fallback, self._steps)

    def _row_runs(
        self,
        request: InferRequest,
        completion: LoopCompletion,
        route: PipelineRoute,
        members: Mapping[int, VersionHandle],
        due_ns: Mapping[int, int],
    ) -> RowRuns:
        """Return the runs of a request whose rows run alone; all have the same leases, bound steps and due times."""
        # With the models of now, which may be replaced before the last row starts.
        create = partial(self._create_run, members, route, self._fits, due_ns, _ignore_end)
        where = f"{self.graph.kind} '{self.spec.name}'"
        return RowRuns(create, members, request, completion, where, self._mailbox, self._end)

    def _decoupled_run(
        self,
        request: InferRequest,
        completion: LoopCompletion,
        whole: PipelineRoute,
        members: Mapping[int, VersionHandle],
        step: Step,
    ) -> DecoupledRun:
        """Return the run of a request of a decoupled pipeline, whose steps behind `step` run for each response."""
        create_run, fits, graph = self._create_run, self._fits, self.graph
        route = self._decoupled_routes.get(request.outputs)
        if route is None:
            if len(self._decoupled_routes) >= _MAX_ROUTES:
                self._decoupled_routes.clear()
            route = self._decoupled_routes[request.outputs] = split_route(graph, whole, step.index)
        tail = route.tail

        def create(part: PipelineRoute, alone: InferRequest, inner: LoopCompletion) -> PipelineRun:
            part_fits = fits if part is tail or route.step is None else {}
            return create_run(members, part, part_fits, {}, _ignore_end, alone, inner)

        events = RunEvents(self._end, self._record_part, self.recorder.record_response)
        return DecoupledRun(
            graph,
            route,
            self._steps,
            members,
            request,
            completion,
            self._limits,
            fits,
            create,
            self._mailbox,
            self._clock,
            events,
        )

    def _record_part(self, times: Sequence[PipelineStepTimes]) -> None:
        """Count the steps behind the decoupled one for one of its responses."""
        self.step_totals.record(times, self._clock())

    def _fallback_serves(self, step: Step) -> bool:
        """Return True if the step has a fallback that can serve."""
        member = self._members.serving(*step.fallback_model) if step.fallback else None
        if member is None:
            return False
        try:
            member.admit()
        except HeadraceError:
            return False
        return True

    def _add_route(self, outputs: tuple[str, ...]) -> PipelineRoute:
        if len(self._routes) >= _MAX_ROUTES:
            self._routes = {(): self._routes[()]}
        route = self._routes[outputs] = find_route(self.graph, outputs)
        return route

    def _lease(self, route: PipelineRoute) -> dict[int, VersionHandle]:
        """Lease the version of every step, or its fallback if that is not served; raises Unavailable if neither is."""
        members: dict[int, VersionHandle] = {}
        for index in route.order:
            step = self.graph.steps[index]
            try:
                members[index] = self._members.lease(step.model, step.version)
            except HeadraceError as error:
                try:
                    if not step.fallback:
                        raise
                    members[index] = self._members.lease(*step.fallback_model)
                except HeadraceError:
                    _release(members)
                    raise self._member_error(step, error) from None
        return members

    def _member_error(self, step: Step, error: HeadraceError) -> HeadraceError:
        # A missing model is not the caller's error: the pipeline exists.
        error = error if isinstance(error, Unavailable) else Unavailable(str(error))
        named = step_error(self.graph, step, step.version or "latest", error)
        assert isinstance(named, HeadraceError)
        return named

    def _bind(self, members: Mapping[int, VersionHandle]) -> None:
        """Bind the steps to the specs of the leased versions, if one of them has been replaced.

        Raises:
            Unavailable: a version does not fit the pipeline.
        """
        steps = self._steps
        for index, member in members.items():
            bound = steps[index]
            if bound is None or bound.spec is not member.spec:
                self._bind_all(members)
                break
        if self._problem is not None:
            raise Unavailable(f"{self.graph.kind} '{self.spec.name}' does not fit its models: {self._problem.message}")

    def _misfit(self, specs: Mapping[int, ModelSpec]) -> Problem | None:
        """Return why the pipeline does not fit its models; None if it does."""
        return next(iter(self._check(specs)), None) or changed_step_problem(self._decoupled, specs)

    def _bind_all(self, members: Mapping[int, VersionHandle]) -> None:
        specs = self.member_specs()
        specs |= {index: member.spec for index, member in members.items()}
        self._problem = self._misfit(specs)
        if self._problem is not None:
            return
        graph = self.graph
        batches = self.spec.max_batch_size > 0 and not graph.rows_run_alone
        batched = dict.fromkeys(graph.inputs, batches)
        for tensor, index in graph.producers.items():
            if index in specs:
                # The rows of `each` are no batch: the whole tensor belongs to one row of the pipeline.
                batched[tensor] = specs[index].max_batch_size > 0 and not graph.steps[index].each
        datatypes = {name: tensor.datatype for name, tensor in self.spec.inputs.items()}
        for index, spec in specs.items():
            datatypes |= {tensor: spec.outputs[key].datatype for key, tensor in graph.steps[index].outputs}
        bf16 = frozenset(tensor for tensor, datatype in datatypes.items() if datatype is BF16)
        self._bind_step = lambda step, spec: BoundStep(step, spec, batched, bf16)
        # A list of its own: requests in flight keep theirs.
        self._steps = [
            self._bind_step(step, specs[step.index]) if step.index in specs else None for step in graph.steps
        ]
        if (
            self._decoupled is None
        ):  # the tensors of a stream would occupy the few outputs on the GPU as long as it is open
            set_resident_outputs(graph, self._steps)
        self._create_run = self._run_factory()
        fits = {
            name: fit_between(batched[tensor], batches, self.spec.outputs[name].shape[graph.rows_run_alone :])
            for name, tensor in graph.outputs.items()
            if tensor in batched
        }
        self._fits = {name: fit for name, fit in fits.items() if fit is not None}

    def _bind_fallback(self, index: int) -> tuple[VersionHandle, BoundStep]:
        """Lease the fallback of a step and bind the step to it; raises NotFound or Unavailable if it is not served."""
        step = self.graph.steps[index]
        model, version = step.fallback_model
        member = self._members.lease(model, version)
        try:
            bound = self._fallbacks.get(index)
            if bound is None or bound.spec is not member.spec:
                replaced = replace(step, model=model, version=version)
                if self._misfit({**self.member_specs(), index: member.spec}) is not None:
                    raise Unavailable(f"its fallback {model} does not fit the pipeline any more")
                bound = self._fallbacks[index] = self._bind_step(replaced, member.spec)
        except BaseException:
            member.release()
            raise
        return member, bound

    def _due_ns(
        self, request: InferRequest, route: PipelineRoute, members: Mapping[int, VersionHandle], now_ns: int
    ) -> tuple[dict[int, int], int]:
        """Return the time at which each step must be done, and the predicted end; {} and 0 without a deadline and an objective.

        Raises:
            WouldMiss: the predicted completion of the whole pipeline is after the deadline.
        """
        # A deadline is hard: steps that are late for it are dropped. An objective alone only orders the queues.
        objective_ns = self.policy.batch.objective_ns
        is_ordered = request.deadline_ns or request.due_ns or objective_ns
        if not is_ordered or self._decoupled is not None:  # the end of a stream is not predicted
            return {}, 0
        # As a step of another pipeline it is due before the steps behind it.
        due_ns = request.due_ns or request.deadline_ns or request.received_ns + objective_ns
        predicted = {
            index: self._predict_step(member, request.rows, request.priority, now_ns)
            for index, member in members.items()
        }
        predicted_ns = 0
        if request.deadline_ns:
            predicted, predicted_ns = self._admit(request, route, predicted, due_ns, now_ns)
        behind = route.remaining_ns({index: each.compute_ns for index, each in predicted.items()})
        return {index: due_ns - behind[index] for index in route.order}, predicted_ns

    def _predict_step(self, member: VersionHandle, rows: int, level: int, now_ns: int) -> Prediction:
        """Predict queue and compute time of a step of a request with `rows` rows."""
        if member.spec.max_batch_size:
            return member.predict_ns(rows, level, now_ns)
        prediction = member.predict_ns(1, level, now_ns)
        if rows == 1 or not self.graph.rows_run_alone:
            return prediction
        # A model without batches runs once for each row, on all its instances.
        return prediction._replace(compute_ns=prediction.compute_ns * -(-rows // max(member.alive, 1)))

    def _admit(
        self,
        request: InferRequest,
        route: PipelineRoute,
        predicted: dict[int, Prediction],
        due_ns: int,
        now_ns: int,
    ) -> tuple[dict[int, Prediction], int]:
        """Admit a request or reject it, if its predicted end is after the time at which it is due.

        An idle pipeline tries one such request a second: no outcome would correct a wrong prediction otherwise.

        Returns:
            The predictions of the steps, in which fallbacks replace steps that would be late, and the predicted end.

        Raises:
            WouldMiss: the request is rejected; names the step that takes the longest.
        """
        # A step of another pipeline has been admitted with that one: a refusal by the margin would waste the steps before.
        end_ns, margin_ns = route.end_ns(predicted, now_ns), 0 if request.due_ns else self._margins.ns(0)
        if end_ns + margin_ns > due_ns and self._has_fallbacks:
            predicted = self._with_fallbacks(request, predicted, now_ns)
            end_ns = route.end_ns(predicted, now_ns)
        if end_ns + margin_ns <= due_ns:
            self._cycle_ns = max(each.compute_ns for each in predicted.values())
            return predicted, end_ns
        if not any(each.wait_ns for each in predicted.values()) and now_ns - self._probed_ns >= NS_PER_S:
            self._probed_ns = now_ns
            return predicted, 0
        costs_ns = {index: each.wait_ns + each.compute_ns for index, each in predicted.items()}
        limiting = max(costs_ns, key=lambda index: costs_ns[index])
        if end_ns <= due_ns:
            self._margins.reduce(0, predicted[limiting].compute_ns)
        raise WouldMiss(
            f"request rejected by admission control: predicted to complete in {(end_ns - now_ns) / NS_PER_MS:.3g} ms, due in "
            f"{(due_ns - now_ns) / NS_PER_MS:.3g} ms; step '{self.graph.steps[limiting].name}' takes "
            f"{costs_ns[limiting] / NS_PER_MS:.3g} ms of it; retry later, or allow a longer deadline",
            max(costs_ns[limiting], NS_PER_MS) / NS_PER_S,
        )

    def _with_fallbacks(
        self, request: InferRequest, predicted: Mapping[int, Prediction], now_ns: int
    ) -> dict[int, Prediction]:
        """Return the predictions with those of fallbacks in place of steps that take longer."""
        result = dict(predicted)
        for index in predicted:
            step = self.graph.steps[index]
            member = self._members.serving(*step.fallback_model) if step.fallback else None
            if member is not None:
                fallback = self._predict_step(member, request.rows, request.priority, now_ns)
                result[index] = min(result[index], fallback, key=sum)
        return result

    def _end(self, run: PipelineRun | RowRuns | DecoupledRun) -> None:
        """Release the versions of a request that is over, and count it."""
        _release(run.members)
        outcome = run.outcome
        if run.predicted_ns:
            self._learn(run)
        now_ns = self._clock()
        wasted_ns = self.step_totals.record(run.times, now_ns, not isinstance(outcome, InferResponse))
        if isinstance(outcome, InferResponse):
            times: list[BatchTimes] = [step.times for step in run.times if step.times is not None]
            if self.graph.rows_run_alone:  # rows that shared a batch have its times once
                times = list(dict.fromkeys(times))
            if isinstance(run, DecoupledRun):
                times.append(run.tail_times)
            outcome.done_ns = now_ns
            self.recorder.record_pipeline(run.request.rows, now_ns - run.request.received_ns, times)
            return
        if wasted_ns:
            self.recorder.record_wasted(wasted_ns)

    def _learn(self, run: PipelineRun | RowRuns | DecoupledRun) -> None:
        """Learn the error of a prediction; only of requests that were predicted to use more than half of their time."""
        request, outcome = run.request, run.outcome
        if 2 * (run.predicted_ns - request.received_ns) <= request.deadline_ns - request.received_ns:
            return
        if isinstance(outcome, InferResponse):
            self._margins.learn({0: [self._clock() - run.predicted_ns]}, self._cycle_ns)
        elif isinstance(outcome, WouldMiss | DeadlineExceeded):
            self._margins.learn({0: [FAR_NS]}, self._cycle_ns)

    def charge(self, client: str, now_ns: int) -> None:
        """Charge a request that the response cache serves to the client's quota; raises QuotaExceeded."""
        if self._quotas is not None:
            self._quotas.charge(client, now_ns)

    # From any thread

    def revision(self) -> tuple[int, ...]:
        """Return the serials of the pipeline and of the versions that serve its steps and fallbacks now."""
        numbers = [self.serial]
        for name, version in self._callees:
            member = self._members.serving(name, version)
            numbers.extend((0,) if member is None else member.revision())
        return tuple(numbers)

    @property
    def reads_ids(self) -> bool:
        """True if the model, or one that a pipeline calls, gets the ids of requests."""
        members = [self._members.serving(name, version) for name, version in self._callees]
        return any(member.reads_ids for member in members if member is not None)

    def digests(self) -> str:
        """Return the digests of the pipeline and of the versions that serve its steps and fallbacks now; "" if one is unknown."""
        texts = [self.digest]
        for name, version in self._callees:
            member = self._members.serving(name, version)
            texts.append("" if member is None else member.digests())
        return " ".join(texts) if all(texts) else ""

    def infer_blocking(self, request: InferRequest) -> InferResponse:
        """Run a request on the event loop and block until its response; any thread but that of the event loop may call.

        Raises:
            HeadraceError: an error of `infer`, or the outcome of the request.
        """
        caller = ThreadCompletion()
        started: list[Completion] = []

        def start() -> None:
            try:
                completion = self.infer(request)
            except Exception as error:  # any: the thread would wait for ever
                caller.settle(error)
                return
            started.append(completion)
            completion.then(lambda: caller.settle(completion.outcome or Unavailable("the request was withdrawn")))

        loop = self._mailbox.loop
        loop.call_soon_threadsafe(start)
        try:
            caller.wait()
        except BaseException:  # the caller is interrupted: nothing waits for the response
            loop.call_soon_threadsafe(lambda: [completion.abandon() for completion in started])
            raise
        return caller.result()

    def member(self, step: Step) -> VersionHandle | None:
        """Return the version that serves a step now, without a lease; None if there is none."""
        return self._members.serving(step.model, step.version)

    def steps(self) -> Mapping[str, StepTotal]:
        """Return counts and times of the steps by name, in the order of the configuration."""
        totals = self.step_totals.totals()
        return {step.name: totals.get(step.name) or StepTotal() for step in self.graph.steps}

    def member_specs(self) -> dict[int, ModelSpec]:
        """Return the spec of the serving version of each step, by its index, without those that are not served."""
        specs: dict[int, ModelSpec] = {}
        for step in self.graph.steps:
            member = self._members.serving(step.model, step.version)
            if member is not None:
                specs[step.index] = member.spec
        return specs

    @property
    def calls(self) -> frozenset[str]:
        """Names of the models that the steps call."""
        names = [name for step in self.graph.steps if not step.builtin for name in (step.model, step.fallback_model[0])]
        return frozenset(filter(None, names))

    def problem(self) -> str:
        """Return why the pipeline cannot serve; "" if it can."""
        for step in self.graph.steps:
            member = self._members.serving(step.model, step.version)
            if (member is None or not member.ready) and not self._fallback_serves(step):
                return _not_served(step)
        problem = self._misfit(self.member_specs())
        return "" if problem is None else f"it does not fit its models: {problem.message}"

    def predict_ns(self, rows: int, level: int, now_ns: int) -> Prediction:
        """Predict queue and compute time of a request along its longest path."""
        route = self._routes[()]
        predicted: dict[int, Prediction] = {}
        for index in route.order:
            step = self.graph.steps[index]
            member = self._members.serving(step.model, step.version)
            if member is not None:
                predicted[index] = self._predict_step(member, rows, level, now_ns)
        if len(predicted) < len(route.order):  # it cannot serve now
            return Prediction(0, 0)
        behind = route.remaining_ns({index: each.compute_ns for index, each in predicted.items()})
        compute_ns = max(predicted[index].compute_ns + behind[index] for index in route.first)
        return Prediction(route.end_ns(predicted, 0) - compute_ns, compute_ns)

    def load(self, by_level: bool = True) -> ModelLoad:
        """Return the load of its models together; `rows_hz` is that of the slowest one."""
        handles = [self._members.serving(step.model, step.version) for step in self.graph.steps]
        loads = [handle.load(by_level=False) for handle in dict.fromkeys(handles) if handle is not None]
        return ModelLoad(
            depth=sum(load.depth for load in loads),
            rows=sum(load.rows for load in loads),
            in_flight=self._leases,
            running_rows=sum(load.running_rows for load in loads),
            instances=self.alive,
            wait_ns=self.predict_ns(1, 0, self._clock()).wait_ns,
            drain_ns=max((load.drain_ns for load in loads), default=0),
            rows_hz=min((load.rows_hz for load in loads if load.rows_hz), default=0.0),
            late=0,
            levels=(),
        )

    @property
    def ready(self) -> bool:
        """True while all its models serve."""
        return not self.problem()

    def probes(self) -> list[Probe]:
        """Start the readiness checks of the code of its models, without waiting."""
        handles = [self._members.serving(step.model, step.version) for step in self.graph.steps if not step.builtin]
        return [probe for handle in dict.fromkeys(handles) if handle is not None for probe in handle.probes()]

    def close(self, timeout_s: float | None) -> bool:
        """Wait until the last request is answered, and close the built-in steps; False if one still runs after `timeout_s`."""
        deadline_ns = None if timeout_s is None else self._clock() + int(timeout_s * NS_PER_S)
        self.end_leases()
        is_idle = self._idle.wait(timeout_s)
        self._close_cache()
        for builtin in self._builtins:
            left_s = None if deadline_ns is None else max((deadline_ns - self._clock()) / NS_PER_S, 0.0)
            is_idle = builtin.close(left_s) and is_idle
        return is_idle


def _ignore_end(_run: PipelineRun) -> None:
    """Do nothing at the end of a run that is a part of a request."""


def _not_served(step: Step) -> str:
    version = f" version {step.version}" if step.version else ""
    return f"it needs model '{step.model}'{version}, which is not served"


def _release(members: Mapping[int, VersionHandle]) -> None:
    for member in members.values():
        member.release()
