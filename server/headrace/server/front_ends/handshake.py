"""Opening of the Unix connections between front ends and the engine: connect, hello, and for a stream an answer with descriptors.

The listening socket is created by the supervisor and inherited by every engine process. So a front end can connect while no
engine runs: the answer comes from the next one. The engine closes connections of other processes at once: the system says that a
peer is another child of the supervisor, and its first message has the token of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.server.front_ends.channel import close_all

BACKLOG = 4096
# Pause before the next attempt to connect while the backlog is full.
_FULL_S = 0.001
_MAX_HELLO_BYTES = 64 << 10
_MAX_DESCRIPTORS = 16
_SIZE = struct.Struct("<I")

_encode = msgspec.msgpack.Encoder().encode


class Client(msgspec.Struct, array_like=True, frozen=True):
    """Client of a front end, whose requests a connection to the engine passes on.

    Attributes:
        address: host and port of the client.
        server: host and port on which the front end serves it.
        scheme: "http" or "https".
        names: names in the client certificate; empty without one.
    """

    address: tuple[str, int] | None = None
    server: tuple[str, int] | None = None
    scheme: str = "http"
    names: tuple[str, ...] = ()


class Hello(msgspec.Struct, array_like=True):
    """First message of a front end on each of its connections to the engine.

    Attributes:
        token: of the server, from the supervisor.
        role: "stream" for that of the front end itself; "http", "metrics" or "grpc" for the requests of a client of that
            port, which follow in that protocol.
        number: of the front end, from 1.
        client: of the requests.
    """

    token: bytes
    role: str
    number: int
    client: Client = Client()


_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class EngineProcessFacts(msgspec.Struct, array_like=True):
    """Answer of the engine to a front end.

    Attributes:
        unary: paths of the unary gRPC methods.
        streams: paths of the gRPC methods with streams.
        open_paths: gRPC methods that callers without a key may call.
    """

    unary: list[str] = []
    streams: list[str] = []
    open_paths: list[str] = []


_decode_answer = msgspec.msgpack.Decoder(EngineProcessFacts).decode


class Greeting(NamedTuple):
    """A front end that has connected, or has opened one more connection.

    Attributes:
        hello: its first message.
        sock: its stream.
        descriptors: that came with the message; owned by the receiver.
    """

    hello: Hello
    sock: socket.socket
    descriptors: Sequence[int]


def engine_listener() -> socket.socket:
    """Create the engine's listening socket, with an address that the system chooses."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("")
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


async def open_connection(address: bytes, hello: Hello, descriptors: Sequence[int] = ()) -> socket.socket:
    """Connect to the engine and send the first message, with descriptors; waits while the backlog is full.

    Raises:
        OSError: there is no listener, or no descriptor is left.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(address)
                break
            except BlockingIOError:
                await asyncio.sleep(_FULL_S)
        _send(sock, _encode(hello), descriptors)
        return sock
    except BaseException:
        sock.close()
        raise


async def connect(
    address: bytes, hello: Hello, descriptors: Sequence[int] = ()
) -> tuple[socket.socket, EngineProcessFacts, list[int]]:
    """Open a stream to the engine, which may not run yet.

    Args:
        address: of its socket.
        hello: first message.
        descriptors: to send with it.

    Returns:
        The stream, the engine's answer, and the descriptors that came with it.

    Raises:
        OSError: the engine has closed the stream without an answer.
    """
    sock = await open_connection(address, hello, descriptors)
    try:
        await _readable(asyncio.get_running_loop(), sock)
        content, received = _receive(sock)
        if not content:
            raise ConnectionResetError("the engine has closed the stream")
        return sock, _decode_answer(content), received
    except BaseException:
        sock.close()
        raise


def answer(sock: socket.socket, facts: EngineProcessFacts, descriptors: Sequence[int] = ()) -> None:
    """Answer a front end; raises OSError."""
    _send(sock, _encode(facts), descriptors)


class Listener:
    """Accepts the connections of front ends in the engine process; refuses other processes.

    Ownership: the event loop.

    Args:
        sock: listening socket.
        token: of this server.
        on_greeting: called with each connection.
    """

    def __init__(self, sock: socket.socket, token: bytes, on_greeting: Callable[[Greeting], None]) -> None:
        self._socket = sock
        self._token = token
        self._on_greeting = on_greeting
        self._loop = asyncio.get_running_loop()
        self._waiting: set[socket.socket] = set()
        self._pids: set[int] = set()  # of this server
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Stop accepting."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for sock in self._waiting:
            self._loop.remove_reader(sock)
            sock.close()
        self._waiting.clear()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionAbortedError):
            while True:
                sock, _ = self._socket.accept()
                sock.setblocking(False)
                pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if uid != os.getuid() or not (pid in self._pids or _is_of_server(pid)):
                    sock.close()
                    continue
                self._pids.add(pid)
                self._waiting.add(sock)
                self._loop.add_reader(sock, self._read, sock)

    def _read(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock)
        self._waiting.discard(sock)
        content, descriptors = _receive(sock)
        try:
            hello = _decode_hello(content)
        except msgspec.DecodeError:  # it has ended, or is none
            hello = None
        if hello is None or not hmac.compare_digest(hello.token, self._token):
            close_all(descriptors)
            sock.close()
            return
        self._on_greeting(Greeting(hello, sock, descriptors))


def _is_of_server(pid: int) -> bool:
    """Return True for this process, its supervisor and the supervisor's other children."""
    if pid in (os.getpid(), os.getppid()):
        return True
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False
    return parent == os.getppid()


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    waiter = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await waiter
    finally:
        loop.remove_reader(sock)


def _send(sock: socket.socket, content: bytes, descriptors: Sequence[int]) -> None:
    """Send a first message, which fits into the buffer of a new socket."""
    socket.send_fds(sock, [_SIZE.pack(len(content)) + content], list(descriptors))


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return the content of a first message, b"" if the peer has closed, and its descriptors.

    It was sent at once, so all of it has arrived. Bytes behind it belong to the stream, and stay unread.
    """
    descriptors: list[int] = []
    try:
        header, descriptors, _, _ = socket.recv_fds(sock, _SIZE.size, _MAX_DESCRIPTORS)
        if len(header) < _SIZE.size:
            return b"", descriptors
        (size,) = _SIZE.unpack(header)
        return sock.recv(min(size, _MAX_HELLO_BYTES)), descriptors
    except OSError:
        return b"", descriptors
