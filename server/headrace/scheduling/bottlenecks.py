"""Explains what limits a model version, from the counters of the last seconds, its policy and its latency table.

Each rule looks for one bottleneck and names its remedy, with the gain that the latency table predicts. The rules are ordered by
how bottlenecks hide each other: a rejected request does not wait, and while the instances are busy little else matters.

`LoadSnapshot` holds the figures that the rules read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from headrace.core.response_bodies import Bottleneck, SequenceFigures
from headrace.observability.counters import RecentTotals
from headrace.scheduling.batching import CloseReason
from headrace.scheduling.latency_table import LatencyTable
from headrace.scheduling.policy import HandlePolicy

# The smallest batch size with this share of the best throughput counts as the best: its latency is lower.
_NEARLY = 0.98
OVERLOAD = ("overloaded", "would_miss", "queue_timeout", "deadline")
"""Reasons of errors that overload causes."""


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Figures of a version over the last seconds.

    Attributes:
        recent: counters of the last seconds.
        policy: the version's policy.
        latency_table: compute times by rows.
        instances: number of live instances.
        depth: number of queued requests.
        batched: True if the model has a batch dimension.
        evicted: True if the model is out of GPU memory until the next request.
    """

    recent: RecentTotals
    policy: HandlePolicy
    latency_table: LatencyTable
    instances: int
    depth: int = 0
    batched: bool = True
    evicted: bool = False

    @property
    def utilization(self) -> float:
        """Share of the time for which an instance was busy with batches, averaged over the instances."""
        return min(self.recent.totals.busy_ns / (self.recent.seconds * NS_PER_S * max(self.instances, 1)), 1.0)

    @property
    def batches(self) -> int:
        """Number of completed batches."""
        return sum(size.count for size in self.recent.totals.sizes.values())

    @property
    def mean_rows(self) -> float:
        """Mean rows of a batch."""
        return sum(rows * size.count for rows, size in self.recent.totals.sizes.items()) / max(self.batches, 1)

    @property
    def refused(self) -> dict[str, int]:
        """Number of requests rejected because of overload or a quota, by reason."""
        failures = self.recent.totals.failures
        return {reason: count for reason in (*OVERLOAD, "quota") if (count := failures[reason])}

    @property
    def received(self) -> int:
        """Number of requests that were answered or failed."""
        totals = self.recent.totals
        return max(totals.requests - totals.undelivered, 0) + totals.failures.total()

    @property
    def max_rows(self) -> int:
        """Rows of the largest possible batch."""
        return self.policy.batch.max_rows if self.batched else 1

    def share(self, *reasons: CloseReason) -> float:
        """Return the share of batches that were closed for one of `reasons`."""
        counted = self.recent.totals.reasons
        return sum(counted[reason.value] for reason in reasons) / max(counted.total(), 1)

    def mean_ns(self, sum_ns: int) -> float:
        """Return the mean over requests of a time that is summed over them."""
        return sum_ns / max(self.recent.totals.requests, 1)

    @property
    def wait_ns(self) -> float:
        """Mean queue time of a request."""
        return self.mean_ns(self.recent.totals.queue_ns)

    @property
    def total_ns(self) -> float:
        """Mean latency of a request from arrival to response."""
        return self.mean_ns(self.recent.totals.request_ns)

    def per_s(self, count: float) -> float:
        """Return the rate of an event that was counted `count` times, per second."""
        return count / self.recent.seconds

    def throughput(self, rows: float, instances: int = 0) -> float:
        """Predict the rows per second of all instances with batches of `rows`; 0 while latencies are unmeasured.

        Args:
            rows: mean rows of a batch.
            instances: number of instances; 0 for the live ones.
        """
        count = instances or max(self.instances, 1)
        below = max(int(rows), 1)
        low_ns, high_ns = (self.latency_table.estimate_ns(size, count) for size in (below, below + 1))
        time_ns = low_ns + (high_ns - low_ns) * max(rows - below, 0.0)
        return count * rows * NS_PER_S / time_ns if time_ns else 0.0

    @property
    def best_rows(self) -> int:
        """The smallest measured batch size with nearly the best throughput; 0 if none was measured."""
        measured = {entry.rows for entry in self.latency_table.entries() if entry.rows <= self.max_rows}
        rates = {rows: self.throughput(rows) for rows in sorted(measured)}
        best = max(rates.values(), default=0.0)
        return next((rows for rows, rate in rates.items() if rate >= _NEARLY * best), 0)

    @property
    def gain(self) -> float:
        """Throughput of batches of the best size over that of the present batches; 1 if unknown."""
        load, best = self.throughput(self.mean_rows), self.throughput(self.best_rows or 1)
        return max(best / load, 1.0) if load and self.best_rows > self.mean_rows else 1.0

    @property
    def expected_gain(self) -> str:
        """`gain` as a sentence."""
        rows = f"{self.throughput(self.best_rows):,.0f} rows/s in batches of {self.best_rows}"
        return f"{self.gain:.1f} times the throughput: {rows}, {self.throughput(self.mean_rows):,.0f} at present"


