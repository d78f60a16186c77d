"""What batches of each size take, as tables to decide by: drawn from the profile now and then, since reading that costs more."""

from __future__ import annotations

from server.dataplane.batching import BatchPolicy, Plan
from server.dataplane.profile import Profile

_REDRAW = 32  # batches between two drawings
_WORSE = 0.97  # a smaller batch is better only if the larger has less than this share of its rows a second: times are measured


class Planner:
    """Keeps a plan up to date; any thread may call, and what is drawn twice at the same time is the same.

    Args:
        profile: how long batches compute.
        policy: how they are formed.

    Attributes:
        instances: how many pull.
        overhead_ns: what a batch takes from the decision to the answers besides computing.
    """

    def __init__(self, profile: Profile, policy: BatchPolicy) -> None:
        self.instances = 1
        self.overhead_ns = 0
        self._profile = profile
        self._policy = policy
        self._plan: Plan | None = None
        self._batches = 0  # since it was drawn

    @property
    def current(self) -> Plan | None:
        """What to decide by; None if nothing is known of the times of batches."""
        if self._batches >= _REDRAW or self._plan is None:
            self._batches = 0
            if self._profile.estimate_ns(1):
                self._plan = draw(self._profile, self._policy, self.instances, self.overhead_ns)
        return self._plan

    def batch(self) -> None:
        """A batch was run: the profile knows more."""
        self._batches += 1


def draw(profile: Profile, policy: BatchPolicy, instances: int = 1, overhead_ns: int = 0) -> Plan:
    """Make the tables from a profile that knows something.

    Who comes just after a batch was taken must wait until an instance is free, and for a batch of its own. With instances that
    work in turn the first is that part of a batch's time; so a batch may take no more than n / (n + 1) of what is promised.

    Args:
        profile: how long batches compute.
        policy: how they are formed.
        instances: how many pull.
        overhead_ns: what a batch takes from the decision to the answers besides computing.
    """
    sizes = range(policy.max_rows + 1)
    promises_ns = [profile.promise_ns(rows) + overhead_ns for rows in sizes]
    estimates_ns = [profile.estimate_ns(rows) + overhead_ns for rows in sizes]
    affordable_ns = policy.objective_ns * instances // (instances + 1)
    best = [0]
    for rows in sizes[1:]:
        before = best[-1]
        worse = rows * estimates_ns[before] < before * estimates_ns[rows] * _WORSE
        too_long = affordable_ns and promises_ns[rows] > affordable_ns
        best.append(before if before and (worse or too_long) else rows)
    return Plan(promises_ns, estimates_ns, best, instances)
