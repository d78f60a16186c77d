"""Latency of one caller: through one process, through a front end, and of a ping-pong between two processes on uvloop.

The difference between a server with one front end and one without is compared with the ping-pong: the least that a second process
on this machine adds. Rounds alternate, so that what slows the machine slows all three.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import uvloop
from headrace.core.clock import NS_PER_US

from loadtest.bench.spread import Spread, differences
from loadtest.protocol import binary_request, wire_bytes
from loadtest.servers import HOST, ROOT, headrace, pinned, running

_TIMEOUT_S = 30.0
_MODEL, _INPUTS = "tiny", {"input": np.arange(16, dtype=np.float32).reshape(1, 16)}


class _Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        asyncio.get_running_loop().stop()


class _Pinger(asyncio.Protocol):
    """Sends a message, waits for all of its bytes, and sends the next."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._received_bytes = 0
        self._begun_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def close(self) -> None:
        """Close the stream."""
        self._transport.close()

    def start(self, count: int) -> asyncio.Future[list[int]]:
        """Begin a round of `count` round trips; returns their times in nanoseconds."""
        self._count, self._times_ns = count, list[int]()
        self._done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._send()
        return self._done

    def _send(self) -> None:
        self._begun_ns = time.monotonic_ns()
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes < len(self._message):
            return
        self._received_bytes = 0
        self._times_ns.append(time.monotonic_ns() - self._begun_ns)
        if len(self._times_ns) < self._count:
            self._send()
        else:
            self._done.set_result(self._times_ns)


def echo(descriptor: int) -> None:
    """Run the second process of the ping-pong, until the first closes the stream."""
    loop = uvloop.new_event_loop()
    sock = socket.socket(fileno=descriptor)
    loop.run_until_complete(loop.create_unix_connection(_Echo, sock=sock))
    loop.run_forever()
    loop.close()


class PingPong:
    """Two processes on uvloop that send a message to and fro over a Unix stream.

    Args:
        message_bytes: size of the message.
        cpus: cores of the second process; None for all.
    """

    def __init__(self, message_bytes: int, cpus: tuple[int, ...] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [*pinned(cpus), sys.executable, "-m", "loadtest.bench.one_caller", str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._loop = uvloop.new_event_loop()
        self._pinger = _Pinger(bytes(message_bytes))
        self._loop.run_until_complete(self._loop.create_unix_connection(lambda: self._pinger, sock=ours))

    def round_trips(self, count: int) -> list[int]:
        """Return the times of `count` round trips in nanoseconds."""
        return self._loop.run_until_complete(asyncio.wait_for(self._round(count), _TIMEOUT_S))

    async def _round(self, count: int) -> list[int]:
        return await self._pinger.start(count)

    def close(self) -> None:
        """Close the stream and wait for the end of the second process."""
        self._pinger.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        self._process.wait(_TIMEOUT_S)


class HttpCaller:
    """One connection on which requests follow each other.

    Args:
        port: of the server.
        request: bytes of a whole request.
    """

    def __init__(self, port: int, request: bytes) -> None:
        self._socket = socket.create_connection((HOST, port), timeout=_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request

    def round_trips(self, count: int) -> list[int]:
        """Return the times of `count` requests in nanoseconds; raises RuntimeError for a response that is no success."""
        times_ns: list[int] = []
        for _ in range(count):
            begun_ns = time.monotonic_ns()
            self._socket.sendall(self._request)
            response = self._socket.recv(1 << 16)
            while len(response) < _response_bytes(response):
                response += self._socket.recv(1 << 16)
            times_ns.append(time.monotonic_ns() - begun_ns)
            if not response.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the server answered {response[:500]!r}")
        return times_ns

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _response_bytes(response: bytes) -> int:
    """Return the size of a response by its header; one more than has arrived while that is incomplete."""
    if not response:
        raise RuntimeError("the server has closed the connection")
    head, end, _ = response.partition(b"\r\n\r\n")
    if not end:
        return len(response) + 1
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(head) + len(end) + int(value)
    return len(head) + len(end)


@dataclass(frozen=True, slots=True)
class CallerLatencies:
    """Medians of the rounds, in microseconds.

    Attributes:
        one_process, front_end, ping_pong: p50 of each round.
    """

    one_process: list[float]
    front_end: list[float]
    ping_pong: list[float]

    @property
    def added(self) -> Spread:
        """Latency that the second process adds, round by round."""
        return differences(self.front_end, self.one_process)

    @property
    def beyond_ping_pong(self) -> Spread:
        """The same over that of the ping-pong."""
        return differences([a - b for a, b in zip(self.front_end, self.one_process, strict=True)], self.ping_pong)


def measure_one_caller(
    repository: Path, rounds: int, requests: int, log_folder: Path, cpus: tuple[int, ...] | None = None
) -> CallerLatencies:
    """Measure all three in turn, with the model `tiny`.

    Args:
        repository: model repository.
        rounds: number of rounds.
        requests: round trips of each in a round.
        log_folder: folder for the logs of the servers.
        cpus: cores of the servers and of the second process of the ping-pong; None for all.
    """
    request = binary_request(_MODEL, _INPUTS)
    results: list[list[float]] = [[], [], []]
    with ExitStack() as stack:
        callers: list[Callable[[int], list[int]]] = []
        for front_ends in (0, 1):
            name = f"headrace {front_ends} front ends"
            options = ("--front-ends", str(front_ends))
            command = headrace(repository, name=name, models=(_MODEL,), options=options, cpus=cpus)
            server = stack.enter_context(running(command, log_folder))
            caller = HttpCaller(server.port, wire_bytes(request, server.port))
            stack.callback(caller.close)
            callers.append(caller.round_trips)
        ping_pong = PingPong(len(request.body), cpus)
        stack.callback(ping_pong.close)
        callers.append(ping_pong.round_trips)
        for caller_ in callers:
            caller_(requests)
        for _ in range(rounds):
            for trips, medians in zip(callers, results, strict=True):
                medians.append(float(np.median(trips(requests))) / NS_PER_US)
    return CallerLatencies(*results)


if __name__ == "__main__":
    echo(int(sys.argv[1]))