def snapshot_figures(load: LoadSnapshot) -> dict[str, object]:
    """Return the figures that the rules read, as a JSON object for display and scripts."""
    totals = load.recent.totals
    total = totals.phases["total"]
    shown: dict[str, object] = {
        "seconds": round(load.recent.seconds, 1),
        "requests_per_s": round(load.per_s(totals.requests), 1),
        "rows_per_s": round(load.per_s(totals.rows), 1),
        "refused_per_s": round(load.per_s(sum(load.refused.values())), 1),
        "waiting": load.depth,
        "instances": load.instances,
        "busy": round(load.utilization, 3),
        "batches_per_s": round(load.per_s(load.batches), 1),
        "rows_per_batch": round(load.mean_rows, 2),
        "requests_per_batch": round(totals.requests / max(load.batches, 1), 2),
        "closed": dict(totals.reasons),
        "refused": load.refused,
        "queue_us": round(load.wait_ns / NS_PER_US, 1),
        "assemble_us": round(load.mean_ns(totals.assemble_ns) / NS_PER_US, 1),
        "compute_us": round(load.mean_ns(totals.compute_ns) / NS_PER_US, 1),
        "split_us": round(load.mean_ns(totals.split_ns) / NS_PER_US, 1),
        "total_us": round(load.total_ns / NS_PER_US, 1),
    }
    for name, quantile in (("p50_us", 0.5), ("p99_us", 0.99)):
        time_s = total.quantile_s(quantile)
        if time_s is not None:
            shown[name] = round(time_s * NS_PER_S / NS_PER_US, 1)
    best = load.best_rows
    if best:
        shown |= {"best_rows": best, "best_rows_per_s": round(load.throughput(best), 1)}
    return shown


_BUSY = 0.85  # utilisation from which an instance counts as busy: nearly every request finds it busy
_OFTEN = 0.25  # share of batches, or of a request's latency, from which a cause is reported
_REFUSED = 0.01  # share of rejected requests from which they are reported
_GAIN = 1.15  # throughput ratio from which a change of settings is proposed: less is not worth a change


def find_bottlenecks(load: LoadSnapshot) -> list[Bottleneck]:
    """Return the bottlenecks of a version, the most important first; never empty."""
    bottlenecks = [limit for rule in _RULES if (limit := rule(load)) is not None]
    text = f"no bottleneck: the instances are busy for {_percent(load.utilization)} of the time"
    return bottlenecks or [Bottleneck("nothing", text)]


