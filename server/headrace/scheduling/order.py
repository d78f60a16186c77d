"""In what order requests are served: a key for each, fixed when it is queued; the least goes first.

A key is a time: when the request is due. One that is never due counts as due `HORIZON_NS` after it was queued, and none counts as
due later than that, so that nobody waits for ever behind those in a hurry. A priority level is a handicap: a request of the next
lower level counts as due later by the time of ageing. So levels are strict among requests of about the same age, whatever their
dues, and yet none starves: what comes later than a request's key is served behind it. Since a key never changes, nothing has to
be moved when requests age.

Where clients share, the key is the start tag of start-time fair queueing instead (P. Goyal, H. M. Vin, H. Cheng, Start-time Fair
Queuing, SIGCOMM 1996): each client's requests follow each other in a virtual time, in which a row takes the longer the less its
weight. A client with little to ask begins at the present of that time, or a batch before it, and is served at once; one that
floods waits behind itself. An empty queue changes nothing of who has had how much: where the time that is promised is that of two
batches, each batch is all that waits, and whoever came first after it would otherwise go before everybody.
There a handicap is counted in rows, `ROW_NS` of it for each, since that time has no seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.core.clock import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from headrace.scheduling.policy import Sharing
    from headrace.scheduling.queue import Entry

FAR_NS = (1 << 63) - 1
"""A time that never comes."""
HORIZON_NS = 10 * NS_PER_S
ROW_NS = NS_PER_MS
_SMOOTHING = 16
_MOST_CLIENTS = 16_384
_FOR_EVER_NS = 1 << 80  # levels that do not age: more than any clock or virtual time comes to


class Order:
    """Makes keys.

    Args:
        aging_ns: how long a request waits before it counts as of the next higher level, 0: levels do not age.
        sharing: how clients share; None: a request is a request, whoever sent it.
        credit_rows: what a client that asked for less than its share may have at once before the others.

    Attributes:
        handicap_ns: of a level behind the next higher one.
        horizon_ns: dues further away order nothing.
        shares: the clients' virtual time, if they share.
        plain: they do not.
    """

    def __init__(self, aging_ns: int = 0, sharing: Sharing | None = None, credit_rows: int = 0) -> None:
        self.handicap_ns = aging_ns or _FOR_EVER_NS
        self.horizon_ns = min(HORIZON_NS, self.handicap_ns)
        self.shares = None if sharing is None else Shares(sharing, credit_rows)
        self.plain = sharing is None

    def key(self, level: int, due_ns: int, enqueued_ns: int, client: str) -> int:
        """What a request would get if it were queued now.

        Args:
            level: its priority, from 0.
            due_ns: monotonic; a time that never comes: never.
            enqueued_ns: monotonic, now.
            client: who asks.
        """
        key = enqueued_ns + self.horizon_ns
        if self.shares is not None:
            key = self.shares.start(client)
        elif due_ns < key:
            key = due_ns
        return key + level * self.handicap_ns if level else key

    def lag_ns(self, key: int, received_ns: int) -> int:
        """How far behind those that are served at once a request is, in the time of the keys.

        Args:
            key: the request's.
            received_ns: monotonic, when it had arrived.
        """
        return max(key - (received_ns if self.shares is None else self.shares.now), 0)

    @property
    def crowded(self) -> bool:
        """Several clients ask."""
        return self.shares is not None and self.shares.several

    def served(self, entries: Sequence[Entry]) -> None:
        """Requests are being run."""
        if self.shares is not None:
            tags = [entry.key - entry.level * self.handicap_ns for entry in entries if not entry.last]
            self.shares.served(max(tags, default=0), sum([entry.rows for entry in entries]))


class Shares:
    """The virtual time of one queue.

    Attributes:
        now: start tag of what was served last.
        several: more than one client has asked since something waits.
    """

    def __init__(self, sharing: Sharing, credit_rows: int = 0) -> None:
        self._weights, self._default_weight = sharing.weights, sharing.default_weight
        self._credit = credit_rows * ROW_NS
        self.now = 0
        self._moved = self._rows = 0.0  # smoothed: how far a batch moves that time, and its rows
        self._busy = False  # something was served, and something waits
        self._first: str | None = None  # who was the first to ask since something waits
        self.several = False
        self._ends: dict[str, int] = {}  # who is not in it has not asked of late

    def start(self, client: str) -> int:
        """The tag of the client's next request."""
        earliest, end = self.now - self._credit, self._ends.get(client, 0)
        return end if end > earliest else earliest

    def rows_ahead(self, tag: int) -> int:
        """Rows that are served before a request of this start tag, if the others go on asking as they do."""
        return int((tag - self.now) * self._rows / self._moved) if self._moved else 0

    def queued(self, client: str, rows: int) -> None:
        """A request was queued."""
        if self._first is None:
            self._first = client
        elif client != self._first:
            self.several = True
        ends = self._ends
        ends[client] = self.start(client) + self._virtual(client, rows)
        if len(ends) > _MOST_CLIENTS:  # names cost their sender nothing
            self._ends = {name: end for name, end in ends.items() if end > self.now - self._credit}
            if len(self._ends) > _MOST_CLIENTS // 2:
                self._ends = {}

    def unserved(self, client: str, rows: int) -> int:
        """A request has left the queue without having been served: the client's next ones need not wait for it.

        Returns:
            How much earlier those that wait behind it could be served.
        """
        cost = self._virtual(client, rows)
        if client in self._ends:
            self._ends[client] -= cost
        return cost

    def served(self, tag: int, rows: int) -> None:
        """A batch is being run: its greatest tag, and its rows."""
        if tag <= self.now:
            return
        if self._busy:  # else there is nothing before it to measure from
            self._moved += (tag - self.now - self._moved) / _SMOOTHING
            self._rows += (rows - self._rows) / _SMOOTHING
        self.now, self._busy = tag, True

    def rest(self) -> None:
        """Nothing waits."""
        self._first = None
        self._busy = self.several = False

    def _virtual(self, client: str, rows: int) -> int:
        return int(rows * ROW_NS / self._weights.get(client, self._default_weight))
