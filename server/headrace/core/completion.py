"""Completion of a request: a slot for its outcome, settled exactly once by any thread. Settling never raises.

The first attempt to settle wins: the instance with the response, the deadline's timer or the cancellation. Every other attempt
is a no-op. The event loop is woken once for any number of completions that are settled together (`Mailbox`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from headrace.core.clock import NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.errors import Cancelled
from headrace.core.request import GroupMembers, InferResponse, Probe

Outcome = InferResponse | Exception

PROBE_LIMIT_S = 5.0
"""Seconds that the code of a model has to say whether it is ready, as in Triton."""


_LAG_DECAY = 5  # a quick delivery forgets 1/32 of the delay
_LAG_STEP_NS = 50 * NS_PER_US


class Wakeable(Protocol):
    """A completion, or the stream of responses of a request: carried to the event loop by a `Mailbox`."""

    def wake(self) -> None:
        """Resume the waiting coroutine or run the callback; called on the loop."""


class Mailbox:
    """Carries settled completions, and streams with new responses, from any thread to one event loop, in their order.

    Ownership: `post` from any thread; `deliver` only on the loop. No lock: the flag is raised before the loop is woken and
    lowered before the first pop, so that a completion posted in between is seen by this drain or wakes the next one.

    Args:
        loop: event loop of the waiters.
        clock: returns monotonic nanoseconds.

    Attributes:
        loop: see Args.
        measures_lag: True once a request has a due time.
        is_armed: `deliver` will be called: by the event loop, or by the code on it that has set this.
        lag_ns: delay of the loop, from a post to its delivery: large ones of the latest deliveries.
        latest, mixed_ns: for `InlineGate`: the model version of the latest request, and until when
            requests count as those of several.
    """

    __slots__ = (
        "_bell", "_clock", "_posted_ns", "_rests", "_settled", "is_armed", "lag_ns", "latest", "loop", "measures_lag",
        "mixed_ns",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock = monotonic_ns) -> None:
        self.loop = loop
        self.lag_ns = self.mixed_ns = 0
        self.latest = ""
        self.measures_lag = False
        self._clock = clock
        self._posted_ns = 0
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._rests = False
        self._settled: deque[Wakeable] = deque()
        self.is_armed = False

    def post(self, completions: Iterable[Wakeable]) -> None:
        """Pass settled completions to the loop with at most one wake-up."""
        self._settled.extend(completions)
        if self._rests:
            self._rests = False
            self._bell.put(None)
        if not self.is_armed:
            self.is_armed = True
            if self.measures_lag:
                self._posted_ns = self._clock()
            try:
                self.loop.call_soon_threadsafe(self.deliver)
            except RuntimeError:  # the loop is closed, so nothing waits
                self._settled.clear()

    def rest(self, limit_s: float) -> None:
        """Let the thread of the loop sleep until the next completion is posted, or for `limit_s` seconds; called on the loop.

        A loop that only rejects requests takes them in groups: each wake-up for a single one would interrupt a computation on
        the same core and empty its caches.
        """
        self._rests = True
        if not self._settled:
            with suppress(Empty):
                self._bell.get(timeout=limit_s)
        self._rests = False

    def deliver(self) -> None:
        """Resume the waiters of all settled completions; called on the loop."""
        if self._posted_ns:
            lag_ns, self._posted_ns = self._clock() - self._posted_ns, 0
            if lag_ns > self.lag_ns:  # a single stall counts for little: predictions add this delay
                self.lag_ns += min(lag_ns - self.lag_ns, (self.lag_ns >> 1) + _LAG_STEP_NS)
            else:
                self.lag_ns -= (self.lag_ns - lag_ns) >> _LAG_DECAY
        self.is_armed = False
        settled = self._settled
        while settled:
            settled.popleft().wake()


class Completion:
    """Base class of completions; see `LoopCompletion`, `GroupCompletion`, `ThreadCompletion` and `PartCompletion`.

    Attributes:
        outcome: response or error; None until settled.
        after: callback, called once after settling by the thread that settles; must not raise.
    """

    __slots__ = ("_once", "after", "outcome")

    def __init__(self) -> None:
        self._once = threading.Lock()
        self.outcome: Outcome | None = None
        self.after: Callable[[], None] | None = None

    @property
    def is_settled(self) -> bool:
        """True once settled: a later outcome is dropped."""
        return self._once.locked()

    def claim(self, outcome: Outcome) -> bool:
        """Set the outcome without notifying the waiter; False if it was settled before."""
        if not self._once.acquire(False):  # positional: keyword arguments are slower, and every request comes here
            return False
        self.outcome = outcome
        return True

    def notify(self) -> None:
        """Notify the waiter, after a successful `claim`."""
        raise AssertionError("Completion is abstract: use LoopCompletion, ThreadCompletion or PartCompletion")

    def settle(self, outcome: Outcome) -> bool:
        """Claim and notify; False if it had been settled before."""
        if not self.claim(outcome):
            return False
        self.notify()
        self.finish()
        return True

    def withdraw(self) -> None:
        """Settle it without an outcome and without notification, since nothing waits for it."""
        if self._once.acquire(False):
            self.finish()

    def finish(self) -> None:
        """Call `after` once, and drop it: otherwise a served request would be a reference cycle."""
        after, self.after = self.after, None
        if after is not None:
            after()

    def abandon(self) -> bool:
        """Settle it as cancelled, because the caller has disconnected; a later outcome is dropped."""
        return self.settle(Cancelled("the caller has disconnected or cancelled the request"))


class LoopCompletion(Completion):
    """A completion on an event loop: a coroutine awaits it, or it calls back. Awaiting raises the error of the outcome.

    Attributes:
        woken: True once its waiter may go on; on the loop. That of a request that ran on the loop is woken when it is returned.
    """

    __slots__ = ("_callback", "_future", "_mailbox", "_timers", "woken")

    def __init__(self, mailbox: Mailbox) -> None:
        self._once = threading.Lock()  # as in `Completion`, without the call: there is one for every request
        self.outcome = self.after = None
        self._mailbox = mailbox
        self._callback: Callable[[], object] | None = None
        self._timers: tuple[asyncio.TimerHandle, ...] = ()
        self._future: asyncio.Future[InferResponse] | None = None  # created by `await`; callbacks need none
        self.woken = False

    def notify(self) -> None:
        """Post to the loop's mailbox."""
        self._mailbox.post((self,))

    def call_after(self, delay_ns: int, callback: Callable[..., object], *args: object) -> None:
        """Schedule a callback after `delay_ns` unless the completion is settled before; call it on the loop."""
        self._timers = (*self._timers, self._mailbox.loop.call_later(delay_ns / NS_PER_S, callback, *args))

    def then(self, callback: Callable[[], object]) -> None:
        """Set a callback in place of a waiting coroutine; call it on the loop, once. The callback must not raise.

        The callback never runs within `then`: that of a settled completion runs when the loop drains the mailbox.
        """
        if self.woken:  # the request ran on the loop, before `then`
            self._mailbox.loop.call_soon(callback)
        else:
            self._callback = callback

    def wake(self) -> None:
        """Resume the waiting coroutine or run the callback; called on the loop."""
        self.woken = True
        for timer in self._timers:
            timer.cancel()
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()
        elif self._future is not None:
            self._resolve(self._future)

    def settle_now(self, outcome: Outcome) -> bool:
        """Settle it, and resume the waiter within this call; False if it had been settled before. Called on the loop."""
        if not self.claim(outcome):
            return False
        try:
            self.finish()
        finally:
            self.wake()
        return True

    def _resolve(self, future: asyncio.Future[InferResponse]) -> None:
        outcome = self.outcome
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
            future.exception()  # marks it as retrieved: asyncio warns otherwise if the waiter was cancelled
        elif outcome is not None:
            future.set_result(outcome)

    def __await__(self) -> Generator[Any, None, InferResponse]:
        future = self._future
        if future is None:
            future = self._future = self._mailbox.loop.create_future()
            if self.woken:
                self._resolve(future)
        return future.__await__()


