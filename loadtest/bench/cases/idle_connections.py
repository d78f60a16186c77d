"""Whether callers who only hold a connection open cost the others anything."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loadtest.bench.inprocess import Oracle
from loadtest.bench.results import CaseResult, Comparison, Figure, at_most
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread, ratios
from loadtest.bench.wrk import Load, LoadFailed
from loadtest.protocol import binary_request
from loadtest.servers import HOST, Running

MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class IdleConnections:
    """p99 of a busy few, with and without a thousand idle ones beside them.

    Attributes:
        name: as `--only` takes it.
        connections: the busy ones, one request in flight on each.
        idle: connections that were answered once and then rest.
    """

    name: str
    connections: int
    idle: int

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"p99 of tiny on {self.connections} connections, with and without {self.idle:,} idle connections"

    def planned_s(self, bench: Bench) -> float:
        """Two contenders a round."""
        return 2.0 * self._rounds(bench) * bench.seconds(3)

    def run(self, bench: Bench) -> CaseResult:
        """Measure in interleaved rounds on one server."""
        oracle = Oracle(bench.model_path(MODEL))
        inputs = oracle.example(rows=1)
        request = binary_request(MODEL, inputs)
        load = Load((request,), self.connections, bench.seconds(3), cpus=bench.cores.client)

        def beside_idle(server: Running) -> float:
            with idle_connections(server.port, self.idle):
                return bench.measure(server, load).p99_us

        with bench.headrace(MODEL, cpus=bench.cores.server) as server:
            bench.check(server, request, oracle, inputs)
            bench.warm_up(server, load)
            p99s = interleave(
                {"with": lambda: beside_idle(server), "without": lambda: bench.measure(server, load).p99_us},
                self._rounds(bench),
            )
        alone, beside = Spread.of(p99s["without"]), Spread.of(p99s["with"])
        # What rounds without idle connections differ by among themselves is noise, and no effect.
        noise = at_most(alone.high / alone.median)
        compared = ratios([beside.median], [alone.median])
        return CaseResult(
            self.name,
            self.title,
            (Figure("no idle connections", "p99 us", alone), Figure(f"{self.idle:,} idle", "p99 us", beside)),
            (Comparison("p99 with / without, medians", "", compared, noise),),
            ("the target is the noise: the slowest round without idle connections over their median",),
        )

    def _rounds(self, bench: Bench) -> int:
        return bench.rounds * 2


@contextmanager
def idle_connections(port: int, count: int) -> Iterator[None]:
    """Hold connections open, each of which was answered once.

    Raises:
        LoadFailed: the server had closed some by the end, so that the sample did not measure what it says.
    """
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.create_connection((HOST, port), timeout=10.0)
            held.append(connection)
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: bench\r\n\r\n")
            if b" 200 " not in connection.recv(4096):
                raise LoadFailed("the server refused a connection that was to be idle")
        yield
        still_open = sum(_is_open(connection) for connection in held)
        if still_open < count:
            raise LoadFailed(
                f"of {count} idle connections the server kept {still_open}; is its keep-alive time too short?"
            )
    finally:
        for connection in held:
            connection.close()


def _is_open(connection: socket.socket) -> bool:
    """Open and silent; an empty read is the other side's end."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
