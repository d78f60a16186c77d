"""Encodes responses for a store outside of this process, and checks values that are read from it.

A value is foreign input: another server or a broken store wrote it. It has a keyed digest over its key and its content, and
every tensor is compared with the spec of the model and the rows of the request. Anything else is refused, and the request is
computed.

Layout: magic, digest, length of the head, head in JSON, tensors one after the other. An element of a BYTES tensor follows its
length; all lengths come first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from headrace.core.tensor import BOOL, BYTES, Array, ModelSpec, TensorSpec, fits_shape

MAX_VALUE_BYTES = 4 << 20
"""Largest value: more does not arrive in the time for which a request waits."""

_MAGIC = b"HRC1"
_DIGEST_BYTES = 32
_HEAD_START = len(_MAGIC) + _DIGEST_BYTES + 4
_MAX_HEAD_BYTES = 64 << 10
_MAX_COMPUTE_NS = 60_000_000_000
# A length before each element.
_LENGTH = np.dtype("<u4")


@dataclass(slots=True, eq=False)
class RemoteTotals:
    """Lookups of one model version in the store.

    Attributes:
        hits: values that were served.
        misses: keys without a value.
        late: requests that were computed because the answer did not come in time.
        refused: values that did not fit the request, or had a wrong digest.
        skipped: requests that were computed without a lookup, since the store does not answer.
        stored: responses that were written.
        dropped: responses that were too large, or that the writer could not take.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    refused: int = 0
    skipped: int = 0
    stored: int = 0
    dropped: int = 0


class ValueRefused(Exception):
    """A value is not one that a server with the same secret wrote for this key, or does not fit the model."""


class StoredResponse(NamedTuple):
    """A response of another process.

    Attributes:
        outputs: read-only arrays by name, which share no memory with the value.
        compute_ns: time that a hit saves.
        expires_ms: Unix time in milliseconds after which it is not served; 0 for no limit.
    """

    outputs: dict[str, Array]
    compute_ns: int
    expires_ms: int


Resume = Callable[[StoredResponse | None], bool]
"""Called with the response or None; returns True if the request still waited."""


@dataclass(slots=True, eq=False)
class Lookup:
    """A lookup of a key.

    Attributes:
        key: the key.
        spec: tensor specs of the model.
        rows, outputs: rows and requested outputs of the request; () for all outputs.
        totals: of the model.
        resume: called on the event loop with the response.
        response: of Redis; None for none.
        is_answered: True once `response` is set; before the event loop calls `resume`.
    """

    key: bytes
    spec: ModelSpec
    rows: int
    outputs: tuple[str, ...]
    totals: RemoteTotals
    resume: Resume
    response: StoredResponse | None = None
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class RemoteWrite:
    """A response to be stored.

    Attributes:
        key: its key.
        outputs: arrays that no other code changes.
        spec: tensor specs of the model.
        compute_ns: time that a hit saves.
        ttl_ms: time to live in milliseconds; 0 for no limit.
        size_bytes: memory of the outputs.
        totals: of the model.
    """

    key: bytes
    outputs: dict[str, Array]
    spec: ModelSpec
    compute_ns: int
    ttl_ms: int
    size_bytes: int
    totals: RemoteTotals


def encode(
    key: bytes, outputs: Mapping[str, Array], spec: ModelSpec, compute_ns: int, expires_ms: int, secret: bytes
) -> bytes | None:
    """Return the value of a response; None if it is too large, or `decode` would refuse it.

    Args:
        key: its key.
        outputs: arrays by name.
        spec: tensor specs of the model.
        compute_ns, expires_ms: see `StoredResponse`.
        secret: 32 bytes, the key of the digest.
    """
    tensors: list[list[object]] = []
    parts: list[bytes] = []
    if sum(array.nbytes for array in outputs.values()) > MAX_VALUE_BYTES:
        return None
    for name, array in outputs.items():
        tensor = spec.outputs.get(name)
        if tensor is None or array.dtype != tensor.datatype.dtype or not _fits(array.shape, tensor, spec, None):
            return None
        content = _text_bytes(array) if tensor.datatype is BYTES else array.tobytes()
        if content is None:
            return None
        tensors.append([name, tensor.datatype.name, array.shape, len(content)])
        parts.append(content)
    head = json.dumps([compute_ns, expires_ms, tensors], separators=(",", ":")).encode()
    body = b"".join([len(head).to_bytes(4, "little"), head, *parts])
    if len(head) > _MAX_HEAD_BYTES or len(body) > MAX_VALUE_BYTES - _HEAD_START:
        return None
    return _MAGIC + _digest(key, body, secret) + body


