"""uvicorn's HTTP/1.1 protocol with four short cuts for the inference route, offered as `headrace.connection` in the scope.

- A waiting request learns at once that its client has gone. ASGI tells a disconnect only to who asks `receive` for it, which
  costs a task per request; here the connection itself abandons the completion that its request waits for.
- A body that has arrived whole is handed over without a round through `receive`.
- A large body is received without the parser, straight into the array of its tensors (`http_body`).
- An answer is written in one piece, without a round of checks on headers that are ours.

And with limits on all that a client may send, and on the time it takes (`http_lifetime`). The short cuts read attributes of
uvicorn's request cycle; the locked version has them, and tests run over both ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.core.completion import LoopCompletion
from headrace.core.errors import Overloaded
from headrace.core.limits import ClientLimits
from headrace.http.lifetime import ConnectionTimeouts, Stage
from headrace.inference.body import MIN_DIRECT_BYTES, READ_BYTES, BodyBytes, SocketReader

# Larger answers are written in parts: joining them would cost more than another entry in the write queue.
_JOIN_BELOW_BYTES = 65536
# What each chunk of a body may have beside its data: its size, two line ends, an extension. More counts as headers.
_CHUNK_FRAME_BYTES = 32
_HEADERS, _CHUNKS = "max_header_bytes", "max_chunks"


class _RefusedError(Exception):
    """Raised in the parser's callbacks, of which the parser makes an error of its own."""


