"""The gRPC server on a connection without a socket: honest clients under backpressure and overload."""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import BadRequest, Cancelled, Overloaded
from headrace.core.limits import ClientLimits, Limits
from headrace.core.request import InferResponse
from headrace.wire.grpc import call as grpc_call
from headrace.wire.grpc import framing as grpc_framing
from headrace.wire.grpc.call import DeadlineTimer
from headrace.wire.grpc.methods import GrpcCall, Message, Methods, StreamCall
from headrace.wire.grpc.server import GrpcServer
from headrace.wire.grpc.streaming_call import StreamingCall
from headrace.wire.http2.frames import ErrorCode, rst_stream

from tests.support.http2_peer import Wire, data, grpc_head, message, on_a_loop, request
from tests.support.waiting import until_async

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
    wire = Wire(GrpcServer(Methods({}, {PATH: method}), limits, None))
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

    wire = Wire(GrpcServer(Methods({PATH: method}, {}), ClientLimits(Limits()), None))
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
    monkeypatch.setattr(grpc_call, "monotonic_ns", lambda: now_ns)

    received = asyncio.Event()

    async def unary(_message: bytes, _call: GrpcCall) -> Message:
        received.set()
        await asyncio.Event().wait()
        return []

    async def stream(call: StreamCall) -> None:
        while await call.read() is not None:
            received.set()

    @on_a_loop
    async def run() -> None:
        nonlocal now_ns
        methods = Methods({}, {PATH: stream}) if is_stream else Methods({PATH: unary}, {})
        application = GrpcServer(methods, ClientLimits(Limits()), None)
        application.deadline_timer = DeadlineTimer(asyncio.get_running_loop())
        wire = Wire(application)
        monkeypatch.setattr(application.deadline_timer, "_fire", lambda: None)
        extra = [(b"grpc-timeout", timeout)] if timeout else []
        before = wire.connection.frame_budget.available
        fields = grpc_head(PATH, *extra)
        wire.connection.data_received(
            request(1, end=False, fields=fields) + data(1, message(b"x" * 2000), end=not is_stream)
        )
        await received.wait()
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
        await until_async(lambda: all(call.expired for call in calls))
        timer.close()

    asyncio.run(run())
    assert [str(error) for error in errors] == ["broken"]


