"""Accepted connections: their order, and the stop of the server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from headrace.core.limits import ClientLimits
from headrace.wire.accept import PassedConnections
from headrace.wire.tls import ServerTls, TlsFiles

from tests.support.certificates import Certificates
from tests.support.waiting import until_async


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """The loop that serves: it differs from asyncio's where a connection is cancelled while it opens."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as created:
        yield created


class Listening(asyncio.Protocol):
    """Calls back when its connection opens, and has events for its begin and end."""

    def __init__(self, on_open: Callable[[], None]) -> None:
        self._on_open = on_open
        self.made, self.lost = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Its connection is open."""
        self.made.set()
        self._on_open()

    def connection_lost(self, error: Exception | None) -> None:
        """Its connection has ended."""
        self.lost.set()


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("when", ["at once", "begun", "opened"])
async def test_connections_that_open_while_the_server_stops_are_ended(
    with_tls: bool, when: str, tmp_path: Path
) -> None:
    """The stop comes before the first step of a connection, after it, or inside `connection_made`."""
    tls = trust = None
    if with_tls:
        files = Certificates(tmp_path)
        tls = ServerTls(TlsFiles(str(files.server.certificate), str(files.server.key), ""))
        trust = ssl.create_default_context(cafile=files.authority)
    protocol = Listening(lambda: connections.close() if when == "opened" else None)
    connections = PassedConnections(lambda: protocol, tls, "http/1.1", ClientLimits())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        client.setblocking(False)
        connections.take(listening.accept()[0])
        name = None if trust is None else "127.0.0.1"
        opening = asyncio.ensure_future(asyncio.open_connection(sock=client, ssl=trust, server_hostname=name))
        if when == "begun":
            await asyncio.sleep(0)
        elif when == "opened":
            await protocol.made.wait()
        connections.close()
        await connections.wait_closed()
        with contextlib.suppress(OSError):  # its end may come in the middle of the handshake
            reader, writer = await opening
            assert await reader.read() == b""
            writer.close()
    if protocol.made.is_set():
        await protocol.lost.wait()
    assert protocol.made.is_set() or when != "opened"


NUMBER = 200
# A connection over the limit gives way to so many later ones, if its request has not been read.
RESERVED = 40


def test_a_first_request_is_read_before_many_later_connections_are_opened(runner: asyncio.Runner) -> None:
    opened: list[int] = []
    read: dict[int, int] = {}  # connections that were open, by the number of the one that was read

    class Recorded(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.number = len(opened)
            opened.append(self.number)

        def data_received(self, data: bytes) -> None:
            read[self.number] = len(opened)

    async def check() -> None:
        connections = PassedConnections(Recorded, None, "http/1.1", ClientLimits())
        with contextlib.ExitStack() as stack:
            for _ in range(NUMBER):
                ours, theirs = socket.socketpair()
                stack.enter_context(ours).sendall(b"GET")
                connections.take(theirs)
            await until_async(lambda: len(read) == NUMBER)
            assert max(later - number for number, later in read.items()) < RESERVED
            connections.close()
            await connections.wait_closed()

    runner.run(check())


async def test_those_that_wait_are_closed_with_the_others() -> None:
    connections = PassedConnections(asyncio.Protocol, None, "http/1.1", ClientLimits())
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(NUMBER)]
        for ours, theirs in pairs:
            stack.enter_context(ours).setblocking(False)
            connections.take(theirs)
        connections.close()
        await connections.wait_closed()
        loop = asyncio.get_running_loop()
        assert {await loop.sock_recv(ours, 1) for ours, _ in pairs} == {b""}
