"""Channel between the supervisor and a child process: messages on a socket pair that keeps their bounds (SOCK_SEQPACKET).

A message is one msgpack array: name, content; it may carry file descriptors (SCM_RIGHTS). It is sent whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.server.settings import Settings

# Of the first message, and of all others.
_MAX_BYTES, _READ_BYTES = 1 << 20, 4 << 10
_MAX_DESCRIPTORS = 16
# Messages that one event reads, before the event loop continues.
_MAX_READS = 64

_encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode = msgspec.msgpack.Decoder().decode


class Ports(msgspec.Struct, array_like=True):
    """Addresses of the server.

    Attributes:
        url: URL of HTTP.
        grpc: host and port of gRPC; "" without gRPC.
        metrics: URL of the metrics page.
    """

    url: str
    grpc: str
    metrics: str


class Start(msgspec.Struct, array_like=True):
    """First message to a child process.

    Attributes:
        settings: of the server.
        number: of the front end, from 1; 0 for the engine.
        parent: process id of the supervisor.
        token: that front ends send to the engine.
        engine: address of the engine's Unix socket.
        listener: descriptor of that socket, for the engine.
        ports: addresses of the server.
        model_filter: names of the served models, for each repository that is served in part.
        first_model: of the banner.
        arrays: descriptors of the counters of all processes: of the engine, then of each front end.
        control_state: descriptor of the memory of `headrace.server.front_ends.control_state`, for the engine.
        sockets: descriptors of the listening sockets by port, for an engine process that serves clients.
    """

    settings: Settings
    number: int
    parent: int
    token: bytes
    engine: bytes
    listener: int
    ports: Ports
    model_filter: dict[str, list[str]]
    first_model: str
    arrays: list[int]
    control_state: int = -1
    sockets: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the process in logs."""
        return process_name(self.number)


def process_name(number: int) -> str:
    """Return the name of a process: "engine", "front end 1"."""
    return f"front end {number}" if number else "engine"


_decode_start = msgspec.msgpack.Decoder(Start, dec_hook=lambda kind, value: kind(value)).decode


def send_start(sock: socket.socket, start: Start) -> None:
    """Send the first message; raises OSError."""
    sock.send(_encode(start))


def receive_start(sock: socket.socket) -> Start:
    """Wait for the first message; raises EOFError if the supervisor has ended."""
    content = sock.recv(_MAX_BYTES)
    if not content:
        raise EOFError("the supervisor has ended")
    return _decode_start(content)


class SupervisorChannel:
    """One end of a channel.

    Ownership: the event loop.

    Args:
        sock: the end; closed by `close`.
        on_message: called with name, content and descriptors of each message; it owns the descriptors.
        on_closed: called once if the other end is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[str, Any, Sequence[int]], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._socket = sock
        self._on_message = on_message
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._owed: list[str] = []  # names of messages that `insist` could not send yet
        self._on_writable: Callable[[], None] | None = None
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def send(self, name: str, content: object = None, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; False if the other end is closed, or has not read earlier ones."""
        if self._socket.fileno() < 0:
            return False
        try:
            socket.send_fds(self._socket, [_encode((name, content))], list(descriptors))
        except OSError:
            return False
        return True

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Call back once, when the other end has read so much that `send` can succeed; replaces an earlier callback."""
        self._on_writable = callback
        self._watch()

    def insist(self, name: str) -> None:
        """Send a message without content, if need be once the other end has read earlier ones."""
        if self._owed or not self.send(name):
            self._owed.append(name)
            self._watch()

    def _watch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_writer(self._socket, self._writable)

    def close(self) -> None:
        """Close this end."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _writable(self) -> None:
        while self._owed and self.send(self._owed[0]):
            del self._owed[0]
        if self._owed:
            return
        self._loop.remove_writer(self._socket)
        callback, self._on_writable = self._on_writable, None
        if callback is not None:
            callback()

    def _read(self) -> None:
        for _ in range(_MAX_READS):
            if self._socket.fileno() < 0:
                return
            try:
                content, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MAX_DESCRIPTORS)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                content, descriptors = b"", []
            if not content:
                close_all(descriptors)
                self.close()
                self._on_closed()
                return
            name, message = _decode(content)
            self._on_message(name, message, descriptors)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that nothing uses."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def repository_filter(start: Start) -> dict[Path, frozenset[str]]:
    """Return the filter of models by repository."""
    return {Path(path): frozenset(names) for path, names in start.model_filter.items()}
