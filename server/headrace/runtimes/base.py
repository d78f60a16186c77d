"""The contract between the data plane and a backend, on one screen.

    Backend.load(file, ...) -> LoadedModel        once for each version; raises ConfigError if the file cannot be served
    LoadedModel.execution(i) -> Execution         once for each instance
    Execution.run(inputs) -> outputs              from the instance's own thread only, one call at a time

Ownership: the input arrays of `run` belong to the caller again when it returns. The output arrays belong to the
caller and share no memory with the inputs. `run` may block; it must release the interpreter's lock while it computes.

An execution that can overlap batches implements `OverlappedExecution`; one batch then has these steps:

    begin(like, rows) -> InFlightBatch    instance's thread; host memory for a batch, which the caller fills
    launch(batch)                         instance's thread; queues copy in, compute and copy out
    finish(batch) -> outputs              finisher's thread; waits for this batch, in the order of launch
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

import numpy as np

from headrace.core.completion import Completion
from headrace.core.errors import BadRequest, HeadraceError
from headrace.core.request import ParameterValue, Probe, Responses
from headrace.core.scattered_rows import ScatteredRows
from headrace.core.sequence_state import SlotStates
from headrace.core.tensor import Array, ResidentRows

if TYPE_CHECKING:
    from headrace.runtimes.tensorrt.plan import PlanTensor, Shape


class InputRefused(BadRequest):
    """The model rejects input values, e.g. an index out of range or text that is not UTF-8: a client error."""


class ExecutionLost(Exception):
    """An execution can run nothing any more, e.g. after a sticky device error. Its instance ends."""


class Execution(Protocol):
    """Runs the model for one instance. An implementation inherits the defaults of the abilities, and declares its own.

    Attributes:
        any_thread: another thread may call `run` in the instance's place, while that sleeps.
        depth: see `OverlappedExecution`; 1 if batches do not overlap.
        prompt: see `OverlappedExecution`.
        brief_rows: rows of the largest batch for which the device takes about 0.1 ms at most; 0 if none is so short.
        by_member: it is a `MemberExecution`.
        reads_device_rows: see `MemberExecution`.
        has_batch_memory: it is a `HasBatchMemory`.
        slot_states: states of sequences that it keeps where it runs; None if it keeps none.
        renew_state: for an execution whose process keeps the state of sequences: accepts its present process for those
            that follow, and returns True if an earlier one has ended with the state. None for any other.
    """

    any_thread: bool = False
    depth: int = 1
    prompt: bool = False
    brief_rows: int = 0
    by_member: bool = False
    reads_device_rows: bool = False
    has_batch_memory: bool = False
    slot_states: SlotStates | None = None
    renew_state: Callable[[], bool] | None = None

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run the model on checked inputs and return all outputs by name.

        Raises:
            InputRefused: the values cannot be processed.
            ExecutionLost: the execution can run nothing any more.
            Exception: anything else is the model's failure on these inputs.
        """

    def close(self) -> None:
        """Release all resources; called once, from the instance's thread. By default nothing."""
        return


