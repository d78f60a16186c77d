"""Selects the next batch from the queue of a model version, without a lock or a clock: the scheduler calls it under its lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from headrace.core.errors import HeadraceError, Overloaded, WouldMiss
from headrace.inference.scheduling.assembly import Arrangement
from headrace.inference.scheduling.batching import IDLE, CloseReason, CostModel, Idle, Skip, Take, WaitUntil, decide
from headrace.inference.scheduling.policy import BatchPolicy, QueueLimits
from headrace.inference.scheduling.queue import FAR_NS, Entry, Queue, QueueOrder, ShapeQueue
from headrace.runtimes.overlapped import InFlightBatch

_ROWS = attrgetter("rows")


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that run together, from pull to response.

    Ownership: the thread that pulled it; of an overlapped one the finisher thread after its launch.

    Attributes:
        entries: entries of one shape, in the order of serving.
        reason: reason for closing the batch.
        taken_ns: monotonic time at which the batch was closed.
        rows: rows of all entries.
        assembled_ns: monotonic time of the launch of an overlapped batch.
        instances: busy instances at its start, including its own.
        in_flight: an overlapped batch in its backend, from launch to finish.
        arrangement: way back from its outputs to requests of different length, from launch to finish; None for equal shapes.
    """

    entries: list[Entry]
    reason: CloseReason
    taken_ns: int
    rows: int
    assembled_ns: int = 0
    instances: int = 1
    in_flight: InFlightBatch | None = None
    arrangement: Arrangement | None = None

    def drop_settled(self) -> bool:
        """Drop entries that were cancelled or whose deadline has passed; False if none is left."""
        entries = self.entries
        if len(entries) > 1 or entries[0].completion.is_settled:
            live = [entry for entry in entries if not entry.completion.is_settled]
            if len(live) != len(entries):
                self.entries, self.rows = live, sum(map(_ROWS, live))
        return bool(self.entries)


def queue_full(requests: int, size_bytes: int, max_count: int, max_size_bytes: int, retry_after_s: float) -> Overloaded:
    """Return the error of a request for which the queue has no room.

    Args:
        requests, size_bytes: queued requests and their memory.
        max_count, max_size_bytes: bounds of the queue.
        retry_after_s: delay before a retry in seconds.
    """
    return Overloaded(
        f"the queue is full: {requests} requests of {size_bytes} bytes wait, "
        f"{max_count} requests of {max_size_bytes} bytes are allowed: retry later",
        retry_after_s,
    )


