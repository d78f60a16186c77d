"""Requests that wait, by shape, and in the order of their keys within each shape.

Nothing here locks or reads a clock: the scheduler owns the lock under which every method is called.

A key is fixed when the request is queued, and the smallest is served first. A key is a time: when the request is due. A request
that is never due counts as due `HORIZON_NS` after it was queued, and none counts as due later than that, so that no request
waits for ever behind urgent ones. A priority level is a handicap: a request of the next lower level counts as due later by the
ageing time. So levels are strict among requests of about the same age, whatever their due times, and none starves: a request
that arrives after another's key is served behind it. Since a key never changes, nothing is moved when requests age.

Where clients share, the key is the start tag of start-time fair queueing instead (P. Goyal, H. M. Vin, H. Cheng, Start-time
Fair Queuing, SIGCOMM 1996). Requests of a client follow each other in a virtual time, in which a row takes longer the smaller
the client's weight. A client with few requests begins at the present of that time, or a batch before it, and is served at once;
a client that floods waits behind its own requests. An empty queue keeps these shares: where the objective is the time of two
batches, each batch takes all queued requests, and the first request after it would otherwise be served before all others. A
handicap is counted in rows there, `ROW_NS` for each, since that time has no seconds.

`SortedEntries` holds tens of thousands of entries in runs of some thousands, each a list. Finding a position is a search among
the runs and one within a run, and an insertion moves no more than the rest of that run; in one list or deque both would cost as
much as the queue is long. `sortedcontainers` was measured and is slower (docs/decisions/0002-sorted-runs-of-our-own.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter

from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.completion import Completion
from headrace.core.request import InferRequest
from headrace.core.tensor import Array
from headrace.scheduling.policy import Sharing


class Entry:
    """One request (or one part of an oversized one) in the queue, with its answer slot.

    Args:
        request: what is asked.
        completion: where the answer goes.
        level: priority level, 0 is served first.
        enqueued_ns: monotonic, now.
        objective_ns: how long after its arrival the model promises an answer, 0 if it does not.

    Attributes:
        inputs: tensors by name; given up as soon as the entry is dropped.
        rows: size of the batch dimension.
        shape_key: entries with equal keys may share a batch.
        level: priority level, 0 is served first.
        completion: where the answer goes.
        enqueued_ns: monotonic, when it was queued.
        received_ns: monotonic, when the request had arrived.
        deadline_ns: monotonic, when the client gives up; `FAR_NS` if it does not.
        due_ns: monotonic, when the answer should be there: the deadline, or what the model promises; `FAR_NS` if neither.
        client: who asks, "" for nobody in particular.
        predicted_ns: monotonic, when the answer was expected as it was admitted; 0 if that was not asked.
        kind: of urgency, for who predicts when it will be answered.
        key: what orders it; see `headrace.scheduling.queue`. 0: it has none yet.
        last: it is served behind all that are not.
        size_bytes: what it holds in memory.
        queued: True while it counts as waiting.
        counts_as_request: True for the one entry of a request that is counted as the request (the last part of a split one).
    """

    __slots__ = (
        "client",
        "completion",
        "counts_as_request",
        "deadline_ns",
        "due_ns",
        "enqueued_ns",
        "inputs",
        "key",
        "kind",
        "last",
        "level",
        "predicted_ns",
        "queued",
        "received_ns",
        "remove",
        "rows",
        "shape_key",
        "size_bytes",
    )

    def __init__(
        self, request: InferRequest, completion: Completion, level: int, enqueued_ns: int, objective_ns: int = 0
    ) -> None:
        self.inputs: dict[str, Array] = request.inputs
        self.rows = request.rows
        self.shape_key = request.shape_key
        self.level = level
        self.completion = completion
        self.enqueued_ns = enqueued_ns
        self.received_ns = request.received_ns
        self.client = request.client
        self.deadline_ns = self.due_ns = request.deadline_ns or FAR_NS
        if objective_ns:
            self.due_ns = min(self.due_ns, request.received_ns + objective_ns)
        self.predicted_ns = 0
        self.kind = 0
        self.size_bytes = request.size_bytes
        self.key = 0
        self.queued = self.last = False
        self.counts_as_request = True
        self.remove: Callable[[Entry], None] | None = None

    def on_settled(self) -> None:
        """Hook for `Completion.after`: give the place in the queue back if the entry still has one."""
        if self.queued and self.remove is not None:  # a first look without the lock spares those that were run
            self.remove(self)


FAR_NS = (1 << 63) - 1
"""A time that never comes."""
HORIZON_NS = 10 * NS_PER_S
ROW_NS = NS_PER_MS
_SMOOTHING = 16
_MOST_CLIENTS = 16_384
_FOR_EVER_NS = 1 << 80  # levels that do not age: more than any clock or virtual time comes to


class QueueOrder:
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
        self.shares = None if sharing is None else FairShares(sharing, credit_rows)
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


class FairShares:
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


MAX_RUN = 2048
"""Entries that a run has when another one is begun."""

_KEY, _ROWS, _SIZE_BYTES = attrgetter("key"), attrgetter("rows"), attrgetter("size_bytes")


def _last_key(run: list[Entry]) -> int:
    return run[-1].key


class SortedEntries:
    """Sorted by `Entry.key`; of equal keys, those that were added first come first.

    No run is empty but the only one.

    Attributes:
        runs: the entries, in order.
    """

    __slots__ = ("runs",)

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.runs: list[list[Entry]] = []
        self.refill(entries)

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self.runs)

    def __reversed__(self) -> Iterator[Entry]:
        return chain.from_iterable(map(reversed, reversed(self.runs)))

    def __bool__(self) -> bool:
        return bool(self.runs[0])

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    @property
    def first(self) -> Entry:
        """The entry with the least key; only if there is one."""
        return self.runs[0][0]

    def head(self, count: int) -> Iterable[Entry]:
        """The first `count`, or all if there are less."""
        run = self.runs[0]
        return run[:count] if len(run) >= count else islice(self, count)

    def add(self, entry: Entry) -> bool:
        """Put an entry in its place; True if that is before another one."""
        runs, key = self.runs, entry.key
        run = runs[-1]
        if not run or key >= run[-1].key:
            if len(run) < MAX_RUN:
                run.append(entry)
            else:
                runs.append([entry])
            return False
        place = 0
        if len(runs) > 1:
            place = bisect_right(runs, key, key=_last_key)
            run = runs[place]
        insort_right(run, entry, key=_KEY)
        if len(run) >= 2 * MAX_RUN:
            runs.insert(place + 1, run[MAX_RUN:])
            del run[MAX_RUN:]
        return True

    def is_at_end(self, key: int) -> bool:
        """True if all come before an entry of this key, if it were added now."""
        run = self.runs[-1]
        return not run or key >= run[-1].key

    def before(self, key: int) -> int:
        """How many come before an entry of this key, if it were added now; only if not all do."""
        runs, count = self.runs, 0
        place = bisect_right(runs, key, key=_last_key) if len(runs) > 1 else 0
        for run in runs[:place]:
            count += len(run)
        return count + bisect_right(runs[place], key, key=_KEY)

    def take(self, count: int) -> list[Entry]:
        """Remove the first `count`, or all if there are less."""
        runs = self.runs
        run = runs[0]
        taken = run[:count]
        del run[:count]
        while not run and len(runs) > 1:
            del runs[0]
            run = runs[0]
            left = count - len(taken)
            taken += run[:left]
            del run[:left]
        return taken

    def put_back(self, entries: list[Entry]) -> None:
        """Put entries before all others, which have no lesser keys."""
        self.runs[0][:0] = entries

    def remove(self, entry: Entry) -> None:
        """Take out one that is there."""
        runs, key = self.runs, entry.key
        number = bisect_left(runs, key, key=_last_key)
        run = runs[number]
        place = bisect_left(run, key, key=_KEY)
        while place == len(run) or run[place] is not entry:  # equal keys are few, but where all requests came at once
            place += 1
            if place >= len(run):
                number, place = number + 1, 0
                run = runs[number]
        del run[place]
        if not run and len(runs) > 1:
            del runs[number]

    def refill(self, entries: Iterable[Entry]) -> None:
        """Have these instead, which are in the order of their keys."""
        each = list(entries)
        self.runs = [each[first : first + MAX_RUN] for first in range(0, len(each), MAX_RUN)] or [[]]


# A lane is compacted when it holds this many dead entries more than live ones.
_DEAD_SLACK = 64


class ShapeQueue:
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
        due_count: live entries that are due some time and not among the last.
    """

    __slots__ = (
        "_dead",
        "_entries",
        "_last",
        "_out_of_order",
        "_timed",
        "count",
        "due_count",
        "last_rows",
        "total_rows",
    )

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._entries = SortedEntries()
        self._last: deque[Entry] = deque()
        self._dead = 0
        self._out_of_order = False  # some entry came later than one behind it
        self.count = 0
        self.total_rows = 0
        self.last_rows = 0
        self.due_count = 0

    def due_from_ns(self, count: int) -> int:
        """None of the first `count` entries is due earlier."""
        entries = self._entries
        if self._timed:
            return entries.first.key if entries else FAR_NS
        return min([entry.due_ns for entry in entries.head(count + self._dead)], default=FAR_NS)

    @property
    def oldest_ns(self) -> int:
        """When the entry that waits longest was queued; only for a lane that is not empty."""
        if not self._out_of_order and not self._last:
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
        run = self._entries.runs[0]
        return run[0] if run else self._last[0]

    @property
    def last_entry(self) -> Entry | None:
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
        if entries.is_at_end(key):
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
            self._out_of_order = True
        if entry.due_ns != FAR_NS:
            self.due_count += 1

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
        if self.due_count:
            self.due_count -= sum([entry.due_ns != FAR_NS for entry in taken])
        if self._last and len(taken) < count:
            self._take_last(count, taken)
        self.count -= len(taken)
        self.total_rows -= sum(map(_ROWS, taken))
        if not entries.runs[0]:
            self._out_of_order = False
        if self._dead:
            self._trim()
        return taken

    def remove_at(self, places: Sequence[int]) -> list[Entry]:
        """Remove the live entries at these places in the order of serving; none of them is among the last."""
        front = self.take(places[-1] + 1)
        removed = [front[place] for place in places]
        removed_places = set(places)
        left = [entry for place, entry in enumerate(front) if place not in removed_places]
        for entry in left:
            entry.queued = True
        self._entries.put_back(left)
        self.count += len(left)
        self.total_rows += sum([entry.rows for entry in left])
        self.due_count += sum([entry.due_ns != FAR_NS for entry in left])
        self._out_of_order = True
        return removed

    def discard(self, entry: Entry) -> None:
        """Turn a live entry of this lane into a dead one."""
        entry.queued = False
        entry.inputs = {}
        self.count -= 1
        self.total_rows -= entry.rows
        if entry.last:
            self.last_rows -= entry.rows
        elif entry.due_ns != FAR_NS:
            self.due_count -= 1
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
            self.due_count -= 1
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


