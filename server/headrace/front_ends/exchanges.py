"""Requests that front ends pass to the engine process: each runs through the application or the gRPC method of one process."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.core.clock import monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import Cancelled, Unavailable, forget_frames
from headrace.core.limits import BodyReservation, ClientLimits
from headrace.front_ends.control import PIECE_BYTES, WINDOW_BYTES, CallHead, ControlStream, MessageKind
from headrace.grpc.methods import Message, Methods, StreamMethod, UnaryMethod
from headrace.grpc.response_room import ResponseRoom
from headrace.grpc.status import error_status
from headrace.inference.request_options import RequestOptions

logger = logging.getLogger("headrace.front_ends")

Application = Callable[..., Any]
# Ends of the paths of reports with counts of requests.
_REPORTS = ("/metrics", "/stats", "/status", "/explain")


def pieces(part: bytes | memoryview) -> list[memoryview]:
    """Cut a part of a body into pieces for frames."""
    view = memoryview(part)
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    return [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]


class Exchange:
    """One request of a front end, in the engine process. Ownership: the event loop.

    Args:
        stream: of the front end.
        number: id of the exchange on it.
        on_ended: called once with the number.

    Attributes:
        completion: completion for which the request waits; abandoned when the client disconnects.
        peer_names: names in the client certificate.
        is_gone: the client has disconnected.
    """

    def __init__(self, stream: ControlStream, number: int, on_ended: Callable[[int], None]) -> None:
        self._stream = stream
        self._number = number
        self._on_ended = on_ended
        self.completion: LoopCompletion | None = None
        self.peer_names: tuple[str, ...] = ()
        self.is_gone = False
        self._parts: deque[tuple[bytes, bool]] = deque()
        self._unread_bytes = 0  # sent, and not yet written to the client
        self._changed: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def receive_part(self, content: bytes, more: bool) -> None:
        """Take a part of the body or of a message."""
        self._parts.append((content, more))
        self._wake()

    def credit(self, size_bytes: int) -> None:
        """Count bytes that the client has read."""
        self._unread_bytes -= size_bytes
        self._wake()

    def gone(self) -> None:
        """Abandon the request: the client has disconnected."""
        self.is_gone = True
        if self.completion is not None:
            self.completion.abandon()
        self._wake()

    def interrupt(self) -> None:
        """Cancel the task of the request, which may respond with an error: the drain timeout has passed."""
        if self._task is not None:
            self._task.cancel()

    def cancel(self) -> None:
        """Abandon the request: its front end has ended, or the server stops without waiting."""
        self.gone()
        if self.completion is None and self._task is not None:
            self._task.cancel()

    def _send(self, kind: MessageKind, *fields: object) -> None:
        self._stream.send(kind, self._number, *fields)

    async def _send_body(self, part: bytes | memoryview, more: bool) -> None:
        """Send a part in pieces; waits while the client reads slowly."""
        views = pieces(part)
        for view in views[:-1]:
            await self._wait_for_room()
            self._unread_bytes += len(view)
            self._send(MessageKind.BODY, view, True)
        last = views[-1] if views else b""
        await self._wait_for_room()
        self._unread_bytes += len(last)
        self._send(MessageKind.BODY, last, more)

    async def _wait_for_room(self) -> None:
        while self._unread_bytes > WINDOW_BYTES and not self.is_gone:
            await self._wait()

    async def _wait(self) -> None:
        """Wait for the next event of the front end."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    def _run(self, task: asyncio.Task[None]) -> None:
        self._task = task
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._parts.clear()
        self._on_ended(self._number)
        if task.cancelled() and not self.is_gone:
            self._send(MessageKind.GONE)
        if not task.cancelled() and task.exception() is not None:
            logger.error("an exchange with a front end failed", exc_info=task.exception())


class HttpHead(msgspec.Struct, array_like=True):
    """Head of an HTTP request, the fields of its ASGI scope.

    Attributes:
        port: "http" or "metrics".
        peer_names: names in the client certificate.
    """

    port: str
    http_version: str
    method: str
    scheme: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    server: tuple[str, int] | None
    peer_names: tuple[str, ...]


