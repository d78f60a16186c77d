"""Tensors in and out of JSON and of the protocol's binary form. Every input is hostile until decoded.

The binary form is that of the binary tensor data extension: elements little-endian in row-major order; BYTES elements each with
its length in front (4 bytes, little-endian); BF16 as its bit pattern.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from server.core.errors import BadRequest
from server.core.tensor import BF16, BOOL, BYTES, FP16, Array, Datatype, ModelSpec, TensorSpec

_LENGTH = struct.Struct("<I")
# 2**62 elements: more than any memory, and still far from overflowing NumPy's sizes.
_MAX_ELEMENTS = 1 << 62


def check_shape(spec: TensorSpec, shape: Sequence[int], model: ModelSpec) -> int:
    """Hold a shape against the specification; the number of elements.

    Raises:
        BadRequest: another rank, another size, or a dimension below 1.
    """
    expected = spec.shape
    fits = len(shape) == len(expected) and all(
        have == want or want == -1 for have, want in zip(shape, expected, strict=True)
    )
    if not fits:
        raise BadRequest(
            f"input '{spec.name}' of model '{model.name}' has shape {list(shape)[:16]}, expected {list(expected)}"
            + (" (-1: any size; the first dimension is the batch)" if model.max_batch_size else "")
        )
    elements = 1
    for size in shape:
        if size < 1:
            raise BadRequest(f"input '{spec.name}' has shape {list(shape)}: every dimension must be at least 1")
        elements *= size
    if elements > _MAX_ELEMENTS:
        raise BadRequest(f"input '{spec.name}' has shape {list(shape)}: more elements than any memory holds")
    return elements


def from_binary(
    spec: TensorSpec, shape: tuple[int, ...], elements: int, body: bytes, start: int, size_bytes: int
) -> Array:
    """A tensor out of `body[start:start + size_bytes]`; a view of the body, but for BYTES.

    Raises:
        BadRequest: the data do not have the size that the shape asks for.
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
        raise BadRequest(
            f"input '{spec.name}': {size_bytes} bytes came for shape {list(shape)} of {datatype}, expected {expected}"
        )
    array: Array = np.frombuffer(body, datatype.dtype, elements, start).reshape(shape)
    return array


def to_binary(array: Array, datatype: Datatype) -> bytes | memoryview:
    """A tensor's bytes on the wire; a view where the array is contiguous."""
    if datatype is BYTES:
        parts: list[bytes] = []
        for item in array.reshape(-1).tolist():
            parts.append(_LENGTH.pack(len(item)))
            parts.append(item)
        return b"".join(parts)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data


def from_json(spec: TensorSpec, shape: tuple[int, ...], elements: int, data: object) -> Array:
    """A tensor out of a JSON array, flat or nested.

    Raises:
        BadRequest: not an array, another number of elements, or elements that are not of the datatype.
    """
    if not isinstance(data, list):
        raise BadRequest(f"input '{spec.name}': data must be an array, not {type(data).__name__}")
    datatype = spec.datatype
    try:
        array = np.array(data, dtype=object) if datatype is BYTES else np.array(data)
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(
            f"input '{spec.name}': data is not a regular array (rows differ in length or depth)"
        ) from error
    if array.size != elements:
        raise BadRequest(
            f"input '{spec.name}': {array.size} elements came for shape {list(shape)}, expected {elements}"
        )
    # Nested data must have the declared shape; flat data and rows of flat data are taken as they come.
    if array.ndim > 1 and array.shape != shape and not (array.ndim == 2 and array.shape[0] == shape[0]):
        raise BadRequest(f"input '{spec.name}': data is nested as {list(array.shape)}, its shape says {list(shape)}")
    return _convert(spec, array).reshape(shape)


def to_json(array: Array, datatype: Datatype) -> object:
    """What the JSON encoder writes for a tensor: a flat array.

    Raises:
        BadRequest: BYTES that are not UTF-8 cannot be told in JSON.
    """
    flat = array.reshape(-1)
    if datatype is BYTES:
        try:
            return [item.decode("utf-8") for item in flat.tolist()]
        except UnicodeDecodeError as error:
            raise BadRequest("the output is not UTF-8 text: ask for it with binary_data: true") from error
    if datatype is BF16:
        return (flat.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(flat)


def _convert(spec: TensorSpec, array: Array) -> Array:
    datatype, kind = spec.datatype, array.dtype.kind
    if datatype is BYTES:
        return _to_bytes(spec.name, array)
    if datatype is BOOL:
        if kind == "b" or (kind in "iu" and bool(((array == 0) | (array == 1)).all())):
            return array.astype(np.bool_)
        raise _wrong_elements(spec, "true, false, 0 or 1")
    if datatype.dtype.kind in "iu" and datatype is not BF16:
        return _to_integers(spec, array)
    if kind not in "iuf":
        raise _wrong_elements(spec, "numbers")
    if datatype is BF16:
        return _to_bf16(array)
    limit = float(np.finfo(np.float16).max) if datatype is FP16 else math.inf
    with np.errstate(over="ignore"):
        converted: Array = array.astype(datatype.dtype)
    if limit < math.inf and bool((np.abs(array) > limit).any()):
        raise _wrong_elements(spec, f"numbers within +-{limit:g}")
    return converted


def _to_integers(spec: TensorSpec, array: Array) -> Array:
    info = np.iinfo(spec.datatype.dtype)  # type: ignore[type-var]
    if array.dtype.kind not in "iu":
        raise _wrong_elements(spec, f"integers from {info.min} to {info.max}")
    if int(array.min()) < info.min or int(array.max()) > info.max:
        raise _wrong_elements(spec, f"integers from {info.min} to {info.max}")
    converted: Array = array.astype(spec.datatype.dtype)
    return converted


def _to_bf16(array: Array) -> Array:
    # Round to nearest, ties to even, on the bit pattern of the float32.
    bits = array.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    result: Array = rounded.astype(np.uint16)
    return result


def _to_bytes(name: str, array: Array) -> Array:
    items = array.reshape(-1).tolist()
    result = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise BadRequest(f"input '{name}': element {index} is a {type(item).__name__}, BYTES in JSON are strings")
        result[index] = item.encode("utf-8", "surrogatepass")
    return result


def _split_bytes(name: str, shape: tuple[int, ...], elements: int, body: bytes, start: int, size_bytes: int) -> Array:
    if elements * _LENGTH.size > size_bytes:
        raise BadRequest(f"input '{name}': {size_bytes} bytes cannot hold {elements} BYTES elements")
    result = np.empty(elements, dtype=object)
    position, end = start, start + size_bytes
    for index in range(elements):
        if position + _LENGTH.size > end:
            raise BadRequest(f"input '{name}': the data end before element {index} of {elements}")
        (length,) = _LENGTH.unpack_from(body, position)
        position += _LENGTH.size
        if position + length > end:
            raise BadRequest(f"input '{name}': element {index} says {length} bytes, only {end - position} are left")
        result[index] = body[position : position + length]
        position += length
    if position != end:
        raise BadRequest(f"input '{name}': {end - position} bytes are left over after {elements} elements")
    return result.reshape(shape)


def _wrong_elements(spec: TensorSpec, expected: str) -> BadRequest:
    return BadRequest(f"input '{spec.name}' is {spec.datatype}: data must be {expected}")
