"""Decides when a batch closes: a pure function of the shape queue, the time and a policy.

There is no clock, lock or queue in this module: the scheduler, the simulator and tests call `decide`, the last two in virtual
time.

Without due times the rules are those of Triton's dynamic batcher (its model configuration guide, "Dynamic Batcher"). An idle
instance takes the largest preferred size that the queued requests reach, else a full batch, else all queued requests once the
oldest has waited for the allowed delay.

With due times and measured latencies, due times decide (`_in_time`). Preferred sizes are ignored, and the allowed delay ends at
the latest start. An idle instance never waits longer than the allowed delay. Reason: a simulation of batches of 450 + 60 n us,
at most 32 rows and an objective of 20 ms, with Poisson arrivals at 0.3 and 0.8 of capacity. Each rule meets every objective:

    rule                       p50 at 0.3   p99 at 0.3   p50 at 0.8   p99 at 0.8   device busy at 0.8
    run all queued requests       0.94 ms      1.49 ms      2.00 ms      3.59 ms         100 %
    wait for the latest start     5.80 ms     11.36 ms      3.70 ms      5.81 ms          80 %
    wait a quarter of 20 ms       4.11 ms      6.78 ms      3.70 ms      5.81 ms          81 %

Waiting for the latest start is the rule of Symphony (arXiv 2308.07470). It did not raise goodput for a model with a device of
its own. It saves device time, which helps only other models on the same device.

`BatchCosts` holds the cost of each batch size as tables. `CostModel` rebuilds them from the latency table at intervals, because
reading that table costs more than a decision.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.core.clock import NS_PER_MS
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.policy import BatchPolicy
from headrace.inference.scheduling.queue import FAR_NS, ShapeQueue
from headrace.inference.scheduling.thread_work import ThreadWork


class CloseReason(Enum):
    """Reason for closing a batch; the value is the label in the metrics."""

    FULL = "full"
    """The next request would not fit."""
    PREFERRED = "preferred"
    """A preferred size was reached."""
    DELAY = "delay"
    """The oldest request had waited for the allowed delay."""
    IDLE = "idle"
    """An instance was idle and no delay is allowed."""
    SINGLE = "single"
    """The model does not merge requests."""
    DEADLINE = "deadline"
    """One more row, or more delay, would have made a member late."""
    DRAIN = "drain"
    """The model is being unloaded: no request can join."""


class BatchCosts(NamedTuple):
    """Durations of batches from now to their responses, in tables indexed by rows, from 0 to the largest batch.

    Attributes:
        promises_ns: 95th percentile of the duration.
        estimates_ns: usual duration.
        best: batch size of at most the index with the most rows per second that leaves time for later requests.
        instances: number of instances that pull.
        works_ns: cost by which sizes are compared (`ThreadWork`); durations if empty.
    """

    promises_ns: Sequence[int]
    estimates_ns: Sequence[int]
    best: Sequence[int]
    instances: int = 1
    works_ns: Sequence[int] = ()

    @property
    def costs_ns(self) -> Sequence[int]:
        """Cost of a batch by rows: the size with the smallest cost per row is the most efficient one."""
        return self.works_ns or self.estimates_ns


@dataclass(slots=True)  # not frozen: that doubles the cost of the constructor, which runs once a batch
class Take:
    """Decision to close a batch with the first `count` requests."""

    count: int
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class Skip:
    """Decision to serve some requests last, since they miss their due time or would make others miss theirs. Decide again.

    Attributes:
        positions: their positions in the order of serving, from 0, ascending.
    """

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Decision to decide again at `time_ns` (monotonic), or when a request is queued."""

    time_ns: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Decision for an empty queue."""


Decision = Take | Skip | WaitUntil | Idle

IDLE = Idle()


def decide(
    view: ShapeQueue, now_ns: int, policy: BatchPolicy, costs: BatchCosts | None = None, efficient_rows: int = 0
) -> Decision:
    """Return the action of an idle instance for the requests in `view`.

    Args:
        view: queued requests that may share a batch.
        now_ns: monotonic time at which the compute of a batch would start.
        policy: batching rules.
        costs: durations of batches; None to ignore due times (latencies are unmeasured, or no request has a due time).
        efficient_rows: batch size that a queue without due times and preferred sizes is cut into; 0 for the largest.
    """
    count = view.count
    if count == 0:
        return IDLE
    if costs is not None:
        return _in_time(view, now_ns, policy, costs)
    if not policy.merge:
        return Take(1, CloseReason.SINGLE)
    max_rows = policy.max_rows
    if policy.preferred_rows:
        preferred = _preferred(view, policy.preferred_rows)
        if preferred:
            return Take(preferred, CloseReason.PREFERRED)
    elif 0 < efficient_rows < max_rows:
        max_rows = efficient_rows
    if view.total_rows > max_rows:
        fitting = _fitting(view, max_rows)
        if fitting < count:
            return Take(fitting, CloseReason.FULL)
    if view.total_rows >= max_rows:
        return Take(count, CloseReason.FULL)
    if policy.max_delay_ns <= 0:
        return Take(count, CloseReason.IDLE)
    closes_ns = view.oldest_ns + policy.max_delay_ns
    if now_ns >= closes_ns:
        return Take(count, CloseReason.DELAY)
    return WaitUntil(closes_ns)


def _in_time(view: ShapeQueue, now_ns: int, policy: BatchPolicy, costs: BatchCosts) -> Decision:
    """Select the largest useful batch whose members, and the requests behind it, meet their due times."""
    max_rows, promises_ns = policy.max_rows, costs.promises_ns
    target_rows = costs.best[min(view.total_rows, max_rows)] if policy.merge else 0
    if view.total_rows > target_rows > 0:  # the fast path, taken for most batches under load
        first_rows = 1 if view.count == view.total_rows else next(iter(view.row_counts()))
        size = max(target_rows, min(first_rows, max_rows))  # an entry is never split here
        if now_ns + promises_ns[size] <= view.due_from_ns(target_rows):
            return Take(_fitting(view, target_rows), CloseReason.FULL)
    rows = count = 0
    due_ns = FAR_NS
    for member_rows, member_due_ns in view.members():
        next_rows = rows + member_rows
        if count and next_rows > target_rows:
            return Take(count, CloseReason.FULL if policy.merge else CloseReason.SINGLE)
        due_ns = min(due_ns, member_due_ns)
        if now_ns + promises_ns[min(next_rows, max_rows)] > due_ns:
            break
        rows, count = next_rows, count + 1
    else:
        if rows >= costs.best[max_rows]:
            return Take(count, CloseReason.FULL)
        return _take_or_wait(view, now_ns, policy, due_ns - promises_ns[rows + 1])
    if count:  # a smaller batch meets its due times; check the requests behind it
        behind = costs.best[min(view.total_rows - rows, max_rows)]
        if now_ns + promises_ns[min(rows, max_rows)] // costs.instances + promises_ns[behind] <= member_due_ns:
            return Take(count, CloseReason.DEADLINE)
    return _skip_late(view, now_ns, policy, costs)


def _take_or_wait(view: ShapeQueue, now_ns: int, policy: BatchPolicy, latest_ns: int) -> Decision:
    """Decide for a queue that fits in one batch: run it, or wait for the allowed delay, up to a larger batch's latest start."""
    if policy.max_delay_ns <= 0 or not policy.merge:
        return Take(view.count, CloseReason.IDLE)
    closes_ns = view.oldest_ns + policy.max_delay_ns
    if now_ns >= closes_ns:
        return Take(view.count, CloseReason.DELAY)
    if now_ns >= latest_ns:
        return Take(view.count, CloseReason.DEADLINE)
    return WaitUntil(min(closes_ns, latest_ns))


