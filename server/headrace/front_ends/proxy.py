"""Front end's side of requests that the engine process answers: an ASGI application and gRPC methods that pass them on."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

from headrace.core.errors import Cancelled, HeadraceError, Unavailable
from headrace.front_ends.control import PIECE_BYTES, WINDOW_BYTES, CallHead, ControlStream, Hello, MessageKind
from headrace.front_ends.exchanges import HttpHead, pieces
from headrace.front_ends.meeting import EngineFacts, connect
from headrace.grpc.methods import GrpcCall, Message, Methods, RequestMessage, StreamCall
from headrace.grpc.status import ErrorStatus, StatusError
from headrace.http.event_stream import MEDIA_TYPE, encode_event, error_data
from headrace.http.infer_endpoint import Connection, Receive, Scope, Send, send_error
from headrace.inference.codec_threads import CodecThreads
from headrace.inference.request_options import RequestOptionsReader

logger = logging.getLogger("headrace.front_ends")

_ENGINE_GONE = "the engine process of the server has ended and is starting again: retry later"
_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
# Time for the response of a request that was cancelled because the drain timeout has passed.
_CANCEL_S = 2.0


def engine_gone() -> Unavailable:
    """Return the error of requests while there is no engine process."""
    return Unavailable(_ENGINE_GONE)


class Forwarded(Protocol):
    """A request that the engine answers: takes the messages of the engine, and its end."""

    def on_message(self, kind: int, fields: list[Any]) -> None:
        """Take a message."""

    def on_engine_gone(self) -> None:
        """The engine process has ended."""


class EngineLink:
    """A front end's control stream to the engine process, which connects again after each end of the engine.

    Ownership: the event loop.

    Args:
        address: of the engine's socket.
        hello: first message of the stream.
        on_open: called with the engine's answer and its descriptors each time the stream is open.
        on_lost: called each time the engine process has ended.
        on_notice: applies a change by its name and content, before it is acknowledged.
    """

    def __init__(
        self,
        address: bytes,
        hello: Hello,
        on_open: Callable[[EngineFacts, Sequence[int]], None],
        on_lost: Callable[[], None],
        on_notice: Callable[[str, Any], None],
    ) -> None:
        self._address = address
        self._hello = hello
        self._on_open = on_open
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._forwarded: dict[int, Forwarded] = {}
        self._last = 0
        self._stream: ControlStream | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """True while an engine process answers."""
        return self._stream is not None

    @property
    def stream(self) -> ControlStream:
        """The open stream; raises Unavailable while there is no engine process."""
        if self._stream is None:
            raise engine_gone()
        return self._stream

    def start(self) -> None:
        """Connect, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._connect())

    def close(self) -> None:
        """Close the stream."""
        if self._task is not None:
            self._task.cancel()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def open(self, forwarded: Forwarded) -> int:
        """Return the number of a new exchange."""
        self._last += 1
        self._forwarded[self._last] = forwarded
        return self._last

    def send(self, kind: MessageKind, *fields: object) -> None:
        """Send a message of no request; a no-op without an engine."""
        if self._stream is not None:
            self._stream.send(kind, 0, *fields)

    def end(self, number: int) -> None:
        """Forget an exchange."""
        self._forwarded.pop(number, None)

    async def _connect(self) -> None:
        pause_s = _RETRY_S
        while True:
            try:
                sock, answer, descriptors = await connect(self._address, self._hello)
                await self._open(sock, answer, descriptors)
                return
            except OSError:  # the engine has ended before it answered, or is starting and its socket is full
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _open(self, sock: socket.socket, answer: EngineFacts, descriptors: Sequence[int]) -> None:
        """Use the stream from its first message on: the engine may send, or end, before this task continues."""

        def opened() -> None:
            self._stream = stream
            self._on_open(answer, descriptors)

        stream = ControlStream(self._on_message, self._closed, opened)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, sock)

    def _closed(self) -> None:
        if self._stream is None:  # `close` was called
            return
        self._stream = None
        forwarded, self._forwarded = self._forwarded, {}
        for each in forwarded.values():
            each.on_engine_gone()
        self._on_lost()
        self.start()

    def _on_message(self, kind: int, number: int, fields: list[Any]) -> None:
        if kind == MessageKind.NOTICE:
            try:
                self._on_notice(*fields)
            finally:
                self.stream.send(MessageKind.ACK, number)
            return
        forwarded = self._forwarded.get(number)
        if forwarded is not None:
            forwarded.on_message(kind, fields)


