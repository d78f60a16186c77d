"""Decides when a batch closes: a pure function of the shape queue, the time and a policy.

There is no clock, lock or queue in this module: the scheduler, the simulator and tests call `decide`, the last two in virtual
time.

Where nothing is due, the rules are those of Triton's dynamic batcher (its model configuration guide, "Dynamic Batcher"), for an
idle instance: the largest preferred size that the queued requests reach; else a full batch; else all queued requests, once the
oldest has waited for the allowed delay.

Where requests are due and latencies are known, due times decide (`_in_time`). Preferred sizes do not matter then, and the
allowed delay ends at the latest start. No instance waits longer than allowed: simulated with batches of 450 + 60 n us, at most
32 rows and an objective of 20 ms, Poisson arrivals at 0.3 and 0.8 of capacity, all in time with each rule:

    rule                       p50 at 0.3   p99 at 0.3   p50 at 0.8   p99 at 0.8   device busy at 0.8
    run what waits                0.94 ms      1.49 ms      2.00 ms      3.59 ms         100 %
    wait for the latest start     5.80 ms     11.36 ms      3.70 ms      5.81 ms          80 %
    wait a quarter of 20 ms       4.11 ms      6.78 ms      3.70 ms      5.81 ms          81 %

The device time that waiting saves helps only other models on the same device.

`BatchCosts` holds the cost of each batch size as tables. `CostModel` rebuilds them from the latency table now and then, because
reading that table costs more than a decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from headrace.core.clock import NS_PER_MS
from headrace.scheduling.latency_table import LatencyTable
from headrace.scheduling.policy import BatchPolicy
from headrace.scheduling.queue import FAR_NS


class CloseReason(Enum):
    """Why a batch was closed; the value is the label in the metrics."""

    FULL = "full"
    """The next request would not fit."""
    PREFERRED = "preferred"
    """A preferred size was reached."""
    DELAY = "delay"
    """The oldest request had waited for the allowed delay."""
    IDLE = "idle"
    """An instance was idle and waiting is not allowed."""
    SINGLE = "single"
    """The model does not merge requests."""
    DEADLINE = "deadline"
    """One more row, or a moment longer, and a member would have been late."""
    DRAIN = "drain"
    """The model is being unloaded: nothing more will join."""


class ShapeQueueView(Protocol):
    """What the decision may look at: requests that may share a batch, in the order in which they are to be served."""

    @property
    def count(self) -> int:
        """Requests waiting."""

    @property
    def total_rows(self) -> int:
        """Rows waiting, over all requests."""

    @property
    def oldest_ns(self) -> int:
        """When the one that waits longest was queued."""

    def due_from_ns(self, count: int) -> int:
        """None of the first `count` requests is due earlier."""

    def row_counts(self) -> Iterable[int]:
        """Rows of each request, first to be served first."""

    def members(self) -> Iterable[tuple[int, int]]:
        """The same, and when each is due; `FAR_NS`: never, or it will be late in any case."""


class BatchCosts(NamedTuple):
    """What batches take; see `headrace.scheduling.batching`. All by rows from 0 to the most that a batch holds.

    Attributes:
        promises_ns: what nearly all keep to, from now to the answers.
        estimates_ns: what they take as a rule.
        best: of the batches with no more rows, the one with the most rows a second that leaves time for who comes after it.
        instances: how many pull.
    """

    promises_ns: Sequence[int]
    estimates_ns: Sequence[int]
    best: Sequence[int]
    instances: int = 1


@dataclass(slots=True)  # not frozen, which would double what making one costs, once a batch
class Take:
    """Close a batch with the first `count` requests."""

    count: int
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class Skip:
    """Some requests cannot be in time any more, or only at the cost of more others: put them last, and ask again.

    Attributes:
        places: theirs in the order of serving, from 0, ascending.
    """

    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Ask again at `time_ns` (monotonic), or when something was queued."""

    time_ns: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing waits."""


Decision = Take | Skip | WaitUntil | Idle

IDLE = Idle()


def decide(view: ShapeQueueView, now_ns: int, policy: BatchPolicy, costs: BatchCosts | None = None) -> Decision:
    """What an idle instance should do with the requests in `view`.

    Args:
        view: what waits.
        now_ns: monotonic, when a batch would begin to be computed.
        policy: how requests may be merged.
        costs: what batches take; None: unknown, or nothing is due, so that it does not matter when anything is.
    """
    count = view.count
    if count == 0:
        return IDLE
    if costs is not None:
        return _in_time(view, now_ns, policy, costs)
    if not policy.merge:
        return Take(1, CloseReason.SINGLE)
    if policy.preferred_rows:
        preferred = _preferred(view, policy.preferred_rows)
        if preferred:
            return Take(preferred, CloseReason.PREFERRED)
    if view.total_rows > policy.max_rows:
        fitting = _fitting(view, policy.max_rows)
        if fitting < count:
            return Take(fitting, CloseReason.FULL)
    if view.total_rows >= policy.max_rows:
        return Take(count, CloseReason.FULL)
    if policy.max_delay_ns <= 0:
        return Take(count, CloseReason.IDLE)
    closes_ns = view.oldest_ns + policy.max_delay_ns
    if now_ns >= closes_ns:
        return Take(count, CloseReason.DELAY)
    return WaitUntil(closes_ns)


def _in_time(view: ShapeQueueView, now_ns: int, policy: BatchPolicy, costs: BatchCosts) -> Decision:
    """The best batch that has all its members in time, and those behind it."""
    most, promises_ns = policy.max_rows, costs.promises_ns
    wanted = costs.best[min(view.total_rows, most)] if policy.merge else 0
    if view.total_rows > wanted > 0:  # as for most batches under load
        first_rows = 1 if view.count == view.total_rows else next(iter(view.row_counts()))
        size = max(wanted, min(first_rows, most))  # a request is never cut
        if now_ns + promises_ns[size] <= view.due_from_ns(wanted):
            return Take(_fitting(view, wanted), CloseReason.FULL)
    rows = count = 0
    due_ns = FAR_NS
    for member_rows, member_due_ns in view.members():
        more = rows + member_rows
        if count and more > wanted:
            return Take(count, CloseReason.FULL if policy.merge else CloseReason.SINGLE)
        due_ns = min(due_ns, member_due_ns)
        if now_ns + promises_ns[min(more, most)] > due_ns:
            break
        rows, count = more, count + 1
    else:
        if rows >= costs.best[most]:
            return Take(count, CloseReason.FULL)
        return _take_or_wait(view, now_ns, policy, due_ns - promises_ns[rows + 1])
    if count:  # a smaller batch would do for these: and for those behind it?
        behind = costs.best[min(view.total_rows - rows, most)]
        if now_ns + promises_ns[min(rows, most)] // costs.instances + promises_ns[behind] <= member_due_ns:
            return Take(count, CloseReason.DEADLINE)
    return _skip_late(view, now_ns, policy, costs)


def _take_or_wait(view: ShapeQueueView, now_ns: int, policy: BatchPolicy, latest_ns: int) -> Decision:
    """All that wait fit: run them, or keep them for the allowed delay, but not beyond the latest start of a larger batch."""
    if policy.max_delay_ns <= 0 or not policy.merge:
        return Take(view.count, CloseReason.IDLE)
    closes_ns = view.oldest_ns + policy.max_delay_ns
    if now_ns >= closes_ns:
        return Take(view.count, CloseReason.DELAY)
    if now_ns >= latest_ns:
        return Take(view.count, CloseReason.DEADLINE)
    return WaitUntil(min(closes_ns, latest_ns))


def _skip_late(view: ShapeQueueView, now_ns: int, policy: BatchPolicy, costs: BatchCosts) -> Decision:
    """Rather than one small batch after the other for the sake of those who are nearly too late, go on with those who are not.

    Those that would be late in the batch that is best for all that wait give way: else everybody would be late by and by
    (early drop in Nexus: H. Shen and others, SOSP 2019). Where others would take their place, so do those that may be late.
    """
    most, left, rows = policy.max_rows, view.total_rows, 0
    late: list[int] = []
    wanted = costs.best[min(left, most)] if policy.merge else 1
    for place, (member_rows, due_ns) in enumerate(view.members()):
        if rows and rows + member_rows > wanted:
            break
        size = max(wanted, min(member_rows, most))
        takes_ns = costs.estimates_ns if left - member_rows < wanted else costs.promises_ns
        if now_ns + takes_ns[size] <= due_ns:
            rows += member_rows
        else:
            late.append(place)
            left -= member_rows
            wanted = costs.best[min(left, most)] if policy.merge else 1
    if late:
        return Skip(tuple(late))
    return Take(_fitting(view, wanted), CloseReason.FULL if policy.merge else CloseReason.SINGLE)


def _fitting(view: ShapeQueueView, max_rows: int) -> int:
    """How many requests from the front fit in `max_rows`; at least one, since an oversized one can only go alone."""
    if view.count == view.total_rows:
        return min(view.count, max(max_rows, 1))
    rows = count = 0
    for request_rows in view.row_counts():
        rows += request_rows
        if rows > max_rows:
            break
        count += 1
    return max(count, 1)


def _preferred(view: ShapeQueueView, preferred_rows: tuple[int, ...]) -> int:
    """How many requests from the front make the largest preferred size that can be made exactly; 0 if none can."""
    rows = best = 0
    for count, request_rows in enumerate(view.row_counts(), start=1):
        rows += request_rows
        if rows in preferred_rows:
            best = count
        if rows >= preferred_rows[-1]:
            break
    return best


_REDRAW = 32  # batches between two drawings
_REDRAW_NS = (
    50 * NS_PER_MS
)  # or so much time of instances: a hundred times what drawing takes, and soon for slow models
_WORSE = 0.97  # a smaller batch is better only if the larger has less than this share of its rows a second: times are measured
# The smallest batch with this share of the most rows a second is the largest that is made: what is larger makes everybody wait
# longer, and gains next to nothing. Where several clients ask, each waits for the others' batches, and more is given for that;
# but not where the promise has made batches that much smaller already.
_NEARLY = 0.98
_NEARLY_SHARED = 0.92
_ROOM = 0.9  # of the time that a batch may take, for what varies
_LEAST = 0.8  # share of the most rows a second that is not given up to leave time for others


class CostModel:
    """Keeps a plan up to date; any thread may call, and what is drawn twice at the same time is the same.

    Args:
        profile: how long batches compute.
        policy: how they are formed.

    Attributes:
        instances: how many pull.
        overhead_ns: what a batch takes from the decision to the answers besides computing.
        crowded: several clients ask, and share.
    """

    def __init__(self, profile: LatencyTable, policy: BatchPolicy) -> None:
        self.crowded = False
        self.instances = 1
        self.overhead_ns = 0
        self._profile = profile
        self._policy = policy
        self._costs: tuple[BatchCosts, BatchCosts] | None = None  # for one client, and for several
        self._batches = 0  # since they were drawn
        self._busy_ns = 0  # likewise

    @property
    def current(self) -> BatchCosts | None:
        """What to decide by; None if nothing is known of the times of batches."""
        costs = self._current()
        return costs[self.crowded] if costs is not None else None

    def _current(self) -> tuple[BatchCosts, BatchCosts] | None:
        if self._batches >= _REDRAW or self._busy_ns >= _REDRAW_NS or self._costs is None:
            self._batches = self._busy_ns = 0
            if self._profile.estimate_ns(1):
                costs = draw_costs(self._profile, self._policy, self.instances, self.overhead_ns)
                self._costs = costs, _limited(costs, _NEARLY_SHARED, range(1, len(costs.best)))
        return self._costs

    def batch(self, busy_ns: int = 0) -> None:
        """A batch was run, and kept its instance for so long: the profile knows more."""
        self._batches += 1
        self._busy_ns += busy_ns


def draw_costs(profile: LatencyTable, policy: BatchPolicy, instances: int = 1, overhead_ns: int = 0) -> BatchCosts:
    """Make the tables from a profile that knows something.

    Args:
        profile: how long batches compute.
        policy: how they are formed.
        instances: how many pull.
        overhead_ns: what a batch takes from the decision to the answers besides computing.
    """
    sizes = range(policy.max_rows + 1)
    promises_ns = [profile.promise_ns(rows) + overhead_ns for rows in sizes]
    estimates_ns = [profile.estimate_ns(rows) + overhead_ns for rows in sizes]
    best = [0, 1]
    for rows in sizes[2:]:
        before = best[-1]
        worse = rows * estimates_ns[before] < before * estimates_ns[rows] * _WORSE
        best.append(before if worse else rows)
    costs = BatchCosts(promises_ns, estimates_ns, best, instances)
    if policy.objective_ns:
        most = _most_rows(costs, policy.objective_ns)
        costs = costs._replace(best=[min(rows, most) for rows in best])
    return _limited(costs, _NEARLY, costs.best[1:])


def _most_rows(costs: BatchCosts, objective_ns: int) -> int:
    """The largest batch that leaves time for who comes after it.

    Who comes just after a batch was taken must wait until an instance is free, and for a batch of its own. With instances that
    work in turn the first is that part of a batch's time; so a batch may take no more than n / (n + 1) of what is promised. But
    where that is too little for anything but slow small batches (other models may be at work on the device), these would only
    make everybody later still.
    """
    affordable_ns = objective_ns * costs.instances / (costs.instances + 1) * _ROOM
    most = max((rows for rows in costs.best[1:] if costs.promises_ns[rows] <= affordable_ns), default=1)
    possible = [rows for rows in costs.best[1:] if costs.promises_ns[rows] <= objective_ns] or costs.best[1:]
    return max(most, _smallest(costs, possible, _LEAST))


def _limited(costs: BatchCosts, share: float, sizes: Sequence[int]) -> BatchCosts:
    """The same without batches larger than the smallest of these sizes that has this share of the most rows a second."""
    most = _smallest(costs, sizes, share)
    return costs._replace(best=[min(rows, most) for rows in costs.best])


def _smallest(costs: BatchCosts, sizes: Sequence[int], share: float) -> int:
    rates = [rows / max(costs.estimates_ns[rows], 1) for rows in sizes]
    enough = share * max(rates)
    return min(rows for rows, rate in zip(sizes, rates, strict=True) if rate >= enough)
