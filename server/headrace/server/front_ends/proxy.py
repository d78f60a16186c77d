"""Front end's side of HTTP requests that the engine process answers, and its stream to that process.

A request is written as HTTP/1.1 to a connection of its client, whose first message has address and certificate. So no header can
forge them, and bytes that a client smuggles reach no request of another.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import httptools
import msgspec

from headrace.core.errors import Unavailable
from headrace.server.front_ends.frames import NOTICE, message_frame
from headrace.server.front_ends.handshake import Client, EngineProcessFacts, Hello, connect, open_connection
from headrace.server.front_ends.remote_models import RemoteModels
from headrace.server.front_ends.reported_loads import ReportedLoads
from headrace.wire.http.event_stream import MEDIA_TYPE, encode_event, error_data
from headrace.wire.http.infer_endpoint import Connection, Receive, Scope, Send, send_error

_ENGINE_GONE = "the engine process of the server has ended and is starting again: retry later"
_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
# Time for the response of a request that was cancelled because the drain timeout has passed.
_CANCEL_S = 2.0
# Time after which a connection to the engine without a request is closed.
_IDLE_S = 1.0
# A complete body up to this size is sent with the head, any other once the application in the engine reads it. Also bytes of a
# response that one read returns; twice as many wait for a client that does not read.
_PIECE_BYTES = 256 << 10
# Headers of one connection, not of the request.
_HOP_HEADERS = frozenset((b"connection", b"keep-alive", b"upgrade", b"expect"))


def engine_gone() -> Unavailable:
    """Return the error of requests while there is no engine process."""
    return Unavailable(_ENGINE_GONE)


class EngineProcessLink:
    """A front end's stream to the engine process, which connects again after each end of the engine.

    Ownership: the event loop.

    Args:
        address: of the engine's socket.
        hello: first message of the stream.
        begin: creates the models of the next engine process.
        on_open: called with the engine's answer and its descriptors before the stream is open; returns the state of the engine.
        on_lost: called each time the engine process has ended.
        on_notice: applies a change by its name and content, before it is acknowledged.
    """

    def __init__(
        self,
        address: bytes,
        hello: Hello,
        begin: Callable[[], RemoteModels],
        on_open: Callable[[EngineProcessFacts, Sequence[int]], ReportedLoads],
        on_lost: Callable[[], None],
        on_notice: Callable[[str, Any], None],
    ) -> None:
        self._address = address
        self._hello = hello
        self._begin = begin
        self._on_open = on_open
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._models: RemoteModels | None = None  # of the engine process that answers
        self._task: asyncio.Task[None] | None = None
        self._connections: set[asyncio.WriteTransport] = set()

    def start(self) -> None:
        """Connect, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._connect())

    def close(self) -> None:
        """Close the stream."""
        if self._task is not None:
            self._task.cancel()
        models, self._models = self._models, None
        if models is not None:
            models.detached()

    def send(self, name: str, content: object = None) -> None:
        """Send a notice; a no-op without an engine."""
        if self._models is not None:
            self._models.send(message_frame(NOTICE, (name, content)))

    async def open(self, role: str, client: Client) -> socket.socket:
        """Connect for requests of a client, in the protocol of `role`; see `Hello`. The caller then calls `add`.

        Raises:
            Unavailable: there is no engine process.
        """
        models = self._models
        if models is None:
            raise engine_gone()
        try:
            sock = await open_connection(self._address, msgspec.structs.replace(self._hello, role=role, client=client))
        except OSError as error:
            raise engine_gone() from error
        if self._models is not models:
            sock.close()
            raise engine_gone()
        return sock

    def add(self, connection: asyncio.WriteTransport) -> None:
        """Abort a connection when the engine process ends."""
        self._connections.add(connection)
        if self._models is None:
            connection.abort()

    def discard(self, connection: asyncio.WriteTransport) -> None:
        """Forget a connection, which is closed."""
        self._connections.discard(connection)

    async def _connect(self) -> None:
        pause_s, models = _RETRY_S, self._begin()
        arena = models.new_arena()
        while True:
            try:
                sock, answer, descriptors = await connect(self._address, self._hello, [arena])
                break
            except OSError:  # the engine has ended before it answered, or is starting and its socket is full
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)
        self._models = models
        await models.attached(sock, self._on_open(answer, descriptors), self._on_notice, self._closed)

    def _closed(self) -> None:
        self._models = None
        for connection in self._connections:
            connection.abort()
        self._on_lost()
        self.start()


