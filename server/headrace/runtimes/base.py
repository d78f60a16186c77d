"""The contract between the data plane and a backend, on one screen.

    Backend.load(file, ...) -> LoadedModel        once for each version; raises ConfigError if the file cannot be served
    LoadedModel.execution(i) -> Execution         once for each instance
    Execution.run(inputs) -> outputs              from the instance's own thread only, one call at a time

Ownership: the input arrays of `run` belong to the caller again when it returns. The output arrays belong to the
caller and share no memory with the inputs. `run` may block; it must release the interpreter's lock while it computes.

An execution that can overlap batches is an `OverlappedExecution` (`overlapped.py`), one that runs the requests of a batch as a
list is a `MemberExecution` (`members.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

from headrace.core.errors import BadRequest
from headrace.core.request import Probe
from headrace.core.sequence_state import SlotStates
from headrace.core.tensor import Array

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


def has_batch_memory(execution: Execution) -> TypeGuard[HasBatchMemory]:
    """Return True for an execution in whose memory batches are assembled."""
    return execution.has_batch_memory


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
