"""A process ends while connections move between the engine process and front ends: only its connections are lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_front_end_scaling import Scaled, http_client, scaled_server
from tests.support.processes import children, words
from tests.support.waiting import until_async

CONNECTIONS = 32


@pytest.fixture
def scaled(tmp_path: Path) -> Iterator[Scaled]:
    with scaled_server(tmp_path, "--hang-timeout-s", "3", "--drain-timeout-s", "3") as server:
        yield server


def processes(scaled: Scaled) -> dict[str, int]:
    """Live children of the supervisor by name, such as "front end 1"."""
    titles = {child: words(child) for child in children(scaled.server.process.pid)}
    return {title[0].removeprefix("headrace: "): child for child, title in titles.items() if title}


async def lives(port: int, numbers: Iterator[int], is_over: asyncio.Event, lost: list[Exception]) -> None:
    """Send requests until the end, on another connection after a lost one; wrong answers are raised."""
    while not is_over.is_set():
        try:
            await http_client(port, numbers, is_over.is_set)
        except (OSError, EOFError, asyncio.IncompleteReadError) as error:
            lost.append(error)
            await asyncio.sleep(0.02)
        except AssertionError as error:
            if "503" not in str(error):
                raise
            lost.append(error)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", ["engine", "front end 1", "front end 2"])
def test_a_process_ends_during_moves(scaled: Scaled, victim: str, signal_: signal.Signals) -> None:
    async def check() -> None:
        numbers, is_over, lost = iter(range(1 << 40)), asyncio.Event(), list[Exception]()
        clients = [asyncio.ensure_future(lives(scaled.server.port, numbers, is_over, lost)) for _ in range(CONNECTIONS)]
        await scaled.set(2)
        killed = processes(scaled)[victim]
        scaled.want(0)  # they give up their connections
        os.kill(killed, signal_)
        await until_async(lambda: processes(scaled).get(victim) != killed)
        scaled.want(2)
        await until_async(lambda: scaled.running() == 2 and "engine" in processes(scaled))
        before = next(numbers)
        await until_async(lambda: next(numbers) > before + 3 * CONNECTIONS or any(each.done() for each in clients))
        is_over.set()
        await asyncio.gather(*clients)

    asyncio.run(check())
    assert "Traceback" not in scaled.server.text
