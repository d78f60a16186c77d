"""A gRPC server with a few simple methods, on an event loop in a thread, for clients of every kind."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop
from headrace.core import limits as core_limits
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import BadRequest, Cancelled, Overloaded
from headrace.core.limits import ClientLimits
from headrace.wire.grpc.methods import GrpcCall, Message, Methods, StreamCall, StreamMethod, UnaryMethod
from headrace.wire.grpc.server import GrpcServer
from headrace.wire.http2.stream import Http2Limits
from headrace.wire.tls import ServerTls, TlsFiles

HOST = "127.0.0.1"
MAX_MESSAGE_BYTES = 64 << 20


class EchoServer:
    """Attributes:
    port: where it listens.
    running: calls of `Wait` and `Abandon` whose method has not ended.
    ended: how each of those ended, in order.
    deadlines_ns: what calls of `Echo` saw.
    """

    def __init__(self, max_message_bytes: int, tls: TlsFiles | None, limits: Http2Limits | None) -> None:
        self.port = 0
        self.running = 0
        self.ended: list[str] = []
        self.deadlines_ns: list[int] = []
        self.released = asyncio.Event()
        unary: dict[str, UnaryMethod] = {
            "/test.Echo/Echo": self._echo,
            "/test.Echo/Parts": self._parts,
            "/test.Echo/Large": self._large,
            "/test.Echo/Wait": self._wait,
            "/test.Echo/Abandon": self._abandon,
            "/test.Echo/Refuse": self._refuse,
            "/test.Echo/Fault": self._fault,
            "/test.Echo/Overloaded": self._overloaded,
        }
        streams: dict[str, StreamMethod] = {
            "/test.Echo/Chat": self._chat,
            "/test.Echo/Pour": self._pour,
            "/test.Echo/Deaf": self._deaf,
            "/test.Echo/Sour": self._sour,
        }
        self.grpc_server = GrpcServer(
            Methods(unary, streams),
            ClientLimits(core_limits.Limits(max_body_bytes=max_message_bytes), "grpc"),
            ServerTls(tls) if tls is not None else None,
            limits,
        )
        self.loop: asyncio.AbstractEventLoop
        self.written = 0

    @property
    def target(self) -> str:
        """As gRPC clients take it."""
        return f"{HOST}:{self.port}"

    def call(self, coroutine: Any, timeout_s: float = 20.0) -> Any:
        """Run a coroutine on the server's loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def release(self) -> None:
        """Let the methods that wait go on."""
        self.loop.call_soon_threadsafe(self.released.set)

    @property
    def open_streams(self) -> int:
        """Open streams, and closed ones whose method still runs, on all connections."""
        return sum(len(c.streams) + c.cancelled_running for c in self.grpc_server._connections)

    async def _echo(self, message: bytes, call: GrpcCall) -> Message:
        assert type(message) is bytes
        assert call.received_ns > 0
        self.deadlines_ns.append(call.deadline_ns)
        return [message]

    async def _parts(self, message: bytes, _call: GrpcCall) -> Message:
        middle = len(message) // 2
        return [message[:middle], memoryview(message)[middle:], b""]

    async def _large(self, message: bytes, _call: GrpcCall) -> Message:
        return [bytes(int(message))]

    async def _wait(self, message: bytes, _call: GrpcCall) -> Message:
        self.running += 1
        try:
            await self.released.wait()
            self.ended.append("answered")
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        finally:
            self.running -= 1
        return [message]

    async def _abandon(self, message: bytes, call: GrpcCall) -> Message:
        call.completion = LoopCompletion(Mailbox(asyncio.get_running_loop()))
        self.running += 1
        try:
            await call.completion
        except Exception as error:
            self.ended.append(type(error).__name__)
            raise
        finally:
            self.running -= 1
        return [message]

    async def _refuse(self, message: bytes, _call: GrpcCall) -> Message:
        raise BadRequest(message.decode())

    async def _fault(self, _message: bytes, _call: GrpcCall) -> Message:
        raise RuntimeError("a secret path /etc/secret")

    async def _overloaded(self, _message: bytes, _call: GrpcCall) -> Message:
        raise Overloaded("come back later", retry_after_s=2.5)

    async def _chat(self, call: StreamCall) -> None:
        while (message := await call.read()) is not None:
            await call.write([message])

    async def _pour(self, call: StreamCall) -> None:
        """Send messages of 1 KiB until the client disconnects."""
        try:
            while True:
                await call.write([bytes(1024)])
                self.written += 1
                if self.written % 64 == 0:
                    await asyncio.sleep(0)
        except (Cancelled, asyncio.CancelledError):
            self.ended.append("left")
            raise

    async def _deaf(self, call: StreamCall) -> None:
        """Read nothing until it is released, then all messages; respond with their number."""
        await self.released.wait()
        count = 0
        while await call.read() is not None:
            count += 1
        await call.write([b"%d" % count])

    async def _sour(self, call: StreamCall) -> None:
        await call.write([await call.read() or b""])
        raise BadRequest("enough")


@contextmanager
def echo_server(
    max_message_bytes: int = MAX_MESSAGE_BYTES, tls: TlsFiles | None = None, limits: Http2Limits | None = None
) -> Iterator[EchoServer]:
    """A server for the length of a `with`; what asyncio or HTTP/2 log as an error fails the test."""
    wrong: list[str] = []
    server = EchoServer(max_message_bytes, tls, limits)
    started, stopped = threading.Event(), threading.Event()

    async def main() -> None:
        server.loop = asyncio.get_running_loop()
        server.loop.set_exception_handler(lambda _, context: wrong.append(str(context)))
        finish = asyncio.Event()
        server.port = await server.grpc_server.start(HOST, 0)
        started.set()
        stopped.finish = lambda: server.loop.call_soon_threadsafe(finish.set)  # type: ignore[attr-defined]
        await finish.wait()
        await server.grpc_server.stop(0.0)

    thread = threading.Thread(target=lambda: uvloop.run(main()), name="echo server")
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: wrong.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headrace.http2").addHandler(handler)
    thread.start()
    assert started.wait(60)
    try:
        yield server
    finally:
        stopped.finish()  # type: ignore[attr-defined]
        thread.join(20)
        logging.getLogger("headrace.http2").removeHandler(handler)
    assert not thread.is_alive(), "the server did not stop"
    assert not wrong, wrong
