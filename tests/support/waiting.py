"""Wait for a condition of another thread or process; the limit detects a hang and is no measure of speed.

A test that claims that nothing more happens waits for more turns of the loop that would do it: `record_calls` and
`more`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import pytest

T = TypeVar("T")


def on_threads(act: Callable[[T], object], arguments: Iterable[T]) -> None:
    """Call a function with each argument on a thread of its own, and wait for all of them; raises the first error."""
    items = list(arguments)
    with ThreadPoolExecutor(len(items)) as pool:
        list(pool.map(act, items))


class HasEnded(Protocol):
    """A future or a call."""

    def done(self) -> bool:
        """True once it has ended."""


def until(
    condition: Callable[[], object], timeout_s: float = 60.0, *, before: HasEnded | None = None, pause_s: float = 0.01
) -> None:
    """Wait until a condition is true.

    Args:
        condition: what is waited for.
        timeout_s: the limit.
        before: a call that must not have ended by then.
        pause_s: time between two calls of the condition, in seconds; more for one that sends large requests.

    Raises:
        AssertionError: the limit was reached, or `before` ended first.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s"
        assert before is None or not before.done(), "it came true too late"
        time.sleep(pause_s)


async def until_async(condition: Callable[[], Awaitable[object] | object], timeout_s: float = 60.0) -> None:
    """Wait on an event loop until a condition, which may be awaitable, is true; see `until`."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if await result if isinstance(result, Awaitable) else result:
            return
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s"
        await asyncio.sleep(0.005)


def at_rest(read: Callable[[], T], readings: int = 10, timeout_s: float = 60.0) -> T:
    """Wait until a value changes no more, where no state says so: bytes in the buffers of the system, memory of a process.

    Args:
        read: called every 20 ms.
        readings: equal ones in a row.
        timeout_s: see `until`.

    Returns:
        The value.
    """
    deadline, last, equal = time.monotonic() + timeout_s, read(), 1
    while equal < readings:
        assert time.monotonic() < deadline, f"it still changes after {timeout_s:g} s: {last}"
        time.sleep(0.02)
        value = read()
        equal, last = (equal + 1 if value == last else 1), value
    return last


def record_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple[object, ...]]:
    """Record the calls of a function or method until the end of the test, to wait for the next ones.

    Args:
        monkeypatch: of the test.
        owner: module, class or object that has it.
        name: of the attribute.

    Returns:
        The positional arguments of each call that has ended.
    """
    original: Callable[..., object] = getattr(owner, name)
    calls: list[tuple[object, ...]] = []

    def recorded(*args: object, **options: object) -> object:
        try:
            return original(*args, **options)
        finally:
            calls.append(args)

    monkeypatch.setattr(owner, name, recorded)
    return calls


def more(calls: Sequence[object], count: int) -> Callable[[], bool]:
    """Return a condition that becomes true with that many more calls; see `record_calls`."""
    total = len(calls) + count
    return lambda: len(calls) >= total
