"""Closed and open loops: numbers of requests, due times, latencies that include a stall of the server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import numpy as np
import pytest
from headrace_bench.http_pool import HttpPool
from headrace_bench.loads import (
    ClosedLoop,
    DueTimer,
    KernelTimer,
    Load,
    OpenLoop,
    Record,
    constant_times,
    open_timer,
    poisson_times,
)
from headrace_bench.pool import NO_CONNECTION, Address, PoolOptions

from tests.support.stub_server import Talk, listening, read_request
from tests.support.waiting import until_async

OK_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
REQUESTS = [b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\n%d" % number for number in range(4)]


def run(talk: Talk, load: Load, connections: int, stop_after: int = 0) -> Record:
    """Run a load against a server to its end, or stop it once it has so many responses."""

    async def task() -> Record:
        async with listening(talk) as port:
            load.pool = HttpPool(REQUESTS, PoolOptions(Address("127.0.0.1", port), connections, 60.0, load.finished))
            running = asyncio.create_task(load.run())
            if stop_after:
                await until_async(lambda: len(load.record) >= stop_after)
                load.stop()
            await running
            load.pool.close()
        return load.record

    return asyncio.run(task())


class Server:
    """Answers at once, the first request only after `stall_s` and with `together` requests in flight; counts requests by body."""

    def __init__(self, stall_s: float = 0.0, together: int = 1) -> None:
        self.stall_s = stall_s
        self.together = together
        self.reached = asyncio.Event()
        self.bodies: Counter[bytes] = Counter()
        self.released_s = 0.0
        self.in_flight = self.most_in_flight = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = await read_request(reader)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if self.in_flight >= self.together:
                self.reached.set()
            is_first = not self.bodies
            self.bodies[body] += 1
            await asyncio.sleep(self.stall_s if is_first else 0.0005)
            if is_first:
                await self.reached.wait()
                self.released_s = time.monotonic()
            self.in_flight -= 1
            writer.write(OK_ANSWER)


def test_a_stall_is_part_of_the_latency_of_all_requests_that_were_due_meanwhile() -> None:
    """Coordinated omission: with one connection the later requests cannot even be sent while the first one is stalled."""
    server = Server(stall_s=0.4)
    start_s = time.monotonic() + 0.05
    due_s = start_s + np.arange(20) * 0.01
    record = run(server.talk, OpenLoop(4, 0, due_s), connections=1)
    assert list(record.due_s) == due_s.tolist()  # nothing is skipped
    assert server.bodies.total() == 20
    held = [n for n, due in enumerate(record.due_s) if due < server.released_s]
    assert len(held) == 20
    for number in held:
        assert record.done_s[number] - record.due_s[number] >= server.released_s - record.due_s[number]
    # The latency from sending would hide the stall.
    assert all(record.sent_s[number] >= server.released_s for number in held[1:])


def test_an_open_loop_sends_on_while_answers_are_missing() -> None:
    server = Server(together=2)
    record = run(server.talk, OpenLoop(4, 0, time.monotonic() + np.arange(20) * 0.005), connections=20)
    assert server.most_in_flight >= 2
    assert len(record) == 20
    assert record.errors == 0


def test_a_closed_loop_has_as_many_requests_in_flight_as_callers() -> None:
    server = Server(together=3)
    record = run(server.talk, ClosedLoop(4, 0, time.monotonic() + 3600, 3), connections=3, stop_after=12)
    assert server.most_in_flight == 3
    assert len(record) == server.bodies.total() > 3
    # Requests are sent in turn.
    counts = [server.bodies[b"%d" % number] for number in range(4)]
    assert max(counts) - min(counts) <= 1


def test_requests_begin_at_the_given_number() -> None:
    server = Server()
    run(server.talk, OpenLoop(4, 6, np.array([time.monotonic()] * 3)), connections=1)
    assert server.bodies == {b"2": 1, b"3": 1, b"0": 1}


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_load_can_be_stopped(loop: str) -> None:
    server = Server()
    far_s = time.monotonic() + 3600
    load: Load = ClosedLoop(4, 0, far_s, 2)
    if loop == "open":
        load = OpenLoop(4, 0, np.concatenate([np.full(5, time.monotonic()), [far_s]]))
    record = run(server.talk, load, connections=2, stop_after=5)
    assert load.end_s < far_s
    assert len(record) >= 5


def test_a_server_that_is_gone_is_an_error_of_each_request() -> None:
    async def task() -> Record:
        async with listening(Server().talk) as port:
            pass
        load = OpenLoop(4, 0, np.full(3, time.monotonic()))
        load.pool = HttpPool(REQUESTS, PoolOptions(Address("127.0.0.1", port), 2, 60.0, load.finished))
        await load.run()
        load.pool.close()
        return load.record

    record = asyncio.run(task())
    assert record.statuses == ["", NO_CONNECTION]
    assert list(record.codes) == [1, 1, 1]
    assert "refused" in record.examples[NO_CONNECTION].lower() or "Connect" in record.examples[NO_CONNECTION]


@pytest.mark.parametrize("kind", [DueTimer, KernelTimer])
def test_timers_fire_when_due_and_not_before(kind: type[DueTimer]) -> None:
    async def task() -> list[tuple[float, float]]:
        fired: list[tuple[float, float]] = []
        done = asyncio.Event()
        due = [time.monotonic() + after for after in (0.02, 0.0205, 0.04)]

        def fire() -> None:
            fired.append((due[len(fired)], time.monotonic()))
            if len(fired) == len(due):
                done.set()
            else:
                timer.set(due[len(fired)])

        try:
            timer = kind(fire)
        except (OSError, AttributeError):
            pytest.skip("this system has no timerfd")
        timer.set(due[0])
        await done.wait()
        timer.close()
        return fired

    fired = asyncio.run(task())
    assert len(fired) == 3
    assert all(at >= due for due, at in fired)


async def test_the_best_timer_is_chosen() -> None:
    timer = open_timer(lambda: None)
    assert isinstance(timer, DueTimer)
    timer.close()


def test_arrivals() -> None:
    assert constant_times(10.0, 0.5).tolist() == [0.0, 0.1, 0.2, pytest.approx(0.3), 0.4]
    times = poisson_times(1000.0, 20.0, np.random.default_rng(1))
    assert abs(len(times) - 20_000) < 6 * np.sqrt(20_000)
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert abs(gaps.std() / gaps.mean() - 1) < 0.1  # exponential
    assert times[-1] < 20.0
