"""What limits a version now, in words: from what was counted over the last seconds, its policy and its profile.

Each rule looks for one limit and tells its cure, with what the profile lets expect of it. The rules stand in the order in which
limits hide each other: who is refused does not wait, and while the instances are busy nothing else matters much.

How a version fares, as figures: what was counted over the last seconds, held against its policy and its profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from headrace.observability.counters import Recent
from headrace.scheduling.batching import CloseReason
from headrace.scheduling.latency_table import Profile
from headrace.scheduling.policy import HandlePolicy

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


_BUSY = 0.85  # of the time, from which on an instance counts as busy: what comes finds it so nearly always
_OFTEN = 0.25  # of all batches, or of a request's time: enough to be worth telling
_REFUSED = 0.01  # of all requests
_GAIN = 1.15  # times as much: less is not worth a change of settings


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that limits a version.

    Attributes:
        kind: one word, for scripts.
        explanation: what it is, with the figures it is told from.
        cure: what to change; "" if there is nothing.
        setting: field of the configuration that the cure changes; "" if it is none.
        expected: what the change would bring, "" if that is not known.
    """

    kind: str
    explanation: str
    cure: str = ""
    setting: str = ""
    expected: str = ""


def limits(now: Situation) -> list[Limit]:
    """All that limits a version, what matters most first; never empty."""
    found = [limit for rule in _RULES if (limit := rule(now)) is not None]
    return found or [_room(now)]


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.095 else f"{share:.1%}".replace("%", " %")


def _ms(time_ns: float) -> str:
    return f"{time_ns / NS_PER_MS:.3g} ms"


# The rules


def _parked(now: Situation) -> Limit | None:
    if not now.parked:
        return None
    told = "the model is parked, since others need the GPU's memory: a request waits until it is loaded again"
    return Limit("parked", told, "pin it, or give it and the others room", "keep_loaded, gpu_memory_budget")


def _missing(now: Situation) -> Limit | None:
    if now.parked or now.instances >= now.policy.instances:
        return None
    told = f"{now.instances} of {now.policy.instances} instances live: the others have died, the server's log says why"
    return Limit("instances", told, "mend what they died of; they are started again by themselves")


def _nobody(now: Situation) -> Limit | None:
    if now.asked:
        return None
    return Limit("idle", f"nobody has asked for the model in the last {now.recent.seconds:.0f} s")


def _quotas(now: Situation) -> Limit | None:
    refused = now.recent.totals.failures["quota"]
    if refused < _REFUSED * now.asked or not refused:
        return None
    told = f"{_percent(refused / now.asked)} of the requests were refused because their client was over its quota"
    return Limit(
        "quota",
        told,
        "raise the client's limit, or have it ask less often; the request log names the clients",
        "rate_limits",
    )


def _overload(now: Situation) -> Limit | None:
    refused = {reason: count for reason, count in now.refused.items() if reason in OVERLOAD}
    count = sum(refused.values())
    if count < _REFUSED * now.asked or not count:
        return None
    rows = now.recent.totals.rows / max(now.recent.totals.requests, 1)
    why = ", ".join(f"{reason} {number}" for reason, number in refused.items())
    told = (
        f"{_percent(count / now.asked)} of the requests were refused or came too late ({why}): "
        f"{now.per_s(now.asked) * max(rows, 1):,.0f} rows/s were asked for"
    )
    best = now.best_rows
    if best:
        told += f", the profile has {now.throughput(best):,.0f} rows/s at the most, in batches of {best}"
    if now.busy < _BUSY:
        cure = f"the instances were busy for {_percent(now.busy)} of the time only: allow longer waits or queues"
        return Limit("overloaded", told, cure, "slo.p99_ms, default_queue_policy")
    return Limit("overloaded", told, "send less, or see what keeps the instances busy")


def _late(now: Situation) -> Limit | None:
    promised_ns = now.policy.batch.objective_ns
    reached_s = now.recent.totals.phases["total"].quantile_s(0.99)
    if not promised_ns or reached_s is None or reached_s * NS_PER_S <= 1.1 * promised_ns:  # it is known within 9 %
        return None
    told = f"99 of 100 answers take up to {_ms(reached_s * NS_PER_S)}, {_ms(promised_ns)} are promised"
    alone_ns = now.profile.promise_ns(1, now.instances)
    if alone_ns > promised_ns:
        told += f": a single row takes {_ms(alone_ns)}"
    return Limit("late", told, "promise what the model can do, or have it do less at a time", "slo.p99_ms")


def _unmerged(now: Situation) -> Limit | None:
    if now.busy < _BUSY or now.policy.batch.merge or now.max_rows < 2 or now.gain < _GAIN:
        return None
    told = f"{_compute(now)}, one request at a time: the model batches, but its requests are not merged"
    return Limit("unmerged", told, "let requests share batches", "dynamic_batching {}", now.more)


