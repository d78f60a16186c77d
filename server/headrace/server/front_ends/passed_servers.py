"""Servers of one process for the connections that the supervisor accepts, and moves between processes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.server.front_ends.acceptor import Acceptor
from headrace.server.front_ends.counter_array import CounterArray
from headrace.server.front_ends.scaling import LOOK_S
from headrace.server.listen import GrpcListener, UvicornServer
from headrace.wire.accept import PassedConnections
from headrace.wire.grpc.server import GrpcServer
from headrace.wire.http.reserved_connections import LimitedHttpProtocol

# Interval at which the supervisor learns which new connections are counted.
_COUNTED_S = 0.005
# Interval at which connections are looked at while they are given up: the first, its growth, and the longest. Timers run between
# the writes of a turn of the event loop and its reads: what has been answered is sent then, and the next request is still in the
# socket.
_FIRST_LOOK_S, _LOOK_GROWTH, _LONGEST_LOOK_S = 0.001, 1.2, 0.1
# Time in which connections are given up for further front ends; those that are busy for longer stay.
_SHARE_S = 10.0
# Counting busy connections takes at most one part in this of the time.
_COUNTING_COST = 200


class PassedHttpServer(UvicornServer):
    """uvicorn for connections that another process accepts. Ownership: the event loop.

    Attributes:
        connections: takes accepted sockets; exists once the server has opened.
        opened: set from then on.
    """

    connections: PassedConnections

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.opened = asyncio.Event()
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open for `connections.take`."""
        self.connections = self.open_passed()
        self.servers = [self.connections]  # type: ignore[list-item]
        self.started = True
        await self.on_tick(0)
        self.opened.set()

    async def main_loop(self) -> None:
        """Wait for `stop`, without a timer."""
        await self._stopping.wait()

    def stop(self) -> None:
        """Begin to drain."""
        self.should_exit = True
        self._stopping.set()


