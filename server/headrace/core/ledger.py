"""Ledger of model memory: reservations by model version against limits by GPU and of the host. It allocates nothing.

    Ledger                      one for each server; limits by GPU, and the sum of all reservations
      MemoryAccount             one for each loaded version; may have a budget
        Reservation             one for each block of memory; its owner is the block's

A block is reserved before it is allocated, and released after it is freed. A reservation over a limit raises `NoRoom`.
"""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import NamedTuple

from headrace.core.errors import ConfigError, Finding

# Stands for a GPU number: pinned memory of the host, which is counted without a limit.
HOST = -1
# Stands for a GPU number: memory of models that the CPU runs. Its limit is --host-memory-budget; without one nothing is reserved.
CPU = -2

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Kind(StrEnum):
    """Purpose of a block of memory."""

    WEIGHTS = "weights"
    SCRATCH = "scratch"
    BUFFERS = "buffers"


class NoRoom(ConfigError):
    """A model does not fit into a GPU's memory or into its budget.

    Args:
        model: name of the model.
        message: description of the error.
        cure: the change to make.
        gpu: number of the GPU.
        lacking_bytes: bytes that must become free for this reservation, as far as known.
        others: True if it would fit without the reservations of other models.
    """

    def __init__(
        self, model: str, message: str, cure: str, gpu: int, lacking_bytes: int = 0, others: bool = True
    ) -> None:
        super().__init__([Finding(model, None, message, cure)])
        self.gpu = gpu
        self.lacking_bytes = lacking_bytes
        self.others = others


class Holding(NamedTuple):
    """Reserved bytes of one account, GPU and kind.

    Attributes:
        gpu: number of the GPU, `HOST` or `CPU`.
        model: name of the model.
        version: number of the version.
        kind: purpose of the memory.
        size_bytes: reserved bytes, above 0.
    """

    gpu: int
    model: str
    version: str
    kind: Kind
    size_bytes: int