class GroupCompletion(LoopCompletion):
    """Completion of a group: requests of equal shape that are queued as one entry and answered together, or in parts.

    A group is split where a batch has room for some of its members only, and where a batch has failed as a whole. Each part has
    a completion of its own. The parts of a group are disjoint.

    Args:
        mailbox: of the event loop.
        members: the requests.
        on_settled: called on the loop with this completion once it is settled; must not raise.
        first: place of the first member in the group.

    Attributes:
        members: the requests of this part.
        first: place of the first of them in the group.
    """

    __slots__ = ("_on_settled", "first", "members")

    def __init__(
        self, mailbox: Mailbox, members: GroupMembers, on_settled: Callable[[GroupCompletion], object], first: int = 0
    ) -> None:
        self._once = threading.Lock()  # as in `LoopCompletion`
        self.outcome = self.after = self._callback = self._future = None
        self._mailbox = mailbox
        self._timers = ()
        self.woken = False
        self.members = members
        self.first = first
        self._on_settled = on_settled

    def split(self, count: int) -> GroupCompletion:
        """Return the completion of the first `count` members, which are no longer part of this one."""
        (received_ns, rows), first = self.members, self.first
        front = GroupCompletion(self._mailbox, GroupMembers(received_ns[:count], rows[:count]), self._on_settled, first)
        self.members, self.first = GroupMembers(received_ns[count:], rows[count:]), first + count
        return front

    def wake(self) -> None:
        """Call `on_settled`; no coroutine waits for a group."""
        self.woken = True
        for timer in self._timers:
            timer.cancel()
        self._on_settled(self)


