"""Codec of tensors in JSON and in the binary form of the protocol. Data of requests are untrusted until they are decoded.

The binary form is that of the binary tensor data extension: little-endian elements in row-major order. Each BYTES element
follows its length (4 bytes, little-endian). BF16 elements are bit patterns of 2 bytes.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.core.clock import pause
from headrace.core.errors import BadRequest
from headrace.core.tensor import BF16, BOOL, BYTES, DATATYPES, Array, Datatype, TensorSpec
from headrace.wire.requests.codec_threads import LARGE_BYTES

# Body of a request as uint8[size_bytes].
BodyBytes = npt.NDArray[np.uint8]
_ALIGNMENT = 64  # of tensors in large bodies, bytes: runtimes copy those that are not aligned

_LENGTH = struct.Struct("<I")
# Copying so many bytes takes 0.05 us, making a view of them 1 us.
_MAX_COPIED_BYTES = 4096
_MAX_SEARCHED_ELEMENTS = 256
# Size of a tensor that takes as long to encode as one number in JSON, as one element of BYTES.
NUMBER_BYTES = 4
TEXT_BYTES = 32
# A step of a codec thread: encoding so many numbers, or so many bytes of a text, takes about a millisecond.
_CHUNK_ELEMENTS = 8192
_CHUNK_BYTES = 256 << 10
_BF16_INFINITY = 0x7F80
_BF16_MAX = float.fromhex("0x1.fep127")

# For each datatype: Python types of its elements in JSON, and their name in errors.
_JSON_TYPES: dict[str, tuple[set[type], str]] = {
    datatype.name: ({int}, "integers") if datatype.dtype.kind in "iu" else ({int, float}, "numbers")
    for datatype in DATATYPES
}
_JSON_TYPES |= {
    "BF16": ({int, float}, "numbers"),
    "BOOL": ({bool, int}, "true, false, 0 or 1"),
    "BYTES": ({str}, "strings"),
}
_JSON_WORDS: dict[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a number with a fraction or an exponent",
    int: "a number",
    list: "an array",
    str: "a string",
    type(None): "null",
}


def allocate_body(size_bytes: int, head_bytes: int = 0) -> BodyBytes:
    """Return memory for a large body, uint8[size_bytes], in which the byte behind the first `head_bytes` is aligned."""
    memory = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    start = -(memory.__array_interface__["data"][0] + head_bytes) % _ALIGNMENT
    return memory[start : start + size_bytes]


def check_size(spec: TensorSpec, shape: tuple[int, ...], elements: int, size_bytes: int) -> None:
    """Check the size of binary data against a shape before the data are read.

    Raises:
        BadRequest: the size differs from the tensor's. For BYTES: it is too small for the length prefixes.
    """
    expected = elements * spec.datatype.size_bytes
    if size_bytes != expected and (spec.datatype is not BYTES or not elements):
        raise _wrong_size(spec, shape, size_bytes, expected)
    if spec.datatype is BYTES and elements * _LENGTH.size > size_bytes:
        raise _too_small(spec.name, elements, size_bytes)


def from_binary(
    spec: TensorSpec,
    shape: tuple[int, ...],
    elements: int,
    body: bytes | memoryview | BodyBytes,
    start: int,
    size_bytes: int,
) -> Array:
    """Decode a tensor from `body[start:start + size_bytes]`.

    Returns:
        Array of the given shape: a view of the body, or a new array of `bytes` objects for BYTES.

    Raises:
        BadRequest: the size of the data differs from that of the shape.
    """
    datatype = spec.datatype
    if start + size_bytes > len(body):
        raise BadRequest(
            f"input '{spec.name}': binary_data_size is {size_bytes}, but only {max(len(body) - start, 0)} bytes are left"
        )
    if datatype is BYTES:
        return _split_bytes(spec.name, shape, elements, body, start, size_bytes)
    expected = elements * datatype.size_bytes
    if size_bytes != expected:
        raise _wrong_size(spec, shape, size_bytes, expected)
    if not elements:
        return np.empty(shape, datatype.dtype)
    array: Array = np.ndarray(shape, datatype.dtype, body, start)  # faster than frombuffer and reshape
    return array


def to_binary(array: Array, datatype: Datatype) -> bytes | memoryview:
    """Encode a tensor in the binary form: a copy of a small tensor, else a view of the array if it is contiguous."""
    if datatype is BYTES:
        parts: list[bytes] = []
        for chunk in _chunks(array):
            for item in chunk.tolist():
                parts.append(_LENGTH.pack(len(item)))
                parts.append(item)
        return b"".join(parts)
    if array.nbytes <= _MAX_COPIED_BYTES:
        return array.tobytes()
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data


def from_json(spec: TensorSpec, shape: tuple[int, ...], elements: int, data: object) -> Array:
    """Decode a tensor from a JSON array. As in Triton its elements count, nested in whatever way.

    Raises:
        BadRequest: the data are no array, have another number of elements, or elements of another datatype.
    """
    if not isinstance(data, list):
        raise BadRequest(f"input '{spec.name}': data must be an array, not {_json_word(type(data))}")
    flat, kinds = _flatten(data)
    if len(flat) != elements:
        raise BadRequest(f"input '{spec.name}': {len(flat)} elements came for shape {list(shape)}, expected {elements}")
    return from_values(spec, flat, kinds).reshape(shape)


def to_json(array: Array, datatype: Datatype) -> object:
    """Convert a tensor to a value for orjson: a flat array.

    Raises:
        BadRequest: BYTES elements are not UTF-8, which JSON requires.
    """
    flat = array.reshape(-1)
    if datatype is BYTES:
        try:
            return [item.decode("utf-8") for item in flat.tolist()]
        except UnicodeDecodeError as error:
            raise _not_text() from error
    values: npt.NDArray[Any] = (
        (flat.astype(np.uint32) << 16).view(np.float32) if datatype is BF16 else np.ascontiguousarray(flat)
    )
    if values.dtype.kind != "f":
        return values
    # orjson writes null for NaN and infinities. A search for it in a short text is cheaper than two calls of NumPy.
    if values.size <= _MAX_SEARCHED_ELEMENTS:
        text = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
        return orjson.Fragment(_with_literals(text, values) if b"null" in text else text)
    if np.isfinite(values).all():
        return values
    return orjson.Fragment(_with_literals(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY), values))


def is_large(array: Array, datatype: Datatype) -> bool:
    """Return True for a tensor that is encoded in JSON in steps, by `json_chunks`."""
    if array.size * NUMBER_BYTES > LARGE_BYTES or datatype is not BYTES:
        return array.size * NUMBER_BYTES > LARGE_BYTES
    return array.size * TEXT_BYTES + sum(map(len, array.reshape(-1).tolist())) > LARGE_BYTES


def json_chunks(array: Array, datatype: Datatype) -> Iterator[bytes]:
    """Encode a large tensor as the parts of a flat JSON array, without its brackets, for a codec thread.

    Raises:
        BadRequest: as in `to_json`.
    """
    separator = b""
    for chunk in _chunks(array):
        if datatype is BYTES and sum(map(len, chunk.tolist())) > _CHUNK_BYTES:
            for text in chunk.tolist():
                yield separator + b'"'
                yield from _json_text(text)
                yield b'"'
                separator = b","
            continue
        yield separator + orjson.dumps(to_json(chunk, datatype), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        separator = b","


def _json_text(text: bytes) -> Iterator[bytes]:
    """Encode a text as the parts of a JSON string, without its quotes."""
    start = 0
    while start < len(text):
        stop = min(start + _CHUNK_BYTES, len(text))
        while stop < len(text) and text[stop] & 0xC0 == 0x80 and stop > start + _CHUNK_BYTES - 4:
            stop -= 1  # within a character
        if start:
            pause()
        try:
            yield orjson.dumps(text[start:stop].decode())[1:-1]
        except UnicodeDecodeError as error:
            raise _not_text() from error
        start = stop


def _not_text() -> BadRequest:
    return BadRequest("the output is not UTF-8 text, which JSON requires: request it with binary_data: true")


def _chunks(array: Array) -> Iterator[Array]:
    """Split a tensor into flat arrays, with a pause between two of them."""
    flat = array.reshape(-1)
    yield flat[:_CHUNK_ELEMENTS]
    for start in range(_CHUNK_ELEMENTS, flat.size, _CHUNK_ELEMENTS):
        pause()
        yield flat[start : start + _CHUNK_ELEMENTS]


def _with_literals(text: bytes, values: npt.NDArray[Any]) -> bytes:
    """Replace orjson's null by NaN, Infinity and -Infinity, as Triton writes them.

    Args:
        text: JSON array of `values` from orjson.
        values: floats, one dimension.
    """
    special = values[~np.isfinite(values)]
    literals = np.where(np.isnan(special), b"NaN", np.where(special > 0, b"Infinity", b"-Infinity")).tolist()
    literals.append(b"")
    return b"".join(chain.from_iterable(zip(text.split(b"null"), literals, strict=True)))


def _flatten(data: list[Any]) -> tuple[list[Any], set[type]]:
    """Return the elements of nested lists, and their types.

    Not with NumPy: it converts large integers to floats, and pads all strings to the length of the longest.
    """
    kinds: set[type] = set(map(type, data))
    while list in kinds:
        rows = data if len(kinds) == 1 else [item if type(item) is list else (item,) for item in data]
        data = list(chain.from_iterable(rows))
        kinds = set(map(type, data))
    return data, kinds


def from_values(spec: TensorSpec, flat: list[Any], kinds: set[type]) -> Array:
    """Convert elements from JSON, and the types of them, to a tensor of one dimension.

    Raises:
        BadRequest: elements have another datatype, or are out of its range.
    """
    datatype = spec.datatype
    allowed, expected = _JSON_TYPES[datatype.name]
    if not kinds <= allowed:
        wrong_kind = next(kind for kind in map(type, flat) if kind not in allowed)
        raise BadRequest(f"input '{spec.name}' is {datatype}: data must be {expected}, not {_json_word(wrong_kind)}")
    if datatype is BYTES:
        texts = np.empty(len(flat), dtype=object)
        texts[:] = [item.encode("utf-8") for item in flat]
        return texts
    if datatype is BOOL:
        if not set(flat) <= {0, 1}:
            raise _out_of_range(spec, next(item for item in flat if item not in (0, 1)), 0, 1)
        return np.array(flat, dtype=np.bool_)
    if float in allowed:
        return _to_floats(spec, flat)
    try:
        return np.array(flat, dtype=datatype.dtype)
    except OverflowError:
        info = np.iinfo(datatype.dtype)  # type: ignore[type-var]
        worst = next(item for item in flat if not info.min <= item <= info.max)
        raise _out_of_range(spec, worst, info.min, info.max) from None


def _to_floats(spec: TensorSpec, flat: list[Any]) -> Array:
    datatype = spec.datatype
    try:
        wide = np.array(flat, dtype=np.float64)
    except OverflowError:  # an integer with more than 308 digits
        raise _out_of_range(spec, max(flat, key=abs), -sys.float_info.max, sys.float_info.max) from None
    with np.errstate(over="ignore"):
        if datatype is BF16:
            bits = _to_bf16(wide)
            array: Array = bits
            infinite = (bits & 0x7FFF) == _BF16_INFINITY
        else:
            array = wide.astype(datatype.dtype)
            infinite = np.isinf(array)
    if infinite.any():
        overflown = wide[infinite & np.isfinite(wide)]  # infinities in the request are allowed
        if overflown.size:
            limit = _BF16_MAX if datatype is BF16 else float(np.finfo(datatype.dtype).max)  # type: ignore[type-var]
            raise _out_of_range(spec, float(overflown[0]), -limit, limit)
    return array


def _to_bf16(wide: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    # Round to nearest, ties to even, on the bit pattern of the float32.
    bits = wide.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _split_bytes(
    name: str, shape: tuple[int, ...], elements: int, body: bytes | memoryview | BodyBytes, start: int, size_bytes: int
) -> Array:
    if elements * _LENGTH.size > size_bytes:
        raise _too_small(name, elements, size_bytes)
    data = bytes(body[start : start + size_bytes])
    result = np.empty(elements, dtype=object)
    position = 0
    # On the event loop, where smaller data are split, there is no pause.
    pause_mask = _CHUNK_ELEMENTS - 1 if size_bytes > LARGE_BYTES else -1
    for index in range(elements):
        if index & pause_mask == pause_mask:
            pause()
        if position + _LENGTH.size > size_bytes:
            raise BadRequest(f"input '{name}': the data end before element {index} of {elements}")
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if position + length > size_bytes:
            raise BadRequest(
                f"input '{name}': element {index} says {length} bytes, only {size_bytes - position} are left"
            )
        result[index] = data[position : position + length]
        position += length
    if position != size_bytes:
        raise BadRequest(f"input '{name}': {size_bytes - position} bytes are left over after {elements} elements")
    return result.reshape(shape)


def _wrong_size(spec: TensorSpec, shape: tuple[int, ...], size_bytes: int, expected: int) -> BadRequest:
    return BadRequest(
        f"input '{spec.name}': {size_bytes} bytes came for shape {list(shape)} of {spec.datatype}, expected {expected}"
    )


def _too_small(name: str, elements: int, size_bytes: int) -> BadRequest:
    return BadRequest(f"input '{name}': {size_bytes} bytes cannot hold {elements} BYTES elements")


def _out_of_range(spec: TensorSpec, value: float, low: float, high: float) -> BadRequest:
    return BadRequest(
        f"input '{spec.name}' is {spec.datatype}: data must be from {low} to {high}, {str(value)[:40]} is not"
    )


def _json_word(kind: type) -> str:
    return _JSON_WORDS.get(kind, kind.__name__)