class Queue:
    """All lanes of one model version.

    Args:
        levels: number of priority levels.
        order: makes the keys.

    Attributes:
        shape_queues: a view of all shape queues, first used first; a shape queue may be empty.
        count: live entries.
        total_rows: rows of the live entries.
        size_bytes: memory the live entries hold.
    """

    __slots__ = ("_levels", "_shape_queues", "count", "order", "shape_queues", "size_bytes", "total_rows")

    def __init__(self, levels: int = 1, order: QueueOrder | None = None) -> None:
        self.order = order or QueueOrder()
        self._levels = [[0, 0] for _ in range(levels)] if levels > 1 else []  # live entries of each, and rows
        self._shape_queues: dict[object, ShapeQueue] = {}
        self.shape_queues: Collection[ShapeQueue] = self._shape_queues.values()
        self.count = 0
        self.total_rows = 0
        self.size_bytes = 0

    @property
    def only(self) -> Entry | None:
        """The entry that waits, if just one does."""
        if self.count == 1:
            for shape_queue in self.shape_queues:
                if shape_queue.count:
                    return shape_queue.front
        return None

    def level(self, level: int) -> tuple[int, int]:
        """Live entries of a level, and their rows."""
        if not self._levels:
            return self.count, self.total_rows
        count, rows = self._levels[level]
        return count, rows

    def rows_ahead(self, level: int, due_ns: int, enqueued_ns: int, client: str) -> int:
        """About how many rows would be served before such an entry, if it were queued now."""
        return self._rows_before(self.order.key(level, due_ns, enqueued_ns, client))

    def place(self, entry: Entry) -> tuple[int, int, int]:
        """Give an entry its key, and say where it would be if it were queued now.

        Returns:
            About how many rows would be served before it, if nothing more came; how many at the most come later and go before
            it; its lag, see `QueueOrder.lag_ns`.
        """
        order, level = self.order, entry.level
        entry.key = key = order.key(level, entry.due_ns, entry.enqueued_ns, entry.client)
        rows, shares = self._rows_before(key), order.shares
        if shares is None:
            return rows, FAR_NS, order.lag_ns(key, entry.received_ns)
        overtakers = shares.rows_ahead(key - level * order.handicap_ns) - rows
        return rows, overtakers if overtakers > 0 else 0, order.lag_ns(key, entry.received_ns)

    def push(self, entry: Entry) -> ShapeQueue:
        """Put an entry into the lane of its shape; it keeps its key if it has one."""
        shape_queue = self._shape_queues.get(entry.shape_key)
        if shape_queue is None:
            shape_queue = self._shape_queues[entry.shape_key] = ShapeQueue(timed=self.order.plain and not self._levels)
        if not entry.last:
            order = self.order
            if not entry.key:
                if order.plain and not entry.level:  # what `key` would say: this is on the way of every request
                    key, due_ns = entry.enqueued_ns + order.horizon_ns, entry.due_ns
                    entry.key = due_ns if due_ns < key else key
                else:
                    entry.key = order.key(entry.level, entry.due_ns, entry.enqueued_ns, entry.client)
            if order.shares is not None:
                order.shares.queued(entry.client, entry.rows)
        shape_queue.push(entry)
        self.count += 1
        self.total_rows += entry.rows
        self.size_bytes += entry.size_bytes
        if self._levels:
            level = self._levels[entry.level]
            level[0] += 1
            level[1] += entry.rows
        return shape_queue

    def take(self, shape_queue: ShapeQueue, count: int) -> list[Entry]:
        """Remove the first `count` entries of a lane, to be run."""
        taken = shape_queue.take(count)
        self._uncount(taken)
        if not self.order.plain:
            self.order.served(taken)
        if len(self.shape_queues) > 1:
            self._close_if_empty(shape_queue, taken[0].shape_key)
        return taken

    def skip(self, shape_queue: ShapeQueue, places: Sequence[int]) -> list[Entry]:
        """Remove entries of a lane, at places in the order of serving, to be put last or refused."""
        skipped = shape_queue.remove_at(places)
        shares = self.order.shares
        if shares is not None:
            gained: dict[str, int] = {}
            for entry in skipped:
                if not entry.last:
                    gained[entry.client] = gained.get(entry.client, 0) + shares.unserved(entry.client, entry.rows)
            for each in self._shape_queues.values():
                each.move_up(gained)
        self._uncount(skipped)
        self._close_if_empty(shape_queue, skipped[0].shape_key)
        return skipped

    def discard(self, entry: Entry) -> bool:
        """Remove an entry before its turn; False if it is not waiting any more."""
        if not entry.queued:
            return False
        shape_queue = self._shape_queues[entry.shape_key]
        self._mark_unserved(entry)
        shape_queue.discard(entry)
        self._uncount([entry])
        self._close_if_empty(shape_queue, entry.shape_key)
        return True

    def put_last(self, entry: Entry) -> bool:
        """Have a waiting entry served behind all others; False if it is not waiting any more."""
        if not entry.queued:
            return False
        self._mark_unserved(entry)
        self._shape_queues[entry.shape_key].put_last(entry)
        return True

    def clear(self) -> list[Entry]:
        """Remove everything."""
        taken = [entry for shape_queue in self._shape_queues.values() for entry in shape_queue.take(shape_queue.count)]
        for entry in taken:
            self._mark_unserved(entry)
        self._uncount(taken)
        self._shape_queues.clear()
        return taken

    def _rows_before(self, key: int) -> int:
        rows = 0
        for shape_queue in self._shape_queues.values():
            rows += shape_queue.rows_before(key)
        return rows

    def _mark_unserved(self, entry: Entry) -> None:
        shares = self.order.shares
        if shares is not None and not entry.last:
            shares.unserved(entry.client, entry.rows)

    def _uncount(self, entries: list[Entry]) -> None:
        self.count -= len(entries)
        self.total_rows -= sum(map(_ROWS, entries))
        self.size_bytes -= sum(map(_SIZE_BYTES, entries))
        if self._levels:
            for entry in entries:
                level = self._levels[entry.level]
                level[0] -= 1
                level[1] -= entry.rows
        if not self.count and self.order.shares is not None:
            self.order.shares.rest()

    def _close_if_empty(self, shape_queue: ShapeQueue, shape_key: object) -> None:
        # A model with one shape keeps its lane; hostile or rare shapes must not pile lanes up.
        if shape_queue.count == 0 and len(self._shape_queues) > 1:
            del self._shape_queues[shape_key]
