"""Latency of one caller: through one process, through a front end, and of a ping-pong between two processes on uvloop.

The difference between a server with one front end and one without is compared with the ping-pong: the least that a second process
on this machine adds. Rounds alternate, so that what slows the machine slows all three.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from headrace.core.clock import NS_PER_US

from loadtest.bench.spread import Spread, differences
from loadtest.front_ends.ping_pong import median_us
from loadtest.protocol import binary_request, wire_bytes
from loadtest.servers import HOST, headrace, running

_TIMEOUT_S = 30.0
_PING_PONG_S = 0.1
_MODEL, _INPUTS = "tiny", {"input": np.arange(16, dtype=np.float32).reshape(1, 16)}


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
        for caller_ in callers:
            caller_(requests)
        for _ in range(rounds):
            for trips, medians in zip(callers, results[:2], strict=True):
                medians.append(float(np.median(trips(requests))) / NS_PER_US)
            results[2].append(median_us(_PING_PONG_S, cpus or tuple(os.sched_getaffinity(0))))
    return CallerLatencies(*results)
