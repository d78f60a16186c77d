"""What may wait, and what runs next: the queue with its limits, the decision, and what becomes of requests that come too late.

Nothing here locks or reads a clock: the scheduler owns the lock under which every method is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.errors import HeadraceError, Overloaded, WouldMiss
from headrace.scheduling.batching import IDLE, BatchPolicy, CloseReason, Idle, Skip, Take, WaitUntil, decide
from headrace.scheduling.lane import Lane
from headrace.scheduling.order import Order
from headrace.scheduling.plan import Planner
from headrace.scheduling.queue import Entry, Queue


@dataclass(slots=True)
class Batch:
    """Requests that run together.

    Attributes:
        entries: live entries of one shape, in the order of serving.
        reason: why the batch was closed.
        taken_ns: monotonic, when it was closed.
    """

    entries: list[Entry]
    reason: CloseReason
    taken_ns: int


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait at most.

    Attributes:
        max_count: requests.
        max_size_bytes: memory that waiting requests hold.
        level_counts: requests of a priority level, by levels from 0, for those that have a bound of their own.
    """

    max_count: int = 4096
    max_size_bytes: int = 1 << 30
    level_counts: Mapping[int, int] = field(default_factory=dict)


class Selection:
    """The queue of one model version, and who is next.

    Args:
        policy: how requests may be merged.
        limits: what may wait at most.
        levels: number of priority levels.
        order: which goes first.
        retry_s: when it makes sense to come back, in seconds, if the queue is full.

    Attributes:
        planner: knows what batches take; None: nobody does, and it does not matter when anything is due.
        dropped: entries that were given up and why, for the caller to settle once the lock is released.
    """

    def __init__(
        self, policy: BatchPolicy, limits: QueueLimits, levels: int, order: Order, retry_s: Callable[[], float]
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.queue = Queue(levels, order)
        self._retry_s = retry_s
        self.planner: Planner | None = None
        self.dropped: list[tuple[Entry, HeadraceError]] = []

    def push(self, entries: list[Entry]) -> None:
        """Queue the entries of one request together, or none of them.

        Raises:
            Overloaded: the queue is full.
        """
        size_bytes = entries[0].size_bytes if len(entries) == 1 else sum([entry.size_bytes for entry in entries])
        queue, limits = self.queue, self.limits
        if limits.level_counts:
            self._check_level(entries)
        full = queue.count + len(entries) > limits.max_count or (
            queue.count and queue.size_bytes + size_bytes > limits.max_size_bytes
        )
        if full and not self._make_room(entries, size_bytes):
            raise Overloaded(
                f"the queue is full: {queue.count} requests of {queue.size_bytes} bytes wait; "
                f"{limits.max_count} requests of {limits.max_size_bytes} bytes may",
                self._retry_s(),
            )
        if len(entries) == 1:
            queue.push(entries[0])
        else:
            for entry in entries:
                queue.push(entry)

    def poll(self, now_ns: int, begins_ns: int, closed: bool) -> Batch | WaitUntil | Idle:
        """What to run.

        Args:
            now_ns: monotonic.
            begins_ns: when it would begin to be computed, if that is later.
            closed: nothing more will come: there is nothing to wait for.
        """
        at_ns = begins_ns if begins_ns > now_ns else now_ns
        lanes = self.queue.lanes
        while self.queue.count:
            if len(lanes) == 1:  # as for most models: there is nothing to compare
                lane = next(iter(lanes))
                answer = self._decide(lane, at_ns, closed)
            else:
                lane, answer = self._first(at_ns, closed)
            if type(answer) is Take:
                batch = Batch(self.queue.take(lane, answer.count), answer.reason, now_ns)
                if lane.dated and lane.last_rows:
                    self._refuse_overdue(lane, now_ns)
                return batch
            if type(answer) is Skip:
                self._skip(lane, answer.places)
            elif type(answer) is WaitUntil:
                return answer
        return IDLE

    def ready(self, now_ns: int) -> bool:
        """True if `poll` would find something to run."""
        return any(isinstance(self._decide(lane, now_ns, False), Take | Skip) for lane in self.queue.lanes)

    def _decide(self, lane: Lane, at_ns: int, closed: bool) -> Take | Skip | WaitUntil | Idle:
        planner, order = self.planner, self.queue.order
        if lane.dated and planner is not None:
            if not order.plain:
                planner.crowded = order.crowded
            answer = decide(lane, at_ns, self.policy, planner.current)
        else:
            answer = decide(lane, at_ns, self.policy)
        if closed and type(answer) is WaitUntil:
            return Take(lane.count, CloseReason.DRAIN)
        return answer

    def _first(self, at_ns: int, closed: bool) -> tuple[Lane, Take | Skip | WaitUntil | Idle]:
        """The lane that goes first of those that are ready, and what to do with it; else that whose time comes first."""
        answers = [(lane, self._decide(lane, at_ns, closed)) for lane in self.queue.lanes if lane.count]
        ready = [each for each in answers if type(each[1]) is not WaitUntil]
        if ready:
            return min(ready, key=lambda each: each[0].rank)
        return min(answers, key=lambda each: each[1].time_ns if type(each[1]) is WaitUntil else 0)

    def _skip(self, lane: Lane, places: Sequence[int]) -> None:
        """Put entries of a lane last, or refuse them if nobody would wait for the answer."""
        for entry in self.queue.skip(lane, places):
            if entry.deadline_ns > entry.due_ns:
                entry.last = True
                self.queue.push(entry)
            else:
                self._drop(entry, WouldMiss("the request can no longer be answered before its deadline"))

    def _refuse_overdue(self, lane: Lane, now_ns: int) -> None:
        """There is more to do than can be done in time: those who come twice as late as promised need not wait any longer."""
        before_ns = now_ns - self.policy.objective_ns
        while (entry := lane.overdue(before_ns)) is not None:
            self.queue.discard(entry)
            self._drop(entry, WouldMiss("the request can no longer be answered in the time that the model promises"))

    def _make_room(self, entries: list[Entry], size_bytes: int) -> bool:
        """Where clients share, a full queue refuses who would be served last, not who comes last."""
        queue, limits = self.queue, self.limits
        if queue.order.shares is None or len(entries) > 1:
            return False
        entry = entries[0]
        key = queue.order.key(entry.level, entry.due_ns, entry.enqueued_ns, entry.client)
        rears = [rear for lane in queue.lanes if (rear := lane.rear) is not None]
        rear = max(rears, key=lambda each: (each.last, each.key), default=None)
        if rear is None or (not rear.last and rear.key <= key):
            return False
        if queue.size_bytes - rear.size_bytes + size_bytes > limits.max_size_bytes:
            return False
        queue.discard(rear)
        self._drop(rear, Overloaded("the queue is full, and other clients have less in it", self._retry_s()))
        return True

    def _check_level(self, entries: list[Entry]) -> None:
        level = entries[0].level
        most = self.limits.level_counts.get(level, 0)
        count = self.queue.level(level)[0]
        if most and count + len(entries) > most:
            raise Overloaded(
                f"the queue of priority level {level + 1} is full: {count} requests wait, {most} may", self._retry_s()
            )

    def _drop(self, entry: Entry, error: HeadraceError) -> None:
        entry.inputs = {}
        self.dropped.append((entry, error))
