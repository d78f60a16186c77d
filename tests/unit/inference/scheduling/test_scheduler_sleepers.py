"""Which of several sleeping instances is woken, and how one is interrupted; each sleeper is a real thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.inference.scheduling.policy import BatchPolicy
from headrace.inference.scheduling.scheduler import _HOLD_NS, _HOLD_ROWS, Scheduler
from headrace.inference.scheduling.selector import Batch

from tests.support.completions import entry
from tests.support.sleepers import sleepers


class Puller:
    """Polls for one batch on a separate thread."""

    def __init__(self, scheduler: Scheduler, busy: bool = False) -> None:
        self.scheduler = scheduler
        self.interrupted = False
        self.polled = threading.Semaphore(0)
        self.batch: Batch | None = None
        self.sleeper = threading.Lock()
        self.sleeper.acquire()
        self.thread = threading.Thread(target=self._pull, args=(busy,), daemon=True)
        self.thread.start()
        self.asleep()

    def asleep(self) -> None:
        """Return when the thread has polled for the last time before it sleeps: under the lock, which it then releases."""
        assert self.polled.acquire(timeout=10)
        with self.scheduler._lock:
            pass

    def interrupt(self) -> None:
        self.interrupted = True
        self.scheduler.interrupt(self.sleeper)

    def result(self) -> Batch | None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.batch

    def _pull(self, busy: bool) -> None:
        self.batch = self.scheduler.next_batch(self.sleeper, self._is_interrupted, busy)

    def _is_interrupted(self) -> bool:
        self.polled.release()
        return self.interrupted


def test_an_idle_instance_is_woken_before_one_with_batches_in_flight() -> None:
    for busy_first in (True, False):
        scheduler = Scheduler(BatchPolicy(8))
        pullers = [Puller(scheduler, busy) for busy in (busy_first, not busy_first)]
        scheduler.enqueue([entry()])
        idle = pullers[1 if busy_first else 0]
        assert idle.result() is not None
        other = pullers[0 if busy_first else 1]
        assert other.batch is None
        scheduler.enqueue([entry()])
        assert other.result() is not None, "the busy one is better than none"


def test_an_interrupted_sleeper_returns_no_batch_and_the_others_sleep_on() -> None:
    scheduler = Scheduler(BatchPolicy(8))
    one, other = Puller(scheduler), Puller(scheduler)
    one.interrupt()
    assert one.result() is None
    scheduler.enqueue([entry()])
    assert other.result() is not None


def test_a_spurious_interrupt_sleeps_again() -> None:
    scheduler = Scheduler(BatchPolicy(8))
    puller = Puller(scheduler)
    scheduler.interrupt(puller.sleeper)
    puller.asleep()
    scheduler.enqueue([entry()])
    assert puller.result() is not None


def test_an_interrupted_sleeper_passes_its_wake_up_on() -> None:
    now_ns = 0
    scheduler = Scheduler(BatchPolicy(8, (), 3_600_000_000_000), clock=lambda: now_ns)
    other, timed = Puller(scheduler), Puller(scheduler)
    scheduler.enqueue([entry()])
    timed.asleep()  # now with an alarm, which the other need not set
    assert scheduler._timed_sleepers == 1
    timed.interrupt()
    assert timed.result() is None
    other.asleep()  # polled again: it was woken to keep the timeout
    assert scheduler._timed_sleepers == 1
    now_ns = 3_600_000_000_000
    scheduler.interrupt(other.sleeper)
    assert other.result() is not None


class Held:
    """A scheduler on which a brief batch of `rows` runs, with a sleeping instance beside it."""

    def __init__(self, rows: int) -> None:
        self.now_ns = 0
        self.guards: list[Callable[[], None]] = []
        delay = lambda _seconds, callback: self.guards.append(callback)  # noqa: E731
        self.scheduler = Scheduler(BatchPolicy(64), clock=lambda: self.now_ns, delay=delay)
        self.other = Puller(self.scheduler)
        self.scheduler.hold(rows)

    def queue(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.enqueue([entry()])

    @property
    def wakes(self) -> bool:
        """True if the other instance has been woken."""
        return not sleepers(self.scheduler)


def test_fewer_requests_than_run_in_a_brief_batch_wait_for_its_end() -> None:
    held = Held(_HOLD_ROWS)
    held.queue(_HOLD_ROWS - 1)
    assert not held.wakes
    held.queue(1)
    assert held.other.result() is not None, "as many as run are worth a batch at the same time"
    held = Held(_HOLD_ROWS - 1)
    held.queue(1)
    assert held.other.result() is not None, "a small batch holds none back"


def test_requests_that_wait_for_a_brief_batch_are_pulled_if_its_thread_does_not() -> None:
    held = Held(_HOLD_ROWS)
    held.queue(3)
    held.scheduler.end_hold(_HOLD_ROWS, wake=False)
    assert not held.wakes
    assert held.scheduler.poll(0), "the thread of the batch pulls them"
    held.queue(2)
    assert held.other.result() is not None

    held = Held(_HOLD_ROWS)
    held.queue(3)
    held.scheduler.end_hold(_HOLD_ROWS, wake=True)
    batch = held.other.result()
    assert batch is not None
    assert batch.rows == 3


def test_a_brief_batch_that_takes_long_holds_nothing_back() -> None:
    held = Held(_HOLD_ROWS)
    held.queue(2)
    assert len(held.guards) == 1, "one timer for any number of requests"
    held.now_ns = _HOLD_NS
    held.guards.pop()()
    assert held.other.result() is not None
