"""Shares of clients in a queue: virtual times of start-time fair queueing.

The key of a request is the start tag of start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, Start-time Fair
Queuing, SIGCOMM 1996). Requests of a client follow each other in a virtual time, in which a row takes longer the smaller the
client's weight. A client with few requests starts at the present virtual time, or a batch before it, and is served at once. A
client with many requests waits behind them. An empty queue keeps the virtual time: with an objective of about two batch
durations each batch takes all queued requests, and the first request after it would otherwise be served before all others. The
handicap of a level is counted in rows, `ROW_NS` each, since virtual time has no seconds.
"""

from __future__ import annotations

from headrace.core.clock import NS_PER_MS
from headrace.inference.scheduling.policy import Sharing

ROW_NS = NS_PER_MS
_SMOOTHING = 16
_MOST_CLIENTS = 16_384


class FairShares:
    """Virtual time of start-time fair queueing, for one queue.

    Attributes:
        now: start tag of the latest served request.
        several: True if more than one client has queued requests since the queue was empty.
    """

    def __init__(self, sharing: Sharing, credit_rows: int = 0) -> None:
        self._weights, self._default_weight = sharing.weights, sharing.default_weight
        self._credit = credit_rows * ROW_NS
        self.now = 0
        self._moved = self._rows = 0.0  # smoothed: advance of virtual time by a batch, and its rows
        self._busy = False  # True if a batch was served since the queue was empty
        self._first: str | None = None  # first client since the queue was empty
        self.several = False
        self._ends: dict[str, int] = {}  # end of each client's latest request, without clients that are idle

    def start(self, client: str) -> int:
        """Return the start tag of the client's next request."""
        earliest, end = self.now - self._credit, self._ends.get(client, 0)
        return end if end > earliest else earliest

    def rows_ahead(self, tag: int) -> int:
        """Estimate the rows that are served before a request of this start tag, at the present arrival rates."""
        return int((tag - self.now) * self._rows / self._moved) if self._moved else 0

    def queued(self, client: str, rows: int) -> None:
        """Record that a request was queued."""
        if self._first is None:
            self._first = client
        elif client != self._first:
            self.several = True
        ends = self._ends
        ends[client] = self.start(client) + self._virtual(client, rows)
        if len(ends) > _MOST_CLIENTS:  # bounded, since clients can invent names
            self._ends = {name: end for name, end in ends.items() if end > self.now - self._credit}
            if len(self._ends) > _MOST_CLIENTS // 2:
                self._ends = {}

    def unserved(self, client: str, rows: int) -> int:
        """Record that a request left the queue unserved, so that later requests of the client do not wait for it.

        Returns:
            Reduction of the keys of the client's requests behind it.
        """
        cost = self._virtual(client, rows)
        if client in self._ends:
            self._ends[client] -= cost
        return cost

    def advance(self, tag: int, rows: int) -> None:
        """Record a batch by its greatest start tag and its rows."""
        if tag <= self.now:
            return
        if self._busy:  # after an empty queue there is no batch to measure from
            self._moved += (tag - self.now - self._moved) / _SMOOTHING
            self._rows += (rows - self._rows) / _SMOOTHING
        self.now, self._busy = tag, True

    def rest(self) -> None:
        """Record that the queue is empty."""
        self._first = None
        self._busy = self.several = False

    def _virtual(self, client: str, rows: int) -> int:
        return int(rows * ROW_NS / self._weights.get(client, self._default_weight))
