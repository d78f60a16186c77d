"""Clock of the data plane: monotonic, in nanoseconds, replaceable by a virtual one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Clock = Callable[[], int]
T = TypeVar("T")

monotonic_ns: Clock = time.monotonic_ns

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

# Time between two pauses of a thread. The event loop waits so long for the interpreter after each call that released it.
_STEP_NS = 1_500_000
REPORT_STEP_NS = 50_000
"""Steps of reports about all models: with pauses they take two to three times as long, and delay requests less."""
# The shortest wait of Linux is about 0.06 ms longer. After a wait of 0 the thread would have the interpreter lock again before
# another thread wakes.
_PAUSE_S = 20e-6
_never_released = threading.Lock()
_never_released.acquire()
_last_pause = threading.local()


def allow_pauses(step_ns: int = _STEP_NS) -> None:
    """Make `pause` wait on this thread, once in each step of that many nanoseconds."""
    _last_pause.step_ns = step_ns


def pause() -> None:
    """Let other threads run between two steps of a long computation in Python, if the last pause is more than a step ago.

    A no-op on threads that have not called `allow_pauses`, such as the event loop's.
    """
    step_ns = getattr(_last_pause, "step_ns", 0)
    if step_ns and time.monotonic_ns() - getattr(_last_pause, "ended_ns", 0) >= step_ns:
        _never_released.acquire(timeout=_PAUSE_S)
        _last_pause.ended_ns = time.monotonic_ns()


def stepwise(items: Iterable[T]) -> Iterator[T]:
    """Yield items, with a `pause` between two: there may be thousands of models."""
    for item in items:
        yield item
        pause()