class _Events:
    """Messages of the engine about one request, in order; `Forwarded`."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self.stream = link.stream
        self.number = link.open(self)
        self._events: deque[tuple[int, list[Any]]] = deque()
        self._changed: asyncio.Future[None] | None = None
        self.is_ended = False
        self._failure: Exception | asyncio.CancelledError | None = None
        # Bytes that may be sent before the engine returns credit.
        self.credit_bytes = 0
        self._has_credit: asyncio.Future[None] | None = None

    def on_message(self, kind: int, fields: list[Any]) -> None:
        """See `Forwarded`."""
        if kind == MessageKind.CREDIT:
            self.credit_bytes += fields[0]
            _resolve(self._has_credit)
            return
        if kind == MessageKind.GONE:
            self.fail(asyncio.CancelledError("the request was cancelled"))
            return
        self._events.append((kind, fields))
        _resolve(self._changed)

    def on_engine_gone(self) -> None:
        """See `Forwarded`."""
        self.fail(engine_gone())

    def fail(self, error: Exception | asyncio.CancelledError) -> None:
        """End the request on this side: `next` raises the error."""
        self._failure = self._failure or error
        _resolve(self._changed)
        _resolve(self._has_credit)

    async def next(self) -> tuple[int, list[Any]]:
        """Wait for the next message; raises the error of `fail`, Unavailable if the engine process has ended."""
        while not self._events:
            if self._failure is not None:
                raise self._failure
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        return self._events.popleft()

    async def wait_for_credit(self) -> None:
        """Wait until a piece may be sent."""
        while self.credit_bytes <= 0 and self._failure is None:
            self._has_credit = asyncio.get_running_loop().create_future()
            await self._has_credit

    def send(self, kind: MessageKind, *fields: object) -> None:
        """Send a message of this request."""
        self.stream.send(kind, self.number, *fields)

    async def send_message(self, content: bytes | memoryview, more: bool) -> None:
        """Send a part of the body, or a message, in pieces as credit allows."""
        views = pieces(content)
        for view in views[:-1]:
            await self.wait_for_credit()
            self.credit_bytes -= len(view)
            self.send(MessageKind.BODY, view, True)
        last = views[-1] if views else b""
        await self.wait_for_credit()
        self.credit_bytes -= len(last)
        self.send(MessageKind.BODY, last, more)

    def close(self) -> None:
        """End the exchange; the engine abandons it if it runs still."""
        if not self.is_ended:
            self.send(MessageKind.GONE)
        self._link.end(self.number)


def _resolve(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


# --- HTTP --------------------------------------------------------------------------------------------------------------


class HttpProxy:
    """ASGI application that passes requests to the engine process.

    While there is none, it responds 503 with Retry-After, and 200 to the liveness route.

    Args:
        link: to the engine.
        port: "http" or "metrics".
    """

    def __init__(self, link: EngineLink, port: str) -> None:
        self._link = link
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; other ASGI scopes (lifespan, WebSocket) are ignored."""
        if scope["type"] != "http":
            return
        if not self._link.is_up:
            await _respond_alone(scope, send, engine_gone())
            return
        await _ForwardedHttp(_Events(self._link), scope, receive, send).run(self._port)


async def _respond_alone(scope: Scope, send: Send, error: Unavailable) -> None:
    """Respond while there is no engine process: the server is live, and everything else gets the error."""
    if scope["path"] == "/v2/health/live" and scope["method"] in ("GET", "HEAD"):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
    else:
        await send_error(send, error)


