"""Admission control: predicts a request's completion time and rejects requests that would miss their deadline.

The prediction adds the remaining time of running batches, the queued batches ahead and the request's own batch. Compute times
come from the latency table, as in Clockwork (A. Gujarati and others, OSDI 2020). A request that would be late is rejected on
arrival. Under overload the admitted requests are then answered in time, and a rejected client can try another server.
Prediction errors are learned from requests that were close to their deadline. The promised percentile therefore holds for
delays that the latency table does not cover.

A burst may fill the queue up to the time limit. A standing queue, where arrivals exceed capacity, is kept shorter: it raises
latency without raising throughput, and leaves no time in reserve for a slow batch (the idea of CoDel: K. Nichols,
V. Jacobson, Controlling Queue Delay, ACM Queue 2012).

Requests without a due time are not checked here.

`SafetyMargins` and `RecentArrivals` keep separate values for each urgency class; lower classes are more urgent. Later arrivals
overtake requests of a low priority or of a client above its share, so their errors do not apply to urgent requests.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple, Protocol

from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.completion import Mailbox, ThreadCompletion
from headrace.core.errors import Overloaded, WouldMiss
from headrace.core.request import InferRequest
from headrace.inference.scheduling.batching import BatchCosts, CostModel
from headrace.inference.scheduling.latency_table import WINDOW
from headrace.inference.scheduling.policy import BatchPolicy
from headrace.inference.scheduling.queue import FAR_NS, Entry

_SIGMAS = 2.58 / 1.645  # scales a 95th percentile of one normal variable to the 99.5th of a sum
_MEDIAN_SIGMA = 1.2533 / sqrt(WINDOW)  # standard error of a window's median, in standard deviations of its samples
# Queued batches of each instance while arrivals exceed capacity; half the time left until the deadline, if that is longer.
_STANDING = 2
_MOST_OVERTAKING = 0.9  # upper bound of the share of capacity that overtaking requests use
_OUTLIER = 4  # a busy time counts as at most this multiple of the compute time
_LAG_PARTS = 5  # the delay of the event loop counts for one part in so many of the objective at most
_MIN_LEARNT_WAIT_NS = 20 * NS_PER_MS  # shorter predictions say nothing about the rate of batches
_MIN_STRETCH, _MAX_STRETCH = 0.5, 8.0
_BATCH_SMOOTHING = 64  # a new measurement has a weight of 1/64


_LONG_QUEUE = (
    "the queue is full: a request would wait for {0:.3g} ms, {1:.3g} ms are allowed: retry later, or raise "
    "max_queue_wait_microseconds in the model configuration"
)


class InFlightWork(NamedTuple):
    """Batches that one instance runs.

    Attributes:
        since_ns: monotonic end of the batch before these.
        batches: close time (monotonic ns) and rows of each batch, oldest first.
    """

    since_ns: int
    batches: Sequence[tuple[int, int]]


LATE_TEXT = "predicted to complete in {0:.3g} ms, due in {1:.3g} ms; retry later, or allow a longer deadline"
STANDING_TEXT = "requests arrive faster than the model serves them (predicted: {0:.3g} ms); retry later"


def rejection(text: str, done_ns: int, due_ns: int, now_ns: int, retry_after_s: float) -> WouldMiss:
    """Return the error of a rejected request.

    Args:
        text: `LATE_TEXT` or `STANDING_TEXT`.
        done_ns: monotonic completion time that was predicted, with its margin.
        due_ns: monotonic due time.
        now_ns: monotonic.
        retry_after_s: delay before a retry in seconds.
    """
    detail = text.format((done_ns - now_ns) / NS_PER_MS, (due_ns - now_ns) / NS_PER_MS)
    return WouldMiss(f"request rejected by admission control: {detail}", retry_after_s)


class AdmissionForecast(NamedTuple):
    """Prediction for a request of one row and without a deadline that arrives now.

    From it a front-end process rejects requests as `AdmissionController.admit` would. Times are monotonic nanoseconds.

    Attributes:
        start_ns: start of its batch.
        done_ns: completion, with the safety margin.
        margin_ns: the safety margin.
        kind: urgency class of the margin.
        max_wait_ns: largest allowed queue time.
    """

    start_ns: int
    done_ns: int
    margin_ns: int
    kind: int
    max_wait_ns: int


class WaitForecast(NamedTuple):
    """Wait of a request without a due time that is longer than allowed.

    Attributes:
        until_ns: monotonic time until which it is too long, without further arrivals.
        bound_ns: longest allowed wait in nanoseconds.
    """

    until_ns: int
    bound_ns: int


def wait_too_long(wait: WaitForecast, now_ns: int, retry_after_s: float) -> Overloaded:
    """Return the error of a request that would wait for too long."""
    bound_ms = wait.bound_ns / NS_PER_MS
    return Overloaded(_LONG_QUEUE.format((wait.until_ns - now_ns) / NS_PER_MS + bound_ms, bound_ms), retry_after_s)


class StandingRejection(NamedTuple):
    """The latest rejection, which applies to later requests that would be served behind the same queued requests.

    Attributes:
        due_ns: due time of the rejected request; requests that are due earlier may be served before others.
        kind: its urgency class.
        done_ns: its predicted completion, monotonic; of a request without a due time the longest wait, in nanoseconds.
        until_ns: monotonic time until which the queue is longer than allowed; 0 if the due time was the reason.
        rows: rows that were queued.
        refusal: text of the error.
        retry_ns: monotonic time at which queue and instances are predicted to be empty.
        span: bits of the time from its arrival to its due time, in nanoseconds: others have another urgency class.
    """

    due_ns: int
    kind: int
    done_ns: int
    until_ns: int
    rows: int
    refusal: str
    retry_ns: int
    span: int = 0


class WaitingRequests(Protocol):
    """The queue of a model version. A controller has none, so that the queue can have the controller."""

    @property
    def waiting_rows(self) -> int:
        """Number of queued rows."""

    def locate(self, entry: Entry) -> tuple[int, int, int]:
        """Return what `Queue.locate` does."""

    def rows_ahead(self, level: int, due_ns: int, client: str) -> int:
        """Estimate the queued rows that would be served before such a request."""


@dataclass(eq=False, repr=False)
class AdmissionController:
    """Predicts completion times, rejects late requests and learns from the outcomes; any thread may call.

    Ownership: `_lock` guards writes of `_margins` and `late`; they are read without it. Every other attribute is replaced as a
    whole, by any thread.

    Attributes:
        cost_model: batch durations; its `overhead_ns` is set from measurements.
        policy: batching rules.
        in_flight_work: returns the batches of each live instance. A prediction reads them there, so batches count nothing for it.
        shared: clients share the model: only a client below its share overtakes requests that are queued.
        late: number of responses after their due time.
        mailbox: of the event loop; its delay is a part of the latency, before the arrival is noticed and after the batch.
        max_wait_ns: longest predicted wait of a request without a due time; 0 for any.
        has_due_times: True if the model has an objective or a request had a deadline.
        changed: True if a batch started or ended since the free times were computed; set by the instances.
        short_rows: queued rows that take less than half of `max_wait_ns`.
        standing: the latest rejection, None if later requests may be admitted.
    """

    cost_model: CostModel
    policy: BatchPolicy
    in_flight_work: Callable[[], Sequence[InFlightWork]]
    shared: bool = False
    mailbox: Mailbox | None = None
    max_wait_ns: int = 0

    def __post_init__(self) -> None:
        self.late = 0
        self.has_due_times = self.policy.objective_ns > 0
        self.changed = True
        self.standing: StandingRejection | None = None
        self._lock = threading.Lock()
        self._overhead_ns = 0.0  # smoothed busy time of a batch beyond its usual compute time
        self._stretch = 1.0  # smoothed ratio of waits to their predictions
        self.short_rows = 0
        self._rows = 1.0  # smoothed rows of a batch
        self._margins, self._arrivals = SafetyMargins(), RecentArrivals()
        self._flowed_ns = 0  # last time with less than half a batch queued; recurs whenever capacity exceeds arrivals
        self._probed_ns = -NS_PER_S
        self._free: list[int] = []  # cached result of `_free_ns`
        self._free_until_ns = 0  # end of its validity, if no batch starts or ends

    def set_merging(self, merge: bool) -> None:
        """Predict for a model whose requests share batches, or that runs every request alone."""
        self.policy = replace(self.policy, merge=merge)

    def admit(self, queue: WaitingRequests, entries: list[Entry], now_ns: int) -> None:
        """Admit or reject a request with a due time, before it is queued; stores the prediction in its last entry.

        Admits every request while latencies are unmeasured or the model is evicted. Also admits while an instance is idle:
        a rejection would gain nothing then, and a wrong prediction would never be corrected.

        Args:
            queue: of the model version.
            entries: the entries of one request.
            now_ns: monotonic.

        Raises:
            WouldMiss: the predicted completion is after the due time.
        """
        self.has_due_times = True
        last = entries[-1]
        due_ns, costs = last.due_ns, self.cost_model.current
        free_ns = self._free_ns(costs, now_ns) if costs is not None else ()
        if costs is None or not free_ns:
            return
        ahead, max_overtakers, lag_ns = queue.locate(last)
        if len(entries) > 1:
            ahead += sum([entry.rows for entry in entries[:-1]])
            last.key = 0  # recomputed on push, after the keys of the other parts
        last.kind = kind = lag_ns.bit_length()
        rank = kind > 0 if self.shared else kind
        start = self._start(costs, free_ns, ahead, last.rows, now_ns)
        if rank and max_overtakers:
            overtakers = self._overtakers(costs, len(free_ns), rank, now_ns, start[0] - now_ns)
            if overtakers:
                start = self._start(costs, free_ns, ahead + min(overtakers, max_overtakers), last.rows, now_ns)
        start_ns, done_ns = start[0], self._completion_ns(costs, start, last, now_ns)
        # The pipeline of a step has admitted the request as a whole: a refusal here would waste the steps before.
        margin_ns = 0 if last.of_pipeline else self._margin_ns(kind)
        if done_ns + margin_ns > due_ns:
            refusal, until_ns = LATE_TEXT, 0
        elif (
            not last.of_pipeline
            and start_ns > (max_wait_ns := self._max_wait_ns(queue, costs, len(free_ns), due_ns, now_ns)) + now_ns
        ):
            refusal, until_ns = STANDING_TEXT, start_ns - max_wait_ns
        else:
            last.predicted_ns = done_ns
            self._arrivals.add(rank, last.rows, now_ns)
            return
        if self._should_probe(costs, free_ns, ahead, last, now_ns):
            last.predicted_ns = done_ns
        elif last.deadline_ns == due_ns or costs.estimates_ns[last.rows] < self.policy.objective_ns:
            rows, retry_ns = queue.waiting_rows, now_ns + self.drain_ns(queue, now_ns)
            span = (due_ns - last.received_ns).bit_length()
            latest = StandingRejection(due_ns, kind, done_ns, until_ns, rows, refusal, retry_ns, span)
            # Of more rows: a request of one row could complete earlier.
            if last.rows == 1 and not (self.shared or last.of_pipeline):
                self.standing = latest
            raise self._would_miss(latest, due_ns, margin_ns, now_ns)
        # Otherwise the objective is shorter than a single compute: rejecting every request would serve none.

    def forecast(self, queue: WaitingRequests, now_ns: int) -> AdmissionForecast | None:
        """Predict the completion of a request of one row and the only priority level that arrives now, without admitting one.

        Returns:
            None if `admit` may accept it whatever the prediction: there is no objective or no measurement, an instance is idle,
            or clients share the model.
        """
        costs, objective_ns = self.cost_model.current, self.policy.objective_ns
        if costs is None or not objective_ns or self.shared or costs.estimates_ns[1] >= objective_ns:
            return None
        free_ns = self._free_ns(costs, now_ns)
        if not free_ns:
            return None
        request = InferRequest(inputs={}, rows=1, shape_key=None, received_ns=now_ns)
        entry = Entry(request, ThreadCompletion(), 0, now_ns, objective_ns)
        ahead, _, lag_ns = queue.locate(entry)
        if not ahead and not free_ns[0]:
            return None
        # Later arrivals that overtake are not counted: a front end must not reject more than `admit` does.
        start = self._start(costs, free_ns, ahead, 1, now_ns)
        margin_ns = self._margin_ns(kind := lag_ns.bit_length())
        return AdmissionForecast(
            start[0],
            self._completion_ns(costs, start, entry, now_ns) + margin_ns,
            margin_ns,
            kind,
            self._max_wait_ns(queue, costs, len(free_ns), entry.due_ns, now_ns),
        )

    def learn_rejections(self, count: int, kind: int) -> None:
        """Learn from requests of an urgency class that front-end processes have rejected because of the margin."""
        costs = self.cost_model.current
        if costs is not None:
            with self._lock:
                self._margins.reduce(kind, costs.estimates_ns[self._usual_rows(costs)] * count)

    def standing_error(
        self, queue: WaitingRequests, received_ns: int, deadline_ns: int, now_ns: int
    ) -> WouldMiss | Overloaded | None:
        """Return the error of a request to which the latest rejection applies too, else None.

        Args:
            queue: of the model version.
            received_ns: monotonic time of arrival.
            deadline_ns: monotonic deadline of the client; 0 for none.
            now_ns: monotonic.
        """
        standing, objective_ns = self.standing, self.policy.objective_ns
        if standing is None or self.changed or queue.waiting_rows < standing.rows:
            self.standing = None
            return None
        due_ns = received_ns + objective_ns if objective_ns else deadline_ns
        if standing.due_ns == FAR_NS:
            return _too_long(standing, now_ns) if not due_ns and now_ns < standing.until_ns else None
        if 0 < deadline_ns < due_ns:
            due_ns = deadline_ns
        if due_ns < standing.due_ns or (due_ns - received_ns).bit_length() != standing.span:
            return None
        margin_ns = self._margin_ns(standing.kind)
        if now_ns >= standing.until_ns and standing.done_ns + margin_ns <= due_ns:
            return None
        return self._would_miss(standing, due_ns, margin_ns, now_ns)

    def _would_miss(self, standing: StandingRejection, due_ns: int, margin_ns: int, now_ns: int) -> WouldMiss:
        if standing.done_ns <= due_ns:
            costs = self.cost_model.current
            if costs is not None:
                self._margins.reduce(standing.kind, costs.estimates_ns[self._usual_rows(costs)])
        retry_after_s = max(standing.retry_ns - now_ns, NS_PER_MS) / NS_PER_S
        return rejection(standing.refusal, standing.done_ns + margin_ns, due_ns, now_ns, retry_after_s)

    def _margin_ns(self, kind: int) -> int:
        """Return what is added to a prediction: learned errors, and the delay of the event loop at arrival and response."""
        margin_ns = self._margins.ns(kind)
        if self.mailbox is not None:
            self.mailbox.measures_lag = True
            margin_ns += min(2 * self.mailbox.lag_ns, (self.policy.objective_ns or NS_PER_S) // _LAG_PARTS)
        return margin_ns

    def check_wait(self, queue: WaitingRequests, entries: list[Entry], now_ns: int) -> None:
        """Check the predicted wait of a request without a due time, before it is queued behind more than `short_rows`.

        Args:
            queue: of the model version.
            entries: the entries of one request.
            now_ns: monotonic.

        Raises:
            Overloaded: the request would wait longer than `max_wait_ns`, and for more than two batches of each instance.
        """
        costs = self.cost_model.current
        free_ns = self._free_ns(costs, now_ns) if costs is not None else ()
        if costs is None or not free_ns:
            return
        entry = entries[0]
        bound_ns, cycle_ns = self._wait_bound_ns(costs)
        self.short_rows = int(self._usual_rows(costs) * len(free_ns) * bound_ns / cycle_ns / 2)
        ahead = queue.rows_ahead(entry.level, FAR_NS, entry.client)
        start_ns = self._start(costs, free_ns, ahead, min(entry.rows, self.policy.max_rows), now_ns)[0]
        wait_ns = int((start_ns - now_ns) * self._stretch)
        if wait_ns <= bound_ns or self._runs_unmeasured():
            entry.predicted_ns = start_ns
            return
        rows, retry_ns = queue.waiting_rows, now_ns + self.drain_ns(queue, now_ns)
        until_ns = now_ns + wait_ns - bound_ns
        latest = StandingRejection(FAR_NS, 0, bound_ns, until_ns, rows, _LONG_QUEUE, retry_ns)
        if not self.shared:
            self.standing = latest
        raise _too_long(latest, now_ns)

    def _wait_bound_ns(self, costs: BatchCosts) -> tuple[int, float]:
        """Return the longest wait of a request without a due time, and the time of a batch under load."""
        cycle_ns = costs.estimates_ns[self._usual_rows(costs)] * self._stretch
        return max(self.max_wait_ns, int(_STANDING * cycle_ns)), cycle_ns

    def forecast_wait(self, queue: WaitingRequests, now_ns: int) -> WaitForecast | None:
        """Predict the wait of a request of one row without a due time; None if `check_wait` accepts it."""
        costs = self.cost_model.current
        if costs is None or not self.max_wait_ns or self.policy.objective_ns or self.shared:
            return None
        free_ns = self._free_ns(costs, now_ns)
        if not free_ns:
            return None
        bound_ns, _ = self._wait_bound_ns(costs)
        start_ns = self._start(costs, free_ns, queue.rows_ahead(0, FAR_NS, ""), 1, now_ns)[0]
        wait_ns = int((start_ns - now_ns) * self._stretch)
        too_long = wait_ns > bound_ns and not self._runs_unmeasured()
        return WaitForecast(now_ns + wait_ns - bound_ns, bound_ns) if too_long else None

    def _runs_unmeasured(self) -> bool:
        """Return True if a batch of more rows than were ever measured is in flight: its end is extrapolated, and often wrong."""
        measured_rows = self.cost_model.measured_rows
        return any(rows > measured_rows for work in self.in_flight_work() for _, rows in work.batches)

    def record_wait(self, entry: Entry, taken_ns: int) -> None:
        """Learn how much longer waits are than predicted from a request without a due time that has left the queue."""
        predicted_ns = entry.predicted_ns - entry.enqueued_ns
        if predicted_ns > _MIN_LEARNT_WAIT_NS:
            ratio = min(max((taken_ns - entry.enqueued_ns) / predicted_ns, _MIN_STRETCH), _MAX_STRETCH)
            self._stretch += (ratio - self._stretch) / _BATCH_SMOOTHING

    def record_batch(self, rows: int, compute_ns: int, busy_ns: int) -> None:
        """Record the busy time of a batch; called only while `has_due_times`.

        Args:
            rows: rows of the batch.
            compute_ns: usual compute time of such a batch.
            busy_ns: time for which the batch occupied its instance.
        """
        overhead_ns = min(busy_ns, _OUTLIER * compute_ns) - compute_ns
        # No lock: of two concurrent updates one may be lost, which a smoothed value tolerates.
        self._rows += (rows - self._rows) / _BATCH_SMOOTHING
        self._overhead_ns = max(self._overhead_ns + (overhead_ns - self._overhead_ns) / _BATCH_SMOOTHING, 0.0)
        self.cost_model.overhead_ns = int(self._overhead_ns)

    def learn(self, entries: list[Entry], done_ns: int) -> None:
        """Learn prediction errors from the requests of one batch; called only while `has_due_times`.

        Args:
            entries: the batch's entries.
            done_ns: monotonic completion time.
        """
        late = sum([entry.requests for entry in entries if done_ns > entry.due_ns])
        # Only requests predicted to use more than half of their time: for the others an error has no consequence.
        near = [
            e for e in entries if e.predicted_ns and 2 * (e.predicted_ns - e.enqueued_ns) > e.due_ns - e.enqueued_ns
        ]
        if late or near:
            with self._lock:
                self.late += late
                self._learn_errors(near, done_ns)

    def learn_dropped(self, entries: Sequence[Entry]) -> None:
        """Learn from requests that were dropped because their due time could not be met."""
        with self._lock:
            self._learn_errors([entry for entry in entries if entry.predicted_ns], FAR_NS)

    def wait_ns(self, queue: WaitingRequests, level: int, now_ns: int, announced: int = 0, rows: int = 1) -> int:
        """Predict the queue time of a request, in nanoseconds; 0 while latencies are unmeasured.

        Args:
            queue: of the model version.
            level: priority level, from 0.
            now_ns: monotonic.
            announced: rows that will be queued before it and are not there yet.
            rows: rows of the request.
        """
        is_empty = not (announced or queue.waiting_rows)
        if is_empty and any(not work.batches for work in self.in_flight_work()):
            return 0  # before the costs are read: nothing else would rebuild them for a single caller
        costs = self.cost_model.current
        free_ns = self._free_ns(costs, now_ns) if costs is not None else ()
        if costs is None or not free_ns:
            return 0
        objective_ns = self.policy.objective_ns
        ahead = queue.rows_ahead(level, now_ns + objective_ns if objective_ns else FAR_NS, "")
        return self._start(costs, free_ns, ahead + announced, min(rows, self.policy.max_rows), now_ns)[0] - now_ns

    def drain_ns(self, queue: WaitingRequests, now_ns: int) -> int:
        """Predict the time until the queue and all instances are empty, without new arrivals; 0 while unmeasured."""
        costs = self.cost_model.current
        free_ns = self._free_ns(costs, now_ns) if costs is not None else ()
        if costs is None or not free_ns:
            return 0
        usual = self._usual_rows(costs)
        busy_ns = sum([max(time_ns - now_ns, 0) for time_ns in free_ns])
        return (busy_ns - (-queue.waiting_rows // usual) * costs.estimates_ns[usual]) // len(free_ns)

    def retry_after_s(self, queue: WaitingRequests, now_ns: int) -> float:
        """Return the delay for a `Retry-After` header in seconds: the drain time, or 1 s while latencies are unmeasured."""
        drain_ns = self.drain_ns(queue, now_ns)
        return max(drain_ns, NS_PER_MS) / NS_PER_S if drain_ns else 1.0

    @property
    def rows_hz(self) -> float:
        """Rows per second of one instance under load; 0 while latencies are unmeasured."""
        costs = self.cost_model.current
        if costs is None:
            return 0.0
        usual = self._usual_rows(costs)
        return usual * NS_PER_S / costs.estimates_ns[usual]

    def _overtakers(self, costs: BatchCosts, instances: int, kind: int, now_ns: int, wait_ns: int) -> int:
        """Bound the rows that will arrive during `wait_ns` and be served first, at the recent arrival rate."""
        arrived = self._arrivals.below(kind, now_ns)
        if not arrived:
            return 0
        usual = self._usual_rows(costs)
        served_rows = usual * instances * LATELY_NS / costs.estimates_ns[usual]
        rows = arrived * wait_ns / LATELY_NS / (1 - min(arrived / served_rows, _MOST_OVERTAKING))
        return int(rows + 2 * sqrt(rows))

    def _usual_rows(self, costs: BatchCosts) -> int:
        """Rows of a batch under load."""
        return costs.best[-1] if self.policy.merge else min(max(round(self._rows), 1), self.policy.max_rows)

    def _completion_ns(self, costs: BatchCosts, start: tuple[int, int, int], entry: Entry, now_ns: int) -> int:
        """Return an upper bound of the completion time of a request whose batch starts at `start` (see `_start`)."""
        start_ns, rounds, before = start
        rows = min(before + entry.rows, self.policy.max_rows)
        if start_ns > now_ns and self.policy.merge:  # later arrivals join the batch until then
            rows = max(rows, costs.best[bisect_right(costs.promises_ns, (entry.due_ns - now_ns) // 2, 2) - 1])
        # Variances of independent times add up. The error of the median is common to all of them and scales linearly.
        usual, runs = costs.best[-1], rounds + 1
        spread_ns = costs.promises_ns[usual] - costs.estimates_ns[usual]
        spread_margin_ns = _SIGMAS * spread_ns * sqrt(runs + (_MEDIAN_SIGMA * runs) ** 2)
        return start_ns + costs.estimates_ns[rows] + int(spread_margin_ns)

    def _start(
        self, costs: BatchCosts, free_ns: Sequence[int], ahead: int, rows: int, now_ns: int
    ) -> tuple[int, int, int]:
        """Predict the start of the batch that holds a request with `ahead` rows before it.

        Returns:
            Monotonic start time, batches that its instance runs before (without those in flight), and rows of `ahead` that
            share the batch.
        """
        usual, instances = self._usual_rows(costs), len(free_ns)
        batches, before = divmod(ahead, usual)
        if before and (before + rows > usual or not self.policy.merge):
            batches, before = batches + 1, 0
        cycle_ns = costs.estimates_ns[usual]
        if instances == 1:
            return max(free_ns[0], now_ns) + batches * cycle_ns, batches, before
        start_ns = _nth_start(batches, [max(time_ns, now_ns) for time_ns in free_ns], cycle_ns)
        return start_ns, batches // instances, before

    def _max_wait_ns(self, queue: WaitingRequests, costs: BatchCosts, instances: int, due_ns: int, now_ns: int) -> int:
        """Return the allowed queue time; unlimited while the queue is not a standing one."""
        usual = self._usual_rows(costs)
        if 2 * queue.waiting_rows < usual * instances:
            self._flowed_ns = now_ns
        left_ns = due_ns - now_ns
        if now_ns - self._flowed_ns < left_ns:
            return FAR_NS
        cycle_ns = costs.estimates_ns[usual]
        return max(left_ns // 2 - cycle_ns, _STANDING * cycle_ns)

    def _should_probe(self, costs: BatchCosts, free_ns: Sequence[int], ahead: int, entry: Entry, now_ns: int) -> bool:
        """Return True if an instance is idle. Of deadlines that no batch can meet, one request a second is tried."""
        if ahead or free_ns[0]:
            return False
        if entry.due_ns < entry.deadline_ns or now_ns + costs.estimates_ns[entry.rows] <= entry.due_ns:
            return True
        if now_ns - self._probed_ns < NS_PER_S:
            return False
        self._probed_ns = now_ns
        return True

    def _free_ns(self, costs: BatchCosts, now_ns: int) -> Sequence[int]:
        """Return the time at which each instance becomes idle, ascending; 0 for an idle instance."""
        if not self.changed and now_ns < self._free_until_ns:
            return self._free
        self.changed, self.standing = False, None
        free_ns, until_ns, max_rows = [], FAR_NS, self.policy.max_rows
        for since_ns, batches in self.in_flight_work():
            end_ns = since_ns
            for taken_ns, rows in batches:
                end_ns = max(end_ns, taken_ns) + costs.estimates_ns[min(rows, max_rows)]
                if end_ns > now_ns:
                    until_ns = min(until_ns, end_ns)
                else:  # the batch takes longer than predicted
                    end_ns = until_ns = now_ns
            free_ns.append(end_ns if batches else 0)
        free_ns.sort()
        self._free, self._free_until_ns = free_ns, until_ns
        return free_ns

    def _learn_errors(self, entries: Sequence[Entry], done_ns: int) -> None:
        costs = self.cost_model.current
        errors_ns: defaultdict[int, list[int]] = defaultdict(list)
        for entry in entries:
            errors_ns[entry.kind].append(done_ns - entry.predicted_ns)
        if costs is not None:
            self._margins.learn(errors_ns, costs.estimates_ns[self._usual_rows(costs)])


def _too_long(standing: StandingRejection, now_ns: int) -> Overloaded:
    retry_after_s = max(standing.retry_ns - now_ns, NS_PER_MS) / NS_PER_S
    return wait_too_long(WaitForecast(standing.until_ns, standing.done_ns), now_ns, retry_after_s)


def _nth_start(number: int, free_ns: list[int], cycle_ns: int) -> int:
    """Return the start time of the `number`-th batch (from 0), if each goes to the first idle instance; `free_ns` ascending."""
    last_ns = free_ns[-1]
    if last_ns - free_ns[0] >= cycle_ns:  # some instances run several batches before the last one is idle
        again = [(last_ns - time_ns) // cycle_ns for time_ns in free_ns]
        if number < sum(again):  # the batch starts before the last instance is idle
            return _nth_start(number, free_ns[:-1], cycle_ns)
        number -= sum(again)
        free_ns = sorted([time_ns + count * cycle_ns for time_ns, count in zip(free_ns, again, strict=True)])
    rounds, instance = divmod(number, len(free_ns))
    return free_ns[instance] + rounds * cycle_ns


_LATE_SHARE = 0.005  # share of requests close to their deadline that may be late: half of what a 99th percentile allows
_STEP = 8  # a batch whose members are all late raises the margin by 1/8 of a batch duration
LATELY_NS = NS_PER_S  # window of `RecentArrivals`


class SafetyMargins:
    """Margins added to predictions, by urgency class; a small share of errors exceeds them. The caller's lock guards `learn`."""

    def __init__(self) -> None:
        self._ns: defaultdict[int, int] = defaultdict(int)

    def ns(self, kind: int) -> int:
        """Return the margin to add to a prediction, in nanoseconds."""
        return self._ns[kind]

    def learn(self, errors_ns: Mapping[int, Sequence[int]], cycle_ns: int) -> None:
        """Move the margins towards the quantile (H. Robbins, S. Monro, A stochastic approximation method, 1951).

        Args:
            errors_ns: by urgency class, completion time minus prediction without margin, for each request of one batch.
            cycle_ns: duration of a batch.
        """
        for kind, wrong_ns in errors_ns.items():
            margin_ns = self._ns[kind]
            beyond = sum([error_ns > margin_ns for error_ns in wrong_ns]) / len(wrong_ns)
            self._ns[kind] = max(margin_ns + int(cycle_ns / _STEP * (beyond - _LATE_SHARE)), 0)

    def reduce(self, kind: int, cycle_ns: int) -> None:
        """Shrink the margin after a rejection that it caused: no outcome can show that the margin is too large."""
        self._ns[kind] = max(self._ns[kind] - int(cycle_ns / _STEP * _LATE_SHARE / 4), 0)


class RecentArrivals:
    """Decaying number of rows that arrived, by urgency class.

    Without a lock: of two concurrent updates one may be lost, which an estimate tolerates.
    """

    def __init__(self) -> None:
        self._recent: dict[int, tuple[float, int]] = {}  # decayed rows, time of the last arrival

    def add(self, kind: int, rows: int, now_ns: int) -> None:
        """Record rows that were queued."""
        before, last_ns = self._recent.get(kind, (0.0, now_ns))
        self._recent[kind] = _decayed(before, now_ns - last_ns) + rows, now_ns

    def below(self, kind: int, now_ns: int) -> float:
        """Return the rows of more urgent classes in about the last `LATELY_NS`."""
        rows = 0.0
        for each, (arrived, last_ns) in list(self._recent.items()):
            if each < kind:
                rows += _decayed(arrived, now_ns - last_ns)
        return rows


def _decayed(rows: float, age_ns: int) -> float:
    return rows * (1 - age_ns / LATELY_NS) if age_ns < LATELY_NS else 0.0
