"""Inference request and response, and the load report of a model version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.tensor import Array

ParameterValue = str | int | float | bool

NO_PARAMETERS: Mapping[str, ParameterValue] = MappingProxyType({})
NO_RANGES: Mapping[str, tuple[str, int, int]] = MappingProxyType({})


class GroupMembers(NamedTuple):
    """Requests that are queued as one, in the order of their rows.

    Attributes:
        received_ns: monotonic arrival of each.
        rows: rows of each.
    """

    received_ns: Sequence[int]
    rows: Sequence[int]


class Responses(Protocol):
    """Takes the responses of a decoupled model; see `headrace.core.response_stream.ResponseStream`.

    Attributes:
        on_consumed: called on the event loop with a number of consumed responses and their bytes.
    """

    on_consumed: Callable[[int, int], object] | None

    def send(self, response: InferResponse | HeadraceError, size_bytes: int) -> None:
        """Append a response, or an error in place of one, of `size_bytes` bytes; any thread, one at a time."""


class SequenceFields(NamedTuple):
    """Sequence parameters of a request as the client sent them; `headrace.inference.scheduling.sequences` checks them.

    Attributes:
        id: `sequence_id`: a number or a text.
        start, end: `sequence_start` and `sequence_end`.
    """

    id: ParameterValue
    start: ParameterValue = False
    end: ParameterValue = False


class InferRequest(msgspec.Struct, eq=False, kw_only=True):  # made in C: a quarter of the time of a dataclass
    """One decoded and checked inference request.

    Attributes:
        id: request id of the caller, "" without one.
        inputs: arrays by name, of shape (rows, ...) if the model has a batch dimension. If the spec has `resident_devices`, any
            of them may be `ResidentRows` (by `headrace.core.tensor.as_input`).
        rows: size of the batch dimension, 1 for a model without one.
        shape_key: equal for requests that may share a batch; None if the model allows one shape only.
        priority: requested priority level, 1 is the highest, 0 for the model's default.
        deadline_ns: monotonic deadline, 0 for none.
        queue_timeout_ns: requested limit of the queue time, 0 for none. Ignored unless the model's queue policy allows the
            override.
        received_ns: monotonic time at which the whole request had arrived.
        size_bytes: memory of the request while it waits.
        client: name of the client for quotas and fair sharing, "" without one.
        outputs: names of the requested outputs; () for all. The response has every output in any case.
        parameters: parameters of the request, without those that the server itself reads.
        due_ns: monotonic time at which the later steps of a pipeline need the result; 0 for the deadline.
        call: call of a Python model that sent the request; None for any other.
        resident_outputs: outputs that may be `ResidentRows` in the response, since every reader takes them.
        output_ranges: by output, name of a region of shared memory, offset and size in bytes: for an engine in another process,
            which writes the output there. `NO_RANGES` for a request without any shared memory.
        members: requests that this one stands for; None for a single request. See `headrace.core.completion.GroupCompletion`.
        internal: True for a part of a request that the server has accepted: a step of a pipeline, a call of a Python model.
        responses: takes the responses of a decoupled model; None: the caller takes exactly one response, the outcome. The
            response of any other model is the outcome, and the stream stays empty.
        sequence: sequence of the request; None without one. Models without sequences ignore it.
        has_headers: True if some of `parameters` are request headers: they are part of no key of a response cache.
    """

    inputs: dict[str, Array]
    rows: int
    shape_key: object
    received_ns: int
    id: str = ""
    priority: int = 0
    deadline_ns: int = 0
    queue_timeout_ns: int = 0
    size_bytes: int = 0
    client: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, ParameterValue] = NO_PARAMETERS
    due_ns: int = 0
    call: object = None
    resident_outputs: frozenset[str] = frozenset()
    output_ranges: Mapping[str, tuple[str, int, int]] = NO_RANGES
    members: GroupMembers | None = None
    internal: bool = False
    responses: Responses | None = None
    sequence: SequenceFields | None = None
    has_headers: bool = False

    def replace(self, **changes: object) -> InferRequest:
        """Return a copy with other values of some attributes."""
        return msgspec.structs.replace(self, **changes)


class BatchTimes(NamedTuple):
    """Times at which a batch was closed, assembled, computed and split; monotonic nanoseconds."""

    taken_ns: int
    assembled_ns: int
    computed_ns: int
    split_ns: int


class PipelineStepTimes(NamedTuple):
    """Times of one step of a pipeline request, for spans, histograms and timing headers.

    Attributes:
        step: name of the step.
        model, version: model version that ran it.
        queued_ns, done_ns: monotonic times at which its request was queued and settled.
        times: times of its batch; None for a step that ran none.
        batch_rows: rows of its batch.
        outcome: "ok", "skipped", "fallback", "cached", or the reason of an error.
        rows: rows of the request in that batch; 0 for a step that ran none.
    """

    step: str
    model: str
    version: str
    queued_ns: int
    done_ns: int
    times: BatchTimes | None
    batch_rows: int
    outcome: str
    rows: int = 0


class InferResponse(msgspec.Struct, eq=False):
    """The rows of a batch that belong to one request.

    Attributes:
        outputs: arrays by name, of shape (rows, ...); views into the batch's outputs if requests shared it.
        times: times of the batch; None for a request that was split into several batches.
        batch_rows: rows of the batch; 0 for a request that was split.
        closed: close reason of the batch, one word; "" for a request that was split.
        steps: steps of a pipeline request; () for any other.
        cached: True if the outputs come from the response cache.
        parameters: parameters that the code of the model has given the response; None for none.
        done_ns: monotonic time up to which the request is counted; 0: the end of split in `times`.
        final: True for a response of a decoupled model that its code has sent as the last one of the request.
    """

    outputs: dict[str, Array]
    times: BatchTimes | None = None
    batch_rows: int = 0
    closed: str = ""
    steps: tuple[PipelineStepTimes, ...] = ()
    cached: bool = False
    parameters: Mapping[str, ParameterValue] | None = None
    done_ns: int = 0
    final: bool = False

    def duration_ns(self, received_ns: int) -> int:
        """Return the time with which the request is counted as answered; `received_ns` is the monotonic time of its arrival."""
        done_ns = self.done_ns or (0 if self.times is None else self.times.split_ns)
        return max(done_ns - received_ns, 0)


class LevelLoad(NamedTuple):
    """Load of one priority level.

    Attributes:
        level: 1-based level, 1 is the highest.
        depth: queued requests; a split request counts once for each part.
        rows: queued rows.
        wait_ns: predicted queue time of a request of one row; 0 while latencies are unmeasured.
    """

    level: int
    depth: int
    rows: int
    wait_ns: int


class Probe(NamedTuple):
    """A readiness check that the code of a model runs.

    Attributes:
        answer: done once the code has answered, or its process is gone.
        started_ns: monotonic nanoseconds.
    """

    answer: Future[bool]
    started_ns: int


class ModelLoad(NamedTuple):
    """Load of a model version at one moment.

    Attributes:
        depth: queued requests.
        rows: queued rows.
        in_flight: requests between arrival and response.
        running_rows: rows of batches that are closed and not settled.
        instances: live instances.
        wait_ns: predicted queue time of a request of one row and of the default level.
        drain_ns: predicted time until queue and instances are empty, without new arrivals.
        rows_hz: predicted rows per second of all live instances at the batch size that the objective allows; 0 if unknown.
        late: responses after their due time, since the version was loaded.
        levels: load of each priority level, the highest first; empty if not requested.
    """

    depth: int
    rows: int
    in_flight: int
    running_rows: int
    instances: int
    wait_ns: int
    drain_ns: int
    rows_hz: float
    late: int
    levels: tuple[LevelLoad, ...]