class Ledger:
    """All accounts of a server; any thread may call any method.

    Ownership: `_lock` guards every attribute, including those of accounts and reservations. No other lock is taken under it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._accounts: set[MemoryAccount] = set()

    def set_limit(self, gpu: int, size_bytes: int) -> None:
        """Set the limit of a GPU, or of `CPU`, for all accounts together; there is no limit before this call."""
        with self._lock:
            self._limits[gpu] = size_bytes

    @property
    def limits(self) -> dict[int, int]:
        """Limits in bytes, by GPU; without GPUs that have none."""
        with self._lock:
            return dict(self._limits)

    def account(self, model: str, version: str, budget_bytes: int | None = None) -> MemoryAccount:
        """Open an account.

        Args:
            model: name of the model.
            version: number of the version.
            budget_bytes: limit of the account on each GPU; None for the ledger's limits alone.
        """
        account = MemoryAccount(self, model, version, budget_bytes)
        with self._lock:
            self._accounts.add(account)
        return account

    def reserved_bytes(self, gpu: int) -> int:
        """Return the reserved bytes of a GPU, of `HOST` or of `CPU`."""
        with self._lock:
            return self._held.get(gpu, 0)

    def holdings(self) -> list[Holding]:
        """Return the reserved bytes of every account, sorted."""
        with self._lock:
            return sorted(held for account in self._accounts for held in account._holdings())

    # For accounts and reservations

    def _book(self, account: MemoryAccount, gpu: int, kind: Kind, was_bytes: int, size_bytes: int) -> None:
        with self._lock:
            if account not in self._accounts:
                if size_bytes > was_bytes:
                    raise RuntimeError(
                        f"the memory account of {account.name} is closed and cannot grow: open a new account"
                    )
                return
            added_bytes = size_bytes - was_bytes
            if added_bytes > 0 and gpu == CPU:
                self._check_host(account, added_bytes)
            elif added_bytes > 0 and gpu != HOST:
                self._check(account, gpu, kind, added_bytes)
            account._held[gpu, kind] = account._held.get((gpu, kind), 0) + added_bytes
            self._held[gpu] = self._held.get(gpu, 0) + added_bytes

    def _check(self, account: MemoryAccount, gpu: int, kind: Kind, added_bytes: int) -> None:
        account_bytes = account._holds(gpu)
        budget = account.budget_bytes
        if budget is not None and account_bytes + added_bytes > budget:
            message = (
                f"needs {format_bytes(added_bytes)} more of GPU {gpu} for {kind}: it holds {format_bytes(account_bytes)}, "
                f"its gpu_memory_budget is {format_bytes(budget)}"
            )
            cure = "raise gpu_memory_budget, or lower max_batch_size or the number of instances"
            raise NoRoom(account.name, message, cure, gpu, account_bytes + added_bytes - budget, others=False)
        limit = self._limits.get(gpu)
        if limit is None or self._held.get(gpu, 0) + added_bytes <= limit:
            return
        free_bytes = max(limit - self._held.get(gpu, 0), 0)
        message = (
            f"needs {format_bytes(added_bytes)} more of GPU {gpu} for {kind}: {format_bytes(free_bytes)} of "
            f"{format_bytes(limit)} are free ({self._holders(account, gpu, account_bytes)})"
        )
        cure = "raise --gpu-memory-fraction, unload models, or lower max_batch_size or the number of instances"
        raise NoRoom(
            account.name, message, cure, gpu, added_bytes - free_bytes, others=account_bytes + added_bytes <= limit
        )

    def _check_host(self, account: MemoryAccount, added_bytes: int) -> None:
        limit, held_bytes = self._limits.get(CPU), self._held.get(CPU, 0)
        if limit is None or held_bytes + added_bytes <= limit:
            return
        account_bytes, free_bytes = account._holds(CPU), max(limit - held_bytes, 0)
        message = (
            f"needs {format_bytes(account_bytes + added_bytes)} of host memory: {format_bytes(free_bytes + account_bytes)} "
            f"of the budget of {format_bytes(limit)} are free"
        )
        cure = "raise --host-memory-budget, or unload models that are never evicted (keep_loaded)"
        others = account_bytes + added_bytes <= limit
        raise NoRoom(account.name, message, cure, CPU, added_bytes - free_bytes, others)

    def _holders(self, account: MemoryAccount, gpu: int, account_bytes: int) -> str:
        sizes = {other.name: 0 for other in self._accounts if other is not account}
        for other in self._accounts - {account}:
            sizes[other.name] += other._holds(gpu)
        largest = sorted(((size, name) for name, size in sizes.items() if size), key=lambda pair: (-pair[0], pair[1]))
        usage = [f"it holds {format_bytes(account_bytes)}", *(f"{name} {format_bytes(size)}" for size, name in largest)]
        return ", ".join(usage)


class MemoryAccount:
    """Reservations of one loaded version.

    Attributes:
        ledger: the ledger of the server.
        model: name of the model.
        version: number of the version.
        budget_bytes: limit of the account on each GPU; None for the ledger's limits alone.
    """

    def __init__(self, ledger: Ledger, model: str, version: str, budget_bytes: int | None) -> None:
        self.ledger = ledger
        self._held: dict[tuple[int, Kind], int] = {}
        self.model = model
        self.version = version
        self.budget_bytes = budget_bytes

    @property
    def name(self) -> str:
        """Model and version, separated by "/"."""
        return f"{self.model}/{self.version}"

    def reservation(self, gpu: int, kind: Kind, size_bytes: int = 0) -> Reservation:
        """Reserve a block.

        Args:
            gpu: number of the GPU, `HOST` for pinned memory, or `CPU` for a model that the CPU runs.
            kind: purpose of the block.
            size_bytes: size of the block; 0 if `resize` sets it later.

        Raises:
            NoRoom: the block does not fit.
        """
        reservation = Reservation(self, gpu, kind)
        reservation.resize(size_bytes)
        return reservation

    def reserved_bytes(self) -> dict[int, int]:
        """Return the reserved bytes by GPU (and `HOST`, `CPU`)."""
        with self.ledger._lock:
            return {gpu: self._holds(gpu) for gpu, _ in self._held if self._holds(gpu)}

    def holdings(self) -> list[Holding]:
        """Return the reserved bytes of this account, sorted."""
        with self.ledger._lock:
            return sorted(self._holdings())

    def others(self) -> list[Holding]:
        """Return the reserved bytes of all other accounts, sorted."""
        with self.ledger._lock:
            return sorted(held for other in self.ledger._accounts - {self} for held in other._holdings())

    def close(self) -> None:
        """Release all reservations and close the account; a second call is a no-op."""
        ledger = self.ledger
        with ledger._lock:
            ledger._accounts.discard(self)
            for (gpu, _), size_bytes in self._held.items():
                ledger._held[gpu] -= size_bytes
            self._held.clear()

    def _holdings(self) -> list[Holding]:
        return [
            Holding(gpu, self.model, self.version, kind, size_bytes)
            for (gpu, kind), size_bytes in self._held.items()
            if size_bytes
        ]

    def _holds(self, gpu: int) -> int:
        return sum(size_bytes for (number, _), size_bytes in self._held.items() if number == gpu)


class Reservation:
    """Reserved bytes of one block. Its owner is the owner of the block; calls must not overlap.

    Attributes:
        size_bytes: reserved bytes.
    """

    def __init__(self, account: MemoryAccount, gpu: int, kind: Kind) -> None:
        self._account = account
        self._gpu = gpu
        self._kind = kind
        self.size_bytes = 0

    def resize(self, size_bytes: int) -> None:
        """Change the reserved bytes; 0 releases them.

        Raises:
            NoRoom: the block does not fit; the reservation is unchanged.
        """
        self._account.ledger._book(self._account, self._gpu, self._kind, self.size_bytes, size_bytes)
        self.size_bytes = size_bytes

    def release(self) -> None:
        """Release the reserved bytes; `resize` may reserve again."""
        self.resize(0)


def format_bytes(size_bytes: int) -> str:
    """Format bytes with a unit, e.g. "1.5 GiB"."""
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
