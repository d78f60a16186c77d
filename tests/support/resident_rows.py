"""Resident rows for tests without a GPU: their memory is a NumPy array with its addresses."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
from headrace.core.tensor import PINNED, Array, ResidentRows


@dataclass(eq=False)
class HostOwner:
    """Owner of an array that counts its host copies."""

    array: Array
    copies: list[int] = field(default_factory=list)

    def copy(self, address: int, size_bytes: int) -> Array:
        start = address - self.array.ctypes.data
        assert 0 <= start <= self.array.nbytes - size_bytes, "out of the owner's memory"
        self.copies.append(size_bytes)
        return bytes_at(address, size_bytes)


def resident(array: Array, device: int = PINNED) -> ResidentRows:
    """An array's elements as resident rows whose owner is a `HostOwner`."""
    array = np.ascontiguousarray(array)
    owner = HostOwner(array)
    return ResidentRows(array.ctypes.data, device, array.dtype, array.shape, owner, owner.copy)


def bytes_at(address: int, size_bytes: int) -> Array:
    """A copy of what lies at an address of this process, uint8[size_bytes]."""
    return np.frombuffer(ctypes.string_at(address, size_bytes), np.uint8).copy()


def read(rows: ResidentRows) -> Array:
    """Return the values that a GPU would read."""
    return bytes_at(rows.address, rows.nbytes).view(rows.dtype).reshape(rows.shape)