class HttpExchange(Exchange):
    """An HTTP request of a front end; the `Connection` of `headrace.http.infer_endpoint`.

    Args:
        head: of the request.
        body: of the request, if it was complete; else None.
        client_limits: limits of the engine process.
    """

    def __init__(
        self,
        stream: ControlStream,
        number: int,
        on_ended: Callable[[int], None],
        head: HttpHead,
        body: bytes | None,
        client_limits: ClientLimits,
    ) -> None:
        super().__init__(stream, number, on_ended)
        self.peer_names = head.peer_names
        self._body = body
        self._has_body = body is not None
        self._is_read = self._has_requested = self._has_started = False
        self._reservation = client_limits.reserve()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.http_version,
            "method": head.method,
            "scheme": head.scheme,
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query_string,
            "root_path": "",
            "headers": [(name, value) for name, value in head.headers],
            "client": head.client,
            "server": head.server,
            "state": {},
            "headrace.connection": self,
            "headrace.reservation": self._reservation,
        }

    def start(self, application: Application, before: Awaitable[None] | None) -> None:
        """Run the request, after `before`."""
        self._run(asyncio.get_running_loop().create_task(self._serve(application, before)))

    async def _serve(self, application: Application, before: Awaitable[None] | None) -> None:
        try:
            if before is not None:
                await before
            await application(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self.is_gone:
                raise
        except Exception:
            logger.exception("Exception in ASGI application")
            if not self._has_started:
                await self.send({"type": "http.response.start", "status": 500, "headers": []})
                await self.send({"type": "http.response.body", "body": b"Internal Server Error"})
        finally:
            self._scope = {}
            self._reservation.end()

    # --- ASGI ---------------------------------------------------------------------------------------------------------

    async def receive(self) -> dict[str, Any]:
        """Return the next message of ASGI: a part of the body, or the disconnect of the client."""
        if self._has_body and not self._is_read:
            body, self._body, self._is_read = self._body, None, True
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._has_requested and not self._is_read:
            self._has_requested = True
            self._send(MessageKind.CREDIT, WINDOW_BYTES)
        while not self._parts:
            if self.is_gone:
                return {"type": "http.disconnect"}
            await self._wait()
        content, more = self._parts.popleft()
        if more:
            self._send(MessageKind.CREDIT, len(content))
        else:
            self._is_read = True
        return {"type": "http.request", "body": content, "more_body": more}

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message of ASGI: the head of the response, or a part of its body."""
        if self.is_gone:
            return
        if message["type"] == "http.response.start":
            self._has_started = True
            self._send(MessageKind.HEAD, message["status"], list(message.get("headers", ())))
        else:
            await self._send_body(message.get("body", b""), bool(message.get("more_body", False)))

    # --- headrace.http.infer_endpoint.Connection ------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """See `Connection`."""
        return self.is_gone

    async def read_body(self, send: Any) -> bytes | None:
        """See `Connection`."""
        if not self._has_body:
            return None
        body, self._body, self._is_read = self._body, None, True
        return body

    def remember_head(self, endpoint: Any, head: Any) -> None:
        """See `Connection`; front ends have the caches of heads."""

    def write_response(self, send: Any, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """See `Connection`."""
        if self.is_gone:
            return True
        if sum(memoryview(part).nbytes for part in parts) > PIECE_BYTES:
            return False
        self._has_started = True
        self._send(MessageKind.RAW, head)
        self._send(MessageKind.BODY, b"".join(parts), False)
        return True

    async def write_response_later(self, send: Any, head: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """See `Connection`."""
        self._has_started = True
        self._send(MessageKind.RAW, head)
        for part in parts:
            await self._send_body(part, True)
        self._send(MessageKind.BODY, b"", False)


class CallExchange(Exchange):
    """A gRPC call of a front end; implements `GrpcCall` and `StreamCall`.

    Args:
        head: of the call.
        methods: of the engine process.
        client_limits: limits of the engine process.
    """

    def __init__(
        self,
        stream: ControlStream,
        number: int,
        on_ended: Callable[[int], None],
        head: CallHead,
        methods: Methods,
        client_limits: ClientLimits,
    ) -> None:
        super().__init__(stream, number, on_ended)
        self.peer_names = head.peer_names
        self.received_ns = monotonic_ns()
        self.deadline_ns = head.deadline_ns
        self.reservation = BodyReservation(client_limits)
        self.load_report = b""  # the front end sends one of its own
        self.take: Callable[[bytes], bool] | None = None  # never called: `read` returns all messages
        self.stopping = False
        self._head = head
        self._methods = methods
        self._client_limits = client_limits
        self._room: ResponseRoom | None = None
        self._message: list[bytes] = []
        self._before: Awaitable[None] | None = None
        self._is_half_closed = False

    def start(self, before: Awaitable[None] | None) -> None:
        """Run a method with streams; a unary one starts with its message, after `before`."""
        self._before = before
        method = self._methods.streams.get(self._head.path)
        if method is not None:
            self._run(asyncio.get_running_loop().create_task(self._serve_stream(method)))

    def receive_part(self, content: bytes, more: bool) -> None:
        """Take a part of a message; start a unary method with its message."""
        method = self._methods.unary.get(self._head.path)
        if method is None:
            super().receive_part(content, more)
            return
        self._message.append(content)
        if not more:
            message = self._message[0] if len(self._message) == 1 else b"".join(self._message)
            self._message = []
            self.received_ns = monotonic_ns()
            self._run(asyncio.get_running_loop().create_task(self._serve_unary(method, message)))

    def half_close(self) -> None:
        """End the messages of the client."""
        self._is_half_closed = True
        self._wake()

    def stop(self) -> None:
        """Set `stopping`: the front end drains."""
        self.stopping = True
        self._wake()

    def gone(self) -> None:
        """See `Exchange`; the method is cancelled if it does not wait for a completion.

        A stream waits for responses after its client has half-closed: nothing of `read` and `write` would end it.
        """
        waits = self.completion is not None
        super().gone()
        if not waits and self._task is not None:
            self._task.cancel()
        elif self._task is None:
            self._on_ended(self._number)

    async def _serve_unary(self, method: UnaryMethod, message: bytes) -> None:
        try:
            if self._before is not None:
                await self._before
            response = await method(message, self)
            del message
            for part in response[:-1]:
                await self._send_body(part, True)
            await self._send_body(response[-1] if response else b"", False)
        except asyncio.CancelledError:
            if not self.is_gone:
                raise
        except Exception as error:
            self._fail(error)
        finally:
            self._close()

    async def _serve_stream(self, method: StreamMethod) -> None:
        try:
            await method(self)
            self._send(MessageKind.STATUS, "OK", "", [])
        except asyncio.CancelledError:
            if not self.is_gone:
                raise
        except Exception as error:
            self._fail(error)
        finally:
            self._close()

    def _fail(self, error: Exception) -> None:
        if not self.is_gone:
            status = error_status(error, self.deadline_ns)
            self._send(MessageKind.STATUS, status.code, status.text, [list(pair) for pair in status.metadata])
        forget_frames(error)

    def _close(self) -> None:
        self.reservation.end()
        if self._room is not None:
            self._room.close()

    # --- headrace.grpc.methods.GrpcCall and StreamCall ------------------------------------------------------------------

    @property
    def options(self) -> RequestOptions:
        """See `GrpcCall`."""
        reader = self._methods.options_reader
        access = reader.access
        peer = access.certificate_principal(self.peer_names) if access.has_keys and self.peer_names else None
        return reader.read(self._head.options, peer)

    @property
    def peer(self) -> str:
        """See `GrpcCall`."""
        return self._head.peer

    @property
    def room(self) -> ResponseRoom:
        """See `GrpcCall`."""
        if self._room is None:
            self._room = ResponseRoom(self._client_limits, lambda: False)
        return self._room

    def admit(self, size_bytes: int) -> None:
        """See `GrpcCall`."""
        self.room.admit(size_bytes)

    async def read(self) -> bytes | None:
        """See `StreamCall`."""
        message: list[bytes] = []
        while True:
            while self._parts:
                content, more = self._parts.popleft()
                self._send(MessageKind.CREDIT, len(content))
                message.append(content)
                if not more:
                    return message[0] if len(message) == 1 else b"".join(message)
            if self.is_gone:
                raise Cancelled("the client disconnected")
            if self.stopping:
                raise Unavailable("the server is shutting down")
            if self._is_half_closed:
                return None
            await self._wait()

    def write_now(self, message: Message, *, last: bool) -> bool:
        """See `StreamCall`."""
        size_bytes = sum(map(len, message))
        if self.is_gone or size_bytes > PIECE_BYTES or self._unread_bytes > WINDOW_BYTES:
            return False
        self._unread_bytes += size_bytes
        self._send(MessageKind.BODY, b"".join(message), False)
        return True

    async def write(self, message: Message) -> None:
        """See `StreamCall`."""
        if not self.write_now(message, last=False):
            for part in message[:-1]:
                await self._send_body(part, True)
            await self._send_body(message[-1], False)
        if self.is_gone:
            raise Cancelled("the client disconnected")


class FrontEndPeer:
    """The engine's end of the control stream of one front end.

    Ownership: the event loop.

    Args:
        applications: ASGI applications by port: "http", "metrics".
        methods: of gRPC; None without gRPC.
        http_limits, grpc_limits: limits of the engine process.
        flush: collects the counts of all front ends, before a report is made from them.
        on_record: takes records of requests that the front end has served.
        on_answered: called after each exchange, which may have changed settings.
        on_closed: called once after the stream is closed.

    Attributes:
        stream: the stream.
        opened: set once the stream is open.
    """

    def __init__(
        self,
        applications: Mapping[str, Application],
        methods: Methods | None,
        http_limits: ClientLimits,
        grpc_limits: ClientLimits,
        flush: Callable[[], Awaitable[None]],
        on_record: Callable[[bytes], None],
        on_answered: Callable[[], None],
        on_closed: Callable[[FrontEndPeer], None],
    ) -> None:
        self._applications = applications
        self._methods = methods
        self._http_limits = http_limits
        self._grpc_limits = grpc_limits
        self._flush = flush
        self._on_record = on_record
        self._on_answered = on_answered
        self._on_closed = on_closed
        self._exchanges: dict[int, Exchange] = {}
        self._notices: dict[int, asyncio.Future[None]] = {}
        self._last_notice = 0
        self.stream = ControlStream(self._on_message, self._closed)
        self.opened = asyncio.Event()

    async def notify(self, name: str, content: object) -> None:
        """Send a change and wait until the front end has applied it, or has ended."""
        if not self.stream.is_open:
            return
        self._last_notice += 1
        waiter = self._notices[self._last_notice] = asyncio.get_running_loop().create_future()
        self.stream.send(MessageKind.NOTICE, self._last_notice, name, content)
        await waiter

    def notify_later(self, name: str, content: object) -> None:
        """Send a change, without a wait."""
        self.stream.send(MessageKind.NOTICE, 0, name, content)

    def cancel(self) -> None:
        """End all exchanges."""
        for exchange in list(self._exchanges.values()):
            exchange.cancel()

    def _closed(self) -> None:
        self.cancel()
        for waiter in self._notices.values():
            if not waiter.done():
                waiter.set_result(None)
        self._notices.clear()
        self._on_closed(self)

    def _forget(self, number: int) -> None:
        self._exchanges.pop(number, None)
        self._on_answered()

    def _on_message(self, kind: int, number: int, fields: list[Any]) -> None:
        if kind == MessageKind.HTTP:
            head = msgspec.convert(fields[0], HttpHead)
            http = HttpExchange(self.stream, number, self._forget, head, fields[1], self._http_limits)
            self._exchanges[number] = http
            http.start(self._applications[head.port], self._flush() if head.path.endswith(_REPORTS) else None)
            return
        if kind in (MessageKind.CALL, MessageKind.STREAM):
            assert self._methods is not None
            call_head = msgspec.convert(fields[0], CallHead)
            call = CallExchange(self.stream, number, self._forget, call_head, self._methods, self._grpc_limits)
            self._exchanges[number] = call
            call.start(self._flush() if call_head.path.endswith("/ModelStatistics") else None)
            return
        if kind == MessageKind.RECORD:
            self._on_record(*fields)
            return
        if kind == MessageKind.ACK:
            waiter = self._notices.pop(number, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            return
        exchange = self._exchanges.get(number)
        if exchange is None:  # it has ended
            return
        if kind == MessageKind.BODY:
            exchange.receive_part(*fields)
        elif kind == MessageKind.CREDIT:
            exchange.credit(*fields)
        elif kind == MessageKind.GONE:
            exchange.gone()
        elif kind == MessageKind.CANCEL:
            exchange.interrupt()
        elif isinstance(exchange, CallExchange):
            if kind == MessageKind.HALF_CLOSE:
                exchange.half_close()
            elif kind == MessageKind.STOPPING:
                exchange.stop()
