"""Requests that a front end passes to the engine: bytes of one process, the client of the front end, and no other caller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from headrace.core.limits import ClientLimits
from headrace.server.front_ends.frame_stream import FrameStream
from headrace.server.front_ends.handshake import (
    Client,
    EngineProcessFacts,
    Greeting,
    Hello,
    Listener,
    answer,
    engine_listener,
    open_connection,
)
from headrace.server.front_ends.passed_requests import FrontEndPeer, ProxiedHttpServer
from headrace.server.front_ends.proxy import EngineProcessLink, HttpProxy
from headrace.server.front_ends.remote_models import RemoteModels
from headrace.server.front_ends.reported_loads import ReportedLoads
from headrace.server.listen import uvicorn_config
from headrace.server.settings import Settings
from headrace.wire.http.connection import HeadraceHttpProtocol
from headrace.wire.http.infer_endpoint import Receive, Scope, Send
from headrace.wire.http.timeouts import ConnectionTimeouts
from uvicorn.server import ServerState

from tests.support.waiting import until_async

TOKEN = b"t" * 16


class Application:
    """Says what it has seen of a request; `/early` reads no body.

    Attributes:
        seen: client, certificate and headers of the last request.
    """

    def __init__(self) -> None:
        self.seen: tuple[Any, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond."""
        self.seen = scope["client"], scope["headrace.connection"].peer_names, scope["headers"]
        if scope["path"] == "/error":
            raise ValueError("of the application")
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        facts = [scope["method"], scope["path"], scope["query_string"].decode(), len(body), scope["scheme"]]
        # The header with which a front end waits for "100 Continue" is no difference.
        names = sorted(name.decode() for name, _ in scope["headers"] if name not in (b"expect", b"connection"))
        content = json.dumps([*facts, names]).encode()
        headers = [(b"X-Mixed", b"Case"), (b"x-twice", b"1"), (b"x-twice", b"2")]
        if scope["path"] != "/chunks":
            headers.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": 418, "headers": headers})
        await send({"type": "http.response.body", "body": content[:9], "more_body": True})
        await send({"type": "http.response.body", "body": content[9:]})


class Servers:
    """An application behind a front end, and the same one in a process of its own; both on this event loop."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._limits = ClientLimits()
        self._socket = engine_listener()
        self.address: bytes = self._socket.getsockname()
        self.front_end = self.one_process = 0  # ports

    async def open(self) -> None:
        """Start both."""
        self._http = ProxiedHttpServer(uvicorn_config(self._application, Settings(())), ClientLimits())
        self.peer = FrontEndPeer({"http": self._http}, None, lambda _: None)
        self._listener = Listener(self._socket, TOKEN, self._on_greeting)
        hello, is_open, loop = Hello(TOKEN, "stream", 1), asyncio.Event(), asyncio.get_running_loop()

        def on_open(*_answer: Any) -> ReportedLoads:
            is_open.set()
            return ReportedLoads()

        self.link = EngineProcessLink(
            self.address, hello, lambda: RemoteModels(loop), on_open, lambda: None, lambda *_: None
        )
        self.link.start()
        await is_open.wait()
        self.front_end = await self._serve(HttpProxy(self.link, "http"))
        self.one_process = await self._serve(self._application)

    async def _serve(self, application: object) -> int:
        make = partial(
            HeadraceHttpProtocol,
            config=uvicorn_config(application, Settings(())),
            server_state=ServerState(),
            app_state={},
            client_limits=self._limits,
            timeouts=ConnectionTimeouts(self._limits),
        )
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    def _on_greeting(self, greeting: Greeting) -> None:
        loop = asyncio.get_running_loop()
        if greeting.hello.role == "stream" and not hasattr(self.peer, "stream"):
            answer(greeting.sock, EngineProcessFacts())
            self.peer.stream = FrameStream(lambda *_: None, lambda _: self.peer.abort(), on_notice=self.peer.on_notice)
            self.opening = loop.create_task(self.peer.stream.open(greeting.sock))
        else:  # a port, and the next engine process, which there is none of
            self.opening = loop.create_task(self.peer.serve(greeting))

    def close(self) -> None:
        """End the engine."""
        self.link.close()
        self._listener.close()
        self.peer.close()


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[Servers, Application]]:
    application = Application()
    servers = Servers(application)
    await servers.open()
    try:
        yield servers, application
    finally:
        servers.close()


async def exchange(port: int, parts: Sequence[bytes]) -> bytes:
    """Send parts of requests, each after what the server has answered to the one before; returns all answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = b""
    for part in parts[:-1]:
        writer.write(part)
        answers += await reader.read(1 << 20)
    writer.write(parts[-1])
    async with asyncio.timeout(60):
        answers += await reader.read()
    writer.close()
    return answers


