"""Attacks by the number of connections: idle ones, and more than the system has descriptors (S19 in docs/security.md)."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.core.limits import Limits
from headrace.wire.http2 import frames
from tritonclient.grpc import service_pb2

from tests.support import scaled_server
from tests.support.attacks import SERVICE, Attacked, Wire, attack, build, grpc_request, head, http_body, watched
from tests.support.http2_peer import HELLO, RawPeer, data, grpc_head, message, request
from tests.support.processes import processor_s
from tests.support.serving import COMMAND, HOST, ROOT, Server
from tests.support.waiting import until

pb: Any = service_pb2
health_pb: Any = health_pb2
MAX_CONNECTIONS = 40
IDLE = 800
INFER_PATH = "/v2/models/affine/infer"


@pytest.fixture(scope="module")
def metrics_port() -> int:
    with socket.socket() as sock:  # the system's choice: other test runs on the machine count from the same first port
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


ONE_PROCESS, ENGINE = (COMMAND, "--front-ends", "0"), (scaled_server.COMMAND, "--front-ends", "auto")


@pytest.fixture(
    scope="module",
    params=[ONE_PROCESS, ENGINE],
    ids=["one process", "engine process"],
)
def small(
    request: pytest.FixtureRequest, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    """A server with few connections, and a port for metrics."""
    command, *options = request.param
    options += ["--max-connections", str(MAX_CONNECTIONS), "--metrics-port", str(metrics_port)]
    with attack(tmp_path_factory.mktemp("small"), *options, command=command) as server:
        yield server


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server with eight connections, and no timeout that ends them during a test."""
    with attack(tmp_path_factory.mktemp("crowded"), "--max-connections", "8", "--header-timeout-s", "600") as server:
        yield server


def infer_head(body: bytes) -> bytes:
    return head(INFER_PATH, f"Content-Length: {len(body)}")


def get(path: str, port: int) -> tuple[int, str]:
    """Status and the header Connection of a response."""
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status, response.getheader("connection", "")
    finally:
        connection.close()


def until_held(metrics_port: int, size_bytes: int) -> None:
    """Wait until the server holds so many bytes of bodies; a request for metrics on its HTTP port would take a connection."""

    def held_bytes() -> float:
        with closing(http.client.HTTPConnection(HOST, metrics_port, timeout=10)) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("headrace_body_bytes"))

    until(lambda: held_bytes() == size_bytes)


