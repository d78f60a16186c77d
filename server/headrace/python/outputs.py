"""Tensors between the server and the process of a Python model instance: slots, requests written, and results read.

The model's process runs foreign code, so everything that it sends is checked: offsets against the memory, datatypes and shapes
against the configuration. Text is copied before it is parsed. Numbers in an output may change under the server, which affects
only the responses of that model.
"""

from __future__ import annotations

import json
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from headrace_model import protocol
from headrace_model.channel import Frames
from headrace_model.protocol import (
    COUNT,
    FIRST_BATCH,
    HEADER,
    LENGTH,
    MEMBER,
    OUTPUT,
    PARAMETERS,
    REGION,
    SPILL,
    TENSOR,
    ProtocolError,
    dims_struct,
)
from headrace_model.slots import START, Slot, SlotLease, aligned

from headrace.core.errors import (
    Cancelled,
    Conflict,
    HeadraceError,
    ModelFailed,
    NotFound,
    Unavailable,
    Unsupported,
)
from headrace.core.heap import IDLE_MEMORY
from headrace.core.request import ParameterValue
from headrace.core.tensor import Array, IpcMemory, ipc_memory
from headrace.runtimes.base import InputRefused
from headrace.runtimes.members import BatchMember, LateResult, MemberOutputs, MemberResult, Rescheduled

# Open requests of an instance without a setting, as `max_open_requests` of a configuration has it.
MAX_OPEN_REQUESTS = 256
# Slots of an instance; while all are in use by responses, outputs are copied.
MAX_SLOTS = 8
_MOST_DIMS = 32
# A process must not make the server copy more: the memory file of a slot may have holes, which cost the process nothing.
MAX_BODY_BYTES = 64 << 20
MAX_TEXT_BYTES = 1 << 30
_ERRORS: dict[int, Callable[[str], HeadraceError]] = {
    protocol.NOT_FOUND: NotFound,
    protocol.INVALID_ARG: InputRefused,
    protocol.UNAVAILABLE: Unavailable,
    protocol.UNSUPPORTED: Unsupported,
    protocol.ALREADY_EXISTS: Conflict,
    protocol.CANCELLED: Cancelled,
}


class SlotPool:
    """The slots of one process of an instance.

    Ownership: one thread takes slots; any thread may drop a lease or close the pool.

    Args:
        name: of the instance, for diagnosis.
        size_bytes: initial size of a slot.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        self._name = f"headrace {name}"
        self._size_bytes = size_bytes
        self._slots: list[Slot] = []
        self._free: deque[int] = deque()
        self._taken = self._seen = 0
        self._trimmed: set[int] = set()  # free slots whose memory is returned
        IDLE_MEMORY.add(self)

    def take(self) -> SlotLease:
        """Return a free slot, or a new one; raises OSError if there is no memory."""
        slots = self._slots
        self._taken += 1
        try:
            index = self._free.popleft()
            self._trimmed.discard(index)
            return SlotLease(self._free, index, slots[index], is_new=False)
        except IndexError:  # none is free, or the pool is closed
            slots.append(Slot.create(self._name, self._size_bytes))
            return SlotLease(self._free, len(slots) - 1, slots[-1], is_new=True)

    def close(self) -> None:
        """Free the memory of the slots that no lease uses, those of leases with their end: the process is gone.

        Its connection may be referenced longer, and a process that has used up the memory of the machine leaves it in a slot.
        """
        self._free.clear()
        self._slots = []

    def trim(self) -> None:
        """Return idle memory to the system if it was not used since the last call; any thread may call."""
        seen, self._seen = self._seen, self._taken
        if seen != self._taken:
            return
        slots = self._slots
        for _ in range(len(self._free)):
            with suppress(IndexError):  # a batch takes the last one just now
                index = self._free.pop()
                if index not in self._trimmed:
                    slots[index].release()
                    self._trimmed.add(index)
                self._free.appendleft(index)

    @property
    def is_exhausted(self) -> bool:
        """True if the next batch would need one slot too many: outputs must be copied."""
        return not self._free and len(self._slots) >= MAX_SLOTS


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Tensors of a Python model, as its process sees them.

    Attributes:
        model: name of the model, for errors.
        inputs, outputs: names and datatype codes (`headrace_model.protocol`) in the order of the configuration.
        batched: the first dimension is the batch.
        decoupled: a request has any number of responses.
        max_open: open requests of an instance, above which it takes no further batch.
        iterative: the model may schedule a request again.
    """

    model: str
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    batched: bool
    decoupled: bool = False
    max_open: int = MAX_OPEN_REQUESTS
    iterative: bool = False