class _ForwardedHttp:
    """One HTTP request on its way to the engine and back."""

    def __init__(self, events: _Events, scope: Scope, receive: Receive, send: Send) -> None:
        self._events = events
        self._scope = scope
        self._receive = receive
        self._send = send
        self._connection: Connection = scope["headrace.connection"]
        self._upload: asyncio.Task[None] | None = None
        self._has_started = False
        self._is_between_events = False  # of a body of events: an error may follow as one

    async def run(self, port: str) -> None:
        """Pass the request on and write the response."""
        scope, events = self._scope, self._events
        head = HttpHead(
            port,
            scope["http_version"],
            scope["method"],
            scope["scheme"],
            scope["path"],
            scope["raw_path"],
            scope["query_string"],
            scope["headers"],
            scope.get("client"),
            scope.get("server"),
            self._connection.peer_names,
        )
        body = await self._complete_body()
        events.send(MessageKind.HTTP, head, body)
        if body is None:
            self._upload = asyncio.get_running_loop().create_task(self._send_body())
        self._connection.completion = cast(Any, self)
        try:
            try:
                await self._respond()
            except asyncio.CancelledError:  # the drain timeout has passed: the engine may respond with an error
                if self._has_started or events.is_ended:
                    raise
                events.send(MessageKind.CANCEL)
                await asyncio.wait_for(self._respond(), _CANCEL_S)
        except Cancelled:  # the client has disconnected
            return
        except Unavailable as error:  # the engine process has ended
            events.is_ended = True
            if self._is_between_events:
                event = encode_event(error_data(error))
                await self._send({"type": "http.response.body", "body": event, "more_body": False})
            elif self._has_started:
                cast(Any, self._connection).abort()
            else:
                await _respond_alone(scope, self._send, error)
        finally:
            self._connection.completion = None
            if self._upload is not None:
                self._upload.cancel()
            events.close()

    def abandon(self) -> None:
        """Called when the client has disconnected, as of a completion."""
        self._events.fail(Cancelled("the client has disconnected"))

    async def _complete_body(self) -> bytes | None:
        """Return the body if it has arrived and fits into one frame."""
        cycle = cast(Any, self._send).__self__
        if cycle.more_body or cycle.disconnected or len(cycle.body) > PIECE_BYTES:
            return None
        body = await self._connection.read_body(self._send)
        return None if body is None else bytes(body)

    async def _send_body(self) -> None:
        """Send the body once the application in the engine reads it."""
        events = self._events
        await events.wait_for_credit()
        body = await self._connection.read_body(self._send)
        if body is not None:
            await events.send_message(memoryview(cast(Any, body)), False)
            return
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                self.abandon()
                return
            more = bool(message.get("more_body", False))
            await events.send_message(message.get("body", b""), more)
            if not more:
                return

    async def _respond(self) -> None:
        events = self._events
        kind, fields = await events.next()
        if kind == MessageKind.RAW:
            parts, more = [], True
            while more:
                _, (part, more) = await events.next()
                parts.append(part)
                events.send(MessageKind.CREDIT, len(part))
            events.is_ended = self._has_started = True
            if not self._connection.write_response(self._send, fields[0], parts):
                await self._connection.write_response_later(self._send, fields[0], parts)
            return
        status, headers = fields
        start = {"type": "http.response.start", "status": status, "headers": [tuple(pair) for pair in headers]}
        kind, fields = await events.next()
        self._has_started = True
        has_events = (b"content-type", MEDIA_TYPE.encode()) in start["headers"]
        await self._send(start)
        while True:
            part, more = fields
            self._is_between_events = has_events and part[-2:] == b"\n\n"
            await self._send({"type": "http.response.body", "body": part, "more_body": more})
            if not more:
                events.is_ended = True
                return
            events.send(MessageKind.CREDIT, len(part))
            kind, fields = await events.next()


# Time until a stream whose client sends no more messages sees that this process drains.
_STOP_INTERVAL_S = 1.0


# --- gRPC --------------------------------------------------------------------------------------------------------------


class ForwardedCall(Protocol):
    """Attributes of a call of either engine beyond `GrpcCall`.

    Attributes:
        option_headers: request options in the metadata, by name.
        peer_names: names in the client certificate.
    """

    option_headers: dict[str, str]
    peer_names: tuple[str, ...]
    deadline_ns: int

    @property
    def peer(self) -> str:
        """See `GrpcCall`."""


def proxy_methods(
    link: EngineLink, answer: EngineFacts, reader: RequestOptionsReader, threads: CodecThreads
) -> Methods:
    """Make gRPC methods that pass their calls to the engine process.

    Args:
        link: to the engine.
        answer: names of the methods.
        reader: parser of the request options.
        threads: decompress large messages.
    """
    proxy = GrpcProxy(link)
    return Methods(
        {path: proxy.unary_method(path) for path in answer.unary},
        {path: proxy.stream_method(path) for path in answer.streams},
        reader,
        frozenset(answer.open_paths),
        {},
        threads,
    )


