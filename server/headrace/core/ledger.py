"""Who holds how much of each GPU's memory, and what is left: pure bookkeeping, which allocates nothing itself.

    Ledger                      one a server; limits, and the sum of all that is held
      MemoryAccount                   one a loaded version: it may have a budget of its own
        Reservation             one a block of memory, owned by whoever owns the block

A block is booked before it is allocated and given back after it is freed. What does not fit is refused with `NoRoom`.
"""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import NamedTuple

from headrace.core.errors import ConfigError, Finding

# In place of a GPU's number: pinned memory of the host, which is counted and has no limit.
HOST = -1

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Kind(StrEnum):
    """What memory is for."""

    WEIGHTS = "weights"
    SCRATCH = "scratch"
    BUFFERS = "buffers"


class NoRoom(ConfigError):
    """A model does not fit into a GPU's memory, or into its own budget.

    Args:
        model: that does not fit.
        message: what is wrong.
        cure: what to do.
        gpu: whose memory it is.
        lacking_bytes: how much more would be needed to go on, as far as that is known.
        others: True if it would fit were others not there.
    """

    def __init__(
        self, model: str, message: str, cure: str, gpu: int, lacking_bytes: int = 0, others: bool = True
    ) -> None:
        super().__init__([Finding(model, None, message, cure)])
        self.gpu = gpu
        self.lacking_bytes = lacking_bytes
        self.others = others


class Holding(NamedTuple):
    """What one account holds of one kind.

    Attributes:
        gpu: number of the GPU, or `HOST`.
        model: name of the model.
        version: its number.
        kind: what it is for.
        size_bytes: never 0.
    """

    gpu: int
    model: str
    version: str
    kind: Kind
    size_bytes: int