def decode(
    value: bytes, key: bytes, spec: ModelSpec, rows: int, requested: tuple[str, ...], secret: bytes
) -> StoredResponse:
    """Check a value and return its response.

    Args:
        value: as it came.
        key: key for which it came.
        spec: tensor specs of the model.
        rows: rows of the request.
        requested: names of the requested outputs; () for all.
        secret: as in `encode`.

    Raises:
        ValueRefused: it is not such a value; says why.
    """
    if len(value) > MAX_VALUE_BYTES or value[: len(_MAGIC)] != _MAGIC or len(value) < _HEAD_START:
        raise ValueRefused("it has another format or length")
    body = memoryview(value)[len(_MAGIC) + _DIGEST_BYTES :]
    if _digest(key, body, secret) != value[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES]:
        raise ValueRefused("its digest differs")
    size = int.from_bytes(body[:4], "little")
    if size > min(_MAX_HEAD_BYTES, len(body) - 4):
        raise ValueRefused("its head is too long")
    try:
        compute_ns, expires_ms, tensors = json.loads(bytes(body[4 : 4 + size]))
        outputs = _read_tensors(body[4 + size :], tensors, spec, rows, requested)
        numbers = min(int(compute_ns), _MAX_COMPUTE_NS), int(expires_ms)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueRefused(f"its content cannot be read: {type(error).__name__}") from None
    return StoredResponse(outputs, *numbers)


def _digest(key: bytes, body: bytes | memoryview, secret: bytes) -> bytes:
    hasher = blake3(key, key=secret)
    hasher.update(body)
    return hasher.digest()


def _read_tensors(
    content: memoryview, tensors: list[list[Any]], spec: ModelSpec, rows: int, requested: tuple[str, ...]
) -> dict[str, Array]:
    outputs: dict[str, Array] = {}
    start = 0
    for name, datatype, dims, size in tensors:
        tensor, shape = spec.outputs[name], tuple(dims)
        if name in outputs or datatype != tensor.datatype.name:
            raise ValueRefused("an output has another datatype, or occurs twice")
        if not all(type(dim) is int and dim >= 0 for dim in shape) or not _fits(shape, tensor, spec, rows):
            raise ValueRefused("an output has another shape")
        if type(size) is not int or not 0 <= size <= len(content) - start:
            raise ValueRefused("an output has another length")
        outputs[name] = _read_tensor(content[start : start + size], tensor, shape)
        start += size
    if start != len(content):
        raise ValueRefused("it has more bytes than its outputs")
    if not set(requested or spec.outputs) <= outputs.keys():
        raise ValueRefused("an output is missing")
    return outputs


def _read_tensor(content: memoryview, tensor: TensorSpec, shape: tuple[int, ...]) -> Array:
    elements, dtype = math.prod(shape), tensor.datatype.dtype
    array: Array
    if tensor.datatype is BYTES:
        array = _read_texts(content, elements).reshape(shape)
    else:
        if len(content) != elements * dtype.itemsize:
            raise ValueRefused("an output has another length")
        if tensor.datatype is BOOL and len(content) and np.frombuffer(content, np.uint8).max() > 1:
            raise ValueRefused("an output of BOOL has other values than 0 and 1")
        array = np.frombuffer(content, dtype).reshape(shape).copy()
    array.flags.writeable = False
    return array


def _text_bytes(array: Array) -> bytes | None:
    elements = array.ravel().tolist()
    if not all(type(element) is bytes for element in elements):
        return None
    lengths = np.array([len(element) for element in elements], np.uint64)
    if sum(map(len, elements)) > MAX_VALUE_BYTES:
        return None
    return lengths.astype(_LENGTH).tobytes() + b"".join(elements)


def _read_texts(content: memoryview, elements: int) -> Array:
    if elements * _LENGTH.itemsize > len(content):
        raise ValueRefused("an output of BYTES has another length")
    lengths = np.frombuffer(content[: elements * _LENGTH.itemsize], _LENGTH).tolist()
    if elements * _LENGTH.itemsize + sum(lengths) != len(content):
        raise ValueRefused("an output of BYTES has another length")
    array = np.empty(elements, object)
    start = elements * _LENGTH.itemsize
    for index, length in enumerate(lengths):
        array[index] = bytes(content[start : start + length])
        start += length
    return array


def _fits(shape: tuple[int, ...], tensor: TensorSpec, spec: ModelSpec, rows: int | None) -> bool:
    """Return True if a shape is one that the model declares, with a number of rows if it has batches."""
    has_rows = rows is None or spec.max_batch_size <= 0 or shape[:1] == (rows,)
    return has_rows and fits_shape(shape, tensor.shape)
