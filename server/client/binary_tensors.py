"""Tensors as the binary tensor data extension of the Open Inference Protocol V2 sends them: raw, little-endian, row by row.

An element of BYTES is its length (4 bytes, little-endian, unsigned) and then its bytes. BF16 is its bit pattern in uint16.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from server.core.errors import BadRequest
from server.core.tensor import BF16, BY_NAME, BYTES, DATATYPES, Array, Datatype

AnyArray = npt.NDArray[Any]

_LENGTH = struct.Struct("<I")
# BF16 shares uint16 with UINT16, which is what an array of uint16 means unless the caller says otherwise.
_BY_DTYPE = {datatype.dtype: datatype for datatype in DATATYPES if datatype is not BF16}


def datatype_of(array: AnyArray, name: str = "") -> Datatype:
    """The protocol's datatype for an array; text and bytes of any kind are BYTES.

    Args:
        array: any.
        name: of the tensor, for the error.

    Raises:
        BadRequest: the protocol has no such type, e.g. complex numbers.
    """
    if array.dtype.kind in "OSUT":
        return BYTES
    datatype = _BY_DTYPE.get(array.dtype.newbyteorder("<"))
    if datatype is None:
        raise BadRequest(f"tensor '{name}' is {array.dtype}, which the protocol has no datatype for: convert it")
    return datatype


def to_bytes(array: AnyArray, datatype: Datatype, name: str = "") -> bytes:
    """An array as it goes over the wire.

    Args:
        array: of any memory order and byte order; for BYTES of `bytes` or `str` (sent as UTF-8), for BF16 uint16 patterns.
        datatype: to send it as.
        name: of the tensor, for the error.

    Raises:
        BadRequest: the array's type is another; an element of BYTES is neither text nor bytes.
    """
    if datatype is not BYTES:
        if array.dtype.newbyteorder("<") != datatype.dtype:
            raise BadRequest(f"tensor '{name}' is {array.dtype}, {datatype} needs {datatype.dtype}: convert it")
        return array.astype(datatype.dtype, copy=False).tobytes("C")
    parts: list[bytes] = []
    for element in array.ravel("C").tolist():
        if isinstance(element, str):
            element = element.encode()
        if not isinstance(element, bytes):
            raise BadRequest(f"tensor '{name}' holds a {type(element).__name__}, BYTES needs text or bytes")
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


def from_bytes(data: memoryview, datatype: Datatype, shape: tuple[int, ...], name: str = "") -> Array:
    """The array that `to_bytes` made into bytes.

    Args:
        data: exactly the tensor's bytes.
        datatype: of the elements.
        shape: of the result.
        name: of the tensor, for the error.

    Returns:
        A read-only view of `data`; for BYTES an object array of `bytes`.

    Raises:
        BadRequest: `data` and `shape` do not fit together.
    """
    count = math.prod(shape)
    if datatype is BYTES:
        return _strings(data, count, name).reshape(shape)
    if len(data) != count * datatype.size_bytes:
        raise BadRequest(
            f"tensor '{name}' has {len(data)} bytes, {datatype} of shape {list(shape)} needs {count * datatype.size_bytes}"
        )
    return np.frombuffer(data, dtype=datatype.dtype).reshape(shape)


def from_json(data: Any, datatype: Datatype, shape: tuple[int, ...], name: str = "") -> Array:
    """The array of a tensor whose elements stand in JSON, flat or nested.

    Args:
        data: the elements as the JSON parser gave them.
        datatype: of the elements.
        shape: of the result.
        name: of the tensor, for the error.

    Raises:
        BadRequest: the elements do not fit the datatype or the shape; BF16, which JSON has no form for.
    """
    if datatype is BF16:
        raise BadRequest(
            f"tensor '{name}' is BF16, which JSON has no form for: give its bits as uint16 in an .npz file"
        )
    flat = _flatten(data) if isinstance(data, list) else [data]
    if len(flat) != math.prod(shape):
        raise BadRequest(f"tensor '{name}' has {len(flat)} elements, shape {list(shape)} needs {math.prod(shape)}")
    array = np.empty(len(flat), dtype=datatype.dtype)
    kinds: tuple[type, ...] = (
        (str,) if datatype is BYTES else {"b": (bool,), "f": (int, float)}.get(array.dtype.kind, (int,))
    )
    for element in flat:
        if not isinstance(element, kinds) or (isinstance(element, bool) and bool not in kinds):
            raise BadRequest(f"tensor '{name}' holds {element!r}, which is no {datatype}")
    try:
        array[:] = [element.encode() for element in flat] if datatype is BYTES else flat
    except (OverflowError, ValueError) as error:
        raise BadRequest(f"tensor '{name}' holds a value outside {datatype}: {error}") from None
    return array.reshape(shape)


def named(datatype: Any, name: str) -> Datatype:
    """The datatype of a name such as "FP32".

    Raises:
        BadRequest: there is none.
    """
    found = BY_NAME.get(datatype) if isinstance(datatype, str) else None
    if found is None:
        raise BadRequest(f"tensor '{name}' has datatype {datatype!r}, expected one of {', '.join(BY_NAME)}")
    return found


def _strings(data: memoryview, count: int, name: str) -> AnyArray:
    found: list[bytes] = []
    position = 0
    while position < len(data):
        start = position + _LENGTH.size
        end = start + _LENGTH.unpack_from(data, position)[0] if start <= len(data) else start
        if end > len(data):
            raise BadRequest(f"tensor '{name}': element {len(found)} ends at byte {end}, the tensor has {len(data)}")
        found.append(bytes(data[start:end]))
        position = end
    if len(found) != count:
        raise BadRequest(f"tensor '{name}' has {len(found)} elements of BYTES, its shape needs {count}")
    array = np.empty(count, dtype=object)
    array[:] = found
    return array


def _flatten(nested: list[Any]) -> list[Any]:
    """Level by level, so that no depth of nesting exhausts the stack."""
    while any(isinstance(element, list) for element in nested):
        nested = [inner for element in nested for inner in (element if isinstance(element, list) else [element])]
    return nested
