"""Values of tensors from files beside the versions of a model, in the folders `warmup/` and `initial_state/`.

A file has raw values, little-endian. A BYTES element is its length in four bytes, little-endian, and its bytes.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from headrace.config.documents import open_regular_file, refuse
from headrace.config.model_folder import MAX_INPUT_BYTES
from headrace.core.tensor import BYTES, Array, Datatype


def zeros(kind: Datatype, shape: tuple[int, ...]) -> Array:
    """Return zeros, or empty texts."""
    values: Array = np.full(shape, b"", dtype=object) if kind is BYTES else np.zeros(shape, kind.dtype)
    return values


def read_values(path: Path, kind: Datatype, shape: tuple[int, ...], dims: tuple[int, ...]) -> Array:
    """Return the values of a file as an array.

    Args:
        path: the file; its model and folder are named in errors.
        kind: datatype of the values.
        shape: shape of the array, which is (rows, *dims) or dims.
        dims: shape of one row; a file with the values of one row is repeated for every row.

    Raises:
        ConfigError: the file cannot be read, or has another number of values.
    """
    name = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
    try:
        with open_regular_file(path) as stream:
            content = stream.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the file's permissions") from None
    values = _texts(content, name) if kind is BYTES else _numbers(content, kind, name)
    if values.size == math.prod(shape):
        return values.reshape(shape)
    if values.size != math.prod(dims):
        message = f"has {values.size} elements, one row takes {math.prod(dims)}"
        raise refuse(name, None, message, "write the values of one row, or those of all rows")
    return np.ascontiguousarray(np.broadcast_to(values.reshape(dims), shape))


def _numbers(content: bytes, kind: Datatype, name: str) -> Array:
    if len(content) % kind.size_bytes:
        raise refuse(
            name,
            None,
            f"has {len(content)} bytes, not a multiple of {kind.size_bytes} ({kind.name})",
            "write raw values",
        )
    values: Array = np.frombuffer(content, kind.dtype).copy()
    return values


def _texts(content: bytes, name: str) -> Array:
    texts: list[bytes] = []
    offset = 0
    while offset < len(content):
        length = struct.unpack_from("<I", content, offset)[0] if offset + 4 <= len(content) else len(content)
        if offset + 4 + length > len(content):
            cure = "write the length of every element in four bytes, little-endian, in front of it"
            raise refuse(name, None, f"ends within the element that begins at byte {offset}", cure)
        texts.append(content[offset + 4 : offset + 4 + length])
        offset += 4 + length
    values = np.empty(len(texts), dtype=object)
    values[:] = texts
    return values
