"""Explains what limits a model version, from the counters of the last seconds, its policy and its latency table.

Each rule looks for one bottleneck and names its remedy, with the gain that the latency table predicts. The rules are ordered by
how bottlenecks hide each other: a rejected request does not wait, and while the instances are busy little else matters.

`LoadSnapshot` holds the figures that the rules read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from headrace.core.response_bodies import Bottleneck, SequenceFigures
from headrace.inference.scheduling.batching import CloseReason
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.policy import HandlePolicy
from headrace.observability.processor import ProcessorUse
from headrace.observability.totals import RecentTotals

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
        processor: busy cores; None if they were not measured.
    """

    recent: RecentTotals
    policy: HandlePolicy
    latency_table: LatencyTable
    instances: int
    depth: int = 0
    batched: bool = True
    evicted: bool = False
    processor: ProcessorUse | None = None

    @property
    def is_full(self) -> bool:
        """True if the processor has nearly no time left: more instances compute nothing sooner."""
        return self.processor is not None and self.processor.is_full

    @property
    def closed_loop(self) -> float:
        """Mean requests in flight if clients send one as each response comes, so that their number is constant; else 0.

        In an open loop their variance is at least their mean, as with Poisson arrivals. `batches` needs a few.
        """
        totals, batches = self.recent.totals, self.batches
        mean = totals.in_flight / max(batches, 1)
        variance = totals.in_flight_squares / max(batches, 1) - mean**2
        return mean if batches >= _MIN_BATCHES and mean >= 1.5 and variance <= _CONSTANT * mean else 0.0

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
    if load.processor is not None:
        cores, busy, own = load.processor
        shown |= {"cores": cores, "busy_cores": round(busy, 2), "server_cores": round(own, 2)}
    if load.closed_loop:
        shown["closed_loop"] = round(load.closed_loop, 1)
    best = load.best_rows
    if best:
        shown |= {"best_rows": best, "best_rows_per_s": round(load.throughput(best), 1)}
    return shown


_BUSY = 0.85  # utilisation from which an instance counts as busy: nearly every request finds it busy
_CONSTANT = 0.5  # variance over mean up to which the number of requests in flight counts as constant
_MIN_BATCHES = 20  # fewer show no variance
_OFTEN = 0.25  # share of batches, or of a request's latency, from which a cause is reported
_REFUSED = 0.01  # share of rejected requests from which they are reported
_GAIN = 1.15  # throughput ratio from which a change of settings is proposed: less is not worth a change


def find_bottlenecks(load: LoadSnapshot) -> list[Bottleneck]:
    """Return the bottlenecks of a version, the most important first; never empty."""
    rules = (_state_rules, _processor_rules, _refusal_rules, _small_batch_rules, _busy_rules, _idle_rules, _copy_rules)
    text = f"no bottleneck: the instances are busy for {_percent(load.utilization)} of the time"
    return [bottleneck for rule in rules for bottleneck in rule(load)] or [Bottleneck("nothing", text)]


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


def _state_rules(load: LoadSnapshot) -> Iterator[Bottleneck]:
    """The model is evicted, instances have failed, or no request came."""
    if load.evicted:
        explanation = "the model is not in memory: other models use it, or no request came yet or for a while"
        cure = "keep it loaded, or raise the budget of GPU or host memory, or `unload_after_s`"
        yield Bottleneck(
            "parked",
            f"{explanation}. A request waits until it is loaded",
            cure,
            "keep_loaded, unload_after_s, gpu_memory_budget, --host-memory-budget",
        )
    elif load.instances < load.policy.instances:
        running = f"{load.instances} of {load.policy.instances} instances are running"
        explanation = f"{running}: the others have failed, see the server log"
        yield Bottleneck("instances", explanation, "fix the cause; failed instances restart automatically")
    if not load.received:
        yield Bottleneck("idle", f"the model received no request in the last {load.recent.seconds:.0f} s")


