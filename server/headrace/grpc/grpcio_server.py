"""The gRPC engine on grpcio: complete and trusted, the measure for the other one.

What grpcio does not tell a server is which compression a request came with: it unpacks what clients send (identity, deflate,
gzip) and answers are sent as they are, which is what Triton does unless it is told otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import grpc

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import Cancelled, Unavailable, forget_frames
from headrace.core.limits import Door, HeldBody
from headrace.grpc.methods import Message, Methods, StreamMethod, UnaryMethod
from headrace.grpc.status import error_status
from headrace.inference.request_options import Asked, AskedHeaders
from headrace.tls import TlsFiles

# Clients may ping this often, also without a call in flight; twice more often and the connection is closed.
MIN_PING_INTERVAL_S = 10
# We ping connections that are silent: a peer that vanished must not hold its requests for ever.
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 20
HANDSHAKE_TIMEOUT_S = 20

# What those who are refused at the end of the drain may take to hear of it.
_REJECTION_S = 1.0


def _is_server_error(record: logging.LogRecord) -> bool:
    """False for what grpcio logs with a traceback when a client leaves before its answer, or before its call has been looked at:
    any client could fill the log so."""
    if record.exc_info is None:
        return True
    error = record.exc_info[1]
    return not isinstance(error, asyncio.CancelledError) and type(error).__name__ != "ExecuteBatchError"


class GrpcioServer:
    """A `GrpcEngine`.

    Args:
        methods: what is served.
        client_limits: which grpcio keeps in its own way: it counts none, knows no time-outs but its own, and
            stops unpacking at the largest message, whatever the ratio. The bound on all bodies is ours, and counts messages
            from when they are whole: grpcio does not show them before.
        tls: the operator's files, None for plain text.
    """

    def __init__(self, methods: Methods, client_limits: Door, tls: TlsFiles | None) -> None:
        self._methods = methods
        self._client_limits = client_limits
        self._limits = client_limits.limits
        self._tls = tls
        self._calls: set[_UnaryCall] = set()
        self._streams: set[_StreamCall] = set()
        self._stopping = False
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port. Raises OSError: the address cannot be had, or a TLS file is wrong."""
        credentials = None if self._tls is None else self._tls.grpc_credentials()
        if port:
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
        except RuntimeError as error:  # grpcio keeps the reason to itself
            raise OSError(None, f"{host}:{port}: gRPC cannot listen there") from error
        await self._server.start()
        return int(chosen)

    async def stop(self, grace_s: float) -> None:
        """See `GrpcEngine.stop`."""
        if self._server is None:
            return
        self._stopping = True
        for stream in list(self._streams):
            stream.stop()
        ending = asyncio.ensure_future(self._server.stop(grace_s + _REJECTION_S))
        await asyncio.wait({ending}, timeout=grace_s)
        late = Unavailable("the server is shutting down and could not wait for this request")
        for call in list(self._calls):
            if call.caller is not None:
                call.caller.settle(late)
        for stream in list(self._streams):
            stream.end(late)
        await ending

    def _options(self) -> list[tuple[str, int]]:
        limits = self._limits
        return [
            ("grpc.so_reuseport", 0),  # a port in use is an error, not a port shared
            ("grpc.max_receive_message_length", limits.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", limits.max_header_bytes),
            ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
            ("grpc.max_concurrent_streams", limits.max_streams),
            ("grpc.max_allowed_incoming_connections", limits.max_connections),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_S * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_S * 1000),
        ]

    def _handlers(self) -> _Handlers:
        handlers: dict[str, Any] = {
            path: grpc.unary_unary_rpc_method_handler(self._unary(m)) for path, m in self._methods.unary.items()
        }
        handlers |= {
            path: grpc.stream_stream_rpc_method_handler(self._stream(m)) for path, m in self._methods.streams.items()
        }
        return _Handlers(handlers)

    def _unary(self, method: UnaryMethod) -> Callable[[bytes, Any], Any]:
        calls, asked_headers, client_limits = self._calls, self._methods.asked_headers, self._client_limits

        async def serve(message: bytes, context: Any) -> bytes:
            call, held = _UnaryCall(context, asked_headers), client_limits.hold()
            calls.add(call)
            try:
                held.grow(len(message))
                return b"".join(await method(message, call))
            except Exception as error:
                await _abort(context, error)
                raise
            finally:
                held.end()
                calls.discard(call)

        return serve

    def _stream(self, method: StreamMethod) -> Callable[[Any, Any], Any]:
        streams, asked_headers, client_limits = self._streams, self._methods.asked_headers, self._client_limits

        async def serve(messages: Any, context: Any) -> None:
            call = _StreamCall(context, asked_headers, client_limits.hold(), self._stopping)
            streams.add(call)
            try:
                await method(call)
            except Exception as error:
                await _abort(context, error)
            except asyncio.CancelledError:
                if call.end_reason is None:
                    raise
                call.task.uncancel()
                await _abort(context, call.end_reason)
            finally:
                call.held.end()
                streams.discard(call)

        return serve


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)


class _UnaryCall:
    """See `GrpcCall`. The client's leaving comes as the cancellation of the method's task."""

    __slots__ = ("_asked_headers", "_context", "caller", "deadline_ns", "received_ns")

    def __init__(self, context: Any, asked_headers: AskedHeaders) -> None:
        self._context = context
        self._asked_headers = asked_headers
        self.received_ns = monotonic_ns()
        self.deadline_ns = _deadline_ns(context, self.received_ns)
        self.caller: LoopCompletion | None = None

    @property
    def asked(self) -> Asked:
        return _request_options(self._asked_headers, self._context)


class _StreamCall:
    """See `StreamCall`.

    Attributes:
        task: of the method.
        ended: why `end` has cancelled it.
    """

    def __init__(self, context: Any, asked_headers: AskedHeaders, held: HeldBody, stopping: bool) -> None:
        self.deadline_ns = _deadline_ns(context, monotonic_ns())
        self.stopping = stopping
        self.held = held
        self.task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]
        self.end_reason: Unavailable | None = None
        self._context = context
        self._asked_headers = asked_headers
        self._reading = False

    @property
    def asked(self) -> Asked:
        return _request_options(self._asked_headers, self._context)

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
            raise Cancelled("the client has left") from error
        finally:
            self._reading = False
        return None if message is grpc.aio.EOF else bytes(message)

    async def write(self, message: Message) -> None:
        try:
            await self._context.write(b"".join(message))
        except grpc.aio.BaseError as error:
            raise Cancelled("the client has left") from error

    def stop(self) -> None:
        """Take on nothing new; a read in progress ends."""
        self.stopping = True
        if self._reading:
            self.task.cancel()

    def end(self, why: Unavailable) -> None:
        """End the method wherever it is."""
        self.end_reason = why
        self.task.cancel()


def _deadline_ns(context: Any, now_ns: int) -> int:
    left_s = context.time_remaining()
    return 0 if left_s is None else now_ns + int(left_s * NS_PER_S)


def _request_options(asked_headers: AskedHeaders, context: Any) -> Asked:
    names = asked_headers.names
    return asked_headers.read({name: value for name, value in context.invocation_metadata() or () if name in names})


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down")


async def _abort(context: Any, error: Exception) -> None:
    """End the call with the status of an error; raises what grpcio expects to come through."""
    if isinstance(error, grpc.aio.BaseError):  # the client has left in between, or the call was aborted
        raise error
    end = error_status(error)
    forget_frames(error)
    await context.abort(grpc.StatusCode[end.code], end.text, end.metadata)


def _check_address(host: str, port: int) -> None:
    """grpcio only says that it failed; the system says why."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
