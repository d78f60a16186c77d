"""Rows of one input of several requests, in pieces that lie apart in memory: `ScatteredRows`.

Requests that a front end receives in slots of shared memory are queued as one group. Their rows stay in the slots, so that an
input of the group has one piece for each request. A GPU reads pinned pieces by their addresses. All other code gets a copy from
NumPy, which calls `__array__`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, SupportsIndex, TypeGuard, cast

import numpy as np

from headrace.core.tensor import NOWHERE, Array

MakePiece = Callable[[int, np.dtype[Any], tuple[int, ...]], Array]
"""Makes the input of one piece by its address, dtype and shape: an array or `ResidentRows` that keeps the memory alive."""


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredRows:
    """An input of a group, of shape (rows, ...), as pieces of equal shape. Immutable; slices share the memory.

    Attributes:
        addresses: of the pieces in the order of their rows; CUdeviceptr if `device` is `PINNED`, else for `make_piece` alone.
        device: `PINNED` if kernels may read all pieces, else `NOWHERE`: each piece says where it is.
        dtype: dtype of the elements; not object.
        piece_shape: shape of each piece, (rows of a piece, ...), with at least one row.
        make_piece: makes the input of one piece; keeps the memory alive.
    """

    addresses: tuple[int, ...]
    device: int
    dtype: np.dtype[Any]
    piece_shape: tuple[int, ...]
    make_piece: MakePiece

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all pieces together."""
        return (len(self.addresses) * self.piece_shape[0], *self.piece_shape[1:])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.piece_shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.addresses) * math.prod(self.piece_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.addresses) * self.piece_shape[0]

    def pieces(self) -> list[Array]:
        """Return the pieces as inputs of their own."""
        make, dtype, shape = self.make_piece, self.dtype, self.piece_shape
        return [make(address, dtype, shape) for address in self.addresses]

    def __getitem__(self, rows: slice) -> Array:
        """Return consecutive rows: of one piece as its input, of several whole pieces as `ScatteredRows`, else a copy."""
        start, stop, step = rows.indices(len(self))
        height = self.piece_shape[0]
        if step != 1 or start % height or stop % height or stop <= start:
            return np.asarray(self)[rows]
        addresses = self.addresses[start // height : stop // height]
        if len(addresses) == 1:
            return self.make_piece(addresses[0], self.dtype, self.piece_shape)
        return as_group_input(replace(self, addresses=addresses))

    def reshape(self, *shape: SupportsIndex | tuple[int, ...]) -> Array:
        """Return the same elements in another shape with as many rows; a copy for any other shape."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        # Applies NumPy's rules, to an array that uses no memory.
        new_shape = np.broadcast_to(np.empty((), np.bool_), self.shape).reshape(cast("tuple[int, ...]", sizes)).shape
        if new_shape[:1] != self.shape[:1]:
            return np.asarray(self).reshape(new_shape)
        return as_group_input(replace(self, piece_shape=(self.piece_shape[0], *new_shape[1:])))

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        """Return a host copy.

        Raises:
            ValueError: `copy` is False.
            HeadraceError: the memory is no longer readable.
        """
        if copy is False:
            raise ValueError("rows in several pieces of memory can only be copied to one array: allow a copy")
        array: Array = np.concatenate(self.pieces())
        return array if dtype is None else array.astype(dtype, copy=False)


def as_group_input(rows: ScatteredRows) -> Array:
    """Cast scattered rows to the type of `InferRequest.inputs`, as `headrace.core.tensor.as_input`."""
    return cast(Array, rows)


def is_scattered(array: object) -> TypeGuard[ScatteredRows]:
    """Return True for an input in several pieces."""
    return type(array) is ScatteredRows


def keep_apart(pieces: Sequence[Array]) -> Array:
    """Return the inputs of several requests, of equal shapes, as one input of a group: each stays where it is.

    `device` of the result is `NOWHERE`, whatever that of the pieces.
    """
    like = pieces[0]
    make = partial(_piece_of, tuple(pieces))
    return as_group_input(ScatteredRows(tuple(range(len(pieces))), NOWHERE, like.dtype, like.shape, make))


def _piece_of(pieces: Sequence[Array], number: int, _dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    piece = pieces[number]
    return piece if piece.shape == shape else piece.reshape(shape)


def in_pieces(parts: Iterable[Array]) -> list[Array]:
    """Return the inputs of several requests with each piece of those in several pieces as an input of its own."""
    pieces: list[Array] = []
    for part in parts:
        if is_scattered(part):
            pieces += part.pieces()
        else:
            pieces.append(part)
    return pieces
