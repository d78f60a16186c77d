"""Typed contents of large requests, decoded without protobuf objects.

Protobuf holds the interpreter lock while it parses a message: 16 MiB of one-byte integers stall every thread for some seconds. So
the contents of a large request are cut out before protobuf parses the rest, and decoded by NumPy in short steps. Format:
protobuf's "Encoding" page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.clock import pause
from headrace.core.errors import BadRequest

# Fields of InferTensorContents by name: number, dtype of the elements, and whether they are varints.
_NUMBERS: dict[str, tuple[int, str, bool]] = {
    "bool_contents": (1, "?", True),
    "int_contents": (2, "<i4", True),
    "int64_contents": (3, "<i8", True),
    "uint_contents": (4, "<u4", True),
    "uint64_contents": (5, "<u8", True),
    "fp32_contents": (6, "<f4", False),
    "fp64_contents": (7, "<f8", False),
}
_BYTES_CONTENTS = 8
_NAMES = {number: name for name, (number, _, _) in _NUMBERS.items()} | {_BYTES_CONTENTS: "bytes_contents"}
# Field numbers: ModelInferRequest.inputs and InferInputTensor.contents.
_INPUTS = _CONTENTS = 5
# InferInputTensor.name and datatype: protobuf copies texts, whatever their size, and the codec refuses those of a wrong size.
_TEXTS = (1, 2)
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}
MAX_VARINT_BYTES = 10
_SMALL = [bytes([number]) for number in range(0x80)]
# Fields of a request, of an input, and parts of one tensor's contents; no client sends so many.
_MAX_FIELDS = 4096
# Bytes of varints, and texts, that are decoded in one step.
_STEP_BYTES = 64 << 10
_STEP_TEXTS = 2048
# Largest part of a request beside its tensors and their names: shapes, parameters, outputs.
MAX_DESCRIPTION_BYTES = 128 << 10


def cut_contents(header: bytes) -> tuple[bytes, list[memoryview | None]]:
    """Cut the typed contents out of a serialized request without raw contents.

    Args:
        header: serialized ModelInferRequest.

    Returns:
        The request, with empty contents for each input that has some, and the contents of each input in order, None for none.

    Raises:
        BadRequest: the bytes are no request, or too many of them are not contents.
    """
    view, parts, all_contents, text_bytes = memoryview(header), [], list[memoryview | None](), 0
    for number, start, value, stop in _fields(view, _MAX_FIELDS):
        if number != _INPUTS or value < 0:
            parts.append(view[start:stop])
            continue
        tensor, rest, contents = view[value:stop], [], None
        for inner, inner_start, inner_value, inner_stop in _fields(tensor, _MAX_FIELDS):
            if inner != _CONTENTS or inner_value < 0:
                rest.append(tensor[inner_start:inner_stop])
                if inner in _TEXTS:
                    text_bytes += inner_stop - inner_start
            elif contents is not None:
                raise BadRequest("an input of the request has contents twice")
            else:
                contents = tensor[inner_value:inner_stop]
                rest.append(memoryview(b"\x2a\x00"))
        content = b"".join(rest)
        parts.append(memoryview(b"\x2a" + varint(len(content)) + content))
        all_contents.append(contents)
    size_bytes = sum(map(len, parts)) - text_bytes
    if size_bytes > MAX_DESCRIPTION_BYTES:
        raise BadRequest(
            f"the request has {size_bytes} bytes beside its tensors, at most {MAX_DESCRIPTION_BYTES} are allowed"
        )
    return b"".join(parts), all_contents


def decode_numbers(name: str, field: str, elements: int, contents: memoryview) -> npt.NDArray[Any]:
    """Decode the numbers of one tensor; a view of the contents if they have a fixed size.

    Args:
        name: of the input, for errors.
        field: of InferTensorContents, such as "int64_contents".
        elements: expected number.
        contents: serialized InferTensorContents.

    Raises:
        BadRequest: the contents are in another field, not packed, or of another number.
    """
    number, wire, is_varint = _NUMBERS[field]
    chunks = [np.frombuffer(chunk, np.uint8) for chunk in _chunks(name, field, number, contents)]
    dtype = np.dtype(wire)
    packed = chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])
    if not is_varint:
        if packed.size != elements * dtype.itemsize:
            raise _wrong_count(name, field, packed.size // dtype.itemsize, elements)
        return packed.view(dtype)
    count = _count_varints(packed)
    if count != elements or (packed.size and packed[-1] >= 0x80):
        raise _wrong_count(name, field, count, elements)
    return _decode_varints(name, packed, elements, dtype)


def decode_texts(name: str, elements: int, contents: memoryview) -> npt.NDArray[Any]:
    """Decode `bytes_contents`; see `decode_numbers`."""
    texts = np.empty(elements, dtype=object)
    count = 0
    for number, _, value, stop in _fields(contents, elements):
        if number != _BYTES_CONTENTS or value < 0:
            raise _wrong_field(name, "bytes_contents", number)
        texts[count] = bytes(contents[value:stop])
        count += 1
        if count % _STEP_TEXTS == 0:
            pause()
    if count != elements:
        raise _wrong_count(name, "bytes_contents", count, elements)
    return texts


def _chunks(name: str, field: str, number: int, contents: memoryview) -> Iterator[memoryview]:
    """Yield the packed parts of a field, of which most clients send one."""
    for field_number, _, value, stop in _fields(contents, _MAX_FIELDS):
        if field_number != number:
            raise _wrong_field(name, field, field_number)
        if value < 0:
            raise BadRequest(f"input '{name}': a large {field} must be packed, or sent as raw_input_contents")
        yield contents[value:stop]


def _count_varints(packed: npt.NDArray[np.uint8]) -> int:
    count = 0
    for start in range(0, packed.size, _STEP_BYTES * 16):
        count += int(np.count_nonzero(packed[start : start + _STEP_BYTES * 16] < 0x80))
        pause()
    return count


def _decode_varints(name: str, packed: npt.NDArray[np.uint8], elements: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Decode all varints, step by step; each step ends with a whole one. As in protobuf, 32 bits keep the lowest ones."""
    result = np.empty(elements, dtype)
    start = done = 0
    while start < packed.size:
        step = packed[start : start + _STEP_BYTES]
        ends = np.flatnonzero(step < 0x80)
        if not ends.size:
            raise _too_long(name)
        step = step[: int(ends[-1]) + 1]
        if ends.size == step.size:
            values = step.astype(np.uint64)
        else:
            begins = np.empty_like(ends)
            begins[0], begins[1:] = 0, ends[:-1] + 1
            lengths = ends - begins + 1
            longest = int(lengths.max())
            if longest > MAX_VARINT_BYTES:
                raise _too_long(name)
            values = np.zeros(ends.size, np.uint64)
            for index in range(longest):
                (present,) = np.nonzero(lengths > index)
                digits = (step[begins[present] + index] & 0x7F).astype(np.uint64)
                values[present] |= digits << np.uint64(7 * index)
        result[done : done + ends.size] = values != 0 if dtype.kind == "b" else values.astype(dtype)
        done += ends.size
        start += step.size
        pause()
    return result


