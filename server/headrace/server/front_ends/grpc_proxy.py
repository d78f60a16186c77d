"""Front end's side of gRPC calls that the engine process answers: gRPC methods that pass calls on, each by its messages.

Each connection of a client that has such calls has one HTTP/2 connection to the engine, whose first message names the client.
"""

from __future__ import annotations

import asyncio
from binascii import a2b_base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any, cast
from urllib.parse import unquote

from headrace.core.clock import NS_PER_MS, NS_PER_US, monotonic_ns
from headrace.core.errors import GRPC_CODES, HeadraceError, Unavailable
from headrace.core.limits import ClientLimits, Limits
from headrace.server.front_ends.handshake import Client, EngineProcessFacts
from headrace.server.front_ends.proxy import EngineProcessLink, engine_gone
from headrace.wire.grpc.call import ServerCall
from headrace.wire.grpc.framing import PREFIX, MessageReader
from headrace.wire.grpc.methods import GrpcCall, Message, Methods, RequestMessage, StreamCall
from headrace.wire.grpc.server import GrpcServer
from headrace.wire.grpc.status import ErrorStatus, StatusError
from headrace.wire.http2.connection import Http2Connection
from headrace.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    HEADERS,
    PREFACE,
    ErrorCode,
    HeaderField,
    encode,
)
from headrace.wire.http2.stream import Http2Limits, Http2Stream
from headrace.wire.requests.codec_threads import CodecThreads
from headrace.wire.requests.load_report import LOAD_TRAILER
from headrace.wire.requests.request_options import RequestOptionsReader

_NEVER_S = 1e6
_NO_LIMIT = 1 << 40
UNLIMITED = Http2Limits(
    streams=1 << 30,
    stream_window_bytes=1 << 20,
    header_bytes=1 << 20,
    header_list_bytes=1 << 20,
    max_granted_bytes=_NO_LIMIT,
    max_unsent_bytes=_NO_LIMIT,
    control_bytes=_NO_LIMIT,
    frame_burst=1 << 60,
    handshake_s=_NEVER_S,
    frame_s=_NEVER_S,
    message_s=_NEVER_S,
    stall_s=_NEVER_S,
    keepalive_s=_NEVER_S,
    keepalive_timeout_s=_NEVER_S,
    idle_s=_NEVER_S,
)
"""Limits between processes of one server: front ends enforce those on clients."""
# Bytes of messages to the engine that wait until it reads.
_WRITE_AHEAD_BYTES = 64 << 10
_RESPONSE_LIMITS = ClientLimits(Limits(max_body_bytes=1 << 32))
_UNITS = ((1, b"n"), (NS_PER_US, b"u"), (NS_PER_MS, b"m"))
_MAX_TIMEOUT = 10**8
_CODE_NAMES = {number: name for name, number in GRPC_CODES.items()}


class ProxyCall(Http2Stream):
    """A call to the engine. Ownership: the event loop."""

    connection: ProxyConnection

    def __init__(self, connection: ProxyConnection, stream_id: int) -> None:
        super().__init__(connection, stream_id)
        self.awaiting_body = False
        self._reader = MessageReader("", _RESPONSE_LIMITS)
        self._held_bytes = 0  # received, and not returned to the engine's window
        self._changed = asyncio.Event()
        self._end: ErrorStatus | None = None
        self._failure: Exception | None = None
        self._has_half_closed = False

    # --- Http2Stream --------------------------------------------------------------------------------------------------

    def on_headers(self, fields: Sequence[HeaderField], end: bool) -> None:
        """Receive the header block before the messages, or the one that ends the call."""
        if end:
            self._end = _read_trailers(fields)
            self._changed.set()

    def on_data(self, data: bytes, start: int, stop: int, end: bool) -> None:
        """Receive a part of a message; the engine may send more of it at once, but not of the next ones."""
        self._reader.feed(data, start, stop)
        self._held_bytes += stop - start
        if not self._reader.complete:
            self._return_window()
        self._changed.set()

    def on_closed(self) -> None:
        """Called after the stream is closed before its end: the peer has reset it or disconnected, or the server has reset it."""
        self._changed.set()

    def on_timeout(self) -> None:
        """Never called: `awaiting_body` is False."""

    def on_flushed(self) -> None:
        """Called when a part of `pending` was sent."""
        self._changed.set()

    # --- Messages -----------------------------------------------------------------------------------------------------

    def send(self, message: RequestMessage) -> None:
        """Send a message as the engine reads it."""
        if not self.closed:
            self.connection.write_buffer.queue_data(self, [PREFIX.pack(0, len(message)), message])

    async def write(self, message: RequestMessage) -> None:
        """Send a message, after a wait while the engine reads slowly."""
        self.send(message)
        while self.pending_bytes > _WRITE_AHEAD_BYTES and not self.closed:
            await self._wait()

    def half_close(self) -> None:
        """End the messages to the engine."""
        if not self.closed and not self._has_half_closed:
            self._has_half_closed = True
            frame = FRAME_HEADER.pack(DATA, END_STREAM, self.stream_id)
            if self.pending:
                self.final_frames = frame
            else:
                self.connection.write_buffer.write_control(frame)

    async def read(self) -> Message | None:
        """Wait for the next response; None after the last one.

        Raises:
            StatusError: the call has failed.
            HeadraceError: of `fail`; Unavailable without an engine process.
        """
        while True:
            if self._reader.complete:
                message, _ = self._reader.pop()
                if not self._reader.complete:
                    self._return_window()
                return [message]
            if self._failure is not None:
                raise self._failure
            if self._end is not None:
                if self._end.code != "OK":
                    raise StatusError(self._end)
                return None
            if self.closed:
                raise engine_gone()
            await self._wait()

    def fail(self, error: HeadraceError) -> None:
        """End `read` with an error."""
        self._failure = error
        self._changed.set()

    def cancel(self) -> None:
        """End the call, if it runs."""
        self.reset(ErrorCode.CANCEL)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _return_window(self) -> None:
        size_bytes, self._held_bytes = self._held_bytes, 0
        if size_bytes:
            self.increase_window(size_bytes)


