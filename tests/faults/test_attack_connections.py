"""Attacks by the number of connections: idle ones, and more than the system has descriptors (S19 in docs/security.md)."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.attacks import Attacked, Wire, attack, build, head, http_body, watched
from tests.support.processes import processor_s
from tests.support.serving import COMMAND, HOST, ROOT, Server
from tests.support.waiting import until

MAX_CONNECTIONS = 40
IDLE = 800
INFER_PATH = "/v2/models/affine/infer"


@pytest.fixture(scope="module")
def metrics_port() -> int:
    with socket.socket() as sock:  # the system's choice: other test runs on the machine count from the same first port
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module", params=["fast", "grpcio"])
def small(
    request: pytest.FixtureRequest, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    """A server with few connections, and a port for metrics."""
    options = ("--max-connections", str(MAX_CONNECTIONS), "--metrics-port", str(metrics_port))
    with attack(request.param, tmp_path_factory.mktemp("small"), *options) as server:
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


@pytest.mark.parametrize("port", ["http", "metrics"])
def test_idle_connections_give_way(small: Attacked, metrics_port: int, port: str) -> None:
    """Liveness, metrics and inference are served while idle connections are far more than the limit."""
    with watched(small, f"S19 idle connections, {port}, {small.engine}") as watch, ExitStack() as stack:
        address = (HOST, small.server.port if port == "http" else metrics_port)
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection(address, timeout=10))
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
    with watched(small, f"S19 busy connections, {small.engine}") as watch, ExitStack() as stack:
        wires = [stack.enter_context(small.connect()) for _ in range(MAX_CONNECTIONS)]
        for wire in wires:
            wire.pour([infer_head(body) + body[:-1]])
        time.sleep(0.5)
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


def test_more_connections_than_descriptors(tmp_path: Path) -> None:
    """The limit of connections follows the limit of descriptors; the server neither spins nor stops accepting."""
    repository, log = build(tmp_path / "models"), tmp_path / "log"
    words = [*COMMAND, "serve", "--model-repository", str(repository), "--host", HOST, "--http-port", "0", "--no-grpc"]
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