def _fields(message: memoryview, max_fields: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field of a message: its number, its start, the start of its value (-1 if it has no length), and its end."""
    position, end = 0, len(message)
    try:
        for _ in range(max_fields):
            if position >= end:
                return
            start = position
            tag, position = read_varint(message, position, MAX_VARINT_BYTES)
            wire_type, value = tag & 7, -1
            if wire_type == _LENGTH_DELIMITED:
                size, value = read_varint(message, position, MAX_VARINT_BYTES)
                position = value + size
            elif wire_type in _FIXED_BYTES:
                position += _FIXED_BYTES[wire_type]
            elif wire_type == 0:
                _, position = read_varint(message, position, MAX_VARINT_BYTES)
            else:
                raise BadRequest(f"the request is not a ModelInferRequest: a field has wire type {wire_type}")
            if position > end:
                raise IndexError
            yield tag >> 3, start, value, position
    except IndexError:
        raise BadRequest("the request is not a ModelInferRequest: it ends in the middle of a field") from None
    if position < end:
        raise BadRequest(f"a part of the request has more than {max_fields} fields")


def read_varint(message: bytes | memoryview, position: int, max_bytes: int) -> tuple[int, int]:
    """Read a varint; returns it and the position after it. Raises BadRequest, or IndexError at the end of the message."""
    number = 0
    for shift in range(0, 7 * max_bytes, 7):
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise BadRequest(f"the request is not a ModelInferRequest: a number has more than {max_bytes} bytes")


def varint(size_bytes: int) -> bytes:
    """Encode a length as a protobuf varint: base 128, the lowest seven bits first."""
    if size_bytes < 0x80:
        return _SMALL[size_bytes]
    groups = bytearray()
    while size_bytes > 0x7F:
        groups.append(size_bytes & 0x7F | 0x80)
        size_bytes >>= 7
    groups.append(size_bytes)
    return bytes(groups)


def _wrong_count(name: str, field: str, count: int, elements: int) -> BadRequest:
    return BadRequest(f"input '{name}': {count} elements came in {field}, expected {elements}")


def _wrong_field(name: str, field: str, number: int) -> BadRequest:
    return BadRequest(f"input '{name}': its contents go into {field}, not {_NAMES.get(number, f'field {number}')}")


def _too_long(name: str) -> BadRequest:
    return BadRequest(f"input '{name}': a number of its contents has more than {MAX_VARINT_BYTES} bytes")