def find_full_slots(sequences: SequenceFigures, policy: HandlePolicy) -> Bottleneck | None:
    """Return a bottleneck if sequences wait for a slot."""
    if not sequences.backlog or not sequences.slots:
        return None
    explanation = (
        f"sequences in the backlog: {sequences.backlog}; {sequences.used} of {sequences.slots} slots have a sequence, which "
        "keeps its slot until it ends"
    )
    cure = (
        "more slots; send END with the last request of a sequence, and let forgotten ones expire sooner "
        "(max_sequence_idle_microseconds)"
    )
    is_direct = policy.sequences is not None and policy.sequences.is_direct
    setting = "max_batch_size" if is_direct else "sequence_batching.oldest.max_candidate_sequences"
    return Bottleneck("slots", explanation, cure, f"{setting}, instance_group")


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.095 else f"{share:.1%}".replace("%", " %")


def _ms(time_ns: float) -> str:
    return f"{time_ns / NS_PER_MS:.3g} ms"


# The rules


def _evicted(load: LoadSnapshot) -> Bottleneck | None:
    if not load.evicted:
        return None
    explanation = (
        "the model is not in memory: other models use it, or no request came yet. A request waits until it is loaded"
    )
    cure = "keep it loaded, or raise the budget of GPU or host memory"
    return Bottleneck("parked", explanation, cure, "keep_loaded, gpu_memory_budget, --host-memory-budget")


def _dead_instances(load: LoadSnapshot) -> Bottleneck | None:
    if load.evicted or load.instances >= load.policy.instances:
        return None
    explanation = (
        f"{load.instances} of {load.policy.instances} instances are running: the others have failed, see the server log"
    )
    return Bottleneck("instances", explanation, "fix the cause; failed instances restart automatically")


def _no_requests(load: LoadSnapshot) -> Bottleneck | None:
    if load.received:
        return None
    return Bottleneck("idle", f"the model received no request in the last {load.recent.seconds:.0f} s")


def _quotas(load: LoadSnapshot) -> Bottleneck | None:
    refused = load.recent.totals.failures["quota"]
    if refused < _REFUSED * load.received or not refused:
        return None
    explanation = (
        f"{_percent(refused / load.received)} of the requests were rejected because their client exceeded its quota"
    )
    cure = "raise the client's quota, or send fewer requests; the access log names the clients"
    return Bottleneck("quota", explanation, cure, "rate_limits")


def _overload(load: LoadSnapshot) -> Bottleneck | None:
    refused = {reason: count for reason, count in load.refused.items() if reason in OVERLOAD}
    count = sum(refused.values())
    if count < _REFUSED * load.received or not count:
        return None
    rows = load.recent.totals.rows / max(load.recent.totals.requests, 1)
    why = ", ".join(f"{reason} {number}" for reason, number in refused.items())
    explanation = (
        f"{_percent(count / load.received)} of the requests were rejected or too late ({why}): "
        f"{load.per_s(load.received) * max(rows, 1):,.0f} rows/s were requested"
    )
    best = load.best_rows
    if best:
        explanation += f", the capacity is {load.throughput(best):,.0f} rows/s, in batches of {best}"
    if load.utilization < _BUSY:
        cure = (
            f"the instances were busy for only {_percent(load.utilization)} of the time: allow longer waits or queues"
        )
        return Bottleneck("overloaded", explanation, cure, "slo.p99_ms, default_queue_policy")
    return Bottleneck("overloaded", explanation, "send less, or read the next bottleneck")


def _late(load: LoadSnapshot) -> Bottleneck | None:
    predicted_ns = load.policy.batch.objective_ns
    reached_s = load.recent.totals.phases["total"].quantile_s(0.99)
    # The buckets of the histogram are 9 % wide.
    if not predicted_ns or reached_s is None or reached_s * NS_PER_S <= 1.1 * predicted_ns:
        return None
    explanation = (
        f"the 99th percentile of the latency is {_ms(reached_s * NS_PER_S)}, the objective {_ms(predicted_ns)}"
    )
    alone_ns = load.latency_table.promise_ns(1, load.instances)
    if alone_ns > predicted_ns:
        explanation += f": a single row takes {_ms(alone_ns)}"
    return Bottleneck("late", explanation, "raise the objective, or use a faster engine", "slo.p99_ms")


