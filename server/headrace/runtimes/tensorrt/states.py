"""Implicit states of sequences in GPU memory: see `headrace.core.sequence_state`.

The state inputs and outputs of a plan are no tensors of its clients: they stay on the GPU. Each state has two buffers. In buffer
slot 0 the plan reads the first and writes the second, in buffer slot 1 the other way round: CUDA graphs keep their addresses.

    direct: the row of a sequence is its slot. The buffer that was written becomes the one that is read: nothing is copied but
            the rows of live sequences without a request.
    oldest: the states of all slots are in a third buffer. Their rows are copied on the GPU before and after each batch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from headrace.core.sequence_state import BatchSlots, StateTensor
from headrace.core.tensor import Array
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.cuda.driver import CudaStream, DeviceError
from headrace.runtimes.cuda.memory import Allocator, DeviceBlock, copy_on_gpu, upload
from headrace.runtimes.tensorrt.plan import PlanTensor

BUFFER_SLOTS = 2
"""Buffer slots of an instance with states: one for each direction."""


class PlanStates(NamedTuple):
    """States of a plan that stay on the GPU.

    Attributes:
        tensors: the states, of constant shape.
        slots: sequences with a slot on an instance.
        is_direct: the row of a sequence is its slot.
    """

    tensors: tuple[StateTensor, ...] = ()
    slots: int = 0
    is_direct: bool = True

    @property
    def hidden(self) -> frozenset[str]:
        """Names of the plan's inputs and outputs that are no tensors of clients."""
        inputs = {state.input_name for state in self.tensors}
        return frozenset(inputs.union(state.output_name for state in self.tensors if not state.is_output))


NO_STATES = PlanStates()


def host_reason(
    states: Sequence[StateTensor], inputs: Sequence[PlanTensor], outputs: Sequence[PlanTensor], batched: bool
) -> str:
    """Return the reason why the states of a plan cannot stay on the GPU; "" if they can.

    Args:
        states: states of the model.
        inputs, outputs: tensors of the plan.
        batched: True if the first dimension is rows.
    """
    shapes = {tensor.name: tensor.shape[1:] if batched else tensor.shape for tensor in (*inputs, *outputs)}
    for state in states:
        for name in (state.input_name, state.output_name):
            if -1 in state.dims or shapes.get(name) != state.dims:
                return f"the shape of state '{name}' may change"
    return ""


class _StateBuffers:
    """GPU memory of one state.

    Args:
        state: the state.
        allocator: of the GPU.
    """

    def __init__(self, state: StateTensor, allocator: Allocator) -> None:
        self.state, self._allocator = state, allocator
        self.row_bytes = math.prod(state.dims) * state.datatype.dtype.itemsize
        self.pair = allocator.device(), allocator.device()  # the plan reads and writes them
        self.rows = allocator.device()  # the third buffer
        self.initial = allocator.device()  # a row with the value at START

    def open(self, max_rows: int, slots: int, stream: CudaStream) -> None:
        """Allocate the buffers, with the value at START in every row: rows without a request are computed, too.

        Args:
            max_rows: rows of the largest batch, with padding.
            slots: rows of the third buffer; 0 for none.
            stream: stream to queue on.
        """
        sizes = [(self.pair[0], max_rows), (self.pair[1], max_rows), (self.initial, 1)]
        if slots:
            sizes.append((self.rows, slots))
        pinned = self._allocator.pinned()
        try:
            pinned.reserve(self.row_bytes)
            row = pinned.view((self.row_bytes,), np.dtype(np.uint8))
            row[:] = np.ascontiguousarray(self.state.initial).reshape(-1).view(np.uint8)
            for buffer, rows in sizes:
                buffer.reserve(rows * self.row_bytes)
                for index in range(rows):
                    upload(DeviceBlock(buffer.address + index * self.row_bytes), row, stream)
            stream.synchronize()
        finally:
            pinned.free()

    def close(self) -> None:
        for buffer in (*self.pair, self.rows, self.initial):
            buffer.free()

    def copy(self, target: int, target_row: int, source: int, source_row: int, rows: int, stream: CudaStream) -> None:
        """Queue the copy of rows between addresses."""
        block = DeviceBlock(source + source_row * self.row_bytes)
        copy_on_gpu(target + target_row * self.row_bytes, block, rows * self.row_bytes, stream)


