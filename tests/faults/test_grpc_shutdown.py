"""The gRPC server stops without a lost call."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest
from headrace.core.limits import ClientLimits, Limits
from headrace.wire.grpc.methods import Methods
from headrace.wire.grpc.server import GrpcServer

from tests.support.grpc_echo import HOST, echo_server
from tests.support.serving import accepts
from tests.support.waiting import until


def test_a_restart_under_load_fails_no_call() -> None:
    """Clients with wait_for_ready see no error: running calls finish, new calls are retried."""

    async def echo(message: bytes, _call: object) -> list[bytes]:
        await asyncio.sleep(0.002)
        return [message]

    async def main() -> None:
        methods = Methods({"/test.Echo/Echo": echo}, {})
        server = GrpcServer(methods, ClientLimits(Limits(max_body_bytes=1 << 20), "grpc"), None)
        port = await server.start(HOST, 0)
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
        served, goal, going = 0, 100, True
        reached = asyncio.Event()

        async def caller(number: int) -> None:
            nonlocal served
            local = ("grpc.use_local_subchannel_pool", number % 2)
            async with grpc.aio.insecure_channel(f"{HOST}:{port}", [*options, local]) as channel:
                call = channel.unary_unary("/test.Echo/Echo")
                while going:
                    assert await call(b"x", timeout=20, wait_for_ready=True) == b"x"
                    served += 1
                    if served >= goal:
                        reached.set()

        callers = [asyncio.ensure_future(caller(number)) for number in range(20)]
        for _ in range(4):
            await asyncio.wait_for(reached.wait(), 20)
            await server.stop(5)
            assert not server._connections
            goal = served + 100
            reached.clear()
            server = GrpcServer(methods, ClientLimits(Limits(max_body_bytes=1 << 20), "grpc"), None)
            await server.start(HOST, port)
        await asyncio.wait_for(reached.wait(), 20)
        going = False
        await asyncio.gather(*callers)
        await server.stop(1)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_running_calls_finish_and_slow_calls_are_cancelled() -> None:
    with echo_server() as server, grpc.insecure_channel(server.target) as channel:
        call = channel.unary_unary("/test.Echo/Wait").future(b"patience", timeout=20)
        until(lambda: server.running == 1)
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        until(lambda: states == [grpc.ChannelConnectivity.READY])
        stopping = threading.Thread(target=lambda: server.call(server.grpc_server.stop(10)))
        stopping.start()
        until(lambda: not accepts(server.port))
        until(lambda: len(states) > 1)  # the client has read GOAWAY: until then its calls are served
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/test.Echo/Echo")(b"late", timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        server.release()
        assert call.result(60) == b"patience"
        stopping.join(60)
        assert not stopping.is_alive()

    with echo_server() as server, grpc.insecure_channel(server.target) as channel:
        calls = [channel.unary_unary(f"/test.Echo/{name}").future(b"", timeout=20) for name in ("Wait", "Abandon")]
        until(lambda: server.running == 2)
        begin_s = time.monotonic()
        server.call(server.grpc_server.stop(0.3))
        assert 0.25 < time.monotonic() - begin_s < 15.0, "the calls would have had 20 s"
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call.result(60)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert sorted(server.ended) == ["Unavailable", "cancelled"]


def test_an_open_stream_is_ended_with_unavailable_at_shutdown() -> None:
    with echo_server() as server, grpc.insecure_channel(server.target) as channel:
        held = threading.Event()
        call = channel.stream_stream("/test.Echo/Chat")(iter(lambda: held.wait(10) or b"x", None), timeout=20)
        until(lambda: server.open_streams == 1)
        begin_s = time.monotonic()
        server.call(server.grpc_server.stop(60))
        assert time.monotonic() - begin_s < 20.0
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        held.set()


def test_a_port_in_use_is_an_oserror() -> None:
    async def main(port: int) -> None:
        with pytest.raises(OSError, match=r"in use"):
            await GrpcServer(Methods({}, {}), ClientLimits(), None).start(HOST, port)

    with echo_server() as server:
        asyncio.run(main(server.port))