def _processor_rules(load: LoadSnapshot) -> Iterator[Bottleneck]:
    """No core is idle."""
    if load.processor is None or not load.is_full or not load.received:
        return
    cores, busy, own = load.processor
    explanation = f"the processor is full: {max(busy, own):.1f} of {cores:g} cores are busy, {own:.1f} with the server"
    if load.closed_loop:
        explanation += f"; a closed loop of {load.closed_loop:.0f} requests keeps it so, and would at any speed"
    cure = "more cores, clients on another machine, larger batches or a faster engine (`headrace build`)"
    yield Bottleneck("processor", explanation, f"{cure}: more instances do not help")


def _refusal_rules(load: LoadSnapshot) -> Iterator[Bottleneck]:
    """Requests are rejected or late."""
    over_quota = load.recent.totals.failures["quota"]
    if over_quota and over_quota >= _REFUSED * load.received:
        share = _percent(over_quota / load.received)
        explanation = f"{share} of the requests were rejected because their client exceeded its quota"
        cure = "raise the client's quota, or send fewer requests; the access log names the clients"
        yield Bottleneck("quota", explanation, cure, "rate_limits")
    refused = {reason: count for reason, count in load.refused.items() if reason in OVERLOAD}
    count = sum(refused.values())
    if count and count >= _REFUSED * load.received:
        rows = load.recent.totals.rows / max(load.recent.totals.requests, 1)
        why = ", ".join(f"{reason} {number}" for reason, number in refused.items())
        explanation = (
            f"{_percent(count / load.received)} of the requests were rejected or too late ({why}): "
            f"{load.per_s(load.received) * max(rows, 1):,.0f} rows/s were requested"
        )
        best = load.best_rows
        if best:
            explanation += f", the capacity is {load.throughput(best):,.0f} rows/s, in batches of {best}"
        cure, setting = "send less, or read the next bottleneck", ""
        if load.utilization < _BUSY:
            cure = f"the instances were busy for only {_percent(load.utilization)} of the time: allow longer waits or queues"
            setting = "slo.p99_ms, default_queue_policy"
        yield Bottleneck("overloaded", explanation, cure, setting)
    predicted_ns = load.policy.batch.objective_ns
    reached_s = load.recent.totals.phases["total"].quantile_s(0.99)
    # The buckets of the histogram are 9 % wide.
    if predicted_ns and reached_s is not None and reached_s * NS_PER_S > 1.1 * predicted_ns:
        explanation = (
            f"the 99th percentile of the latency is {_ms(reached_s * NS_PER_S)}, the objective {_ms(predicted_ns)}"
        )
        alone_ns = load.latency_table.promise_ns(1, load.instances)
        if alone_ns > predicted_ns:
            explanation += f": a single row takes {_ms(alone_ns)}"
        yield Bottleneck("late", explanation, "raise the objective, or use a faster engine", "slo.p99_ms")


