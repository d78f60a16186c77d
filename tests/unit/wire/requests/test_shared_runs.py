"""Runs that callers share: order, freshness, errors, cancelled callers."""

from __future__ import annotations

import asyncio
import threading

import pytest
from headrace.wire.requests.shared_runs import SharedRuns


class Gate:
    """A function that waits on its thread until it is opened, and returns the number of its call."""

    def __init__(self) -> None:
        self.open, self.called = threading.Event(), threading.Event()
        self.keys: list[str] = []
        self.threads: set[int] = set()

    def __call__(self, key: str) -> int:
        self.keys.append(key)
        self.threads.add(threading.get_ident())
        number = len(self.keys)
        self.called.set()
        assert self.open.wait(60)
        return number


async def test_callers_share_the_next_run_and_none_gets_an_earlier_one() -> None:
    gate = Gate()
    runs = SharedRuns(gate)
    first = asyncio.create_task(runs.result())
    assert await asyncio.to_thread(gate.called.wait, 10)
    later = [asyncio.create_task(runs.result()) for _ in range(100)]
    await asyncio.sleep(0.01)
    assert gate.keys == [""], "one run at a time"
    gate.open.set()
    assert await first == 1
    assert set(await asyncio.gather(*later)) == {2}
    assert await runs.result() == 3
    assert threading.get_ident() not in gate.threads


async def test_a_key_has_a_run_of_its_own() -> None:
    gate = Gate()
    gate.open.set()
    runs = SharedRuns(gate)
    await asyncio.gather(*(runs.result(key) for key in ("a", "b", "a", "b")))
    assert sorted(gate.keys) == ["a", "b"]


async def test_errors_and_cancelled_callers_end_no_other_run() -> None:
    gate = Gate()
    runs = SharedRuns(gate)
    cancelled, other = asyncio.create_task(runs.result()), asyncio.create_task(runs.result())
    await asyncio.sleep(0.01)
    cancelled.cancel()
    gate.open.set()
    assert await other == 1
    failing: SharedRuns[int] = SharedRuns(int)
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            await failing.result("no number")
    assert await failing.result("7") == 7
