"""Tensors of an isolated model in a slot, memory that the server and the model's process share.

Both ends run the same version of this code. The bodies of RUN and DONE frames are the layouts of their tensors, as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from headrace_model.protocol import pack_texts, unpack_texts
from headrace_model.slots import START, Slot, SlotLease, aligned

from headrace.core.tensor import Array

_TEXT = "text"


class TensorLayout(NamedTuple):
    """Position of a tensor in a slot.

    Attributes:
        name: of the input or output.
        dtype: in NumPy's notation, or "text" for elements of bytes.
        shape: of the tensor.
        offset: of its first byte.
        size: in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def lay_out_tensors(like: Mapping[str, Array], rows: int) -> list[TensorLayout]:
    """Return layouts for numeric tensors with the dtypes and shapes of `like`, with `rows` as the first dimension if not 0."""
    layouts, start = [], START
    for name, array in like.items():
        shape = (rows, *array.shape[1:]) if rows else array.shape
        layouts.append(TensorLayout(name, array.dtype.str, shape, start, array.dtype.itemsize * math.prod(shape)))
        start = end_offset(layouts[-1:])
    return layouts


def end_offset(layouts: Sequence[TensorLayout]) -> int:
    """Return the first offset after the tensors at which another one may begin."""
    return max((aligned(layout.offset + layout.size) for layout in layouts), default=START)


def encode_layouts(layouts: Iterable[TensorLayout]) -> bytes:
    """Return the body of a frame."""
    return json.dumps(list(layouts), separators=(",", ":")).encode()


def decode_layouts(body: bytes) -> list[TensorLayout]:
    """Return the layouts in the body of a frame."""
    return [
        TensorLayout(name, dtype, tuple(shape), offset, size) for name, dtype, shape, offset, size in json.loads(body)
    ]


def write_tensors(slot: Slot, arrays: Mapping[str, Array], start: int = START) -> list[TensorLayout]:
    """Copy tensors into the slot from offset `start` on and return their layouts.

    Raises:
        OSError: there is no memory for them.
        WrongResultError: see `pack_texts`.
    """
    layouts = []
    for name, array in arrays.items():
        text = pack_texts(array) if array.dtype.hasobject else None
        dtype, size = (array.dtype.str, array.nbytes) if text is None else (_TEXT, len(text))
        slot.reserve(start + size)
        if text is not None:
            slot.write(start, text)
        else:
            target: Array = np.ndarray(array.shape, array.dtype, slot.memory, start)
            if (
                array.__array_interface__["data"][0] != slot.address + start
            ):  # else it was computed there: see `array_at`
                np.copyto(target, array)
        layouts.append(TensorLayout(name, dtype, array.shape, start, size))
        start = aligned(start + size)
    return layouts


def read_tensors(slot: Slot, layouts: Iterable[TensorLayout], lease: SlotLease | None = None) -> dict[str, Array]:
    """Return views of numeric tensors by name; text tensors are copied to arrays of their own.

    Args:
        slot: memory with the tensors.
        layouts: of the tensors.
        lease: held by the views; None if they do not outlive the use of the slot.

    Raises:
        ProtocolError: the layouts do not lie in the slot.
    """
    arrays: dict[str, Array] = {}
    for name, dtype, shape, offset, size in layouts:
        slot.reach(offset, size)
        if dtype == _TEXT:
            arrays[name] = unpack_texts(slot.read(offset, size), shape)
        else:
            memory = slot.memory if lease is None else lease.array()
            arrays[name] = np.ndarray(shape, np.dtype(dtype), memory, offset)
    return arrays


def array_at(slot: Slot, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return uninitialized memory at an offset, where `write_tensors` with the same `start` does not have to copy it.

    Raises:
        OSError: there is no memory for it.
    """
    slot.reserve(start + np.dtype(dtype).itemsize * math.prod(shape))
    array: Array = np.ndarray(shape, dtype, slot.memory, start)
    return array
