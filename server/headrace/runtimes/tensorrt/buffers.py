"""Memory for the batches of an instance: buffer slots, and tables of device-resident rows.

A buffer slot has all the memory that one batch needs, and serves one batch at a time. A row table holds the addresses
of rows that the GPU reads in place, in pinned memory; `gather` queues the kernel that reads them. The kernel is used
for a single row too, although a copy would do: see `headrace.runtimes.cuda.shared_memory`. The host writes a table while
nothing runs in its slot; the GPU reads it until the slot's batch is finished. Therefore every slot has its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from headrace.core.errors import Unsupported
from headrace.core.ledger import NoRoom
from headrace.core.scattered_rows import ScatteredRows
from headrace.core.tensor import PINNED, Array, ResidentRows
from headrace.runtimes.cuda.driver import CompletionEvent, CudaStream, DeviceError, OutOfDeviceMemory, current
from headrace.runtimes.cuda.kernels.launching import RowGather
from headrace.runtimes.cuda.memory import Allocator, DeviceBuffer, copy_address, copy_on_gpu, download, read_gpu, upload
from headrace.runtimes.cuda.peers import peer_copy
from headrace.runtimes.overlapped import ResidentInput
from headrace.runtimes.tensorrt.plan import PlanBindings, Shape, TensorBinding

logger = logging.getLogger("headrace.tensorrt")

_ADDRESS_BYTES = 8

# Batches of an instance whose output may be on the GPU at once, for the next step of a pipeline; each has the size of the largest
# batch. The outputs of further batches pass through host memory.
_RESIDENT_BATCHES = 8

# An input on this GPU of at least so many bytes, in at most so many pieces, is copied by the driver, with the bandwidth of the
# memory. The few blocks of the kernel are for the bus, and for many small pieces.
_COPIED_BYTES = 1 << 20
_MAX_COPIES = 8

# Thread blocks of the gather kernel. Few beside a model that computes: each occupies a multiprocessor, and a few
# saturate the bus. More on an idle GPU, for the latency of small batches.
SHARED_BLOCKS = 8
IDLE_BLOCKS = 32


class RowTable:
    """Addresses of the rows of a batch.

    Args:
        names: of the inputs.
        max_rows: rows in the largest batch.
        allocator: of the GPU.
    """

    def __init__(self, names: Iterable[str], max_rows: int, allocator: Allocator) -> None:
        part_bytes = max_rows * _ADDRESS_BYTES
        self._offsets = {name: index * part_bytes for index, name in enumerate(names)}
        self._buffer = allocator.pinned()
        self._buffer.reserve(len(self._offsets) * part_bytes)
        self._bytes = self._buffer.view((self._buffer.size_bytes,), np.dtype(np.uint8)).data

    def write(
        self,
        name: str,
        pinned_address: int,
        row_bytes: int,
        rows: int,
        total: int,
        resident_inputs: Iterable[ResidentInput],
    ) -> None:
        """Write the addresses of one input.

        Args:
            name: of the input.
            pinned_address: address of the slot's pinned memory for it, with the rows that are not resident.
            row_bytes: size of a row; nothing is written if 0.
            rows: of the batch, at least 1.
            total: rows that the kernel reads, at least `rows`: the last one is repeated.
            resident_inputs: those of the batch, of all inputs.
        """
        if not row_bytes:
            return
        addresses = list(range(pinned_address, pinned_address + rows * row_bytes, row_bytes))
        for input_name, first, values in resident_inputs:
            if input_name != name:
                continue
            if isinstance(values, ScatteredRows):
                addresses[first : first + len(values)] = _row_addresses(values, row_bytes)
            else:
                address = values.address
                # Without a batch dimension the whole tensor is one row, whatever its first dimension.
                count = values.shape[0] if rows > 1 else 1
                if count == 1:
                    addresses[first] = address
                else:
                    addresses[first : first + count] = range(address, address + count * row_bytes, row_bytes)
        addresses += [addresses[-1]] * (total - rows)
        struct.pack_into(f"={total}Q", self._bytes, self._offsets[name], *addresses)

    def address(self, name: str) -> int:
        """Address of an input's part of the table."""
        return self._buffer.address + self._offsets[name]

    def close(self) -> None:
        """Free the table; no kernel reads it any more."""
        del self._bytes
        self._buffer.free()


def _row_addresses(values: ScatteredRows, row_bytes: int) -> Sequence[int]:
    """Return the address of each row of an input in several pieces."""
    height = values.piece_shape[0]
    if height == 1:
        return values.addresses
    piece_bytes = height * row_bytes
    return [row for piece in values.addresses for row in range(piece, piece + piece_bytes, row_bytes)]


