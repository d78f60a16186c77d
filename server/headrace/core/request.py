"""Inference request and response, and the load report of a model version."""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.tensor import Array


class InferRequest:
    """One decoded and checked inference request.

    Attributes:
        id: the caller's own id, "" if there is none.
        inputs: tensors by name, with the batch dimension in front where the model batches; where its spec has
            `resident_devices`, any of them may be `ResidentRows` (by `resident.as_input`).
        rows: size of the batch dimension (1 for a model without one).
        shape_key: equal for requests that may share a batch; None where the model allows one shape only.
        priority: the level asked for, 0 for the model's default; 1 is the highest.
        deadline_ns: on the monotonic clock, 0 if the request has none.
        queue_timeout_ns: the longest time in the queue that the request asks for, nanoseconds, 0 for none. It counts only where
            the model's queue policy allows an override.
        received_ns: monotonic, when the whole request had arrived.
        size_bytes: what the request holds in memory while it waits.
        client: who asks, for quotas and fair shares; "" for nobody in particular.
    """

    __slots__ = (
        "client",
        "deadline_ns",
        "id",
        "inputs",
        "priority",
        "queue_timeout_ns",
        "received_ns",
        "rows",
        "shape_key",
        "size_bytes",
    )

    def __init__(
        self,
        *,
        inputs: dict[str, Array],
        rows: int,
        shape_key: object,
        received_ns: int,
        request_id: str = "",
        priority: int = 0,
        deadline_ns: int = 0,
        queue_timeout_ns: int = 0,
        size_bytes: int = 0,
        client: str = "",
    ) -> None:
        self.id = request_id
        self.inputs = inputs
        self.rows = rows
        self.shape_key = shape_key
        self.priority = priority
        self.deadline_ns = deadline_ns
        self.queue_timeout_ns = queue_timeout_ns
        self.received_ns = received_ns
        self.size_bytes = size_bytes
        self.client = client


class BatchTimes(NamedTuple):
    """When a batch passed each station, monotonic nanoseconds."""

    taken_ns: int
    assembled_ns: int
    computed_ns: int
    split_ns: int


class InferResponse:
    """The rows of a batch that belong to one request.

    Attributes:
        outputs: every output of the model by name, views into the batch's result where it was shared.
        times: of the batch that computed them; None for a request that was cut into several.
        batch_rows: rows of that batch, 0 for a request that was cut into several.
        closed: why that batch was closed, in one word; "" for a request that was cut into several.
    """

    __slots__ = ("batch_rows", "closed", "outputs", "times")

    def __init__(
        self, outputs: dict[str, Array], times: BatchTimes | None = None, batch_rows: int = 0, closed: str = ""
    ) -> None:
        self.outputs = outputs
        self.times = times
        self.batch_rows = batch_rows
        self.closed = closed


class LevelLoad(NamedTuple):
    """One priority level.

    Attributes:
        level: from 1, the most urgent.
        depth: requests that wait (parts, of those larger than a batch).
        rows: rows that wait.
        wait_ns: how long a request of one row that came now would wait until it is run; 0 if nothing is known.
    """

    level: int
    depth: int
    rows: int
    wait_ns: int


class ModelLoad(NamedTuple):
    """A version at one moment.

    Attributes:
        depth: requests that wait.
        rows: rows that wait.
        in_flight: requests that are somewhere between their arrival and their answer.
        running_rows: rows that instances have taken and not answered.
        instances: how many live.
        wait_ns: how long a request of one row and of the default level that came now would wait until it is run.
        drain_ns: how long what waits and runs would take if nothing came.
        rows_hz: rows a second that all instances can do, by the profile, at the batch size that the objective allows; 0: unknown.
        late: answers since loading that came after they were due.
        levels: each priority level by itself, the most urgent first; empty if it was not asked for.
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
