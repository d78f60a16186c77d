"""The gRPC engine on grpcio: the complete reference implementation, with which the fast engine is compared.

grpcio decompresses requests (identity, deflate, gzip) and does not expose their encoding to the server. Responses are sent
uncompressed, which is Triton's default.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote
from weakref import WeakValueDictionary

import grpc

from headrace.accept import HANDSHAKE_TIMEOUT_S, bind
from headrace.core.access import Principal
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import Cancelled, Unavailable, forget_frames
from headrace.core.limits import SMALL_BODY_BYTES, BodyReservation, ClientLimits
from headrace.grpc.methods import Message, Methods, StreamMethod, UnaryMethod
from headrace.grpc.response_room import ResponseRoom, max_held_bytes, unread_error
from headrace.grpc.status import error_status
from headrace.inference.load_report import LOAD_TRAILER
from headrace.inference.request_options import RequestOptions
from headrace.tls import ServerTls

# Shortest interval between PINGs of a client, also without an open call. After two PINGs that come sooner, the connection is
# closed. Clients send one every 10 s at most, and some of these arrive earlier than that.
MIN_PING_INTERVAL_S = 5
# Keep-alive PINGs of the server: a client that vanished must not hold its requests forever.
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 20

# Extra time at the end of a shutdown to send UNAVAILABLE to the remaining calls.
_REJECTION_S = 1.0


def _is_server_error(record: logging.LogRecord) -> bool:
    """Log filter for grpcio: drop tracebacks of clients that disconnect before their response.

    grpcio logs one for each such call, also for calls whose method has not started: any client could fill the log.
    """
    if record.exc_info is None:
        return True
    error = record.exc_info[1]
    return not isinstance(error, asyncio.CancelledError) and type(error).__name__ != "ExecuteBatchError"


class GrpcioServer:
    """`GrpcEngine` on grpcio.

    Ownership: the event loop on which it was started.

    Args:
        methods: served methods.
        client_limits: limits of all connections and requests. grpcio enforces them in its own way: it does not count their
            violations, has its own timeouts, and stops decompression at the largest message, whatever the ratio. The limit of
            all bodies is enforced here. It counts complete messages only: grpcio does not expose parts of them.
        tls: TLS of the server, None for plain text.
        shares_port: several processes listen on the port (SO_REUSEPORT).
        max_age_s: age of a connection at which it is shut down gracefully; 0 for never.

    Attributes:
        methods, client_limits: see Args.
        rooms: room for responses of each client address, while a call holds a reference to it.
        stopping: True from `stop` on.
    """

    def __init__(
        self,
        methods: Methods,
        client_limits: ClientLimits,
        tls: ServerTls | None,
        shares_port: bool = False,
        max_age_s: float = 0.0,
    ) -> None:
        self._max_age_s = max_age_s
        self.methods = methods
        self._shares_port = shares_port
        self.client_limits = client_limits
        self._tls = tls
        self._calls: set[_UnaryCall] = set()
        self._streams: set[_StreamCall] = set()
        self.stopping = False
        self._server: Any = None
        self.rooms: WeakValueDictionary[str, ResponseRoom] = WeakValueDictionary()

    async def start(self, host: str, port: int) -> int:
        """See `GrpcEngine.start`; raises OSError also for invalid TLS files."""
        credentials = None if self._tls is None else self._tls.grpc_credentials()
        if port and not self._shares_port:
            _check_address(host, port)
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_server_error)
        self._server = grpc.aio.server(options=self._options())
        self._server.add_generic_rpc_handlers((self._handlers(),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                chosen = self._server.add_insecure_port(address)
            else:
                chosen = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:  # grpcio does not report the reason
            raise OSError(None, f"{host}:{port}: gRPC cannot listen on this address") from error
        await self._server.start()
        return int(chosen)

    async def stop(self, grace_s: float) -> None:
        """See `GrpcEngine.stop`."""
        if self._server is None:
            return
        self.stopping = True
        for stream in list(self._streams):
            stream.stop()
        server_stop = asyncio.ensure_future(self._server.stop(grace_s + _REJECTION_S))
        await asyncio.wait({server_stop}, timeout=grace_s)
        rejection = Unavailable("the server is shutting down and could not wait for this request")
        for call in list(self._calls):
            if call.completion is not None:
                call.completion.settle(rejection)
        for stream in list(self._streams):
            stream.end(rejection)
        await server_stop

    def refuse_calls(self, peer: str) -> None:
        """Refuse the calls of a client address whose inference still runs: it has not read earlier responses."""
        error = unread_error()
        for call in list(self._calls):
            if call.completion is not None and call.peer == peer:
                call.completion.settle(error)

    def _options(self) -> list[tuple[str, int]]:
        limits = self.client_limits.limits
        handshake_s = min(HANDSHAKE_TIMEOUT_S, limits.header_timeout_s)
        age = [("grpc.max_connection_age_ms", round(self._max_age_s * 1000))] if self._max_age_s else []
        return [
            *age,
            ("grpc.so_reuseport", int(self._shares_port)),  # without it, a port in use is an error
            ("grpc.max_receive_message_length", limits.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", limits.max_header_bytes),
            ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
            ("grpc.max_concurrent_streams", limits.max_streams),
            ("grpc.max_allowed_incoming_connections", limits.max_connections),
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_S * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
            ("grpc.server_handshake_timeout_ms", round(handshake_s * 1000)),
        ]

    def _handlers(self) -> _Handlers:
        handlers: dict[str, Any] = {
            path: grpc.unary_unary_rpc_method_handler(self._unary(m)) for path, m in self.methods.unary.items()
        }
        handlers |= {
            path: grpc.stream_stream_rpc_method_handler(self._stream(m)) for path, m in self.methods.streams.items()
        }
        return _Handlers(handlers)

    def _unary(self, method: UnaryMethod) -> Callable[[bytes, Any], Any]:
        async def serve(message: bytes, context: Any) -> bytes:
            call = _UnaryCall(context, self)
            self._calls.add(call)
            try:
                call.reservation.grow(len(message))
                content = b"".join(await method(message, call))
                if len(content) > SMALL_BODY_BYTES:
                    call.hold(len(content))
                if call.load_report:
                    context.set_trailing_metadata(((LOAD_TRAILER, call.load_report),))
                return content
            except Exception as error:
                await _abort(context, error, call.load_report)
                raise
            finally:
                call.reservation.end()
                self._calls.discard(call)

        return serve

    def _stream(self, method: StreamMethod) -> Callable[[Any, Any], Any]:
        async def serve(messages: Any, context: Any) -> None:
            call = _StreamCall(context, self)
            self._streams.add(call)
            try:
                await method(call)
                if call.load_report:
                    context.set_trailing_metadata(((LOAD_TRAILER, call.load_report),))
            except Exception as error:
                await _abort(context, error, call.load_report)
            except asyncio.CancelledError:
                if call.end_reason is None:
                    raise
                call.task.uncancel()
                await _abort(context, call.end_reason, call.load_report)
            finally:
                call.reservation.end()
                self._streams.discard(call)

        return serve


def _nothing_to_drop() -> bool:
    """Grpcio does not expose the responses that it holds."""
    return False


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)


class _Call:
    """Common part of unary and streaming calls; see `GrpcCall`."""

    __slots__ = ("_context", "_options_reader", "_server", "deadline_ns", "load_report", "received_ns", "reservation")

    def __init__(self, context: Any, server: GrpcioServer) -> None:
        self._context = context
        self._server = server
        self.load_report = b""
        self._options_reader = server.methods.options_reader
        self.reservation = BodyReservation(server.client_limits)
        self.received_ns = monotonic_ns()
        remaining_s = context.time_remaining()
        self.deadline_ns = 0 if remaining_s is None else self.received_ns + int(remaining_s * NS_PER_S)

    @property
    def option_headers(self) -> dict[str, str]:
        """Metadata of the call with the request options, by name."""
        names = self._options_reader.names
        return {name: value for name, value in self._context.invocation_metadata() or () if name in names}

    @property
    def peer_names(self) -> tuple[str, ...]:
        """Names in the client certificate; empty without one."""
        identity = self._context.auth_context()
        names = [*identity.get("x509_common_name", ()), *identity.get("x509_subject_alternative_name", ())]
        return tuple(name.decode("utf-8", "replace") for name in names)

    @property
    def options(self) -> RequestOptions:
        reader, metadata = self._options_reader, self._context.invocation_metadata() or ()
        names = reader.names
        for name, _ in metadata:
            if name in names:
                return reader.read({name: value for name, value in metadata if name in names}, self._peer_principal())
        peer = self._peer_principal()
        return reader.no_options if peer is None else reader.read({}, peer)

    @property
    def room(self) -> ResponseRoom:
        rooms, peer = self._server.rooms, str(self._context.peer())
        room = rooms.get(peer)
        if room is None:
            room = rooms[peer] = ResponseRoom(self._server.client_limits, _nothing_to_drop)
        return room

    @property
    def peer(self) -> str:
        # grpcio writes "ipv4:127.0.0.1:50000" or "ipv6:%5B::1%5D:50000".
        return unquote(str(self._context.peer()).partition(":")[2])

    def _peer_principal(self) -> Principal | None:
        """Principal of the client certificate, None for none."""
        access = self._options_reader.access
        if not access.has_keys:
            return None
        names = self.peer_names
        return access.certificate_principal(names) if names else None


class _UnaryCall(_Call):
    """`GrpcCall` of grpcio, which cancels the task of the method when the client disconnects."""

    __slots__ = ("completion",)

    def __init__(self, context: Any, server: GrpcioServer) -> None:
        super().__init__(context, server)
        self.completion: LoopCompletion | None = None

    def admit(self, size_bytes: int) -> None:
        """See `GrpcCall`."""
        self.room.admit(size_bytes)

    def hold(self, size_bytes: int) -> None:
        """Count a response as unread until grpcio has sent it; raises Overloaded if memory for unread responses is full."""
        room = self.room
        room.admit(size_bytes)
        room.add(size_bytes)
        self._context.add_done_callback(lambda _: room.add(-size_bytes))
        if room.unread_bytes > max_held_bytes(self._server.client_limits.limits.max_body_bytes):
            self._server.refuse_calls(self.peer)


class _StreamCall(_Call):
    """`StreamCall` of grpcio.

    Attributes:
        task: task of the method.
        end_reason: error with which `end` has cancelled the task, None if it has not.
    """

    def __init__(self, context: Any, server: GrpcioServer) -> None:
        super().__init__(context, server)
        self.stopping = server.stopping
        self.take: Callable[[bytes], bool] | None = None  # never called: grpcio passes messages to `read` only
        self.task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]
        self.end_reason: Unavailable | None = None
        self._reading = False

    async def read(self) -> bytes | None:
        if self.stopping:
            raise _shutting_down()
        self._reading = True
        try:
            message: Any = await self._context.read()
        except asyncio.CancelledError:
            if not self.stopping or self.end_reason is not None:
                raise
            self.task.uncancel()
            raise _shutting_down() from None
        except grpc.aio.BaseError as error:
            raise Cancelled("the client disconnected") from error
        finally:
            self._reading = False
        return None if message is grpc.aio.EOF else bytes(message)

    def write_now(self, message: Message, *, last: bool) -> bool:
        return False  # every write of grpcio is a coroutine

    async def write(self, message: Message) -> None:
        try:
            await self._context.write(b"".join(message))
        except grpc.aio.BaseError as error:
            raise Cancelled("the client disconnected") from error

    def stop(self) -> None:
        """Set `stopping`, and end a `read` in progress with Unavailable."""
        self.stopping = True
        if self._reading:
            self.task.cancel()

    def end(self, error: Unavailable) -> None:
        """Cancel the method; the call ends with the error."""
        self.end_reason = error
        self.task.cancel()


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down")


async def _abort(context: Any, error: Exception, load_report: bytes) -> None:
    """End the call with the status of an error and its load report; raises the error by which grpcio ends the method."""
    if isinstance(error, grpc.aio.BaseError):  # the client has disconnected, or the call is aborted already
        raise error
    remaining_s = context.time_remaining()
    deadline_ns = 0 if remaining_s is None else monotonic_ns() + int(remaining_s * NS_PER_S)
    status = error_status(error, deadline_ns)
    forget_frames(error)
    report = ((LOAD_TRAILER, load_report),) if load_report else ()
    await context.abort(grpc.StatusCode[status.code], status.text, (*status.metadata, *report))


def _check_address(host: str, port: int) -> None:
    """Bind to the address once: grpcio reports only that it failed, the system reports the reason. Raises OSError."""
    bind(host, port).close()