# (input name, first row in the batch, rows); `ScatteredRows` are pinned
ResidentInput = tuple[str, int, ResidentRows | ScatteredRows]


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch of an overlapped execution, from `begin` to `finish`.

    Ownership: the caller's from `begin` to `launch`, then the backend's; no reference remains after `finish` or
    `discard`.

    Attributes:
        inputs: C-contiguous host arrays of exactly `rows` rows by name (pinned on a GPU); the caller fills them,
            except for the rows in `resident_inputs`.
        rows: rows in the batch.
        state: private to the backend.
        device: number of the GPU that reads resident rows at launch; None if the execution does not, as most.
        resident_inputs: (input, first row in the batch, rows) in pinned memory, on `device` or on another GPU, read from
            there instead of from `inputs`. The caller may append until the launch, in any order; the batch keeps the memory
            alive.
        resident_outputs: outputs that `finish` may return as `ResidentRows` on `device`, by `as_input`; set before the
            launch. An execution without memory for them returns arrays.
    """

    inputs: dict[str, Array]
    rows: int
    state: object = None
    device: int | None = None
    resident_inputs: list[ResidentInput] = field(default_factory=list)
    resident_outputs: frozenset[str] = frozenset()


class OverlappedExecution(Execution, Protocol):
    """Runs the model for one instance, with several batches in flight.

    Two threads use it: the instance's own, and its finisher, which calls only `finish`. Launches and finishes run in
    order; a batch is finished while later ones are begun and launched. `run` is begin, launch and finish in one call;
    it comes from the instance's thread while no batch is open. `close` comes after all other calls; batches that are
    still open (a thread died) are waited for and dropped.

    Every call may raise ExecutionLost.

    Attributes:
        depth: maximum number of open batches, from `begin` to the end of `finish` (or `discard`); at least 2.
        prompt: `begin`, `launch` and `discard` only queue work and copy small data,
            for any arguments. Another thread may then call them in place of the sleeping instance, and `finish` in
            place of an idle finisher.
    """

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """Return an empty batch; never blocks, since the caller respects `depth`. From the instance's thread.

        Args:
            like: all inputs of the model by name, as in one request, without object arrays: the batch's arrays have
                their dtypes, and their shapes with `rows` as the first dimension.
            rows: 1 to the model's `max_batch_size`; 0 if that is 0, then the arrays have the shapes of `like`.

        Raises:
            Exception: no batch can be created for such inputs; none is open then.
        """

    def launch(self, batch: InFlightBatch) -> None:
        """Queue copy in, compute and copy out, and return at once. From the instance's thread.

        The caller does not access the batch's inputs any more.

        Raises:
            Exception: nothing was launched; the batch has been released.
        """

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        """Wait for a batch, without the interpreter's lock. From the finisher's thread, in the order of launch.

        Returns:
            All outputs of the model by name, `rows` rows each; they belong to the caller and share no memory with the
            batch.

        Raises:
            InputRefused: the values cannot be processed.
            Exception: anything else is the model's failure. The batch is released in any case.
        """

    def discard(self, batch: InFlightBatch) -> None:
        """Release a batch that is not launched, e.g. because all its requests were cancelled. From the instance's thread."""


NO_INPUTS: Mapping[str, Array] = MappingProxyType({})


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


class HasBatchMemory(Execution, Protocol):
    """An execution in whose memory batches are assembled, so that rows are copied once."""

    def batch_arrays(self, like: Mapping[str, Array], rows: int) -> dict[str, Array]:
        """Return arrays for the next batch; valid until its run returns.

        Args:
            like: inputs of one request by name: the arrays have their dtypes and row shapes.
            rows: rows of the batch; ignored for a model without a batch dimension.

        Returns:
            Arrays by input name; without those that the execution does not provide (BYTES).
        """


def runs_by_member(execution: Execution) -> TypeGuard[MemberExecution]:
    """Return True for an execution that runs the requests of a batch as a list."""
    return execution.by_member


def has_batch_memory(execution: Execution) -> TypeGuard[HasBatchMemory]:
    """Return True for an execution in whose memory batches are assembled."""
    return execution.has_batch_memory


def is_overlapped(execution: Execution) -> TypeGuard[OverlappedExecution]:
    """Return True if batches can overlap; a wrapper of a plain execution may have a depth of 1, which does not count."""
    return execution.depth > 1


def run_one_batch(execution: OverlappedExecution, inputs: Mapping[str, Array], batched: bool) -> dict[str, Array]:
    """Return all outputs of one batch of an overlapped execution; see `Execution.run`.

    Args:
        execution: runs the batch in a free slot.
        inputs: values of the batch.
        batched: True if the first dimension is the batch.
    """
    batch = execution.begin(inputs, next(iter(inputs.values())).shape[0] if batched else 0)
    try:
        for name, array in inputs.items():
            np.copyto(batch.inputs[name], array)
    except BaseException:
        execution.discard(batch)
        raise
    execution.launch(batch)
    return execution.finish(batch)


