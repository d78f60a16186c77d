"""Rows that lie where a GPU reads them by itself: in its own memory, or in pinned memory of the host.

An input of a request is a NumPy array or one of these. The data plane asks both for the same few things (dtype, shape, slices of
rows); an execution on a GPU takes the address, and whoever can do neither gets a host copy from NumPy itself, which asks
`__array__`: `np.asarray(rows)`, `np.concatenate([rows, ...])`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeGuard, cast

import numpy as np

from headrace.core.tensor import Array

# `device` of pinned host memory, which every GPU reads, and of rows that none may: they are not aligned to their dtype.
PINNED = -1
NOWHERE = -2

# Copies (address, size_bytes) of what the owner holds into host memory of its own: uint8[size_bytes].
HostCopy = Callable[[int, int], Array]


class ResidentRows:
    """One tensor, C-contiguous, rows first, by its address on a GPU. Immutable; slices and reshapes share the memory.

    What is at `PINNED` addresses may be a client's file, which the client may cut short: only kernels may read there. The host
    would die of SIGBUS, and the driver's copies are partly made by the host (`headrace.cuda.shared_memory`).

    Args:
        address: CUdeviceptr of the first element, aligned to the dtype but for `NOWHERE`; for kernels only.
        device: number of the GPU whose memory it is, or `PINNED`, or `NOWHERE`.
        dtype: of the elements; no objects.
        shape: of the tensor, at least one dimension.
        owner: whatever keeps the memory alive; held as long as these rows, or a slice of them, are.
        copy: makes a host copy of a range of the owner's memory; called on whatever thread asks for one.
    """

    __slots__ = ("_copy", "address", "device", "dtype", "owner", "shape")

    def __init__(
        self,
        address: int,
        device: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        owner: object,
        copy: HostCopy,
    ) -> None:
        self.address = address
        self.device = device
        self.dtype = dtype
        self.shape = shape
        self.owner = owner
        self._copy = copy

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> ResidentRows:
        """Some rows, one after the other.

        Raises:
            TypeError: anything but a slice of step 1.
        """
        if not isinstance(rows, slice):
            raise TypeError(f"resident rows take a slice, not {rows!r}: make a host copy by np.asarray first")
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise TypeError(f"resident rows take slices of step 1, not {step}: make a host copy by np.asarray first")
        inner = self.shape[1:]
        address = self.address + start * math.prod(inner) * self.dtype.itemsize
        shape = (max(stop - start, 0), *inner)
        return ResidentRows(address, self.device, self.dtype, shape, self.owner, self._copy)

    def as_tensor(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ResidentRows:
        """The same bytes as a tensor; unless they are aligned to the dtype, it can only be copied.

        Args:
            dtype: of the tensor.
            shape: of the tensor, which has as many bytes.
        """
        device = NOWHERE if self.address % dtype.alignment else self.device
        return ResidentRows(self.address, device, dtype, shape, self.owner, self._copy)

    def reshape(self, *shape: SupportsIndex | tuple[int, ...]) -> ResidentRows:
        """The same elements in another shape, which may hold one -1.

        Raises:
            ValueError: it has another number of elements.
        """
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        # NumPy's own rules, on an array that takes no memory whatever its shape.
        made = np.broadcast_to(np.empty((), np.bool_), self.shape).reshape(cast("tuple[int, ...]", sizes)).shape
        return ResidentRows(self.address, self.device, self.dtype, made, self.owner, self._copy)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        """A host copy.

        Raises:
            ValueError: asked for without a copy.
            HeadraceError: the memory cannot be read any more.
        """
        if copy is False:
            raise ValueError("resident rows are not in the host's memory: they can only be copied")
        array: Array = self._copy(self.address, self.nbytes).view(self.dtype).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        where = {PINNED: "pinned", NOWHERE: "unaligned"}.get(self.device, f"GPU {self.device}")
        return f"ResidentRows({self.dtype}, {list(self.shape)}, {where})"


def as_input(rows: ResidentRows) -> Array:
    """Resident rows as an input of `InferRequest`, whose type names what nearly all of them are."""
    return cast(Array, rows)


def is_resident(array: object) -> TypeGuard[ResidentRows]:
    """True for an input whose rows a GPU reads by itself."""
    return type(array) is ResidentRows
