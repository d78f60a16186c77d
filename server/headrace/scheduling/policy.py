"""How a model version treats its requests: made from its configuration, never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


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


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """How requests of one priority level may wait; each value takes the place of the handle's own.

    Attributes:
        max_count: requests of the level that may wait, 0: as many as `QueueLimits` has for all.
        queue_timeout_ns: how long one may, 0 for ever.
        demote_on_timeout: serve it last instead of refusing it.
        timeout_override: a request's own timeout may shorten the queue's.
    """

    max_count: int = 0
    queue_timeout_ns: int = 0
    demote_on_timeout: bool = False
    timeout_override: bool = False


@dataclass(frozen=True, slots=True)
class Sharing:
    """How clients share a model within a priority level: in proportion to their weights, by rows.

    Attributes:
        weights: by client.
        default_weight: of each that is not named.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    default_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Quota:
    """What a client may ask for: a token bucket.

    Attributes:
        rate_hz: requests a second in the long run.
        burst: requests at once, at least 1.
    """

    rate_hz: float
    burst: int = 1


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Quotas of clients.

    Attributes:
        clients: by client.
        default: of each that is not named; None: as much as it likes.
    """

    clients: Mapping[str, Quota] = field(default_factory=dict)
    default: Quota | None = None


@dataclass(frozen=True, slots=True)
class HandlePolicy:
    """How a model version treats its requests; made from its configuration.

    Attributes:
        batch: how requests may be merged.
        limits: what may wait.
        instances: how many run at the same time.
        split_oversized: cut a request larger than a batch into parts, or refuse it.
        preserve_ordering: answer in the order of arrival.
        levels: number of priority levels, 1 if there are none.
        default_level: 1-based level of a request that names none.
        queue_timeout_ns: how long a request may wait, 0 for ever.
        demote_on_timeout: serve it last instead of refusing it.
        timeout_override: a request's own timeout may shorten the queue's.
        fill_threads: that copy the rows of a large batch at the same time, for each instance whose batches overlap.
        level_policies: of levels with their own, by 1-based level.
        aging_ns: how long a request waits before it counts as of the next higher level, 0: levels do not age.
        sharing: how clients share; None: a request is a request, whoever sent it.
        rate_limits: what clients may ask for; None: as much as they like.
    """

    batch: BatchPolicy = field(default_factory=BatchPolicy)
    limits: QueueLimits = field(default_factory=QueueLimits)
    instances: int = 1
    split_oversized: bool = True
    preserve_ordering: bool = False
    levels: int = 1
    default_level: int = 1
    queue_timeout_ns: int = 0
    demote_on_timeout: bool = False
    timeout_override: bool = False
    fill_threads: int = 1
    level_policies: Mapping[int, LevelPolicy] = field(default_factory=dict)
    aging_ns: int = 0
    sharing: Sharing | None = None
    rate_limits: RateLimits | None = None

    @property
    def queue_limits(self) -> QueueLimits:
        """`limits` with those of the levels that have their own."""
        counts = {level - 1: own.max_count for level, own in self.level_policies.items() if own.max_count}
        return replace(self.limits, level_counts=counts) if counts else self.limits
