"""Admission control: predicts a request's completion time and rejects requests that would miss their deadline.

The prediction adds what instances run, what is queued ahead and the request's own batch, priced by the latency table, as
Clockwork does (A. Gujarati and others, OSDI 2020). A request that would be late is rejected at once. Under overload the
admitted requests are then answered in time, and a rejected client can try elsewhere. Prediction errors are learned from
requests that were close to their limit, so that the promised percentile holds whatever the latency table does not cover.

A burst may fill the queue as far as there is time. A standing queue, where more arrives than can be served, is kept shorter: it
serves no request, and its time is missing when something slows down (the idea of CoDel: K. Nichols, V. Jacobson, Controlling
Queue Delay, ACM Queue 2012).

Requests that are never due do not pass through here.

`SafetyMargins` and `RecentArrivals` are kept apart by urgency class, where lower numbers are more urgent. Requests of a low
priority or of a flooding client are overtaken by others, and what is learned from them does not hold for urgent requests.

`Quotas` are token buckets of a bounded number of clients, whatever names clients invent. A bucket is one number, the time at
which it is full again: the generic cell rate algorithm (ITU-T I.371, 1996), a comparison and an addition instead of a timer.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import NamedTuple, Protocol

from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.errors import QuotaExceeded, WouldMiss
from headrace.scheduling.batching import BatchCosts, CostModel
from headrace.scheduling.latency_table import WINDOW
from headrace.scheduling.policy import BatchPolicy, Quota, RateLimits
from headrace.scheduling.queue import FAR_NS, Entry

_SIGMAS = 2.58 / 1.645  # from the 95th percentile of one normal variable to the 99.5th of a sum, by square roots
_MEDIAN_SIGMA = 1.2533 / sqrt(WINDOW)  # standard error of the median of a window, in deviations of what is in it
_STANDING = (
    2  # batches of each instance that may wait, and half the time that is left, if more comes than can be served
)
_MOST_OVERTAKING = 0.9
_OUTLIER = 4  # what takes so many times as long as it should counts no more than that
_BATCH_SMOOTHING = 64  # a new measurement counts for one in so many


class InFlightWork(NamedTuple):
    """Batches that one instance runs.

    Attributes:
        since_ns: monotonic, when it was done with what it ran before.
        batches: when each was taken, and its rows; the oldest first.
    """

    since_ns: int
    batches: Sequence[tuple[int, int]]


class QueueView(Protocol):
    """The queue as far as it matters here; see `headrace.scheduling.scheduler.Scheduler`."""

    @property
    def waiting_rows(self) -> int:
        """Rows that wait."""

    def place(self, entry: Entry) -> tuple[int, int, int]:
        """Give an entry its key; rows before it if it were queued now, rows at the most that come later and go before it, and its
        lag: who comes with less goes first."""

    def rows_ahead(self, level: int, due_ns: int, client: str) -> int:
        """Rows that would be served before a request like this, if it were queued now."""


class AdmissionController:
    """Predicts completion times, rejects late requests and learns from the outcomes; any thread may call.

    Ownership: `_lock` guards `_margins` and `late`, which are read without it; the rest is replaced whole, by whoever comes.

    Args:
        cost_model: knows what batches take, and is told of what they take besides computing.
        policy: how they are formed.
        queue: what waits.
        in_flight_work: what each living instance runs.
        shared: of those who come later, only clients that ask for less than their share go first.

    Attributes:
        late: answers that came after they were due.
        has_due_times: the model has an objective, or a request had a deadline.
        changed: instances have begun or ended something since they were last looked at; set by whoever knows.
    """

    def __init__(
        self,
        cost_model: CostModel,
        policy: BatchPolicy,
        queue: QueueView,
        in_flight_work: Callable[[], Sequence[InFlightWork]],
        shared: bool = False,
    ) -> None:
        self.in_flight_work = in_flight_work
        self.late = 0
        self.has_due_times = policy.objective_ns > 0
        self.changed = True
        self._cost_model = cost_model
        self._shared = shared
        self._policy = policy
        self._queue = queue
        self._lock = threading.Lock()
        self._overhead_ns = 0.0  # smoothed: how much longer a batch keeps an instance busy than it computes as a rule
        self._rows = 1.0  # smoothed, of a batch
        self._margins, self._arrivals = SafetyMargins(), RecentArrivals()
        self._flowed_ns = 0  # when less than half a batch waited, as it is now and then where all can be served
        self._probed_ns = -NS_PER_S
        self._free: list[int] = []  # as of the last time that something changed
        self._free_until_ns = 0  # until then, if nothing changes

    def stop_merging(self) -> None:
        """Predict as for a model that runs every request alone."""
        self._policy = replace(self._policy, merge=False)

    def admit(self, entries: list[Entry], now_ns: int) -> None:
        """Take a request that is due some time, before it is queued, or refuse it; notes what it is promised.

        Everything is taken while nothing is known of the times of batches, or the model is parked; and whenever an instance
        has nothing else to do, since to refuse it then gains nobody anything, and what is wrongly believed of those times would
        never be found out.

        Raises:
            WouldMiss: it would be answered too late.
        """
        self.has_due_times = True
        last = entries[-1]
        due_ns, costs = last.due_ns, self._cost_model.current
        free_ns = self._free_ns(costs, now_ns) if costs is not None else ()
        if costs is None or not free_ns:
            return
        ahead, most, lag_ns = self._queue.place(last)
        if len(entries) > 1:
            ahead += sum([entry.rows for entry in entries[:-1]])
            last.key = 0  # it comes behind the others
        last.kind = kind = lag_ns.bit_length()
        rank = kind > 0 if self._shared else kind
        start = self._start(costs, free_ns, ahead, last.rows, now_ns)
        if rank and most:
            overtakers = self._overtakers(costs, len(free_ns), rank, now_ns, start[0] - now_ns)
            if overtakers:
                start = self._start(costs, free_ns, ahead + min(overtakers, most), last.rows, now_ns)
        start_ns, done_ns = start[0], self._completion_ns(costs, start, last, now_ns)
        margin_ns = self._margins.ns(kind)
        if done_ns + margin_ns > due_ns:
            refusal = "it would be answered in {0:.3g} ms, and is due in {1:.3g} ms"
        elif start_ns > now_ns + self._max_wait_ns(costs, len(free_ns), due_ns, now_ns):
            refusal = "requests come faster than they can be served; it would be answered in {0:.3g} ms"
        else:
            last.predicted_ns = done_ns
            self._arrivals.came(rank, last.rows, now_ns)
            return
        if self._should_probe(costs, free_ns, ahead, last, now_ns):
            last.predicted_ns = done_ns
        elif last.deadline_ns == due_ns or costs.estimates_ns[last.rows] < self._policy.objective_ns:
            done_ms, due_ms = (done_ns + margin_ns - now_ns) / NS_PER_MS, (due_ns - now_ns) / NS_PER_MS
            if done_ns <= due_ns:
                self._margins.reduce(kind, costs.estimates_ns[self._usual_rows(costs)])
            raise WouldMiss(
                "the request is refused at once: " + refusal.format(done_ms, due_ms), self.retry_after_s(now_ns)
            )
        # Else nobody's request could be in time, and it is no use refusing them all.

    def record_batch(self, rows: int, compute_ns: int, busy_ns: int) -> None:
        """Record a batch that was run; only while `has_due_times`, as `learn`.

        Args:
            rows: of all its members.
            compute_ns: how long such a batch computes as a rule.
            busy_ns: how long it kept its instance.
        """
        overhead_ns = min(busy_ns, _OUTLIER * compute_ns) - compute_ns
        # No lock: of two at the same time one is lost, which does not matter, and most models need none of it.
        self._rows += (rows - self._rows) / _BATCH_SMOOTHING
        self._overhead_ns = max(self._overhead_ns + (overhead_ns - self._overhead_ns) / _BATCH_SMOOTHING, 0.0)
        self._cost_model.overhead_ns = int(self._overhead_ns)

    def learn(self, entries: list[Entry], done_ns: int) -> None:
        """Requests were answered together."""
        late = sum([done_ns > entry.due_ns for entry in entries])
        # Where much time is left it does not matter.
        near = [
            e for e in entries if e.predicted_ns and 2 * (e.predicted_ns - e.enqueued_ns) > e.due_ns - e.enqueued_ns
        ]
        if late or near:
            with self._lock:
                self.late += late
                self._learn_errors(near, done_ns)

    def learn_dropped(self, entries: Sequence[Entry]) -> None:
        """Requests were given up since they could not be answered in time any more."""
        with self._lock:
            self._learn_errors([entry for entry in entries if entry.predicted_ns], FAR_NS)

    def wait_ns(self, level: int, now_ns: int) -> int:
        """How long a request of one row would wait until it is run; 0 if nothing is known.

        Args:
            level: its priority, from 0.
            now_ns: monotonic.
        """
        costs = self._cost_model.current
        free_ns = self._free_ns(costs, now_ns) if costs is not None else ()
        if costs is None or not free_ns:
            return 0
        objective_ns = self._policy.objective_ns
        ahead = self._queue.rows_ahead(level, now_ns + objective_ns if objective_ns else FAR_NS, "")
        return self._start(costs, free_ns, ahead, 1, now_ns)[0] - now_ns

    def drain_ns(self, now_ns: int) -> int:
        """How long what waits and runs would take if nothing came; 0 if nothing is known."""
        costs = self._cost_model.current
        free_ns = self._free_ns(costs, now_ns) if costs is not None else ()
        if costs is None or not free_ns:
            return 0
        usual = self._usual_rows(costs)
        busy_ns = sum([max(time_ns - now_ns, 0) for time_ns in free_ns])
        return (busy_ns - (-self._queue.waiting_rows // usual) * costs.estimates_ns[usual]) // len(free_ns)

    def retry_after_s(self, now_ns: int) -> float:
        """When who is refused should come back, in seconds: once what waits and runs is done, 1 s if nothing is known of it."""
        drain_ns = self.drain_ns(now_ns)
        return max(drain_ns, NS_PER_MS) / NS_PER_S if drain_ns else 1.0

    @property
    def rows_hz(self) -> float:
        """Rows a second that an instance does under load; 0 if nothing is known."""
        costs = self._cost_model.current
        if costs is None:
            return 0.0
        usual = self._usual_rows(costs)
        return usual * NS_PER_S / costs.estimates_ns[usual]

    def _overtakers(self, costs: BatchCosts, instances: int, kind: int, now_ns: int, wait_ns: int) -> int:
        """How many rows at most will come while a request waits, and go before it, if they come as of late."""
        came = self._arrivals.below(kind, now_ns)
        if not came:
            return 0
        usual = self._usual_rows(costs)
        served = usual * instances * LATELY_NS / costs.estimates_ns[usual]
        rows = came * wait_ns / LATELY_NS / (1 - min(came / served, _MOST_OVERTAKING))
        return int(rows + 2 * sqrt(rows))

    def _usual_rows(self, costs: BatchCosts) -> int:
        """Rows of a batch under load."""
        return costs.best[-1] if self._policy.merge else min(max(round(self._rows), 1), self._policy.max_rows)

    def _completion_ns(self, costs: BatchCosts, start: tuple[int, int, int], entry: Entry, now_ns: int) -> int:
        """When a request whose batch begins so (see `_start`) will be answered at the latest."""
        start_ns, rounds, before = start
        rows = min(before + entry.rows, self._policy.max_rows)
        if start_ns > now_ns and self._policy.merge:  # others will come until then, and join it
            rows = max(rows, costs.best[bisect_right(costs.promises_ns, (entry.due_ns - now_ns) // 2, 2) - 1])
        # Variances of independent times add up; what the median of a window is wrong by, they have in common.
        usual, runs = costs.best[-1], rounds + 1
        spread_ns = costs.promises_ns[usual] - costs.estimates_ns[usual]
        spread_margin_ns = _SIGMAS * spread_ns * sqrt(runs + (_MEDIAN_SIGMA * runs) ** 2)
        return start_ns + costs.estimates_ns[rows] + int(spread_margin_ns)

    def _start(
        self, costs: BatchCosts, free_ns: Sequence[int], ahead: int, rows: int, now_ns: int
    ) -> tuple[int, int, int]:
        """When the batch begins that has a request with so many rows ahead of it; how many its instance runs before, beyond what
        is under way; and how many of those rows it has, too."""
        usual, instances = self._usual_rows(costs), len(free_ns)
        batches, before = divmod(ahead, usual)
        if before and (before + rows > usual or not self._policy.merge):
            batches, before = batches + 1, 0
        cycle_ns = costs.estimates_ns[usual]
        if instances == 1:
            return max(free_ns[0], now_ns) + batches * cycle_ns, batches, before
        start_ns = _nth_start(batches, [max(time_ns, now_ns) for time_ns in free_ns], cycle_ns)
        return start_ns, batches // instances, before

    def _max_wait_ns(self, costs: BatchCosts, instances: int, due_ns: int, now_ns: int) -> int:
        """How long a request may wait to be run: for ever, unless the queue stands."""
        usual = self._usual_rows(costs)
        if 2 * self._queue.waiting_rows < usual * instances:
            self._flowed_ns = now_ns
        left_ns = due_ns - now_ns
        if now_ns - self._flowed_ns < left_ns:
            return FAR_NS
        cycle_ns = costs.estimates_ns[usual]
        return max(left_ns // 2 - cycle_ns, _STANDING * cycle_ns)

    def _should_probe(self, costs: BatchCosts, free_ns: Sequence[int], ahead: int, entry: Entry, now_ns: int) -> bool:
        """An instance has nothing else to do; of hard deadlines that cannot be met one a second is tried."""
        if ahead or free_ns[0]:
            return False
        if entry.due_ns < entry.deadline_ns or now_ns + costs.estimates_ns[entry.rows] <= entry.due_ns:
            return True
        if now_ns - self._probed_ns < NS_PER_S:
            return False
        self._probed_ns = now_ns
        return True

    def _free_ns(self, costs: BatchCosts, now_ns: int) -> Sequence[int]:
        """When each instance will have done what it has, ascending; 0 if it has nothing."""
        if not self.changed and now_ns < self._free_until_ns:
            return self._free
        self.changed = False
        free_ns, until_ns, most = [], FAR_NS, self._policy.max_rows
        for since_ns, batches in self.in_flight_work():
            end_ns = since_ns
            for taken_ns, rows in batches:
                end_ns = max(end_ns, taken_ns) + costs.estimates_ns[min(rows, most)]
                if end_ns > now_ns:
                    until_ns = min(until_ns, end_ns)
                else:  # it is late
                    end_ns = until_ns = now_ns
            free_ns.append(end_ns if batches else 0)
        free_ns.sort()
        self._free, self._free_until_ns = free_ns, until_ns
        return free_ns

    def _learn_errors(self, entries: Sequence[Entry], done_ns: int) -> None:
        costs = self._cost_model.current
        errors_ns: defaultdict[int, list[int]] = defaultdict(list)
        for entry in entries:
            errors_ns[entry.kind].append(done_ns - entry.predicted_ns)
        if costs is not None:
            self._margins.learn(errors_ns, costs.estimates_ns[self._usual_rows(costs)])


def _nth_start(number: int, free_ns: list[int], cycle_ns: int) -> int:
    """When a batch begins, counted from 0, if whichever instance is free first takes the next; `free_ns` ascending."""
    last_ns = free_ns[-1]
    if last_ns - free_ns[0] >= cycle_ns:  # some begin again before others begin at all
        again = [(last_ns - time_ns) // cycle_ns for time_ns in free_ns]
        if number < sum(again):  # the last one is not needed
            return _nth_start(number, free_ns[:-1], cycle_ns)
        number -= sum(again)
        free_ns = sorted([time_ns + count * cycle_ns for time_ns, count in zip(free_ns, again, strict=True)])
    rounds, instance = divmod(number, len(free_ns))
    return free_ns[instance] + rounds * cycle_ns


_LATE_SHARE = 0.005  # of those that were promised most, what may be late: half of what a 99th percentile leaves
_STEP = 8  # a batch that is late as a whole makes a reserve longer by one part in so many of what a batch takes
LATELY_NS = NS_PER_S


class SafetyMargins:
    """Margins added to predictions, by urgency class; a small share of errors exceeds them. The caller's lock guards `learn`."""

    def __init__(self) -> None:
        self._ns: defaultdict[int, int] = defaultdict(int)

    def ns(self, kind: int) -> int:
        """Nanoseconds to be added to what is predicted."""
        return self._ns[kind]

    def learn(self, errors_ns: Mapping[int, Sequence[int]], cycle_ns: int) -> None:
        """Follow the quantile: H. Robbins, S. Monro, A stochastic approximation method, 1951.

        Args:
            errors_ns: by kind, how much later requests of one batch were answered than predicted without the reserve.
            cycle_ns: what a batch takes.
        """
        for kind, wrong_ns in errors_ns.items():
            margin_ns = self._ns[kind]
            beyond = sum([error_ns > margin_ns for error_ns in wrong_ns]) / len(wrong_ns)
            self._ns[kind] = max(margin_ns + int(cycle_ns / _STEP * (beyond - _LATE_SHARE)), 0)

    def reduce(self, kind: int, cycle_ns: int) -> None:
        """A request was refused for the reserve's sake: nobody will know whether that was needed, and it must not stay so."""
        self._ns[kind] = max(self._ns[kind] - int(cycle_ns / _STEP * _LATE_SHARE / 4), 0)