def _skip_late(view: ShapeQueue, now_ns: int, policy: BatchPolicy, costs: BatchCosts) -> Decision:
    """Skip requests that would be late in the best batch of the whole queue.

    Small batches for the most urgent requests would cost throughput until all requests are late (early drop in Nexus: H. Shen
    and others, SOSP 2019). If enough other requests fill the batch, requests that may be late (95th percentile) are skipped too.
    """
    max_rows, remaining_rows, rows = policy.max_rows, view.total_rows, 0
    late: list[int] = []
    target_rows = costs.best[min(remaining_rows, max_rows)] if policy.merge else 1
    for position, (member_rows, due_ns) in enumerate(view.members()):
        if rows and rows + member_rows > target_rows:
            break
        size = max(target_rows, min(member_rows, max_rows))
        takes_ns = costs.estimates_ns if remaining_rows - member_rows < target_rows else costs.promises_ns
        if now_ns + takes_ns[size] <= due_ns:
            rows += member_rows
        else:
            late.append(position)
            remaining_rows -= member_rows
            target_rows = costs.best[min(remaining_rows, max_rows)] if policy.merge else 1
    if late:
        return Skip(tuple(late))
    return Take(_fitting(view, target_rows), CloseReason.FULL if policy.merge else CloseReason.SINGLE)