def let_others_send(number: int) -> None:
    """Pause now and then: a connection gives way to so many later ones, and the probe's thread must send its request before."""
    if number % (MAX_CONNECTIONS // 4) == 0:
        time.sleep(0.005)


@pytest.mark.parametrize("port", ["http", "metrics"])
def test_idle_connections_give_way(small: Attacked, metrics_port: int, port: str) -> None:
    """Liveness, metrics and inference are served while idle connections are far more than the limit."""
    with watched(small, f"S19 idle connections, {port}") as watch, ExitStack() as stack:
        address = (HOST, small.server.port if port == "http" else metrics_port)
        for number in range(IDLE):
            stack.enter_context(socket.create_connection(address, timeout=10))
            let_others_send(number)
        assert get("/v2/health/ready", small.server.port)[0] == 200
        assert get("/metrics", metrics_port)[0] == 200
        for _ in range(10):
            assert small.infer(http_body()) == (200, "")
        assert small.descriptors() < watch.before_descriptors + MAX_CONNECTIONS + 200
    watch.check()
    small.still_serves()


def test_a_reserve_serves_health_and_metrics(small: Attacked, metrics_port: int) -> None:
    """While every connection has a request, liveness and readiness are answered and other requests are refused."""
    body = http_body()
    with watched(small, "S19 busy connections") as watch, ExitStack() as stack:
        wires = [stack.enter_context(small.connect()) for _ in range(MAX_CONNECTIONS)]
        for wire in wires:
            wire.pour([infer_head(body) + body[:-1]])
        until_held(metrics_port, MAX_CONNECTIONS * len(body[:-1]))
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert get(path, small.server.port) == (200, "close")
        assert get("/metrics", metrics_port)[0] == 200
        with small.connect() as refused:
            refused.pour([infer_head(body) + body])
            status, text = refused.answer()
            assert (status, f"{MAX_CONNECTIONS} connections" in text) == (503, True)
        for wire in wires:
            wire.pour([body[-1:]])
            assert wire.answer() == (200, "")
    watch.check()
    small.still_serves()


def test_connections_over_the_limit_get_a_response(small: Attacked, metrics_port: int) -> None:
    """Many times the limit connect before any of them sends its request: none is closed without a response."""
    body = http_body()
    with ExitStack() as stack:
        busy = [stack.enter_context(small.connect()) for _ in range(MAX_CONNECTIONS)]
        for wire in busy:
            wire.pour([infer_head(body) + body[:-1]])
        until_held(metrics_port, MAX_CONNECTIONS * len(body[:-1]))
        refused = [stack.enter_context(small.connect()) for _ in range(5 * MAX_CONNECTIONS)]
        for wire in refused:
            with suppress(OSError):  # it is closed already, behind its response
                wire.pour([infer_head(body) + body])
        assert [wire.answer()[0] for wire in refused] == [503] * len(refused)
        for wire in busy:
            wire.pour([body[-1:]])
            assert wire.answer() == (200, "")
    small.still_serves()


def test_the_longest_idle_connection_gives_way(small: Attacked) -> None:
    body = http_body()

    def infer(wire: Wire) -> None:
        wire.pour([infer_head(body) + body])
        assert wire.answer() == (200, "")

    with ExitStack() as stack:
        wires = []
        for _ in range(MAX_CONNECTIONS):
            wires.append(stack.enter_context(small.connect()))
            infer(wires[-1])
            time.sleep(0.005)
        for _ in range(3):
            infer(wires[0])
        new = stack.enter_context(small.connect())
        infer(new)
        infer(new)
        wires[1].socket.settimeout(5)
        assert wires[1].closed(), "the connection that was idle for longest"
        infer(wires[0])
        infer(wires[-1])


# --- Connections of gRPC, which have a reserve too ------------------------------------------------------------------------


def assert_healthy(server: Attacked) -> None:
    """Each health check of gRPC is answered on a connection of its own."""
    assert server.call(pb.ServerLiveRequest(), "ServerLive") == ("OK", "")
    assert server.call(pb.ServerReadyRequest(), "ServerReady") == ("OK", "")
    with server.channel() as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[no-untyped-call]
        assert check(health_pb.HealthCheckRequest(), timeout=10).status == health_pb.HealthCheckResponse.SERVING


def assert_none_timed_out(server: Attacked, protocol: str) -> None:
    names = ("header_timeout_s", "body_timeout_s", "min_body_bytes_per_s", "stall_timeout_s")
    hits = {name: server.reached(name, protocol) for name in names}
    assert not any(hits.values()), hits


@pytest.mark.parametrize("kind", ["headers", "bodies", "responses"])
def test_slow_connections_give_way(crowded: Attacked, kind: str) -> None:
    """Requests that stop in the middle, and responses that are not read, on all connections; no timeout ends them."""
    first_bytes = {
        "headers": f"POST {INFER_PATH} HTTP/1.1\r\nHost: loc".encode(),
        "bodies": head(INFER_PATH, "Content-Length: 100") + b"{",
        "responses": b"",
    }[kind]
    if kind == "responses":
        body = http_body({"name": "X", "datatype": "BYTES", "shape": [1], "data": ["x" * (8 << 20)]})
        first_bytes = head("/v2/models/identity_bytes/infer", f"Content-Length: {len(body)}") + body
    with watched(crowded, f"S43 slow {kind}") as watch, ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(8)]
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((HOST, crowded.server.port))
            sock.sendall(first_bytes)
        until(lambda: crowded.infer(http_body()) == (200, ""))
        until(lambda: crowded.infer(http_body()) == (200, ""))
        assert_none_timed_out(crowded, "http")
    watch.check()