def _shapes(now: Situation) -> Limit | None:
    changes = now.recent.totals.shape_changes
    if now.busy < _BUSY or not now.policy.batch.merge or now.gain < _GAIN or changes < _OFTEN * now.batches:
        return None
    told = (
        f"{_compute(now)}, in batches of {now.mean_rows:.1f} rows: requests of different shapes cannot share one, and "
        f"{_percent(changes / now.batches)} of the batches had another shape than the one before"
    )
    cure = "bring requests to few shapes: pad or resize them before they are sent"
    return Limit("shapes", told, cure, "", now.more)


def _preferred(now: Situation) -> Limit | None:
    preferred = now.policy.batch.preferred_rows
    often = now.share(CloseReason.PREFERRED) >= _OFTEN
    if now.busy < _BUSY or not often or now.gain < _GAIN or max(preferred) >= now.best_rows:
        return None
    told = f"{_compute(now)}, and batches close at preferred sizes of {', '.join(map(str, preferred))} rows"
    cure = f"prefer {now.best_rows} rows, or nothing"
    return Limit("preferred", told, cure, "dynamic_batching.preferred_batch_size", now.more)


def _promise(now: Situation) -> Limit | None:
    batch = now.policy.batch
    if now.busy < _BUSY or now.gain < _GAIN or now.share(CloseReason.DEADLINE) < _OFTEN:
        return None
    told = f"{_compute(now)}, in batches of {now.mean_rows:.1f} rows: larger ones would answer some requests too late"
    cure = "allow more time"
    if batch.objective_ns:
        told += f" (promised: {_ms(batch.objective_ns)})"
        cure = f"promise {_ms(2 * now.profile.promise_ns(now.best_rows, now.instances))} or more"
    return Limit("promise", told, cure, "slo.p99_ms" if batch.objective_ns else "", now.more)


def _company(now: Situation) -> Limit | None:
    """Batches that close before they are worth it, though there is not enough time for small ones."""
    batch, reasons = now.policy.batch, (CloseReason.IDLE, CloseReason.DELAY)
    if now.busy < _BUSY or not batch.merge or now.gain < _GAIN or now.share(*reasons) < _OFTEN:
        return None
    needed_ns = now.best_rows / max(now.per_s(now.recent.totals.rows), 1e-9) * NS_PER_S
    told = (
        f"{_compute(now)}, in batches of {now.mean_rows:.1f} rows, which close after "
        f"{'no delay' if not batch.max_delay_ns else _ms(batch.max_delay_ns)}; {now.best_rows} rows come in {_ms(needed_ns)}"
    )
    cure = f"wait {needed_ns / NS_PER_US:.0f} us for company, or promise a latency and leave the rest to Headrace (slo)"
    return Limit("delay_too_short", told, cure, "dynamic_batching.max_queue_delay_microseconds", now.more)


def _padding(now: Situation) -> Limit | None:
    if not now.buckets:
        return None
    sizes = now.recent.totals.sizes
    run = padded = 0
    for rows, size in sizes.items():
        bucket = next((bucket for bucket in now.buckets if bucket >= rows), rows)
        run += bucket * size.count
        padded += (bucket - rows) * size.count
    if now.busy < _BUSY or padded < _OFTEN * run:
        return None
    told = f"{_percent(padded / run)} of the rows that were computed were padding: batches of {now.mean_rows:.1f} rows on average"
    told += f" ran in sizes of {', '.join(map(str, now.buckets[:12]))}"
    cure = "close batches at those sizes"
    return Limit(
        "padding",
        told,
        cure,
        "dynamic_batching.preferred_batch_size",
        f"up to {run / (run - padded):.1f} times as much",
    )


def _computing(now: Situation) -> Limit | None:
    """Busy, and in batches that are as good as they get."""
    if now.busy < _BUSY or now.gain >= _GAIN:
        return None
    told = f"{_compute(now)}, in batches of {now.mean_rows:.1f} rows"
    most, count = now.max_rows, max(now.instances, 1)
    more = now.throughput(2 * most) / (
        now.throughput(most) or 1.0
    )  # beyond the largest the profile rather says too little
    last = now.throughput(most) / (now.throughput(most / 2) or 1.0) if most > 1 else 1.0
    if now.batched and now.mean_rows > 0.9 * most and max(more, last) >= _GAIN:
        expected = f"up to {max(more, last):.1f} times as much, if it goes on as from {most // 2} to {most} rows"
        return Limit("compute", f"{told}: full ones", f"allow {2 * most} rows in a batch", "max_batch_size", expected)
    if count == 1:
        cure = "try a second instance, a faster engine (`headrace build`), or another machine beside this one"
        return Limit("compute", told, cure, "instance_group")
    alone, together = now.throughput(now.mean_rows, 1), now.throughput(now.mean_rows)
    told += f"; {count} instances get {together / alone:.1f} times as much done as one" if alone else ""
    if alone and together < _GAIN * alone:
        cure = "keep one instance, and try a faster engine (`headrace build`), or another machine beside this one"
        return Limit(
            "compute", told, cure, "instance_group", "answers that come sooner, since instances disturb each other"
        )
    return Limit(
        "compute", told, "try more instances, a faster engine (`headrace build`), or another machine", "instance_group"
    )


