"""Implicit state of sequences: its description, and the contract of the places that keep it for each slot of an instance.

    START -> reset(slot)
    batch -> load(rows) -> the model -> save(outputs, rows)

A batch that fails is not saved: its sequences keep the state from before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.core.tensor import Array, Datatype


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A state of each sequence: an output of the model that is an input of the sequence's next request.

    Attributes:
        input_name, output_name: names of the model's tensors, of shape (rows, *dims), or dims without a batch dimension.
        datatype: datatype of both.
        dims: shape of a row; -1 for sizes that may change with each request.
        initial: value at START, of a shape that fits `dims`.
        is_output: clients read it, too.
    """

    input_name: str
    output_name: str
    datatype: Datatype
    dims: tuple[int, ...]
    initial: Array
    is_output: bool = False


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

    @property
    def ready_slots(self) -> set[int]:
        """Slots of the rows with a request."""
        return {self.slots[row] for row in self.ready}


class SlotStates(Protocol):
    """States of the sequences of one instance by slot; used by its thread.

    Attributes:
        live: slots between `reset` and `release`, whose states a batch without them must not change.
    """

    live: set[int]

    def reset(self, slot: int) -> None:
        """Set the states of a slot to their initial values: a sequence starts there."""

    def release(self, slot: int) -> None:
        """The sequence of a slot has ended."""

    def key(self, slot: int) -> Hashable:
        """Return the key of a slot's states: only sequences of equal keys share a batch."""

    def load(self, rows: BatchSlots) -> dict[str, Array]:
        """Prepare the states of the next run, whose ready rows have equal keys.

        Returns:
            The state inputs that the run needs, valid until `save` returns; {} if they are where the model reads them.
        """

    def save(self, outputs: Mapping[str, Array], rows: BatchSlots) -> None:
        """Set the states of the ready rows to the model's outputs, which the caller may not change afterwards.

        Raises:
            OutputMismatch: an output is missing or has another type or shape; no state is changed.
            ExecutionLost: the states are lost.
        """
