"""Round trips of a small message between two uvloop processes over a Unix socket: the least that a second process can add.

`python -m loadtest.front_ends.ping_pong FD` is the second process: it sends back what it receives on an inherited socket.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time

import uvloop

from loadtest.servers import ROOT, pinned

_MESSAGE = bytes(256)


class _Echo(asyncio.Protocol):
    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended = ended
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are of no common class

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class _Caller(asyncio.Protocol):
    def __init__(self, seconds: float) -> None:
        self.times_us: list[float] = []
        self.ended = asyncio.get_running_loop().create_future()
        self._seconds = seconds
        self._end_s = 0.0
        self._sent_s = 0.0
        self._received = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._received < len(_MESSAGE):
            return
        now_s = time.perf_counter()
        if self._end_s:
            self.times_us.append((now_s - self._sent_s) * 1e6)
        else:  # the other process has started
            self._end_s = now_s + self._seconds
        if now_s < self._end_s:
            self._send()
        else:
            assert self._transport is not None
            self._transport.close()
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the other process has ended"))

    def _send(self) -> None:
        assert self._transport is not None
        self._received = 0
        self._sent_s = time.perf_counter()
        self._transport.write(_MESSAGE)


def median_us(seconds: float, cores: tuple[int, ...]) -> float:
    """Return the median round trip in microseconds.

    Args:
        seconds: length of the sample.
        cores: of both processes.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [*pinned(cores), sys.executable, "-m", "loadtest.front_ends.ping_pong", str(there.fileno())]
    with there, subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()]):
        there.close()
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, cores)
            return statistics.median(uvloop.run(_call(here, seconds)))
        finally:
            os.sched_setaffinity(0, before)


async def _call(sock: socket.socket, seconds: float) -> list[float]:
    loop = asyncio.get_running_loop()
    _, caller = await loop.connect_accepted_socket(lambda: _Caller(seconds), sock)
    await caller.ended
    return caller.times_us


async def _echo(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    await loop.connect_accepted_socket(lambda: _Echo(ended), sock)
    await ended


if __name__ == "__main__":
    uvloop.run(_echo(socket.socket(fileno=int(sys.argv[1]))))
