"""Implicit state: tensors of each sequence that the server keeps between its requests, in one place for each slot.

    START -> reset(slot)
    batch -> load(rows) -> the model -> save(outputs, rows)

A batch that fails is not saved: its sequences keep the state from before it.

Rows of a batch are in the order of their slots, so a batch of neighbouring slots reads its states in place, without a copy. If it
has all live sequences of the instance, from slot 0, its outputs become the states without a copy, too. Any other batch copies the
rows of its states, in host memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from headrace.core.tensor import BYTES, Array
from headrace.scheduling.executor import OutputMismatch
from headrace.scheduling.policy import StateTensor


class BatchSlots(NamedTuple):
    """The slots of a batch.

    Attributes:
        slots: slot of each row, ascending.
        ready: indices of the rows with a request, ascending.
    """

    slots: Sequence[int]
    ready: Sequence[int]

    @property
    def are_neighbours(self) -> bool:
        """True if each slot follows the one before it."""
        return self.slots[-1] - self.slots[0] + 1 == len(self.slots)

    @property
    def all_ready(self) -> bool:
        """True if every row has a request."""
        return len(self.ready) == len(self.slots)


class SlotStates(Protocol):
    """States of the sequences of one instance by slot; used by its thread."""

    def reset(self, slot: int) -> None:
        """Set the states of a slot to their initial values: a sequence starts there."""

    def release(self, slot: int) -> None:
        """The sequence of a slot has ended. States of sequences that end otherwise stay until the next `reset`."""

    def key(self, slot: int) -> Hashable:
        """Return the key of a slot's states: only sequences of equal keys share a batch."""

    def load(self, rows: BatchSlots) -> dict[str, Array]:
        """Return the state inputs of a batch whose ready rows have equal keys; valid until `save` returns."""

    def save(self, outputs: Mapping[str, Array], rows: BatchSlots) -> None:
        """Set the states of the ready rows to the model's outputs, which the caller may not change afterwards.

        Raises:
            OutputMismatch: an output is missing or has another type or shape; no state is changed.
        """


class _FixedState:
    """Values of a state of constant shape: one array, whose rows are slots. It has no more rows than were used.

    Args:
        state: the state.
        slots: number of slots.
    """

    def __init__(self, state: StateTensor, slots: int) -> None:
        self.state, self._slots = state, slots
        self._values = self._empty()

    def key(self, slot: int) -> Hashable:
        return None

    def reset(self, slot: int) -> None:
        if slot >= len(self._values):  # taken from a batch of fewer slots
            values, used = self._empty(), len(self._values)
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

    def _empty(self) -> Array:
        shape = (self._slots, *self.state.dims)
        datatype = self.state.datatype
        return np.full(shape, b"", object) if datatype is BYTES else np.zeros(shape, datatype.dtype)


class _FreeState:
    """Values of a state whose shape may change with each request: an array of one row for each slot."""

    def __init__(self, state: StateTensor, slots: int) -> None:
        self.state = state
        self._initial: Array = state.initial[np.newaxis]
        self._values = [self._initial] * slots

    def key(self, slot: int) -> tuple[int, ...]:
        return self._values[slot].shape

    def reset(self, slot: int) -> None:
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
    """

    def __init__(self, states: Sequence[StateTensor], slots: int, batched: bool, model: str) -> None:
        self._states = [_FreeState(each, slots) if -1 in each.dims else _FixedState(each, slots) for each in states]
        self._free = [each for each in self._states if isinstance(each, _FreeState)]
        self._batched, self._model = batched, model
        self._live: set[int] = set()  # slots whose states are in use, or were: a sequence may end unseen

    def reset(self, slot: int) -> None:
        """Set the states of a slot to their initial values."""
        self._live.add(slot)
        for state in self._states:
            state.reset(slot)

    def release(self, slot: int) -> None:
        """The sequence of a slot has ended."""
        self._live.discard(slot)

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
        ready = {rows.slots[row] for row in rows.ready}
        has_all = rows.slots[0] == 0 and rows.are_neighbours and self._live <= ready
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
        fits = len(array.shape) == len(expected) and all(
            size in (-1, found) for size, found in zip(expected, array.shape, strict=True)
        )
        if not fits or array.dtype != state.datatype.dtype:
            raise OutputMismatch(
                f"{came} the state '{state.output_name}' as {array.dtype} with the shape {list(array.shape)}, its configuration "
                f"declares {state.datatype.name} with {list(expected)} (-1: any size). {cure}"
            )
        return array if self._batched else array[np.newaxis]
