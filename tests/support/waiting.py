"""Wait for a condition of another thread or process; the limit detects a hang and is no measure of speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class HasEnded(Protocol):
    """A future or a call."""

    def done(self) -> bool:
        """True once it has ended."""


def until(condition: Callable[[], object], timeout_s: float = 60.0, *, before: HasEnded | None = None) -> None:
    """Wait until a condition is true.

    Args:
        condition: called every 10 ms.
        timeout_s: the limit.
        before: a call that must not have ended by then.

    Raises:
        AssertionError: the limit was reached, or `before` ended first.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s"
        assert before is None or not before.done(), "it came true too late"
        time.sleep(0.01)