class Ledger:
    """All accounts of a server. Any thread may call anything.

    Ownership: everything, that of accounts and reservations too, is guarded by `_lock`; nothing else is taken while it is held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._accounts: set[MemoryAccount] = set()

    def set_limit(self, gpu: int, size_bytes: int) -> None:
        """All accounts together may hold so much of a GPU; without a limit they hold what they like."""
        with self._lock:
            self._limits[gpu] = size_bytes

    @property
    def limits(self) -> dict[int, int]:
        """Bytes by GPU, of those that have a limit."""
        with self._lock:
            return dict(self._limits)

    def account(self, model: str, version: str, budget_bytes: int | None = None) -> MemoryAccount:
        """Open an account.

        Args:
            model: name of the model.
            version: its number.
            budget_bytes: it may hold so much of each GPU; None: what the ledger has.
        """
        account = MemoryAccount(self, model, version, budget_bytes)
        with self._lock:
            self._accounts.add(account)
        return account

    def held(self, gpu: int) -> int:
        """Bytes that are booked of a GPU, or of `HOST`."""
        with self._lock:
            return self._held.get(gpu, 0)

    def holdings(self) -> list[Holding]:
        """All that is booked, sorted."""
        with self._lock:
            return sorted(held for account in self._accounts for held in account._holdings())

    # For accounts and reservations

    def _book(self, account: MemoryAccount, gpu: int, kind: Kind, was_bytes: int, size_bytes: int) -> None:
        with self._lock:
            if account not in self._accounts:
                if size_bytes > was_bytes:
                    raise RuntimeError(f"the account of {account.name} is closed")
                return
            more = size_bytes - was_bytes
            if more > 0 and gpu != HOST:
                self._check(account, gpu, kind, more)
            account._held[gpu, kind] = account._held.get((gpu, kind), 0) + more
            self._held[gpu] = self._held.get(gpu, 0) + more

    def _check(self, account: MemoryAccount, gpu: int, kind: Kind, more: int) -> None:
        own = account._holds(gpu)
        budget = account.budget_bytes
        if budget is not None and own + more > budget:
            message = (
                f"needs {format_bytes(more)} more of GPU {gpu} for {kind}: it holds {format_bytes(own)}, "
                f"its gpu_memory_budget is {format_bytes(budget)}"
            )
            cure = "raise gpu_memory_budget, or lower max_batch_size or the number of instances"
            raise NoRoom(account.name, message, cure, gpu, own + more - budget, others=False)
        limit = self._limits.get(gpu)
        if limit is None or self._held.get(gpu, 0) + more <= limit:
            return
        free = max(limit - self._held.get(gpu, 0), 0)
        message = (
            f"needs {format_bytes(more)} more of GPU {gpu} for {kind}: {format_bytes(free)} of {format_bytes(limit)} are free"
            f" ({self._holders(account, gpu, own)})"
        )
        cure = "raise --gpu-memory-fraction, unload models, or lower max_batch_size or the number of instances"
        raise NoRoom(account.name, message, cure, gpu, more - free, others=own + more <= limit)

    def _holders(self, account: MemoryAccount, gpu: int, own: int) -> str:
        sizes = {other.name: 0 for other in self._accounts if other is not account}
        for other in self._accounts - {account}:
            sizes[other.name] += other._holds(gpu)
        largest = sorted(((size, name) for name, size in sizes.items() if size), key=lambda pair: (-pair[0], pair[1]))
        usage = [f"it holds {format_bytes(own)}", *(f"{name} {format_bytes(size)}" for size, name in largest)]
        return ", ".join(usage)

    def _close(self, account: MemoryAccount) -> None:
        with self._lock:
            self._accounts.discard(account)
            for (gpu, _), size_bytes in account._held.items():
                self._held[gpu] -= size_bytes
            account._held.clear()


class MemoryAccount:
    """What one loaded version holds.

    Attributes:
        model: name of the model.
        version: its number.
        budget_bytes: it may hold so much of each GPU; None: without a limit of its own.
    """

    def __init__(self, ledger: Ledger, model: str, version: str, budget_bytes: int | None) -> None:
        self._ledger = ledger
        self._held: dict[tuple[int, Kind], int] = {}
        self.model = model
        self.version = version
        self.budget_bytes = budget_bytes

    @property
    def name(self) -> str:
        """Model and version."""
        return f"{self.model}/{self.version}"

    def reservation(self, gpu: int, kind: Kind, size_bytes: int = 0) -> Reservation:
        """Book a block.

        Args:
            gpu: number of the GPU, or `HOST` for pinned memory.
            kind: what the block is for.
            size_bytes: of the block; it may be told later by `resize`.

        Raises:
            NoRoom: there is no room for so much.
        """
        reservation = Reservation(self._ledger, self, gpu, kind)
        reservation.resize(size_bytes)
        return reservation

    def held(self) -> dict[int, int]:
        """Bytes by GPU (and `HOST`), of all that the account holds."""
        with self._ledger._lock:
            return {gpu: self._holds(gpu) for gpu, _ in self._held if self._holds(gpu)}

    @property
    def limits(self) -> dict[int, int]:
        """Those of the ledger."""
        return self._ledger.limits

    def holdings(self) -> list[Holding]:
        """What the account holds, sorted."""
        with self._ledger._lock:
            return sorted(self._holdings())

    def others(self) -> list[Holding]:
        """What all other accounts hold, sorted."""
        with self._ledger._lock:
            return sorted(held for other in self._ledger._accounts - {self} for held in other._holdings())

    def close(self) -> None:
        """Everything is given back, whatever is still booked; again is a no-op."""
        self._ledger._close(self)

    def _holdings(self) -> list[Holding]:
        return [
            Holding(gpu, self.model, self.version, kind, size_bytes)
            for (gpu, kind), size_bytes in self._held.items()
            if size_bytes
        ]

    def _holds(self, gpu: int) -> int:
        return sum(size_bytes for (place, _), size_bytes in self._held.items() if place == gpu)


class Reservation:
    """A block as it is booked. It has one owner, the block's, whose calls do not overlap.

    Attributes:
        size_bytes: booked now.
    """

    def __init__(self, ledger: Ledger, account: MemoryAccount, gpu: int, kind: Kind) -> None:
        self._ledger = ledger
        self._account = account
        self._gpu = gpu
        self._kind = kind
        self.size_bytes = 0

    def resize(self, size_bytes: int) -> None:
        """The block is to have so many bytes; 0 gives it back.

        Raises:
            NoRoom: there is no room for so much; what was booked before still is.
        """
        self._ledger._book(self._account, self._gpu, self._kind, self.size_bytes, size_bytes)
        self.size_bytes = size_bytes

    def release(self) -> None:
        """Give it back; it may be resized anew."""
        self.resize(0)


def format_bytes(size_bytes: int) -> str:
    """For people, e.g. "1.5 GiB"."""
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