class ProxyConnection(Http2Connection):
    """Client side of an HTTP/2 connection to the engine. Ownership: the event loop."""

    def __init__(self, link: EngineProcessLink) -> None:
        super().__init__(self, UNLIMITED, asyncio.get_running_loop())
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the client's connection preface."""
        cast(asyncio.Transport, transport).write(PREFACE)
        self._preface_received = True
        super().connection_made(transport)
        self._link.add(self.transport)

    def open_call(self, path: str, call: ServerCall) -> ProxyCall:
        """Open a call of the method, with the options and the deadline of a client's call; raises Unavailable."""
        if self.closing:
            raise engine_gone()
        self.last_stream_id += 2 if self.last_stream_id else 1
        stream = self.streams[self.last_stream_id] = ProxyCall(self, self.last_stream_id)
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode("latin-1"))]
        fields += [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
        if call.deadline_ns:
            fields.append((b"grpc-timeout", _timeout(call.deadline_ns - monotonic_ns())))
        options = call.option_headers.items()
        fields += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in options]
        block = encode(fields)
        self.write_buffer.write_control(
            FRAME_HEADER.pack(len(block) << 8 | HEADERS, END_HEADERS, stream.stream_id) + block
        )
        return stream

    def _open_stream(self, stream_id: int, head: Any, end: bool, cost: int = 0) -> None:
        """Receive a header block of the engine: before the messages of a call, or at its end."""
        stream = self.streams.get(stream_id)
        if isinstance(stream, ProxyCall):  # else this side has cancelled it
            if end:
                stream.remote_open = False
            stream.on_headers(head, end)
            if end:
                self.close_stream(stream_id)

    def stream_finished(self, stream: Http2Stream) -> None:
        """Keep a stream whose request is written: its response follows."""

    # --- Application ------------------------------------------------------------------------------------------------

    def parse_head(self, fields: Sequence[HeaderField] | None) -> Sequence[HeaderField]:
        """Parse header fields into a head."""
        return fields or ()

    def open_stream(self, connection: Http2Connection, stream_id: int, head: Any, end: bool) -> None:
        """Create the stream of a new request; None if the request was answered here, with END_STREAM. The engine opens no
        streams.
        """

    def connection_opened(self, connection: Http2Connection) -> bool:
        """Accept or refuse a new connection; False refuses it."""
        return True

    def connection_closed(self, connection: Http2Connection) -> None:
        """Called once after the connection and all its streams are closed."""
        self._link.discard(self.transport)


