"""Connections of the gRPC server with peers that flood, keep silent, vanish or do not read."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from headrace.wire.grpc.call import UnaryCall
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import ErrorCode
from headrace.wire.http2.stream import Http2Limits

from tests.support.grpc_echo import HOST, EchoServer, echo_server
from tests.support.http2_peer import RawPeer, data, grpc_head, message, request
from tests.support.waiting import at_rest, until

QUICK = Http2Limits(
    handshake_s=0.3,
    frame_s=0.3,
    keepalive_s=0.2,
    keepalive_timeout_s=0.2,
    linger_s=0.2,
    frame_burst=2000,
    frames_per_s=500,
)


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with echo_server(limits=QUICK) as running:
        yield running


def _flood(kind: str) -> Iterator[bytes]:
    for number in range(1, 60_000, 2):
        if kind == "rapid reset":
            call = request(number, end=False, fields=grpc_head("/test.Echo/Wait")) + data(
                number, message(b""), end=True
            )
            yield call + frames.rst_stream(number, ErrorCode.CANCEL)
        elif kind == "ping":
            yield frames.ping(b"\0" * 8, ack=False) * 2
        elif kind == "settings":
            yield frames.settings({})
        else:
            yield frames.frame(frames.CONTINUATION, 0, 1)


@pytest.mark.parametrize("kind", ["rapid reset", "ping", "settings", "continuation"])
def test_a_flood_closes_its_connection_and_no_other(server: EchoServer, kind: str) -> None:
    with grpc.insecure_channel(server.target) as channel, RawPeer(server.port) as peer:
        echo = channel.unary_unary("/test.Echo/Echo")
        echo(b"warm", timeout=5)
        if kind == "continuation":
            peer.send(frames.frame(frames.HEADERS, 0, 1))

        def flood() -> None:
            try:
                for part in _flood(kind):
                    peer.socket.sendall(part)
            except OSError:
                return  # cut off, as it should be

        flooding = threading.Thread(target=flood)
        flooding.start()
        slowest_s = 0.0
        while flooding.is_alive():
            begin_s = time.monotonic()
            assert echo(b"x", timeout=20) == b"x"
            slowest_s = max(slowest_s, time.monotonic() - begin_s)
        flooding.join()
        assert peer.end() in (ErrorCode.ENHANCE_YOUR_CALM, None)  # None: cut before it was read
        assert slowest_s < 10.0
        until(lambda: server.running == 0 and server.open_streams == 0)


def test_silent_connections_are_closed(server: EchoServer) -> None:
    with socket.create_connection((HOST, server.port), timeout=30) as silent:
        begin_s = time.monotonic()
        while silent.recv(4096):
            pass
        assert time.monotonic() - begin_s < 20.0


def test_vanished_peers_are_detected(server: EchoServer) -> None:
    server.ended.clear()
    with RawPeer(server.port) as peer:
        peer.send(request(1, end=False, fields=grpc_head("/test.Echo/Abandon")), data(1, message(b""), end=True))
        until(lambda: server.running == 1)
        # The socket stays open, but answers no PING.
        until(lambda: server.ended == ["Cancelled"])


def test_an_unread_response_blocks_no_other_call() -> None:
    with echo_server() as server, RawPeer(server.port) as peer, grpc.insecure_channel(server.target) as channel:
        window = frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 2**31 - 1}) + frames.window_update(0, 2**30)
        peer.send(
            window,
            request(1, end=False, fields=grpc_head("/test.Echo/Pour")),
            request(3, end=False, fields=grpc_head()),
        )
        until(lambda: server.written > 1000)
        at_rest(lambda: server.written)  # unread bytes do not grow without end
        assert channel.unary_unary("/test.Echo/Echo")(b"x", timeout=5) == b"x"


def test_a_client_may_ping_often(server: EchoServer) -> None:
    options = [
        ("grpc.keepalive_time_ms", 20),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 10),
    ]
    with grpc.insecure_channel(server.target, options) as channel:
        echo = channel.unary_unary("/test.Echo/Echo")
        for _ in range(24):
            assert echo(b"x", timeout=5) == b"x"
            time.sleep(0.05)  # more than two pings
        assert len(server.grpc_server._connections) == 1


def test_calls_cancelled_before_start_create_no_reference_cycles() -> None:
    """It comes seldom, so as not to hold requests up; a call that waited for it would keep its body until then."""

    def left() -> int:
        return sum(type(each) is UnaryCall for each in gc.get_objects())

    with echo_server() as server, RawPeer(server.port) as peer:
        gc.collect()
        gc.disable()
        try:
            before = left()
            for stream_id in range(1, 21, 2):
                opening = request(stream_id, end=False, fields=grpc_head("/test.Echo/Wait"))
                reset = frames.rst_stream(stream_id, ErrorCode.CANCEL)
                peer.send(opening, data(stream_id, message(b"x"), end=True), reset)
            peer.send(request(21, end=False, fields=grpc_head()), data(21, message(b"behind them"), end=True))
            while (frame := peer.frame()) is not None and frame.kind != frames.DATA:
                pass
            assert frame is not None
            until(lambda: left() <= before + 1)  # that of the last one
        finally:
            gc.enable()