@dataclass(slots=True, eq=False)
class PreparedBatch:
    """Memory of the next batch.

    Attributes:
        lease: its slot.
        arrays: arrays of numeric inputs in the slot, with their offsets, by name.
        end: first offset behind them.
    """

    lease: SlotLease
    arrays: dict[str, tuple[Array, int]]
    end: int


def prepare(lease: SlotLease, like: Mapping[str, Array], rows: int, batched: bool) -> PreparedBatch:
    """Lay out the numeric inputs of a batch in a slot; arguments as in `HasBatchMemory.batch_arrays`."""
    slot, end = lease.slot, START
    places: list[tuple[str, np.dtype[np.generic], tuple[int, ...], int]] = []
    for name, array in like.items():
        if not array.dtype.hasobject:
            shape = (rows, *array.shape[1:]) if batched else array.shape
            places.append((name, array.dtype, shape, end))
            end = aligned(end + array.dtype.itemsize * math.prod(shape))
    slot.reserve(end)
    memory = slot.memory
    arrays: dict[str, tuple[Array, int]] = {}
    for name, dtype, shape, offset in places:
        arrays[name] = np.ndarray(shape, dtype, memory, offset), offset
    return PreparedBatch(lease, arrays, end)


class SentRegions:
    """The regions of GPU memory that one process has received, and perhaps opened.

    The process closes a region when the server has dropped it: a frame names it, which the process reads between two batches.

    Ownership: `send` belongs to the instance's thread; the last reference to a region is dropped by any thread.

    Args:
        frames: socket to the process.
    """

    def __init__(self, frames: Frames) -> None:
        # A region may outlive the process and its slots.
        self._frames = weakref.ref(frames)
        self._numbers: set[int] = set()
        self._unsent: deque[int] = deque()

    def send(self, memory: IpcMemory) -> bytes:
        """Return the record of a region, which the caller sends to the process."""
        if memory.number not in self._numbers:
            self._numbers.add(memory.number)
            weakref.finalize(memory, self._close, memory.number).atexit = False
        if self._unsent:
            self._send_closed()
        return REGION.pack(memory.number, memory.device, memory.handle)

    def _close(self, number: int) -> None:
        self._numbers.discard(number)
        self._unsent.append(number)
        self._send_closed()

    def _send_closed(self) -> None:
        """Send the numbers of dropped regions; those that the socket has no room for are sent later."""
        frames = self._frames()
        with suppress(IndexError):  # another thread has sent the rest
            while frames is not None:
                number = self._unsent.popleft()
                try:
                    frames.send_now(protocol.CLOSE, number)
                except BlockingIOError:  # the process runs a batch
                    self._unsent.append(number)
                    return
                except OSError:  # the process is dead, and the driver has closed its regions
                    return