CLOSE = b"Host: a\r\nConnection: close\r\n\r\n"
LARGE = b"x" * 900_000
REQUESTS = {
    "GET": [b"GET /a%20b?c=%20d&e HTTP/1.1\r\nX-One: \xe4\r\nX-One: 2\r\n" + CLOSE],
    "HEAD": [b"HEAD /a HTTP/1.1\r\n" + CLOSE],
    "HEAD without a length": [b"HEAD /chunks HTTP/1.1\r\n" + CLOSE],
    "chunks in the response": [b"GET /chunks HTTP/1.1\r\n" + CLOSE],
    "HTTP/1.0": [b"GET /chunks HTTP/1.0\r\n\r\n"],
    "other methods": [b"OPTIONS /a HTTP/1.1\r\nHost: a\r\n\r\nDELETE /a HTTP/1.1\r\n" + CLOSE],
    "absolute target": [b"GET http://a/b?c HTTP/1.1\r\n" + CLOSE],
    "body": [b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n" + CLOSE + b"abc"],
    "empty body": [b"POST /a HTTP/1.1\r\nContent-Length: 0\r\n" + CLOSE],
    "chunks": [b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"],
    "large body": [b"POST /a HTTP/1.1\r\nContent-Length: 900000\r\n" + CLOSE + LARGE],
    "large chunks": [
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"dbba0\r\n" + LARGE + b"\r\n0\r\n\r\n"
    ],
    "100 Continue": [b"POST /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n" + CLOSE, b"abc"],
    "no 100 Continue": [b"POST /early HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n" + CLOSE],
    "error": [b"GET /error HTTP/1.1\r\nHost: a\r\n\r\n"],
    "kept open": [b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /b HTTP/1.1\r\n" + CLOSE],
    "kept open after an unread body": [
        b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n" + LARGE[:299_999],
        b"xGET /b HTTP/1.1\r\n" + CLOSE,
    ],
    "smuggled": [b"GET /a HTTP/1.1\r\nX: a\n\nGET /b HTTP/1.1\r\n" + CLOSE],
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_bytes_are_those_of_one_process(name: str) -> None:
    async with opened() as (servers, _):
        passed = await exchange(servers.front_end, REQUESTS[name])
        expected = await exchange(servers.one_process, REQUESTS[name])
        assert passed == expected


async def test_clients_are_those_of_the_front_end_whatever_they_send() -> None:
    async with opened() as (servers, application):
        reader, writer = await asyncio.open_connection("127.0.0.1", servers.front_end)
        address = writer.get_extra_info("sockname")
        forged = b"Forwarded: for=9.9.9.9\r\nX-Forwarded-For: 9.9.9.9\r\nX-Client-Cert: admin\r\n"
        writer.write(b"GET /a HTTP/1.1\r\n" + forged + CLOSE)
        assert await reader.read()
        assert application.seen[:2] == (address, ())
        writer.close()
        client = Client(("8.8.8.8", 8), names=("partner",))
        with await open_connection(servers.address, Hello(TOKEN, "http", 1, client)) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, b"GET /a HTTP/1.1\r\n" + CLOSE)
            await until_async(lambda: application.seen[:2] == (("8.8.8.8", 8), ("partner",)))


@pytest.mark.parametrize(
    "hello",
    [
        pytest.param(Hello(b"u" * 16, "http", 1), id="another token"),
        pytest.param(Hello(TOKEN, "metrics", 1), id="no such port"),
        pytest.param(None, id="no hello"),
    ],
)
async def test_other_callers_are_refused(hello: Hello | None) -> None:
    async with opened() as (servers, application):
        loop = asyncio.get_running_loop()
        request = b"GET /a HTTP/1.1\r\n" + CLOSE
        if hello is None:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(servers.address)
            sock.setblocking(False)
        else:
            sock = await open_connection(servers.address, hello)
        with sock, contextlib.suppress(OSError):
            await loop.sock_sendall(sock, request)
            assert await loop.sock_recv(sock, 100) == b""
        assert application.seen == ()


async def test_a_process_that_is_no_child_of_the_supervisor_is_refused() -> None:
    """The child of this process: a front end would be its sibling. It has the token."""
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(bytes.fromhex(sys.argv[1]));"
    program += "s.sendall(bytes.fromhex(sys.argv[2])); sys.exit(len(s.recv(10)))"
    async with opened() as (servers, application):
        content = msgspec.msgpack.encode(Hello(TOKEN, "http", 1))
        sent = struct.pack("<I", len(content)) + content + b"GET /a HTTP/1.1\r\n" + CLOSE
        words = (sys.executable, "-c", program, servers.address.hex(), sent.hex())
        process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL)
        assert await process.wait() in (0, 1), "closed, before or after the child has sent its message"
        assert application.seen == ()
