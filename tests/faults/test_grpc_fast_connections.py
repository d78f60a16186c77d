"""Connections of the fast gRPC engine over real sockets: shutdown, TLS, keep-alive, and peers that speak raw bytes."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import trustme

from server.frontends.grpc_fast import FastGrpcServer
from server.frontends.grpc_methods import Methods
from server.frontends.http2 import frames
from server.frontends.http2.flow import Limits
from server.frontends.http2.frames import ErrorCode
from server.frontends.http2.headers import Decoder, Field
from server.frontends.tls import TlsFiles
from tests.grpc_echo import HOST, EchoServer, echo_server
from tests.http2_peer import HELLO, Frame, data, request

QUICK = Limits(
    handshake_s=0.3, frame_s=0.3, keepalive_s=0.2, keepalive_timeout_s=0.2, linger_s=0.2, burst=2000, per_s=500
)


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with echo_server(limits=QUICK) as running:
        yield running


def _wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that in time"
        time.sleep(0.005)


def _head(path: str = "/test.Echo/Echo", *more: Field) -> list[Field]:
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b"te", b"trailers")]
    return [*head, (b"content-type", b"application/grpc"), *more]


def _message(payload: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(payload)) + payload


class RawPeer:
    """A socket that speaks frames."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port), timeout=10)
        self.socket.sendall(HELLO)
        self._decoder = Decoder(1 << 16)
        self._data = b""

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def frame(self) -> Frame | None:
        """The next frame, None when the server has closed."""
        while len(self._data) < 9 or len(self._data) < 9 + (struct.unpack_from(">I", self._data)[0] >> 8):
            try:
                more = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not more:
                return None
            self._data += more
        word, flags, stream_id = frames.FRAME_HEAD.unpack_from(self._data)
        end = 9 + (word >> 8)
        payload, self._data = self._data[9:end], self._data[end:]
        return Frame(word & 0xFF, flags, stream_id, payload)

    def until(self, kind: int) -> Frame:
        """The next frame of a kind."""
        while (frame := self.frame()) is not None:
            if frame.kind == kind:
                return frame
        raise AssertionError("the server has closed")

    def trailers(self, stream_id: int) -> dict[str, str]:
        """All header fields of an answer."""
        fields: dict[str, str] = {}
        while (frame := self.frame()) is not None:
            if frame.kind == frames.HEADERS and frame.stream_id == stream_id:
                fields |= {name.decode(): value.decode() for name, value in self._decoder.decode(frame.payload) or []}
                if frame.flags & frames.END_STREAM:
                    return fields
        raise AssertionError("the server has closed")

    def end(self) -> ErrorCode | None:
        """Read until the server closes; the code of its last GOAWAY."""
        code = None
        while (frame := self.frame()) is not None:
            if frame.kind == frames.GOAWAY:
                code = frame.code
        return code


# --- Requests that no gRPC client sends ---------------------------------------------------------------------------------

