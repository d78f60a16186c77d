"""Accepts the connections of a port, for this process or another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from headrace.wire.accept import BACKLOG

# Connections that one event accepts, before the event loop continues.
_ACCEPTS = 32
# Pause after an accept that failed because descriptors or memory are used up: the socket stays readable.
_PAUSE_S = 0.1


class Acceptor:
    """Accepts the connections of a listening socket while a process can take them; else they wait in the system's queue.

    Ownership: the event loop.

    Args:
        sock: bound socket; closed by `close`.
        pass_on: takes a connection, which it owns from then on; False if nothing takes it now. Then the acceptor pauses and keeps
            the connection until `resume`.
    """

    def __init__(self, sock: socket.socket, pass_on: Callable[[socket.socket], bool]) -> None:
        self._socket = sock
        self._pass_on = pass_on
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._kept: socket.socket | None = None  # accepted, and not passed on yet
        self._is_reading = self._is_closed = False
        sock.setblocking(False)
        sock.listen(BACKLOG)

    def resume(self) -> None:
        """Accept connections."""
        if not self._is_reading and not self._is_closed and self._pass_kept():
            self._is_reading = True
            self._loop.add_reader(self._socket, self._accept)

    def pause(self) -> None:
        """Let connections wait."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket)

    def close(self) -> None:
        """Stop accepting, and release the port."""
        if self._is_closed:
            return
        self.pause()
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()
        if self._kept is not None:
            self._kept.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            if not self._is_reading:
                return
            try:
                sock, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self.pause()
                self._timer = self._loop.call_later(_PAUSE_S, self.resume)
                return
            self._kept = sock
            if not self._pass_kept():
                self.pause()
                return

    def _pass_kept(self) -> bool:
        """Pass on the connection that is kept; False if nothing takes it."""
        if self._kept is not None:
            if not self._pass_on(self._kept):
                return False
            self._kept = None
        return True
