"""Queued requests, by shape, and in the order of their keys within each shape.

This module neither locks nor reads a clock: the scheduler calls every method under its lock.

A key is set when the request is queued, and the smallest is served first. A key is the time at which the request is due. A
request without a due time counts as due `HORIZON_NS` after it was queued, and none counts as due later, so that no request
waits for ever behind urgent ones. A priority level is a handicap: a request of the next lower level counts as due later by the
ageing time. Levels are therefore strict among requests of about the same age, regardless of due times, and none starves: a
request that arrives after another's key is served behind it. A key never changes, so ageing moves no entry.

With fair sharing the key is the start tag of a virtual time (`fair_shares`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from operator import attrgetter

from headrace.core.clock import NS_PER_S
from headrace.core.completion import Completion, GroupCompletion
from headrace.core.request import InferRequest
from headrace.core.tensor import Array
from headrace.inference.scheduling.fair_shares import FairShares
from headrace.inference.scheduling.policy import Sharing
from headrace.inference.scheduling.sorted_entries import MAX_RUN, SortedEntries
from headrace.runtimes.members import BatchMember


class Entry:
    """A request, or a part of a split request, in the queue, with its completion.

    Args:
        request: the request or part.
        completion: completion of the request or part.
        level: priority level, 0 is served first.
        enqueued_ns: monotonic time of queueing.
        objective_ns: latency objective from arrival to response, 0 for none.

    Attributes:
        inputs: arrays by name, of shape (rows, ...); released when the entry is dropped.
        rows: size of the batch dimension.
        shape_key: entries with equal keys may share a batch.
        level: priority level, 0 is served first.
        completion: completion of the request or part.
        enqueued_ns: monotonic time of queueing.
        received_ns: monotonic time at which the request had arrived.
        deadline_ns: monotonic deadline of the client; `FAR_NS` for none.
        due_ns: monotonic due time: the deadline or the objective, whichever is earlier; `FAR_NS` for neither.
        client: name of the client, "" without one.
        predicted_ns: monotonic completion time predicted at admission; 0 without a prediction.
        kind: urgency class of prediction errors; see `headrace.inference.scheduling.admission`.
        key: sort key, see `headrace.inference.scheduling.queue`; 0 before it is set.
        last: True if it is served behind all entries that are not last.
        of_pipeline: True for a step of a pipeline request with a due time.
        inline: True if it may run on the event loop.
        size_bytes: memory of the entry.
        queued: True while it counts as queued.
        member: the request as a member of its batch; None unless the execution runs requests as a list.
        counts_as_request: True for the one entry that counts as the request in metrics (the last part of a split one).
        members: requests of a group, for which the entry stands; None for a single request.
        requests: number of requests for which the entry stands.
        remove: removes a settled entry from the queue.
        resident_outputs: outputs whose readers take `ResidentRows`.
    """

    __slots__ = (
        "client", "completion", "counts_as_request", "deadline_ns", "due_ns", "enqueued_ns", "inline", "inputs",
        "key", "kind", "last", "level", "member", "members", "of_pipeline", "predicted_ns", "queued", "received_ns",
        "remove", "requests", "resident_outputs", "rows", "shape_key", "size_bytes",
    )  # fmt: skip

    def __init__(
        self, request: InferRequest, completion: Completion, level: int, enqueued_ns: int, objective_ns: int = 0
    ) -> None:
        self.inputs: dict[str, Array] = request.inputs
        self.resident_outputs = request.resident_outputs
        self.rows = request.rows
        self.shape_key = request.shape_key
        self.level = level
        self.completion = completion
        self.enqueued_ns = enqueued_ns
        self.received_ns = request.received_ns
        self.client = request.client
        self.deadline_ns = self.due_ns = request.deadline_ns or FAR_NS
        self.of_pipeline = request.due_ns != 0
        if self.of_pipeline:  # later steps need the result before the deadline
            self.due_ns = min(self.due_ns, request.due_ns)
            if request.deadline_ns:
                self.deadline_ns = self.due_ns
        if objective_ns:
            self.due_ns = min(self.due_ns, request.received_ns + objective_ns)
        self.predicted_ns = 0
        self.kind = 0
        self.size_bytes = request.size_bytes
        self.key = 0
        self.queued = self.last = self.inline = False
        self.counts_as_request = True
        self.remove: Callable[[Entry], None] | None = None
        self.member: BatchMember | None = None
        self.members = members = request.members
        self.requests = 1 if members is None else len(members.rows)

    def fitting(self, max_rows: int) -> int:
        """Return the number of members of a group, from the first, whose rows fit in `max_rows`; 0 for a single request."""
        if self.members is None:
            return 0
        count = 0
        for rows in self.members.rows:
            max_rows -= rows
            if max_rows < 0:
                break
            count += 1
        return count

    def split(self, count: int) -> Entry:
        """Return an entry of the first `count` members of a group, which are no longer part of this one.

        The new entry is not queued, and inherits order and due time. The caller adjusts the totals of a queue with this one.
        """
        members, completion = self.members, self.completion
        assert members is not None
        assert type(completion) is GroupCompletion
        rows = sum(members.rows[:count])
        front = copy(self)
        front.queued = False
        front.completion = completion.split(count)
        front.completion.after = front.on_settled
        front.members, self.members = front.completion.members, completion.members
        front.requests, self.requests = count, self.requests - count
        front.size_bytes = self.size_bytes * rows // self.rows
        front.inputs = {name: array[:rows] for name, array in self.inputs.items()}
        self.inputs = {name: array[rows:] for name, array in self.inputs.items()}
        self.size_bytes -= front.size_bytes
        front.rows = rows
        self.rows -= rows
        front.received_ns, self.received_ns = min(front.members.received_ns), min(self.members.received_ns)
        return front

    def apart(self) -> list[Entry]:
        """Return an entry for each member of a group that is not queued; a single request as it is."""
        parts = [self.split(1) for _ in range(self.requests - 1)]
        return [*parts, self]

    def on_settled(self) -> None:
        """Remove a settled entry that is still queued; set as `Completion.after`."""
        if self.queued and self.remove is not None:  # checked without the lock: most entries have left the queue
            self.remove(self)


FAR_NS = (1 << 63) - 1
"""Due time of entries without one."""
HORIZON_NS = 10 * NS_PER_S
_FOR_EVER_NS = 1 << 80  # handicap of levels without ageing: above any clock or virtual time


class QueueOrder:
    """Computes sort keys.

    Args:
        aging_ns: queue time after which a request counts as of the next higher level, 0 for no ageing.
        sharing: fair sharing between clients; None serves requests regardless of their client.
        credit_rows: rows that a client below its share may have served before the others.

    Attributes:
        handicap_ns: added to the key for each level.
        horizon_ns: due times further away do not affect the order.
        shares: virtual time of the clients, with fair sharing.
        plain: True without fair sharing.
    """

    def __init__(self, aging_ns: int = 0, sharing: Sharing | None = None, credit_rows: int = 0) -> None:
        self.handicap_ns = aging_ns or _FOR_EVER_NS
        self.horizon_ns = min(HORIZON_NS, self.handicap_ns)
        self.shares = None if sharing is None else FairShares(sharing, credit_rows)
        self.plain = sharing is None

    def key(self, level: int, due_ns: int, enqueued_ns: int, client: str) -> int:
        """Return the key of a request that is queued now.

        Args:
            level: priority level, from 0.
            due_ns: monotonic due time; `FAR_NS` for none.
            enqueued_ns: monotonic, now.
            client: name of the client.
        """
        key = enqueued_ns + self.horizon_ns
        if self.shares is not None:
            key = self.shares.start(client)
        elif due_ns < key:
            key = due_ns
        return key + level * self.handicap_ns if level else key

    def lag_ns(self, key: int, received_ns: int) -> int:
        """Return the distance of a key from that of a request that is served at once, in the time of the keys.

        Args:
            key: key of the request.
            received_ns: monotonic arrival time of the request.
        """
        return max(key - (received_ns if self.shares is None else self.shares.now), 0)

    @property
    def crowded(self) -> bool:
        """True while several clients have queued requests."""
        return self.shares is not None and self.shares.several

    def advance(self, entries: Sequence[Entry]) -> None:
        """Advance the virtual time to the entries of a batch."""
        if self.shares is not None:
            tags = [entry.key - entry.level * self.handicap_ns for entry in entries if not entry.last]
            self.shares.advance(max(tags, default=0), sum([entry.rows for entry in entries]))


_KEY, _ROWS, _SIZE_BYTES = attrgetter("key"), attrgetter("rows"), attrgetter("size_bytes")

# A shape queue is compacted when it holds this many more removed entries than live ones.
_DEAD_SLACK = 64


class ShapeQueue:
    """Queued entries of one shape: requests that may share a batch.

    Entries are sorted by key. Later requests are usually due later, so an entry is usually appended. Behind them are the last
    entries: those that the queue policy demoted, and those that are certain to be late. An entry that leaves early stays as a
    dead entry without tensors until it reaches the front or the shape queue is compacted. The counts exclude dead entries.

    Args:
        timed: True if no entry is due before its key.

    Attributes:
        count: number of live entries.
        total_rows: rows of the live entries.
        last_rows: rows of the live entries that are last.
        due_count: number of live entries with a due time that are not last.
    """

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._entries: SortedEntries[Entry] = SortedEntries()
        self._last: deque[Entry] = deque()
        self._dead = 0
        self._out_of_order = False  # True if an entry was queued later than one behind it
        self.count = 0
        self.total_rows = 0
        self.last_rows = 0
        self.due_count = 0

    def due_from_ns(self, count: int) -> int:
        """Return a lower bound of the due times of the first `count` entries."""
        entries = self._entries
        if self._timed:
            return entries.first.key if entries else FAR_NS
        return min([entry.due_ns for entry in entries.head(count + self._dead)], default=FAR_NS)

    @property
    def oldest_ns(self) -> int:
        """Time at which the oldest entry was queued; requires an entry."""
        if not self._out_of_order and not self._last:
            return self._entries.first.enqueued_ns
        return min(entry.enqueued_ns for entry in chain(self._entries, self._last) if entry.queued)

    @property
    def rank(self) -> tuple[bool, int]:
        """Rank among shape queues, the lowest is served first; requires an entry."""
        front = self.front
        return front.last, front.key

    @property
    def front(self) -> Entry:
        """The entry that is served first; requires an entry."""
        run = self._entries.runs[0]
        return run[0] if run else self._last[0]

    @property
    def last_entry(self) -> Entry | None:
        """The entry that is served last, None without entries."""
        return next((entry for entry in chain(reversed(self._last), reversed(self._entries)) if entry.queued), None)

    def overdue(self, time_ns: int) -> Entry | None:
        """Return the first of the last entries if it was due before `time_ns`."""
        last = self._last
        return last[0] if last and last[0].due_ns < time_ns else None

    def row_counts(self) -> Iterator[int]:
        """Yield the rows of each live entry, in the order of serving."""
        for entry in self._entries:
            if entry.queued:
                yield entry.rows
        for entry in self._last:
            if entry.queued:
                yield entry.rows

    def members(self) -> Iterator[tuple[int, int]]:
        """Yield rows and due time of each live entry, in the order of serving; `FAR_NS` for last entries."""
        for entry in self._entries:
            if entry.queued:
                yield entry.rows, entry.due_ns
        for entry in self._last:
            if entry.queued:
                yield entry.rows, FAR_NS

    def rows_before(self, key: int) -> int:
        """Estimate the rows that would be served before an entry of this key."""
        entries, rows = self._entries, self.total_rows - self.last_rows
        if entries.is_at_end(key):
            return rows
        return rows * entries.before(key) // (self.count + self._dead - len(self._last))

    def push(self, entry: Entry) -> None:
        """Queue an entry."""
        entry.queued = True
        self.count += 1
        self.total_rows += entry.rows
        if entry.last:
            self._last.append(entry)
            self.last_rows += entry.rows
            return
        run, key = self._entries.runs[-1], entry.key
        if run and key >= run[-1].key and len(run) < MAX_RUN:  # as `add` does for nearly every entry, without its call
            run.append(entry)
        elif self._entries.add(entry):
            self._out_of_order = True
        if entry.due_ns != FAR_NS:
            self.due_count += 1

    def take(self, count: int) -> list[Entry]:
        """Remove and return the first `count` live entries."""
        removed: list[Entry] = []
        entries = self._entries
        while len(removed) < count and (slots := entries.take(count - len(removed))):
            for entry in slots:
                if entry.queued:
                    entry.queued = False
                    removed.append(entry)
                else:
                    self._dead -= 1
        if self.due_count:
            self.due_count -= sum([entry.due_ns != FAR_NS for entry in removed])
        if self._last and len(removed) < count:
            self._take_last(count, removed)
        self.count -= len(removed)
        self.total_rows -= sum(map(_ROWS, removed))
        if not entries.runs[0]:
            self._out_of_order = False
        if self._dead:
            self._trim()
        return removed

    def split_front(self, count: int) -> Entry:
        """Remove and return the first `count` members of the front entry, a group that keeps the others.

        Args:
            count: of members, less than all.
        """
        front = self.front
        part = front.split(count)
        self.total_rows -= part.rows
        if front.last:
            self.last_rows -= part.rows
        return part

    def remove_at(self, positions: Sequence[int]) -> list[Entry]:
        """Remove and return the live entries at these positions in the order of serving; none of them may be last."""
        front = self.take(positions[-1] + 1)
        removed = [front[position] for position in positions]
        removed_places = set(positions)
        remaining = [entry for position, entry in enumerate(front) if position not in removed_places]
        for entry in remaining:
            entry.queued = True
        self._entries.put_back(remaining)
        self.count += len(remaining)
        self.total_rows += sum([entry.rows for entry in remaining])
        self.due_count += sum([entry.due_ns != FAR_NS for entry in remaining])
        self._out_of_order = True
        return removed

    def discard(self, entry: Entry) -> None:
        """Turn a live entry into a dead one."""
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
        """Serve a live entry behind all others."""
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
        """Reduce the keys of entries by client. Its cost is linear: entries are skipped rarely."""
        for entry in self._entries:
            entry.key -= gained.get(entry.client, 0)
        self._entries.refill(sorted(self._entries, key=_KEY))

    def _take_last(self, count: int, removed: list[Entry]) -> None:
        last = self._last
        while last and len(removed) < count:
            entry = last.popleft()
            if entry.queued:
                entry.queued = False
                self.last_rows -= entry.rows
                removed.append(entry)
            else:
                self._dead -= 1

    def _trim(self) -> None:
        """Remove dead entries at the front, which `oldest_ns` reads, and compact if there are many."""
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
    """All shape queues of one model version.

    Args:
        levels: number of priority levels.
        order: computes the keys.

    Attributes:
        shape_queues: view of all shape queues, in the order of first use; one may be empty.
        count: number of live entries.
        joined: requests of the live entries beyond one for each: those of groups.
        total_rows: rows of the live entries.
        size_bytes: memory of the live entries.
    """

    __slots__ = ("_levels", "_shape_queues", "count", "joined", "order", "shape_queues", "size_bytes", "total_rows")

    def __init__(self, levels: int = 1, order: QueueOrder | None = None) -> None:
        self.order = order or QueueOrder()
        self._levels = [[0, 0] for _ in range(levels)] if levels > 1 else []  # live entries of each, and rows
        self._shape_queues: dict[object, ShapeQueue] = {}
        self.shape_queues: Collection[ShapeQueue] = self._shape_queues.values()
        self.count = self.joined = 0
        self.total_rows = 0
        self.size_bytes = 0

    @property
    def requests(self) -> int:
        """Number of queued requests."""
        return self.count + self.joined

    @property
    def only(self) -> Entry | None:
        """The only queued entry, None if there is none or more than one."""
        if self.count == 1:
            for shape_queue in self.shape_queues:
                if shape_queue.count:
                    return shape_queue.front
        return None

    @property
    def front(self) -> Entry | None:
        """The entry that is served first; None without one, or if entries of several shapes wait."""
        waiting = [shape_queue for shape_queue in self.shape_queues if shape_queue.count]
        return waiting[0].front if len(waiting) == 1 else None

    def level(self, level: int) -> tuple[int, int]:
        """Return the number of requests of a level, and their rows; a model with several levels has no groups."""
        if not self._levels:
            return self.requests, self.total_rows
        count, rows = self._levels[level]
        return count, rows

    def rows_ahead(self, level: int, due_ns: int, enqueued_ns: int, client: str) -> int:
        """Estimate the rows that would be served before such an entry, if it were queued now."""
        return self._rows_before(self.order.key(level, due_ns, enqueued_ns, client))

    def locate(self, entry: Entry) -> tuple[int, int, int]:
        """Set an entry's key, and predict its position in the order of serving.

        Returns:
            Queued rows ahead of the entry (an estimate), the largest number of rows that later arrivals may put ahead of it,
            and its lag; see `QueueOrder.lag_ns`.
        """
        order, level = self.order, entry.level
        entry.key = key = order.key(level, entry.due_ns, entry.enqueued_ns, entry.client)
        rows, shares = self._rows_before(key), order.shares
        if shares is None:
            return rows, FAR_NS, order.lag_ns(key, entry.received_ns)
        overtakers = shares.rows_ahead(key - level * order.handicap_ns) - rows
        return rows, overtakers if overtakers > 0 else 0, order.lag_ns(key, entry.received_ns)

    def push(self, entry: Entry) -> ShapeQueue:
        """Queue an entry in the shape queue of its shape; sets its key unless it has one."""
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
        self.joined += entry.requests - 1
        if self._levels:
            level = self._levels[entry.level]
            level[0] += 1
            level[1] += entry.rows
        return shape_queue

    def take(self, shape_queue: ShapeQueue, count: int) -> list[Entry]:
        """Remove and return the first `count` entries of a shape queue, for a batch."""
        removed = shape_queue.take(count)
        self._uncount(removed)
        if not self.order.plain:
            self.order.advance(removed)
        if len(self.shape_queues) > 1:
            self._close_if_empty(shape_queue, removed[0].shape_key)
        return removed

    def take_part(self, shape_queue: ShapeQueue, max_rows: int) -> Entry | None:
        """Remove and return the members of the front entry that fit in `max_rows`; None if they are none, or all."""
        front = shape_queue.front
        count = front.fitting(max_rows)
        if not 0 < count < front.requests:
            return None
        part = shape_queue.split_front(count)
        self.joined -= count
        self.total_rows -= part.rows
        self.size_bytes -= part.size_bytes
        return part

    def skip(self, shape_queue: ShapeQueue, positions: Sequence[int]) -> list[Entry]:
        """Remove and return entries at these positions in the order of serving, to be demoted or rejected."""
        skipped = shape_queue.remove_at(positions)
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
        """Remove an entry that is not served; False if it is not queued."""
        if not entry.queued:
            return False
        shape_queue = self._shape_queues[entry.shape_key]
        self._mark_unserved(entry)
        shape_queue.discard(entry)
        self._uncount([entry])
        self._close_if_empty(shape_queue, entry.shape_key)
        return True

    def put_last(self, entry: Entry) -> bool:
        """Serve a queued entry behind all others; False if it is not queued."""
        if not entry.queued:
            return False
        self._mark_unserved(entry)
        self._shape_queues[entry.shape_key].put_last(entry)
        return True

    def clear(self) -> list[Entry]:
        """Remove and return all entries."""
        removed = [
            entry for shape_queue in self._shape_queues.values() for entry in shape_queue.take(shape_queue.count)
        ]
        for entry in removed:
            self._mark_unserved(entry)
        self._uncount(removed)
        self._shape_queues.clear()
        return removed

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
        if self.joined:
            self.joined -= sum([entry.requests for entry in entries]) - len(entries)
        if self._levels:
            for entry in entries:
                level = self._levels[entry.level]
                level[0] -= 1
                level[1] -= entry.rows
        if not self.count and self.order.shares is not None:
            self.order.shares.rest()

    def _close_if_empty(self, shape_queue: ShapeQueue, shape_key: object) -> None:
        # A model with one shape keeps its shape queue; rare or hostile shapes must not accumulate shape queues.
        if shape_queue.count == 0 and len(self._shape_queues) > 1:
            del self._shape_queues[shape_key]
