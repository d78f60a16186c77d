"""A TCP server in the event loop of a test, and the outcomes of a pool of `headrace bench`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from headrace_bench.pool import Address, Answer, Pool, PoolOptions

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(talk: Talk) -> AsyncIterator[int]:
    """A server on a free port, which the `with` gives."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Read one HTTP request with a content-length; its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return await reader.readexactly(int(lengths[0].partition(b":")[2]))


@dataclass
class Outcome:
    index: int
    due_s: float
    sent_s: float
    status: str
    text: str


@dataclass
class Outcomes:
    """Receives the outcomes of a pool."""

    queue: asyncio.Queue[Outcome] = field(default_factory=asyncio.Queue)

    def finished(self, index: int, due_s: float, sent_s: float, status: str, text: str) -> None:
        self.queue.put_nowait(Outcome(index, due_s, sent_s, status, text))

    async def take(self, count: int) -> list[Outcome]:
        """The next outcomes, by number of the request."""
        return sorted([await self.queue.get() for _ in range(count)], key=lambda each: each.index)


def outcomes_of(
    talk: Talk,
    open_pool: Callable[[PoolOptions], Pool],
    count: int,
    *,
    connections: int = 1,
    check: Callable[[int, Answer], bool] | None = None,
    timeout_s: float = 60.0,
) -> list[Outcome]:
    """Outcomes of so many requests of a pool, all submitted at once."""

    async def run() -> list[Outcome]:
        outcomes = Outcomes()
        async with listening(talk) as port:
            address = Address("127.0.0.1", port)
            pool = open_pool(PoolOptions(address, connections, timeout_s, outcomes.finished, check))
            for index in range(count):
                pool.submit(index, time.monotonic())
            result = await outcomes.take(count)
            pool.close()
        return result

    return asyncio.run(run())