ODD: dict[str, tuple[list[Field], bytes, dict[str, str]]] = {
    "unknown encoding": (
        _head("/test.Echo/Echo", (b"grpc-encoding", b"br")),
        _message(b"x", 1),
        {"grpc-status": "12", "grpc-accept-encoding": "identity, deflate, gzip"},
    ),
    "compressed without an encoding": (_head(), _message(b"x", 1), {"grpc-status": "3"}),
    "an unknown flag": (_head(), _message(b"x", 2), {"grpc-status": "3"}),
    "no gzip": (_head("/test.Echo/Echo", (b"grpc-encoding", b"gzip")), _message(b"no gzip", 1), {"grpc-status": "3"}),
    "no message": (_head(), b"", {"grpc-status": "3"}),
    "half a prefix": (_head(), b"\0\0\0", {"grpc-status": "3"}),
    "half a message": (_head(), _message(b"abcdef")[:-1], {"grpc-status": "3"}),
    "two messages": (_head(), _message(b"a") + _message(b"b"), {"grpc-status": "3"}),
    "half a message on a stream": (_head("/test.Echo/Chat"), _message(b"abcdef")[:-1], {"grpc-status": "3"}),
    "too large": (_head(), struct.pack(">BI", 0, 2**32 - 1), {"grpc-status": "8"}),
    "another content type": ([*_head()[:4], (b"content-type", b"application/json")], b"{}", {":status": "415"}),
    "grpc-web": ([*_head()[:4], (b"content-type", b"application/grpc-web")], b"", {":status": "415"}),
    "no content type": (_head()[:4], b"", {":status": "415"}),
    "GET": ([(b":method", b"GET"), *_head()[1:]], b"", {":status": "405"}),
    "no te": ([*_head()[:3], (b"content-type", b"application/grpc")], _message(b""), {"grpc-status": "3"}),
    "a content type with a suffix": (
        [*_head()[:4], (b"content-type", b"application/grpc+proto")],
        _message(b"x"),
        {"grpc-status": "0", ":status": "200", "content-type": "application/grpc"},
    ),
    "a time-out in bad form": (
        _head("/test.Echo/Echo", (b"grpc-timeout", b"1e3S")),
        _message(b""),
        {"grpc-status": "3"},
    ),
    "a time-out of nine digits": (
        _head("/test.Echo/Echo", (b"grpc-timeout", b"123456789n")),
        _message(b""),
        {"grpc-status": "3"},
    ),
    "a time-out of ages": (
        _head("/test.Echo/Echo", (b"grpc-timeout", b"99999999H")),
        _message(b""),
        {"grpc-status": "0"},
    ),
    "no time at all": (_head("/test.Echo/Wait", (b"grpc-timeout", b"0n")), _message(b""), {"grpc-status": "4"}),
    "a right content-length": (
        _head("/test.Echo/Echo", (b"content-length", b"6")),
        _message(b"x"),
        {"grpc-status": "0"},
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_are_answered_and_the_connection_goes_on(server: EchoServer, name: str) -> None:
    fields, body, expected = ODD[name]
    with RawPeer(server.port) as peer:
        for stream_id in (1, 3):
            peer.send(request(stream_id, end=False, fields=fields), data(stream_id, body, end=True))
            found = peer.trailers(stream_id)
            assert found | expected == found
        peer.send(request(5, end=False, fields=_head()), data(5, _message(b"fine"), end=True))
        assert peer.until(frames.DATA).payload == _message(b"fine")


MALFORMED: dict[str, list[Field]] = {
    "upper case": [*_head(), (b"Upper", b"x")],
    "a header of HTTP/1": [*_head(), (b"connection", b"close")],
    "a te that is none": [*_head()[:3], (b"te", b"gzip"), (b"content-type", b"application/grpc")],
    "a pseudo-header behind others": [*_head(), (b":authority", b"x")],
    "a pseudo-header twice": [(b":path", b"/"), *_head()],
    "an unknown pseudo-header": [(b":status", b"200"), *_head()],
    "no path": [*_head()[:2], *_head()[3:]],
    "a value with a line end": [*_head(), (b"x", b"a\r\nb: c")],
    "a path with a line end": _head("/test\n/Echo"),
    "a name with a space": [*_head(), (b"a b", b"c")],
    "a content-length that is none": [*_head(), (b"content-length", b"-1")],
    "a wrong content-length": [*_head(), (b"content-length", b"7")],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_reset_and_the_connection_goes_on(server: EchoServer, name: str) -> None:
    with RawPeer(server.port) as peer:
        peer.send(request(1, end=False, fields=MALFORMED[name]), data(1, _message(b"x"), end=True))
        assert peer.until(frames.RST_STREAM).code == ErrorCode.PROTOCOL_ERROR
        peer.send(request(3, end=False, fields=_head()), data(3, _message(b"fine"), end=True))
        assert peer.until(frames.DATA).payload == _message(b"fine")


def test_a_message_in_crumbs_and_messages_in_one_frame(server: EchoServer) -> None:
    with RawPeer(server.port) as peer:
        whole = _message(b"hello, crumbs")
        peer.send(request(1, end=False, fields=_head()), *(data(1, whole[n : n + 1]) for n in range(len(whole))))
        peer.send(frames.frame(frames.DATA, frames.PADDED, 1, b"\x05" + bytes(5)), data(1, b"", end=True))
        assert peer.until(frames.DATA).payload == whole
        many = b"".join(_message(b"%d" % number) for number in range(100))
        peer.send(request(3, end=False, fields=_head("/test.Echo/Chat")), data(3, many, end=True))
        got = b""
        while len(got) < len(many):
            got += peer.until(frames.DATA).payload
        assert got == many


def test_a_body_that_is_not_wanted_is_stopped(server: EchoServer) -> None:
    with RawPeer(server.port) as peer:
        peer.send(request(1, end=False, fields=_head("/test.Echo/None")), data(1, bytes(5000)))
        assert peer.trailers(1)["grpc-status"] == "12"
        assert peer.until(frames.RST_STREAM).code == ErrorCode.NO_ERROR
        peer.send(data(1, bytes(5000), end=True))
        peer.send(request(3, end=False, fields=_head()), data(3, _message(b"fine"), end=True))
        assert peer.until(frames.DATA).payload == _message(b"fine")


def test_retries_are_told_when(server: EchoServer) -> None:
    with RawPeer(server.port) as peer:
        peer.send(request(1, end=False, fields=_head("/test.Echo/Overloaded")), data(1, _message(b""), end=True))
        found = peer.trailers(1)
        assert (found["grpc-status"], found["grpc-message"], found["retry-after"]) == ("14", "come back later", "3")


# --- Floods and silence -------------------------------------------------------------------------------------------------


def _flood(kind: str) -> Iterator[bytes]:
    for number in range(1, 60_000, 2):
        if kind == "rapid reset":
            call = request(number, end=False, fields=_head("/test.Echo/Wait")) + data(number, _message(b""), end=True)
            yield call + frames.rst_stream(number, ErrorCode.CANCEL)
        elif kind == "ping":
            yield frames.ping(b"\0" * 8, ack=False) * 2
        elif kind == "settings":
            yield frames.settings({})
        else:
            yield frames.frame(frames.CONTINUATION, 0, 1)


@pytest.mark.parametrize("kind", ["rapid reset", "ping", "settings", "continuation"])
def test_a_flood_ends_its_connection_and_hurts_nobody_else(server: EchoServer, kind: str) -> None:
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
            assert echo(b"x", timeout=5) == b"x"
            slowest_s = max(slowest_s, time.monotonic() - begin_s)
        flooding.join()
        assert peer.end() in (ErrorCode.ENHANCE_YOUR_CALM, None)  # None: cut before it was read
        assert slowest_s < 1.0
        _wait_for(lambda: server.running == 0 and server.open_streams == 0)


def test_who_connects_and_says_nothing_is_cut(server: EchoServer) -> None:
    with socket.create_connection((HOST, server.port), timeout=5) as silent:
        begin_s = time.monotonic()
        while silent.recv(4096):
            pass
        assert time.monotonic() - begin_s < 2.0


def test_who_vanishes_is_noticed(server: EchoServer) -> None:
    server.ended.clear()
    with RawPeer(server.port) as peer:
        peer.send(request(1, end=False, fields=_head("/test.Echo/Abandon")), data(1, _message(b""), end=True))
        _wait_for(lambda: server.running == 1)
        # The socket stays open, but answers no PING.
        _wait_for(lambda: server.ended == ["Cancelled"])


def test_an_answer_that_nobody_reads_blocks_nobody_else() -> None:
    with echo_server() as server, RawPeer(server.port) as peer, grpc.insecure_channel(server.target) as channel:
        window = frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 2**31 - 1}) + frames.window_update(0, 2**30)
        peer.send(window, request(1, end=False, fields=_head("/test.Echo/Pour")), request(3, end=False, fields=_head()))
        _wait_for(lambda: server.written > 1000)
        time.sleep(0.2)
        written = server.written
        time.sleep(0.2)
        assert server.written == written, "what nobody reads grows without end"
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
        for _ in range(4):
            assert echo(b"x", timeout=5) == b"x"
            time.sleep(0.3)
        assert len(server.engine._connections) == 1


# --- Shutdown -----------------------------------------------------------------------------------------------------------


def test_a_restart_under_load_fails_no_call() -> None:
    """Whoever waits for a server that is ready notices nothing: what runs is finished, what is new comes again."""

    async def echo(message: bytes, _call: object) -> list[bytes]:
        await asyncio.sleep(0.002)
        return [message]

    async def main() -> None:
        methods = Methods({"/test.Echo/Echo": echo}, {})
        engine = FastGrpcServer(methods, 1 << 20, None)
        port = await engine.start(HOST, 0)
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
            await engine.stop(5)
            assert not engine._connections
            goal = served + 100
            reached.clear()
            engine = FastGrpcServer(methods, 1 << 20, None)
            await engine.start(HOST, port)
        await asyncio.wait_for(reached.wait(), 20)
        going = False
        await asyncio.gather(*callers)
        await engine.stop(1)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_runs_is_waited_for_and_what_takes_too_long_ends() -> None:
    with echo_server() as server, grpc.insecure_channel(server.target) as channel:
        call = channel.unary_unary("/test.Echo/Wait").future(b"patience", timeout=20)
        _wait_for(lambda: server.running == 1)
        stopping = threading.Thread(target=lambda: server.call(server.engine.stop(10)))
        stopping.start()
        time.sleep(0.2)
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/test.Echo/Echo")(b"late", timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        server.release()
        assert call.result(5) == b"patience"
        stopping.join(5)
        assert not stopping.is_alive()

    with echo_server() as server, grpc.insecure_channel(server.target) as channel:
        calls = [channel.unary_unary(f"/test.Echo/{name}").future(b"", timeout=20) for name in ("Wait", "Abandon")]
        _wait_for(lambda: server.running == 2)
        begin_s = time.monotonic()
        server.call(server.engine.stop(0.3))
        assert 0.25 < time.monotonic() - begin_s < 3.0
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call.result(5)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert sorted(server.ended) == ["Unavailable", "cancelled"]


def test_an_open_stream_is_told_that_the_server_stops() -> None:
    with echo_server() as server, grpc.insecure_channel(server.target) as channel:
        held = threading.Event()
        call = channel.stream_stream("/test.Echo/Chat")(iter(lambda: held.wait(10) or b"x", None), timeout=20)
        _wait_for(lambda: server.open_streams == 1)
        begin_s = time.monotonic()
        server.call(server.engine.stop(10))
        assert time.monotonic() - begin_s < 3.0
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        held.set()


def test_a_port_that_is_taken_is_an_oserror(server: EchoServer) -> None:
    async def main() -> None:
        with pytest.raises(OSError, match=r"in use"):
            await FastGrpcServer(Methods({}, {}), 1000, None).start(HOST, server.port)

    asyncio.run(main())


# --- TLS ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def _files(authority: trustme.CA, folder: Path, mutual: bool) -> TlsFiles:
    pair = authority.issue_cert("localhost", HOST)
    (folder / "key.pem").write_bytes(pair.private_key_pem.bytes())
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    (folder / "ca.pem").write_bytes(authority.cert_pem.bytes())
    return TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem") if mutual else "")


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(authority: trustme.CA, tmp_path: Path, mutual: bool) -> None:
    root = authority.cert_pem.bytes()
    client = authority.issue_cert("client@example.org")
    key, chain = client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
    with echo_server(tls=_files(authority, tmp_path, mutual)) as server:
        credentials = grpc.ssl_channel_credentials(root, key if mutual else None, chain if mutual else None)
        options = [("grpc.max_receive_message_length", -1)]
        with grpc.secure_channel(f"localhost:{server.port}", credentials, options) as channel:
            echo = channel.unary_unary("/test.Echo/Echo")
            for message in (b"", b"hello", bytes(3 << 20)):
                assert echo(message, timeout=10) == message
        if mutual:
            anonymous = grpc.ssl_channel_credentials(root)
            with grpc.secure_channel(f"localhost:{server.port}", anonymous) as channel:
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary("/test.Echo/Echo")(b"x", timeout=5)
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_tls_without_the_agreement_on_http2_is_closed(authority: trustme.CA, tmp_path: Path) -> None:
    with echo_server(tls=_files(authority, tmp_path, mutual=False)) as server:
        context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        with (
            socket.create_connection((HOST, server.port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connected,
        ):
            assert connected.recv(100) == b""


def test_a_tls_handshake_that_does_not_come_is_cut(authority: trustme.CA, tmp_path: Path) -> None:
    with (
        echo_server(tls=_files(authority, tmp_path, mutual=False), limits=QUICK) as server,
        socket.create_connection((HOST, server.port), timeout=5) as silent,
    ):
        assert silent.recv(100) == b""