def _small_batch_rules(load: LoadSnapshot) -> Iterator[Bottleneck]:
    """Busy instances with smaller batches than the best."""
    if load.utilization < _BUSY or load.gain < _GAIN:
        return
    batch, changes, gain = load.policy.batch, load.recent.totals.shape_changes, load.expected_gain
    in_batches = f"{_compute(load)}, in batches of {load.mean_rows:.1f} rows"
    if not batch.merge and load.max_rows >= 2:
        explanation = (
            f"{_compute(load)}, one request at a time: the model supports batches, but dynamic batching is off"
        )
        yield Bottleneck("unmerged", explanation, "let requests share batches", "dynamic_batching {}", gain)
    if batch.merge and changes >= _OFTEN * load.batches:
        explanation = (
            f"{in_batches}: requests of different shapes cannot share one, and "
            f"{_percent(changes / load.batches)} of the batches had another shape than the one before"
        )
        yield Bottleneck("shapes", explanation, "use few shapes: pad or resize inputs before they are sent", "", gain)
    if load.share(CloseReason.PREFERRED) >= _OFTEN and max(batch.preferred_rows) < load.best_rows:
        sizes = ", ".join(map(str, batch.preferred_rows))
        explanation = f"{_compute(load)}, and batches close at preferred sizes of {sizes} rows"
        cure = f"prefer {load.best_rows} rows, or remove the preferred sizes"
        yield Bottleneck("preferred", explanation, cure, "dynamic_batching.preferred_batch_size", gain)
    if load.share(CloseReason.DEADLINE) >= _OFTEN:
        explanation = f"{in_batches}: in larger ones requests would miss their deadline"
        cure = "allow longer deadlines"
        if batch.objective_ns:
            explanation += f" (objective: {_ms(batch.objective_ns)})"
            needed_ns = 2 * load.latency_table.promise_ns(load.best_rows, load.instances)
            cure = f"raise the objective to {_ms(needed_ns)} or more"
        yield Bottleneck("promise", explanation, cure, "slo.p99_ms" if batch.objective_ns else "", gain)
    if batch.merge and load.share(CloseReason.IDLE, CloseReason.DELAY) >= _OFTEN:
        arrival_ns = load.best_rows / max(load.per_s(load.recent.totals.rows), 1e-9) * NS_PER_S
        explanation = (
            f"{in_batches}, which close after {_ms(batch.max_delay_ns) if batch.max_delay_ns else 'no delay'}; "
            f"{load.best_rows} rows arrive in {_ms(arrival_ns)}"
        )
        cure = f"allow a delay of {arrival_ns / NS_PER_US:.0f} us, or set a latency objective (slo) instead of a delay"
        setting = "dynamic_batching.max_queue_delay_microseconds"
        yield Bottleneck("delay_too_short", explanation, cure, setting, gain)


def _busy_rules(load: LoadSnapshot) -> Iterator[Bottleneck]:
    """Busy instances that compute padding, or batches of nearly the best size."""
    if load.utilization < _BUSY:
        return
    buckets = load.latency_table.buckets
    run = padded = 0
    for rows, size in load.recent.totals.sizes.items() if buckets else ():
        bucket = next((bucket for bucket in buckets if bucket >= rows), rows)
        run += bucket * size.count
        padded += (bucket - rows) * size.count
    if buckets and padded >= _OFTEN * run:
        explanation = (
            f"{_percent(padded / run)} of the rows that were computed were padding: batches of {load.mean_rows:.1f} rows on "
            f"average ran in sizes of {', '.join(map(str, buckets[:12]))}"
        )
        setting, expected = (
            "dynamic_batching.preferred_batch_size",
            f"up to {run / (run - padded):.1f} times the throughput",
        )
        yield Bottleneck("padding", explanation, "close batches at those sizes", setting, expected)
    if load.gain < _GAIN:
        yield _computing(load)


def _computing(load: LoadSnapshot) -> Bottleneck:
    """Return the bottleneck of busy instances with batches of nearly the best size."""
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
    if load.is_full:
        return Bottleneck("compute", explanation, "use a faster engine (`headrace build`), or a second machine")
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