class WrappedExecution(Execution):
    """Base of executions around another one; overlapped if that one is. The state of a batch is the inner batch.

    Args:
        inner: the wrapped execution.

    Attributes:
        inner: as in the argument.
        depth, prompt, any_thread, slot_states, renew_state: those of the wrapped execution.
    """

    def __init__(self, inner: Execution) -> None:
        self.inner = inner
        self.depth, self.prompt, self.any_thread = inner.depth, inner.prompt, inner.any_thread
        self.slot_states, self.renew_state = inner.slot_states, inner.renew_state

    def wait_ready(self, stopped: Callable[[], bool], next_waiting: NextWaiting) -> None:
        """Wait as the wrapped execution does."""
        self._members().wait_ready(stopped, next_waiting)

    def launch(self, batch: InFlightBatch) -> None:
        """Launch the inner batch."""
        self._overlapped().launch(self._inner_batch(batch))

    def discard(self, batch: InFlightBatch) -> None:
        """Discard the inner batch."""
        self._overlapped().discard(self._inner_batch(batch))

    def give_up(self, error: HeadraceError) -> None:
        """Settle the open requests of the wrapped execution with an error; see `MemberExecution`."""
        if runs_by_member(self.inner):
            self.inner.give_up(error)

    def close(self) -> None:
        """Close the wrapped execution."""
        self.inner.close()

    def _overlapped(self) -> OverlappedExecution:
        if not is_overlapped(self.inner):
            raise TypeError("the wrapped execution runs one batch at a time: call run() instead of begin()")
        return self.inner

    def _members(self) -> MemberExecution:
        if not runs_by_member(self.inner):
            raise TypeError("the wrapped execution runs batches as a whole: call run() instead of run_members()")
        return self.inner

    def _inner_batch(self, batch: InFlightBatch) -> InFlightBatch:
        assert isinstance(batch.state, InFlightBatch), "the batch was begun by another execution"
        return batch.state


class ProcessStatus(NamedTuple):
    """Status of a model that runs in a child process.

    Attributes:
        up: a process serves.
        refusal: reason why requests are refused at present; "" if they are served, or soon will be.
        restarts: number of processes that died while they served.
    """

    up: bool
    refusal: str
    restarts: int


class HasProcessStatus(Protocol):
    """A model that runs in a child process."""

    @property
    def process_status(self) -> ProcessStatus:
        """Status of the process; readable from any thread."""


class LoadedModel(Protocol):
    """One version of a model in memory. An implementation inherits the defaults of the abilities, and declares its own.

    Attributes:
        devices: GPU number of each instance; empty on the CPU.
        resident_devices: numbers of the GPUs whose batches take resident rows.
        inputs, outputs: tensors that the backend has read from the file; empty if it does not.
        shape_ranges: smallest and largest shape by input, for each optimisation profile; empty without bounds.
        buckets_us: returns the microseconds that a batch keeps the device busy, by rows; empty if they are not measured.
        run_rows: returns the rows that run for a batch, padding included; called once an execution was opened.
        probes: starts the readiness check of every instance, without waiting; empty if the code has none.
        run_unpadded: runs each batch of later executions with its own number of rows; returns False if it cannot.
        detach_states: keeps the states of sequences in host memory, in later executions.
    """

    devices: Sequence[int] = ()
    resident_devices: frozenset[int] = frozenset()
    inputs: Sequence[PlanTensor] = ()
    outputs: Sequence[PlanTensor] = ()
    shape_ranges: Sequence[Mapping[str, tuple[Shape, Shape]]] = ()
    # Attributes, so that a wrapper passes them on without a call.
    buckets_us: Callable[[], Mapping[int, float]] = dict
    run_rows: Callable[[int], int] = int
    probes: Callable[[], Sequence[Probe]] = tuple
    run_unpadded: Callable[[], bool] = bool
    detach_states: Callable[[], object] = bool

    @property
    def process(self) -> HasProcessStatus | None:
        """The model, or its pool, if it runs in child processes."""
        return None

    def execution(self, index: int) -> Execution:
        """Create the execution of instance `index`."""

    def close(self) -> None:
        """Release everything; called once, after all executions are closed. By default nothing."""
        return


class Backend(Protocol):
    """A library that runs models.

    Attributes:
        books_memory: it is an `AccountedBackend`.
    """

    books_memory: bool = False

    def load(self, file: Path, instances: int, parameters: dict[str, str]) -> LoadedModel:
        """Load a model file.

        Args:
            file: the model.
            instances: number of executions.
            parameters: of the model's configuration.

        Raises:
            ConfigError: the file or the parameters cannot be used; the message says why.
        """
