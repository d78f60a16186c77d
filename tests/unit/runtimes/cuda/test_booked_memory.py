"""Blocks of memory that are booked before they are allocated."""

from __future__ import annotations

import pytest
from headrace.core.ledger import HOST, Kind, Ledger, NoRoom
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.memory import Allocator

from tests.support.fake_cuda import FakeCuda


def test_blocks_are_booked_while_they_live(cuda: FakeCuda) -> None:
    ledger = Ledger()
    allocator = Allocator(0, ledger.account("m", "1"))
    with driver.current():
        block, pinned, scratch = allocator.device(), allocator.pinned(), allocator.device(Kind.SCRATCH)
        block.reserve(16)
        block.reserve(64)
        pinned.reserve(48)
        scratch.reserve(8)
        assert [(holding.gpu, holding.kind, holding.size_bytes) for holding in ledger.holdings()] == [
            (HOST, Kind.BUFFERS, 48),
            (0, Kind.BUFFERS, 64),
            (0, Kind.SCRATCH, 8),
        ]
        for each in (block, pinned, scratch, block):
            each.free()
    assert ledger.holdings() == []
    assert not cuda.live


def test_without_room_in_the_account_nothing_is_allocated(cuda: FakeCuda) -> None:
    ledger = Ledger()
    ledger.set_limit(0, 100)
    allocator = Allocator(0, ledger.account("m", "1"))
    with driver.current():
        block = allocator.device()
        block.reserve(60)
        with pytest.raises(NoRoom):
            block.reserve(101)
        assert (block.size_bytes, ledger.reserved_bytes(0)) == (0, 0)
        assert not cuda.live
        block.reserve(100)
        block.free()


def test_failed_allocations_are_not_booked(cuda: FakeCuda) -> None:
    cuda.room_bytes = 10
    ledger = Ledger()
    allocator = Allocator(0, ledger.account("m", "1"))
    with driver.current():
        block = allocator.device()
        with pytest.raises(driver.OutOfDeviceMemory):
            block.reserve(11)
    assert ledger.holdings() == []


def test_without_a_ledger_nothing_is_booked(cuda: FakeCuda) -> None:
    allocator = Allocator(0)
    assert allocator.reservation(Kind.WEIGHTS, 1 << 50) is None
    with driver.current():
        block, pinned = allocator.device(), allocator.pinned()
        block.reserve(4)
        pinned.reserve(4)
        block.free()
        pinned.free()
    assert not cuda.live
