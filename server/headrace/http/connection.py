"""HTTP/1.1 connection: uvicorn's protocol with five fast paths for inference, limits and timeouts.

The endpoint reaches the fast paths through `headrace.connection` in the ASGI scope:

- Repeated requests. A request whose head equals that of an earlier one is served without parser and task (`RepeatedRequest`).
- Disconnects. In ASGI, only a pending `receive` reports a disconnect, which takes a task for each request. Here the connection
  abandons the completion of its request.
- Complete bodies. A body that has arrived is returned without a call of `receive`.
- Large bodies. The rest of a large body goes directly into one array, without the parser (`SocketReader`).
- Responses. A response is written in one call, without uvicorn's checks of headers.

The fast paths use attributes of uvicorn's request cycle. The pinned version has them, and tests run with and without the fast
paths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, NoReturn

import httptools
import numpy as np
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.core.access import certificate_names
from headrace.core.clock import monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import Cancelled, Overloaded, Unavailable, forget_frames
from headrace.core.limits import BodyReservation, ClientLimits
from headrace.http.infer_endpoint import InferEndpoint, ParsedHead, content_length, error_response, success_head
from headrace.http.origins import ANY_HOST, HostPolicy
from headrace.inference.response_metadata import header_lines
from headrace.inference.service import PendingRequest
from headrace.inference.tensor_codec import BodyBytes

# --- Timeouts: headers, body, and a client that does not read its response ---------------------------------------------
#
# One timer serves all connections and ticks a few times within the shortest timeout, so that no request sets a timer. Each
# connection stores its stage and the tick at which that stage began.

# Time for a client to read the error on a connection that the server has ended, seconds.
LINGER_S = 2.0


class Stage(IntEnum):
    """Stage of an HTTP connection: the event it waits for.

    Attributes:
        BETWEEN: the next request; nothing has arrived.
        HEADERS: the end of the headers, since the connection was made or since their first byte.
        BODY: the end of the request body.
        ENDING: the client's close: the server has sent its last response.
    """

    BETWEEN = 0
    HEADERS = 1
    BODY = 2
    ENDING = 3


class ConnectionTimeouts:
    """Enforces the timeouts of all connections of one listener.

    Ownership: the event loop.

    Args:
        client_limits: `header_timeout_s`, `body_timeout_s` and `stall_timeout_s`; counts the connections that reach one.

    Attributes:
        epoch: ticks of the timer since the start.
    """

    def __init__(self, client_limits: ClientLimits) -> None:
        limits = client_limits.limits
        shortest_s = min(limits.header_timeout_s, limits.body_timeout_s, limits.stall_timeout_s)
        self._tick_s = min(5.0, max(0.02, shortest_s / 4))
        self._header_ticks = round(limits.header_timeout_s / self._tick_s)
        self._body_ticks = round(limits.body_timeout_s / self._tick_s)
        self._stall_ticks = round(limits.stall_timeout_s / self._tick_s)
        self._linger_ticks = max(1, round(LINGER_S / self._tick_s))
        self._client_limits = client_limits
        self._timer: asyncio.TimerHandle | None = None
        # For each connection: its unread bytes when they last changed, and the epoch of that change.
        self._connections: dict[HeadraceHttpProtocol, tuple[int, int]] = {}
        self.epoch = 0

    def add(self, connection: HeadraceHttpProtocol) -> None:
        """Add a new connection."""
        self._connections[connection] = (0, self.epoch)
        if self._timer is None:
            self._arm()

    def discard(self, connection: HeadraceHttpProtocol) -> None:
        """Remove a closed connection; the timer stops with the last one."""
        self._connections.pop(connection, None)
        if not self._connections and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self.epoch += 1
        self._timer = None
        for connection, unread in list(self._connections.items()):
            self._check(connection, *unread)
        if self._connections:
            self._arm()

    def _check(self, connection: HeadraceHttpProtocol, unread_before: int, since: int) -> None:
        # Bytes of responses that the client has not read.
        unread, epoch = connection.transport.get_write_buffer_size(), self.epoch
        if not unread or unread != unread_before:
            self._connections[connection] = (unread, epoch)
        elif epoch - since > self._stall_ticks:
            self._client_limits.hit("stall_timeout_s")
            connection.abort()
            return
        stage, age = connection.stage, epoch - connection.since
        if stage is Stage.BETWEEN:
            if connection.is_idle_without_timer():
                connection.stage, connection.since = Stage.HEADERS, epoch
        elif stage is Stage.HEADERS:
            if age > self._header_ticks:
                self._client_limits.hit("header_timeout_s")
                connection.time_out("the headers of a request did not arrive in time")
        elif stage is Stage.BODY:
            if connection.is_waiting_for_server():
                connection.since = epoch
            elif age > self._body_ticks:
                self._client_limits.hit("body_timeout_s")
                connection.time_out("the body of the request did not arrive in time")
        elif age > self._linger_ticks:
            connection.abort()


# --- Socket reader -----------------------------------------------------------------------------------------------------
#
# Headers and small bodies go through the HTTP parser, large bodies directly into one array. The parser copies a body four times
# (socket buffer, parser, request cycle, joined chunks), which is a large part of the cost of a 600 KB image. After the headers,
# the rest of a body with Content-Length needs no parser: `recv` writes into its final array.

# Smaller bodies go through the parser: its copies cost less than the switch to direct reading.
MIN_DIRECT_BYTES = 65536

# `recv` writes bytes for the parser here. The buffer is small, so that little of a large body goes through the parser. All
# connections of a process share one: it is emptied before the event loop continues.
READ_BYTES = 16384
_SCRATCH = memoryview(bytearray(READ_BYTES))


@dataclass(slots=True)
class _Body:
    array: BodyBytes | None
    missing_bytes: int
    complete: asyncio.Future[BodyBytes | None]
    on_complete: Callable[[BodyBytes | None], None]


class SocketReader(asyncio.BufferedProtocol):
    """Transport protocol in front of the HTTP protocol: selects the buffer for the next bytes.

    Args:
        http: HTTP protocol of the connection; receives all other events.
        on_body_data: called with the number of bytes when a part of a direct body has arrived; may call `end_body` or
            `drop_body`.
    """

    def __init__(self, http: asyncio.Protocol, on_body_data: Callable[[int], None]) -> None:
        self._http = http
        self._on_body_data = on_body_data
        self._body: _Body | None = None

    def receive_body(
        self, size_bytes: int, start: bytes | bytearray, on_complete: Callable[[BodyBytes | None], None]
    ) -> asyncio.Future[BodyBytes | None]:
        """Receive the rest of a body directly into one array.

        The array is not touched before data arrive, so that a large Content-Length alone commits no memory.

        Args:
            size_bytes: of the complete body, larger than `start`.
            start: first part of the body, already received.
            on_complete: called with the complete body as uint8[size_bytes], or None if it was dropped, before further bytes
                are read.

        Returns:
            Future of the complete body; its result is None if the client disconnects first or the body is dropped.
        """
        array: BodyBytes = np.empty(size_bytes, np.uint8)
        array.data[: len(start)] = start
        complete: asyncio.Future[BodyBytes | None] = asyncio.get_running_loop().create_future()
        self._body = _Body(array, size_bytes - len(start), complete, on_complete)
        return complete

    def drop_body(self) -> None:
        """Free the array; the rest of the body is read and discarded."""
        if self._body is not None:
            self._body.array = None

    def end_body(self) -> None:
        """End the direct body: the next bytes go to the HTTP parser."""
        body, self._body = self._body, None
        if body is not None and not body.complete.done():
            body.complete.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes; it ends with the body, so that bytes of the next request stay out of it."""
        body = self._body
        if body is None:
            return _SCRATCH
        return _SCRATCH[: body.missing_bytes] if body.array is None else body.array.data[-body.missing_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        """Process `nbytes` that were written into the buffer."""
        body = self._body
        if body is None:
            self._http.data_received(bytes(_SCRATCH[:nbytes]))
            return
        body.missing_bytes -= nbytes
        self._on_body_data(nbytes)
        if self._body is body and not body.missing_bytes:
            self._body = None
            body.on_complete(body.array)
            if not body.complete.done():
                body.complete.set_result(body.array)

    def connection_lost(self, exc: Exception | None) -> None:
        """End an incomplete body and pass the event on."""
        self.end_body()
        self._http.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Pass the event on: the client has half-closed."""
        return self._http.eof_received()

    def pause_writing(self) -> None:
        """Pass the event on."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass the event on."""
        self._http.resume_writing()


# --- Repeated requests -------------------------------------------------------------------------------------------------
#
# Clients repeat the same head with each request, byte for byte. Parsing, the task and the steps of ASGI take half of the event
# loop's time of a small request. So parsed heads are cached by their bytes, as HTTP/2 caches header blocks. A read that has a
# cached head and exactly its body is decoded and queued immediately, and the callback of its completion writes the response.
# uvicorn serves all other requests.

logger = logging.getLogger("headrace.http")


class RepeatedRequest:
    """One request: `begin` starts it, the callback of its completion ends it.

    It replaces uvicorn's RequestResponseCycle in the connection, and the task of the request in the server's set of tasks. A
    shutdown waits for these tasks and cancels them after the drain timeout.

    Ownership: the event loop.

    Args:
        connection: of the request.
        endpoint: serves the request.
        head: of the request, cached.
        reservation: of its body; released at the end of the request.

    Attributes:
        disconnected, keep_alive, response_started, response_complete: see uvicorn's RequestResponseCycle.
    """

    __slots__ = (
        "_connection",
        "_endpoint",
        "_head",
        "_pending",
        "_reservation",
        "_writing",
        "disconnected",
        "keep_alive",
        "on_response",
        "response_complete",
        "response_started",
    )

    body = b""
    more_body = waiting_for_100_continue = False
    message_event = SimpleNamespace(set=bool)  # nothing waits for parts of the request: `set` does nothing

    def __init__(
        self, connection: HeadraceHttpProtocol, endpoint: InferEndpoint, head: ParsedHead, reservation: BodyReservation
    ) -> None:
        self._connection = connection
        self._endpoint = endpoint
        self._head = head
        self._reservation = reservation
        self._pending: PendingRequest | None = None
        self._writing: asyncio.Task[None] | None = None
        self.on_response = connection.on_repeated_complete
        self.disconnected = self.response_started = self.response_complete = False
        self.keep_alive = True

    def begin(self, body: bytes) -> None:
        """Decode and queue the request; never raises."""
        endpoint, head = self._endpoint, self._head
        service, options = endpoint.service, head.headers.options
        pending = self._pending = PendingRequest(head.model, head.version, monotonic_ns(), options)
        try:
            handle = service.lease(pending)
            deadline_ns = options.deadline_ns(pending.received_ns) if options.timeout_ns else 0
            completion = service.enqueue(pending, handle, body, head.headers.header_size, deadline_ns)
        except Exception as error:
            self._fail(pending, error)
            return
        self._connection.completion = completion
        completion.then(self._finish)

    def cancel(self, msg: str | None = None) -> None:
        """End the request with an error after the drain timeout; see `asyncio.Task.cancel`."""
        if self._writing is not None:
            self._writing.cancel()
            self._end()
            self._connection.transport.abort()
        elif self._pending is not None:
            self._pending.completion.settle(
                Unavailable("the server is shutting down and could not wait for this request")
            )

    def _finish(self) -> None:
        """Write the response, after the completion is settled; never raises."""
        pending = self._pending
        assert pending is not None, "a completion calls back once"
        self._connection.completion = None
        endpoint, accept_encoding = self._endpoint, self._head.headers.accept_encoding
        try:
            if (pending.template.is_costly or accept_encoding) and endpoint.service.is_large(pending, True):
                large = endpoint.respond_large(pending, self._head.headers, self._write, self._fail)
                self._writing = self._connection.loop.create_task(large)
                return
            header_size, parts, extra_headers = endpoint.finish(pending)
            if self._head.headers.cors:
                extra_headers = extra_headers.with_pairs(self._head.headers.cors)
            head, parts = success_head(header_size, parts, accept_encoding, extra_headers)
            self._write(head, parts)
        except Exception as error:
            self._fail(pending, error)

    def _fail(self, pending: PendingRequest, error: Exception) -> None:
        try:
            failure, load_headers = self._endpoint.fail(pending, error)
            forget_frames(error)
            if isinstance(failure, Cancelled):
                self._end()
                return
            status, headers, body = error_response(failure)
            self._write(STATUS_LINE[status] + header_lines([*headers, *load_headers, *self._head.headers.cors]), [body])
        except Exception:
            logger.exception("the response of a failed request could not be written")
            self._end()
            self._connection.transport.abort()

    def _write(self, head: bytes, parts: Sequence[bytes | memoryview]) -> None:
        if self._connection.write(self, head, parts):
            self._end()
        else:
            self._writing = self._connection.loop.create_task(self._write_later(head, parts))

    async def _write_later(self, head: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Write the response after the write buffer has room again."""
        try:
            while not self._connection.write(self, head, parts):
                await self._connection.flow.drain()
        finally:
            self._end()

    def _end(self) -> None:
        self._reservation.end()
        self._connection.tasks.discard(self)
        self._pending = self._writing = None  # an idle connection holds no tensors


# --- Connection --------------------------------------------------------------------------------------------------------

# Larger responses are written in parts: joining them costs more than another entry in the write queue.
_JOIN_BELOW_BYTES = 65536
# Allowed bytes per chunk besides its data: size, two line ends, an extension. More bytes count as headers.
_CHUNK_FRAME_BYTES = 32
_HEADERS, _CHUNKS = "max_header_bytes", "max_chunks"


class _RefusedError(Exception):
    """Raised in callbacks of the parser to stop it; the parser replaces it by its own error."""


class HeadraceHttpProtocol(HttpToolsProtocol):
    """Server side of one HTTP/1.1 connection; implements `headrace.http.infer_endpoint.Connection`.

    Ownership: the event loop.

    Args:
        client_limits: limits of all connections and requests. The endpoint checks the Content-Length.
        timeouts: of all connections of the listener.
        hosts: checks the host of each parsed request.

    Attributes:
        completion: completion of the running request, which a disconnect abandons; None for none.
        peer_names: names in the client certificate; empty without one.
        stage: the event that the connection waits for.
        since: tick (`ConnectionTimeouts.epoch`) at which the stage began.
    """

    def __init__(
        self,
        *args: Any,
        client_limits: ClientLimits,
        timeouts: ConnectionTimeouts,
        hosts: HostPolicy = ANY_HOST,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._hosts = hosts
        self.completion: LoopCompletion | None = None
        self.stage, self.since = Stage.HEADERS, timeouts.epoch
        self._client_limits = client_limits
        self._timeouts = timeouts
        self._reader = SocketReader(self, self._direct_data)
        self._direct_body: tuple[RequestResponseCycle, asyncio.Future[BodyBytes | None]] | None = None
        self._checked_cycle: RequestResponseCycle | None = None
        # The cycle whose application runs. With pipelined requests it is not the last one, which is `self.cycle`.
        self._active_cycle: RequestResponseCycle | None = None
        self._endpoint: InferEndpoint | None = None  # serves requests with a cached head
        self._heads: dict[bytes, ParsedHead] = {}  # the cached heads, which connections share
        self.peer_names: tuple[str, ...] = ()
        self._repeatable_head = b""  # of the last parsed request, if one read had it and nothing else
        self._idle_since_s = 0.0  # event loop time at which the last repeated request was answered
        self._refusal = (0, "")
        self._has_received = False
        self._reservation = client_limits.reserve()  # of the request that is being read; also in its scope
        # Of the request that is being read: header bytes without the first read; chunks; body bytes with chunk framing; body
        # bytes without it.
        self._header_bytes = self._chunks = self._wire_bytes = self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Install the socket reader; refuse the connection if there are too many."""
        super().connection_made(transport)
        transport.set_protocol(self._reader)
        self.peer_names = certificate_names(transport.get_extra_info("peercert"))
        self._timeouts.add(self)
        if not self._client_limits.enter():
            max_connections = self._client_limits.limits.max_connections
            self.on_over_limit(f"the server has {max_connections} connections, which is its limit: retry later")

    def on_over_limit(self, text: str) -> None:
        """Refuse a new connection over the limit."""
        self._refuse(503, text)

    def connection_lost(self, exc: Exception | None) -> None:
        """Abandon the running request and break reference cycles."""
        self._client_limits.leave()
        self._timeouts.discard(self)
        self._mark_disconnected()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self.completion is not None:
            self.completion.abandon()
        for cycle, _ in self.pipeline:  # pipelined requests that were not started
            cycle.scope["headrace.reservation"].end()  # type: ignore[typeddict-item]
        self.pipeline.clear()
        # Break reference cycles: otherwise a body would stay in memory until the garbage collector runs.
        self.cycle = self.scope = self._reader = self._direct_body = self._checked_cycle = None  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active_cycle = cycle
        super()._start_asgi_task(cycle, self._serve)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application, then release the reservation of the request body."""
        try:
            await self.app(scope, receive, send)
        finally:
            scope["headrace.reservation"].end()

    def _mark_disconnected(self) -> None:
        """Mark the running request as disconnected, so that a send that waits for the write buffer returns instead of raising."""
        cycle = self._active_cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self._active_cycle = None

    # --- The parser's callbacks ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request; its scope refers to this connection."""
        super().on_message_begin()
        self.stage, self.since, self._header_bytes = Stage.HEADERS, self._timeouts.epoch, 0
        self.scope["headrace.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._reservation = self.scope["headrace.reservation"] = self._client_limits.reserve()  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """Check the size of the headers, and the host."""
        limit = self._client_limits.limits.max_header_bytes
        if self._header_bytes + 2 * READ_BYTES > limit:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > limit:
                self._client_limits.hit(_HEADERS)
                self._refuse_from_parser(431, f"the headers are larger than {limit} bytes")
        refusal = self._hosts.refusal(self.url, self.headers, self.parser.get_http_version())
        if refusal is not None:
            self._refuse_from_parser(*refusal)
        self.stage, self.since = Stage.BODY, self._timeouts.epoch
        self._chunks = self._wire_bytes = self._body_bytes = 0
        super().on_headers_complete()
        self.headers = []  # a new list: the parser would append trailers to the one of the application

    def on_chunk_header(self) -> None:
        """Count the chunks of a body."""
        self._chunks += 1
        if self._chunks > self._client_limits.limits.max_chunks:
            max_chunks = self._client_limits.limits.max_chunks
            text = f"the body comes in more than {max_chunks} chunks: send larger ones, or a Content-Length"
            self._client_limits.hit(_CHUNKS)
            self._refuse_from_parser(413, text)

    def on_body(self, body: bytes) -> None:
        """Reserve memory for a part of the body, without chunk framing."""
        self._body_bytes += len(body)
        try:
            self._reservation.grow(len(body))
        except Overloaded as error:
            self._refuse_from_parser(503, str(error))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request: it has arrived completely."""
        self.stage = Stage.BETWEEN
        super().on_message_complete()

    def _refuse_from_parser(self, status: int, text: str) -> NoReturn:
        self._refusal = (status, text)
        raise _RefusedError(text)

    # --- Data ---------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the parser, then receive the rest of a large body directly."""
        if self.parser is None or (self._endpoint is not None and self._serve_repeated(data, self._endpoint)):
            return
        stage_before, scope = self.stage, self.scope
        is_alone = stage_before is Stage.BETWEEN or not self._has_received
        self._has_received = True
        super().data_received(data)
        self._repeatable_head = self._read_head(data) if is_alone and self.scope is not scope else b""
        if self.stage is stage_before and self.scope is scope and stage_before is not Stage.BETWEEN:
            self._count(len(data))
        if self.stage is Stage.HEADERS:
            return
        cycle = self.cycle
        if cycle is not None and cycle.more_body and cycle is not self._checked_cycle and self.parser is not None:
            # Only right after the headers: once the task of the request has run, `receive` returns the body.
            self._checked_cycle = cycle
            if not self.pipeline:
                self._receive_directly(cycle)

    def _count(self, size_bytes: int) -> None:
        """Count a read that contains only headers or only body of one request."""
        limit = self._client_limits.limits.max_header_bytes
        if self.stage is Stage.HEADERS:
            self._header_bytes += size_bytes
            if self._header_bytes > limit:
                self._client_limits.hit(_HEADERS)
                self._refuse(431, f"the headers are larger than {limit} bytes")
            return
        # Chunk extensions and trailers are not part of the body; they are limited like headers.
        self._wire_bytes += size_bytes
        if self._wire_bytes - self._body_bytes > limit + _CHUNK_FRAME_BYTES * self._chunks:
            self._client_limits.hit(_HEADERS)
            self._refuse(431, f"extensions of chunks and trailers are larger than {limit} bytes")

    def send_400_response(self, msg: str) -> None:
        """Respond to bytes that are no HTTP, or to a request that a callback has refused."""
        status, text = self._refusal
        self._refuse(status or 400, text or msg)

    # --- Timeouts -----------------------------------------------------------------------------------------------------

    def is_idle_without_timer(self) -> bool:
        """Return True between two requests if no keep-alive timer is set; an empty line unsets it."""
        cycle = self.cycle
        return cycle is not None and cycle.response_complete and self.timeout_keep_alive_task is None

    def is_waiting_for_server(self) -> bool:
        """Return True if the server delays the body: an earlier request on the connection is still running."""
        return bool(self.pipeline)

    def time_out(self, text: str) -> None:
        """Respond 408 with a text and end the connection."""
        if self._has_received:
            self._refuse(408, text)
        else:
            self.transport.close()  # no request has begun

    def abort(self) -> None:
        """Close the connection immediately, without a response."""
        self._mark_disconnected()
        self.transport.abort()

    # --- Fast paths ---------------------------------------------------------------------------------------------------

    async def read_body(self, send: Any) -> bytes | BodyBytes | None:
        """Return the body of the request that `send` answers; None if the endpoint must call `receive` for it."""
        cycle: RequestResponseCycle = send.__self__
        if self._direct_body is not None and self._direct_body[0] is cycle:
            whole = await self._direct_body[1]
            self._direct_body = None
            cycle.body = bytearray()
            return whole
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()  # an idle connection holds no body
        return body

    def remember_head(self, endpoint: InferEndpoint, head: ParsedHead) -> None:
        """See `Connection`."""
        self._endpoint = endpoint
        self._heads = endpoint.heads(self.peer_names)
        if self._repeatable_head:
            endpoint.keep_head(self._repeatable_head, head, self._heads)

    def _read_head(self, data: bytes) -> bytes:
        """Return the head in a read that has exactly one request; b"" if the head cannot be cached."""
        head = data[: data.find(b"\r\n\r\n") + 4]
        cycle = self.cycle
        if (
            self.stage is not Stage.BETWEEN
            or self.pipeline
            or not cycle.keep_alive
            or cycle.waiting_for_100_continue
            or self._chunks
            or not head.startswith(b"POST ")
            or b"upgrade" in head.lower()
            or len(head) + self._body_bytes != len(data)
            or content_length(cycle.scope["headers"]) != self._body_bytes  # type: ignore[arg-type]
        ):
            return b""
        return head

    def _serve_repeated(self, data: bytes, endpoint: InferEndpoint) -> bool:
        """Serve a read that has a cached head and exactly its body; returns False if the parser must read it."""
        end = data.find(b"\r\n\r\n") + 4
        head = self._heads.get(data[:end])
        if (
            head is None
            or self.stage is not Stage.BETWEEN
            or not self.cycle.response_complete
            or len(data) - end != head.headers.content_length
        ):
            return False
        reservation = self._reservation = BodyReservation(self._client_limits)
        request = RepeatedRequest(self, endpoint, head, reservation)
        self.cycle = self._active_cycle = request  # type: ignore[assignment]
        try:
            reservation.grow(len(data) - end)
        except Overloaded as error:
            self.stage = Stage.BODY
            self._refuse(503, str(error))
            return True
        self.tasks.add(request)  # type: ignore[arg-type]
        request.begin(data[end:])
        return True

    def on_repeated_complete(self) -> None:
        """Continue after a repeated request. Its keep-alive timer keeps running: setting one costs more than all of this."""
        if self.timeout_keep_alive_task is None or self.pipeline:
            self.on_response_complete()
        else:
            self.server_state.total_requests += 1
            self._idle_since_s = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, or set the timer again if repeated requests came since it was set."""
        wait_s: float = self.timeout_keep_alive
        if self.cycle.response_complete:
            wait_s -= self.loop.time() - self._idle_since_s
        if wait_s > 0:
            self.timeout_keep_alive_task = self.loop.call_later(wait_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def write_response(self, send: Any, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """See `Connection`."""
        return self.write(send.__self__, head, parts)

    def write(
        self, cycle: RequestResponseCycle | RepeatedRequest, head: bytes, parts: Sequence[bytes | memoryview]
    ) -> bool:
        """Write a complete response; returns False if the write buffer is full and the response must wait.

        Args:
            cycle: of the request.
            head: status line and headers, each with its line end, without the empty line.
            parts: of the body.
        """
        if self.flow.write_paused or cycle.response_started:
            return False
        if cycle.disconnected:
            return True
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        if sum(map(len, parts)) < _JOIN_BELOW_BYTES:
            self.transport.write(b"".join((head, end, *parts)))
        else:
            self.transport.writelines([head + end, *parts])
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def _receive_directly(self, cycle: RequestResponseCycle) -> None:
        """Receive the rest of a body without the parser, if it belongs to an inference request and is large."""
        if cycle.response_complete or cycle.waiting_for_100_continue or not self.scope["path"].endswith("/infer"):
            return
        size_bytes = content_length(cycle.scope["headers"])  # type: ignore[arg-type]
        if not MIN_DIRECT_BYTES <= size_bytes <= self._client_limits.limits.max_body_bytes:
            return

        try:
            self._reservation.check(size_bytes - len(cycle.body))
        except Overloaded as error:  # before the body is read
            self._refuse(503, str(error))
            return

        def complete(body: BodyBytes | None) -> None:
            if cycle.response_complete or body is None:
                self._direct_body = None  # the request has ended
            else:
                cycle.body = body  # type: ignore[assignment]
            cycle.more_body = False
            cycle.message_event.set()
            # The parser still waits for that body: a new one parses the next request.
            self.stage = Stage.BETWEEN
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

        self._direct_body = cycle, self._reader.receive_body(size_bytes, cycle.body, complete)

    def _direct_data(self, size_bytes: int) -> None:
        """Reserve memory for a part of a direct body."""
        self._unset_keepalive_if_required()
        if self.cycle.response_complete:
            self._reader.drop_body()
            return
        try:
            self._reservation.grow(size_bytes)
        except Overloaded as error:
            self._refuse(503, str(error))

    def _refuse(self, status: int, text: str) -> None:
        """Respond with an error, stop reading, and close the connection after the client had time to read.

        An immediate close would make the kernel send a reset, on which clients discard a response that they have not read yet.
        """
        transport = self.transport
        if transport.is_closing() or self.stage is Stage.ENDING:
            return
        cycle = self.cycle
        # No response if another one is due or was sent on the connection: the client would assign it to the wrong request.
        if self.stage is Stage.BODY:
            is_silent = bool(self.pipeline) or cycle.response_started
        else:
            is_silent = cycle is not None and not cycle.response_complete
        self.stage, self.since = Stage.ENDING, self._timeouts.epoch
        self.parser = None  # type: ignore[assignment]  # further bytes are dropped
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self._reader.end_body()
        self.flow.resume_reading()
        if is_silent:
            transport.close()
            return
        body = orjson.dumps({"error": text})
        head = b"%scontent-type: application/json\r\nconnection: close\r\n%scontent-length: %d\r\n\r\n"
        later = b"retry-after: 1\r\n" if status == 503 else b""
        transport.write(head % (STATUS_LINE[status], later, len(body)) + body)
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()
