"""One request on its way through a pipeline: starts each step as soon as its inputs are ready.

All of it runs on the event loop, in callbacks of the completions of its steps: no task, no thread and no copy. The outputs of a
step are the inputs of the next ones, as they are; the next copy is made when a batch is assembled. See
docs/decisions/0017-pipelines.md.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from headrace.core.clock import Clock
from headrace.core.completion import LoopCompletion, Outcome
from headrace.core.errors import Cancelled, DeadlineExceeded, HeadraceError, ModelFailed, Unavailable
from headrace.core.request import InferRequest, InferResponse, PipelineStepTimes
from headrace.core.shapes import CheckedShapes
from headrace.core.tensor import Array, ModelSpec
from headrace.inference.pipelines.graph import PipelineGraph, Step, same_shape
from headrace.inference.pipelines.rows import count_rows, no_rows, spread
from headrace.inference.scheduling.version_handle import Prediction, VersionHandle

logger = logging.getLogger("headrace.pipeline")

Fit = Callable[[Array], Array]
"""Adds or removes the batch dimension of a tensor between a model with batches and one without; returns a view."""


def fit_between(is_batched: bool, batches: bool, shape: tuple[int, ...]) -> Fit | None:
    """Return the conversion of a tensor for a user that batches where its source does not, or the reverse; else None.

    As in Triton, a tensor that already has the shape of its user is left alone.

    Args:
        is_batched: True if the source has a batch dimension.
        batches: True if the user has one.
        shape: shape that the user expects, with its batch dimension.
    """
    if is_batched == batches:
        return None
    if batches:
        dims = shape[1:]
        return lambda array: array.reshape((1, *array.shape)) if same_shape(array.shape, dims) else array

    def without_batch(array: Array) -> Array:
        is_one_row = array.ndim > 0 and array.shape[0] == 1
        return array.reshape(array.shape[1:]) if is_one_row and not same_shape(array.shape, shape) else array

    return without_batch


_NONE: frozenset[str] = frozenset()

# Errors of a step after which its fallback runs: the model's or the server's, not the client's.
_REPLACEABLE = (ModelFailed, Unavailable)


class BoundStep:
    """A step together with the spec of its model.

    Attributes:
        step: the step.
        spec: spec of the model version.
        inputs: (name of the model's input, name of the tensor, conversion or None).
        outputs: (name of the model's output, name of the tensor).
        tensors: the tensors that it reads, without repetition.
        shapes: checks the shapes of its inputs.
        names: requested outputs of the model; () for all.
        required: tensors of its required inputs.
        is_plain: see `Step.is_plain`.
        dims: shape of one row by name of the input; for `each`.
        bf16: tensors of its condition that have BF16 elements, which are bit patterns.
        resident: outputs of the model that only models on GPUs read; see `set_resident_outputs`.
    """

    __slots__ = (
        "bf16", "dims", "inputs", "is_plain", "names", "outputs", "required", "resident", "shapes", "spec", "step",
        "tensors",
    )  # fmt: skip

    def __init__(
        self, step: Step, spec: ModelSpec, batched: Mapping[str, bool], bf16: Collection[str] = frozenset()
    ) -> None:
        self.step, self.spec = step, spec
        self.bf16 = frozenset(() if step.when is None else step.when.tensors).intersection(bf16)
        batches = spec.max_batch_size > 0
        # A step with `each` reads the tensor of one row of the pipeline, whose rows become the batch.
        self.inputs = tuple(
            (
                key,
                tensor,
                fit_between(
                    batched.get(tensor, False),
                    batches and not (step.each and batched.get(tensor, False)),
                    spec.inputs[key].shape,
                ),
            )
            for key, tensor in step.inputs
        )
        self.outputs = step.outputs
        self.tensors = step.reads
        self.is_plain = step.is_plain
        self.required = tuple(tensor for key, tensor in step.inputs if not spec.inputs[key].optional)
        self.dims = {key: spec.inputs[key].shape[1:] for key, _ in step.inputs} if step.each else {}
        self.shapes = CheckedShapes(spec)
        names = tuple(key for key, _ in step.outputs)
        self.names = () if len(names) == len(spec.outputs) else names
        self.resident: frozenset[str] = frozenset()


def set_resident_outputs(graph: PipelineGraph, steps: Sequence[BoundStep | None]) -> None:
    """Let the outputs stay on the GPU that no host code reads.

    These are outputs of a model on a GPU that are no output of the pipeline, and that only steps on GPUs read, without `when`,
    `each` and `fallback`.

    Args:
        graph: the pipeline.
        steps: its bound steps by index; None for those without a model.
    """

    def takes_resident(index: int) -> bool:
        bound = steps[index]
        return bound is not None and bound.is_plain and bool(bound.spec.resident_devices)

    answers = set(graph.outputs.values())
    for index, bound in enumerate(steps):
        if bound is not None and takes_resident(index):
            bound.resident = frozenset(
                key
                for key, tensor in bound.outputs
                if tensor not in answers
                and (readers := graph.consumers.get(tensor))
                and all(map(takes_resident, readers))
            )


@dataclass(frozen=True, slots=True)
class PipelineRoute:
    """The steps that a set of requested outputs needs.

    Attributes:
        order: indices of the steps; each follows the steps that it reads from.
        first: steps that read inputs of the pipeline only.
        followers: steps that read an output of a step, by its index.
        sources: steps that each step reads from, by its index.
        waits: number of steps that each step reads from, by its index.
        readers: number of needed steps that read a tensor, and one more for an output of the pipeline.
        outputs: (name of the output, name of the tensor).
    """

    order: tuple[int, ...]
    first: tuple[int, ...]
    followers: Mapping[int, tuple[int, ...]]
    sources: Mapping[int, frozenset[int]]
    waits: Mapping[int, int]
    readers: Mapping[str, int]
    outputs: tuple[tuple[str, str], ...]

    def remaining_ns(self, cost_ns: Mapping[int, int]) -> dict[int, int]:
        """Return the longest path behind each step in nanoseconds, from the duration of each step."""
        remaining: dict[int, int] = {}
        for index in reversed(self.order):
            remaining[index] = max([cost_ns[i] + remaining[i] for i in self.followers[index]], default=0)
        return remaining

    def end_ns(self, predicted: Mapping[int, Prediction], now_ns: int) -> int:
        """Return the predicted end of a request that starts now; a queue empties while earlier steps run."""
        ends: dict[int, int] = {}
        for index in self.order:
            wait_ns, compute_ns = predicted[index]
            ends[index] = max([now_ns + wait_ns, *[ends[i] for i in self.sources[index]]]) + compute_ns
        return max(ends.values())


def find_route(graph: PipelineGraph, outputs: Sequence[str]) -> PipelineRoute:
    """Return the route to outputs of a pipeline; to all of them if `outputs` is empty."""
    needed = graph.needed(outputs)
    order = tuple(graph.order(needed))
    sources = {
        index: frozenset(graph.producers[tensor] for tensor in graph.steps[index].reads if tensor in graph.producers)
        for index in order
    }
    followers = {index: tuple(other for other in order if index in sources[other]) for index in order}
    pairs = tuple((name, graph.outputs[name]) for name in outputs or graph.outputs)
    readers = {tensor: len(needed.intersection(steps)) for tensor, steps in graph.consumers.items()}
    for _, tensor in pairs:
        readers[tensor] = readers.get(tensor, 0) + 1
    return PipelineRoute(
        order=order,
        first=tuple(index for index in order if not sources[index]),
        followers=followers,
        sources=sources,
        waits={index: len(steps) for index, steps in sources.items()},
        readers={tensor: count for tensor, count in readers.items() if count},
        outputs=pairs,
    )


class LimitedRun(Protocol):
    """A run that waits for the limit of a step."""

    def resume(self, index: int) -> None:
        """Queue the request of the step; raises nothing."""


class StepLimit:
    """Bounds the requests of one step that run at once (`max_inflight_requests`). Ownership: the event loop.

    Args:
        max_running: maximum running requests.
    """

    def __init__(self, max_running: int) -> None:
        self._free = max_running
        self._waiting: OrderedDict[LimitedRun, None] = OrderedDict()  # in the order of their arrival
        self._is_starting = False

    def enter(self, run: LimitedRun) -> bool:
        """Return True if the step may run now; else the run is started later, by `leave`."""
        if self._free:
            self._free -= 1
            return True
        self._waiting[run] = None
        return False

    def withdraw(self, run: LimitedRun) -> None:
        """Remove a run that waits for the step, so that its inputs are released."""
        self._waiting.pop(run, None)

    def leave(self, index: int) -> None:
        """End a request of the step, and start the next one that waits."""
        self._free += 1
        if self._is_starting:  # a started run was rejected at once: the loop below goes on, at any length of the queue
            return
        self._is_starting = True
        try:
            while self._waiting and self._free:
                run, _ = self._waiting.popitem(last=False)
                self._free -= 1
                run.resume(index)
        finally:
            self._is_starting = False


BindFallback = Callable[[int], tuple[VersionHandle, BoundStep]]
"""Leases the fallback of a step by its index, and binds the step to it."""


class PipelineRun:
    """One request of a pipeline. Ownership: the event loop.

    Args:
        graph: graph of the pipeline.
        limits: bounds of the steps by index; empty for no bounds.
        clock: returns monotonic nanoseconds.
        bind_fallback: leases the fallback of a step; raises HeadraceError if it is not served.
        steps: bound steps by index, at least those of the route.
        members: leased version by index of the step.
        route: steps that the request needs.
        fits: conversions of the outputs by name.
        due_ns: by index, monotonic time at which the steps behind it need its result; empty without a due time.
        on_end: called once with the run when it is over, before the caller is resumed.
        request: request of the pipeline.
        completion: completion of the whole request.
        each_rows: rows of steps with `each` by index, counted together with other runs of the same request; None for a request
            that is one run.

    Attributes:
        request: the request.
        is_over: True once the request has an outcome.
        outcome: the response, or the error; None if the caller gave up.
        predicted_ns: predicted end, monotonic; 0 for none.
        times: times of the steps that are done, in the order of their ends.
        members: leased version by index of the step.
    """

    __slots__ = (
        "_absent", "_announced", "_bind_fallback", "_clock", "_completion", "_due_ns", "_each_rows", "_entered",
        "_fallbacks", "_fits", "_graph", "_left", "_limits", "_on_end", "_readers", "_route", "_running", "_saved", "_steps",
        "_tensors", "_waits", "is_over", "members", "outcome", "predicted_ns", "request", "times",
    )  # fmt: skip

    def __init__(
        self,
        graph: PipelineGraph,
        limits: Sequence[StepLimit],
        clock: Clock,
        bind_fallback: BindFallback,
        steps: Sequence[BoundStep | None],
        members: Mapping[int, VersionHandle],
        route: PipelineRoute,
        fits: Mapping[str, Fit],
        due_ns: Mapping[int, int],
        on_end: Callable[[PipelineRun], None],
        request: InferRequest,
        completion: LoopCompletion,
        each_rows: dict[int, int] | None = None,
    ) -> None:
        self._graph, self._route, self._steps, self.members = graph, route, steps, members
        self.request, self._completion, self._due_ns, self._limits = request, completion, due_ns, limits
        self._fits, self._clock, self._on_end, self._bind_fallback = fits, clock, on_end, bind_fallback
        self._each_rows = each_rows
        self._absent: set[str] = set()  # tensors of steps that were skipped
        self._saved: dict[int, dict[str, Array]] = {}  # inputs of steps with a fallback, until they are done
        self._fallbacks: dict[int, tuple[VersionHandle, BoundStep]] = {}  # of steps that run it
        self._tensors = dict(request.inputs)
        self._readers = dict(route.readers)
        self._waits = dict(route.waits)
        # With the version, the time of queueing, and its rows.
        self._running: dict[int, tuple[LoopCompletion, VersionHandle, int, int]] = {}
        self._entered: set[int] = set()  # steps that count against their limit
        self._left = len(route.order)
        self._announced = set(route.order)
        self.times: list[PipelineStepTimes] = []
        self.is_over, self.predicted_ns = False, 0
        self.outcome: Outcome | None = None

    def start(self) -> None:
        """Start the steps that read inputs of the pipeline only. Settles the completion if one of them is rejected."""
        self._completion.after = self._on_settled
        for index in self._route.order:
            member = self.members[index]
            member.announced_rows += self.request.rows if member.spec.max_batch_size else 1
        for index in self._route.first:
            self._start(index)

    def resume(self, index: int) -> None:
        """Queue the request of a step that waited for its limit."""
        self._entered.add(index)
        try:
            self._begin(index)
        except Exception as error:
            self._abort(index, error)

    def _begin(self, index: int) -> None:
        """Queue the request of a step; its limit allows it."""
        self._withdraw(index)
        bound = self._steps[index]
        assert bound is not None
        arrays: dict[str, Array] = {}
        tensors, readers = self._tensors, self._readers
        for key, tensor, fit in bound.inputs:
            array = tensors.get(tensor)  # None: an optional input that the request omits
            if array is not None:
                arrays[key] = array if fit is None else fit(array)
        for tensor in bound.tensors:
            readers[tensor] -= 1
            if not readers[tensor]:
                tensors.pop(tensor, None)
        if bound.is_plain:
            self._call(index, self.members[index], bound, arrays)
            return
        step = bound.step
        if step.each:
            each = next(key for key, tensor in step.inputs if tensor == step.each)
            try:
                counts = self._each_rows
                earlier_rows = 0 if counts is None else counts.get(index, 0)
                rows = count_rows(step.each, arrays.get(each), earlier_rows=earlier_rows)
                if counts is not None:
                    counts[index] = earlier_rows + rows
                arrays = spread(arrays, each, rows, bound.dims) if rows else {}
            except HeadraceError as error:
                self._fail(index, error, self._clock())
                return
            if not rows:
                self._done(index, bound, no_rows(bound.spec.outputs), None, "skipped")
                return
        if step.fallback and bound.spec.name == step.model:
            self._saved[index] = arrays
            if self._is_late(index, arrays) and self._start_fallback(index):
                return
        self._call(index, self.members[index], bound, arrays)

    def _call(self, index: int, member: VersionHandle, bound: BoundStep, arrays: dict[str, Array]) -> None:
        """Queue the request of a step at a version."""
        request = self.request
        now_ns = self._clock()
        try:
            rows, shape_key = bound.shapes.rows(arrays)
            inner = member.infer(
                InferRequest(
                    inputs=arrays,
                    rows=rows,
                    shape_key=shape_key,
                    received_ns=now_ns,
                    id=request.id,
                    priority=request.priority,
                    deadline_ns=request.deadline_ns,
                    queue_timeout_ns=request.queue_timeout_ns,
                    size_bytes=sum([array.nbytes for array in arrays.values()]),
                    client=request.client,
                    outputs=bound.names,
                    parameters=request.parameters,
                    due_ns=self._due_ns.get(index, 0),
                    call=request.call,
                    resident_outputs=self._resident_outputs(index, member, bound) if bound.resident else _NONE,
                    internal=True,
                    sequence=request.sequence,
                    has_headers=request.has_headers,
                )
            )
        except Exception as error:
            failure = error if isinstance(error, HeadraceError) else self._unexpected(index, error)
            member.record_failure(failure, now_ns)
            self._fail(index, failure, now_ns)
            return
        self._running[index] = inner, member, now_ns, rows
        inner.then(partial(self._step_done, index))

    def _resident_outputs(self, index: int, member: VersionHandle, bound: BoundStep) -> frozenset[str]:
        """Return the outputs of a step that may stay on the GPU; none beside a response cache, which reads and stores arrays."""
        followers = self._route.followers[index]
        has_cache = member.has_cache or any(self.members[follower].has_cache for follower in followers)
        return _NONE if has_cache else bound.resident

    def _is_late(self, index: int, arrays: Mapping[str, Array]) -> bool:
        """Return True if a step is predicted to be done after it is due."""
        due_ns = self._due_ns.get(index, 0)
        if not due_ns:
            return False
        member, now_ns = self.members[index], self._clock()
        shape = next((array.shape for array in arrays.values()), ())
        rows = max(shape[0], 1) if shape and member.spec.max_batch_size else 1
        return now_ns + sum(member.predict_ns(rows, self.request.priority, now_ns)) > due_ns

    def _start_fallback(self, index: int) -> bool:
        """Run the fallback of a step; False if it has run already, or is not served."""
        arrays = self._saved.pop(index, None)
        if arrays is None:
            return False
        try:
            member, bound = self._fallbacks[index] = self._bind_fallback(index)
        except HeadraceError:
            return False  # the error of the step itself says more
        except Exception as error:
            self._unexpected(index, error)
            return False
        self._call(index, member, bound, arrays)
        return True

    def _withdraw(self, index: int) -> None:
        """Withdraw the announcement of a step, which is queued now or never."""
        self._announced.discard(index)
        member = self.members[index]
        member.announced_rows -= self.request.rows if member.spec.max_batch_size else 1

    def _start(self, index: int) -> None:
        """Start a step whose inputs are ready. Raises nothing: an exception would leave the request without an outcome."""
        if self.is_over:
            return
        try:
            bound = self._steps[index]
            assert bound is not None
            if (self._absent or not bound.is_plain) and not self._runs(index, bound):
                return
            if not self._limits:
                self._begin(index)
            elif self._limits[index].enter(self):
                self._entered.add(index)
                self._begin(index)
        except Exception as error:
            self._abort(index, error)

    def _abort(self, index: int, error: Exception) -> None:
        """Fail the request because of a defect of the server or of a model, whose cause goes to the log only."""
        failure = self._unexpected(index, error)
        try:
            self._fail(index, failure, self._clock())
        except Exception:
            self._completion.settle_now(failure)

    def _unexpected(self, index: int, error: Exception) -> ModelFailed:
        """Log an exception with a reference; returns the error for the caller, which has only the reference."""
        graph = self._graph
        return unexpected_error(f"{graph.kind} '{graph.name}', step '{graph.steps[index].name}'", error)

    def _runs(self, index: int, bound: BoundStep) -> bool:
        """Return False if a step is skipped, as its condition does not hold or an input comes from a skipped step."""
        absent, condition = self._absent, bound.step.when
        try:
            if absent.isdisjoint(bound.required) and (condition is None or condition.holds(self._tensors, bound.bf16)):
                return True
        except HeadraceError as error:
            self._fail(index, error, self._clock())
            return False
        self._withdraw(index)
        absent.update(tensor for _, tensor in bound.outputs)
        for tensor in bound.tensors:
            self._release(tensor)
        self._done(index, bound, None, None, "skipped")
        return False

    def _release(self, tensor: str) -> None:
        """Drop a tensor after its last reader."""
        readers = self._readers
        readers[tensor] -= 1
        if not readers[tensor]:
            self._tensors.pop(tensor, None)

    def _step_done(self, index: int) -> None:
        """Callback of the completion of a step; raises nothing."""
        inner, member, queued_ns, rows = self._running.pop(index)
        response = inner.outcome
        try:
            if not isinstance(response, InferResponse):
                error = response or ModelFailed("the step ended without a response: retry it")
                member.record_failure(error if isinstance(error, HeadraceError) else HeadraceError(), queued_ns)
                self._fail(index, error, queued_ns)
                return
            if self.is_over:
                return
            bound = self._steps[index]
            assert bound is not None
            outcome = "cached" if response.cached else "ok"
            if index in self._fallbacks:
                bound, outcome = self._fallbacks[index][1], "fallback"
            self._done(index, bound, response.outputs, (queued_ns, response), outcome, rows)
        except Exception as error:
            self._abort(index, error)

    def _done(
        self,
        index: int,
        bound: BoundStep,
        outputs: Mapping[str, Array] | None,
        ran: tuple[int, InferResponse] | None,
        outcome: str,
        rows: int = 0,
    ) -> None:
        """Store the outputs of a step and start the steps that waited for it.

        Args:
            index: of the step.
            bound: the step.
            outputs: arrays by name of the model's output; None for a step whose outputs are absent.
            ran: time at which it was queued, and its response; None for a step that was skipped.
            outcome, rows: as in `PipelineStepTimes`.
        """
        readers = self._readers
        if outputs is not None:
            for key, tensor in bound.outputs:
                if tensor in readers:
                    self._tensors[tensor] = outputs[key]
        self._saved.pop(index, None)
        spec, now_ns = bound.spec, self._clock()
        queued_ns, times, batch_rows = (now_ns, None, 0) if ran is None else (ran[0], ran[1].times, ran[1].batch_rows)
        self.times.append(
            PipelineStepTimes(
                bound.step.name, spec.name, spec.version, queued_ns, now_ns, times, batch_rows, outcome, rows
            )
        )
        if self._entered:
            self._leave(index)
        self._left -= 1
        if not self._left:
            self._finish()
            return
        waits = self._waits
        for follower in self._route.followers[index]:
            waits[follower] -= 1
            if not waits[follower]:
                self._start(follower)

    def _leave(self, index: int) -> None:
        """Let the next request of a step run, if this one counts against its limit."""
        if index in self._entered:
            self._entered.discard(index)
            self._limits[index].leave(index)

    def _finish(self) -> None:
        """Settle the request with its outputs; those of skipped steps are empty."""
        tensors, fits = self._tensors, self._fits
        outputs: dict[str, Array] = {}
        for name, tensor in self._route.outputs:
            array = tensors.get(tensor)
            if array is None:
                outputs[name] = self._graph.empty[name]
            else:
                outputs[name] = fits[name](array) if name in fits else array
        self._completion.settle_now(InferResponse(outputs, steps=tuple(self.times)))

    def _fail(self, index: int, error: Exception, queued_ns: int) -> None:
        if self.is_over:
            return
        if index in self._saved and isinstance(error, _REPLACEABLE) and self._start_fallback(index):
            return
        step, spec = self._graph.steps[index], self.members[index].spec
        if index in self._fallbacks:
            bound = self._fallbacks[index][1]
            step, spec = bound.step, bound.spec
        elif step.fallback and spec.name != step.model:  # leased in place of a model that is not served
            step = replace(step, model=spec.name)
        reason = error.reason if isinstance(error, HeadraceError) else "error"
        self.times.append(
            PipelineStepTimes(step.name, spec.name, spec.version, queued_ns, self._clock(), None, 0, reason)
        )
        self._completion.settle_now(step_error(self._graph, step, spec.version, error))

    def _on_settled(self) -> None:
        """Cancel what still runs; called once the request has any outcome, also a timeout or a cancellation."""
        self.is_over = True
        self.outcome = outcome = self._completion.outcome
        if isinstance(outcome, HeadraceError):
            outcome.steps = tuple(self.times)
        for inner, _, _, _ in tuple(self._running.values()):
            inner.settle(error_of_running(outcome))
        for member, _ in self._fallbacks.values():
            member.release()
        for index in tuple(self._announced):
            self._withdraw(index)
        self._tensors.clear()
        self._saved.clear()
        for limit in self._limits:
            limit.withdraw(self)
        try:
            self._on_end(self)
        finally:
            for index in tuple(self._entered):
                self._leave(index)


def error_of_running(outcome: Outcome | None) -> HeadraceError:
    """Return the error of steps that still run when their request is over: its deadline has passed, or they are cancelled.

    Args:
        outcome: of the request; None if the caller gave up.
    """
    if isinstance(outcome, DeadlineExceeded):
        return DeadlineExceeded(str(outcome))  # a copy: an error holds the steps of its own request
    return Cancelled("the request of the pipeline has ended before this step")


def unexpected_error(where: str, error: Exception) -> ModelFailed:
    """Log an exception with a reference; returns the error for the caller, which has only the reference.

    Args:
        where: pipeline, and step if it is one step's, for the log.
        error: the exception.
    """
    reference = uuid.uuid4().hex[:12]
    logger.error("request failed in %s (reference %s)", where, reference, exc_info=error)
    return ModelFailed(f"the server failed on this request: its log has the cause ({reference})", reference)


def prefixed_error(error: HeadraceError, prefix: str) -> HeadraceError:
    """Return a copy of an error with a prefix of its message; requests of one batch share the original."""
    named = type(error).__new__(type(error))
    named.__dict__.update(error.__dict__)
    named.args = (f"{prefix}: {error}",)
    return named


def step_error(graph: PipelineGraph, step: Step, version: str, error: Exception) -> Exception:
    """Return a copy of an error whose message names the pipeline and the step."""
    if not isinstance(error, HeadraceError):
        return error
    subject = step.subject if step.builtin else f"model {step.model}/{version}"
    return prefixed_error(error, f"in {graph.kind} '{graph.name}', step '{step.name}' ({subject})")
