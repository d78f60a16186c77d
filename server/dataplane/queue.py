"""Requests that wait, apart by shape and in order of priority within each shape.

Nothing here locks or reads a clock: the scheduler owns the lock under which every method is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from server.core.completion import Completion
from server.core.tensor import Array

if TYPE_CHECKING:
    from server.core.request import InferRequest

FAR_NS = (1 << 63) - 1
"""A time that never comes."""

# A lane is compacted when it holds this many dead entries more than live ones.
_DEAD_SLACK = 64


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
        promised_ns: monotonic, when the answer was expected as it was admitted; 0 if that was not asked.
        size_bytes: what it holds in memory.
        queued: True while it counts as waiting.
        leads: True for the one entry of a request that is counted as the request (the last part of a split one).
    """

    __slots__ = (
        "client",
        "completion",
        "deadline_ns",
        "due_ns",
        "enqueued_ns",
        "inputs",
        "leads",
        "leave",
        "level",
        "promised_ns",
        "queued",
        "received_ns",
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
        self.promised_ns = 0
        self.size_bytes = request.size_bytes
        self.queued = False
        self.leads = True
        self.leave: Callable[[Entry], None] | None = None

    def on_settled(self) -> None:
        """Hook for `Completion.after`: give the place in the queue back if the entry still has one."""
        if self.queued and self.leave is not None:  # a first look without the lock spares those that were run
            self.leave(self)


class Lane:
    """Requests of one shape: a `LaneView` for the decision, one FIFO per priority level.

    Entries that left early stay as dead ones in the middle of a FIFO (they hold no tensors) until they reach its front or
    the lane is compacted; `count` and `total_rows` never include them.
    """

    __slots__ = ("_dead", "_levels", "count", "total_rows")

    def __init__(self, levels: int) -> None:
        self._levels: list[deque[Entry]] = [deque() for _ in range(levels)]
        self._dead = 0
        self.count = 0
        self.total_rows = 0

    @property
    def oldest_ns(self) -> int:
        """When the entry that waits longest was queued; only for a lane that is not empty."""
        if len(self._levels) == 1:
            return self._levels[0][0].enqueued_ns
        return min(fifo[0].enqueued_ns for fifo in self._levels if fifo)

    @property
    def first_level(self) -> int:
        """The most urgent level that has an entry; only for a lane that is not empty."""
        return next(level for level, fifo in enumerate(self._levels) if fifo)

    @property
    def front(self) -> Entry:
        """The entry to be served first; only for a lane that is not empty."""
        return next(fifo[0] for fifo in self._levels if fifo)

    def row_counts(self) -> Iterator[int]:
        """Rows of each live entry in the order of serving."""
        for fifo in self._levels:
            for entry in fifo:
                if entry.queued:
                    yield entry.rows

    def push(self, entry: Entry) -> None:
        """Append an entry to its level."""
        entry.queued = True
        self._levels[entry.level].append(entry)
        self.count += 1
        self.total_rows += entry.rows

    def take(self, count: int) -> list[Entry]:
        """Remove the first `count` live entries."""
        taken: list[Entry] = []
        rows = 0
        for fifo in self._levels:
            while fifo and len(taken) < count:
                entry = fifo.popleft()
                if entry.queued:
                    entry.queued = False
                    rows += entry.rows
                    taken.append(entry)
                else:
                    self._dead -= 1
        self.count -= len(taken)
        self.total_rows -= rows
        self._trim()
        return taken

    def discard(self, entry: Entry) -> None:
        """Turn a live entry of this lane into a dead one."""
        entry.queued = False
        entry.inputs = {}
        self.count -= 1
        self.total_rows -= entry.rows
        self._dead += 1
        self._trim()

    def demote(self, entry: Entry, level: int) -> None:
        """Move a live entry to the back of another level."""
        self._levels[entry.level].remove(entry)
        entry.level = level
        self._levels[level].append(entry)
        self._trim()

    def _trim(self) -> None:
        """Keep the fronts live (`oldest_ns` reads them) and the dead few."""
        if not self._dead:
            return
        if self._dead > self.count + _DEAD_SLACK:
            self._levels = [deque(entry for entry in fifo if entry.queued) for fifo in self._levels]
            self._dead = 0
            return
        for fifo in self._levels:
            while fifo and not fifo[0].queued:
                fifo.popleft()
                self._dead -= 1


class Queue:
    """All lanes of one model version.

    Args:
        levels: number of priority levels.

    Attributes:
        count: live entries.
        total_rows: rows of the live entries.
        size_bytes: memory the live entries hold.
    """

    __slots__ = ("_lanes", "_levels", "count", "size_bytes", "total_rows")

    def __init__(self, levels: int = 1) -> None:
        self._levels = levels
        self._lanes: dict[object, Lane] = {}
        self.count = 0
        self.total_rows = 0
        self.size_bytes = 0

    @property
    def lanes(self) -> Collection[Lane]:
        """The lanes, first used first; a lane may be empty."""
        return self._lanes.values()

    @property
    def only(self) -> Entry | None:
        """The entry that waits, if just one does."""
        if self.count != 1:
            return None
        return next(lane.front for lane in self._lanes.values() if lane.count)

    def push(self, entry: Entry) -> Lane:
        """Append an entry to the lane of its shape."""
        lane = self._lanes.get(entry.shape_key)
        if lane is None:
            lane = self._lanes[entry.shape_key] = Lane(self._levels)
        lane.push(entry)
        self.count += 1
        self.total_rows += entry.rows
        self.size_bytes += entry.size_bytes
        return lane

    def take(self, lane: Lane, count: int) -> list[Entry]:
        """Remove the first `count` entries of a lane."""
        taken = lane.take(count)
        self._forget(taken)
        self._close_if_empty(lane, taken[0].shape_key)
        return taken

    def discard(self, entry: Entry) -> bool:
        """Remove an entry before its turn; False if it is not waiting any more."""
        if not entry.queued:
            return False
        lane = self._lanes[entry.shape_key]
        lane.discard(entry)
        self._forget([entry])
        self._close_if_empty(lane, entry.shape_key)
        return True

    def demote(self, entry: Entry, level: int) -> bool:
        """Move a waiting entry to the back of another level; False if it is not waiting any more."""
        if not entry.queued:
            return False
        self._lanes[entry.shape_key].demote(entry, level)
        return True

    def clear(self) -> list[Entry]:
        """Remove everything."""
        taken = [entry for lane in self._lanes.values() for entry in lane.take(lane.count)]
        self._forget(taken)
        self._lanes.clear()
        return taken

    def _forget(self, entries: list[Entry]) -> None:
        self.count -= len(entries)
        self.total_rows -= sum([entry.rows for entry in entries])
        self.size_bytes -= sum([entry.size_bytes for entry in entries])

    def _close_if_empty(self, lane: Lane, shape_key: object) -> None:
        # A model with one shape keeps its lane; hostile or rare shapes must not pile lanes up.
        if lane.count == 0 and len(self._lanes) > 1:
            del self._lanes[shape_key]