class DeviceStates:
    """States of an instance in its GPU's memory; see `headrace.core.sequence_state.SlotStates`.

    Open it with `open`; `close` it even if that failed. All methods are called on the instance's thread.

    Args:
        plan_states: the states.
        allocator: of the GPU; the buffers are booked in its account.
        on_device: makes the GPU current.

    Attributes:
        live: slots with states.
        client_outputs: addresses of clients' outputs by name, for each buffer slot: states among them are written there.
        buffer_slot: index of the buffer slot in which the next batch runs.
    """

    def __init__(
        self,
        plan_states: PlanStates,
        allocator: Allocator,
        on_device: AbstractContextManager[None],
    ) -> None:
        self._is_direct = plan_states.is_direct
        self._slots = 0 if self._is_direct else plan_states.slots
        self._states = [_StateBuffers(state, allocator) for state in plan_states.tensors]
        self._on_device = on_device
        self.live: set[int] = set()
        self.client_outputs: Sequence[Mapping[str, int]] = ()
        self.buffer_slot = 0

    def open(self, max_rows: int, stream: CudaStream) -> None:
        """Allocate the buffers; the GPU is current.

        Args:
            max_rows: rows of the largest batch, with padding.
            stream: stream on which the plan runs.

        Raises:
            DeviceError: the GPU has no memory left.
            NoRoom: the account has no room.
        """
        self._stream = stream
        for state in self._states:
            state.open(max_rows, self._slots, stream)

    def addresses(self, buffer_slot: int) -> dict[str, int]:
        """Return the addresses of the plan's state tensors in a buffer slot, by name."""
        result = {}
        for each in self._states:
            result[each.state.input_name] = each.pair[buffer_slot % 2].address
            result[each.state.output_name] = each.pair[1 - buffer_slot % 2].address
        return result

    def close(self) -> None:
        """Free the buffers; nothing runs any more."""
        for state in self._states:
            state.close()
        # The stream frees itself with its last reference; the device must be current then.
        if hasattr(self, "_stream"):
            del self._stream

    def reset(self, slot: int) -> None:
        """Queue copies of the initial values to the states of a slot."""
        self.live.add(slot)
        with self._on_device:
            for each in self._states:
                each.copy(self._current(each), slot, each.initial.address, 0, 1, self._stream)

    def release(self, slot: int) -> None:
        """The sequence of a slot has ended."""
        self.live.discard(slot)

    def key(self, slot: int) -> Hashable:
        """Return None: all states have constant shapes."""
        return None

    def load(self, rows: BatchSlots) -> dict[str, Array]:
        """Queue copies of the states of a batch to its rows, unless they are there."""
        if not self._is_direct:
            with self._on_device:
                for each in self._states:
                    for row, slot, count in _runs(rows.slots):
                        each.copy(each.pair[0].address, row, each.rows.address, slot, count, self._stream)
        return {}

    def save(self, outputs: Mapping[str, Array], rows: BatchSlots) -> None:
        """Make the outputs of the batch the states of its sequences.

        Raises:
            ExecutionLost: a copy was refused: some states may have been changed.
        """
        try:
            with self._on_device:
                if self._is_direct:
                    self._swap(rows)
                else:
                    self._scatter(rows)
        except DeviceError as error:
            raise ExecutionLost(f"the states of sequences are lost: {error}") from error

    def _current(self, each: _StateBuffers) -> int:
        """Return the address of the row of slot 0."""
        return (each.pair[self.buffer_slot] if self._is_direct else each.rows).address

    def _swap(self, rows: BatchSlots) -> None:
        """Read from the buffers that the batch has written; first complete them."""
        kept = sorted(self.live - rows.ready_slots)
        for each in self._states:
            before, after = each.pair[self.buffer_slot].address, each.pair[1 - self.buffer_slot].address
            if each.state.is_output:
                written = self.client_outputs[self.buffer_slot][each.state.output_name]
                each.copy(after, 0, written, 0, len(rows.slots), self._stream)
            for _, slot, count in _runs(kept):
                each.copy(after, slot, before, slot, count, self._stream)
        self.buffer_slot = 1 - self.buffer_slot

    def _scatter(self, rows: BatchSlots) -> None:
        """Copy the rows of the batch to their slots; every row has a request."""
        for each in self._states:
            name = each.state.output_name
            written = self.client_outputs[0][name] if each.state.is_output else each.pair[1].address
            for row, slot, count in _runs(rows.slots):
                each.copy(each.rows.address, slot, written, row, count, self._stream)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield neighbouring slots together: the first index in `slots`, its slot, and their count."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield start, slots[start], index - start
            start = index
