"""The contract between the data plane and a backend, on one screen.

    Backend.load(file, ...) -> LoadedModel        once a version; raises ConfigError if the file cannot be served
    LoadedModel.execution(i) -> Execution         once an instance
    Execution.run(inputs) -> outputs              from the instance's own thread only, one call at a time

Ownership: the arrays given to `run` belong to the caller again when it returns; those that come back belong to the caller and
share no memory with the inputs. `run` may block; it must not keep the interpreter's lock while it computes.

An execution that can overlap batches offers more (`PipelinedExecution`); one batch then takes these steps:

    begin(like, rows) -> InFlightBatch    the instance's thread; host memory for a batch, which the caller fills
    launch(batch)                         the instance's thread; copy in, compute and copy out are queued
    finish(batch) -> outputs              the finisher's thread; waits for this batch, in the order of launch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

from headrace.core.errors import BadRequest
from headrace.core.tensor import Array, ResidentRows


class InputRefused(BadRequest):
    """The model rejects input values, e.g. an index out of range or text that is not UTF-8: the caller's error."""


class ExecutionLost(Exception):
    """An execution cannot run anything any more, e.g. after a sticky device error. Its instance ends."""


class Execution(Protocol):
    """Runs the model for one instance."""

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All outputs of the model by name for checked inputs.

        Raises:
            InputRefused: the values cannot be processed.
            ExecutionLost: nothing can be run any more.
            Exception: anything else is the model's failure on these inputs.
        """

    def close(self) -> None:
        """Release all resources of the execution; called once, from the instance's thread."""


# An input's name, the first of the batch's rows they are, the rows.
ResidentInput = tuple[str, int, ResidentRows]


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch on its way through a pipelined execution.

    Ownership: the caller's from `begin` to `launch`, then the backend's; no reference is kept after `finish` or `discard`.

    Attributes:
        inputs: by name, C-contiguous host arrays of exactly `rows` rows (pinned on a GPU); the caller fills them, but for the
            rows in `resident_inputs`.
        rows: rows in the batch.
        handle: the backend's own.
        device: number of the GPU that reads resident rows at launch; None if the execution takes none, as most do.
        resident_inputs: (input, first row in the batch, rows): what lies in pinned memory or on `device`, and is read from there
            instead of from `inputs`. The caller's to append until the launch, in any order; the batch keeps the memory alive.
    """

    inputs: dict[str, Array]
    rows: int
    handle: object = None
    device: int | None = None
    resident_inputs: list[ResidentInput] = field(default_factory=list)


class PipelinedExecution(Execution, Protocol):
    """Runs the model for one instance, with several batches in flight.

    Two threads use it: the instance's own, and its finisher, which calls nothing but `finish`. Launches run in order and so do
    finishes; a batch is finished while later ones are begun and launched. `run` is begin, launch and finish in one; it is
    called from the instance's thread and only while no batch is open. `close` comes once nothing is called any more; batches
    that are open then (a thread died) are waited for and dropped.

    Any of the calls may raise ExecutionLost.

    Attributes:
        depth: batches that may be open, that is between `begin` and the end of `finish` (or `discard`); at least 2.
        prompt: may be left out, which means False. True: `begin`, `launch` and `discard` do nothing but queue work and copy small
            things, whatever they are given; then another thread may call them in the instance's place, while that sleeps, and
            `finish` in the finisher's, while that has nothing to wait for.
    """

    depth: int

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """An empty batch; never blocks, since the caller keeps to `depth`. From the instance's thread.

        Args:
            like: inputs by name, as of one request: the batch's arrays have their dtypes, and their shapes but for the first
                dimension, which is `rows`. All inputs of the model are there, none holds objects.
            rows: at least 1, at most the model's `max_batch_size`; 0 if that is 0, then the arrays have the shapes of `like`.

        Raises:
            Exception: no batch can be made for such inputs; none is open then.
        """

    def launch(self, batch: InFlightBatch) -> None:
        """Queue copy in, compute and copy out, and return at once. From the instance's thread.

        The caller does not touch the batch's inputs any more.

        Raises:
            Exception: nothing was launched; the batch has been released.
        """

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        """Wait for a batch, without the interpreter's lock. From the finisher's thread, in the order of launch.

        Returns:
            All outputs of the model by name, `rows` rows each; they belong to the caller and share no memory with the batch.

        Raises:
            InputRefused: the values cannot be processed.
            Exception: anything else is the model's failure. The batch is released in any case.
        """

    def discard(self, batch: InFlightBatch) -> None:
        """Release a batch that is not launched, e.g. as all its requests were cancelled. From the instance's thread."""


def is_pipelined(execution: Execution) -> TypeGuard[PipelinedExecution]:
    """True if batches can overlap; one that stands before another execution may have a depth of 1, which is none."""
    return getattr(execution, "depth", 1) > 1


def never_blocks(execution: Execution) -> bool:
    """True if the event loop may begin and launch a batch; see `PipelinedExecution.prompt`."""
    return getattr(execution, "prompt", False) is True


class LoadedModel(Protocol):
    """One version of a model in memory."""

    def execution(self, index: int) -> Execution:
        """The execution of instance `index`."""

    def close(self) -> None:
        """Release everything; called once, after all executions are closed."""


class ProcessStatus(NamedTuple):
    """Status of a model that runs in a child process.

    Attributes:
        up: there is a process that serves.
        refusal: why requests are refused at present; "" if they are served, or soon will be.
        restarts: how many processes have died while they served.
    """

    up: bool
    refusal: str
    restarts: int


class HasProcessStatus(Protocol):
    """A model that runs in a child process."""

    @property
    def process_status(self) -> ProcessStatus:
        """Status of the process; from any thread."""


def find_isolated_model(model: LoadedModel) -> HasProcessStatus | None:
    """The model, or what stands behind it as its `inner`, if that runs in a process of its own."""
    inner: Any = model
    while inner is not None and not hasattr(inner, "process_status"):
        inner = getattr(inner, "inner", None)
    return cast("HasProcessStatus | None", inner)


class Backend(Protocol):
    """A library that runs models."""

    def load(self, file: Path, instances: int, parameters: dict[str, str]) -> LoadedModel:
        """Read a model file.

        Args:
            file: the model.
            instances: number of executions.
            parameters: of the model's configuration.

        Raises:
            ConfigError: the file or the parameters cannot be used; says why.
        """
