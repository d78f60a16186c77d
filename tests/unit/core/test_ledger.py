"""The ledger of GPU memory: sums that always agree, refusals that say who holds what."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
from headrace.core.errors import ConfigError
from headrace.core.ledger import HOST, Kind, Ledger, MemoryAccount, NoRoom, Reservation, format_bytes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.examples import examples
from tests.support.waiting import on_threads

GIB = 1 << 30


def test_refusals_name_the_largest_accounts() -> None:
    ledger = Ledger()
    ledger.set_limit(0, 12 * GIB)
    ledger.account("big", "1").reservation(0, Kind.WEIGHTS, 7 * GIB)
    ledger.account("small", "2").reservation(0, Kind.BUFFERS, GIB)
    mine = ledger.account("mine", "3")
    mine.reservation(0, Kind.WEIGHTS, 2 * GIB)
    with pytest.raises(ConfigError) as caught:
        mine.reservation(0, Kind.SCRATCH, 3 * GIB)
    error = caught.value
    assert isinstance(error, NoRoom)
    assert (error.gpu, error.lacking_bytes, error.others) == (0, GIB, True)
    message = str(error)
    assert message.startswith("mine/3: error: needs 3.0 GiB more of GPU 0 for scratch: 2.0 GiB of 12.0 GiB are free")
    assert "(it holds 2.0 GiB, big/1 7.0 GiB, small/2 1.0 GiB)" in message
    assert "--gpu-memory-fraction" in message
    assert ledger.reserved_bytes(0) == 10 * GIB


def test_a_block_larger_than_the_limit_requests_no_eviction() -> None:
    ledger = Ledger()
    ledger.set_limit(0, 2 * GIB)
    with pytest.raises(NoRoom) as caught:
        ledger.account("m", "1").reservation(0, Kind.WEIGHTS, 3 * GIB)
    assert not caught.value.others


def test_a_model_has_a_budget_of_its_own_on_each_gpu() -> None:
    ledger = Ledger()
    account = ledger.account("m", "1", budget_bytes=100)
    account.reservation(0, Kind.WEIGHTS, 100)
    account.reservation(1, Kind.WEIGHTS, 60)
    with pytest.raises(
        NoRoom, match="needs 41 B more of GPU 1 for buffers: it holds 60 B, its gpu_memory_budget is"
    ) as e:
        account.reservation(1, Kind.BUFFERS, 41)
    assert not e.value.others
    account.reservation(HOST, Kind.BUFFERS, 1 << 40)
    assert account.reserved_bytes() == {0: 100, 1: 60, HOST: 1 << 40}


def test_a_block_grows_shrinks_and_is_freed() -> None:
    ledger = Ledger()
    ledger.set_limit(0, 100)
    account = ledger.account("m", "1")
    block = account.reservation(0, Kind.BUFFERS)
    block.resize(90)
    with pytest.raises(NoRoom):
        block.resize(101)
    assert (block.size_bytes, ledger.reserved_bytes(0)) == (90, 90)
    block.resize(100)
    block.resize(10)
    assert [tuple(holding) for holding in ledger.holdings()] == [(0, "m", "1", "buffers", 10)]
    block.release()
    assert ledger.holdings() == []
    block.resize(5)
    account.close()
    account.close()
    block.release()
    assert ledger.reserved_bytes(0) == 0
    with pytest.raises(RuntimeError, match="closed"):
        account.reservation(0, Kind.BUFFERS, 1)


def test_concurrent_threads_never_exceed_the_limit() -> None:
    ledger = Ledger()
    ledger.set_limit(0, 1000)
    start = threading.Barrier(4)
    got: list[int] = []

    def book(account: MemoryAccount) -> None:
        start.wait()
        for _ in range(200):
            try:
                account.reservation(0, Kind.BUFFERS, 7)
            except NoRoom:
                return
            got.append(7)

    on_threads(book, [ledger.account("m", str(number)) for number in range(4)])
    assert sum(got) == ledger.reserved_bytes(0) == 994


@pytest.mark.parametrize(
    ("size_bytes", "message"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (GIB, "1.0 GiB")]
)
def test_bytes_for_people(size_bytes: int, message: str) -> None:
    assert format_bytes(size_bytes) == message


class Books(RuleBasedStateMachine):
    """Random reservations and releases: no limit is broken, and every sum is the sum of its parts."""

    LIMITS: ClassVar[dict[int, int]] = {0: 1000, 1: 300}
    BUDGET = 400

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        for gpu, limit in self.LIMITS.items():
            self.ledger.set_limit(gpu, limit)
        self.accounts: list[MemoryAccount] = []
        self.blocks: list[tuple[MemoryAccount, int, Reservation, int]] = []

    @rule(budget=st.booleans())
    def open(self, budget: bool) -> None:
        number = str(len(self.accounts))
        self.accounts.append(self.ledger.account("m", number, self.BUDGET if budget else None))

    @rule(data=st.data(), gpu=st.sampled_from([0, 1, 2, HOST]), kind=st.sampled_from(Kind), size=st.integers(0, 500))
    def reserve(self, data: st.DataObject, gpu: int, kind: Kind, size: int) -> None:
        if not self.accounts:
            return
        account = data.draw(st.sampled_from(self.accounts))
        block = account.reservation(gpu, kind)
        self.blocks.append((account, gpu, block, 0))
        self._resize(len(self.blocks) - 1, size)

    @rule(data=st.data(), size=st.integers(0, 500))
    def resize(self, data: st.DataObject, size: int) -> None:
        if self.blocks:
            self._resize(data.draw(st.integers(0, len(self.blocks) - 1)), size)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.accounts:
            account = data.draw(st.sampled_from(self.accounts))
            self.accounts.remove(account)
            self.blocks = [block for block in self.blocks if block[0] is not account]
            account.close()

    def _resize(self, index: int, size: int) -> None:
        account, gpu, block, was = self.blocks[index]
        limit = self.LIMITS.get(gpu)
        fits = size <= was or gpu == HOST
        if not fits:
            fits = limit is None or self._sum(gpu) + size - was <= limit
            fits = fits and (
                account.budget_bytes is None or self._sum(gpu, account) + size - was <= account.budget_bytes
            )
        if not fits:
            with pytest.raises(NoRoom):
                block.resize(size)
            return
        block.resize(size)
        self.blocks[index] = (account, gpu, block, size)

    def _sum(self, gpu: int, account: MemoryAccount | None = None) -> int:
        return sum(size for owner, position, _, size in self.blocks if position == gpu and account in (None, owner))

    @invariant()
    def adds_up(self) -> None:
        for gpu in (0, 1, 2, HOST):
            assert self.ledger.reserved_bytes(gpu) == self._sum(gpu)
            assert sum(holding.size_bytes for holding in self.ledger.holdings() if holding.gpu == gpu) == self._sum(gpu)
        for account in self.accounts:
            expected = {gpu: self._sum(gpu, account) for gpu in (0, 1, 2, HOST)}
            assert account.reserved_bytes() == {gpu: size for gpu, size in expected.items() if size}


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)


def test_an_account_separates_its_bytes_from_others() -> None:
    ledger = Ledger()
    ledger.set_limit(0, 100)
    theirs, mine = ledger.account("a", "1"), ledger.account("a", "1")
    theirs.reservation(0, Kind.WEIGHTS, 30)
    mine.reservation(1, Kind.SCRATCH, 5)
    mine.reservation(0, Kind.SCRATCH, 4)
    assert mine.ledger.limits == {0: 100}
    assert [tuple(held) for held in mine.holdings()] == [(0, "a", "1", "scratch", 4), (1, "a", "1", "scratch", 5)]
    assert [tuple(held) for held in mine.others()] == [(0, "a", "1", "weights", 30)]
