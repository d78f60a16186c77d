"""The contract between the data plane and whatever runs a model, on one screen.

    Backend.load(file, ...) -> LoadedModel        once a version; raises ConfigError if the file cannot be served
    LoadedModel.execution(i) -> Execution         once an instance
    Execution.run(inputs) -> outputs              from the instance's own thread only, one call at a time

Ownership: the arrays given to `run` belong to the caller again when it returns; those that come back belong to the caller and
share no memory with the inputs. `run` may block; it must not keep the interpreter's lock while it computes.

An execution that can overlap batches offers more (`PipelinedExecution`); one batch then takes this road:

    begin(like, rows) -> InFlightBatch       the instance's thread; host memory for a batch, which the caller fills
    launch(flight)                    the instance's thread; copy in, compute and copy out are queued
    finish(flight) -> outputs         the finisher's thread; waits for this flight, in the order of launch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

from headrace.core.errors import BadRequest
from headrace.core.tensor import Array, ResidentRows


class InputRefused(BadRequest):
    """The model itself found the values wrong (an index out of range, text that is not UTF-8): the caller's fault."""


class ExecutionLost(Exception):
    """Raised by an execution that cannot run anything any more (a sticky error of the device): its instance dies of it."""


class Execution(Protocol):
    """One instance's way to run the model."""

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All outputs of the model by name for checked inputs.

        Raises:
            InputRefused: the values cannot be processed.
            ExecutionLost: nothing can be run any more.
            Exception: anything else is the model's failure on these inputs.
        """

    def close(self) -> None:
        """Give back what the execution holds; called once, from the instance's thread."""


# An input's name, the first of the batch's rows they are, the rows.
ResidentInput = tuple[str, int, ResidentRows]


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch on its way through a pipelined execution.

    Ownership: the caller's from `begin` to `launch`, the backend's from then on; nobody keeps it after `finish` or `discard`.

    Attributes:
        inputs: by name, C-contiguous host arrays of exactly `rows` rows (pinned on a GPU); the caller fills them, but for the
            rows in `resident_inputs`.
        rows: rows in the batch.
        handle: the backend's own.
        device: number of the GPU that reads resident rows at launch; None if the execution takes none, as most do.
        resident_inputs: (input, first row in the batch, rows): what lies in pinned memory or on `device`, and is read from there
            instead of from `inputs`. The caller's to append until the launch, in any order; the flight keeps the memory alive.
    """

    inputs: dict[str, Array]
    rows: int
    handle: object = None
    device: int | None = None
    resident_inputs: list[ResidentInput] = field(default_factory=list)


class PipelinedExecution(Execution, Protocol):
    """One instance's way to run the model with several batches under way at the same time.

    Two threads use it: the instance's own, and its finisher, which calls nothing but `finish`. Launches run in order and so do
    finishes; a flight is finished while later ones are begun and launched. `run` is begin, launch and finish in one; it is
    called from the instance's thread and only while no flight is open. `close` comes once nothing is called any more; flights
    that are open then (a thread died) are waited for and dropped.

    Any of the calls may raise ExecutionLost.

    Attributes:
        depth: flights that may be open, that is between `begin` and the end of `finish` (or `discard`); at least 2.
        prompt: may be left out, which means False. True: `begin`, `launch` and `discard` do nothing but queue work and copy small
            things, whatever they are given; then another thread may call them in the instance's place, while that sleeps, and
            `finish` in the finisher's, while that has nothing to wait for.
    """

    depth: int

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """A free flight; never blocks, since the caller keeps to `depth`. From the instance's thread.

        Args:
            like: inputs by name, as of one request: the flight's arrays have their dtypes, and their shapes but for the first
                dimension, which is `rows`. All inputs of the model are there, none holds objects.
            rows: at least 1, at most the model's `max_batch_size`; 0 if that is 0, then the arrays have the shapes of `like`.

        Raises:
            Exception: there is none to be had for such inputs; nothing is open then.
        """

    def launch(self, flight: InFlightBatch) -> None:
        """Queue copy in, compute and copy out, and return at once. From the instance's thread.

        The caller does not touch the flight's inputs any more.

        Raises:
            Exception: nothing was launched; the flight has been given back.
        """

    def finish(self, flight: InFlightBatch) -> dict[str, Array]:
        """Wait for a flight, without the interpreter's lock. From the finisher's thread, in the order of launch.

        Returns:
            All outputs of the model by name, `rows` rows each; they belong to the caller and share no memory with the flight.

        Raises:
            InputRefused: the values cannot be processed.
            Exception: anything else is the model's failure. The flight has been given back in any case.
        """

    def discard(self, flight: InFlightBatch) -> None:
        """Give back a flight that was begun and is not launched, since nobody waits for it. From the instance's thread."""


def is_pipelined(execution: Execution) -> TypeGuard[PipelinedExecution]:
    """True if batches can overlap; one that stands before another execution may have a depth of 1, which is none."""
    return getattr(execution, "depth", 1) > 1


def never_blocks(execution: Execution) -> bool:
    """True if the event loop may begin and launch a flight; see `PipelinedExecution.prompt`."""
    return getattr(execution, "prompt", False) is True


class LoadedModel(Protocol):
    """One version of a model in memory."""

    def execution(self, index: int) -> Execution:
        """The execution of instance `index`."""

    def close(self) -> None:
        """Give back everything; called once, after all executions are closed."""


class ProcessStatus(NamedTuple):
    """How a model fares that runs in a process of its own.

    Attributes:
        up: there is a process that serves.
        refusal: why requests are refused for the time being; "" if they are served, or soon will be.
        restarts: how many processes have died while they served.
    """

    up: bool
    refusal: str
    restarts: int


class HasProcessStatus(Protocol):
    """A model that runs in a process of its own."""

    @property
    def process_status(self) -> ProcessStatus:
        """How the process fares; from any thread."""


def find_isolated_model(model: LoadedModel) -> HasProcessStatus | None:
    """The model, or what stands behind it as its `inner`, if that runs in a process of its own."""
    found: Any = model
    while found is not None and not hasattr(found, "process_status"):
        found = getattr(found, "inner", None)
    return cast("HasProcessStatus | None", found)


class Backend(Protocol):
    """A library that runs models."""

    def load(self, file: Path, instances: int, parameters: dict[str, str]) -> LoadedModel:
        """Read a model file.

        Args:
            file: the model.
            instances: how many executions will be asked for.
            parameters: of the model's configuration.

        Raises:
            ConfigError: the file or the parameters cannot be used; says why.
        """
