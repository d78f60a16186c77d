"""Shared memory of clients, as a front end sees it: names and ranges that only the engine process reads and writes.

A front end neither opens nor checks a region. It names the range of a tensor in the request, and the engine returns the errors of
the region: an unknown name, a range outside of it, memory that is gone. So registering and unregistering
concern the engine alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.core.errors import Unavailable
from headrace.core.tensor import BYTES, Array, ModelSpec, ResidentRows

IN_ENGINE = -3
"""`gpu` of a region, and `device` of rows, that only the engine process accesses."""


class RegionRange(NamedTuple):
    """Owner of rows in a region: the range that the engine reads.

    Attributes:
        region: registered name.
        offset, size_bytes: of the range.
    """

    region: str
    offset: int
    size_bytes: int


def region_of(rows: ResidentRows) -> RegionRange:
    """Return the range that rows of `rows_in_engine` stand for."""
    assert isinstance(rows.owner, RegionRange)
    return rows.owner


def _refuse_copy(_address: int, _size_bytes: int) -> Array:
    raise Unavailable("shared memory of clients is read by the engine process only: retry the request")


def rows_in_engine(owner: RegionRange, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> ResidentRows:
    """Return rows that stand for a tensor in a region."""
    return ResidentRows(0, IN_ENGINE, dtype, shape, owner, _refuse_copy)


class RemoteRegion:
    """One region, by its name.

    Attributes:
        gpu: `IN_ENGINE`.
    """

    gpu: int | None = IN_ENGINE

    def __init__(self, name: str) -> None:
        self._name = name

    def check(self, offset: int, size_bytes: int) -> None:
        """Accept: the engine checks the range."""

    def locate(self, offset: int, size_bytes: int, devices: frozenset[int]) -> ResidentRows:
        """Return rows that name the range, uint8[size_bytes]."""
        return rows_in_engine(RegionRange(self._name, offset, size_bytes), np.dtype(np.uint8), (size_bytes,))

    def read(self, offset: int, size_bytes: int) -> Array:
        """Raise Unavailable: see `can_name_regions`."""
        return _refuse_copy(offset, size_bytes)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Raise Unavailable, as `read`."""
        _refuse_copy(offset, len(data))

    def write_rows(self, offset: int, rows: ResidentRows) -> None:
        """Do nothing: the engine has written them before it answered."""


class RemoteRegions:
    """All regions of the engine, for inference: registering them is a route of the engine."""

    def find(self, name: str) -> RemoteRegion:
        """Return a region of any name."""
        return RemoteRegion(name)


def can_name_regions(spec: ModelSpec) -> bool:
    """Return True if all tensors of a model in shared memory can be left to the engine: none is BYTES or has no dimensions.

    Elements of BYTES are split and joined by the codecs; requests of other models with shared memory are passed on whole.
    """
    tensors = [*spec.inputs.values(), *spec.outputs.values()]
    return all(tensor.datatype is not BYTES and tensor.shape for tensor in tensors)
