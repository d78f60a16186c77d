"""How a version fares, as figures: what was counted over the last seconds, held against its policy and its profile."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.clock import NS_PER_S, NS_PER_US
from headrace.observability.recent import Recent
from headrace.scheduling.batching import CloseReason
from headrace.scheduling.policy import HandlePolicy
from headrace.scheduling.profile import Profile

# A batch size that gives so much of the best throughput is as good, and its answers come sooner.
_NEARLY = 0.98
OVERLOAD = ("overloaded", "would_miss", "queue_timeout", "deadline")
"""Reasons of errors that requests get because there are too many."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a version now.

    Attributes:
        recent: what was counted over the last seconds.
        policy: how requests are treated.
        profile: how long batches compute.
        instances: how many live.
        depth: requests that wait now.
        batched: the model has a batch dimension.
        buckets: rows to which the backend pads batches, ascending; empty if it does not.
        parked: the model is out of memory until somebody asks.
    """

    recent: Recent
    policy: HandlePolicy
    profile: Profile
    instances: int
    depth: int = 0
    batched: bool = True
    buckets: tuple[int, ...] = ()
    parked: bool = False

    @property
    def busy(self) -> float:
        """Share of the time for which an instance was kept by batches, on average over all instances."""
        return min(self.recent.totals.busy_ns / (self.recent.seconds * NS_PER_S * max(self.instances, 1)), 1.0)

    @property
    def batches(self) -> int:
        """Batches that were answered."""
        return sum(size.count for size in self.recent.totals.sizes.values())

    @property
    def mean_rows(self) -> float:
        """Rows of a batch, on average."""
        return sum(rows * size.count for rows, size in self.recent.totals.sizes.items()) / max(self.batches, 1)

    @property
    def refused(self) -> dict[str, int]:
        """Requests that got an error because of what the server could not do for them then, by reason."""
        failures = self.recent.totals.failures
        return {reason: count for reason in (*OVERLOAD, "quota") if (count := failures[reason])}

    @property
    def asked(self) -> int:
        """Requests that came, as far as they were answered or refused."""
        return self.recent.totals.requests + self.recent.totals.failures.total()

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch that can come about."""
        return self.policy.batch.max_rows if self.batched else 1

    def share(self, *reasons: CloseReason) -> float:
        """Of the batches, those closed for one of these reasons."""
        counted = self.recent.totals.reasons
        return sum(counted[reason.value] for reason in reasons) / max(counted.total(), 1)

    def mean_ns(self, sum_ns: int) -> float:
        """Of one request."""
        return sum_ns / max(self.recent.totals.requests, 1)

    @property
    def wait_ns(self) -> float:
        """How long a request waits in the queue, on average."""
        return self.mean_ns(self.recent.totals.queue_ns)

    @property
    def total_ns(self) -> float:
        """How long a request takes from arrival to answer, on average."""
        return self.mean_ns(self.recent.totals.request_ns)

    def per_s(self, count: float) -> float:
        """Of something that happened `count` times."""
        return count / self.recent.seconds

    def throughput(self, rows: float, instances: int = 0) -> float:
        """Rows a second, if all instances run batches of `rows`; 0 if the profile does not know.

        Args:
            rows: of each batch; may lie between two whole numbers.
            instances: how many there are; 0: those there are now.
        """
        count = instances or max(self.instances, 1)
        below = max(int(rows), 1)
        low_ns, high_ns = (self.profile.estimate_ns(size, count) for size in (below, below + 1))
        time_ns = low_ns + (high_ns - low_ns) * max(rows - below, 0.0)
        return count * rows * NS_PER_S / time_ns if time_ns else 0.0

    @property
    def best_rows(self) -> int:
        """The smallest batch, of those that were measured, that gives (nearly) the best throughput; 0 if none was."""
        known = {known.rows for known in self.profile.known() if known.rows <= self.max_rows}
        rates = {rows: self.throughput(rows) for rows in sorted(known)}
        best = max(rates.values(), default=0.0)
        return next((rows for rows, rate in rates.items() if rate >= _NEARLY * best), 0)

    @property
    def gain(self) -> float:
        """How many times as much batches of the best size would get done as those that were run; 1 if that is not known."""
        now, best = self.throughput(self.mean_rows), self.throughput(self.best_rows or 1)
        return max(best / now, 1.0) if now and self.best_rows > self.mean_rows else 1.0

    @property
    def more(self) -> str:
        """`gain` in words."""
        rows = f"{self.throughput(self.best_rows):,.0f} rows/s in batches of {self.best_rows}"
        return f"{self.gain:.1f} times as much: {rows}, {self.throughput(self.mean_rows):,.0f} in those of now"


def numbers(now: Situation) -> dict[str, object]:
    """The figures that the rules go by, for people and scripts."""
    totals = now.recent.totals
    total = totals.phases["total"]
    shown: dict[str, object] = {
        "seconds": round(now.recent.seconds, 1),
        "requests_per_s": round(now.per_s(totals.requests), 1),
        "rows_per_s": round(now.per_s(totals.rows), 1),
        "refused_per_s": round(now.per_s(sum(now.refused.values())), 1),
        "waiting": now.depth,
        "instances": now.instances,
        "busy": round(now.busy, 3),
        "batches_per_s": round(now.per_s(now.batches), 1),
        "rows_per_batch": round(now.mean_rows, 2),
        "requests_per_batch": round(totals.requests / max(now.batches, 1), 2),
        "closed": dict(totals.reasons),
        "refused": now.refused,
        "queue_us": round(now.wait_ns / NS_PER_US, 1),
        "assembly_us": round(now.mean_ns(totals.assembly_ns) / NS_PER_US, 1),
        "compute_us": round(now.mean_ns(totals.compute_ns) / NS_PER_US, 1),
        "split_us": round(now.mean_ns(totals.split_ns) / NS_PER_US, 1),
        "total_us": round(now.total_ns / NS_PER_US, 1),
    }
    for name, quantile in (("p50_us", 0.5), ("p99_us", 0.99)):
        time_s = total.quantile_s(quantile)
        if time_s is not None:
            shown[name] = round(time_s * NS_PER_S / NS_PER_US, 1)
    best = now.best_rows
    if best:
        shown |= {"best_rows": best, "best_rows_per_s": round(now.throughput(best), 1)}
    return shown