def _unmerged(load: LoadSnapshot) -> Bottleneck | None:
    if load.utilization < _BUSY or load.policy.batch.merge or load.max_rows < 2 or load.gain < _GAIN:
        return None
    explanation = f"{_compute(load)}, one request at a time: the model supports batches, but dynamic batching is off"
    return Bottleneck("unmerged", explanation, "let requests share batches", "dynamic_batching {}", load.expected_gain)


def _shapes(load: LoadSnapshot) -> Bottleneck | None:
    changes = load.recent.totals.shape_changes
    if load.utilization < _BUSY or not load.policy.batch.merge or load.gain < _GAIN or changes < _OFTEN * load.batches:
        return None
    explanation = (
        f"{_compute(load)}, in batches of {load.mean_rows:.1f} rows: requests of different shapes cannot share one, and "
        f"{_percent(changes / load.batches)} of the batches had another shape than the one before"
    )
    cure = "use few shapes: pad or resize inputs before they are sent"
    return Bottleneck("shapes", explanation, cure, "", load.expected_gain)


def _preferred(load: LoadSnapshot) -> Bottleneck | None:
    preferred = load.policy.batch.preferred_rows
    is_often = load.share(CloseReason.PREFERRED) >= _OFTEN
    if load.utilization < _BUSY or not is_often or load.gain < _GAIN or max(preferred) >= load.best_rows:
        return None
    explanation = f"{_compute(load)}, and batches close at preferred sizes of {', '.join(map(str, preferred))} rows"
    cure = f"prefer {load.best_rows} rows, or remove the preferred sizes"
    return Bottleneck("preferred", explanation, cure, "dynamic_batching.preferred_batch_size", load.expected_gain)


def _latency_objective(load: LoadSnapshot) -> Bottleneck | None:
    batch = load.policy.batch
    if load.utilization < _BUSY or load.gain < _GAIN or load.share(CloseReason.DEADLINE) < _OFTEN:
        return None
    explanation = (
        f"{_compute(load)}, in batches of {load.mean_rows:.1f} rows: in larger ones requests would miss their deadline"
    )
    cure = "allow longer deadlines"
    if batch.objective_ns:
        explanation += f" (objective: {_ms(batch.objective_ns)})"
        cure = (
            f"raise the objective to {_ms(2 * load.latency_table.promise_ns(load.best_rows, load.instances))} or more"
        )
    return Bottleneck("promise", explanation, cure, "slo.p99_ms" if batch.objective_ns else "", load.expected_gain)


def _delay_too_short(load: LoadSnapshot) -> Bottleneck | None:
    """Busy instances whose batches close small, since no delay or a short one is allowed."""
    batch, reasons = load.policy.batch, (CloseReason.IDLE, CloseReason.DELAY)
    if load.utilization < _BUSY or not batch.merge or load.gain < _GAIN or load.share(*reasons) < _OFTEN:
        return None
    needed_ns = load.best_rows / max(load.per_s(load.recent.totals.rows), 1e-9) * NS_PER_S
    explanation = (
        f"{_compute(load)}, in batches of {load.mean_rows:.1f} rows, which close after "
        f"{'no delay' if not batch.max_delay_ns else _ms(batch.max_delay_ns)}; {load.best_rows} rows arrive in {_ms(needed_ns)}"
    )
    cure = f"allow a delay of {needed_ns / NS_PER_US:.0f} us, or set a latency objective (slo) instead of a delay"
    return Bottleneck(
        "delay_too_short", explanation, cure, "dynamic_batching.max_queue_delay_microseconds", load.expected_gain
    )


