"""The gRPC server under real clients of grpcio: calls, streams, deadlines, cancellation, compression, size."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.support.grpc_echo import EchoServer, echo_server
from tests.support.rich_status import retry_delay_s, rich_status
from tests.support.waiting import at_rest, until

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with echo_server() as running:
        yield running


@pytest.fixture
def channel(server: EchoServer) -> Iterator[grpc.Channel]:
    server.ended.clear()
    server.deadlines_ns.clear()
    with grpc.insecure_channel(server.target, OPTIONS) as connected:
        yield connected


def _refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, timeout=kwargs.pop("timeout", 10), **kwargs)
    return caught.value


@pytest.mark.parametrize("size", [0, 1, 200, 16374, 16378, 16379, 16380, 16384, 65530, 70_000, 602_000, 3 << 20])
@pytest.mark.parametrize("method", ["Echo", "Parts"])
def test_messages_of_every_size_are_echoed(channel: grpc.Channel, method: str, size: int) -> None:
    message = os.urandom(size)
    assert channel.unary_unary(f"/test.Echo/{method}")(message, timeout=10) == message


def test_fifty_megabytes_under_flow_control(channel: grpc.Channel, server: EchoServer) -> None:
    message = os.urandom(50 << 20)
    assert channel.unary_unary("/test.Echo/Echo")(message, timeout=60) == message
    until(lambda: server.open_streams == 0)


def test_many_large_messages_at_once_share_one_channel(channel: grpc.Channel) -> None:
    echo = channel.unary_unary("/test.Echo/Echo")
    messages = [bytes((number,)) * (6_000_000 + number) for number in range(24)]  # beyond the budget of a connection
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda message: echo(message, timeout=60), messages))
    assert answers == messages


def test_twenty_thousand_calls_on_one_channel(server: EchoServer) -> None:
    connections: set[int] = set()

    async def main() -> None:
        async with grpc.aio.insecure_channel(server.target) as channel:
            echo = channel.unary_unary("/test.Echo/Echo")

            async def caller(first: int) -> None:
                for number in range(first, 20_000, 50):
                    message = b"%d" % number
                    assert await echo(message, timeout=30 + number) == message

            await asyncio.gather(*map(caller, range(50)))
            connections.update(map(id, server.grpc_server._connections))

    asyncio.run(main())
    assert len(connections) == 1


def test_a_deadline_ends_the_call_on_time_and_the_method_with_it(channel: grpc.Channel, server: EchoServer) -> None:
    begin_s = time.monotonic()
    error = _refused(channel.unary_unary("/test.Echo/Wait"), b"", timeout=0.2)
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0.15 < time.monotonic() - begin_s < 10.0
    until(lambda: server.ended == ["cancelled"])
    error = _refused(channel.unary_unary("/test.Echo/Abandon"), b"", timeout=0.2)
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: len(server.ended) == 2)
    assert server.ended[1] in ("DeadlineExceeded", "Cancelled")  # the client may have left first
    until(lambda: server.open_streams == 0)


def test_the_method_sees_the_deadline(channel: grpc.Channel, server: EchoServer) -> None:
    echo = channel.unary_unary("/test.Echo/Echo")
    before_ns = time.monotonic_ns()
    echo(b"", timeout=5)
    echo(b"")
    timed, timeless = server.deadlines_ns
    assert 4.5e9 < timed - before_ns < 5.5e9
    assert timeless == 0


@pytest.mark.parametrize(("method", "end"), [("Wait", "cancelled"), ("Abandon", "Cancelled")])
def test_a_client_that_cancels_ends_the_method(
    channel: grpc.Channel, server: EchoServer, method: str, end: str
) -> None:
    calls = [channel.unary_unary(f"/test.Echo/{method}").future(b"", timeout=20) for _ in range(50)]
    until(lambda: server.running == 50)
    for call in calls:
        call.cancel()
    until(lambda: server.running == 0)
    assert server.ended == [end] * 50
    until(lambda: server.open_streams == 0)


def test_ten_thousand_cancelled_calls_leave_the_channel_as_good_as_new(server: EchoServer) -> None:
    async def main() -> None:
        async with grpc.aio.insecure_channel(server.target) as channel:
            wait, echo = channel.unary_unary("/test.Echo/Abandon"), channel.unary_unary("/test.Echo/Echo")

            async def caller() -> None:
                for number in range(200):
                    call = wait(b"x", timeout=20)
                    await asyncio.sleep(0 if number % 2 else 0.002)
                    call.cancel()
                    assert await call.code() == grpc.StatusCode.CANCELLED

            await asyncio.gather(*(caller() for _ in range(50)))
            assert await echo(b"still there", timeout=10) == b"still there"

    asyncio.run(main())
    until(lambda: server.running == 0 and server.open_streams == 0)


def test_a_lost_connection_ends_its_calls(server: EchoServer) -> None:
    server.ended.clear()
    channel = grpc.insecure_channel(server.target)
    call = channel.unary_unary("/test.Echo/Abandon").future(b"")
    until(lambda: server.running == 1)
    channel.close()
    until(lambda: server.ended == ["Cancelled"])
    assert call.cancelled() or call.exception() is not None


def test_a_message_beyond_the_limit_fails_alone(channel: grpc.Channel) -> None:
    with echo_server(max_message_bytes=10_000) as small, grpc.insecure_channel(small.target, OPTIONS) as connected:
        echo = connected.unary_unary("/test.Echo/Echo")
        assert echo(b"x" * 10_000, timeout=10) == b"x" * 10_000
        neighbour = connected.unary_unary("/test.Echo/Wait").future(b"n", timeout=20)
        until(lambda: small.running == 1)
        for size in (10_001, 5 << 20):
            assert _refused(echo, b"x" * size).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        bomb = _refused(echo, bytes(5 << 20), compression=grpc.Compression.Gzip)
        assert bomb.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        small.release()
        assert neighbour.result(60) == b"n"
        assert len(small.grpc_server._connections) == 1


# --- Statuses ----------------------------------------------------------------------------------------------------------


def test_errors_reach_the_client_with_code_text_and_metadata(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    text = "100% wrong:\n»ä« 漢\x00\x7f"
    error = _refused(channel.unary_unary("/test.Echo/Refuse"), text.encode())
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    error = _refused(channel.unary_unary("/test.Echo/Overloaded"), b"")
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "come back later")
    trailers = dict(error.trailing_metadata())
    assert trailers["retry-after"] == "3"
    code, text, details = rich_status(trailers["grpc-status-details-bin"])
    assert (code, text, retry_delay_s(details)) == (14, "come back later", 2.5)
    error = _refused(channel.unary_unary("/test.Echo/Fault"), b"")
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    reference = error.details().rpartition("(")[2].rstrip(")")
    assert reference in caplog.text
    assert "a secret path" in caplog.text


def test_a_long_error_still_fits_into_the_trailers(channel: grpc.Channel) -> None:
    error = _refused(channel.unary_unary("/test.Echo/Refuse"), ("ä" * 20_000).encode())
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("ää")


def test_a_unary_method_requires_exactly_one_message(channel: grpc.Channel) -> None:
    as_stream = channel.stream_unary("/test.Echo/Echo")
    assert as_stream(iter([b"one"]), timeout=10) == b"one"
    for messages in ([], [b"one", b"two"]):
        error = _refused(as_stream, iter(messages))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_large_metadata_are_refused_for_their_call_alone(channel: grpc.Channel) -> None:
    echo = channel.unary_unary("/test.Echo/Echo")
    assert echo(b"x", timeout=10, metadata=[("x-some", "y" * 7000)]) == b"x"
    error = _refused(echo, b"x", metadata=[("x-some", "y" * 20_000)])
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert echo(b"x", timeout=10) == b"x"


def test_metadata_that_change_with_every_call(channel: grpc.Channel) -> None:
    echo = channel.unary_unary("/test.Echo/Echo")
    for number in range(600):
        metadata = [("x-request-id", f"{number:032d}"), ("x-bin-bin", os.urandom(10)), (f"x-{number % 90}", "v")]
        assert echo(b"%d" % number, timeout=10 + number / 7, metadata=metadata) == b"%d" % number


# --- Streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_carries_messages_of_all_sizes_both_ways(channel: grpc.Channel) -> None:
    messages = [os.urandom(size) for size in (0, 1, 100_000, 3 << 20, 0, 17, 16_379, 9 << 20, 5)] * 2
    assert list(channel.stream_stream("/test.Echo/Chat")(iter(messages), timeout=30)) == messages


def test_many_small_messages_on_one_stream(channel: grpc.Channel) -> None:
    messages = [b"%d" % number for number in range(20_000)]
    assert list(channel.stream_stream("/test.Echo/Chat")(iter(messages), timeout=60)) == messages


def test_a_stream_without_messages_ends_well(channel: grpc.Channel) -> None:
    call = channel.stream_stream("/test.Echo/Chat")(iter([]), timeout=10)
    assert list(call) == []
    assert call.code() == grpc.StatusCode.OK


def test_a_stream_can_fail_after_an_answer(channel: grpc.Channel) -> None:
    call = channel.stream_stream("/test.Echo/Sour")(iter([b"a", b"b"]), timeout=10)
    assert next(call) == b"a"
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "enough")


def test_a_stream_has_a_deadline(channel: grpc.Channel, server: EchoServer) -> None:
    held = threading.Event()
    call = channel.stream_stream("/test.Echo/Chat")(iter(lambda: held.wait(5) or b"x", None), timeout=0.3)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    held.set()
    until(lambda: server.open_streams == 0)


def test_a_writer_waits_for_a_client_that_reads_slowly(server: EchoServer) -> None:
    # A window that does not grow: otherwise the client allows as much as the buffers of the host's sockets hold.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    with grpc.insecure_channel(server.target, options=options) as channel:
        call = channel.stream_stream("/test.Echo/Pour")(iter([]))
        next(call)
        # The buffers on the way fill up first, which takes a busy machine a moment.
        written = at_rest(lambda: server.written)
        assert 0 < written < 1_000
        for _ in range(written):
            next(call)
        until(lambda: server.written > written)
        call.cancel()
        until(lambda: server.ended == ["left"] and server.open_streams == 0)


def test_a_client_waits_for_a_method_that_reads_slowly() -> None:
    with echo_server() as server, grpc.insecure_channel(server.target) as channel:
        sent = 0

        def messages() -> Iterator[bytes]:
            nonlocal sent
            while sent < 200:
                sent += 1
                yield bytes(100_000)

        call = channel.stream_stream("/test.Echo/Deaf")(messages(), timeout=30)
        until(lambda: sent > 0)
        assert at_rest(lambda: sent) < 20
        server.release()
        assert list(call) == [b"200"]