class GrpcProxy:
    """Passes gRPC calls to the engine process.

    Args:
        link: to the engine.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    def unary_method(self, path: str) -> Any:
        """Return the method of a path with one message each way."""

        async def method(message: RequestMessage, call: GrpcCall) -> Message:
            return await self._call(path, message, call)

        return method

    def stream_method(self, path: str) -> Any:
        """Return the method of a path with streams of messages."""

        async def method(call: StreamCall) -> None:
            await self._stream(path, call)

        return method

    async def responses(self, path: str, message: bytes, call: StreamCall) -> AsyncGenerator[Message]:
        """Pass one message of a stream on, in a call of its own; yields the responses.

        Raises:
            StatusError: the call failed.
            Unavailable: there is no engine process.
        """
        events = _Events(self._link)
        try:
            events.send(MessageKind.STREAM, _call_head(path, cast(Any, call)))
            await _send_whole(events, message)
            del message
            events.send(MessageKind.HALF_CLOSE)
            parts: Message = []
            while True:
                kind, fields = await events.next()
                if kind == MessageKind.STATUS:
                    events.is_ended = True
                    if fields[0] != "OK":
                        raise _status_error(fields)
                    return
                part, more = fields
                parts.append(part)
                if not more:
                    yield parts
                    parts = []
                events.send(MessageKind.CREDIT, len(part))
        finally:
            events.close()

    async def _call(self, path: str, message: RequestMessage, call: GrpcCall) -> Message:
        events = _Events(self._link)
        try:
            events.send(MessageKind.CALL, _call_head(path, cast(Any, call)))
            await _send_whole(events, message)
            del message
            parts: Message = []
            while True:
                kind, fields = await events.next()
                if kind == MessageKind.STATUS:
                    events.is_ended = True
                    raise _status_error(fields)
                part, more = fields
                parts.append(part)
                if not more:
                    events.is_ended = True
                    return parts
                events.send(MessageKind.CREDIT, len(part))
        finally:
            events.close()

    async def _stream(self, path: str, call: StreamCall) -> None:
        events = _Events(self._link)
        events.credit_bytes = WINDOW_BYTES
        events.send(MessageKind.STREAM, _call_head(path, cast(Any, call)))
        reader = asyncio.get_running_loop().create_task(self._read(events, call))
        try:
            parts: Message = []
            while True:
                kind, fields = await events.next()
                if kind == MessageKind.STATUS:
                    events.is_ended = True
                    if fields[0] != "OK":
                        raise _status_error(fields)
                    return
                part, more = fields
                parts.append(part)
                if not more:
                    message, parts = parts, []
                    await call.write(message)
                events.send(MessageKind.CREDIT, len(part))
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
            events.close()

    async def _read(self, events: _Events, call: StreamCall) -> None:
        """Pass the messages of the client on."""
        try:
            while (message := await call.read()) is not None:
                await events.send_message(message, False)
                del message
            events.send(MessageKind.HALF_CLOSE)
            # A method with one request, such as Watch, ends only if it sees that the server stops; `read` has returned already.
            while True:
                await asyncio.sleep(_STOP_INTERVAL_S)
                if call.stopping:
                    break
            events.send(MessageKind.STOPPING)
        except Unavailable:  # this process drains
            events.send(MessageKind.STOPPING)
        except HeadraceError as error:  # the client has disconnected, or its message is invalid
            events.fail(error)


async def _send_whole(events: _Events, message: RequestMessage) -> None:
    """Send a message at once: the engine needs all of it, and returns credit for it later."""
    events.credit_bytes = len(message) + 1
    if len(message) <= PIECE_BYTES:
        events.send(MessageKind.BODY, message, False)
        return
    views = pieces(message)
    for number, view in enumerate(views, 1):
        events.send(MessageKind.BODY, view, number < len(views))
        await events.stream.drain()


def _call_head(path: str, call: ForwardedCall) -> CallHead:
    return CallHead(path, dict(call.option_headers), call.peer, call.peer_names, call.deadline_ns)


def _status_error(fields: list[Any]) -> StatusError:
    code, text, metadata = fields
    return StatusError(ErrorStatus(code, text, tuple((name, value) for name, value in metadata)))