class _Tunnel:
    """A connection to the engine for the requests of one client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.transport = reader, writer, writer.transport
        self.timer: asyncio.TimerHandle | None = None  # closes it; None while it has a request


class HttpProxy:
    """ASGI application that passes requests to the engine process.

    While there is none, it responds 503 with Retry-After, and 200 to the liveness route.

    Ownership: the event loop.

    Args:
        link: to the engine.
        port: "http" or "metrics".
    """

    def __init__(self, link: EngineProcessLink, port: str) -> None:
        self.link = link
        self._port = port
        self._idle: dict[Connection, _Tunnel] = {}  # by the client's connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; other ASGI scopes (lifespan, WebSocket) are ignored."""
        if scope["type"] == "http":
            await _PassedRequest(self, scope, receive, send).run()

    async def open(self, scope: Scope) -> _Tunnel:
        """Return the connection of the client of a request to the engine; raises Unavailable."""
        connection: Connection = scope["headrace.connection"]
        tunnel = self._idle.pop(connection, None)
        if tunnel is not None:
            assert tunnel.timer is not None
            tunnel.timer.cancel()
            if not tunnel.transport.is_closing() and not tunnel.reader.at_eof():
                return tunnel
            self.close(tunnel)
        client = Client(scope.get("client"), scope.get("server"), scope["scheme"], connection.peer_names)
        sock = await self.link.open(self._port, client)
        tunnel = _Tunnel(*await asyncio.open_unix_connection(sock=sock, limit=_PIECE_BYTES))
        self.link.add(tunnel.transport)
        return tunnel

    def keep(self, connection: Connection, tunnel: _Tunnel) -> None:
        """Keep a connection to the engine for the next request of its client, or close it soon."""
        self._idle[connection] = tunnel
        tunnel.timer = asyncio.get_running_loop().call_later(_IDLE_S, self._expire, connection, tunnel)

    def close(self, tunnel: _Tunnel) -> None:
        """Close a connection to the engine."""
        tunnel.transport.abort()
        self.link.discard(tunnel.transport)

    def _expire(self, connection: Connection, tunnel: _Tunnel) -> None:
        self._idle.pop(connection, None)
        self.close(tunnel)


async def _respond_alone(scope: Scope, send: Send, error: Unavailable) -> None:
    """Respond while there is no engine process: the server is live, and everything else gets the error."""
    if scope["path"] == "/v2/health/live" and scope["method"] in ("GET", "HEAD"):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
    else:
        await send_error(send, error)