class RowGathers(dict[int, RowGather]):
    """The kernels that gather resident rows, by GPU; empty if the kernel is not available.

    Args:
        devices: numbers of the GPUs.
        name: file of the model, for the log.
    """

    def __init__(self, devices: Iterable[int], name: str) -> None:
        super().__init__()
        try:
            for device in devices:
                self[device] = RowGather(device)
        except (Unsupported, DeviceError) as error:
            self.close()
            logger.debug("%s does not read resident rows: %s", name, error)

    def close(self) -> None:
        """Unload the kernels; the instances have closed their executions."""
        while self:
            self.popitem()[1].close()


def gather(
    kernel: RowGather, stream: CudaStream, table: RowTable, rows: int, sizes: Mapping[str, tuple[int, int]], blocks: int
) -> None:
    """Queue the kernel that gathers inputs by a table.

    Args:
        kernel: to queue.
        stream: stream to queue on.
        table: read when the kernel runs, not before.
        rows: in the table.
        sizes: by input, the bytes of a row and the destination address of the first row.
        blocks: `SHARED_BLOCKS` or `IDLE_BLOCKS`.

    Raises:
        DeviceError: the driver refuses.
    """
    for name, (row_bytes, target) in sizes.items():
        if row_bytes:
            kernel.launch(stream, table.address(name), row_bytes, rows, rows, target, blocks)


def fetch_from_peers(
    resident_inputs: Iterable[ResidentInput],
    inputs: Mapping[str, Array],
    addresses: Mapping[str, int],
    gpu: int,
    stream: CudaStream,
) -> list[ResidentInput]:
    """Queue copies of rows on other GPUs to their places in a batch on this one, which is current.

    Args:
        resident_inputs: those of the batch; they stay alive until the stream has passed the copies.
        inputs: pinned arrays of the batch; rows of GPUs without a copy to this one are written there at once.
        addresses: by input, the address of the batch on this GPU; nothing else uses that memory now.
        gpu: number of this GPU.
        stream: stream to queue on, also for the work that reads the rows.

    Returns:
        The rows that this GPU reads: those copied, at their new addresses, and those that need no copy.

    Raises:
        HeadraceError: the driver refuses, or rows cannot be read.
    """
    local: list[ResidentInput] = []
    remote: list[_RemoteInput] = []
    for name, first, rows in resident_inputs:
        if isinstance(rows, ScatteredRows) or rows.device in (PINNED, gpu):
            local.append((name, first, rows))
        else:
            remote.append((name, first, rows))
    for name, first, rows in _joined(remote):
        values = inputs[name]
        copy = peer_copy(rows.device, gpu)
        if copy is None:
            start = values[:first].size
            values.reshape(-1)[start : start + rows.size] = np.asarray(rows).reshape(-1)
            continue
        target = addresses[name] + values[:first].nbytes
        copy.queue(target, rows.address, rows.nbytes, stream)
        local.append((name, first, replace(rows, address=target, device=gpu, host_copy=partial(read_gpu, gpu))))
    return local


def stays_large(resident: Iterable[ResidentRows]) -> bool:
    """Return True if rows of a batch that stay on the GPU take longer to copy to the host than a launch in stages costs."""
    return sum(rows.nbytes for rows in resident) >= _COPIED_BYTES


def copy_local_rows(
    name: str, values: Array, address: int, gpu: int, resident_inputs: Iterable[ResidentInput], stream: CudaStream
) -> bool:
    """Queue the copies of an input whose rows are all in the memory of this GPU, which is current.

    Rows that a copy from another GPU has written to their places need none.

    Args:
        name: name of the input.
        values: pinned array of the batch, for its shape.
        address: address of the batch on this GPU.
        gpu: number of this GPU.
        resident_inputs: those of the batch, after `fetch_from_peers`.
        stream: stream to queue on.

    Returns:
        False if nothing is queued, and the kernel has to gather the input: rows are elsewhere, or in many or small pieces.

    Raises:
        DeviceError: the driver refuses.
    """
    pieces: list[_RemoteInput] = []
    for input_name, first, rows in resident_inputs:
        if input_name == name:
            if isinstance(rows, ScatteredRows) or rows.device != gpu:
                return False
            pieces.append((name, first, rows))
    if sum(rows.nbytes for _, _, rows in pieces) != values.nbytes:
        return False
    targets = [(address + values[:first].nbytes, rows) for _, first, rows in _joined(pieces)]
    copies = [(target, rows) for target, rows in targets if target != rows.address]
    if copies and (values.nbytes < _COPIED_BYTES or len(copies) > _MAX_COPIES):
        return False
    for target, rows in copies:
        copy_address(target, rows.address, rows.nbytes, stream)
    return True