class RequestWriter:
    """Encodes RUN frames.

    Args:
        tensors: tensors of the model.
    """

    def __init__(self, tensors: ModelTensors) -> None:
        self._inputs = {name: (index, code) for index, (name, code) in enumerate(tensors.inputs)}
        self._output_bits = {name: 1 << index for index, (name, _code) in enumerate(tensors.outputs)}
        self._masks: dict[tuple[str, ...], int] = {(): 0}
        self._has_masks = len(tensors.outputs) <= protocol.MAX_MASKED_OUTPUTS

    def write(
        self,
        batch: PreparedBatch,
        inputs: Mapping[str, Array],
        members: Sequence[BatchMember],
        regions: SentRegions | None = None,
    ) -> tuple[bytes, int]:
        """Encode a batch; inputs that are neither in the slot nor in the memory of a GPU are copied into the slot.

        Args:
            batch: memory of the batch.
            inputs: arrays of the batch by name.
            members: requests of the batch.
            regions: regions of the process; None if no member has inputs of its own.

        Returns:
            Body and flags of RUN.

        Raises:
            OSError: there is no memory.
        """
        parts = [COUNT.pack(len(inputs))]
        for name, array in inputs.items():
            index, code = self._inputs[name]
            offset, size, flags = self._place(batch, name, array)
            ndim = array.ndim
            parts.append(TENSOR.pack(index, code, ndim, flags, 0, offset, size))
            parts.append(dims_struct(ndim).pack(*array.shape))
        if regions is not None and members[0].inputs:
            separate = self._separate(batch, members, regions)
            parts = [COUNT.pack(len(inputs) + len(separate)), *parts[1:], *separate]
        pack = MEMBER.pack
        for member in members:
            rows, name, parameters, outputs, deadline_ns, priority, *_others = member
            id_bytes = name.encode("utf-8", "surrogateescape") if name else b""
            text = json.dumps(dict(parameters)).encode() if parameters else b""
            mask = self._mask(outputs) if outputs else 0
            first_batch, index = (0, -1) if member.open is None else member.open.key
            parts.append(pack(rows, len(id_bytes), len(text), index + 1, mask, deadline_ns, priority, 0))
            if first_batch:
                parts.append(FIRST_BATCH.pack(first_batch))
            if name:
                parts.append(id_bytes)
            if text:
                parts.append(text)
        body = b"".join(parts)
        slot = batch.lease.slot
        slot.clear_cancelled(len(members))
        return slot.spill(body, batch.end)

    def _separate(self, batch: PreparedBatch, members: Sequence[BatchMember], regions: SentRegions) -> list[bytes]:
        """Return the record of each input that its member has for itself."""
        records: list[bytes] = []
        for number, member in enumerate(members):
            for name, array in member.inputs.items():
                index, code = self._inputs[name]
                ndim, dims = array.ndim, dims_struct(array.ndim).pack(*array.shape)
                memory = ipc_memory(array)
                if memory is None:
                    offset, size, flags = self._place(batch, name, np.asarray(array))
                    flags |= protocol.SEPARATE
                    records.append(TENSOR.pack(index, code, ndim, flags, number, offset, size) + dims)
                else:
                    rows: Any = array
                    place = rows.address - memory.address, array.nbytes
                    flags = protocol.SEPARATE | protocol.DEVICE
                    records.append(TENSOR.pack(index, code, ndim, flags, number, *place) + dims + regions.send(memory))
        return records

    def _place(self, batch: PreparedBatch, name: str, array: Array) -> tuple[int, int, int]:
        """Return offset, size and flags of an input, after copying it into the slot if it is not there."""
        prepared = batch.arrays.get(name)
        if prepared is not None and prepared[0] is array:
            return prepared[1], array.nbytes, 0
        slot, offset = batch.lease.slot, batch.end
        if array.dtype.hasobject:
            content = protocol.pack_texts(array)
            batch.end = aligned(offset + len(content))
            slot.reserve(batch.end)
            slot.write(offset, content)
            return offset, len(content), protocol.TEXT
        batch.end = aligned(offset + array.nbytes)
        slot.reserve(batch.end)
        np.copyto(np.ndarray(array.shape, array.dtype, slot.memory, offset), array)
        return offset, array.nbytes, 0

    def _mask(self, outputs: tuple[str, ...]) -> int:
        mask = self._masks.get(outputs)
        if mask is None:
            if not self._has_masks:
                return 0
            if len(self._masks) > 1024:
                self._masks = {(): 0}
            mask = self._masks[outputs] = sum(self._output_bits[name] for name in outputs)
        return mask


