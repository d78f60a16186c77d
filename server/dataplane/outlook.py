"""When a request that came now would be answered, and so whether it is worth taking: admission by prediction.

What instances run, what waits ahead in the order of serving, and the request's own batch are priced by the profile, as Clockwork
does it (A. Gujarati and others, OSDI 2020). A request that would be late is refused at once: under overload everybody else is
answered in time and the client can go elsewhere, instead of all being answered too late. How far predictions are wrong is learned
from what became of those that mattered, so that the promise is kept at its percentile whatever the profile does not know of.

Nothing here is called for requests that are never due.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import sqrt
from typing import NamedTuple, Protocol

from server.core.clock import NS_PER_MS, NS_PER_S
from server.core.errors import WouldMiss
from server.dataplane.batching import BatchPolicy
from server.dataplane.profile import WINDOW, Profile
from server.dataplane.queue import FAR_NS, Entry

_SIGMAS = 2.58 / 1.645  # from the 95th percentile of one normal variable to the 99.5th of a sum, by square roots
_MEDIAN_SIGMA = 1.2533 / sqrt(WINDOW)  # standard error of the median of a window, in deviations of what is in it
_LATE = 0.005  # of those that were promised most, what may be late: half of what a 99th percentile leaves
_STEP = 8  # a batch that is late as a whole makes the reserve longer by one part in so many of what a batch takes
_OUTLIER = 4  # what takes so many times as long as it should counts no more than that
_SMOOTHING = 64  # a new measurement counts for one in so many
_REDRAW = 64  # batches until the plan is made anew


class UnderWay(NamedTuple):
    """What one instance runs.

    Attributes:
        since_ns: monotonic, when it was done with what it ran before.
        batches: when each was taken, and its rows; the oldest first.
    """

    since_ns: int
    batches: Sequence[tuple[int, int]]


class Line(Protocol):
    """The queue as far as it matters here; see `server.dataplane.scheduler.Scheduler`."""

    @property
    def waiting_rows(self) -> int:
        """Rows that wait."""

    def rows_ahead(self, level: int, due_ns: int, client: str) -> int:
        """Rows that would be served before a request like this, if it were queued now."""


class _Plan(NamedTuple):
    """What batches take, by rows; never changed. All lists ascending, of one length.

    Attributes:
        rows: sizes.
        promises_ns: what each takes at most, as a rule.
        best: of the sizes up to each, the one with the most rows a second.
        usual: size of the batches that are ahead of a request under load.
        cycle_ns: what one of them keeps an instance busy, on average.
        spread_ns: what 19 of 20 of them take longer at most.
        merges: a request may share a batch with others.
    """

    rows: list[int]
    promises_ns: list[int]
    best: list[int]
    usual: int
    cycle_ns: int
    spread_ns: int
    merges: bool

    def rows_within(self, time_ns: int) -> int:
        """The best batch that takes no longer than this; the smallest if none does."""
        return self.best[max(bisect_right(self.promises_ns, time_ns) - 1, 0)]


class Outlook:
    """Predicts, refuses, and learns from what became of it; any thread may call.

    Ownership: `_lock` guards `_reserve_ns` and `late`, which are read without it; the rest is replaced whole, by whoever comes.

    Args:
        profile: how long batches compute.
        policy: how they are formed.
        line: what waits.
        under_way: what each living instance runs.

    Attributes:
        late: answers that came after they were due.
        promises: a request was due once.
        changed: instances have begun or ended something since they were last looked at; set by whoever knows.
    """

    def __init__(
        self, profile: Profile, policy: BatchPolicy, line: Line, under_way: Callable[[], Sequence[UnderWay]]
    ) -> None:
        self.profile = profile
        self.under_way = under_way
        self.late = 0
        self.promises = False
        self.changed = True
        self._policy = policy
        self._line = line
        self._lock = threading.Lock()
        self._plan: _Plan | None = None
        self._batches = 0  # since the plan was made
        self._overhead_ns = 0.0  # smoothed: how much longer a batch keeps an instance busy than it computes as a rule
        self._reserve_ns = 0
        self._rows = 1.0  # smoothed, of a batch
        self._probed_ns = -NS_PER_S
        self._free: list[int] = []  # as of the last time that something changed
        self._free_until_ns = 0  # until then, if nothing changes

    def admit(self, entries: list[Entry], now_ns: int) -> None:
        """Take a request that is due some time, before it is queued, or refuse it; notes what it is promised.

        Everything is taken while nothing is known of the times of batches, or the model is parked; and whenever an instance
        has nothing else to do, since to refuse it then gains nobody anything, and what is wrongly believed of those times would
        never be found out.

        Raises:
            WouldMiss: it would be answered too late.
        """
        self.promises = True
        last = entries[-1]
        due_ns, plan = last.due_ns, self._current()
        if due_ns == FAR_NS or plan is None:
            return
        free_ns = self._free_ns(now_ns)
        if not free_ns:
            return
        ahead = self._line.rows_ahead(last.level, due_ns, last.client)
        if len(entries) > 1:
            ahead += sum([entry.rows for entry in entries[:-1]])
        done_ns = self._done_ns(plan, free_ns, ahead, last, now_ns)
        if done_ns + self._reserve_ns <= due_ns or self._idles(free_ns, ahead, last, now_ns):
            last.promised_ns = done_ns
            return
        soft = due_ns != last.deadline_ns
        if soft and self.profile.estimate_ns(last.rows) >= self._policy.objective_ns:
            return  # nobody's request could be in time: it is no use refusing them all
        late_ms, left_ms = (done_ns + self._reserve_ns - now_ns) / NS_PER_MS, (due_ns - now_ns) / NS_PER_MS
        raise WouldMiss(
            f"the request would be answered in {late_ms:.3g} ms; the model promises {left_ms:.3g} ms"
            if soft
            else f"the request would be answered in {late_ms:.3g} ms; its deadline is in {left_ms:.3g} ms",
            max(self.drain_ns(now_ns), NS_PER_MS) / NS_PER_S,
        )

    def ran(self, rows: int, busy_ns: int) -> None:
        """A batch was run.

        Args:
            rows: of all its members.
            busy_ns: how long it kept its instance.
        """
        estimate_ns = self.profile.estimate_ns(rows)
        overhead_ns = min(busy_ns, _OUTLIER * estimate_ns) - estimate_ns
        # No lock: of two at the same time one is lost, which does not matter, and most models need none of it.
        self._rows += (rows - self._rows) / _SMOOTHING
        self._overhead_ns = max(self._overhead_ns + (overhead_ns - self._overhead_ns) / _SMOOTHING, 0.0)
        self._batches += 1
        self.changed = True
        if self._batches >= _REDRAW:
            self._plan = None

    def learn(self, entries: list[Entry], done_ns: int) -> None:
        """Requests were answered together; only after the first `admit`."""
        errors_ns = [
            done_ns - entry.promised_ns
            for entry in entries
            # Where much time is left it does not matter.
            if entry.promised_ns and 2 * (entry.promised_ns - entry.enqueued_ns) > entry.due_ns - entry.enqueued_ns
        ]
        late = sum([done_ns > entry.due_ns for entry in entries])
        if late or errors_ns:
            with self._lock:
                self.late += late
                if errors_ns:
                    self._weigh(errors_ns)

    def missed(self, entries: Sequence[Entry]) -> None:
        """Requests were given up since they could not be answered in time any more."""
        promised = sum([entry.promised_ns > 0 for entry in entries])
        if promised:
            with self._lock:
                self._weigh([FAR_NS] * promised)

    def wait_ns(self, level: int, now_ns: int) -> int:
        """How long a request of one row would wait until it is run; 0 if nothing is known.

        Args:
            level: its priority, from 0.
            now_ns: monotonic.
        """
        plan = self._current()
        if plan is None:
            return 0
        objective_ns = self._policy.objective_ns
        ahead = self._line.rows_ahead(level, now_ns + objective_ns if objective_ns else FAR_NS, "")
        free_ns = self._free_ns(now_ns)
        return _start(plan, free_ns, ahead, 1, now_ns)[0] - now_ns if free_ns else 0

    def drain_ns(self, now_ns: int) -> int:
        """How long what waits and runs would take if nothing came; 0 if nothing is known."""
        plan, free_ns = self._current(), self._free_ns(now_ns)
        if plan is None or not free_ns:
            return 0
        batches = -(-self._line.waiting_rows // plan.usual)
        busy_ns = sum([max(time_ns - now_ns, 0) for time_ns in free_ns])
        return (busy_ns + batches * plan.cycle_ns) // len(free_ns)

    @property
    def rows_hz(self) -> float:
        """Rows a second that an instance does under load; 0 if nothing is known."""
        plan = self._current()
        return plan.usual * NS_PER_S / plan.cycle_ns if plan else 0.0

    def _done_ns(self, plan: _Plan, free_ns: list[int], ahead: int, entry: Entry, now_ns: int) -> int:
        """When it will be answered, at the latest."""
        start_ns, rounds, before = _start(plan, free_ns, ahead, entry.rows, now_ns)
        rows = before + entry.rows
        if start_ns > now_ns and plan.merges:  # others will come until then, and join it
            rows = max(rows, plan.rows_within((entry.due_ns - now_ns) // 2))
        compute_ns = self.profile.estimate_ns(min(rows, self._policy.max_rows)) + int(self._overhead_ns)
        # Variances of independent times add up; what the median of a window is wrong by, they have in common.
        runs = rounds + 1
        return start_ns + compute_ns + int(_SIGMAS * plan.spread_ns * sqrt(runs + (_MEDIAN_SIGMA * runs) ** 2))

    def _idles(self, free_ns: list[int], ahead: int, entry: Entry, now_ns: int) -> bool:
        """An instance has nothing else to do; of hard deadlines that cannot be met one a second is tried."""
        if ahead or not free_ns or free_ns[0] > now_ns:
            return False
        if entry.due_ns < entry.deadline_ns or now_ns + self.profile.estimate_ns(entry.rows) <= entry.due_ns:
            return True
        if now_ns - self._probed_ns < NS_PER_S:
            return False
        self._probed_ns = now_ns
        return True

    def _free_ns(self, now_ns: int) -> list[int]:
        """When each instance will have done what it has, ascending; 0 if it has nothing."""
        if not self.changed and now_ns < self._free_until_ns:
            return self._free
        self.changed = False
        free_ns, overhead_ns, until_ns = [], int(self._overhead_ns), FAR_NS
        works = self.under_way()
        for since_ns, batches in works:
            end_ns = since_ns
            for taken_ns, rows in batches:
                end_ns = max(end_ns, taken_ns) + self.profile.estimate_ns(rows, len(works)) + overhead_ns
                if end_ns > now_ns:
                    until_ns = min(until_ns, end_ns)
                else:  # it is late
                    end_ns = until_ns = now_ns
            free_ns.append(end_ns if batches else 0)
        free_ns.sort()
        self._free, self._free_until_ns = free_ns, until_ns
        return free_ns

    def _weigh(self, errors_ns: list[int]) -> None:
        """Follow the quantile of what predictions are wrong by: H. Robbins, S. Monro, A stochastic approximation method, 1951."""
        plan, reserve_ns = self._plan, self._reserve_ns
        step_ns = (plan.cycle_ns if plan else self.profile.estimate_ns(1)) / _STEP
        beyond = sum([error_ns > reserve_ns for error_ns in errors_ns]) / len(errors_ns)
        self._reserve_ns = max(int(reserve_ns + step_ns * (beyond - _LATE)), 0)

    def _current(self) -> _Plan | None:
        plan = self._plan
        if plan is None:
            plan = self._plan = self._drawn()
            self._batches = 0
        return plan

    def _drawn(self) -> _Plan | None:
        profile, policy = self.profile, self._policy
        if not profile.estimate_ns(1):
            return None
        most = policy.max_rows if policy.merge else 1
        sizes = sorted(
            {most, *(size for size in policy.preferred_rows if size < most)}
            | {1 << power for power in range(most.bit_length())}
        )
        promises_ns = [profile.promise_ns(rows) for rows in sizes]
        best, speed = [], 0.0
        for rows in sizes:
            row_hz = rows / (profile.estimate_ns(rows) + self._overhead_ns)
            if row_hz > speed:
                speed, size = row_hz, rows
            best.append(size)
        usual = best[-1]
        if not policy.merge:
            usual = max(round(self._rows), 1)
        elif policy.objective_ns:
            usual = best[max(bisect_right(promises_ns, policy.objective_ns // 2) - 1, 0)]
        usual_ns = profile.estimate_ns(usual)
        spread_ns = profile.promise_ns(usual) - usual_ns
        return _Plan(sizes, promises_ns, best, usual, usual_ns + int(self._overhead_ns), spread_ns, policy.merge)


def _start(plan: _Plan, free_ns: list[int], ahead: int, rows: int, now_ns: int) -> tuple[int, int, int]:
    """When the batch begins that has a request with so many rows ahead of it; how many its instance runs before, beyond what is
    under way; and how many of those rows it has, too."""
    batches, before = divmod(ahead, plan.usual)
    if before and (before + rows > plan.usual or not plan.merges):
        batches, before = batches + 1, 0
    if len(free_ns) == 1:
        return max(free_ns[0], now_ns) + batches * plan.cycle_ns, batches, before
    return (
        _nth_start(batches, [max(time_ns, now_ns) for time_ns in free_ns], plan.cycle_ns),
        batches // len(free_ns),
        before,
    )


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
