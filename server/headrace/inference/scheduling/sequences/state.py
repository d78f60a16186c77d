"""Implicit state in host memory: tensors of each sequence that the server keeps between its requests, by slot.

The contract is `headrace.core.sequence_state`. An execution may keep the states where it runs: `Execution.slot_states`.

Rows of a batch are in the order of their slots, so a batch of neighbouring slots reads its states in place, without a copy. If it
has all live sequences of the instance, from slot 0, its outputs become the states without a copy, too. Any other batch copies the
rows of its states, in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from headrace.core.sequence_state import BatchSlots, SlotStates, StateTensor
from headrace.core.tensor import BYTES, Array, fits_shape
from headrace.inference.scheduling.output_check import OutputMismatch


def run_new_sequences(
    run: Callable[[dict[str, Array]], dict[str, Array]], states: SlotStates, inputs: dict[str, Array]
) -> dict[str, Array]:
    """Run the first and the second requests of new sequences, which have equal inputs; return the outputs of the second.

    Args:
        run: runs a batch.
        states: states that the execution keeps; no slot of them is in use.
        inputs: arrays by name, of shape (rows, ...); a row for each slot from 0 on.
    """
    rows = len(next(iter(inputs.values())))
    batch = BatchSlots(range(rows), range(rows))
    for slot in batch.slots:
        states.reset(slot)
    try:
        for _ in range(2):
            outputs = run(inputs | states.load(batch))
            states.save(outputs, batch)
        return outputs
    finally:
        for slot in batch.slots:
            states.release(slot)


class _FixedState:
    """Values of a state of constant shape: one array, whose rows are slots. It has no more rows than were used.

    Args:
        state: the state.
        slots: number of slots.
    """

    def __init__(self, state: StateTensor, slots: int) -> None:
        self.state, self._slots = state, slots
        self._values = self._empty(0)

    def key(self, slot: int) -> Hashable:
        return None

    def reset(self, slot: int) -> None:
        if slot >= len(self._values):
            used = len(self._values)
            values = self._empty(min(max(2 * used, slot + 1), self._slots))
            values[:used] = self._values
            self._values = values
        self._values[slot] = self.state.initial

    def load(self, rows: BatchSlots) -> Array:
        slots, values = rows.slots, self._values
        if slots[-1] < len(values):
            return values[slots[0] : slots[-1] + 1] if rows.are_neighbours else values[list(slots)]
        raise IndexError(f"slot {slots[-1]} has no state: its sequence was not started")

    def save(self, output: Array, rows: BatchSlots, has_all: bool) -> None:
        if has_all and not self.state.is_output and output.flags.c_contiguous and output.flags.writeable:
            self._values = output
        elif rows.all_ready and rows.are_neighbours:
            self._values[rows.slots[0] : rows.slots[-1] + 1] = output
        else:
            self._values[[rows.slots[row] for row in rows.ready]] = output[list(rows.ready)]

    def _empty(self, slots: int) -> Array:
        shape = (slots, *self.state.dims)
        datatype = self.state.datatype
        return np.full(shape, b"", object) if datatype is BYTES else np.zeros(shape, datatype.dtype)


class _FreeState:
    """Values of a state whose shape may change with each request: an array of one row for each slot."""

    def __init__(self, state: StateTensor) -> None:
        self.state = state
        self._initial: Array = state.initial[np.newaxis]
        self._values: list[Array] = []

    def key(self, slot: int) -> tuple[int, ...]:
        return self._values[slot].shape

    def reset(self, slot: int) -> None:
        self._values.extend([self._initial] * (slot + 1 - len(self._values)))
        self._values[slot] = self._initial

    def load(self, rows: BatchSlots) -> Array:
        ready = [self._values[rows.slots[row]] for row in rows.ready]
        if rows.all_ready:
            return ready[0] if len(ready) == 1 else np.concatenate(ready)
        shape, is_text = (len(rows.slots), *ready[0].shape[1:]), self.state.datatype is BYTES
        values = np.full(shape, b"" if is_text else 0, ready[0].dtype)
        for row, value in zip(rows.ready, ready, strict=True):
            values[row] = value[0]
        return values

    def save(self, output: Array, rows: BatchSlots, has_all: bool) -> None:
        if len(output) == 1 and not self.state.is_output:
            self._values[rows.slots[0]] = output
            return
        for row in rows.ready:  # copies: a view would keep the rows of the other sequences
            self._values[rows.slots[row]] = output[row : row + 1].copy()


class HostStates:
    """States in host memory; see `SlotStates`.

    Args:
        states: states of the model.
        slots: number of slots of the instance.
        batched: True if the first dimension of the model's tensors is the batch.
        model: name of the model, for errors.

    Attributes:
        live: slots with states.
    """

    def __init__(self, states: Sequence[StateTensor], slots: int, batched: bool, model: str) -> None:
        self._states = [_FreeState(each) if -1 in each.dims else _FixedState(each, slots) for each in states]
        self._free = [each for each in self._states if isinstance(each, _FreeState)]
        self._batched, self._model = batched, model
        self.live: set[int] = set()

    def reset(self, slot: int) -> None:
        """Set the states of a slot to their initial values."""
        self.live.add(slot)
        for state in self._states:
            state.reset(slot)

    def release(self, slot: int) -> None:
        """The sequence of a slot has ended."""
        self.live.discard(slot)

    def key(self, slot: int) -> Hashable:
        """Return the shapes of the states of variable size."""
        return tuple([state.key(slot) for state in self._free]) if self._free else None

    def load(self, rows: BatchSlots) -> dict[str, Array]:
        """Return the state inputs of a batch."""
        inputs = {each.state.input_name: each.load(rows) for each in self._states}
        return inputs if self._batched else {name: array[0] for name, array in inputs.items()}

    def save(self, outputs: Mapping[str, Array], rows: BatchSlots) -> None:
        """Set the states of the ready rows to the model's outputs."""
        arrays = [self._checked(each.state, outputs, len(rows.slots)) for each in self._states]
        has_all = rows.slots[0] == 0 and rows.are_neighbours and self.live <= rows.ready_slots
        for state, array in zip(self._states, arrays, strict=True):
            state.save(array, rows, has_all)

    def _checked(self, state: StateTensor, outputs: Mapping[str, Array], rows: int) -> Array:
        """Return the output of a state, with a dimension of rows."""
        array = outputs.get(state.output_name)
        came = f"model '{self._model}' returned"
        cure = "The model is at fault, not the request: correct sequence_batching.state, or export the model again"
        if array is None:
            raise OutputMismatch(f"{came} no output '{state.output_name}', which is a state of its sequences. {cure}")
        expected = (rows, *state.dims) if self._batched else state.dims
        if not fits_shape(array.shape, expected) or array.dtype != state.datatype.dtype:
            raise OutputMismatch(
                f"{came} the state '{state.output_name}' as {array.dtype} with the shape {list(array.shape)}, its configuration "
                f"declares {state.datatype.name} with {list(expected)} (-1: any size). {cure}"
            )
        return array if self._batched else array[np.newaxis]
