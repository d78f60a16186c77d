"""Reads a batch that the server sent into the model's objects, and writes the model's results for the server.

`BatchReader` decodes RUN: arrays are views of the slot, and nothing is copied but text. `ResultWriter` encodes DONE and FAILED.
Outputs of the members are written as one tensor where that is possible. An output that is a contiguous view of an input stays
where it is.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Sequence, Tuple

import numpy as np

from headrace_model.device import DlpackError, IpcArray, IpcHandleError, IpcRegions
from headrace_model.protocol import (
    ALL_MEMBERS,
    BF16,
    BYTES,
    CODE_OF_DTYPE,
    COUNT,
    DEVICE,
    DTYPES,
    FIRST_BATCH,
    HEADER,
    INVALID_ARG,
    LENGTH,
    MEMBER,
    OPEN,
    OPEN_MEMBERS,
    OUTPUT,
    PARAMETERS,
    REGION,
    RESCHEDULED,
    SEPARATE,
    SPILL,
    SPILLED,
    TENSOR,
    TEXT,
    UNAVAILABLE,
    WrongResultError,
    dims_struct,
    pack_texts,
    unpack_texts,
)
from headrace_model.slots import START, Slot, aligned

_Array = Any
# Index and datatype code of an output, by its name.
Declared = Dict[str, Tuple[int, int]]
# Outputs of one member by index; or its error: code and text. None in their place: the member is answered later.
MemberOutputs = Dict[int, _Array]
MemberError = Tuple[int, str]
# Result of a member that the model has scheduled again.
SCHEDULED_AGAIN: MemberError = (RESCHEDULED, "")


class Member:
    """One request of a batch.

    Attributes:
        rows: rows of the request.
        id: request id of the caller.
        parameters: of the request.
        output_names: requested outputs; empty for all.
        deadline_ns: monotonic deadline; 0 for none.
        priority: requested priority level.
        open_key: number of its first batch and its index there, for a later step of a request that is open; None for any other.
    """

    __slots__ = ("deadline_ns", "id", "open_key", "output_names", "parameters", "priority", "rows")

    def __init__(
        self,
        rows: int,
        request_id: str,
        parameters: dict[str, Any],
        output_names: tuple[str, ...],
        deadline_ns: int,
        priority: int,
        open_key: tuple[int, int] | None = None,
    ) -> None:
        self.open_key = open_key
        self.rows = rows
        self.id = request_id
        self.parameters = parameters
        self.output_names = output_names
        self.deadline_ns = deadline_ns
        self.priority = priority


class ReceivedBatch:
    """A batch in a slot.

    Attributes:
        number: number of the batch.
        slot_index, slot: where it lies.
        inputs: arrays of all rows by name.
        members: its requests.
        end: first offset behind the inputs.
        parts: rows of each member by input, for models that get requests; a model may return them as they are.
        separate: the input of each member, by name, for inputs that lie on a GPU for some of them: arrays and `IpcArray`; None
            for a member in `refused`.
        refused: errors of members whose inputs cannot be read, by index.
    """

    __slots__ = ("end", "inputs", "members", "number", "parts", "refused", "separate", "slot", "slot_index")

    def __init__(
        self, number: int, slot_index: int, slot: Slot, inputs: dict[str, _Array], members: list[Member], end: int
    ) -> None:
        self.number = number
        self.slot_index = slot_index
        self.slot = slot
        self.inputs = inputs
        self.members = members
        self.end = end
        self.parts: dict[str, list[_Array]] = {}
        self.separate: dict[str, list[Any]] = {}
        self.refused: dict[int, MemberError] = {}


_NO_PARAMETERS: dict[str, Any] = {}


class BatchReader:
    """Decodes batches.

    Args:
        inputs: names of the model's inputs, in order.
        outputs: names of the model's outputs, in order.

    Attributes:
        regions: regions of GPU memory with inputs.
    """

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.regions = IpcRegions()
        self._inputs = inputs
        self._outputs = outputs
        self._masks: dict[int, tuple[str, ...]] = {0: ()}

    def read(self, frame: bytes, slot: Slot) -> ReceivedBatch:
        """Decode a RUN frame.

        Args:
            frame: header and body.
            slot: the slot that it names.

        Raises:
            ProtocolError: a tensor is not in the slot.
        """
        _version, _kind, flags, slot_index, number, count, _size = HEADER.unpack_from(frame)
        slot.begin(number)
        body, at, end = frame, HEADER.size, START
        if flags & SPILLED:
            offset, size = SPILL.unpack_from(frame, at)
            body, at, end = slot.read(offset, size), 0, max(end, offset + size)
        (tensors,) = COUNT.unpack_from(body, at)
        at += COUNT.size
        inputs: dict[str, _Array] = {}
        separate: dict[str, list[Any]] = {}
        refused: dict[int, MemberError] = {}
        for _ in range(tensors):
            index, code, ndim, tensor_flags, member, offset, size = TENSOR.unpack_from(body, at)
            at += TENSOR.size
            dims = dims_struct(ndim).unpack_from(body, at)
            at += 8 * ndim
            if tensor_flags & DEVICE:
                region = REGION.unpack_from(body, at)
                at += REGION.size
                source, error = self._device_array(self._inputs[index], region, offset, dims, code)
                separate.setdefault(self._inputs[index], []).append(source)
                if error is not None:
                    refused[member] = error
                continue
            end = max(end, offset + size)
            if tensor_flags & SEPARATE:
                slot.reach(offset, size)
                array = np.ndarray(dims, DTYPES[code], slot.memory, offset)
                separate.setdefault(self._inputs[index], []).append(array)
            elif tensor_flags & TEXT:
                inputs[self._inputs[index]] = unpack_texts(slot.read(offset, size), dims)
            else:
                slot.reach(offset, size)
                inputs[self._inputs[index]] = np.ndarray(dims, DTYPES[code], slot.memory, offset)
        members = self._members(body, at, count)
        batch = ReceivedBatch(number, slot_index, slot, inputs, members, end)
        if separate:
            batch.separate, batch.refused = separate, refused
        return batch

    def _device_array(
        self, name: str, region: tuple[int, int, bytes], offset: int, dims: tuple[int, ...], code: int
    ) -> tuple[IpcArray | None, MemberError | None]:
        """Return an input in the memory of a GPU, or the error of its member."""
        number, device_id, handle = region
        try:
            return IpcArray(self.regions.region(number, handle, device_id), offset, dims, code), None
        except IpcHandleError as error:
            text = f"the CUDA shared memory cannot be opened ({error}): its owner must live and keep it allocated"
            return None, (INVALID_ARG, f"input '{name}': {text}")
        except DlpackError as error:
            return None, (UNAVAILABLE, f"input '{name}': the GPU cannot be used in the model's process ({error})")

    def _members(self, body: bytes, at: int, count: int) -> list[Member]:
        members: list[Member] = []
        for _ in range(count):
            rows, id_bytes, parameter_bytes, step, mask, deadline_ns, priority, _ = MEMBER.unpack_from(body, at)
            at += MEMBER.size
            open_key = None
            if step:
                open_key = FIRST_BATCH.unpack_from(body, at)[0], step - 1
                at += FIRST_BATCH.size
            name = ""
            if id_bytes:
                name = body[at : at + id_bytes].decode("utf-8", "surrogateescape")
                at += id_bytes
            parameters = _NO_PARAMETERS
            if parameter_bytes:
                parameters = json.loads(body[at : at + parameter_bytes])
                at += parameter_bytes
            members.append(
                Member(
                    rows, name, parameters, self._masks.get(mask) or self._named(mask), deadline_ns, priority, open_key
                )
            )
        return members

    def _named(self, mask: int) -> tuple[str, ...]:
        names = self._masks.get(mask)
        if names is None:
            names = self._masks[mask] = tuple(
                name for index, name in enumerate(self._outputs) if index < 64 and mask & (1 << index)
            )
        return names


class ResultWriter:
    """Encodes results.

    Args:
        outputs: names and datatype codes of the model's outputs, in order.
    """

    def __init__(self, outputs: Sequence[tuple[str, int]]) -> None:
        self.declared: Declared = {name: (index, code) for index, (name, code) in enumerate(outputs)}
        self._names = [name for name, _code in outputs]
        self._codes = [code for _name, code in outputs]
        self._dtypes = [DTYPES[code] for code in self._codes]

    def done_batch(self, batch: ReceivedBatch, outputs: Any) -> tuple[bytes, int]:
        """Encode outputs of the whole batch.

        Args:
            batch: the batch.
            outputs: arrays of all rows by name, as the model returned them.

        Returns:
            Body and flags of DONE.

        Raises:
            WrongResultError: they are no arrays by name, or have a dtype that no datatype has.
            OSError: there is no memory for them.
        """
        if not isinstance(outputs, dict):
            raise WrongResultError(f"the model returned {type(outputs).__name__}, not a dict of arrays")
        writer = _Outputs(batch, self._names)
        for name, array in outputs.items():
            if name in self.declared:
                index = self.declared[name][0]
                array = self._fit(index, _as_array(name, array))
                writer.add(ALL_MEMBERS, index, self._code(name, array), array)
        return self._finish(batch, bytes(len(batch.members)), writer)

    def done_members(
        self,
        batch: ReceivedBatch,
        results: Sequence[MemberOutputs | MemberError | None],
        parameters: dict[int, str] | None = None,
    ) -> tuple[bytes, int]:
        """Encode the results of the members.

        Args:
            batch: the batch.
            results: of each member, arrays by output index, or code and text of an error; None for one that is answered later.
            parameters: of responses, as JSON, by index of their member; None for none.

        Returns:
            Body and flags of DONE.

        Raises:
            WrongResultError: an output has a dtype that no datatype has.
            OSError: there is no memory for them.
        """
        codes = bytearray(len(results))
        texts: list[bytes] = []
        by_output: dict[int, list[tuple[int, _Array]]] = {}
        for member, result in enumerate(results):
            if result is None:
                codes[member] = OPEN
                continue
            if isinstance(result, tuple):
                codes[member] = result[0]
                if result is SCHEDULED_AGAIN:
                    continue
                text = result[1].encode("utf-8", "replace")[:_MAX_TEXT]
                texts.append(LENGTH.pack(len(text)) + text)
                continue
            for index, array in result.items():
                if type(array) is np.ndarray and array.dtype is not self._dtypes[index]:
                    array = self._fit(index, array)
                entries = by_output.get(index)
                if entries is None:
                    by_output[index] = [(member, array)]
                else:
                    entries.append((member, array))
        writer = _Outputs(batch, self._names)
        for index, entries in by_output.items():
            self._write_output(batch, writer, index, entries)
        tail = [PARAMETERS.pack(member, len(text)) + text.encode() for member, text in (parameters or {}).items()]
        body, flags = self._finish(batch, bytes(codes) + b"".join(texts), writer, tail)
        return body, flags | OPEN_MEMBERS if OPEN in codes else flags

    def _write_output(
        self, batch: ReceivedBatch, writer: _Outputs, index: int, entries: list[tuple[int, _Array]]
    ) -> None:
        first, members = entries[0][1], batch.members
        code = self._code(self._names[index], first)
        if code != BYTES and len(entries) == len(members):
            if len(entries) == 1:
                writer.add(ALL_MEMBERS, index, code, first)
                return
            for name, parts in batch.parts.items():
                if first is parts[0] and all(array is part for (_, array), part in zip(entries, parts)):
                    writer.add(ALL_MEMBERS, index, code, batch.inputs[name])
                    return
            dtype, row = first.dtype, first.shape[1:]
            arrays = []
            for (_member, array), member in zip(entries, members):
                shape = array.shape
                if not shape or shape[0] != member.rows or shape[1:] != row or array.dtype != dtype:
                    break
                arrays.append(array)
            else:
                writer.add_rows(index, code, arrays)
                return
        for number, array in entries:
            writer.add(number, index, self._code(self._names[index], array), array)

    def checked(self, name: str, array: Any) -> tuple[_Array, int]:
        """Return an output as an array, and its datatype code; raises WrongResultError if it has none."""
        array = self._fit(self.declared[name][0], _as_array(name, array))
        return array, self._code(name, array)

    def _fit(self, index: int, array: _Array) -> _Array:
        """Return an output of integers in the declared datatype if all fit, as Triton's users have NumPy's int64 for INT32."""
        dtype = self._dtypes[index]
        if self._codes[index] == BF16 or dtype.kind not in "iu" or array.dtype.kind not in "iu" or array.dtype == dtype:
            return array
        fitted = array.astype(dtype)
        return fitted if np.array_equal(fitted, array) else array

    def _code(self, name: str, array: _Array) -> int:
        """Return the datatype code of an output."""
        if not isinstance(array, np.ndarray):
            array = _as_array(name, array)
        dtype = array.dtype
        declared = self.declared[name][1]
        if dtype.kind in "SUT":
            return BYTES
        code = CODE_OF_DTYPE.get(dtype)
        if code is None:
            code = CODE_OF_DTYPE.get(dtype.newbyteorder("<"))
        if code is None:
            raise WrongResultError(
                f"the model returned output '{name}' with the dtype {dtype}, which is no datatype of the protocol"
            )
        return BF16 if declared == BF16 and dtype == DTYPES[BF16] else code

    def _finish(
        self, batch: ReceivedBatch, head: bytes, writer: _Outputs, tail: Sequence[bytes] = ()
    ) -> tuple[bytes, int]:
        body = b"".join([head, COUNT.pack(writer.count), *writer.records, *tail])
        batch.slot.finish(batch.number)
        return batch.slot.spill(body, writer.end)


_MAX_TEXT = 4096


def _as_array(name: str, array: Any) -> _Array:
    if isinstance(array, np.ndarray):
        return array
    if array is None or isinstance(array, (str, bytes, dict, set)):
        raise WrongResultError(f"the model returned output '{name}' as {type(array).__name__}, not as an array")
    return np.asarray(array)


class _Outputs:
    """Records of outputs, and their place in the slot.

    Args:
        batch: the batch.
        names: of the model's outputs.
    """

    def __init__(self, batch: ReceivedBatch, names: Sequence[str]) -> None:
        self._names = names
        self._slot = batch.slot
        self._memory = batch.slot.memory
        self._address = batch.slot.address
        self.records: list[bytes] = []  # encoded records
        self.count = 0  # number of records
        self.end = aligned(batch.end)  # first free offset in the slot

    def add(self, member: int, index: int, code: int, array: _Array) -> None:
        """Write an output of one member, or of all."""
        if code == BYTES:
            content = pack_texts(array, f"output '{self._names[index]}'")
            offset = self._place(len(content))
            self._slot.write(offset, content)
            self._record(member, index, code, 0, offset, len(content), array.shape)
            return
        offset = self._offset_in_input(array)
        if offset >= 0:
            self._record(member, index, code, 1, offset, array.nbytes, array.shape)
            return
        offset = self._place(array.nbytes)
        np.copyto(np.ndarray(array.shape, DTYPES[code], self._slot.memory, offset), array)
        self._record(member, index, code, 0, offset, array.nbytes, array.shape)

    def add_rows(self, index: int, code: int, arrays: list[_Array]) -> None:
        """Write an output of all members, of equal row shapes, as one tensor."""
        first = arrays[0]
        rows = 0
        for array in arrays:
            rows += array.shape[0]
        shape = (rows, *first.shape[1:])
        begin = offset = self._offset_in_input(first)
        if offset >= 0:
            # Views of consecutive rows, as an identity model returns them.
            end = offset + first.nbytes
            for array in arrays[1:]:
                if self._offset_in_input(array) != end:
                    begin = -1
                    break
                end += array.nbytes
            if begin >= 0:
                self._record(ALL_MEMBERS, index, code, 1, begin, end - begin, shape)
                return
        dtype = DTYPES[code]
        size = dtype.itemsize
        for length in shape:
            size *= length
        offset = self._place(size)
        np.concatenate(arrays, out=np.ndarray(shape, dtype, self._slot.memory, offset))
        self._record(ALL_MEMBERS, index, code, 0, offset, size, shape)

    def _offset_in_input(self, array: _Array) -> int:
        """Return the offset in the slot of a contiguous view of an input; -1 for any other array."""
        # NumPy sets the base of a view of a view to the first one, here that of the slot.
        memory = self._memory
        if array.base is memory and array.flags.c_contiguous and array.dtype.isnative:
            offset: int = array.__array_interface__["data"][0] - self._address
            return offset
        return -1

    def _place(self, size: int) -> int:
        offset = self.end
        self._slot.reserve(offset + size)
        self.end = aligned(offset + size)
        return offset

    def _record(
        self, member: int, index: int, code: int, memory: int, offset: int, size: int, shape: tuple[int, ...]
    ) -> None:
        ndim = len(shape)
        self.records.append(
            OUTPUT.pack(member, index, code, ndim, memory, offset, size) + dims_struct(ndim).pack(*shape)
        )
        self.count += 1


def failed(code: int, text: str, traceback: str = "") -> bytes:
    """Return the body of FAILED.

    Args:
        code: of the error.
        text: for the client; "" for an error of the model's code, whose text is not for clients.
        traceback: for the log; its end is kept.
    """
    message = text.encode("utf-8", "replace")[:_MAX_TEXT]
    return bytes([code]) + LENGTH.pack(len(message)) + message + traceback.encode("utf-8", "replace")[-_MAX_TRACEBACK:]


_MAX_TRACEBACK = 16 * 1024
