"""Executions that run the requests of a batch as a list, e.g. of Python models: their requests, results and late responses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeGuard

from headrace.core.completion import Completion
from headrace.core.errors import HeadraceError
from headrace.core.request import ParameterValue, Responses
from headrace.core.tensor import Array
from headrace.runtimes.base import Execution


class ResponseSink(Protocol):
    """Takes the responses of one request of a decoupled model from its backend; from any thread, one call at a time.

    Attributes:
        responses: stream of the request; the backend sets its `on_consumed`.
    """

    responses: Responses

    def send(self, result: dict[str, Array] | HeadraceError, size_bytes: int, is_final: bool) -> None:
        """Check a response and pass it on; after the end of the request it is dropped.

        Args:
            result: outputs by name, a `MemberOutputs` if it has parameters; or the error of the model in their place.
            size_bytes: memory of the response.
            is_final: no response follows; `end` is called next.
        """

    def end(self, error: HeadraceError | None) -> None:
        """End the request; a second call has no effect."""


class OpenStep(Protocol):
    """A request of a decoupled model that is open between two steps."""

    @property
    def key(self) -> tuple[int, int]:
        """Number of its first batch, and its index there."""

    @property
    def sink(self) -> ResponseSink | None:
        """Takes its responses."""

    def when_room(self, callback: Callable[[], object]) -> bool:
        """Return True if its client has read enough of its responses; else the callback is called once it has."""


NextWaiting = Callable[[], tuple[str, int] | None]
"""Returns client and monotonic arrival of the queued request that would be served next; None without one."""


NO_INPUTS: Mapping[str, Array] = MappingProxyType({})


class BatchMember(NamedTuple):
    """One request of a batch, for an execution that runs requests as a list.

    Attributes:
        rows: rows of the request; 1 for a model without a batch dimension.
        id: request id of the caller, "" without one.
        parameters: parameters of the request, without those that the server itself reads.
        outputs: names of the requested outputs; () for all.
        deadline_ns: monotonic deadline; 0 for none.
        priority: requested priority level; 0 for the default.
        shapes: shapes of ragged inputs; {} without any.
        completion: completion of the request; `is_settled` is True once it is cancelled or past its deadline.
        client: name of the client, "" without one.
        call: call of a Python model that sent the request; None for any other.
        inputs: inputs that are not in the arrays of the batch: they lie in the memory of a GPU for some of its members.
        responses: stream of a request of a decoupled model; None for any other.
        sink: takes the responses of a request of a decoupled model; None for any other.
        open: the open request of which this is a later step; None for any other.
        has_headers: as in `InferRequest`.
    """

    rows: int
    id: str
    parameters: Mapping[str, ParameterValue]
    outputs: tuple[str, ...]
    deadline_ns: int
    priority: int
    shapes: Mapping[str, tuple[int, ...]]
    completion: Completion
    client: str = ""
    call: object = None
    inputs: Mapping[str, Array] = NO_INPUTS
    responses: Responses | None = None
    sink: ResponseSink | None = None
    open: OpenStep | None = None
    has_headers: bool = False


class MemberOutputs(dict[str, Array]):
    """Outputs of one member by name, with parameters of its response.

    Args:
        outputs: arrays by name.
        parameters: of the response.
    """

    def __init__(self, outputs: Mapping[str, Array], parameters: Mapping[str, ParameterValue]) -> None:
        super().__init__(outputs)
        self.parameters = parameters


class LateResult:
    """Result of a member that comes after its batch has returned: outputs or an error, set once. Any thread may call.

    Attributes:
        outcome: the result; None until `set`.
    """

    def __init__(self) -> None:
        self.outcome: dict[str, Array] | HeadraceError | None = None
        self._lock = threading.Lock()  # guards all attributes; no callback runs under it
        self._callback: Callable[[dict[str, Array] | HeadraceError], object] | None = None

    def set(self, outcome: dict[str, Array] | HeadraceError) -> bool:
        """Set the result and call the callback; False if it was set before."""
        with self._lock:
            if self.outcome is not None:
                return False
            self.outcome, callback = outcome, self._callback
        if callback is not None:
            callback(outcome)
        return True

    def then(self, callback: Callable[[dict[str, Array] | HeadraceError], object]) -> None:
        """Set the callback, once; it is called at once if the result is there."""
        with self._lock:
            self._callback, outcome = callback, self.outcome
        if outcome is not None:
            callback(outcome)


class Rescheduled:
    """Result of a member that the model has scheduled again: it is a member of the next batch, too.

    Attributes:
        open: its open request; None for a model that is not decoupled.
    """

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open: OpenStep | None = None


MemberResult = dict[str, Array] | HeadraceError | LateResult | Rescheduled | None
"""Outputs of one member by name, or its error; a late result; None for a member with a sink, which takes its responses."""


class MemberExecution(Execution, Protocol):
    """Runs the requests of a batch as a list; each of them may fail alone.

    Attributes:
        by_member: True.
        reads_device_rows: `BatchMember.inputs` may have rows in the memory of GPUs.
    """

    def run_members(self, inputs: dict[str, Array], members: Sequence[BatchMember]) -> list[MemberResult]:
        """Run a batch and return one result for each member, in order.

        Args:
            inputs: arrays of the batch by name, of shape (rows of all members, ...).
            members: requests of the batch.

        Raises:
            BatchLost: the process of the model ended with the batch inside.
            ExecutionLost: the execution can run nothing any more.
            Exception: anything else is the model's failure on the whole batch; its members are not run again.
        """

    def wait_ready(self, stopped: Callable[[], bool], next_waiting: NextWaiting) -> None:
        """Block while the process of the instance is being restarted, so that other instances run the queued requests.

        Args:
            stopped: returns True once the instance must end.
            next_waiting: returns the next queued request, to which open requests may give way.
        """

    def give_up(self, error: HeadraceError) -> None:
        """Settle the requests with `error` that are open since a batch that has returned; any thread may call."""


def runs_by_member(execution: Execution) -> TypeGuard[MemberExecution]:
    """Return True for an execution that runs the requests of a batch as a list."""
    return execution.by_member
