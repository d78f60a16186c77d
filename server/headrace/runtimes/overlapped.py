"""Executions that run several batches at the same time.

One batch has these steps:

    begin(like, rows) -> InFlightBatch    instance's thread; host memory for a batch, which the caller fills
    launch(batch)                         instance's thread; queues copy in, compute and copy out
    finish(batch) -> outputs              finisher's thread; waits for this batch, in the order of launch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

import numpy as np

from headrace.core.scattered_rows import ScatteredRows
from headrace.core.tensor import Array, ResidentRows
from headrace.runtimes.base import Execution

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
