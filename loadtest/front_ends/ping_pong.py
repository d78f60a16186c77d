"""Round trips of a small message between two uvloop processes over a Unix socket: the least that a second process can add."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import time

import uvloop

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
        self._end_s = time.perf_counter() + seconds
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
        self.times_us.append((now_s - self._sent_s) * 1e6)
        if now_s < self._end_s:
            self._send()
        else:
            assert self._transport is not None
            self._transport.close()
            self.ended.set_result(None)

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
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(here, there, cores))
    process.start()
    there.close()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
        return statistics.median(uvloop.run(_call(here, seconds)))
    finally:
        os.sched_setaffinity(0, before)
        process.join(5)


async def _call(sock: socket.socket, seconds: float) -> list[float]:
    loop = asyncio.get_running_loop()
    _, caller = await loop.connect_accepted_socket(lambda: _Caller(seconds), sock)
    await caller.ended
    return caller.times_us


def _serve(other: socket.socket, sock: socket.socket, cores: tuple[int, ...]) -> None:
    other.close()
    os.sched_setaffinity(0, cores)
    uvloop.run(_echo(sock))


async def _echo(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    await loop.connect_accepted_socket(lambda: _Echo(ended), sock)
    await ended
