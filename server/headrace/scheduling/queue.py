"""Requests that wait, apart by shape and in the order of their keys within each shape.

Nothing here locks or reads a clock: the scheduler owns the lock under which every method is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from headrace.core.completion import Completion
from headrace.core.tensor import Array
from headrace.scheduling.lane import Lane
from headrace.scheduling.order import FAR_NS, Order

if TYPE_CHECKING:
    from headrace.core.request import InferRequest


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
        kind: of urgency, for who predicts when it will be answered.
        key: what orders it; see `headrace.scheduling.order`. 0: it has none yet.
        last: it is served behind all that are not.
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
        "key",
        "kind",
        "last",
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
        self.kind = 0
        self.size_bytes = request.size_bytes
        self.key = 0
        self.queued = self.last = False
        self.leads = True
        self.leave: Callable[[Entry], None] | None = None

    def on_settled(self) -> None:
        """Hook for `Completion.after`: give the place in the queue back if the entry still has one."""
        if self.queued and self.leave is not None:  # a first look without the lock spares those that were run
            self.leave(self)


class Queue:
    """All lanes of one model version.

    Args:
        levels: number of priority levels.
        order: makes the keys.

    Attributes:
        count: live entries.
        total_rows: rows of the live entries.
        size_bytes: memory the live entries hold.
    """

    __slots__ = ("_lanes", "_levels", "count", "order", "size_bytes", "total_rows")

    def __init__(self, levels: int = 1, order: Order | None = None) -> None:
        self.order = order or Order()
        self._levels = [[0, 0] for _ in range(levels)] if levels > 1 else []  # live entries of each, and rows
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
            it; its lag, see `Order.lag_ns`.
        """
        order, level = self.order, entry.level
        entry.key = key = order.key(level, entry.due_ns, entry.enqueued_ns, entry.client)
        rows, shares = self._rows_before(key), order.shares
        if shares is None:
            return rows, FAR_NS, order.lag_ns(key, entry.received_ns)
        overtakers = shares.rows_ahead(key - level * order.handicap_ns) - rows
        return rows, overtakers if overtakers > 0 else 0, order.lag_ns(key, entry.received_ns)

    def push(self, entry: Entry) -> Lane:
        """Put an entry into the lane of its shape; it keeps its key if it has one."""
        lane = self._lanes.get(entry.shape_key)
        if lane is None:
            lane = self._lanes[entry.shape_key] = Lane(timed=self.order.plain and not self._levels)
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
        lane.push(entry)
        self.count += 1
        self.total_rows += entry.rows
        self.size_bytes += entry.size_bytes
        if self._levels:
            level = self._levels[entry.level]
            level[0] += 1
            level[1] += entry.rows
        return lane

    def take(self, lane: Lane, count: int) -> list[Entry]:
        """Remove the first `count` entries of a lane, to be run."""
        taken = lane.take(count)
        self._forget(taken)
        if not self.order.plain:
            self.order.served(taken)
        self._close_if_empty(lane, taken[0].shape_key)
        return taken

    def skip(self, lane: Lane, places: Sequence[int]) -> list[Entry]:
        """Remove entries of a lane, at places in the order of serving, to be put last or refused."""
        skipped = lane.pick(places)
        shares = self.order.shares
        if shares is not None:
            gained: dict[str, int] = {}
            for entry in skipped:
                if not entry.last:
                    gained[entry.client] = gained.get(entry.client, 0) + shares.unserved(entry.client, entry.rows)
            for each in self._lanes.values():
                each.move_up(gained)
        self._forget(skipped)
        self._close_if_empty(lane, skipped[0].shape_key)
        return skipped

    def discard(self, entry: Entry) -> bool:
        """Remove an entry before its turn; False if it is not waiting any more."""
        if not entry.queued:
            return False
        lane = self._lanes[entry.shape_key]
        self._unserved(entry)
        lane.discard(entry)
        self._forget([entry])
        self._close_if_empty(lane, entry.shape_key)
        return True

    def put_last(self, entry: Entry) -> bool:
        """Have a waiting entry served behind all others; False if it is not waiting any more."""
        if not entry.queued:
            return False
        self._unserved(entry)
        self._lanes[entry.shape_key].put_last(entry)
        return True

    def clear(self) -> list[Entry]:
        """Remove everything."""
        taken = [entry for lane in self._lanes.values() for entry in lane.take(lane.count)]
        for entry in taken:
            self._unserved(entry)
        self._forget(taken)
        self._lanes.clear()
        return taken

    def _rows_before(self, key: int) -> int:
        rows = 0
        for lane in self._lanes.values():
            rows += lane.rows_before(key)
        return rows

    def _unserved(self, entry: Entry) -> None:
        shares = self.order.shares
        if shares is not None and not entry.last:
            shares.unserved(entry.client, entry.rows)

    def _forget(self, entries: list[Entry]) -> None:
        self.count -= len(entries)
        self.total_rows -= sum([entry.rows for entry in entries])
        self.size_bytes -= sum([entry.size_bytes for entry in entries])
        if self._levels:
            for entry in entries:
                level = self._levels[entry.level]
                level[0] -= 1
                level[1] -= entry.rows
        if not self.count and self.order.shares is not None:
            self.order.shares.rest()

    def _close_if_empty(self, lane: Lane, shape_key: object) -> None:
        # A model with one shape keeps its lane; hostile or rare shapes must not pile lanes up.
        if lane.count == 0 and len(self._lanes) > 1:
            del self._lanes[shape_key]