CALL = message(grpc_request().SerializeToString())
OPEN = HELLO + request(1, end=False, fields=grpc_head(SERVICE + "ModelInfer"))
SLOW_GRPC = {
    "half a preface": HELLO[:10],
    "half a SETTINGS frame": HELLO[:-2],
    "half a HEADERS frame": HELLO + request(1, fields=grpc_head(SERVICE + "ModelInfer"))[:-4],
    "half a header block": HELLO + frames.frame(frames.HEADERS, 0, 1, frames.encode(grpc_head())),
    "no message": OPEN,
    "half a DATA frame": OPEN + data(1, CALL)[:-4],
    "no gRPC": HELLO + request(1, end=False),
}


@pytest.mark.parametrize("first_bytes", SLOW_GRPC.values(), ids=SLOW_GRPC)
def test_slow_grpc_connections_give_way(crowded: Attacked, first_bytes: bytes) -> None:
    """Frames, header blocks and calls that stop in the middle, on all connections; no timeout ends them."""
    with watched(crowded, "S43 slow gRPC") as watch, ExitStack() as stack:
        until(lambda: crowded.samples("headrace_connections", protocol="grpc") == [0.0])
        for _ in range(8):
            sock = stack.enter_context(socket.create_connection((HOST, crowded.server.grpc_port), timeout=10))
            sock.sendall(first_bytes)
        until(lambda: crowded.samples("headrace_connections", protocol="grpc")[0] >= 8)
        until(lambda: crowded.call(grpc_request()) == ("OK", ""))
        until(lambda: crowded.call(grpc_request()) == ("OK", ""))
        assert_none_timed_out(crowded, "grpc")
    watch.check()
    crowded.still_serves()


def test_grpc_connections_that_read_nothing_give_way(crowded: Attacked) -> None:
    call = pb.ModelInferRequest(model_name="identity_bytes")
    call.inputs.add(name="X", datatype="BYTES", shape=[1])
    call.raw_input_contents.append(struct.pack("<I", 8 << 20) + bytes(8 << 20))
    content = call.SerializeToString()
    with watched(crowded, "S43 unread gRPC") as watch, ExitStack() as stack:
        for _ in range(8):
            peer = stack.enter_context(RawPeer(crowded.server.grpc_port))
            head_frame = request(1, end=False, fields=grpc_head(SERVICE + "ModelInfer"))
            peer.send(head_frame, data(1, message(content)[:5]))
            peer.pour(1, content)
            peer.send(data(1, b"", end=True))
        until(lambda: crowded.call(grpc_request()) == ("OK", ""))
        until(lambda: crowded.call(grpc_request()) == ("OK", ""))
        assert_none_timed_out(crowded, "grpc")
    watch.check()
    crowded.still_serves()


@pytest.mark.parametrize("first_bytes", [b"", HELLO], ids=["silent", "after the preface"])
def test_idle_grpc_connections_give_way(small: Attacked, first_bytes: bytes) -> None:
    with watched(small, "S19 idle gRPC connections") as watch, ExitStack() as stack:
        for number in range(IDLE):
            sock = stack.enter_context(socket.create_connection((HOST, small.server.grpc_port), timeout=10))
            if first_bytes:
                sock.sendall(first_bytes)
            let_others_send(number)
        assert_healthy(small)
        for _ in range(10):
            assert small.call(grpc_request()) == ("OK", "")
        assert small.descriptors() < watch.before_descriptors + MAX_CONNECTIONS + 200
    watch.check()
    small.still_serves()


def test_a_front_end_serves_health_checks_of_grpc_on_its_reserve(tmp_path: Path) -> None:
    with attack(tmp_path, "--front-ends", "1", "--max-connections", "2") as server, ExitStack() as stack:
        call = message(grpc_request().SerializeToString())
        for _ in range(2):
            peer = stack.enter_context(RawPeer(server.server.grpc_port))
            peer.send(request(1, end=False, fields=grpc_head(SERVICE + "ModelInfer")), data(1, call[:-1]))
        until(lambda: server.call(grpc_request())[0] == "UNAVAILABLE")
        assert_healthy(server)


