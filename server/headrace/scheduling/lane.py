"""The requests of one shape that wait, in the order of their keys.

Nothing here locks or reads a clock: the scheduler owns the lock under which every method is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from headrace.scheduling.order import FAR_NS
from headrace.scheduling.runs import Runs

if TYPE_CHECKING:
    from headrace.scheduling.queue import Entry

# A lane is compacted when it holds this many dead entries more than live ones.
_DEAD_SLACK = 64

_KEY = attrgetter("key")


class Lane:
    """Requests of one shape: a `LaneView` for the decision.

    They lie in the order of their keys, and since those who come later are due later, an entry is as a rule appended. Behind them
    all are the last: what the queue's policy has put there, and what will be late whatever is done. Entries that left early stay
    as dead ones among the others (they hold no tensors) until they reach the front or the lane is compacted; the counts never
    include them.

    Args:
        timed: keys are the times when entries are due, or earlier.

    Attributes:
        count: live entries.
        total_rows: rows of them.
        last_rows: rows of those that are among the last.
        dated: live entries that are due some time and not among the last.
    """

    __slots__ = ("_dead", "_entries", "_last", "_mixed", "_timed", "count", "dated", "last_rows", "total_rows")

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._entries = Runs()
        self._last: deque[Entry] = deque()
        self._dead = 0
        self._mixed = False  # some entry came later than one behind it
        self.count = 0
        self.total_rows = 0
        self.last_rows = 0
        self.dated = 0

    def due_from_ns(self, count: int) -> int:
        """None of the first `count` entries is due earlier."""
        entries = self._entries
        if self._timed:
            return entries.first.key if entries else FAR_NS
        return min([entry.due_ns for entry in entries.head(count + self._dead)], default=FAR_NS)

    @property
    def oldest_ns(self) -> int:
        """When the entry that waits longest was queued; only for a lane that is not empty."""
        if not self._mixed and not self._last:
            return self._entries.first.enqueued_ns
        return min(entry.enqueued_ns for entry in chain(self._entries, self._last) if entry.queued)

    @property
    def rank(self) -> tuple[bool, int]:
        """Of two lanes the one with the lower rank goes first; only for a lane that is not empty."""
        front = self.front
        return front.last, front.key

    @property
    def front(self) -> Entry:
        """The entry to be served first; only for a lane that is not empty."""
        return self._entries.first if self._entries else self._last[0]

    @property
    def rear(self) -> Entry | None:
        """The entry to be served last, None if the lane is empty."""
        return next((entry for entry in chain(reversed(self._last), reversed(self._entries)) if entry.queued), None)

    def overdue(self, time_ns: int) -> Entry | None:
        """The first of the last entries, if it was due before `time_ns`."""
        last = self._last
        return last[0] if last and last[0].due_ns < time_ns else None

    def row_counts(self) -> Iterator[int]:
        """Rows of each live entry in the order of serving."""
        for entry in self._entries:
            if entry.queued:
                yield entry.rows
        for entry in self._last:
            if entry.queued:
                yield entry.rows

    def members(self) -> Iterator[tuple[int, int]]:
        """Rows of each, and when it is due, `FAR_NS` for those that are among the last."""
        for entry in self._entries:
            if entry.queued:
                yield entry.rows, entry.due_ns
        for entry in self._last:
            if entry.queued:
                yield entry.rows, FAR_NS

    def rows_before(self, key: int) -> int:
        """About how many rows would be served before an entry of this key."""
        entries, rows = self._entries, self.total_rows - self.last_rows
        if entries.would_end(key):
            return rows
        return rows * entries.before(key) // (self.count + self._dead - len(self._last))

    def push(self, entry: Entry) -> None:
        """Put an entry in its place."""
        entry.queued = True
        self.count += 1
        self.total_rows += entry.rows
        if entry.last:
            self._last.append(entry)
            self.last_rows += entry.rows
            return
        if self._entries.add(entry):
            self._mixed = True
        if entry.due_ns != FAR_NS:
            self.dated += 1

    def take(self, count: int) -> list[Entry]:
        """Remove the first `count` live entries."""
        taken: list[Entry] = []
        entries = self._entries
        while len(taken) < count and (slots := entries.take(count - len(taken))):
            for entry in slots:
                if entry.queued:
                    entry.queued = False
                    taken.append(entry)
                else:
                    self._dead -= 1
        if self.dated:
            self.dated -= sum([entry.due_ns != FAR_NS for entry in taken])
        if self._last and len(taken) < count:
            self._take_last(count, taken)
        self.count -= len(taken)
        self.total_rows -= sum([entry.rows for entry in taken])
        if not entries:
            self._mixed = False
        self._trim()
        return taken

    def pick(self, places: Sequence[int]) -> list[Entry]:
        """Remove the live entries at these places in the order of serving; none of them is among the last."""
        front = self.take(places[-1] + 1)
        picked = [front[place] for place in places]
        chosen = set(places)
        left = [entry for place, entry in enumerate(front) if place not in chosen]
        for entry in left:
            entry.queued = True
        self._entries.put_back(left)
        self.count += len(left)
        self.total_rows += sum([entry.rows for entry in left])
        self.dated += sum([entry.due_ns != FAR_NS for entry in left])
        self._mixed = True
        return picked

    def discard(self, entry: Entry) -> None:
        """Turn a live entry of this lane into a dead one."""
        entry.queued = False
        entry.inputs = {}
        self.count -= 1
        self.total_rows -= entry.rows
        if entry.last:
            self.last_rows -= entry.rows
        elif entry.due_ns != FAR_NS:
            self.dated -= 1
        self._dead += 1
        self._trim()

    def put_last(self, entry: Entry) -> None:
        """Have a live entry served behind all others."""
        if entry.last:
            return
        self._entries.remove(entry)
        entry.last = True
        self._last.append(entry)
        self.last_rows += entry.rows
        if entry.due_ns != FAR_NS:
            self.dated -= 1
        self._trim()

    def move_up(self, gained: Mapping[str, int]) -> None:
        """Lower the keys of clients' entries; as few are skipped, it may take its time."""
        for entry in self._entries:
            entry.key -= gained.get(entry.client, 0)
        self._entries.refill(sorted(self._entries, key=_KEY))

    def _take_last(self, count: int, taken: list[Entry]) -> None:
        last = self._last
        while last and len(taken) < count:
            entry = last.popleft()
            if entry.queued:
                entry.queued = False
                self.last_rows -= entry.rows
                taken.append(entry)
            else:
                self._dead -= 1

    def _trim(self) -> None:
        """Keep the fronts live (`oldest_ns` reads them) and the dead few."""
        if not self._dead:
            return
        if self._dead > self.count + _DEAD_SLACK:
            self._entries.refill([entry for entry in self._entries if entry.queued])
            self._last = deque([entry for entry in self._last if entry.queued])
            self._dead = 0
            return
        entries, last = self._entries, self._last
        while entries and not entries.first.queued:
            entries.take(1)
            self._dead -= 1
        while last and not last[0].queued:
            last.popleft()
            self._dead -= 1