class ResultReader:
    """Decodes DONE and FAILED frames.

    Args:
        tensors: tensors of the model.
    """

    def __init__(self, tensors: ModelTensors) -> None:
        self._model = tensors.model
        self._outputs = tensors.outputs
        self._dtypes = [protocol.DTYPES[code] for _name, code in tensors.outputs]
        self._batched = tensors.batched
        self._iterative = tensors.iterative

    def done(
        self, frame: memoryview, lease: SlotLease, members: Sequence[BatchMember], copy: bool
    ) -> list[MemberResult]:
        """Return the results of a batch.

        Args:
            frame: header and body.
            lease: its slot; arrays of the results hold it.
            members: requests of the batch.
            copy: copy the outputs, so that the slot is free at once.

        Raises:
            ProtocolError: the frame does not follow the protocol.
        """
        _version, _kind, flags, _slot, _number, count, _size = HEADER.unpack_from(frame)
        body: bytes = bytes(frame[HEADER.size :])
        if flags & protocol.SPILLED:
            offset, size = SPILL.unpack_from(body)
            if size > MAX_BODY_BYTES:
                raise ProtocolError(f"a body of {size} bytes")
            body = lease.slot.read(offset, size)
        if count != len(members):
            raise ProtocolError(f"results of {count} members for a batch of {len(members)}")
        at = count
        results: list[MemberResult] = []
        if body.count(0, 0, count) == count:
            results.extend({} for _ in range(count))
        else:
            for code in body[:count]:
                if code == protocol.OK:
                    results.append({})
                    continue
                if code == protocol.OPEN:
                    results.append(LateResult())
                    continue
                if code == protocol.RESCHEDULED:
                    if not self._iterative:
                        raise ProtocolError("a request of a model without iterative sequences is scheduled again")
                    results.append(Rescheduled())
                    continue
                text, at = _text(body, at)
                results.append(_ERRORS.get(code, ModelFailed)(text or "the model returned an error without a text"))
        at = self._read_outputs(body, at, lease, members, results, copy)
        while at < len(body):
            at = _read_parameters(body, at, results)
        return results

    def _read_outputs(
        self,
        body: bytes,
        at: int,
        lease: SlotLease,
        members: Sequence[BatchMember],
        results: list[MemberResult],
        copy: bool,
    ) -> int:
        """Read the outputs into the results; returns the offset behind them."""
        slot = lease.slot
        base: Array | None = None
        (tensors,) = COUNT.unpack_from(body, at)
        at += COUNT.size
        for _ in range(tensors):
            member, index, code, ndim, _memory, offset, size = OUTPUT.unpack_from(body, at)
            at += OUTPUT.size
            if index >= len(self._outputs) or ndim > _MOST_DIMS or code not in protocol.DTYPES:
                raise ProtocolError(f"output {index} of the datatype {code} with {ndim} dims")
            shape = dims_struct(ndim).unpack_from(body, at)
            at += 8 * ndim
            name, declared = self._outputs[index]
            if code != declared:
                self._refuse(results, member, name, code, declared)
                continue
            if copy or code == protocol.BYTES:
                array = _copied(slot, offset, size, code, _checked(shape))
            else:
                dtype = self._dtypes[index]
                if size != dtype.itemsize * math.prod(_checked(shape)):
                    raise ProtocolError(f"output {index} of {size} bytes with the shape {shape}")
                slot.check_written(size)
                if base is None or offset + size > len(base):  # not the slot's size: a text may have extended the map
                    slot.reach(offset, size)
                    base = lease.array()
                array = np.ndarray(shape, dtype, base, offset)
            self._assign(results, members, member, name, array)
        return at

    def _assign(
        self, results: list[MemberResult], members: Sequence[BatchMember], member: int, name: str, array: Array
    ) -> None:
        if member == protocol.ALL_MEMBERS and len(members) == 1:
            member = 0
        if member != protocol.ALL_MEMBERS:
            if member >= len(results):
                raise ProtocolError(f"an output of member {member} of {len(results)}")
            result = results[member]
            if isinstance(result, dict):
                result[name] = array
            return
        rows = sum([each.rows for each in members])
        if not array.shape or array.shape[0] != rows:
            error = ModelFailed(
                f"model '{self._model}' returned output '{name}' with the shape {list(array.shape)} for {rows} rows. The model "
                "is at fault, not the request"
            )
            results[:] = [error] * len(results)
            return
        start = 0
        for result, each in zip(results, members, strict=True):
            stop = start + each.rows
            if type(result) is dict:
                result[name] = array[start:stop]
            start = stop

    def _refuse(self, results: list[MemberResult], member: int, name: str, code: int, declared: int) -> None:
        """Put an error in the place of results whose output has another datatype than the configuration."""
        error = wrong_datatype(self._model, name, code, declared)
        for index in range(len(results)) if member == protocol.ALL_MEMBERS else (member,):
            if index < len(results):
                results[index] = error

    def failed(self, frame: memoryview) -> tuple[int, str, str]:
        """Return code, text for clients and traceback of a FAILED frame; raises ProtocolError."""
        body = bytes(frame[HEADER.size :])
        if not body:
            raise ProtocolError("an empty error")
        text, at = _text(body, 1)
        return body[0], text, body[at:].decode("utf-8", "replace")


