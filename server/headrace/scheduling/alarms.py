"""What ends a request's waiting: its own deadline, and its queue's timeout."""

from __future__ import annotations

from headrace.core.clock import NS_PER_S, NS_PER_US, Clock
from headrace.core.completion import Completion, LoopCompletion, ThreadCompletion
from headrace.core.errors import DeadlineExceeded
from headrace.core.request import InferRequest
from headrace.scheduling.policy import HandlePolicy, LevelPolicy
from headrace.scheduling.queue import Entry
from headrace.scheduling.scheduler import Scheduler

# uvloop and asyncio take delays as floats of seconds; beyond a day a deadline means none.
_MAX_DELAY_NS = 86_400 * NS_PER_S


class Alarms:
    """Sets them: timers of the event loop, or on the thread of a caller that waits.

    Args:
        policy: with the timeouts of the levels.
        scheduler: told of entries that have waited too long.
        clock: monotonic nanoseconds.

    Attributes:
        timeouts: False if no level has a timeout.
    """

    def __init__(self, policy: HandlePolicy, scheduler: Scheduler, clock: Clock) -> None:
        self._levels = _policies(policy)
        self._scheduler = scheduler
        self._clock = clock
        self.timeouts = any(level.queue_timeout_ns for level in self._levels)

    def set(self, request: InferRequest, completion: LoopCompletion, entries: list[Entry], now_ns: int) -> None:
        """Have timers end it."""
        deadline_ns = request.deadline_ns
        if deadline_ns:
            after_ns = deadline_ns - request.received_ns
            completion.call_after(min(deadline_ns - now_ns, _MAX_DELAY_NS), _exceed, completion, after_ns)
            if not self.timeouts:
                return
        level = self._levels[entries[0].level]
        timeout_ns = _timeout_ns(level, request, now_ns)
        if timeout_ns:
            for entry in entries:
                completion.call_after(timeout_ns, self._scheduler.expire, entry, level.demote_on_timeout)

    def wait(self, request: InferRequest, completion: ThreadCompletion, entries: list[Entry], now_ns: int) -> None:
        """The same for a thread that waits, which sees to them itself; returns once the completion is settled and told."""
        deadline_ns = request.deadline_ns
        level = self._levels[entries[0].level]
        timeout_ns = _timeout_ns(level, request, now_ns)
        if timeout_ns:
            if completion.wait(self._left_s(now_ns + timeout_ns)):
                return
            for entry in entries:
                self._scheduler.expire(entry, level.demote_on_timeout)
        if deadline_ns and completion.wait(self._left_s(deadline_ns)):
            return
        if deadline_ns:
            _exceed(completion, deadline_ns - request.received_ns)
        completion.wait()

    def _left_s(self, time_ns: int) -> float:
        return min(max(time_ns - self._clock(), 0), _MAX_DELAY_NS) / NS_PER_S


def _policies(policy: HandlePolicy) -> list[LevelPolicy]:
    """Of each level, its own or the handle's."""
    common = LevelPolicy(
        queue_timeout_ns=policy.queue_timeout_ns,
        demote_on_timeout=policy.demote_on_timeout,
        timeout_override=policy.timeout_override,
    )
    return [policy.level_policies.get(level, common) for level in range(1, policy.levels + 1)]


def _timeout_ns(level: LevelPolicy, request: InferRequest, now_ns: int) -> int:
    """How long a request may wait in its queue, nanoseconds; 0 for no limit, or if its deadline passes before that.

    As in Triton a request's own timeout can only shorten the policy's, so it has no effect where the policy has none. Deadlines
    never replace the policy: they have timers of their own.
    """
    timeout_ns = level.queue_timeout_ns
    if level.timeout_override and 0 < request.queue_timeout_ns < timeout_ns:
        timeout_ns = request.queue_timeout_ns
    return 0 if 0 < request.deadline_ns <= now_ns + timeout_ns else timeout_ns


def _exceed(completion: Completion, after_ns: int) -> None:
    """The request's deadline has passed, so long after the request arrived."""
    completion.settle(DeadlineExceeded(f"the request's deadline passed after {after_ns // NS_PER_US} us"))
