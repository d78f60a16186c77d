"""The decision when a batch closes, as a plain function of a view, the time and a policy.

No clock, no lock, no queue in here: the scheduler asks, the simulator asks, tests ask in virtual time.
The rules are those of Triton's dynamic batcher (its model configuration guide, "Dynamic Batcher"), for an idle instance that
asks what to run: the largest preferred size that the waiting requests reach; else a full batch; else whatever waits, when the
oldest has waited for the allowed delay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


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


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How requests may be merged.

    Attributes:
        max_rows: rows in one batch, at least 1.
        preferred_rows: sizes worth closing a batch for, ascending.
        max_delay_ns: how long the oldest request may be kept waiting for company while an instance is idle.
        merge: False runs every request alone.
        objective_ns: how long after its arrival a request should be answered, 0 if nothing is promised.
    """

    max_rows: int = 1
    preferred_rows: tuple[int, ...] = ()
    max_delay_ns: int = 0
    merge: bool = True
    objective_ns: int = 0


class LaneView(Protocol):
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

    def row_counts(self) -> Iterable[int]:
        """Rows of each request, first to be served first."""


@dataclass(slots=True)  # not frozen, which would double what making one costs, once a batch
class Take:
    """Close a batch with the first `count` requests."""

    count: int
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Ask again at `time_ns` (monotonic), or when something was queued."""

    time_ns: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing waits."""


Decision = Take | WaitUntil | Idle

IDLE = Idle()


def decide(view: LaneView, now_ns: int, policy: BatchPolicy) -> Decision:
    """What an idle instance should do with the requests in `view` at `now_ns`."""
    count = view.count
    if count == 0:
        return IDLE
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


def _fitting(view: LaneView, max_rows: int) -> int:
    """How many requests from the front fit in `max_rows`; at least one, since an oversized one can only go alone."""
    rows = count = 0
    for request_rows in view.row_counts():
        rows += request_rows
        if rows > max_rows:
            break
        count += 1
    return max(count, 1)


def _preferred(view: LaneView, preferred_rows: tuple[int, ...]) -> int:
    """How many requests from the front make the largest preferred size that can be made exactly; 0 if none can."""
    rows = best = 0
    for count, request_rows in enumerate(view.row_counts(), start=1):
        rows += request_rows
        if rows in preferred_rows:
            best = count
        if rows >= preferred_rows[-1]:
            break
    return best