class Direct:
    """A direct method under the test's control."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.started: list[LoopCompletion] = []
        self.ended = 0

    def start(self, message: bytes, call: GrpcCall) -> SimpleNamespace | None:
        assert call.received_ns
        if message == b"invalid":
            raise BadRequest("invalid")
        if message == b"large":
            return None
        self.started.append(LoopCompletion(self.mailbox))
        return SimpleNamespace(completion=self.started[-1])

    def end(self, request: SimpleNamespace, call: GrpcCall) -> Message:
        self.ended += 1
        outcome = request.completion.outcome
        if isinstance(outcome, Exception):
            raise outcome
        return [b"served"]


def direct_wire(method: Direct, limits: ClientLimits) -> Wire:
    async def coroutine(message: bytes, _call: GrpcCall) -> Message:
        return [b"by a coroutine: ", message]

    return Wire(GrpcServer(Methods({PATH: coroutine}, {}, direct={PATH: method}), limits, None))


@on_a_loop
async def test_a_direct_method_runs_without_a_task() -> None:
    method, limits = Direct(), ClientLimits(Limits())
    wire = direct_wire(method, limits)
    tasks = len(asyncio.all_tasks())
    for stream_id in (1, 3):
        body = message(b"x" * 100)
        wire.connection.data_received(
            request(stream_id, end=False, fields=grpc_head(PATH)) + data(stream_id, body, end=True)
        )
    assert len(asyncio.all_tasks()) == tasks
    assert (len(method.started), limits.bodies.requests) == (2, 2)
    method.started[0].settle(BadRequest("no such input"))
    method.started[1].settle(InferResponse({}))
    sent = b"".join(frame.payload for frame in await wire.frames())
    assert b"served" in sent
    assert b"no such input" in sent
    assert not wire.connection.streams
    assert (method.ended, limits.bodies.requests, limits.bodies.reserved_bytes) == (2, 0, 0)
    await wire.drop()


@on_a_loop
async def test_a_direct_method_may_leave_a_request_to_its_coroutine_or_refuse_it() -> None:
    method, limits = Direct(), ClientLimits(Limits())
    wire = direct_wire(method, limits)
    for stream_id, content in ((1, b"large"), (3, b"invalid")):
        wire.connection.data_received(request(stream_id, end=False, fields=grpc_head(PATH)))
        wire.connection.data_received(data(stream_id, message(content), end=True))
    sent = b"".join(frame.payload for frame in await wire.frames())
    assert b"by a coroutine: large" in sent
    assert b"invalid" in sent
    assert (limits.bodies.requests, method.ended, len(wire.connection.streams)) == (0, 0, 0)
    await wire.drop()


@on_a_loop
async def test_a_reset_settles_the_request_of_a_direct_method_and_counts_until_it_has_ended() -> None:
    method, limits = Direct(), ClientLimits(Limits())
    wire = direct_wire(method, limits)
    await wire.send(request(1, end=False, fields=grpc_head(PATH)), data(1, message(b"x"), end=True))
    wire.connection.data_received(rst_stream(1, ErrorCode.CANCEL))
    assert isinstance(method.started[0].outcome, Cancelled)
    assert (wire.connection.cancelled_running, limits.bodies.requests) == (1, 1)
    await until_async(lambda: (wire.connection.cancelled_running, limits.bodies.requests, method.ended) == (0, 0, 1))
    await wire.drop()


@on_a_loop
async def test_a_stream_passes_whole_messages_to_a_method_that_waits_for_them() -> None:
    taken: list[bytes] = []
    read: list[bytes | None] = []

    def take(content: bytes) -> bool:
        taken.append(content)
        return content != b"refused"

    async def method(call: StreamCall) -> None:
        call.take = take
        while read.append(await call.read()) is None and read[-1] is not None:
            pass

    wire = Wire(GrpcServer(Methods({}, {PATH: method}), ClientLimits(Limits()), None))
    await wire.send(request(1, end=False, fields=grpc_head(PATH)))
    await wire.send(data(1, message(b"a")), data(1, message(b"b")))  # each one frame
    await wire.send(data(1, message(b"c") + message(b"d") + message(b"e")[:3]))
    await wire.send(data(1, message(b"e")[3:]))
    assert (taken, read) == ([b"a", b"b", b"c", b"d", b"e"], [])
    await wire.send(data(1, message(b"refused")), data(1, message(b"f")))  # what follows waits for `read`, in order
    assert (taken, read) == ([b"a", b"b", b"c", b"d", b"e", b"refused"], [b"refused", b"f"])
    await wire.send(data(1, message(b"g"), end=True))
    assert (taken[-1], read[2:]) == (b"g", [None])
    await wire.drop()


@pytest.mark.parametrize("is_stream", [False, True])
def test_large_compressed_messages_are_decompressed_on_a_codec_thread(
    monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    threads: list[str] = []
    decompress = grpc_framing.decompress

    def recorded(*args: Any) -> bytes:
        threads.append(threading.current_thread().name.split("_")[0])
        return decompress(*args)

    monkeypatch.setattr(grpc_framing, "decompress", recorded)
    large, small = random.Random(1).randbytes(20_000), b"small"
    received: list[bytes | None] = []

    async def unary(content: bytes, _call: GrpcCall) -> Message:
        received.append(content)
        return [b"done"]

    async def stream(call: StreamCall) -> None:
        while (content := await call.read()) is not None:
            received.append(content)

    @on_a_loop
    async def sends() -> None:
        methods = Methods({}, {PATH: stream}) if is_stream else Methods({PATH: unary}, {})
        limits = ClientLimits(Limits())
        wire = Wire(GrpcServer(methods, limits, None))
        head = grpc_head(PATH, (b"grpc-encoding", b"gzip"))
        packed, tiny = message(gzip.compress(large), 1), message(gzip.compress(small), 1)
        parts = [packed[start : start + 16_000] for start in range(0, len(packed), 16_000)]
        damaged = packed[:-5] + bytes(5)
        if is_stream:
            wire.connection.data_received(request(1, end=False, fields=head))
            for part in (tiny, *parts, tiny, *parts):
                wire.connection.data_received(data(1, part))
            wire.connection.data_received(data(1, tiny, end=True))
        else:
            for number, content in enumerate((packed, tiny, damaged)):
                wire.connection.data_received(request(2 * number + 1, end=False, fields=head))
                for start in range(0, len(content), 16_000):
                    end = start + 16_000 >= len(content)
                    wire.connection.data_received(data(2 * number + 1, content[start : start + 16_000], end=end))
        async with asyncio.timeout(20):
            while wire.connection.streams:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        written = bytes(wire.transport.written)
        assert limits.bodies.reserved_bytes == 0
        assert is_stream or b"is not valid gzip" in written
        await wire.drop()

    sends()
    if is_stream:
        assert received == [small, large, small, large, small]
        assert sorted(threads) == ["MainThread"] * 3 + ["codec"] * 2
    else:
        assert sorted(received, key=len) == [small, large]
        assert sorted(threads) == ["MainThread", "codec", "codec"]
