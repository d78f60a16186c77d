"""HTTP/1.1 connection: uvicorn's protocol with five fast paths for inference, limits and timeouts.

The endpoint reaches the fast paths through `headrace.connection` in the ASGI scope:

- Repeated requests. A request whose head equals that of an earlier one is served without parser and task (`RepeatedRequest`).
- Disconnects. In ASGI, only a pending `receive` reports a disconnect, which takes a task for each request. Here the connection
  abandons the completion of its request.
- Complete bodies. A body that has arrived is returned without a call of `receive`.
- Large bodies. The rest of a large body goes directly into one array, without the parser (`SocketReader`).
- Responses. A response is written in one call, without uvicorn's checks of headers (`ResponseWriter`).

The fast paths use attributes of uvicorn's request cycle. The pinned version has them, and tests run with and without the fast
paths.

Memory of a connection is bounded by what it reads: reading pauses while the client does not read its responses, and while
pipelined requests wait. A client that half-closes gets its responses; see docs/decisions/0011-half-closed-clients.md.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import httptools
import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from headrace.core.access import certificate_names
from headrace.core.completion import LoopCompletion
from headrace.core.errors import Overloaded
from headrace.core.limits import BodyReservation, ClientLimits
from headrace.wire.http.event_stream import Http10Cycle
from headrace.wire.http.half_closed import DisconnectProbe
from headrace.wire.http.infer_endpoint import InferEndpoint, InferHeaders, ParsedHead, content_length, json_length
from headrace.wire.http.origins import ANY_HOST, HostPolicy
from headrace.wire.http.repeated_request import RepeatedHeads, RepeatedRequest
from headrace.wire.http.response_writer import ResponseWriter
from headrace.wire.http.socket_reader import MIN_DIRECT_BYTES, READ_BYTES, WIDE_READ_BYTES, SocketReader
from headrace.wire.http.timeouts import ConnectionTimeouts, Stage
from headrace.wire.requests.tensor_codec import BodyBytes, allocate_body

# --- Connection --------------------------------------------------------------------------------------------------------

# Pipelined requests that wait; the rest of the bytes stays unparsed, since a parsed request needs 5 KB.
_MAX_PIPELINED = 8
# Smallest piece of pipelined bytes that is parsed at once: a body may consist of ends of heads.
_MIN_PIECE_BYTES = 512
# Allowed bytes per chunk besides its data: size, two line ends, an extension. More bytes count as headers.
_CHUNK_FRAME_BYTES = 32
_HEADERS, _CHUNKS = "max_header_bytes", "max_chunks"
_HEAD_END = b"\r\n\r\n"
# A read up to this size has few pipelined requests.
_SHORT_PIPELINE_BYTES = 512
# With a body that is smaller than a read by at most this, a request may take two reads.
_WIDE_HEAD_BYTES = 2048


class _RefusedError(Exception):
    """Raised in callbacks of the parser to stop it; the parser replaces it by its own error."""


class ConnectionFlow(FlowControl):
    """Flow control that does not resume reading while the client is ahead; see `HeadraceHttpProtocol.is_ahead`."""

    def __init__(self, transport: asyncio.Transport, connection: HeadraceHttpProtocol) -> None:
        super().__init__(transport)
        self._connection: HeadraceHttpProtocol | None = connection

    def resume_reading(self) -> None:
        """Resume reading, unless responses are unread or pipelined requests wait."""
        if self._connection is not None and not self._connection.is_ahead:
            super().resume_reading()

    def detach(self) -> None:
        """Break the reference cycle with the connection, which is lost."""
        self._connection = None


class HeadraceHttpProtocol(ResponseWriter):
    """Server side of one HTTP/1.1 connection; implements `headrace.wire.http.infer_endpoint.Connection`.

    Ownership: the event loop.

    Args:
        client_limits: limits of all connections and requests. The endpoint checks the Content-Length.
        timeouts: of all connections of the listener.
        hosts: checks the host of each parsed request.
        repeated_heads: of all connections of the listener; None for a connection without others.

    Attributes:
        completion: completion of the running request, which a disconnect abandons; None for none.
        peer_names: names in the client certificate; empty without one.
        stage: the event that the connection waits for.
        since: tick (`ConnectionTimeouts.epoch`) at which the stage began.
        receives_directly: large bodies go directly into one array.
    """

    flow: ConnectionFlow
    receives_directly = True

    def __init__(
        self,
        *args: Any,
        client_limits: ClientLimits,
        timeouts: ConnectionTimeouts,
        hosts: HostPolicy = ANY_HOST,
        repeated_heads: RepeatedHeads | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, client_limits=client_limits, **kwargs)
        self._repeated_heads = repeated_heads or RepeatedHeads()
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
        self._probe: DisconnectProbe | None = (
            None  # of a client that has half-closed, while complete requests are served
        )
        self._unparsed = b""  # bytes behind the pipelined requests that wait
        self._downgraded_head = b""  # head of a request for an upgrade without its Upgrade header; b"" for none
        self._reservation = client_limits.reserve()  # of the request that is being read; also in its scope
        # Of the request that is being read: header bytes without the first read; chunks; body bytes with chunk framing; body
        # bytes without it.
        self._header_bytes = self._chunks = self._wire_bytes = self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Install the socket reader; refuse the connection if there are too many."""
        super().connection_made(transport)
        self.flow = ConnectionFlow(transport, self)
        transport.set_protocol(self._reader)
        self.peer_names = certificate_names(transport.get_extra_info("peercert"))
        self._timeouts.add(self)
        if self._repeated_heads.has_wide_bodies:
            self._reader.widen()
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
        self._unread.update(0)
        self._reservation.pause()
        self.flow.detach()
        if self.completion is not None:
            self.completion.abandon()
        for cycle, _ in self.pipeline:  # pipelined requests that were not started
            cycle.scope["headrace.reservation"].end()  # type: ignore[typeddict-item]
        self.pipeline.clear()
        self._unparsed = b""
        # Break reference cycles: otherwise a body would stay in memory until the garbage collector runs.
        self.cycle = self.scope = self._reader = self._direct_body = self._checked_cycle = None  # type: ignore[assignment]
        self._probe = None

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

    @property
    def is_lost(self) -> bool:
        """True once the client has disconnected."""
        return self.transport.is_closing()

    # --- Half-closed clients, and clients that are ahead --------------------------------------------------------------

    @property
    def is_ahead(self) -> bool:
        """True while nothing more is read: the client has not read its responses, or its pipelined requests wait."""
        return self.flow.write_paused or bool(self.pipeline) or bool(self._unparsed)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Serve the complete requests of a client that has half-closed, then close; returns True to keep the transport open.

        An incomplete request is dropped. Over TLS there is no half-close: the transport closes.
        """
        if self._probe is not None:
            return True
        if self.scheme == "https" or self.stage is Stage.ENDING or self.parser is None:
            return False
        cycle: RequestResponseCycle | None = self.cycle
        if self.stage is Stage.BODY:  # the body of the last request is incomplete
            if not self.pipeline:
                return False
            incomplete, _ = self.pipeline.popleft()
            incomplete.scope["headrace.reservation"].end()  # type: ignore[typeddict-item]
            cycle = self.pipeline[0][0] if self.pipeline else self._active_cycle
        if cycle is None or cycle.response_complete:
            return False
        cycle.keep_alive = False
        self.cycle, self.stage, self.parser = cycle, Stage.BETWEEN, None  # type: ignore[assignment]
        active = self._active_cycle or cycle
        self._probe = DisconnectProbe(self.transport, self.loop, active, self._check_half_closed)
        return True

    def _check_half_closed(self) -> None:
        """Abort the connection if a half-closed client is gone."""
        if self._probe is not None and self._probe.is_gone(self._active_cycle):
            self.abort()

    def pause_writing(self) -> None:
        """Stop reading until the client has read its responses."""
        super().pause_writing()
        self.flow.pause_reading()
        self._update_unread()

    def resume_writing(self) -> None:
        """Serve the next pipelined request, or read on."""
        super().resume_writing()
        self._update_unread()
        active = self._active_cycle
        if active is None or active.response_complete:
            self._continue()
        else:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Serve the next pipelined request, or read on."""
        self.server_state.total_requests += 1
        self._continue()

    def _continue(self) -> None:
        """Serve the next pipelined request, if any, and read on; no request is running."""
        if self.transport.is_closing() or self.flow.write_paused:
            return
        self._unset_keepalive_if_required()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if self._unparsed and not self.pipeline:
            self._parse_pipelined()
        if self.stage is Stage.BETWEEN and (self.cycle is None or self.cycle.response_complete):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self.flow.resume_reading()

    def observe_client(self, now_ns: int) -> int:
        """Observe how fast the client reads its responses, and whether it still exists; returns the unread bytes."""
        self._check_half_closed()
        unread = self._update_unread()
        if unread:
            self._unread.observe(now_ns, self._drop_unread)
        return unread

    def _drop_unread(self) -> bool:
        """Close a connection that reads slowly while memory is full."""
        self._client_limits.hit("min_body_bytes_per_s")
        self.abort()
        self._unread.update(0)
        return True

    def observe_body(self, now_ns: int) -> bool:
        """Observe how fast the body arrives; returns True if it has been too slow for too long."""
        reservation = self._reservation
        if self.flow.read_paused:
            reservation.pause()
            return False
        return reservation.observe(reservation.held_bytes, now_ns, self._drop_body)

    def _drop_body(self) -> bool:
        """Refuse a request whose body arrives slowly while memory is full."""
        if self.stage is not Stage.BODY or self.flow.read_paused:
            return False
        self._client_limits.hit("min_body_bytes_per_s")
        minimum = self._client_limits.limits.min_body_bytes_per_s
        text = f"the body arrives more slowly than {minimum} bytes per second while the memory for bodies is full"
        self._reservation.end()
        self._refuse(408, text)
        return True

    # --- The parser's callbacks ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request; its scope refers to this connection."""
        if self.cycle is not None and not self.cycle.keep_alive:
            raise _RefusedError("bytes after a request that closes the connection")
        super().on_message_begin()
        self._downgraded_head = b""
        self.stage, self.since, self._header_bytes = Stage.HEADERS, self._timeouts.epoch, 0
        self.scope["headrace.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._reservation = self.scope["headrace.reservation"] = self._client_limits.reserve()  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """Check the headers and the host. A request for an upgrade is parsed again without its Upgrade header; see `_parse`."""
        limit = self._client_limits.limits.max_header_bytes
        if self._header_bytes + 2 * WIDE_READ_BYTES > limit:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > limit:
                self._client_limits.hit(_HEADERS)
                self._refuse_from_parser(431, f"the headers are larger than {limit} bytes")
        refusal = self._hosts.refusal(self.url, self.headers, self.parser.get_http_version())
        if refusal is not None:
            self._refuse_from_parser(*refusal)
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._refuse_from_parser(501, "CONNECT is not supported: this server is no proxy")
            self._downgraded_head = self._head_without_upgrade()
            return
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                self._refuse_from_parser(501, "the only supported Transfer-Encoding is chunked")
        self.stage, self.since = Stage.BODY, self._timeouts.epoch
        self._chunks = self._wire_bytes = self._body_bytes = 0
        super().on_headers_complete()
        if self.cycle.scope["http_version"] == "1.0":
            self.cycle.__class__ = Http10Cycle
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
        if self._downgraded_head:
            return
        self.stage = Stage.BETWEEN
        self._reservation.pause()
        super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _refuse_from_parser(self, status: int, text: str) -> NoReturn:
        self._refusal = (status, text)
        raise _RefusedError(text)

    # --- Data ---------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the parser, then receive the rest of a large body directly."""
        endpoint = self._endpoint or self._join_endpoint()
        if self.parser is None or (endpoint is not None and self._serve_repeated(data, endpoint)):
            return
        if len(data) > _SHORT_PIPELINE_BYTES and data.count(_HEAD_END) > _MAX_PIPELINED:
            self._unparsed = data
            self._parse_pipelined()
            if self.is_ahead:
                self.flow.pause_reading()
        else:
            self._receive(data)

    def _parse_pipelined(self) -> None:
        """Parse unparsed bytes in pieces that end with a head, until `_MAX_PIPELINED` requests wait."""
        while self._unparsed and self.parser is not None and len(self.pipeline) < _MAX_PIPELINED:
            end = self._unparsed.find(_HEAD_END, _MIN_PIECE_BYTES - len(_HEAD_END)) + len(_HEAD_END)
            if end < len(_HEAD_END):
                end = len(self._unparsed)
            data, self._unparsed = self._unparsed[:end], self._unparsed[end:]
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Parse bytes, then receive the rest of a large body directly."""
        stage_before, scope = self.stage, self.scope
        is_alone = stage_before is Stage.BETWEEN or not self._has_received
        self._has_received = True
        self._unset_keepalive_if_required()
        self._parse(data)
        self._repeatable_head = self._read_head(data) if is_alone and self.scope is not scope else b""
        if self.stage is stage_before and self.scope is scope and stage_before is not Stage.BETWEEN:
            self._count(len(data))
        if self.stage is Stage.HEADERS:
            return
        cycle = self.cycle
        if cycle is not None and cycle.more_body and cycle is not self._checked_cycle and self.parser is not None:
            # Only right after the headers: once the task of the request has run, `receive` returns the body.
            self._checked_cycle = cycle
            if not self.pipeline and not self._unparsed and self.receives_directly:
                self._receive_directly(cycle)

    def _parse(self, data: bytes) -> None:
        """Feed the parser.

        It stops after the headers of a request for an upgrade, also if a body follows. A server may ignore Upgrade (RFC 9110,
        section 7.8). So the head is parsed again without that header, and the body is a body.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._downgraded_head + data[upgrade.args[0] :]
                self._new_parser()
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def _new_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

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
        cycle = self.cycle
        if cycle is not None and not cycle.keep_alive and self.stage is Stage.BETWEEN:
            self.parser = None  # type: ignore[assignment]  # bytes after the last request are dropped
            return
        self.logger.warning(msg)
        status, text = self._refusal
        self._refuse(status or 400, text or msg)

    # --- Timeouts -----------------------------------------------------------------------------------------------------

    def is_idle_without_timer(self) -> bool:
        """Return True between two requests if no keep-alive timer is set; an empty line unsets it."""
        cycle = self.cycle
        if cycle is None or not cycle.response_complete or self.timeout_keep_alive_task is not None:
            return False
        return not self.is_ahead

    def is_waiting_for_server(self) -> bool:
        """Return True if the server delays the rest of the request. Earlier requests on the connection are running, or their
        responses are unread.
        """
        return self.is_ahead

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
        """Serve the next requests with the head of this request without the parser, if it allows that."""
        self._endpoint = self._repeated_heads.endpoint = endpoint
        self._heads = endpoint.heads(self.peer_names)
        if (
            head.headers.content_length + _WIDE_HEAD_BYTES > READ_BYTES
            and head.headers.content_length < MIN_DIRECT_BYTES
        ):
            self._repeated_heads.has_wide_bodies = True
            self._reader.widen()
        if self._repeatable_head:
            endpoint.keep_head(self._repeatable_head, head, self._heads)

    def _join_endpoint(self) -> InferEndpoint | None:
        """Return the endpoint: the first request too may have the head of an earlier one on another connection."""
        endpoint = self._repeated_heads.endpoint
        if endpoint is not None:
            self._endpoint, self._heads = endpoint, endpoint.heads(self.peer_names)
        return endpoint

    def _read_head(self, data: bytes) -> bytes:
        """Return the head in a read that has exactly one request, or its beginning; b"" if the head cannot be cached."""
        if self.stage not in (Stage.BETWEEN, Stage.BODY):
            return b""
        head, cycle = data[: data.find(_HEAD_END) + 4], self.cycle
        size_bytes = content_length(cycle.scope["headers"])  # type: ignore[arg-type]
        if self.stage is Stage.BODY:
            is_repeatable = size_bytes >= MIN_DIRECT_BYTES and self.receives_directly
        else:
            is_repeatable = size_bytes == self._body_bytes
        if (
            not is_repeatable
            or self.pipeline
            or not cycle.keep_alive
            or cycle.waiting_for_100_continue
            or self._chunks
            or not head.startswith(b"POST ")
            or b"upgrade" in head.lower()
            or len(head) + self._body_bytes != len(data)
            or b"transfer-encoding" in head.lower()
        ):
            return b""
        return head

    def _serve_repeated(self, data: bytes, endpoint: InferEndpoint) -> bool:
        """Serve a read that has a cached head and exactly its body, or the beginning of a large one; returns False if the parser
        must read it.
        """
        end = data.find(b"\r\n\r\n") + 4
        head, cycle = self._heads.get(data[:end]), self.cycle
        if head is None or (
            self._has_received if cycle is None else self.stage is not Stage.BETWEEN or not cycle.response_complete
        ):
            return False
        body, service, headers = data[end:], endpoint.service, head.headers
        missing_bytes, header_size = headers.content_length - len(body), headers.header_size
        if missing_bytes and (missing_bytes < 0 or not head.has_views or len(body) < header_size):  # type: ignore[operator]
            return False
        if service.has_shared_memory and service.may_read_late(body[:header_size] if missing_bytes else body):
            return False
        if cycle is None:
            self._has_received, self.stage = True, Stage.BETWEEN
        reservation = self._reservation = BodyReservation(self._client_limits)
        request = RepeatedRequest(self, endpoint, head, reservation)
        self.cycle = self._active_cycle = request  # type: ignore[assignment]
        try:
            reservation.grow(len(body))
            if missing_bytes:
                reservation.check(missing_bytes)
        except Overloaded as error:
            reservation.end()
            self.stage = Stage.BODY
            self._refuse(503, str(error))
            return True
        self.tasks.add(request)  # type: ignore[arg-type]
        if missing_bytes:
            self._receive_repeated(request, headers, body)
        else:
            request.begin(body)
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

        whole: asyncio.Future[BodyBytes | None] = self.loop.create_future()

        def end(body: BodyBytes | None = None) -> None:
            if not whole.done():
                whole.set_result(body)

        def complete(body: BodyBytes | None) -> None:
            if cycle.response_complete or body is None:
                self._direct_body = None  # the request has ended
            else:
                cycle.body = body  # type: ignore[assignment]
            cycle.more_body = False
            cycle.message_event.set()
            # The parser still waits for that body: a new one parses the next request.
            self._new_parser()
            self._end_direct_body()
            end(body)

        self._direct_body = cycle, whole
        memory = self._allocate(size_bytes, json_length(cycle.scope["headers"]))  # type: ignore[arg-type]
        self._reader.receive_body(size_bytes, cycle.body, complete, end, memory)

    def _receive_repeated(self, request: RepeatedRequest, head: InferHeaders, start: bytes) -> None:
        """Receive the rest of the large body of a repeated request, which is rejected before that if it would be too late."""

        def complete(body: BodyBytes | None) -> None:
            self._end_direct_body()
            if body is not None and request.awaits_body:
                request.begin(body)

        self.stage, self.since = Stage.BODY, self._timeouts.epoch
        request.admit()
        if not request.awaits_body:  # the timer would end the connection while the rest of the body is dropped
            self._unset_keepalive_if_required()
        memory = self._allocate(head.content_length, head.header_size or 0)
        self._reader.receive_body(head.content_length, start, complete, request.drop, memory)

    def _allocate(self, size_bytes: int, head_bytes: int) -> BodyBytes:
        memory: BodyBytes = (self._client_limits.bodies.allocate or allocate_body)(size_bytes, head_bytes)
        return memory

    def _end_direct_body(self) -> None:
        """Wait for the next request, after all of a direct body has arrived."""
        self.stage = Stage.BETWEEN
        self._reservation.pause()

    def _direct_data(self, size_bytes: int) -> None:
        """Reserve memory for a part of a direct body."""
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
        self._unparsed = b""
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
