"""The answer slot that rides in a queue entry: settled exactly once, from any thread, never raising.

Whoever comes first wins: the instance with the answer, the deadline's timer, the caller who leaves. Everybody else's attempt
is a no-op. The event loop is woken once for any number of completions settled together (`Mailbox`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

from headrace.core.clock import NS_PER_S
from headrace.core.errors import Cancelled
from headrace.core.request import InferResponse

Outcome = InferResponse | Exception


class Mailbox:
    """Carries settled completions from any thread to one event loop.

    Ownership: `post` from any thread; `_drain` only on the loop. No lock: the flag is raised before the loop is woken and
    lowered before the first pop, so that a completion posted in between is seen by this drain or wakes the next one.
    """

    __slots__ = ("_armed", "_loop", "_settled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._settled: deque[LoopCompletion] = deque()
        self._armed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop on which the waiters live."""
        return self._loop

    def post(self, completions: Iterable[LoopCompletion]) -> None:
        """Hand settled completions to the loop with at most one wake-up."""
        self._settled.extend(completions)
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._settled.clear()

    def _drain(self) -> None:
        self._armed = False
        settled = self._settled
        while settled:
            settled.popleft().wake()


class Completion:
    """The contract; see `LoopCompletion`, `ThreadCompletion` and `PartCompletion` for the kinds.

    Attributes:
        after: called once after the completion was settled, by whoever settled it; must not raise.
    """

    __slots__ = ("_once", "after", "outcome")

    def __init__(self) -> None:
        self._once = threading.Lock()
        self.outcome: Outcome | None = None
        self.after: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """True once settled: an answer that comes now has no taker."""
        return self._once.locked()

    def claim(self, outcome: Outcome) -> bool:
        """Fix the outcome without telling the waiter; False if somebody else was first."""
        if not self._once.acquire(False):  # by position: this is on the way of every request
            return False
        self.outcome = outcome
        return True

    def notify(self) -> None:
        """Tell the waiter, after a successful `claim`."""
        raise AssertionError("a Completion is one of the kinds below, or a PartCompletion")

    def settle(self, outcome: Outcome) -> bool:
        """Claim and notify; False if it had been settled before."""
        if not self.claim(outcome):
            return False
        self.notify()
        self.finish()
        return True

    def withdraw(self) -> None:
        """Nobody waits for it (yet, or any more): it is settled without an outcome, and nobody is told."""
        if self._once.acquire(False):
            self.finish()

    def finish(self) -> None:
        """Call `after`, once; letting go of it here keeps a served request from being a reference cycle."""
        after, self.after = self.after, None
        if after is not None:
            after()

    def abandon(self) -> bool:
        """The caller has gone: drop whatever comes."""
        return self.settle(Cancelled("the caller has gone"))


class LoopCompletion(Completion):
    """A completion that a coroutine awaits, or that calls back; awaiting raises the error it was settled with."""

    __slots__ = ("_callback", "_future", "_mailbox", "_timers", "_woken")

    def __init__(self, mailbox: Mailbox) -> None:
        self._once = threading.Lock()  # as in `Completion`, without the call: there is one for every request
        self.outcome = self.after = None
        self._mailbox = mailbox
        self._callback: Callable[[], object] | None = None
        self._timers: tuple[asyncio.TimerHandle, ...] = ()
        self._future: asyncio.Future[InferResponse] | None = None  # made for who awaits: callbacks need none
        self._woken = False

    def notify(self) -> None:
        """Post to the loop's mailbox."""
        self._mailbox.post((self,))

    def call_after(self, delay_ns: int, callback: Callable[..., object], *args: object) -> None:
        """On the loop: call back after `delay_ns` unless the completion is settled before."""
        self._timers = (*self._timers, self._mailbox.loop.call_later(delay_ns / NS_PER_S, callback, *args))

    def then(self, callback: Callable[[], object]) -> None:
        """On the loop, once, before anything is awaited: call back there instead of resuming a waiter; must not raise.

        Never from within `then`: a completion that is settled already calls back when the loop comes to its mailbox.
        """
        self._callback = callback

    def wake(self) -> None:
        """On the loop: resume the waiter."""
        self._woken = True
        for timer in self._timers:
            timer.cancel()
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()
        elif self._future is not None:
            self._resolve(self._future)

    def _resolve(self, future: asyncio.Future[InferResponse]) -> None:
        outcome = self.outcome
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
            future.exception()  # marks it as seen: a waiter that has gone must not warn
        elif outcome is not None:
            future.set_result(outcome)

    def __await__(self) -> Generator[Any, None, InferResponse]:
        future = self._future
        if future is None:
            future = self._future = self._mailbox._loop.create_future()
            if self._woken:
                self._resolve(future)
        return future.__await__()


class ThreadCompletion(Completion):
    """A completion for which one thread waits, itself."""

    __slots__ = ("_notified",)

    def __init__(self) -> None:
        super().__init__()
        self._notified = threading.Lock()
        self._notified.acquire()

    def notify(self) -> None:
        """Wake the waiter."""
        self._notified.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Return once it is settled and told, or after `timeout_s` (-1: never); True if it was, which is said once."""
        return self._notified.acquire(timeout=timeout_s)


def settle_all(pairs: Iterable[tuple[Completion, Outcome]]) -> int:
    """Settle the members of a batch with one wake-up per event loop; the number that still had a taker."""
    posts: dict[Mailbox, list[LoopCompletion]] = {}
    others: list[Completion] = []
    count = 0
    for completion, outcome in pairs:
        if not completion._once.acquire(False):  # `claim` and `finish`, without the calls
            continue
        completion.outcome = outcome
        count += 1
        if type(completion) is LoopCompletion:
            settled = posts.get(completion._mailbox)
            if settled is None:
                settled = posts[completion._mailbox] = []
            settled.append(completion)
        else:
            others.append(completion)
        after = completion.after
        if after is not None:
            completion.after = None
            after()
    for other in others:
        other.notify()
    for mailbox, settled in posts.items():
        mailbox.post(settled)
    return count