class PassedServers:
    """HTTP, metrics and gRPC of one process, for connections that the supervisor passes to it.

    Ownership: the event loop.

    Args:
        send: sends the supervisor a message with name, content and descriptors; False if it does not read.
        drain_timeout_s: maximum time in seconds for calls in flight after `drain`.
        counters: of this process.
    """

    def __init__(
        self,
        send: Callable[[str, object, Sequence[int]], bool],
        drain_timeout_s: float,
        counters: CounterArray,
    ) -> None:
        self._send, self._counters = send, counters
        self._drain_timeout_s = drain_timeout_s
        self._http: dict[str, PassedHttpServer] = {}
        self._grpc_server: GrpcServer | None = None
        self._grpc: GrpcListener | None = None
        self._takers: dict[str, PassedConnections] = {}
        self._acceptors: list[Acceptor] = []
        self._serving: list[asyncio.Future[None]] = []
        self._uncounted = 0
        self._is_draining = False
        self._kept, self._share_until_s = 0, 0.0
        self._looking: asyncio.TimerHandle | None = None
        self._counting: asyncio.TimerHandle | None = None

    async def open(
        self,
        http: Mapping[str, PassedHttpServer],
        grpc: GrpcServer | None,
        sockets: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Begin to serve; returns once `take` may be called.

        Args:
            http: servers of the ports "http" and "metrics".
            grpc: server of gRPC; None without gRPC.
            sockets: descriptors of listening sockets by port, for `accept`.
        """
        self._http |= http
        self._serving += [asyncio.ensure_future(server.serve()) for server in http.values()]
        if grpc is not None:
            self._grpc_server = grpc
            self._takers["grpc"] = grpc.open()
            self._grpc = GrpcListener(grpc, self._drain_timeout_s)
            self._serving.append(asyncio.ensure_future(self._grpc.serve()))
        for server in http.values():
            await server.opened.wait()
        self._takers |= {port: server.connections for port, server in http.items()}
        for port, descriptor in sockets.items():
            self._acceptors.append(Acceptor(socket.socket(fileno=descriptor), partial(self._take, port)))
        if self._is_draining:
            self.drain()

    async def wait(self) -> None:
        """Wait until all have drained."""
        await asyncio.gather(*self._serving)

    def accept(self, is_open: bool) -> None:
        """Accept connections by itself, or no more."""
        for acceptor in self._acceptors:
            if is_open:
                acceptor.resume()
            else:
                acceptor.pause()

    def _take(self, port: str, sock: socket.socket) -> bool:
        self._takers[port].take(sock)
        return True

    def take(self, port: str, descriptors: Sequence[int]) -> None:
        """Serve connections of a port; closes them if the process does not serve it now."""
        taker = self._takers.get(port)
        for descriptor in descriptors:
            sock = socket.socket(fileno=descriptor)
            if taker is None:
                sock.close()
            else:
                taker.take(sock)
        if not self._uncounted:
            asyncio.get_running_loop().call_later(_COUNTED_S, self._report_counted)
        self._uncounted += len(descriptors)

    def _report_counted(self) -> None:
        """Report connections to the supervisor that the counters have now, or that have ended before."""
        waiting = min(sum([taker.waiting for taker in self._takers.values()]), self._uncounted)
        if self._uncounted > waiting:
            self._send("counted", self._uncounted - waiting, ())
        self._uncounted = waiting
        if waiting:
            asyncio.get_running_loop().call_later(_COUNTED_S, self._report_counted)

    def count_busy(self) -> None:
        """Count the connections that are busy, from now on at each of the supervisor's looks or as often as costs little."""
        start_ns = monotonic_ns()
        busy = sum([not each.is_idle() for _, connections in self._connections() for each in connections])
        self._counters.busy = busy + (0 if self._grpc_server is None else self._grpc_server.running_calls)
        pause_s = max(LOOK_S, _COUNTING_COST * (monotonic_ns() - start_ns) / NS_PER_S)
        self._counting = asyncio.get_running_loop().call_later(pause_s, self.count_busy)

    def drain(self) -> None:
        """Take no new connections, and end those that exist after their requests."""
        self._is_draining = True
        if self._counting is not None:
            self._counting.cancel()
        self.keep()
        for acceptor in self._acceptors:
            acceptor.close()
        for server in self._http.values():
            if server.started:
                server.stop()
        if self._grpc is not None:
            self._grpc.stop()

    def force(self) -> None:
        """End all requests."""
        for server in self._http.values():
            server.force_exit = True
        if self._grpc is not None:
            self._grpc.stop(now=True)

    # --- Moves --------------------------------------------------------------------------------------------------------

    def give_up(self, kept: int = 0) -> None:
        """Give connections back to the supervisor, each as soon as it is between two requests, until `keep`.

        A connection of HTTP/1.1 moves with its descriptor; over TLS, where it cannot, it ends after its next answer. Clients of
        gRPC get GOAWAY and connect anew. Streams end where they are.

        Args:
            kept: number of connections that stay, those of gRPC first; with 0 also later ones are given up.
        """
        self._kept, self._share_until_s = kept, asyncio.get_running_loop().time() + _SHARE_S
        if self._looking is None and not self._is_draining:
            self._look(_FIRST_LOOK_S)

    def keep(self) -> None:
        """Give up no further connections."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _connections(self) -> Iterator[tuple[str, list[LimitedHttpProtocol]]]:
        """Yield each port of HTTP with its connections."""
        for port, server in self._http.items():
            yield port, cast("list[LimitedHttpProtocol]", list(server.server_state.connections))

    def _look(self, pause_s: float) -> None:
        excess, of_http = self._counters.all_connections - self._kept, 0
        for port, connections in self._connections():
            of_http += len(connections)
            for connection in connections:
                if excess > 0 and connection.give_up(partial(self._move, port)):
                    excess -= 1
        if self._grpc_server is not None:
            self._grpc_server.give_up(self._counters.all_connections - self._kept - of_http)
        if self._kept and (excess <= 0 or asyncio.get_running_loop().time() >= self._share_until_s):
            self.keep()
            return
        next_s = min(_LOOK_GROWTH * pause_s, _LONGEST_LOOK_S)
        self._looking = asyncio.get_running_loop().call_later(pause_s, self._look, next_s)

    def _move(self, port: str, descriptor: int) -> None:
        """Give a connection back; keeps it if the supervisor does not read now."""
        if self._send("moved", port, (descriptor,)):
            self._counters.count_move()
            os.close(descriptor)
        else:
            self._takers[port].take(socket.socket(fileno=descriptor))