class ResponseOutputs:
    """Decodes the outputs of a RESPONSE frame; they are copied.

    Args:
        tensors: tensors of the model.
    """

    def __init__(self, tensors: ModelTensors) -> None:
        self._model = tensors.model
        self._outputs = tensors.outputs

    def read(
        self, body: bytes, at: int, count: int, memory: Slot | bytes, start: int, size_bytes: int
    ) -> tuple[dict[str, Array], HeadraceError | None, int]:
        """Read outputs.

        Args:
            body: the frame.
            at: offset of the first output in it.
            count: number of outputs.
            memory: memory with the values: a slot, or the frame.
            start: offset of the values in the memory.
            size_bytes: bytes of the values.

        Returns:
            The outputs by name, the error of an output with another datatype than the configuration or None, and the offset
            behind the outputs.

        Raises:
            ProtocolError: the frame does not follow the protocol.
        """
        outputs: dict[str, Array] = {}
        error: HeadraceError | None = None
        for _ in range(count):
            if at + OUTPUT.size > len(body):
                raise ProtocolError("a response ends within an output")
            _member, index, code, ndim, _memory, offset, size = OUTPUT.unpack_from(body, at)
            at += OUTPUT.size
            if index >= len(self._outputs) or ndim > _MOST_DIMS or code not in protocol.DTYPES:
                raise ProtocolError(f"output {index} of the datatype {code} with {ndim} dims")
            if at + 8 * ndim > len(body) or offset + size > size_bytes:
                raise ProtocolError(f"output {index} of {size} bytes at {offset} exceeds its response")
            shape = _checked(dims_struct(ndim).unpack_from(body, at))
            at += 8 * ndim
            name, declared = self._outputs[index]
            if code != declared:
                error = wrong_datatype(self._model, name, code, declared)
                continue
            outputs[name] = _copied(memory, start + offset, size, code, shape)
        return outputs, error, at


def _copied(memory: Slot | bytes, offset: int, size: int, code: int, shape: tuple[int, ...]) -> Array:
    """Return a copy of a tensor in a slot or a frame; raises ProtocolError if its size is not that of its shape."""
    if code == protocol.BYTES:
        if size > MAX_TEXT_BYTES:
            raise ProtocolError(f"an output has {size} bytes of text, at most {MAX_TEXT_BYTES} are allowed")
        content = memory[offset : offset + size] if isinstance(memory, bytes) else memory.read(offset, size)
        return protocol.unpack_texts(content, shape)
    dtype = protocol.DTYPES[code]
    if size != dtype.itemsize * math.prod(shape):
        raise ProtocolError(f"an output of {size} bytes with the shape {shape}")
    if isinstance(memory, bytes):
        return np.ndarray(shape, dtype, memory, offset).copy()
    memory.reach(offset, size)
    memory.check_written(size)
    return np.ndarray(shape, dtype, memory.memory, offset).copy()


def wrong_datatype(model: str, name: str, code: int, declared: int) -> ModelFailed:
    """Return the error of an output with another datatype than the configuration; datatypes as codes."""
    return ModelFailed(
        f"model '{model}' returned output '{name}' as {protocol.DATATYPES[code][0]}, its configuration declares "
        f"{protocol.DATATYPES[declared][0]}. The model is at fault, not the request: convert the output in its code"
    )


def _read_parameters(body: bytes, at: int, results: list[MemberResult]) -> int:
    """Read the parameters of one response into its result; returns the offset behind them."""
    if at + PARAMETERS.size > len(body):
        raise ProtocolError("parameters of a response end within their head")
    member, size = PARAMETERS.unpack_from(body, at)
    at += PARAMETERS.size
    if member >= len(results) or size > protocol.MAX_PARAMETER_BYTES or at + size > len(body):
        raise ProtocolError(f"{size} bytes of parameters of the response {member}")
    parameters = json.loads(body[at : at + size])
    if not is_parameters(parameters):
        raise ProtocolError(f"parameters of the response {member} that are none")
    result = results[member]
    if isinstance(result, dict):
        results[member] = MemberOutputs(result, parameters)
    end: int = at + size
    return end


def is_parameters(value: object) -> TypeGuard[dict[str, ParameterValue]]:
    """Return True for parameters of a response."""
    return isinstance(value, dict) and all(map(_is_parameter, [*value, *value.values()]))


def _is_parameter(value: object) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if isinstance(value, str):
        return value == value.encode("utf-8", "ignore").decode()  # without single surrogates
    return isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value))


def error_of(code: int, text: str) -> HeadraceError:
    """Return the error for a code of the model's process and its text for clients."""
    return _ERRORS.get(code, ModelFailed)(text)


def _text(body: bytes, at: int) -> tuple[str, int]:
    if at + LENGTH.size > len(body):
        raise ProtocolError("a result without the text of its error")
    (size,) = LENGTH.unpack_from(body, at)
    at += LENGTH.size
    if at + size > len(body):
        raise ProtocolError("the text of an error exceeds its frame")
    return body[at : at + size].decode("utf-8", "replace"), at + size


def _checked(shape: tuple[int, ...]) -> tuple[int, ...]:
    if shape and min(shape) < 0:
        raise ProtocolError(f"an output with the shape {shape}")
    return shape