def _padding(load: LoadSnapshot) -> Bottleneck | None:
    buckets = load.latency_table.buckets
    if not buckets:
        return None
    run = padded = 0
    for rows, size in load.recent.totals.sizes.items():
        bucket = next((bucket for bucket in buckets if bucket >= rows), rows)
        run += bucket * size.count
        padded += (bucket - rows) * size.count
    if load.utilization < _BUSY or padded < _OFTEN * run:
        return None
    explanation = f"{_percent(padded / run)} of the rows that were computed were padding: "
    explanation += f"batches of {load.mean_rows:.1f} rows on average"
    explanation += f" ran in sizes of {', '.join(map(str, buckets[:12]))}"
    cure = "close batches at those sizes"
    return Bottleneck(
        "padding",
        explanation,
        cure,
        "dynamic_batching.preferred_batch_size",
        f"up to {run / (run - padded):.1f} times the throughput",
    )


def _computing(load: LoadSnapshot) -> Bottleneck | None:
    """Busy instances with batches of nearly the best size."""
    if load.utilization < _BUSY or load.gain >= _GAIN:
        return None
    explanation = f"{_compute(load)}, in batches of {load.mean_rows:.1f} rows"
    max_rows, count = load.max_rows, max(load.instances, 1)
    # Beyond the largest measured size the latency table rather overestimates times, so this gain is a lower bound.
    expected_gain = load.throughput(2 * max_rows) / (load.throughput(max_rows) or 1.0)
    last = load.throughput(max_rows) / (load.throughput(max_rows / 2) or 1.0) if max_rows > 1 else 1.0
    if load.batched and load.mean_rows > 0.9 * max_rows and max(expected_gain, last) >= _GAIN:
        gain = max(expected_gain, last)
        expected = f"up to {gain:.1f} times the throughput, if it scales as from {max_rows // 2} to {max_rows} rows"
        cure = f"allow {2 * max_rows} rows in a batch"
        return Bottleneck("compute", f"{explanation}: all are full", cure, "max_batch_size", expected)
    if count == 1:
        cure = "try a second instance, a faster engine (`headrace build`), or a second machine"
        return Bottleneck("compute", explanation, cure, "instance_group")
    alone, together = load.throughput(load.mean_rows, 1), load.throughput(load.mean_rows)
    explanation += f"; {count} instances have {together / alone:.1f} times the throughput of one" if alone else ""
    if alone and together < _GAIN * alone:
        cure = "use one instance, and try a faster engine (`headrace build`), or a second machine"
        expected = "lower latency, since instances slow each other down"
        return Bottleneck("compute", explanation, cure, "instance_group", expected)
    cure = "try more instances, a faster engine (`headrace build`), or a second machine"
    return Bottleneck("compute", explanation, cure, "instance_group")


def _delay_too_long(load: LoadSnapshot) -> Bottleneck | None:
    delay_ns = load.policy.batch.max_delay_ns
    if load.utilization >= _BUSY or load.share(CloseReason.DELAY) < _OFTEN or load.wait_ns < _OFTEN * load.total_ns:
        return None
    members = load.recent.totals.requests / max(load.batches, 1)
    explanation = f"requests wait {_ms(load.wait_ns)} of {_ms(load.total_ns)} for others to share a batch"
    if members < 2:
        rate_hz = load.per_s(load.recent.totals.requests)
        explanation += f", and a batch then holds {members:.1f}: "
        explanation += f"{rate_hz:,.0f} requests/s are too sparse for a delay of {_ms(delay_ns)}"
    else:
        explanation += f", though the instances are busy for only {_percent(load.utilization)} of the time"
    expected = f"responses {_ms(load.wait_ns)} sooner on average"
    setting = "dynamic_batching.max_queue_delay_microseconds"
    return Bottleneck("delay_too_long", explanation, "shorten the delay", setting, expected)


