"""What batches of each size take, as tables to decide by: drawn from the profile now and then, since reading that costs more."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.clock import NS_PER_MS
from headrace.scheduling.batching import BatchPolicy, Plan
from headrace.scheduling.profile import Profile

_REDRAW = 32  # batches between two drawings
_REDRAW_NS = (
    50 * NS_PER_MS
)  # or so much time of instances: a hundred times what drawing takes, and soon for slow models
_WORSE = 0.97  # a smaller batch is better only if the larger has less than this share of its rows a second: times are measured
# The smallest batch with this share of the most rows a second is the largest that is made: what is larger makes everybody wait
# longer, and gains next to nothing. Where several clients ask, each waits for the others' batches, and more is given for that;
# but not where the promise has made batches that much smaller already.
_NEARLY = 0.98
_NEARLY_SHARED = 0.92
_ROOM = 0.9  # of the time that a batch may take, for what varies
_LEAST = 0.8  # share of the most rows a second that is not given up to leave time for others


class Planner:
    """Keeps a plan up to date; any thread may call, and what is drawn twice at the same time is the same.

    Args:
        profile: how long batches compute.
        policy: how they are formed.

    Attributes:
        instances: how many pull.
        overhead_ns: what a batch takes from the decision to the answers besides computing.
        crowded: several clients ask, and share.
    """

    def __init__(self, profile: Profile, policy: BatchPolicy) -> None:
        self.crowded = False
        self.instances = 1
        self.overhead_ns = 0
        self._profile = profile
        self._policy = policy
        self._plans: tuple[Plan, Plan] | None = None  # for one client, and for several
        self._batches = 0  # since they were drawn
        self._busy_ns = 0  # likewise

    @property
    def current(self) -> Plan | None:
        """What to decide by; None if nothing is known of the times of batches."""
        plans = self._drawn()
        return plans[self.crowded] if plans is not None else None

    def _drawn(self) -> tuple[Plan, Plan] | None:
        if self._batches >= _REDRAW or self._busy_ns >= _REDRAW_NS or self._plans is None:
            self._batches = self._busy_ns = 0
            if self._profile.estimate_ns(1):
                plan = draw(self._profile, self._policy, self.instances, self.overhead_ns)
                self._plans = plan, _limited(plan, _NEARLY_SHARED, range(1, len(plan.best)))
        return self._plans

    def batch(self, busy_ns: int = 0) -> None:
        """A batch was run, and kept its instance for so long: the profile knows more."""
        self._batches += 1
        self._busy_ns += busy_ns


def draw(profile: Profile, policy: BatchPolicy, instances: int = 1, overhead_ns: int = 0) -> Plan:
    """Make the tables from a profile that knows something.

    Args:
        profile: how long batches compute.
        policy: how they are formed.
        instances: how many pull.
        overhead_ns: what a batch takes from the decision to the answers besides computing.
    """
    sizes = range(policy.max_rows + 1)
    promises_ns = [profile.promise_ns(rows) + overhead_ns for rows in sizes]
    estimates_ns = [profile.estimate_ns(rows) + overhead_ns for rows in sizes]
    best = [0, 1]
    for rows in sizes[2:]:
        before = best[-1]
        worse = rows * estimates_ns[before] < before * estimates_ns[rows] * _WORSE
        best.append(before if worse else rows)
    plan = Plan(promises_ns, estimates_ns, best, instances)
    if policy.objective_ns:
        most = _most_rows(plan, policy.objective_ns)
        plan = plan._replace(best=[min(rows, most) for rows in best])
    return _limited(plan, _NEARLY, plan.best[1:])


def _most_rows(plan: Plan, objective_ns: int) -> int:
    """The largest batch that leaves time for who comes after it.

    Who comes just after a batch was taken must wait until an instance is free, and for a batch of its own. With instances that
    work in turn the first is that part of a batch's time; so a batch may take no more than n / (n + 1) of what is promised. But
    where that is too little for anything but slow small batches (other models may be at work on the device), these would only
    make everybody later still.
    """
    affordable_ns = objective_ns * plan.instances / (plan.instances + 1) * _ROOM
    most = max((rows for rows in plan.best[1:] if plan.promises_ns[rows] <= affordable_ns), default=1)
    possible = [rows for rows in plan.best[1:] if plan.promises_ns[rows] <= objective_ns] or plan.best[1:]
    return max(most, _smallest(plan, possible, _LEAST))


def _limited(plan: Plan, share: float, sizes: Sequence[int]) -> Plan:
    """The same without batches larger than the smallest of these sizes that has this share of the most rows a second."""
    most = _smallest(plan, sizes, share)
    return plan._replace(best=[min(rows, most) for rows in plan.best])


def _smallest(plan: Plan, sizes: Sequence[int], share: float) -> int:
    rates = [rows / max(plan.estimates_ns[rows], 1) for rows in sizes]
    enough = share * max(rates)
    return min(rows for rows, rate in zip(sizes, rates, strict=True) if rate >= enough)
