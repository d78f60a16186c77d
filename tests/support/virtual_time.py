"""asyncio in virtual time: timers fire in their order without a wait, so that load on the machine changes no outcome."""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from headrace.core.clock import NS_PER_S, monotonic_ns


class _Selector(selectors.DefaultSelector):
    """Advances the time instead of waiting; without any timer it waits for another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else 0)
        if timeout and not events:
            self.now_s += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when no callback is ready.

    For code that runs on the loop alone: the time does not wait for sockets and threads.
    """

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def time_ns(self) -> int:
        """`time` in nanoseconds; see `headrace.core.clock.Clock`."""
        return round(self._clock.now_s * NS_PER_S)


def advance_timers(seconds: float) -> None:
    """Make the running event loop's timers of the next seconds due at once.

    A test sets timeouts of many seconds, which no pause of the process uses up, and lets them pass when its state is reached.
    Headrace's clock keeps the real time.
    """
    loop = asyncio.get_running_loop()
    ahead_s = loop.time() - time.monotonic() + seconds
    loop.time = lambda: time.monotonic() + ahead_s  # type: ignore[method-assign]


def run_in_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run an async test; the time of its loop is `monotonic_ns` of all modules of Headrace.

    Raises:
        AssertionError: the test caused an error that the loop would only log.
    """
    errors: list[dict[str, Any]] = []
    modules = [module for name, module in sys.modules.items() if name.startswith("headrace.")]
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.MonkeyPatch.context() as patch:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for module in modules:
            if getattr(module, "monotonic_ns", None) is monotonic_ns:
                patch.setattr(module, "monotonic_ns", loop.time_ns)
        loop.set_exception_handler(lambda _, context: errors.append(context))
        runner.run(main())
    assert not errors, errors


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Decorator of an async test without arguments: `run_in_virtual_time`."""

    def run() -> None:
        run_in_virtual_time(test)

    run.__name__ = test.__name__
    return run