def _fitting(view: ShapeQueue, max_rows: int) -> int:
    """Return the number of requests from the front that fit in `max_rows`; at least 1, since an oversized request runs alone."""
    if view.count == view.total_rows:
        return min(view.count, max(max_rows, 1))
    rows = count = 0
    for request_rows in view.row_counts():
        rows += request_rows
        if rows > max_rows:
            break
        count += 1
    return max(count, 1)


def _preferred(view: ShapeQueue, preferred_rows: tuple[int, ...]) -> int:
    """Return the number of requests from the front whose rows equal the largest reachable preferred size, or 0."""
    rows = best = 0
    for count, request_rows in enumerate(view.row_counts(), start=1):
        rows += request_rows
        if rows in preferred_rows:
            best = count
        if rows >= preferred_rows[-1]:
            break
    return best


_REDRAW = 64  # batches between two rebuilds of the tables
# Busy time between two rebuilds: a hundred times the cost of one, and short enough for slow models.
_REDRAW_NS = 50 * NS_PER_MS
# Measured times vary: a smaller batch is preferred only if the larger has less than this share of its rows per second.
_WORSE_RATIO = 0.97
# Batches are limited to the smallest size with this share of the best rows per second: larger ones raise latency and gain almost
# no throughput. With several clients each waits for the batches of the others, so a smaller share is accepted. That share is
# not applied on top of a size that the latency objective has limited as much already.
_BEST_SHARE = 0.98
_BEST_SHARE_OF_SEVERAL = 0.92
_USABLE_SHARE = 0.9  # usable share of the time that a batch may take; the rest covers variation
_MIN_SHARE = 0.8  # share of the best rows per second that remains when batches are limited for later requests


class CostModel:
    """Rebuilds `BatchCosts` from the latency table at intervals. Any thread may call: two concurrent rebuilds are equal.

    Args:
        latency_table: compute times by rows.
        policy: batching rules.

    Attributes:
        instances: number of instances that pull.
        overhead_ns: time from decision to responses of a batch, without its compute time.
        crowded: True while several clients share the model.
        thread_work: processor times of batches.
        efficient_rows: most efficient batch size if it is clearly better than the largest, by processor times; else 0.
        measured_rows: largest measured number of rows at the last rebuild; costs of more rows are extrapolated.
    """

    def __init__(self, latency_table: LatencyTable, policy: BatchPolicy) -> None:
        self.crowded = False
        self.instances = 1
        self.overhead_ns = 0
        self.thread_work = ThreadWork()
        self._latency_table = latency_table
        self._policy = policy
        self._costs: tuple[BatchCosts, BatchCosts] | None = None  # for one client, for several clients
        self.efficient_rows = self.measured_rows = 0
        self._unranked_ns = 0  # busy time since `efficient_rows` was set
        self._batches = 0  # since the last rebuild
        self._busy_ns = 0  # since the last rebuild

    @property
    def current(self) -> BatchCosts | None:
        """The costs for the present clients; None while latencies are unmeasured."""
        if self._batches >= _REDRAW or self._busy_ns >= _REDRAW_NS or self._costs is None:
            self._batches = self._busy_ns = 0
            if self._latency_table.estimate_ns(1):
                table, work = self._latency_table, self.thread_work
                self.measured_rows = table.most_rows
                costs = draw_costs(table, self._policy, self.instances, self.overhead_ns, work)
                self._costs = costs, _limited(costs, _BEST_SHARE_OF_SEVERAL, np.arange(1, len(costs.best)))
        return self._costs[self.crowded] if self._costs is not None else None

    def batch(self, busy_ns: int = 0) -> None:
        """Count a batch that kept its instance busy for `busy_ns` towards the next rebuild.

        The first measurement of more rows than before replaces an extrapolation at once: a model of 0.7 ms for one row and 10 ms
        for 65,536 rows is predicted to take 46 s for them until then.
        """
        self._batches += _REDRAW if self._latency_table.most_rows > self.measured_rows else 1
        self._busy_ns += busy_ns
        self._unranked_ns += busy_ns
        if self._unranked_ns >= _REDRAW_NS:
            self._unranked_ns = 0
            self._rank()

    def _rank(self) -> None:
        """Set `efficient_rows`."""
        max_rows, rows = self._policy.max_rows, 0
        if max_rows > 1 and self._policy.merge:
            works_ns = self.thread_work.costs_ns(self._latency_table.estimates_ns(max_rows))
            if works_ns is not None:
                rates = _rates(works_ns)
                if rates[-1] < _WORSE_RATIO * rates.max():
                    rows = int(np.argmax(rates >= _BEST_SHARE * rates.max()))
        self.efficient_rows = rows


