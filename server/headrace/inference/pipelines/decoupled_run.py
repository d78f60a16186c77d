"""One request of a pipeline with a decoupled step: each response of that step runs through the steps behind it.

    steps before   once
    decoupled step response 0, response 1, ...
    steps behind   once for each response, up to `MAX_PARTS` at the same time; their results leave in the order of the responses

The responses of the step that are not consumed by the client are bounded by the credit of its request, as for a client that calls
the model itself: one is given back when the client has consumed the pipeline's response. See docs/decisions/0040.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from headrace.core.clock import Clock
from headrace.core.completion import LoopCompletion, Mailbox, Outcome
from headrace.core.errors import HeadraceError, ModelFailed
from headrace.core.request import NO_RANGES, BatchTimes, InferRequest, InferResponse, PipelineStepTimes
from headrace.core.response_stream import MAX_RESPONSE_BYTES, ResponseStream
from headrace.core.tensor import Array
from headrace.inference.pipelines.decoupled_rules import DecoupledRoute
from headrace.inference.pipelines.graph import PipelineGraph
from headrace.inference.pipelines.run import (
    BoundStep,
    Fit,
    PipelineRoute,
    PipelineRun,
    StepLimit,
    error_of_running,
    step_error,
    unexpected_error,
)
from headrace.inference.scheduling.version_handle import VersionHandle

MAX_PARTS = 16
"""Responses of the decoupled step that run through the steps behind it at the same time, of one request."""

CreateRun = Callable[[PipelineRoute, InferRequest, LoopCompletion], PipelineRun]
"""Creates the run of some of the steps."""


class RunEvents(NamedTuple):
    """Callbacks of a run; none may raise.

    Attributes:
        on_end: called once with the run when it is over, before the caller is resumed.
        on_part: called with the times of the steps behind the decoupled one after each response.
        on_response: called for each response with the nanoseconds since the one before, or since the arrival of the request, and
            whether it is the first.
    """

    on_end: Callable[[DecoupledRun], None]
    on_part: Callable[[Sequence[PipelineStepTimes]], None]
    on_response: Callable[[int, bool], None]


class _Part:
    """One response of the decoupled step on its way through the steps behind it."""

    __slots__ = ("completion", "is_final", "outcome", "run", "size_bytes")

    def __init__(self, is_final: bool = False, outcome: Outcome | None = None) -> None:
        # Final if the step has sent it as its last response. The outcome is a response of the pipeline, or the error; None while
        # it runs.
        self.is_final, self.outcome, self.size_bytes = is_final, outcome, 0
        self.run: PipelineRun | None = None  # run of the steps behind; None if there is none
        self.completion: LoopCompletion | None = None  # of that run


class DecoupledRun:
    """One request of a pipeline with a decoupled step. Ownership: the event loop.

    Args:
        graph: graph of the pipeline.
        route: steps that the request needs.
        steps: bound steps by index, at least those of the route.
        members: leased version by index of the step.
        request: request of the pipeline, with `responses`.
        completion: completion of the whole request.
        limits: bounds of the steps by index; empty for no bounds.
        fits: conversions of the outputs by name.
        create: creates the runs of the steps before and behind.
        mailbox: mailbox of the event loop.
        clock: returns monotonic nanoseconds.
        events: see `RunEvents`.

    Attributes:
        members: leased version by index of the step.
        request: the request.
        is_over: True once the request has an outcome.
        outcome: a response without outputs, or the error; None if the caller gave up.
        predicted_ns: 0: the end of a stream is not predicted.
        times: times of the steps that are done, without those behind the decoupled step that had a response.
    """

    __slots__ = (
        "_clock", "_completion", "_create", "_events", "_fits", "_graph", "_has_ended", "_head", "_held_bytes", "_inner",
        "_is_entered", "_is_failed", "_last_ns", "_limits", "_mailbox", "_parts", "_queued_ns", "_route", "_rows", "_steps",
        "_stream", "_tail_ns", "_tensors", "is_over", "members", "outcome", "predicted_ns", "request", "times",
    )  # fmt: skip

    def __init__(
        self,
        graph: PipelineGraph,
        route: DecoupledRoute,
        steps: Sequence[BoundStep | None],
        members: Mapping[int, VersionHandle],
        request: InferRequest,
        completion: LoopCompletion,
        limits: Sequence[StepLimit],
        fits: Mapping[str, Fit],
        create: CreateRun,
        mailbox: Mailbox,
        clock: Clock,
        events: RunEvents,
    ) -> None:
        self._graph, self._route, self._steps, self.members = graph, route, steps, members
        self.request, self._completion = request, completion
        self._limits, self._fits, self._create = limits, fits, create
        self._mailbox, self._clock, self._events = mailbox, clock, events
        self._head: tuple[PipelineRun, LoopCompletion] | None = None  # while it runs
        self._tensors: dict[str, Array] = {}
        self._stream = ResponseStream(mailbox)
        self._inner: LoopCompletion | None = None  # of the decoupled step
        self._queued_ns = self._rows = 0  # of its request
        self._is_entered = False  # it counts against its limit
        self._has_ended = False  # all its responses are in `_stream`
        self._parts: deque[_Part] = deque()
        self._is_failed = False  # a part has failed: no further one starts
        self._held_bytes = 0  # of responses that the client has not consumed
        self._last_ns = 0  # of the latest response
        self._tail_ns = [0, 0, 0]  # assembled, computed and split by the steps behind, summed
        self.is_over, self.predicted_ns = False, 0
        self.outcome: Outcome | None = None
        self.times: list[PipelineStepTimes] = []

    @property
    def tail_times(self) -> BatchTimes:
        """Times of all batches of the steps behind the decoupled one, as if they were one that begins at 0."""
        assemble_ns, compute_ns, split_ns = self._tail_ns
        return BatchTimes(0, assemble_ns, assemble_ns + compute_ns, assemble_ns + compute_ns + split_ns)

    def start(self) -> None:
        """Start the first steps. Settles the completion if one of them is rejected."""
        self._completion.after = self._on_settled
        try:
            if not self._route.head.order:
                self._start_stream(self.request.inputs)
                return
            inner = LoopCompletion(self._mailbox)
            run = self._create(self._route.head, self.request.replace(responses=None), inner)
            self._head = run, inner
            run.start()
            inner.then(self._head_done)
        except Exception as error:  # any: the caller would wait for ever
            self._abort(error)

    def resume(self, index: int) -> None:
        """Queue the request of the decoupled step, which waited for its limit."""
        self._is_entered = True
        try:
            self._begin(index)
        except Exception as error:
            self._abort(error)

    def _head_done(self) -> None:
        """Callback of the completion of the steps before; raises nothing."""
        if self._head is None:  # the request is over
            return
        (run, inner), self._head = self._head, None
        self.times += run.times
        response = inner.outcome
        try:
            if not isinstance(response, InferResponse):
                self._completion.settle(response or ModelFailed("a step ended without a response: retry it"))
            elif self._route.step is None:
                part = _Part(True, response)
                self._hold(part, response.outputs)
                self._send(part)
                self._finish()
            else:
                self._start_stream({**self.request.inputs, **response.outputs})
        except Exception as error:
            self._abort(error)

    def _start_stream(self, tensors: dict[str, Array]) -> None:
        """Start the decoupled step, or let it wait for its limit."""
        step = self._route.step
        assert step is not None, "only steps of the head make a route without the decoupled step"
        self._tensors = tensors
        if self._limits:
            if not self._limits[step].enter(self):
                return
            self._is_entered = True
        self._begin(step)

    def _begin(self, index: int) -> None:
        """Queue the request of the decoupled step; its limit allows it."""
        bound, member, now_ns = self._steps[index], self.members[index], self._clock()
        assert bound is not None
        arrays: dict[str, Array] = {}
        for key, tensor, fit in bound.inputs:
            array = self._tensors.get(tensor)  # None: an optional input that the request omits
            if array is not None:
                arrays[key] = array if fit is None else fit(array)
        kept = self._route.kept
        self._tensors = {tensor: array for tensor, array in self._tensors.items() if tensor in kept}
        responses = self.request.responses
        assert responses is not None
        responses.on_consumed = self._consumed
        try:
            self._rows, shape_key = bound.shapes.rows(arrays)
            request = self.request.replace(
                inputs=arrays,
                rows=self._rows,
                shape_key=shape_key,
                received_ns=now_ns,
                size_bytes=sum([array.nbytes for array in arrays.values()]),
                outputs=tuple(key for key, _ in bound.outputs),
                due_ns=0,
                resident_outputs=frozenset(),
                output_ranges=NO_RANGES,
                internal=True,
                responses=self._stream,
            )
            inner = member.infer(request)
        except HeadraceError as error:
            member.record_failure(error, now_ns)
            self._fail_step(index, error)
            return
        self._inner, self._queued_ns = inner, now_ns
        self._stream.then(self._advance)
        inner.then(partial(self._step_done, index, inner))

    def _step_done(self, index: int, inner: LoopCompletion) -> None:
        """Callback of the completion of the decoupled step; raises nothing."""
        outcome, member = inner.outcome, self.members[index]
        if not isinstance(outcome, InferResponse):
            member.record_failure(outcome if isinstance(outcome, HeadraceError) else HeadraceError(), self._queued_ns)
        if self.is_over:
            return
        self._has_ended = True
        if isinstance(outcome, InferResponse):
            spec, step = member.spec, self._graph.steps[index]
            times, batch_rows = outcome.times, outcome.batch_rows
            ran = self._queued_ns, self._clock(), times, batch_rows, "ok", self._rows
            self.times.append(PipelineStepTimes(step.name, spec.name, spec.version, *ran))
        self._leave()
        self._advance()

    def _advance(self) -> None:
        """Start the steps behind for new responses, send those that are done, and end the request after the last one."""
        if self.is_over:
            return
        try:
            self._start_parts()
            while self._send_parts():
                self._start_parts()
            if not self.is_over and not self._parts and self._has_ended and self._stream.is_empty:
                self._finish()
        except Exception as error:
            self._abort(error)

    def _start_parts(self) -> None:
        """Start the steps behind for responses that have arrived, within the bounds."""
        index, tail = self._route.step, self._route.tail
        assert index is not None
        bound = self._steps[index]
        assert bound is not None
        while len(self._parts) < MAX_PARTS and self._held_bytes < MAX_RESPONSE_BYTES and not self._is_failed:
            response = self._stream.take()
            if response is None:
                return
            if not isinstance(response, InferResponse):
                self._is_failed = True
                self._parts.append(_Part(outcome=response))
                return
            tensors = self._tensors | {tensor: response.outputs[key] for key, tensor in bound.outputs}
            part = _Part(response.final)
            self._parts.append(part)
            if not tail.order:
                fits, outputs = self._fits, {name: tensors[tensor] for name, tensor in tail.outputs}
                for name in fits.keys() & outputs.keys():
                    outputs[name] = fits[name](outputs[name])
                part.outcome = InferResponse(outputs)
                self._hold(part, outputs)
                continue
            inner = part.completion = LoopCompletion(self._mailbox)
            # A sequence is one of requests: a response of the step is none, and would start it again.
            alone = self.request.replace(inputs=tensors, responses=None, sequence=None)
            part.run = self._create(tail, alone, inner)
            part.run.start()
            # After `start`: a part that is over at once must not be sent within this loop.
            inner.then(partial(self._part_done, part))

    def _part_done(self, part: _Part) -> None:
        """Callback of the completion of the steps behind; raises nothing."""
        if self.is_over:
            return
        assert part.run is not None
        assert part.completion is not None
        outcome = part.completion.outcome
        part.outcome = outcome or ModelFailed("a step ended without a response: retry it")
        if isinstance(outcome, InferResponse):
            self._hold(part, outcome.outputs)
            self._count(part.run.times)
        else:
            self.times += part.run.times
            self._is_failed = True
        self._advance()

    def _hold(self, part: _Part, outputs: Mapping[str, Array]) -> None:
        """Count the memory of a response until the client has consumed it."""
        part.size_bytes = _size_bytes(outputs)
        self._held_bytes += part.size_bytes

    def _count(self, times: Sequence[PipelineStepTimes]) -> None:
        for step in times:
            if step.times is not None:
                taken_ns, assembled_ns, computed_ns, split_ns = step.times
                self._tail_ns[0] += assembled_ns - taken_ns
                self._tail_ns[1] += computed_ns - assembled_ns
                self._tail_ns[2] += split_ns - computed_ns
        self._events.on_part(times)

    def _send_parts(self) -> bool:
        """Send the parts that are done, in order; an error ends the request. Returns True if others may start now."""
        parts, count = self._parts, 0
        while parts and parts[0].outcome is not None and not self.is_over:
            part = parts.popleft()
            assert part.outcome is not None
            if isinstance(part.outcome, InferResponse):
                self._send(part)
                count += 1
            elif part.run is None:  # an error of the decoupled step in place of a response
                self._fail_step(self._route.step, part.outcome)
            else:
                self._completion.settle(part.outcome)
        return count > 0 and not self.is_over

    def _send(self, part: _Part) -> None:
        """Send a response of the pipeline."""
        responses, response = self.request.responses, part.outcome
        assert responses is not None
        assert isinstance(response, InferResponse)
        now_ns, last_ns = self._clock(), self._last_ns
        self._last_ns = now_ns
        self._events.on_response(now_ns - (last_ns or self.request.received_ns), not last_ns)
        responses.send(InferResponse(response.outputs, final=part.is_final), part.size_bytes)

    def _consumed(self, count: int, size_bytes: int) -> None:
        """Give the decoupled step credit for responses that the client has consumed."""
        self._held_bytes -= size_bytes
        if not self.is_over:
            self._stream.consumed(count)
            self._advance()

    def _finish(self) -> None:
        """End the request after its last response, or with the error of the decoupled step.

        The completion is woken by its mailbox, never within this call: the reader of the responses may be the caller.
        """
        index, inner = self._route.step, self._inner
        outcome = None if inner is None else inner.outcome
        if index is None or isinstance(outcome, InferResponse):
            self._completion.settle(InferResponse({}, steps=tuple(self.times)))
        else:
            self._fail_step(index, outcome or ModelFailed("the step ended without a response: retry it"))

    def _fail_step(self, index: int | None, error: Exception) -> None:
        """End the request with the error of the decoupled step."""
        assert index is not None
        step, spec = self._graph.steps[index], self.members[index].spec
        queued_ns = self._queued_ns or self._clock()
        reason = error.reason if isinstance(error, HeadraceError) else "error"
        times = PipelineStepTimes(step.name, spec.name, spec.version, queued_ns, self._clock(), None, 0, reason)
        self.times.append(times)
        self._completion.settle(step_error(self._graph, step, spec.version, error))

    def _abort(self, error: Exception) -> None:
        """Fail the request because of a defect of the server or of a model, whose cause goes to the log only."""
        self._completion.settle(unexpected_error(f"{self._graph.kind} '{self._graph.name}'", error))

    def _leave(self) -> None:
        """Let the next request of the decoupled step run, if this one counts against its limit."""
        index = self._route.step
        if self._is_entered and index is not None:
            self._is_entered = False
            self._limits[index].leave(index)

    def _on_settled(self) -> None:
        """Cancel what still runs; called once the request has any outcome, also a timeout or a cancellation."""
        self.is_over = True
        self.outcome = outcome = self._completion.outcome
        responses = self.request.responses
        if responses is not None:
            responses.on_consumed = None
        error = error_of_running(outcome)
        if self._inner is not None:
            self._inner.settle(error)
        if self._head is not None:
            (run, inner), self._head = self._head, None
            inner.settle(error)
            self.times += run.times
        for part in self._parts:
            if (
                part.completion is not None
                and part.run is not None
                and part.completion.settle(error_of_running(outcome))
            ):
                self.times += part.run.times
        self._parts.clear()
        self._tensors.clear()
        self._stream.then(_ignore)  # which would keep this object, and this object the stream
        if isinstance(outcome, HeadraceError):
            outcome.steps = tuple(self.times)
        for limit in self._limits:
            limit.withdraw(self)
        try:
            self._events.on_end(self)
        finally:
            self._leave()


def _ignore() -> None:
    return


def _size_bytes(outputs: Mapping[str, Array]) -> int:
    """Return the memory of outputs in bytes; of BYTES that of their texts."""
    size_bytes = 0
    for array in outputs.values():
        size_bytes += sum([len(text) for text in array.ravel().tolist()]) if array.dtype.hasobject else array.nbytes
    return size_bytes