class GrpcProxy:
    """Passes gRPC calls to the engine process.

    Ownership: the event loop.

    Args:
        link: to the engine.
        reader: reads the metadata that are passed on.
    """

    def __init__(self, link: EngineProcessLink, reader: RequestOptionsReader) -> None:
        self._link = link
        self._reader = reader
        self._connections: dict[Http2Connection, asyncio.Task[ProxyConnection]] = {}

    def methods(self, facts: EngineProcessFacts, threads: CodecThreads) -> Methods:
        """Return gRPC methods that pass their calls to the engine process.

        Args:
            facts: names of the methods.
            threads: decompress large messages.
        """
        return Methods(
            {path: self.unary_method(path) for path in facts.unary},
            {path: self.stream_method(path) for path in facts.streams},
            self._reader,
            frozenset(facts.open_paths),
            {},
            threads,
        )

    def unary_method(self, path: str) -> Any:
        """Return the method of a path with one message each way."""

        async def method(message: RequestMessage, call: GrpcCall) -> Message:
            responses = self.responses(path, message, call)
            del message
            async with aclosing(responses):
                async for response in responses:
                    return response
            raise engine_gone()

        return method

    def stream_method(self, path: str) -> Any:
        """Return the method of a path with streams of messages."""

        async def method(call: StreamCall) -> None:
            await self._stream(path, call)

        return method

    async def responses(
        self, path: str, message: RequestMessage, call: GrpcCall | StreamCall
    ) -> AsyncGenerator[Message]:
        """Pass one message on, in a call of its own; yields the responses.

        Raises:
            StatusError: the call failed.
            Unavailable: there is no engine process.
        """
        passed = await self._open(path, call)
        try:
            passed.send(message)
            del message
            passed.half_close()
            while (response := await passed.read()) is not None:
                yield response
        finally:
            passed.cancel()

    def close(self, connection: Http2Connection) -> None:
        """Close the connection to the engine of a client's connection, which is closed."""
        opening = self._connections.pop(connection, None)
        if opening is not None:
            opening.add_done_callback(_close)

    async def _open(self, path: str, call: GrpcCall | StreamCall) -> ProxyCall:
        client_call = cast(ServerCall, call)
        key = client_call.connection
        opening = self._connections.get(key)
        if opening is None or (opening.done() and (opening.exception() is not None or opening.result().closing)):
            opening = asyncio.get_running_loop().create_task(self._connect(client_call))
            if key.transport.is_closing():
                opening.add_done_callback(_close)
            else:
                self._connections[key] = opening
        return (await asyncio.shield(opening)).open_call(path, client_call)

    async def _connect(self, call: ServerCall) -> ProxyConnection:
        address = call.connection.transport.get_extra_info("peername")
        client = Client(tuple(address[:2]) if address else None, names=call.peer_names)
        sock = await self._link.open("grpc", client)
        connection = ProxyConnection(self._link)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        return connection

    async def _stream(self, path: str, call: StreamCall) -> None:
        passed = await self._open(path, call)
        reader = asyncio.get_running_loop().create_task(_pass_messages(passed, call))
        try:
            while (response := await passed.read()) is not None:
                await call.write(response)
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
            passed.cancel()


class FrontEndGrpcServer(GrpcServer):
    """The gRPC server of a front end.

    Args:
        proxy: passes calls on.
    """

    def __init__(self, proxy: GrpcProxy, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._proxy = proxy

    def connection_closed(self, connection: Http2Connection) -> None:
        """Called once after the connection and all its streams are closed."""
        super().connection_closed(connection)
        self._proxy.close(connection)


async def _pass_messages(passed: ProxyCall, call: StreamCall) -> None:
    """Pass the messages of the client on."""
    try:
        while (message := await call.read()) is not None:
            await passed.write(message)
            del message
        passed.half_close()
    except Unavailable:  # this process drains: the engine has the notice "stopping", and ends the call
        return
    except HeadraceError as error:  # the client has disconnected, or its message is invalid
        passed.fail(error)


def _close(opening: asyncio.Task[ProxyConnection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _timeout(remaining_ns: int) -> bytes:
    """Encode a grpc-timeout, which has at most eight digits."""
    remaining_ns = max(remaining_ns, 1)
    for unit_ns, name in _UNITS:
        if remaining_ns < _MAX_TIMEOUT * unit_ns:
            return b"%d%b" % (-(-remaining_ns // unit_ns), name)
    return b"%dS" % min(remaining_ns // (NS_PER_MS * 1000), _MAX_TIMEOUT - 1)


def _read_trailers(fields: Sequence[HeaderField]) -> ErrorStatus:
    """Return the status that ends a call; see `headrace.wire.grpc.framing`."""
    code, text = 2, ""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name == b"grpc-status":
            code = int(value)
        elif name == b"grpc-message":
            text = unquote(value.decode("ascii"))
        elif name.endswith(b"-bin"):
            if name != LOAD_TRAILER.encode():  # the front end sends a report of its own
                metadata.append((name.decode(), a2b_base64(value + b"=" * (-len(value) % 4))))
        elif name not in (b":status", b"content-type"):
            metadata.append((name.decode(), value.decode()))
    return ErrorStatus(_CODE_NAMES[code], text, tuple(metadata))