def _wake_ups(load: LoadSnapshot) -> Bottleneck | None:
    """Requests that wait much longer than one small batch, though an idle instance takes all queued requests."""
    batch_ns = load.recent.totals.busy_ns / max(load.batches, 1)
    free = load.policy.batch.merge and load.share(CloseReason.IDLE) >= 0.5 and load.mean_rows <= load.max_rows / 2
    if load.utilization >= _BUSY or not free or load.wait_ns < max(2 * batch_ns, _OFTEN * load.total_ns):
        return None
    explanation = (
        f"requests wait {_ms(load.wait_ns)} of {_ms(load.total_ns)} though the instances are idle for "
        f"{_percent(1 - load.utilization)} of the time "
        f"and a batch takes {_ms(batch_ns)}: the processor is busy with other work, so the instances' threads are scheduled late"
    )
    cure = (
        "reserve processor cores for the server (clients and other models use them), or send more rows in each request"
    )
    expected = f"responses up to {_ms(load.wait_ns - batch_ns)} sooner on average"
    return Bottleneck("processor", explanation, cure, "", expected)


def _bursts(load: LoadSnapshot) -> Bottleneck | None:
    if (
        load.utilization >= _BUSY
        or load.wait_ns <= _OFTEN * load.total_ns
        or load.share(CloseReason.DELAY) >= _OFTEN
        or _wake_ups(load)
    ):
        return None
    explanation = (
        f"requests wait {_ms(load.wait_ns)} of {_ms(load.total_ns)} in the queue, though the instances are busy for "
        f"only {_percent(load.utilization)} of the time: they arrive in bursts"
    )
    if not load.policy.batch.merge and load.max_rows > 1:
        explanation += ", and run one by one"
        return Bottleneck("queue", explanation, "let requests share batches", "dynamic_batching {}")
    if load.instances == 1:
        explanation += ", and there is one instance"
        return Bottleneck("queue", explanation, "try a second instance", "instance_group")
    return Bottleneck("queue", explanation, "try more instances, or spread the requests over time", "instance_group")


def _copies(load: LoadSnapshot) -> Bottleneck | None:
    totals = load.recent.totals
    copied_ns, compute_ns = load.mean_ns(totals.assemble_ns + totals.split_ns), load.mean_ns(totals.compute_ns)
    if not totals.requests or copied_ns < 2 * _OFTEN * compute_ns or copied_ns < _OFTEN * load.total_ns:
        return None
    explanation = f"assemble and split take {_ms(copied_ns)} of a request's latency, compute takes {_ms(compute_ns)}"
    cure = "send images as encoded bytes (preprocess by: server), or use shared memory"
    return Bottleneck("copies", explanation, cure, "preprocess")


def _sparse(load: LoadSnapshot) -> Bottleneck | None:
    """Idle instances and an empty queue: more concurrency is the only way to more throughput."""
    totals = load.recent.totals
    if load.utilization >= _BUSY or not totals.requests or load.wait_ns >= _OFTEN * load.total_ns:
        return None
    inside = load.per_s(totals.request_ns) / NS_PER_S  # Little's law
    explanation = (
        f"arrivals are too sparse to batch: {inside:.1f} requests are in the server at a time, on average, and the instances "
        f"are busy for {_percent(load.utilization)} of the time"
    )
    best = load.best_rows
    expected = f"up to {load.throughput(best):,.0f} rows/s, now {load.per_s(totals.rows):,.0f}" if best else ""
    cure = "for more throughput send more requests concurrently, or more rows in each"
    return Bottleneck("arrivals", explanation, cure, "", expected)


def _compute(load: LoadSnapshot) -> str:
    instances = f"{load.instances} instances compute" if load.instances > 1 else "the instance computes"
    return f"{instances} for {_percent(load.utilization)} of the time"


_RULES: Iterable[Callable[[LoadSnapshot], Bottleneck | None]] = (
    _evicted, _dead_instances, _no_requests, _quotas, _overload, _late, _unmerged, _shapes, _preferred, _latency_objective,
    _delay_too_short, _padding,
    _computing, _delay_too_long, _wake_ups, _bursts, _copies, _sparse,
)  # fmt: skip