def _idle_rules(load: LoadSnapshot) -> Iterator[Bottleneck]:
    """Requests wait, although instances are idle."""
    if load.utilization >= _BUSY:
        return
    batch, totals, often_ns = load.policy.batch, load.recent.totals, _OFTEN * load.total_ns
    waits = f"requests wait {_ms(load.wait_ns)} of {_ms(load.total_ns)}"
    busy = f"the instances are busy for only {_percent(load.utilization)} of the time"
    is_delayed = load.share(CloseReason.DELAY) >= _OFTEN
    if is_delayed and load.wait_ns >= often_ns:
        members = totals.requests / max(load.batches, 1)
        reason = f", though {busy}"
        if members < 2:
            rate = f"{load.per_s(totals.requests):,.0f} requests/s"
            reason = f", and a batch then holds {members:.1f}: {rate} are too sparse for a delay of {_ms(batch.max_delay_ns)}"
        expected = f"responses {_ms(load.wait_ns)} sooner on average"
        setting = "dynamic_batching.max_queue_delay_microseconds"
        yield Bottleneck(
            "delay_too_long", f"{waits} for others to share a batch{reason}", "shorten the delay", setting, expected
        )
    batch_ns = totals.busy_ns / max(load.batches, 1)
    takes_all = batch.merge and load.share(CloseReason.IDLE) >= 0.5 and load.mean_rows <= load.max_rows / 2
    # Much longer than one small batch, though an idle instance takes all queued requests.
    if load.is_full:
        return  # they wait for the processor
    if takes_all and load.wait_ns >= max(2 * batch_ns, often_ns):
        explanation = (
            f"{waits} though the instances are idle for {_percent(1 - load.utilization)} of the time and a batch takes "
            f"{_ms(batch_ns)}: the processor is busy with other work, so the instances' threads are scheduled late"
        )
        cure = "reserve processor cores for the server (clients and other models use them), or send more rows in each request"
        expected = f"responses up to {_ms(load.wait_ns - batch_ns)} sooner on average"
        yield Bottleneck("processor", explanation, cure, "", expected)
    elif load.closed_loop and load.wait_ns > often_ns and not is_delayed and (batch.merge or load.max_rows == 1):
        explanation = f"{waits} in the queue: {load.closed_loop:.0f} requests are always in flight, a closed loop"
        cure = "measure with fewer clients, or at a rate (`headrace bench --rate`): a closed loop waits at any speed"
        yield Bottleneck("closed_loop", explanation, cure)
    elif load.wait_ns > often_ns and not is_delayed:
        explanation = f"{waits} in the queue, though {busy}: they arrive in bursts"
        cure, setting = "try more instances, or spread the requests over time", "instance_group"
        if not batch.merge and load.max_rows > 1:
            explanation += ", and run one by one"
            cure, setting = "let requests share batches", "dynamic_batching {}"
        elif load.instances == 1:
            explanation += ", and there is one instance"
            cure = "try a second instance"
        yield Bottleneck("queue", explanation, cure, setting)


def _copy_rules(load: LoadSnapshot) -> Iterator[Bottleneck]:
    """Copies take long, or requests are few."""
    totals = load.recent.totals
    if not totals.requests:
        return
    copied_ns, compute_ns = load.mean_ns(totals.assemble_ns + totals.split_ns), load.mean_ns(totals.compute_ns)
    if copied_ns >= 2 * _OFTEN * compute_ns and copied_ns >= _OFTEN * load.total_ns:
        explanation = (
            f"assemble and split take {_ms(copied_ns)} of a request's latency, compute takes {_ms(compute_ns)}"
        )
        cure = "send images as encoded bytes (preprocess by: server), or use shared memory"
        yield Bottleneck("copies", explanation, cure, "preprocess")
    # With idle instances and an empty queue, more concurrency is the only way to more throughput.
    if load.utilization < _BUSY and load.wait_ns < _OFTEN * load.total_ns:
        inside = load.per_s(totals.request_ns) / NS_PER_S  # Little's law
        explanation = (
            f"arrivals are too sparse to batch: {inside:.1f} requests are in the server at a time, on average, and the "
            f"instances are busy for {_percent(load.utilization)} of the time"
        )
        best = load.best_rows
        expected = f"up to {load.throughput(best):,.0f} rows/s, now {load.per_s(totals.rows):,.0f}" if best else ""
        cure = "for more throughput send more requests concurrently, or more rows in each"
        yield Bottleneck("arrivals", explanation, cure, "", expected)


def _compute(load: LoadSnapshot) -> str:
    instances = f"{load.instances} instances compute" if load.instances > 1 else "the instance computes"
    return f"{instances} for {_percent(load.utilization)} of the time"