_RemoteInput = tuple[str, int, ResidentRows]


def _joined(resident_inputs: Sequence[_RemoteInput]) -> list[_RemoteInput]:
    """Join rows that follow each other in their owner's memory and in the batch: one copy for many requests."""
    joined: list[_RemoteInput] = []
    for name, first, rows in resident_inputs:
        if joined:
            name_before, start, before = joined[-1]
            follows = (name, first, rows.address) == (name_before, start + len(before), before.address + before.nbytes)
            if follows and rows.owner is before.owner and rows.shape[1:] == before.shape[1:]:
                shape = (len(before) + len(rows), *rows.shape[1:])
                joined[-1] = name, start, replace(before, shape=shape)
                continue
        joined.append((name, first, rows))
    return joined


class TensorBuffer:
    """Memory of one tensor on GPU and host, of constant size.

    Args:
        dtype: of the tensor.
        size_bytes: size of the largest tensor that is served.
        allocator: of the GPU.

    Attributes:
        size_bytes: as given.
    """

    def __init__(self, dtype: np.dtype[Any], size_bytes: int, allocator: Allocator) -> None:
        self._dtype = dtype
        self._device = allocator.device()
        self._pinned = allocator.pinned()
        try:
            self._device.reserve(size_bytes)
            self._pinned.reserve(size_bytes)
        except Exception:
            self.close()
            raise
        self.size_bytes = size_bytes
        # Padding is whatever the buffer contains: zeros, or rows of earlier batches, which were valid.
        self._pinned.view((self._pinned.size_bytes,), np.dtype(np.uint8)).fill(0)

    @property
    def address(self) -> int:
        """Address on the GPU."""
        return self._device.address

    @property
    def pinned_address(self) -> int:
        """Address of the pinned side, which the GPU reads too."""
        return self._pinned.address

    def view(self, shape: Shape) -> Array:
        """Return the pinned side as an array; the shape must fit."""
        return self._pinned.view(shape, self._dtype)

    def size_of(self, shape: Shape) -> int:
        """Return the bytes of a tensor of this shape."""
        return math.prod(shape) * self._dtype.itemsize

    def fits(self, shape: Shape) -> bool:
        """Return True if a tensor of this shape fits."""
        return self.size_of(shape) <= self.size_bytes

    def clear(self, stream: CudaStream) -> None:
        """Queue a copy of the whole pinned side to the GPU."""
        upload(self._device, self._pinned.view((self._pinned.size_bytes,), np.dtype(np.uint8)), stream)

    def send(self, values: Array, stream: CudaStream) -> None:
        """Queue the copy of a `view` to the GPU."""
        upload(self._device, values, stream)

    def fetch(self, values: Array, stream: CudaStream) -> None:
        """Queue the copy from the GPU into a `view`."""
        download(values, self._device, stream)

    def copy_to(self, target: int, size_bytes: int, stream: CudaStream) -> None:
        """Queue the copy of the first bytes to another address on the GPU."""
        copy_on_gpu(target, self._device, size_bytes, stream)

    def close(self) -> None:
        """Release the memory."""
        self._device.free()
        self._pinned.free()


