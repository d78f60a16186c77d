"""Long reports for many callers: one run at a time on a thread, in steps, shared by all callers that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.core.clock import REPORT_STEP_NS, allow_pauses

Result = TypeVar("Result")


class SharedRuns(Generic[Result]):
    """Runs of a function whose time grows with the number of models, such as the statistics of all models.

    At most one run is in progress. Callers that arrive during it share the next one with the same key. So a result is never
    older than its request, and any number of callers uses one thread. The function calls `headrace.core.clock.pause` between its
    steps.

    Ownership: the event loop.

    Args:
        function: takes the key; runs on a thread of the default executor.
    """

    def __init__(self, function: Callable[[str], Result]) -> None:
        self._function = function
        self._waiting: dict[str, asyncio.Task[Result]] = {}
        self._last: asyncio.Task[Result] | None = None

    async def result(self, key: str = "") -> Result:
        """Return the result of a run that begins after this call; raises the errors of the function.

        Args:
            key: argument of the function. The caller bounds the number of different keys.
        """
        task = self._waiting.get(key)
        if task is None:
            task = self._waiting[key] = self._last = asyncio.create_task(self._run(key, self._last))
        return await asyncio.shield(task)  # the cancellation of one caller must not cancel the run of the others

    async def _run(self, key: str, previous: asyncio.Task[Result] | None) -> Result:
        if previous is not None:
            await asyncio.wait({previous})
        del previous  # and its result, which may be large
        del self._waiting[key]
        try:
            return await asyncio.to_thread(_call, self._function, key)
        finally:
            if self._last is asyncio.current_task():
                self._last = None


def _call(function: Callable[[str], Result], key: str) -> Result:
    allow_pauses(REPORT_STEP_NS)
    return function(key)
