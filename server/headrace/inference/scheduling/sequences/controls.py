"""Control tensors: the inputs by which the server describes the sequence of each row to the model.

`ControlledExecution` adds them, and the states, to the runs that have none: warm-up and the measurement of latencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.core.errors import BadRequest
from headrace.core.sequence_state import StateTensor
from headrace.core.tensor import BYTES, Array
from headrace.inference.scheduling.policy import ControlTensor
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.sequences.live_sequence import CorrelationId, SequenceEntry
from headrace.runtimes.base import Execution, has_batch_memory
from headrace.runtimes.members import BatchMember, MemberResult
from headrace.runtimes.wrapped_execution import WrappedExecution

MAX_ID = 2**64 - 1
"""Largest correlation id that is a number."""


def control_rows(control: ControlTensor, entries: Sequence[Entry | None], batched: bool) -> Array:
    """Return one control tensor of a batch.

    Args:
        control: the tensor.
        entries: request of each row; None for a row without a request, which is not ready.
        batched: the first dimension is the batch.

    Returns:
        Array of shape (rows, 1), or (1,) without a batch dimension.
    """
    kind, true, false = control.kind, control.true, control.false
    column: list[object]
    if kind == "START":
        column = [true if type(entry) is SequenceEntry and entry.is_start else false for entry in entries]
    elif kind == "END":
        column = [true if type(entry) is SequenceEntry and entry.is_end else false for entry in entries]
    elif kind == "READY":
        column = [true if type(entry) is SequenceEntry else false for entry in entries]
    elif control.datatype is BYTES:
        column = [str(entry.correlation_id).encode() if type(entry) is SequenceEntry else b"" for entry in entries]
    else:
        column = [entry.correlation_id if type(entry) is SequenceEntry else 0 for entry in entries]
    values = np.array(column, control.datatype.dtype).reshape(-1, 1)
    return values if batched else values[0]


def check_correlation_id(controls: Sequence[ControlTensor], correlation_id: CorrelationId, model: str) -> None:
    """Check that the model's CORRID input can hold an id.

    Raises:
        BadRequest: the id has another type, or is outside the range of the input.
    """
    for control in controls:
        if control.kind != "CORRID":
            continue
        is_text, name = control.datatype is BYTES, control.datatype.name
        if is_text != isinstance(correlation_id, str):
            sent = "a text" if isinstance(correlation_id, str) else "a number"
            allowed = "a text" if is_text else "a number"
            raise BadRequest(
                f"sequence_id is {sent}, the input '{control.name}' of model '{model}' is {name}: send {allowed} as sequence_id"
            )
        most = max_number([control])
        if isinstance(correlation_id, int) and correlation_id > most:
            raise BadRequest(
                f"sequence_id is {correlation_id}, the input '{control.name}' of model '{model}' is {name}: send at most "
                f"{most}"
            )


def max_number(controls: Sequence[ControlTensor]) -> int:
    """Return the largest number that the model's CORRID input can hold; 0 if it is text, any allowed number without one."""
    for control in controls:
        if control.kind == "CORRID":
            is_text = control.datatype is BYTES
            return 0 if is_text else int(np.iinfo(np.dtype(control.datatype.dtype).name).max)
    return MAX_ID


class ControlledExecution(WrappedExecution):
    """Adds the control tensors of rows that are not ready, and initial states, to inputs without them.

    Args:
        inner: the wrapped execution.
        controls: control tensors of the model.
        batched: True if the first dimension is the batch.
        states: states that the server keeps; those that the execution keeps itself are not added.
    """

    has_batch_memory = True

    def __init__(
        self,
        inner: Execution,
        controls: Sequence[ControlTensor],
        batched: bool,
        states: Sequence[StateTensor] = (),
    ) -> None:
        super().__init__(inner)
        self._controls = controls
        self._states = () if inner.slot_states is not None else tuple(states)
        self._added = (*(control.name for control in controls), *(state.input_name for state in self._states))
        self._batched = batched
        self.depth = 1  # a request of a sequence must not start before the one before it has ended
        self.by_member = inner.by_member
        self.reads_device_rows = inner.reads_device_rows

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run a batch."""
        return self.inner.run(self._completed(inputs))

    def run_members(self, inputs: dict[str, Array], members: Sequence[BatchMember]) -> list[MemberResult]:
        """Run a batch as a list of requests."""
        return self._members().run_members(self._completed(inputs), members)

    def batch_arrays(self, like: Mapping[str, Array], rows: int) -> dict[str, Array]:
        """Return the wrapped execution's arrays."""
        return self.inner.batch_arrays(like, rows) if has_batch_memory(self.inner) else {}

    def _completed(self, inputs: dict[str, Array]) -> dict[str, Array]:
        if all(name in inputs for name in self._added):
            return inputs
        rows = next(iter(inputs.values())).shape[0] if self._batched else 1
        missing = [control for control in self._controls if control.name not in inputs]
        completed = {**inputs, **{each.name: control_rows(each, [None] * rows, self._batched) for each in missing}}
        for state in self._states:
            if state.input_name not in inputs:
                initial = state.initial
                completed[state.input_name] = np.repeat(initial[np.newaxis], rows, axis=0) if self._batched else initial
        return completed
