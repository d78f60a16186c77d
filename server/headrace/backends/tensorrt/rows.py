"""Rows of a batch that a GPU reads where they lie: a table of addresses in pinned memory, and the kernel that follows it.

It is always the kernel, also for a single row that a plain copy would bring: see `headrace.cuda.shared_memory`.

A table is written by the host while nothing in its berth is running, and read by the GPU until the berth's batch has landed: so
every berth has its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import numpy as np

from headrace.backends.base import Resident
from headrace.cuda.driver import Stream
from headrace.cuda.kernels.rows import RowGather
from headrace.cuda.memory import Allocator

_ADDRESS_BYTES = 8

# Blocks of the kernel: few beside a model that computes, since each takes a multiprocessor from it and a few fill the bus; more
# alone on the GPU, so that a few rows are there soon.
BESIDE = 8
ALONE = 32


class RowTable:
    """Where the rows of a batch are.

    Args:
        names: of the inputs.
        max_rows: rows in the largest batch.
        allocator: of the GPU.
    """

    def __init__(self, names: Iterable[str], max_rows: int, allocator: Allocator) -> None:
        part_bytes = max_rows * _ADDRESS_BYTES
        self._places = {name: place * part_bytes for place, name in enumerate(names)}
        self._buffer = allocator.pinned()
        self._buffer.reserve(len(self._places) * part_bytes)
        self._bytes = self._buffer.view((self._buffer.size_bytes,), np.dtype(np.uint8)).data

    def write(
        self, name: str, staged: int, row_bytes: int, rows: int, total: int, residents: Iterable[Resident]
    ) -> None:
        """Fill in one input.

        Args:
            name: of the input.
            staged: address of the berth's pinned memory for it, where the rows are that are not resident.
            row_bytes: of one row; nothing is done without any.
            rows: of the batch, at least 1.
            total: rows that the kernel reads, at least `rows`: the last one again and again.
            residents: those of the flight, of all inputs.
        """
        if not row_bytes:
            return
        addresses = list(range(staged, staged + rows * row_bytes, row_bytes))
        for own, first, values in residents:
            if own == name:
                address = values.address
                # Without a batch dimension all of it is one row, whatever its first dimension.
                count = values.shape[0] if rows > 1 else 1
                if count == 1:
                    addresses[first] = address
                else:
                    addresses[first : first + count] = range(address, address + count * row_bytes, row_bytes)
        addresses += [addresses[-1]] * (total - rows)
        struct.pack_into(f"={total}Q", self._bytes, self._places[name], *addresses)

    def address(self, name: str) -> int:
        """Of an input's part of the table."""
        return self._buffer.address + self._places[name]

    def close(self) -> None:
        """Give it back; nothing reads it any more."""
        del self._bytes
        self._buffer.free()


def gather(
    kernel: RowGather, stream: Stream, table: RowTable, rows: int, sizes: Mapping[str, tuple[int, int]], blocks: int
) -> None:
    """Queue that the GPU gets inputs by a table.

    Args:
        kernel: that follows it.
        stream: on which.
        table: read when the work is done, not before.
        rows: that it has.
        sizes: by input the bytes of a row, and the address where the first is to go.
        blocks: `BESIDE` or `ALONE`.

    Raises:
        DeviceError: the driver refuses.
    """
    for name, (row_bytes, target) in sizes.items():
        if row_bytes:
            kernel.launch(stream, table.address(name), row_bytes, rows, rows, target, blocks)