class _ResponseReader:
    """Parses the response of the engine to messages of ASGI.

    Args:
        method: of the request.
    """

    def __init__(self, method: str) -> None:
        self._is_head = method == "HEAD"
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self.messages: list[dict[str, Any]] = []  # parsed since they were cleared
        # The engine reads the body since "100 Continue"; the last message is in `messages`; the engine closes the connection.
        self.wants_body = self.is_complete = self.is_last = False

    def feed(self, data: bytes) -> None:
        """Parse bytes; raises Unavailable if they are no response."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise engine_gone() from error

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if name != b"transfer-encoding":  # chunks of this connection
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status == 100:
            self.wants_body = True
            return
        self.messages.append({"type": "http.response.start", "status": status, "headers": self._headers})
        if self._is_head:
            self._end()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self.messages.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._parser.get_status_code() != 100 and not self.is_complete:
            self._end()

    def _end(self) -> None:
        self.is_complete = True
        self.is_last = not self._parser.should_keep_alive()
        if self.messages and self.messages[-1]["type"] == "http.response.body":
            self.messages[-1]["more_body"] = False
        else:
            self.messages.append({"type": "http.response.body", "body": b"", "more_body": False})


class _PassedRequest:
    """One HTTP request on its way to the engine and back."""

    def __init__(self, proxy: HttpProxy, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy, self._scope, self._receive, self._send = proxy, scope, receive, send
        self._connection: Connection = scope["headrace.connection"]
        self._response = _ResponseReader(scope["method"])
        self._upload: asyncio.Task[None] | None = None
        self._tunnel: _Tunnel | None = None
        self._is_sent = self._has_started = self._has_events = self._is_abandoned = False
        self._is_between_events = False  # of a body of events: an error may follow as one

    async def run(self) -> None:
        """Pass the request on and write the response."""
        self._connection.completion = cast(Any, self)
        try:
            tunnel = self._tunnel = await self._proxy.open(self._scope)
            body = await self._complete_body()
            self._is_sent = body is not None
            tunnel.writer.writelines(self._head(has_body=body is not None))
            if body:
                tunnel.writer.writelines(self._framed(body, last=True))
            try:
                await self._respond(tunnel)
            except asyncio.CancelledError:  # the drain timeout has passed: the engine responds with an error
                if self._has_started:
                    raise
                self._proxy.link.send("cancel")
                await asyncio.wait_for(self._respond(tunnel), _CANCEL_S)
        except Unavailable as error:  # the engine process has ended
            if not self._is_abandoned:
                await self._fail(error)
        finally:
            self._connection.completion = None
            self._end()

    def _end(self) -> None:
        """Keep the connection to the engine, if request and response are complete."""
        upload, tunnel = self._upload, self._tunnel
        if upload is not None:
            upload.cancel()
        if tunnel is None:
            return
        response = self._response
        if self._is_sent and response.is_complete and not response.is_last and not tunnel.transport.is_closing():
            self._proxy.keep(self._connection, tunnel)
        else:
            self._proxy.close(tunnel)

    def abandon(self) -> None:
        """Called when the client has disconnected, as of a completion."""
        self._is_abandoned = True
        if self._tunnel is not None:
            self._tunnel.transport.abort()

    def _head(self, has_body: bool) -> list[bytes]:
        """Encode the head. The engine requests a body that does not follow by "100 Continue"."""
        scope = self._scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        lines = [b"%b %b HTTP/1.1\r\n" % (scope["method"].encode(), target)]
        lines += [b"%b: %b\r\n" % header for header in scope["headers"] if header[0] not in _HOP_HEADERS]
        lines.append(b"\r\n" if has_body else b"expect: 100-continue\r\n\r\n")
        return lines

    def _framed(self, part: bytes | memoryview, last: bool) -> list[bytes | memoryview]:
        """Return a part of the body as the headers of the request announce it."""
        if not any(name == b"transfer-encoding" for name, _ in self._scope["headers"]):
            return [part]
        framed = [b"%x\r\n" % len(part), part, b"\r\n"] if part else []
        return [*framed, b"0\r\n\r\n"] if last else framed

    async def _complete_body(self) -> bytes | None:
        """Return the body if it has arrived and is small."""
        cycle = cast(Any, self._send).__self__
        if cycle.more_body or cycle.disconnected or len(cycle.body) > _PIECE_BYTES:
            return None
        body = await self._connection.read_body(self._send)
        return None if body is None else bytes(body)

    async def _send_body(self, writer: asyncio.StreamWriter) -> None:
        """Send the body as the engine reads it."""
        with suppress(OSError):  # the connection has ended: its reader reports that
            body = await self._connection.read_body(self._send)
            if body is not None:
                writer.writelines(self._framed(memoryview(cast(Any, body)), last=True))
                await writer.drain()
                self._is_sent = True
                return
            more = True
            while more:
                message = await self._receive()
                if message["type"] != "http.request":
                    self.abandon()
                    return
                more = bool(message.get("more_body", False))
                writer.writelines(self._framed(message.get("body", b""), last=not more))
                await writer.drain()
            self._is_sent = True

    async def _respond(self, tunnel: _Tunnel) -> None:
        response = self._response
        while not response.is_complete:
            try:
                data = await tunnel.reader.read(_PIECE_BYTES)
            except OSError as error:
                raise engine_gone() from error
            if not data:
                raise engine_gone()
            response.feed(data)
            if response.wants_body and self._upload is None:
                self._upload = asyncio.get_running_loop().create_task(self._send_body(tunnel.writer))
            messages, response.messages = response.messages, []
            for message in messages:
                await self._write(message)

    async def _write(self, message: dict[str, Any]) -> None:
        self._has_started = True
        if message["type"] == "http.response.start":
            self._has_events = (b"content-type", MEDIA_TYPE.encode()) in message["headers"]
        else:
            self._is_between_events = self._has_events and message["body"][-2:] == b"\n\n"
        await self._send(message)

    async def _fail(self, error: Unavailable) -> None:
        """Respond that the engine process has ended, as far as the response has not begun."""
        if self._is_between_events:
            event = encode_event(error_data(error))
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        elif self._has_started:
            cast(Any, self._connection).abort()
        else:
            await _respond_alone(self._scope, self._send, error)