class RecentArrivals:
    """Rows that have come of late, by kind; no lock: of two at the same time one is lost, which does not matter."""

    def __init__(self) -> None:
        self._recent: dict[
            int, tuple[float, int]
        ] = {}  # rows, those of longer ago counting less, and when the last came

    def came(self, kind: int, rows: int, now_ns: int) -> None:
        """Rows were queued."""
        before, last_ns = self._recent.get(kind, (0.0, now_ns))
        self._recent[kind] = _decayed(before, now_ns - last_ns) + rows, now_ns

    def below(self, kind: int, now_ns: int) -> float:
        """Of kinds more urgent than this one, in about the last `LATELY_NS`."""
        rows = 0.0
        for each, (came, last_ns) in list(self._recent.items()):
            if each < kind:
                rows += _decayed(came, now_ns - last_ns)
        return rows


def _decayed(rows: float, age_ns: int) -> float:
    return rows * (1 - age_ns / LATELY_NS) if age_ns < LATELY_NS else 0.0


# Clients that are not named in the configuration.
MAX_CLIENTS = 4096


class Quotas:
    """Admits or rejects requests by client; any thread may call.

    A client that has been quiet until its bucket was full is forgotten without loss. If there is no such client, and no room, all
    that come anew share one bucket: a client that invents thousands of names gets no more than one client does.

    Ownership: `_lock` guards the buckets.

    Args:
        limits: what clients may ask for.
        most: buckets that are kept of clients without a quota of their own.
    """

    def __init__(self, limits: RateLimits, most: int = MAX_CLIENTS) -> None:
        self._limits = limits
        self._most = most
        self._lock = threading.Lock()
        self._named: dict[str, int] = {}
        self._others: OrderedDict[str, int] = OrderedDict()  # the one that was quiet for longest first
        self._shared_bucket_ns = 0

    def charge(self, client: str, now_ns: int) -> None:
        """A client asks for something; counted whether it is served or not.

        Args:
            client: who asks; "" for all who give no name, who are one client.
            now_ns: monotonic.

        Raises:
            QuotaExceeded: more than it may. Not counted.
        """
        quota = self._limits.clients.get(client)
        if quota is not None:
            with self._lock:
                full_ns = self._named.get(client, 0)
                wait_ns, self._named[client] = _charge(quota, full_ns, now_ns)
        elif self._limits.default is not None:
            quota = self._limits.default
            with self._lock:
                wait_ns = self._charge_other(client, quota, now_ns)
        else:
            return
        if wait_ns:
            message = f"{_client_label(client)} asks for more than {quota.rate_hz:g} requests a second ({quota.burst} at once)"
            raise QuotaExceeded(message, wait_ns / NS_PER_S, client)

    def _charge_other(self, client: str, quota: Quota, now_ns: int) -> int:
        others = self._others
        full_ns = others.get(client)
        if full_ns is None:
            full_ns = 0
            if len(others) >= self._most:
                oldest, oldest_ns = next(iter(others.items()))
                if oldest_ns > now_ns:  # it would come back with a full bucket that it has not waited for
                    wait_ns, self._shared_bucket_ns = _charge(quota, self._shared_bucket_ns, now_ns)
                    return wait_ns
                del others[oldest]
        wait_ns, others[client] = _charge(quota, full_ns, now_ns)
        others.move_to_end(client)
        return wait_ns


def _charge(quota: Quota, full_ns: int, now_ns: int) -> tuple[int, int]:
    """How long to wait for a token (0: here it is), and when the bucket is full from here on."""
    token_ns = NS_PER_S / quota.rate_hz
    begins_ns = max(full_ns, now_ns)
    wait_ns = begins_ns - now_ns - int((quota.burst - 1) * token_ns)
    return (wait_ns, full_ns) if wait_ns > 0 else (0, begins_ns + max(int(token_ns), 1))


def _client_label(client: str) -> str:
    return f"client '{client}'" if client else "the clients without a name together"
