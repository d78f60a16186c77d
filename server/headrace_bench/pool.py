"""Connections of a client process, and the requests that wait for one: the part that HTTP/1.1 and HTTP/2 share.

A load submits requests by number. The pool sends each on a free connection, or keeps it until one is free, and reports its
outcome exactly once. Nothing here encodes a request: its bytes are prepared before the load begins.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

now_s = time.monotonic

# Status of a request that was answered with success.
OK = ""
TIMEOUT = "timeout"
WRONG = "wrong answer"
CLOSED = "connection closed"
NO_CONNECTION = "no connection"
BROKEN = "protocol error"

# Pause after a connection that failed, so that a closed loop does not send thousands of attempts a second.
_BACKOFF_S = 0.05
# Interval of the search for requests that exceeded their timeout.
_EXPIRY_S = 0.1
RECEIVE_BYTES = 1 << 18
ERROR_TEXT_BYTES = 300


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server.

    Attributes:
        host: name or address, without brackets.
        port: TCP port.
        tls: context of the client; None without TLS.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Body of a response.

    Attributes:
        body: body of HTTP, or message of gRPC.
        json_bytes: length of the JSON header in front of raw tensors (HTTP); -1 if the whole body is JSON, or for gRPC.
    """

    body: bytes
    json_bytes: int = -1


# Number of the request, due time and sending time in seconds of the monotonic clock, status, text of the error.
Finished = Callable[[int, float, float, str, str], None]
# Returns True for a right answer to the request of this number.
Check = Callable[[int, Answer], bool]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of a pool.

    Attributes:
        address: of the server.
        max_connections: number of connections at most; they are opened when they are needed.
        timeout_s: time from sending to the answer, and of a connection attempt.
        finished: receives the outcome of every request.
        check: receives the answers with status success; None leaves their bodies unread.
    """

    address: Address
    max_connections: int
    timeout_s: float
    finished: Finished
    check: Check | None = None


class Pool(ABC):
    """Connections to one server.

    Args:
        requests: bytes of each prepared request.
        options: of the pool.

    Attributes:
        connections: the open ones; each has `abort()`.
        opened: number of connections that were opened.
        buffer: receive buffer of all connections, uint8[RECEIVE_BYTES]. A read fills it and is parsed before the next read.
    """

    connections: Collection[Any]

    def __init__(self, requests: Sequence[bytes], options: PoolOptions) -> None:
        self.requests = requests
        self._address = options.address
        self._max_connections = options.max_connections
        self.timeout_s = options.timeout_s
        self.finished = options.finished
        self.check = options.check
        self.opened = 0
        self.buffer = bytearray(RECEIVE_BYTES)
        self.view = memoryview(self.buffer)
        self.backlog: deque[tuple[int, float]] = deque()
        self._loop = asyncio.get_running_loop()
        self._connecting = 0
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._expiry = self._loop.call_later(_EXPIRY_S, self._expire)

    def submit(self, index: int, due_s: float) -> None:
        """Send a request now if a connection is free, else when one is.

        Args:
            index: number of the prepared request.
            due_s: time at which it was due; its latency counts from there.
        """
        if not self.start(index, due_s):
            self.backlog.append((index, due_s))
            self._open_more()

    async def connect(self, count: int) -> str:
        """Open connections before the load.

        Returns:
            "", or the reason why one could not be opened.
        """
        count = min(count, self._max_connections) - self._count
        for _ in range(count):
            self._reserve()
        errors = await asyncio.gather(*(self._open() for _ in range(count)))
        return next((error for error in errors if error), "")

    def close(self) -> None:
        """Close all connections; requests in flight get no outcome."""
        self._is_closed = True
        self._expiry.cancel()
        self.backlog.clear()
        for task in self._tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()

    # --- Of a protocol ---

    @abstractmethod
    def start(self, index: int, due_s: float) -> bool:
        """Send a request on a free connection; False if there is none."""

    @abstractmethod
    def protocol(self) -> asyncio.BufferedProtocol:
        """Return the protocol object of a new connection."""

    @abstractmethod
    def expire(self, oldest_s: float) -> None:
        """End requests that were sent before `oldest_s` with the status `TIMEOUT`."""

    # --- Called by connections ---

    def start_next(self) -> None:
        """Send the requests that wait, on the connections that are free now."""
        backlog = self.backlog
        while backlog:
            index, due_s = backlog[0]
            if not self.start(index, due_s):
                self._open_more()
                return
            backlog.popleft()

    def lost(self) -> None:
        """Count a connection that has ended."""
        self._count -= 1
        if self.backlog and not self._is_closed:
            self._open_more()

    # --- Connections ---

    def _open_more(self) -> None:
        if self._count < self._max_connections and self._connecting < len(self.backlog):
            self._reserve()
            task = self._loop.create_task(self._open_or_fail())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open_or_fail(self) -> None:
        """Open a connection, or fail the oldest waiting request."""
        if error := await self._open():
            await asyncio.sleep(_BACKOFF_S)
            if self.backlog:
                index, due_s = self.backlog.popleft()
                self.finished(index, due_s, now_s(), NO_CONNECTION, error)
            if self.backlog:
                self._open_more()

    def _reserve(self) -> None:
        """Count a connection that `_open` will open."""
        self._count += 1
        self._connecting += 1

    async def _open(self) -> str:
        """Open a reserved connection; returns "", or the reason of the failure."""
        address = self._address
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._loop.create_connection(self.protocol, address.host, address.port, ssl=address.tls)
        except TimeoutError:
            error = f"no connection within {self.timeout_s:g} s"
        except OSError as failure:
            error = str(failure) or type(failure).__name__
        else:
            self.opened += 1
            return ""
        finally:
            self._connecting -= 1
        self._count -= 1
        return error

    def _expire(self) -> None:
        oldest_s = now_s() - self.timeout_s
        while self.backlog and self.backlog[0][1] < oldest_s:
            index, due_s = self.backlog.popleft()
            self.finished(index, due_s, now_s(), TIMEOUT, f"not sent within {self.timeout_s:g} s")
        self.expire(oldest_s)
        self._expiry = self._loop.call_later(_EXPIRY_S, self._expire)


def timeout_text(timeout_s: float) -> str:
    """Return the error text of a request without an answer."""
    return f"no answer within {timeout_s:g} s"