def _delay(now: Situation) -> Limit | None:
    delay_ns = now.policy.batch.max_delay_ns
    if now.busy >= _BUSY or now.share(CloseReason.DELAY) < _OFTEN or now.wait_ns < _OFTEN * now.total_ns:
        return None
    members = now.recent.totals.requests / max(now.batches, 1)
    told = f"requests wait {_ms(now.wait_ns)} of {_ms(now.total_ns)} for company"
    if members < 2:
        rate_hz = now.per_s(now.recent.totals.requests)
        told += f", and then run {members:.1f} together: {rate_hz:,.0f} requests/s are too sparse for a delay of {_ms(delay_ns)}"
    else:
        told += f", which the instances, busy for {_percent(now.busy)} of the time, do not need"
    expected = f"answers {_ms(now.wait_ns)} sooner on average"
    return Limit("delay_too_long", told, "wait less", "dynamic_batching.max_queue_delay_microseconds", expected)


def _wake_ups(now: Situation) -> Limit | None:
    """An instance that is free takes all that waits: nobody should wait much longer than for one batch that is not full."""
    batch_ns = now.recent.totals.busy_ns / max(now.batches, 1)
    free = now.policy.batch.merge and now.share(CloseReason.IDLE) >= 0.5 and now.mean_rows <= now.max_rows / 2
    if now.busy >= _BUSY or not free or now.wait_ns < max(2 * batch_ns, _OFTEN * now.total_ns):
        return None
    told = (
        f"requests wait {_ms(now.wait_ns)} of {_ms(now.total_ns)} though the instances are free for {_percent(1 - now.busy)} of "
        f"the time and a batch takes {_ms(batch_ns)}: their threads come late to the processor, which is busy with other work"
    )
    cure = "leave the server cores for itself (clients, other models), or send more rows in each request"
    return Limit("processor", told, cure, "", f"answers up to {_ms(now.wait_ns - batch_ns)} sooner on average")


def _bursts(now: Situation) -> Limit | None:
    if (
        now.busy >= _BUSY
        or now.wait_ns <= _OFTEN * now.total_ns
        or now.share(CloseReason.DELAY) >= _OFTEN
        or _wake_ups(now)
    ):
        return None
    told = (
        f"requests wait {_ms(now.wait_ns)} of {_ms(now.total_ns)} in the queue, though the instances are busy for "
        f"{_percent(now.busy)} of the time: they come at the same time"
    )
    if not now.policy.batch.merge and now.max_rows > 1:
        return Limit("queue", f"{told}, and run one by one", "let requests share batches", "dynamic_batching {}")
    if now.instances == 1:
        return Limit("queue", f"{told}, and there is one instance", "try a second instance", "instance_group")
    return Limit("queue", told, "try more instances, or have callers spread their requests", "instance_group")


def _copies(now: Situation) -> Limit | None:
    totals = now.recent.totals
    copied_ns, compute_ns = now.mean_ns(totals.assembly_ns + totals.split_ns), now.mean_ns(totals.compute_ns)
    if not totals.requests or copied_ns < 2 * _OFTEN * compute_ns or copied_ns < _OFTEN * now.total_ns:
        return None
    told = f"copying inputs and outputs takes {_ms(copied_ns)} of a request's time, computing {_ms(compute_ns)}"
    return Limit("copies", told, "send pictures as bytes (preprocess by: server), or use shared memory", "preprocess")


def _sparse(now: Situation) -> Limit | None:
    """Nothing waits: whoever wants more has to ask for more at the same time."""
    totals = now.recent.totals
    if now.busy >= _BUSY or not totals.requests or now.wait_ns >= _OFTEN * now.total_ns:
        return None
    inside = now.per_s(totals.request_ns) / NS_PER_S  # Little's law
    told = (
        f"arrivals are too sparse to batch: {inside:.1f} requests are in the server at a time, on average, and the instances "
        f"are busy for {_percent(now.busy)} of the time"
    )
    best = now.best_rows
    expected = f"up to {now.throughput(best):,.0f} rows/s, now {now.per_s(totals.rows):,.0f}" if best else ""
    return Limit("arrivals", told, "for more, send more requests at the same time, or more rows in each", "", expected)


def _room(now: Situation) -> Limit:
    return Limit("nothing", f"nothing stands out: the instances are busy for {_percent(now.busy)} of the time")


def _compute(now: Situation) -> str:
    several = f"{now.instances} instances compute" if now.instances > 1 else "the instance computes"
    return f"{several} for {_percent(now.busy)} of the time"


_RULES: Iterable[Callable[[Situation], Limit | None]] = (
    _parked, _missing, _nobody, _quotas, _overload, _late, _unmerged, _shapes, _preferred, _promise, _company, _padding,
    _computing, _delay, _wake_ups, _bursts, _copies, _sparse,
)  # fmt: skip