class OutputPool:
    """GPU memory for outputs that stay on the GPU, for the next step of a pipeline.

    A block holds one output of one batch, and is free again once nothing refers to rows in it.

    Ownership: the thread that launches calls `take`; blocks come back on any thread, by the atomic operations of a deque: a lock
    could be taken twice by one thread, since the collector runs anywhere.

    Args:
        allocator: of the GPU.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._free: dict[str, deque[DeviceBuffer]] = {}
        self._room = _RESIDENT_BATCHES  # blocks of each output
        self._count: dict[str, int] = {}
        self._closed = False

    def take(self, name: str, size_bytes: int, like: Array) -> ResidentRows | None:
        """Return memory for an output of a batch; None if all blocks are in use, or the GPU has no room for another.

        Args:
            name: name of the output.
            size_bytes: size of the largest output of that name.
            like: array with the shape and dtype of the output.
        """
        free = self._free.setdefault(name, deque())
        try:
            block = free.popleft()
        except IndexError:
            count = self._count.get(name, 0)
            if count >= self._room:
                return None
            block = self._allocator.device()
            try:
                block.reserve(size_bytes)
            except (NoRoom, OutOfDeviceMemory):
                self._room = count
                return None
            self._count[name] = count + 1
        gpu = self._allocator.gpu
        owner, read = _LentBlock(self, name, block), partial(read_gpu, gpu)
        return ResidentRows(block.address, gpu, like.dtype, like.shape, owner, read)

    def give_back(self, name: str, block: DeviceBuffer) -> None:
        """Take back a block whose rows nothing refers to; any thread may call."""
        self._free[name].append(block)
        if self._closed:
            self._free_blocks()

    def close(self) -> None:
        """Free all blocks; those in use once nothing refers to their rows."""
        self._closed = True
        self._free_blocks()

    def _free_blocks(self) -> None:
        for free in self._free.values():
            while free:
                try:
                    block = free.popleft()
                except IndexError:  # another thread frees it
                    break
                with contextlib.suppress(DeviceError), current(self._allocator.gpu):
                    block.free()


class _LentBlock:
    """Owner of the rows in a block of a pool, which it gives back at its end."""

    __slots__ = ("_block", "_name", "_pool")

    def __init__(self, pool: OutputPool, name: str, block: DeviceBuffer) -> None:
        self._pool, self._name, self._block = pool, name, block

    def __del__(self) -> None:
        self._pool.give_back(self._name, self._block)


class BufferSlot:
    """Memory and events for one batch at a time.

    Args:
        index: among the slots of an instance.
        ports: tensors as clients see them.
        sizes: largest sizes of the tensors.
        inner: by the plan's name, the addresses of tensors that never leave the GPU; the slots share them.
        allocator: of the GPU.

    Attributes:
        inputs: by clients' name.
        outputs: by clients' name.
        addresses: of the plan's tensors, on the GPU.
        copied_in: event: the inputs are on the GPU.
        computed: event: the outputs are on the GPU.
        copied_out: events: the outputs are in pinned memory; by whether the host spins or sleeps until then.
        finished: the one of these two that is waited for.
        rows: addresses of the batch's rows; None if it takes no resident rows.
        resident_inputs: keeps those alive from launch to finish.
        resident_outputs: outputs of the batch that stay on the GPU, by name.
    """

    def __init__(
        self, index: int, ports: PlanBindings, sizes: BufferSizes, inner: Mapping[str, int], allocator: Allocator
    ) -> None:
        self.index = index
        self.inputs: dict[str, TensorBuffer] = {}
        self.outputs: dict[str, TensorBuffer] = {}
        self.addresses = dict(inner)
        self.rows: RowTable | None = None
        self.resident_inputs: list[ResidentInput] = []
        self.resident_outputs: dict[str, ResidentRows] = {}
        try:
            for port in ports.inputs:
                self._add(self.inputs, port, sizes.inputs, allocator)
            for port in ports.outputs:
                self._add(self.outputs, port, sizes.outputs, allocator)
            self.copied_in, self.computed = CompletionEvent(), CompletionEvent()
            self.copied_out = {spins: CompletionEvent(spins) for spins in (False, True)}
            self.finished = self.copied_out[False]
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Release everything; nothing runs any more."""
        for memory in (*self.inputs.values(), *self.outputs.values()):
            memory.close()
        self.resident_inputs, self.resident_outputs = [], {}
        if self.rows is not None:
            self.rows.close()
        # Events free themselves with their last reference; the device must be current then.
        for name in ("copied_in", "computed", "copied_out", "landing"):
            if hasattr(self, name):
                delattr(self, name)

    def _add(
        self, memories: dict[str, TensorBuffer], port: TensorBinding, sizes: Mapping[str, int], allocator: Allocator
    ) -> None:
        for name, dtype in port.client_tensors.items():
            memories[name] = TensorBuffer(dtype, sizes[name], allocator)
        if port.stage is None:
            self.addresses[port.tensor] = memories[port.tensor].address


class BufferSizes:
    """Largest sizes of tensors in bytes.

    Attributes:
        inputs: by clients' name.
        outputs: by clients' name.
        inner: by the plan's name, of tensors that never leave the GPU.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.inner: dict[str, int] = {}

    def add(self, ports: PlanBindings, plan_inputs: Mapping[str, Shape], plan_outputs: Mapping[str, Shape]) -> None:
        """Raise the sizes so that a batch fits.

        Args:
            ports: tensors as clients see them.
            plan_inputs: shapes of the plan's inputs.
            plan_outputs: shapes of its outputs.
        """
        for side, sizes_of_side, shapes in (
            (ports.inputs, self.inputs, plan_inputs),
            (ports.outputs, self.outputs, plan_outputs),
        ):
            outside = ports.client_shapes(side, shapes)
            for port in side:
                for name, dtype in port.client_tensors.items():
                    _raise_to(sizes_of_side, name, outside[name], dtype)
                if port.stage is not None:
                    _raise_to(self.inner, port.tensor, shapes[port.tensor], port.dtype)


def _raise_to(sizes: dict[str, int], name: str, shape: Shape, dtype: np.dtype[Any]) -> None:
    sizes[name] = max(sizes.get(name, 0), math.prod(shape) * dtype.itemsize)
