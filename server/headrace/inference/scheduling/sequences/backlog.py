"""Sequences that wait for a slot, in an order that shares the slots between clients (max-min fairness)."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """A sequence, as the backlog sees it; see `LiveSequence`."""

    client: str
    started_ns: int


T = TypeVar("T", bound=Waiting)


class Backlog(Generic[T]):
    """Sequences that wait for a slot, by client. A client that waits is in `clients`, the one that was served last at the end.

    Attributes:
        clients: waiting sequences of each client, in the order of arrival.
        slots: number of slots of each client that has one.
        count: number of waiting sequences.
    """

    def __init__(self) -> None:
        self.clients: dict[str, dict[T, None]] = {}
        self.slots: dict[str, int] = {}
        self.count = 0

    def add(self, sequence: T, now_ns: int) -> None:
        """Append a sequence."""
        sequence.started_ns = now_ns
        self.clients.setdefault(sequence.client, {})[sequence] = None
        self.count += 1

    def discard(self, sequence: T) -> None:
        """Remove a sequence if it waits."""
        waiting = self.clients.get(sequence.client, {})
        if sequence in waiting:
            del waiting[sequence]
            self.count -= 1
            if not waiting:
                del self.clients[sequence.client]

    def count_slot(self, client: str, change: int) -> None:
        """Count a slot that a client gets (1) or releases (-1)."""
        self.slots[client] = slots = self.slots.get(client, 0) + change
        if not slots:
            del self.slots[client]

    @property
    def next(self) -> T:
        """The oldest sequence of the client with the fewest slots; of equal clients, of the one that was served first."""
        return next(iter(self.clients[min(self.clients, key=lambda client: self.slots.get(client, 0))]))

    def pop(self) -> T:
        """Remove and return the next sequence."""
        sequence = self.next
        self.discard(sequence)
        if sequence.client in self.clients:
            self.clients[sequence.client] = self.clients.pop(sequence.client)
        return sequence

    def holds_more(self, client: str) -> bool:
        """Return True if a client has more slots than the next one would have with one of them."""
        return self.slots.get(client, 0) > self.slots.get(self.next.client, 0) + 1