class BatchSelector:
    """Selects the next batch from the queue of one model version.

    Args:
        policy: batching rules.
        limits: bounds of the queue.
        levels: number of priority levels.
        order: order of serving.
        retry_s: returns the delay in seconds after which a client should retry if the queue is full.
        cost_model: durations of batches; None to ignore due times.

    Attributes:
        dropped: dropped entries with their errors; the caller settles them after it has released the lock.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        limits: QueueLimits,
        levels: int,
        order: QueueOrder,
        retry_s: Callable[[], float],
        cost_model: CostModel | None = None,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.queue = Queue(levels, order)
        self._retry_s = retry_s
        self.cost_model = cost_model
        self.dropped: list[tuple[Entry, HeadraceError]] = []

    def push(self, entries: list[Entry]) -> None:
        """Queue all entries of one request or none.

        Raises:
            Overloaded: the queue is full.
        """
        queue, limits, first = self.queue, self.limits, entries[0]
        if limits.level_counts:
            self._check_level(entries)
        if len(entries) == 1:
            size_bytes, added = first.size_bytes, first.requests
        else:
            size_bytes, added = sum([entry.size_bytes for entry in entries]), len(entries)
        full = queue.count + queue.joined + added > limits.max_count or (
            queue.count and queue.size_bytes + size_bytes > limits.max_size_bytes
        )
        if full and not self._make_room(entries, size_bytes):
            raise queue_full(queue.requests, queue.size_bytes, limits.max_count, limits.max_size_bytes, self._retry_s())
        for entry in entries:
            queue.push(entry)

    def poll(self, now_ns: int, begins_ns: int, closed: bool) -> Batch | WaitUntil | Idle:
        """Select the next batch, or the time at which to poll again.

        Args:
            now_ns: monotonic.
            begins_ns: monotonic start of the batch's compute, if later than `now_ns`.
            closed: True if no request will arrive, so that waiting gains nothing.
        """
        at_ns = begins_ns if begins_ns > now_ns else now_ns
        shape_queues = self.queue.shape_queues
        while self.queue.count:
            if len(shape_queues) == 1:  # the fast path of most models: no comparison
                shape_queue = next(iter(shape_queues))
                answer = self._decide(shape_queue, at_ns, closed)
            else:
                shape_queue, answer = self._first(at_ns, closed)
            if type(answer) is Take:
                queued_rows = self.queue.total_rows
                entries = self.queue.take(shape_queue, answer.count)
                rows = queued_rows - self.queue.total_rows
                if self.queue.joined or entries[0].members is not None:
                    rows = self._divide_groups(shape_queue, entries, answer.reason, queued_rows)
                if shape_queue.due_count and shape_queue.last_rows:
                    self._refuse_overdue(shape_queue, now_ns)
                return Batch(entries, answer.reason, now_ns, rows)
            if type(answer) is Skip:
                self._skip(shape_queue, answer.positions)
            elif type(answer) is WaitUntil:
                return answer
        return IDLE

    def _divide_groups(
        self, shape_queue: ShapeQueue, entries: list[Entry], reason: CloseReason, queued_rows: int
    ) -> int:
        """Leave members of a group in the queue for which a batch is too small, or fill a batch with members of the next group.

        Args:
            shape_queue: queue of the batch.
            entries: of the batch; changed in place.
            reason: why the batch closed.
            queued_rows: rows in the queue before the batch was taken.

        Returns:
            Rows of the batch.
        """
        rows: int = sum(map(_ROWS, entries))
        target = self.policy.max_rows if self.policy.merge else 1
        costs = None if self.cost_model is None or not self.policy.merge else self.cost_model.current
        first = entries[0]
        if costs is not None and first.due_ns != FAR_NS:
            target = costs.best[min(queued_rows, target)]
        if len(entries) == 1 and first.requests > 1 and rows > target:
            entries[0] = first.split(max(first.fitting(target), 1))
            self.queue.push(first)
            return entries[0].rows
        if rows < target and reason is CloseReason.FULL and shape_queue.count and not shape_queue.front.last:
            part = self.queue.take_part(shape_queue, target - rows)
            if part is not None:
                entries.append(part)
                rows += part.rows
        return rows

    def batch_of_one(self, entry: Entry) -> Batch | None:
        """Return the batch that `poll` would return if this entry were queued; None if that depends on more than the entry."""
        queue, policy, rows = self.queue, self.policy, entry.rows
        if queue.count or not queue.order.plain or entry.due_ns != FAR_NS:
            return None
        if not policy.merge:
            reason = CloseReason.SINGLE
        elif rows in policy.preferred_rows:
            reason = CloseReason.PREFERRED
        elif rows >= policy.max_rows:
            reason = CloseReason.FULL
        elif policy.max_delay_ns <= 0:
            reason = CloseReason.IDLE
        else:
            return None
        return Batch([entry], reason, entry.enqueued_ns, rows)

    def ready(self, now_ns: int) -> bool:
        """Return True if `poll` would return a batch."""
        return any(
            isinstance(self._decide(shape_queue, now_ns, False), Take | Skip) for shape_queue in self.queue.shape_queues
        )

    def _decide(self, shape_queue: ShapeQueue, at_ns: int, closed: bool) -> Take | Skip | WaitUntil | Idle:
        cost_model, order = self.cost_model, self.queue.order
        if shape_queue.due_count and cost_model is not None:
            if not order.plain:
                cost_model.crowded = order.crowded
            answer = decide(shape_queue, at_ns, self.policy, cost_model.current)
        else:
            efficient_rows = 0 if cost_model is None else cost_model.efficient_rows
            answer = decide(shape_queue, at_ns, self.policy, None, efficient_rows)
        if closed and type(answer) is WaitUntil:
            return Take(shape_queue.count, CloseReason.DRAIN)
        return answer

    def _first(self, at_ns: int, closed: bool) -> tuple[ShapeQueue, Take | Skip | WaitUntil | Idle]:
        """Return the most urgent shape queue that is ready, with its decision; else the one whose wait ends first."""
        answers = [
            (shape_queue, self._decide(shape_queue, at_ns, closed))
            for shape_queue in self.queue.shape_queues
            if shape_queue.count
        ]
        ready = [each for each in answers if type(each[1]) is not WaitUntil]
        if ready:
            return min(ready, key=lambda each: each[0].rank)
        return min(answers, key=lambda each: each[1].time_ns if type(each[1]) is WaitUntil else 0)

    def _skip(self, shape_queue: ShapeQueue, positions: Sequence[int]) -> None:
        """Serve entries of a shape queue last, or reject them if their deadline will have passed."""
        for entry in self.queue.skip(shape_queue, positions):
            if entry.requests > 1:  # some of a group may still be in time
                for part in entry.apart():
                    self.queue.push(part)
            elif entry.deadline_ns > entry.due_ns:
                entry.last = True
                self.queue.push(entry)
            else:
                self._drop(
                    entry,
                    WouldMiss(
                        "the request can no longer complete before its deadline: retry, or set a longer deadline"
                    ),
                )

    def _refuse_overdue(self, shape_queue: ShapeQueue, now_ns: int) -> None:
        """Under overload, drop entries that have waited longer than the objective beyond their due time."""
        before_ns = now_ns - self.policy.objective_ns
        while (entry := shape_queue.overdue(before_ns)) is not None:
            self.queue.discard(entry)
            self._drop(
                entry,
                WouldMiss("the request can no longer complete within twice the model's latency objective: retry later"),
            )

    def _make_room(self, entries: list[Entry], size_bytes: int) -> bool:
        """Drop the entry that would be served last, if clients share the model and the new request goes before it."""
        queue, limits = self.queue, self.limits
        if queue.order.shares is None or len(entries) > 1:
            return False
        entry = entries[0]
        key = queue.order.key(entry.level, entry.due_ns, entry.enqueued_ns, entry.client)
        last_entries = [
            last_entry for shape_queue in queue.shape_queues if (last_entry := shape_queue.last_entry) is not None
        ]
        last_entry = max(last_entries, key=lambda each: (each.last, each.key), default=None)
        if last_entry is None or (not last_entry.last and last_entry.key <= key):
            return False
        if queue.size_bytes - last_entry.size_bytes + size_bytes > limits.max_size_bytes:
            return False
        queue.discard(last_entry)
        self._drop(
            last_entry,
            Overloaded("the queue is full, and this client uses more than its share: retry later", self._retry_s()),
        )
        return True

    def _check_level(self, entries: list[Entry]) -> None:
        level = entries[0].level
        max_count = self.limits.level_counts.get(level, 0)
        count = self.queue.level(level)[0]
        if max_count and count + len(entries) > max_count:
            raise Overloaded(
                f"the queue of priority level {level + 1} is full: {count} requests wait, {max_count} are allowed: retry later",
                self._retry_s(),
            )

    def _drop(self, entry: Entry, error: HeadraceError) -> None:
        entry.inputs = {}
        self.dropped.append((entry, error))