class ThreadCompletion(Completion):
    """A completion for which one thread blocks."""

    __slots__ = ("_notified",)

    def __init__(self) -> None:
        super().__init__()
        self._notified = threading.Lock()
        self._notified.acquire()

    def notify(self) -> None:
        """Wake the waiter."""
        self._notified.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Block until notified, or for `timeout_s` seconds (-1: no limit). Returns True once, for the notification."""
        return self._notified.acquire(timeout=timeout_s)

    def result(self) -> InferResponse:
        """Return the response of a completion that has notified; raises its error."""
        outcome = self.outcome
        assert outcome is not None, "a completion that has notified has an outcome"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def settle_all(
    pairs: Iterable[tuple[Completion, Outcome]], count: Callable[[list[Completion]], object] | None = None
) -> list[Completion]:
    """Settle the members of a batch with one wake-up per event loop; returns those that had been settled before.

    Args:
        pairs: completions with their outcomes.
        count: called with the same before any waiter is notified: who has an answer, and reads the counters then, finds it there.
    """
    posts: dict[Mailbox, list[LoopCompletion]] = {}
    mailbox: Mailbox | None = None
    others: list[Completion] = []
    lost: list[Completion] = []
    for completion, outcome in pairs:
        if not completion._once.acquire(False):  # `claim` and `finish`, inlined
            lost.append(completion)
            continue
        completion.outcome = outcome
        if type(completion) is LoopCompletion or type(completion) is GroupCompletion:
            if completion._mailbox is not mailbox:
                mailbox = completion._mailbox
                settled = posts.setdefault(mailbox, [])
            settled.append(completion)
        else:
            others.append(completion)
        after = completion.after
        if after is not None:
            completion.after = None
            after()
    try:
        if count is not None:
            count(lost)
    finally:
        for other in others:
            other.notify()
        for each, settled in posts.items():
            each.post(settled)
    return lost


async def probe_answer(probe: Probe) -> bool:
    """Wait for the answer of a model's code; False without one within `PROBE_LIMIT_S` of the start of the probe."""
    if not probe.answer.done():
        limit_s = PROBE_LIMIT_S - (monotonic_ns() - probe.started_ns) / NS_PER_S
        # `wait` does not cancel the answer: other callers wait for it too.
        await asyncio.wait([asyncio.wrap_future(probe.answer)], timeout=max(limit_s, 0))
    return probe.answer.done() and probe.answer.result()
