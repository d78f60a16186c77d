"""The fast gRPC engine on a connection without a socket: honest clients under backpressure and overload."""

from __future__ import annotations

import asyncio

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import Overloaded
from headrace.core.limits import ClientLimits, Limits
from headrace.grpc.fast_server import FastGrpcServer, StreamingCall
from headrace.grpc.methods import GrpcCall, Message, Methods, StreamCall

from tests.support.http2_peer import Wire, data, grpc_head, message, on_a_loop, request

PATH = "/test.Echo/Slow"


@on_a_loop
async def test_a_stream_whose_messages_wait_for_the_method_is_not_slow() -> None:
    """The window ended in the middle of a message, and `slow_body_s` ended the stream of a client that could not send."""
    released = asyncio.Event()
    messages: list[bytes | None] = []

    async def method(call: StreamCall) -> None:
        await released.wait()
        while messages.append(await call.read()) is None and messages[-1] is not None:
            pass

    limits = ClientLimits(Limits())
    wire = Wire(FastGrpcServer(Methods({}, {PATH: method}), limits, None))
    part = message(b"y" * 400)[:200]
    await wire.send(request(1, end=False, fields=grpc_head(PATH)), data(1, message(b"x" * 400) * 3 + part))
    call = wire.connection.streams[1]
    assert isinstance(call, StreamingCall)
    start_ns = monotonic_ns()
    assert not any(call.on_tick(start_ns + second * NS_PER_S) for second in range(60))
    wire.connection.ticks += 100
    call.on_tick(start_ns)
    assert call.progress_tick == 100, "nor is it late"
    assert not limits.bodies.rates

    released.set()
    await wire.frames()
    assert len(messages) == 3
    slow = [call.on_tick(start_ns + second * NS_PER_S) for second in range(60)]
    assert not any(slow[:20]), "now the client delays the rest"
    assert slow[-1]
    await wire.drop()


@on_a_loop
async def test_calls_with_a_long_token_that_fail_cost_nothing() -> None:
    """1,000 concurrent calls with an `authorization` of 6,000 bytes ended their connection with ENHANCE_YOUR_CALM."""

    async def method(_message: bytes, _call: GrpcCall) -> Message:
        raise Overloaded("come back later")

    wire = Wire(FastGrpcServer(Methods({PATH: method}, {}), ClientLimits(Limits()), None))
    budget = wire.connection.frame_budget
    before = budget.available
    many = [(b"x-%d" % number, b"1") for number in range(100)]
    for stream_id in range(1, 2001, 2):
        token = b"Bearer %d %s" % (stream_id, b"x" * 6000)  # no block is like another
        wire.connection.data_received(
            request(stream_id, end=False, fields=grpc_head(PATH, (b"authorization", token), *many[: stream_id // 20]))
            + data(stream_id, message(b""), end=True)
        )
    await wire.frames()
    assert not wire.transport.closed
    assert not wire.connection.streams
    assert budget.available == before
    await wire.drop()
