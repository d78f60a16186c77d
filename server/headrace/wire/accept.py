"""Listening sockets, and TLS connections from accept to the end of their handshake."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.core.limits import ClientLimits
from headrace.wire.tls import ServerTls

# Longest TLS handshake; `--header-timeout-s` shortens it.
HANDSHAKE_TIMEOUT_S = 10.0
BACKLOG = 4096
# Handshakes of connections over the limit that may end in a refusal, in multiples of the connections that the protocol accepts.
_RESERVES = 4
# Connections that one event accepts, before the event loop continues.
_ACCEPTS = 32
# Connections without TLS that another process has accepted, and that are opened at the same time.
_OPENING = 8
# Pause after an accept that failed because descriptors or memory are used up: the socket stays readable.
_PAUSE_S = 0.1


def bind(host: str, port: int) -> socket.socket:
    """Bind a listening socket.

    Args:
        host: address.
        port: port; 0 lets the system choose.

    Raises:
        OSError: the address cannot be bound; the text has host and port.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


class Handshakes:
    """Opens connections on accepted sockets; counts each over TLS from accept on and bounds the time of its handshake.

    The server of asyncio counts nothing before the end of the handshake, and cannot replace its certificate. Connections over the
    limit complete their handshake, so that the protocol can refuse them with a response. Once four times `reserved` connections
    are over the limit, the next takes the place of the oldest one whose handshake has not ended. Without such a one it is closed.

    Ownership: the event loop.

    Args:
        factory: makes the protocol of a connection, which counts it from then on.
        tls: contexts for new connections; None for plain text.
        alpn: the protocol that is offered.
        client_limits: limit and number of connections whose handshake has ended.
        timeout_s: maximum time of a handshake in seconds.
        reserved: connections over the limit that the protocol accepts; 0 to end the handshakes of all over it.

    Raises:
        OSError: a TLS file is invalid.
    """

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        tls: ServerTls | None,
        alpn: str,
        client_limits: ClientLimits,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        reserved: int = 0,
    ) -> None:
        self._factory = factory
        self._tls = tls
        self._alpn = alpn
        self._limits = client_limits
        self._timeout_s = min(timeout_s, client_limits.limits.header_timeout_s)
        self._reserved = reserved
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._is_closed = False
        if tls is not None:
            tls.context(alpn)

    def close(self) -> None:
        """Abort all handshakes; other connections stay open. Those without TLS that are being opened are closed at once."""
        self._is_closed = True
        if self._tls is not None:
            for task in self._handshakes:
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended; call `close` before."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _begin(self, sock: socket.socket) -> None:
        limits = self._limits
        over = limits.all_connections + len(self._handshakes) + 1 - limits.limits.max_connections
        if over > 0 and self._tls is not None:
            limits.hit("max_connections")
            # The refusal is a response, which needs the handshake. Too many would use up descriptors and processor time.
            if over > _RESERVES * self._reserved and not self._abort_oldest():
                sock.close()
                return
        sock.setblocking(False)
        task = self._loop.create_task(self._handshake(sock))
        self._handshakes[task] = None
        task.add_done_callback(partial(self._end, sock))

    def _abort_oldest(self) -> bool:
        for task in self._handshakes:
            del self._handshakes[task]
            task.cancel()
            return True
        return False

    async def _handshake(self, sock: socket.socket) -> None:
        if self._tls is None:
            # Never cancelled: uvloop would not call `connection_lost`, and the server would wait for the connection.
            transport, _ = await self._loop.connect_accepted_socket(self._factory, sock)
            if self._is_closed:
                transport.close()
            return
        await self._loop.connect_accepted_socket(
            self._factory, sock, ssl=self._tls.context(self._alpn), ssl_handshake_timeout=self._timeout_s
        )

    def _end(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if task.cancelled() or task.exception() is not None:
            sock.close()


class PassedConnections(Handshakes):
    """Serves connections that another process has accepted; see `Handshakes`.

    Without TLS few are opened in one iteration of the event loop, so that it reads their first requests before they give way to
    later ones.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: deque[socket.socket] = deque()

    @property
    def waiting(self) -> int:
        """Connections that are not open, and not counted: the handshake of each lasts, or it waits for others."""
        return len(self._handshakes) + len(self._waiting)

    def take(self, sock: socket.socket) -> None:
        """Serve an accepted connection; closes it after `close`."""
        if self._is_closed:
            sock.close()
        elif self._tls is None and len(self._handshakes) >= _OPENING:
            self._waiting.append(sock)
        else:
            self._begin(sock)

    def close(self) -> None:
        """Close those that wait, too; see `Handshakes.close`."""
        super().close()
        while self._waiting:
            self._waiting.popleft().close()

    def _end(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        super()._end(sock, task)
        if self._waiting:
            self._begin(self._waiting.popleft())


class TlsListener(Handshakes):
    """Accepts the TLS connections of one listening socket; see `Handshakes`.

    Args:
        sock: bound socket; closed by `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        factory: Callable[[], asyncio.Protocol],
        tls: ServerTls,
        alpn: str,
        client_limits: ClientLimits,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        reserved: int = 0,
    ) -> None:
        super().__init__(factory, tls, alpn, client_limits, timeout_s, reserved)
        self._socket = sock
        self._pause: asyncio.TimerHandle | None = None
        sock.listen(BACKLOG)
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Stop accepting, and abort all handshakes; other connections stay open."""
        if self._is_closed:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        super().close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._abort_oldest()
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._socket, self._accept)
                return
            self._begin(sock)
