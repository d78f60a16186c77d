"""A front end's stream to the engine process: messages and the end of the engine right after its answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from headrace.core.errors import Unavailable
from headrace.server.front_ends import frames
from headrace.server.front_ends.handshake import Client, EngineProcessFacts, Hello, answer, engine_listener
from headrace.server.front_ends.proxy import EngineProcessLink
from headrace.server.front_ends.remote_models import RemoteModels
from headrace.server.front_ends.reported_loads import ReportedLoads

from tests.support.waiting import until_async

HELLO = Hello(b"token", "stream", 1)


class Engine:
    """Listening socket of an engine process, and a front end's link to it whose opening takes long."""

    def __init__(self) -> None:
        self.listener = engine_listener()
        self.notices: list[str] = []
        self.opened = self.lost = 0
        address, calls = self.listener.getsockname(), (self._on_open, self._on_lost, self._on_notice)
        self.link = EngineProcessLink(address, HELLO, lambda: RemoteModels(asyncio.get_running_loop()), *calls)

    def _on_open(self, _answer: EngineProcessFacts, _descriptors: Sequence[int]) -> ReportedLoads:
        self.opened += 1
        return ReportedLoads()

    def _on_lost(self) -> None:
        self.lost += 1

    def _on_notice(self, name: str, _content: Any) -> None:
        self.notices.append(name)

    async def accept(self) -> socket.socket:
        """Accept the front end, read its first message and answer it."""
        loop = asyncio.get_running_loop()
        sock, _ = await loop.sock_accept(self.listener)
        sock.setblocking(False)
        assert await loop.sock_recv(sock, 1000)
        answer(sock, EngineProcessFacts())
        return sock


@contextlib.asynccontextmanager
async def started(condition: Callable[[Engine], bool]) -> AsyncIterator[tuple[Engine, socket.socket]]:
    """An engine that has answered; the front end's task continues once the condition holds."""
    loop = asyncio.get_running_loop()
    connect, engine = loop.create_unix_connection, Engine()

    async def connect_late(*args: Any, **options: Any) -> Any:
        result = await connect(*args, **options)
        await until_async(lambda: condition(engine))
        return result

    loop.create_unix_connection = connect_late  # type: ignore[assignment]
    engine.link.start()
    sock = await engine.accept()
    try:
        yield engine, sock
    finally:
        engine.link.close()
        sock.close()
        engine.listener.close()


async def test_a_notice_right_after_the_answer_is_acknowledged() -> None:
    async with started(lambda engine: bool(engine.notices)) as (engine, sock):
        sock.send(frames.message_frame(frames.NOTICE, ("table", b""), group=7))
        await until_async(lambda: engine.notices == ["table"])
        async with asyncio.timeout(60):
            received = await asyncio.get_running_loop().sock_recv(sock, 100)
        assert received == frames.message_frame(frames.ACKNOWLEDGED, group=7)
        assert (engine.opened, engine.lost) == (1, 0)


async def test_an_engine_that_ends_right_after_its_answer_is_connected_again() -> None:
    async with started(lambda engine: bool(engine.lost)) as (engine, sock):
        await until_async(lambda: engine.opened == 1)
        sock.close()
        await until_async(lambda: engine.lost == 1)
        with pytest.raises(Unavailable):
            await engine.link.open("http", Client())
        with await engine.accept():
            await until_async(lambda: engine.opened == 2)
            with await engine.link.open("http", Client()):
                pass