def test_a_reserve_serves_health_checks_of_grpc(small: Attacked) -> None:
    """While every connection has a call, health checks are answered and other calls are refused."""
    call = message(grpc_request().SerializeToString())
    with watched(small, "S19 busy gRPC connections") as watch, ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(small.server.grpc_port)) for _ in range(MAX_CONNECTIONS)]
        for peer in peers:
            peer.send(request(1, end=False, fields=grpc_head(SERVICE + "ModelInfer")), data(1, call[:-1]))
            peer.wait_until_read()
        before = small.descriptors()
        assert_healthy(small)
        until(lambda: small.descriptors() <= before)  # the connection of a health check is closed
        code, text = small.call(grpc_request())
        assert (code, f"{MAX_CONNECTIONS} connections" in text) == ("UNAVAILABLE", True)
        code, text = small.call(pb.ServerMetadataRequest(), "ServerMetadata")
        assert (code, f"{MAX_CONNECTIONS} connections" in text) == ("UNAVAILABLE", True)
        for peer in peers:
            peer.send(data(1, call[-1:], end=True))
            assert peer.trailers(1)["grpc-status"] == "0"
    watch.check()
    small.still_serves()


def test_an_idle_grpc_client_sends_its_next_call_on_another_connection(small: Attacked) -> None:
    port, call = small.server.grpc_port, message(grpc_request().SerializeToString())
    with small.channel() as channel:
        infer = channel.unary_unary(SERVICE + "ModelInfer")
        for _ in range(3):
            assert infer(grpc_request().SerializeToString(), timeout=10)
            with ExitStack() as stack:
                for _ in range(MAX_CONNECTIONS + 2):
                    peer = stack.enter_context(RawPeer(port))
                    peer.send(request(1, end=False, fields=grpc_head(SERVICE + "ModelInfer")), data(1, call, end=True))
                    answer = peer.trailers(1)
                    assert answer["grpc-status"] == "0", answer
                assert infer(grpc_request().SerializeToString(), timeout=10)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_idle_connections_over_the_default_limit(tmp_path: Path, protocol: str) -> None:
    """Without options: 200 idle connections more than the limit, from a process with as many descriptors."""
    count = Limits().max_connections + 200
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * count + 1000:
        pytest.skip("the system gives a process too few descriptors")
    with attack(tmp_path) as server, more_descriptors(count + 1000):
        port = server.server.port if protocol == "http" else server.server.grpc_port
        with watched(server, f"S19 default limit, idle connections, {protocol}") as watch, ExitStack() as stack:
            for _ in range(count):
                sock = stack.enter_context(socket.create_connection((HOST, port), timeout=20))
                if protocol == "grpc":
                    sock.sendall(HELLO)
            until(lambda: server.samples("headrace_connections", protocol=protocol)[0] >= Limits().max_connections)
            for _ in range(5):
                assert get("/v2/health/live", server.server.port)[0] == 200
                assert_healthy(server)
                assert server.call(grpc_request()) == ("OK", "")
                assert server.infer(http_body()) == (200, "")
        watch.check(48 << 20)  # the collector frees the 4,296 closed connections later: some 6 KB each
        server.still_serves()


@contextmanager
def more_descriptors(count: int) -> Iterator[None]:
    """Raise the limit of file descriptors of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", [ONE_PROCESS, ENGINE], ids=["one process", "engine process"])
def test_more_connections_than_descriptors(tmp_path: Path, kind: Sequence[Any]) -> None:
    """The limit of connections follows the limit of descriptors; the server neither spins nor stops accepting."""
    repository, log = build(tmp_path / "models"), tmp_path / "log"
    command, *options = kind
    words = [*command, "serve", "--model-repository", str(repository), "--host", HOST, "--http-port", "0", "--no-grpc"]
    words += options
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["sh", "-c", "ulimit -n 150 && exec " + " ".join(words)],
            cwd=ROOT,
            env={**inherited, "HEADRACE_STATE_DIR": ""},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    server = Server(process, log)
    try:
        server.wait_until_ready()
        assert "the system gives this process 150 file descriptors" in server.text
        with ExitStack() as stack:
            for _ in range(600):
                stack.enter_context(socket.create_connection((HOST, server.port), timeout=10))
            for _ in range(5):
                until(lambda: get("/v2/health/live", server.port)[0] == 200)
            before_s = processor_s(process.pid)
            time.sleep(1)
            assert processor_s(process.pid) - before_s < 0.5, "the event loop spins"
        for _ in range(20):
            assert server.request("POST", INFER_PATH, http_body())[0] == 200
        server.stop()
    finally:
        process.kill()
        process.wait()
