"""The fast gRPC engine on a connection without a socket: honest clients under backpressure and overload."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from headrace.core.errors import Overloaded
from headrace.core.limits import ClientLimits, Limits
from headrace.grpc import fast_server
from headrace.grpc.fast_server import DeadlineTimer, FastGrpcServer, StreamingCall
from headrace.grpc.methods import GrpcCall, Message, Methods, StreamCall
from headrace.http2.frames import ErrorCode, rst_stream

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


@pytest.mark.parametrize(
    ("timeout", "age_ms", "cost"),
    [
        (b"50m", 50, 0),  # the client's RST_STREAM comes before the server expires the call
        (b"10m", 9.5, 0),
        (b"10m", 5, 4),
        (b"1n", 0, 4),  # a rapid reset
        (b"1m", 1, 4),
        (b"", 1, 4),
        (b"", 25, 0),  # cancelled
        (b"10S", 25, 0),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_resets_of_calls_that_the_client_waited_for_cost_nothing(
    monkeypatch: pytest.MonkeyPatch, timeout: bytes, age_ms: float, cost: int, is_stream: bool
) -> None:
    """Calls that timed out under overload ended their connection: 50 ms deadlines, a method of 300 ms, 4,800 calls a second."""
    now_ns = monotonic_ns()
    monkeypatch.setattr(fast_server, "monotonic_ns", lambda: now_ns)

    async def unary(_message: bytes, _call: GrpcCall) -> Message:
        await asyncio.sleep(10)
        return []

    async def stream(call: StreamCall) -> None:
        while await call.read() is not None:
            pass

    @on_a_loop
    async def run() -> None:
        nonlocal now_ns
        methods = Methods({}, {PATH: stream}) if is_stream else Methods({PATH: unary}, {})
        application = FastGrpcServer(methods, ClientLimits(Limits()), None)
        application.deadline_timer = DeadlineTimer(asyncio.get_running_loop())
        wire = Wire(application)
        monkeypatch.setattr(application.deadline_timer, "_fire", lambda: None)
        extra = [(b"grpc-timeout", timeout)] if timeout else []
        before = wire.connection.frame_budget.available
        fields = grpc_head(PATH, *extra)
        wire.connection.data_received(
            request(1, end=False, fields=fields) + data(1, message(b"x" * 2000), end=not is_stream)
        )
        if is_stream:
            before = wire.connection.frame_budget.available + 3  # the message has added to it
        now_ns += int(age_ms * NS_PER_MS)
        await wire.send(rst_stream(1, ErrorCode.CANCEL))
        assert before - wire.connection.frame_budget.available == cost
        assert not wire.connection.streams
        await wire.drop()

    run()


def test_an_error_of_one_call_ends_no_other_deadline() -> None:
    class Expiring:
        closed = False

        def __init__(self, error: Exception | None = None) -> None:
            self.error = error
            self.deadline_ns = monotonic_ns() + NS_PER_MS
            self.expired = False

        def expire(self) -> None:
            self.closed = self.expired = True
            if self.error is not None:
                raise self.error

    errors: list[Any] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        timer, calls = DeadlineTimer(loop), [Expiring(ValueError("broken")), Expiring(), Expiring()]
        for call in calls:
            timer.add(call)  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert all(call.expired for call in calls)
        timer.close()

    asyncio.run(run())
    assert [str(error) for error in errors] == ["broken"]