def draw_costs(
    latency_table: LatencyTable,
    policy: BatchPolicy,
    instances: int = 1,
    overhead_ns: int = 0,
    thread_work: ThreadWork | None = None,
) -> BatchCosts:
    """Build `BatchCosts` from a latency table with at least one measurement.

    Args:
        latency_table: compute times by rows.
        policy: batching rules.
        instances: number of instances that pull.
        overhead_ns: time from decision to responses of a batch, without its compute time.
        thread_work: processor times of batches; None to compare batch sizes by duration.
    """
    promises_ns = latency_table.promises_ns(policy.max_rows) + overhead_ns
    estimates_ns = latency_table.estimates_ns(policy.max_rows) + overhead_ns
    works_ns = thread_work.costs_ns(estimates_ns) if thread_work is not None else None
    rates = _rates(estimates_ns if works_ns is None else works_ns)
    best = np.arange(policy.max_rows + 1)
    best[2:][rates[2:] < np.maximum.accumulate(rates)[1:-1] * _WORSE_RATIO] = 0
    best = np.maximum.accumulate(best)
    works = () if works_ns is None else _table(works_ns)
    costs = BatchCosts(_table(promises_ns), _table(estimates_ns), _table(best), instances, works)
    if policy.objective_ns:
        costs = costs._replace(best=_table(np.minimum(best, _affordable_rows(costs, policy.objective_ns))))
    return _limited(costs, _BEST_SHARE, np.asarray(costs.best)[1:])


def _table(values: NDArray[np.int64]) -> array[int]:
    """Return a table that is read by index as fast as a list, and made by one copy: a model may have 65,536 sizes."""
    return array("q", values.astype(np.int64, copy=False).tobytes())


def _rates(costs_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return rows per nanosecond of each size, from 0 rows."""
    rates: NDArray[np.float64] = np.arange(len(costs_ns)) / np.maximum(costs_ns, 1)
    return rates


def _affordable_rows(costs: BatchCosts, objective_ns: int) -> int:
    """Return the rows of the largest batch that leaves later requests enough time.

    A request that arrives just after a batch closed waits for an idle instance and for its own batch. With n instances whose
    batches are staggered, the wait is 1/n of a batch duration. A batch may therefore take n / (n + 1) of the objective. If only
    slow small batches meet that limit (other models may use the device), the limit is not applied: small batches would make
    all requests later.
    """
    affordable_ns = objective_ns * costs.instances / (costs.instances + 1) * _USABLE_SHARE
    sizes = np.asarray(costs.best)[1:]
    promises_ns = np.asarray(costs.promises_ns)[sizes]
    affordable, possible = sizes[promises_ns <= affordable_ns], sizes[promises_ns <= objective_ns]
    max_rows = int(affordable[-1]) if affordable.size else 1
    return max(max_rows, _smallest(costs, possible if possible.size else sizes, _MIN_SHARE))


def _limited(costs: BatchCosts, share: float, sizes: NDArray[np.int64]) -> BatchCosts:
    """Limit batches to the smallest of `sizes` that reaches `share` of the best rows per second."""
    return costs._replace(best=_table(np.minimum(np.asarray(costs.best), _smallest(costs, sizes, share))))


def _smallest(costs: BatchCosts, sizes: NDArray[np.int64], share: float) -> int:
    rates = _rates(np.asarray(costs.costs_ns))[sizes]
    return int(sizes[rates >= share * rates.max()].min())