class HeadraceHttpProtocol(HttpToolsProtocol):
    """One connection; see `headrace.http.infer_endpoint.Connection`.

    Args:
        client_limits: the limits. A Content-Length beyond them is left to the parser, and to the endpoint to refuse.
        timeouts: of the listener's connections.

    Attributes:
        stage, since: see `http_lifetime.TimedConnection`.
    """

    def __init__(self, *args: Any, client_limits: ClientLimits, timeouts: ConnectionTimeouts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.completion: LoopCompletion | None = None
        self.stage, self.since = Stage.HEADERS, timeouts.epoch
        self._client_limits = client_limits
        self._timeouts = timeouts
        self._reader = SocketReader(self, self._direct_data)
        self._direct_body: tuple[RequestResponseCycle, asyncio.Future[BodyBytes | None]] | None = None
        self._checked_cycle: RequestResponseCycle | None = None
        # With requests in a row it is not the last one, which is all that uvicorn knows of.
        self._active_cycle: RequestResponseCycle | None = None
        self._refusal = (0, "")
        self._has_received = False
        self._reservation = client_limits.reserve()  # of the message that is being read; its scope has it too
        # Of the message that is being read: its headers, less the read that they began in; chunks; and bytes of the body as they
        # came, with all that frames them, and as they are.
        self._header_bytes = self._chunks = self._wire_bytes = self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """From here on the reader decides where bytes go."""
        super().connection_made(transport)
        transport.set_protocol(self._reader)
        self._timeouts.add(self)
        if not self._client_limits.enter():
            self._refuse(
                503, f"the server has {self._client_limits.limits.max_connections} connections and takes no more"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: nobody waits for the answer any more."""
        self._client_limits.leave()
        self._timeouts.discard(self)
        self._mark_disconnected()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self.completion is not None:
            self.completion.abandon()
        for cycle, _ in self.pipeline:  # nobody will serve them
            cycle.scope["headrace.reservation"].end()  # type: ignore[typeddict-item]
        self.pipeline.clear()
        # The garbage collector comes by rarely: what leads back here must not keep a body until it does.
        self.cycle = self.scope = self._reader = self._direct_body = self._checked_cycle = None  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active_cycle = cycle
        super()._start_asgi_task(cycle, self._serve)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application, behind which nobody needs the body of its request."""
        try:
            await self.app(scope, receive, send)
        finally:
            scope["headrace.reservation"].end()

    def _mark_disconnected(self) -> None:
        """Nothing can be written any more: an answer that waits until it can would find that out by an exception."""
        cycle = self._active_cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self._active_cycle = None

    # --- The parser's callbacks ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins: its scope gets a way back to this connection."""
        super().on_message_begin()
        self.stage, self.since, self._header_bytes = Stage.HEADERS, self._timeouts.epoch, 0
        self.scope["headrace.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._reservation = self.scope["headrace.reservation"] = self._client_limits.reserve()  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """The headers are in."""
        limit = self._client_limits.limits.max_header_bytes
        if self._header_bytes + 2 * READ_BYTES > limit:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > limit:
                self._client_limits.hit(_HEADERS)
                self._refuse_from_parser(431, f"the headers are larger than {limit} bytes")
        self.stage, self.since = Stage.BODY, self._timeouts.epoch
        self._chunks = self._wire_bytes = self._body_bytes = 0
        super().on_headers_complete()
        self.headers = []  # trailers would be added to the list that the application reads

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._chunks += 1
        if self._chunks > self._client_limits.limits.max_chunks:
            max_chunks = self._client_limits.limits.max_chunks
            text = f"the body comes in more than {max_chunks} chunks: send larger ones, or a Content-Length"
            self._client_limits.hit(_CHUNKS)
            self._refuse_from_parser(413, text)

    def on_body(self, body: bytes) -> None:
        """A part of the body, without what frames it."""
        self._body_bytes += len(body)
        try:
            self._reservation.grow(len(body))
        except Overloaded as error:
            self._refuse_from_parser(503, str(error))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A whole request is in."""
        self.stage = Stage.BETWEEN
        super().on_message_complete()

    def _refuse_from_parser(self, status: int, text: str) -> NoReturn:
        self._refusal = (status, text)
        raise _RefusedError(text)

    # --- Data ---------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Bytes for the parser; if they leave a large body incomplete, the rest of it takes the short way."""
        if self.parser is None:
            return
        stage_before, scope = self.stage, self.scope
        self._has_received = True
        super().data_received(data)
        if self.stage is stage_before and self.scope is scope and stage_before is not Stage.BETWEEN:
            self._count(len(data))
        if self.stage is Stage.HEADERS:
            return
        cycle = self.cycle
        if cycle is not None and cycle.more_body and cycle is not self._checked_cycle and self.parser is not None:
            # Only now, right after its headers: once its task has run, the body is the business of `receive`.
            self._checked_cycle = cycle
            if not self.pipeline:
                self._receive_directly(cycle)

    def _count(self, size_bytes: int) -> None:
        """A read that holds nothing but a part of one message's headers, or of its body."""
        limit = self._client_limits.limits.max_header_bytes
        if self.stage is Stage.HEADERS:
            self._header_bytes += size_bytes
            if self._header_bytes > limit:
                self._client_limits.hit(_HEADERS)
                self._refuse(431, f"the headers are larger than {limit} bytes")
            return
        # Extensions of chunks and trailers are not the body's, and may be as endless as headers.
        self._wire_bytes += size_bytes
        if self._wire_bytes - self._body_bytes > limit + _CHUNK_FRAME_BYTES * self._chunks:
            self._client_limits.hit(_HEADERS)
            self._refuse(431, f"extensions of chunks and trailers are larger than {limit} bytes")

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, or more than is taken."""
        status, text = self._refusal
        self._refuse(status or 400, text or msg)

    # --- http_lifetime.Mortal -----------------------------------------------------------------------------------------

    def unread_bytes(self) -> int:
        """See `TimedConnection`."""
        return self.transport.get_write_buffer_size()

    def is_idle_without_timer(self) -> bool:
        """See `TimedConnection`: the timer between two requests is off, an empty line may have done that."""
        cycle = self.cycle
        return cycle is not None and cycle.response_complete and self.timeout_keep_alive_task is None

    def is_waiting_for_server(self) -> bool:
        """See `TimedConnection`."""
        return bool(self.pipeline)

    def time_out(self, text: str) -> None:
        """See `TimedConnection`."""
        if self._has_received:
            self._refuse(408, text)
        else:
            self.transport.close()  # there was no request that could be answered

    def abort(self) -> None:
        """See `TimedConnection`."""
        self._mark_disconnected()
        self.transport.abort()

    # --- The short cuts -----------------------------------------------------------------------------------------------

    async def read_body(self, send: Any) -> bytes | BodyBytes | None:
        """The body of the request that `send` answers, or None if `receive` has it (or the client's leaving)."""
        cycle: RequestResponseCycle = send.__self__
        if self._direct_body is not None and self._direct_body[0] is cycle:
            whole = await self._direct_body[1]
            self._direct_body = None
            cycle.body = bytearray()
            return whole
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()  # a connection that idles keeps nothing
        return body

    def write_response(self, send: Any, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Write a whole answer; False if the client reads slowly and the answer must wait its turn through `send`.

        Args:
            send: of the request that is answered.
            head: status line and headers, each with its line end, without the empty line.
            parts: of the body.
        """
        cycle: RequestResponseCycle = send.__self__
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
        """Take the rest of a body past the parser, if it is an inference request's and large enough to be worth it."""
        if cycle.response_complete or cycle.waiting_for_100_continue or not self.scope["path"].endswith("/infer"):
            return
        size_bytes = _content_length(cycle.scope["headers"])  # type: ignore[arg-type]
        if not MIN_DIRECT_BYTES <= size_bytes <= self._client_limits.limits.max_body_bytes:
            return

        try:
            self._reservation.check(size_bytes - len(cycle.body))
        except Overloaded as error:  # told before it is read
            self._refuse(503, str(error))
            return

        def complete(body: BodyBytes | None) -> None:
            if cycle.response_complete or body is None:
                self._direct_body = None  # nobody wants it
            else:
                cycle.body = body  # type: ignore[assignment]
            cycle.more_body = False
            cycle.message_event.set()
            # The parser still waits for that body: a fresh one takes the next request.
            self.stage = Stage.BETWEEN
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

        self._direct_body = cycle, self._reader.receive_body(size_bytes, cycle.body, complete)

    def _direct_data(self, size_bytes: int) -> None:
        """A part of a large body has come the short way."""
        self._unset_keepalive_if_required()
        if self.cycle.response_complete:
            self._reader.drop_body()
            return
        try:
            self._reservation.grow(size_bytes)
        except Overloaded as error:
            self._refuse(503, str(error))

    def _refuse(self, status: int, text: str) -> None:
        """The last words on a connection: answer, read nothing more, and give the client time to hear it.

        Closing at once would make the system send a reset, on which clients drop an answer that they have not read yet.
        """
        transport = self.transport
        if transport.is_closing() or self.stage is Stage.ENDING:
            return
        cycle = self.cycle
        # Where an answer is still to come on the connection, or was given already, words would be taken for another.
        if self.stage is Stage.BODY:
            is_silent = bool(self.pipeline) or cycle.response_started
        else:
            is_silent = cycle is not None and not cycle.response_complete
        self.stage, self.since = Stage.ENDING, self._timeouts.epoch
        self.parser = None  # type: ignore[assignment]  # what comes is dropped
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


def _content_length(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """The declared size of the body, 0 if there is none (a chunked one)."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
