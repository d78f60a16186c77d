"""Attacks on TLS: connections that never begin their handshake (S13), and SIGHUP, which reloads certificates (S22)."""

from __future__ import annotations

import http.client
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
import trustme
from headrace.wire.http2 import frames

from tests.support.attacks import SERVICE, build, grpc_request, http_body, is_closed
from tests.support.certificates import Certificates
from tests.support.http2_peer import HELLO, grpc_head, request
from tests.support.serving import HOST, Server, free_port, serving
from tests.support.waiting import until

MAX_CONNECTIONS = 50
SILENT = 900
HALF_BLOCK = HELLO + frames.frame(frames.HEADERS, 0, 1, frames.encode(grpc_head()))
OPEN_CALL = HELLO + request(1, end=False, fields=grpc_head(SERVICE + "ModelInfer"))


class Secure:
    """A server with TLS on all ports.

    Attributes:
        server: the server.
        metrics_port: port of the metrics.
        certificates: certificates of the server and of a client.
    """

    def __init__(self, server: Server, metrics_port: int, certificates: Certificates) -> None:
        self.server, self.metrics_port = server, metrics_port
        self.certificates = certificates
        self.context = ssl.create_default_context(cafile=str(certificates.authority))

    def get(self, path: str, port: int = 0, timeout_s: float = 10) -> tuple[int, bytes]:
        """Status and body of a request on a connection of its own."""
        connection = http.client.HTTPSConnection(
            HOST, port or self.server.port, timeout=timeout_s, context=self.context
        )
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def infer(self) -> int:
        """Status of an inference request over HTTP."""
        connection = http.client.HTTPSConnection(HOST, self.server.port, timeout=10, context=self.context)
        try:
            connection.request("POST", "/v2/models/affine/infer", http_body())
            return connection.getresponse().status
        finally:
            connection.close()

    def call(self, authority: bytes | None = None) -> None:
        """An inference call over gRPC."""
        roots = authority or self.certificates.authority.read_bytes()
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(self.server.grpc_address, grpc.ssl_channel_credentials(roots), options) as channel:
            channel.unary_unary(SERVICE + "ModelInfer")(grpc_request().SerializeToString(), timeout=20)

    def is_answered(self) -> bool:
        """True unless an inference call over gRPC is refused."""
        try:
            self.call()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
        return True

    def descriptors(self) -> int:
        """Number of open files and sockets of the server."""
        return len(list(Path(f"/proc/{self.server.process.pid}/fd").iterdir()))


@contextmanager
def secured(folder: Path, *options: str) -> Iterator[Secure]:
    """A server with TLS for the length of a `with`."""
    certificates, port = Certificates(folder), free_port()
    pair = certificates.server
    tls = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key), "--metrics-port", str(port)]
    with serving(build(folder / "models"), folder, *tls, *options) as server:
        yield Secure(server, port, certificates)
        assert "Traceback" not in server.text


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    options = ("--max-connections", str(MAX_CONNECTIONS), "--header-timeout-s", "3")
    with secured(tmp_path_factory.mktemp("secure"), *options) as server:
        yield server


@pytest.mark.parametrize("listener", ["http", "metrics", "grpc"])
def test_connections_that_never_begin_the_handshake(secure: Secure, listener: str) -> None:
    """They count from accept on, the oldest gives way to the next, and all are closed after the timeout of the handshake."""
    ports = {"http": secure.server.port, "metrics": secure.metrics_port, "grpc": secure.server.grpc_port}
    secure.call()
    assert secure.infer() == 200
    before = secure.descriptors()
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((HOST, ports[listener]), timeout=10)) for _ in range(SILENT)
        ]
        until(lambda: secure.descriptors() - before < 3 * MAX_CONNECTIONS)
        start_s = time.monotonic()
        assert secure.get("/v2/health/live")[0] == 200
        assert secure.get("/metrics", secure.metrics_port)[0] == 200
        assert secure.infer() == 200
        secure.call()
        assert time.monotonic() - start_s < 5
        until(lambda: secure.descriptors() - before <= 4, timeout_s=40)
        assert is_closed(silent[-1], 5)
    secure.call()
    assert secure.infer() == 200


@pytest.mark.parametrize("first_bytes", [HELLO[:10], HALF_BLOCK, OPEN_CALL], ids=["preface", "header block", "call"])
def test_slow_grpc_connections_give_way(tmp_path: Path, first_bytes: bytes) -> None:
    """As the test of the same name without TLS."""
    options = ("--max-connections", "8", "--header-timeout-s", "600")
    with secured(tmp_path, *options) as secure, ExitStack() as stack:
        secure.call()
        before = secure.descriptors()
        for _ in range(8):
            sock = socket.create_connection((HOST, secure.server.grpc_port), timeout=10)
            connected = stack.enter_context(grpc_context().wrap_socket(sock))
            connected.sendall(first_bytes)
        until(lambda: b'headrace_connections{protocol="grpc"} 8' in secure.get("/metrics", secure.metrics_port)[1])
        until(secure.is_answered)
        until(secure.is_answered)
        metrics = secure.get("/metrics", secure.metrics_port)[1]
        assert b'headrace_limit_hits_total{limit="header_timeout_s",protocol="grpc"} 0' in metrics
        stack.close()
        until(lambda: secure.descriptors() <= before + 2)


def grpc_context() -> ssl.SSLContext:
    """TLS of a gRPC client that trusts every server."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def test_garbage_instead_of_a_handshake(secure: Secure) -> None:
    before = secure.descriptors()
    for port in (secure.server.port, secure.metrics_port, secure.server.grpc_port):
        for _ in range(20):
            with socket.create_connection((HOST, port), timeout=10) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
                with suppress(ConnectionResetError):
                    sock.recv(1000)
    until(lambda: secure.descriptors() - before <= 2)
    secure.call()
    assert secure.infer() == 200


def served_certificate(port: int) -> bytes:
    """Certificate that the server shows to a new connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection((HOST, port), timeout=10) as sock, context.wrap_socket(sock) as connected:
        return connected.getpeercert(binary_form=True) or b""


def test_sighup_reloads_the_certificate(tmp_path: Path) -> None:
    """New connections of all listeners get the new certificate, open ones stay; a broken file changes nothing."""
    certificates, metrics_port = Certificates(tmp_path), free_port()
    pair = certificates.server
    options = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    with serving(build(tmp_path / "models"), tmp_path, *options, "--metrics-port", str(metrics_port)) as server:
        secure = Secure(server, metrics_port, certificates)
        ports = (server.port, metrics_port, server.grpc_port)
        first = served_certificate(server.port)
        kept = http.client.HTTPSConnection(HOST, server.port, timeout=10, context=secure.context)
        kept.request("GET", "/v2/health/live")
        assert kept.getresponse().read()

        old_key = pair.key.read_bytes()
        pair.key.write_text("no key")
        server.signal(signal.SIGHUP)
        until(lambda: "the reload failed" in server.text)
        assert str(pair.key) in server.text
        assert {served_certificate(port) for port in ports} == {first}
        pair.key.write_bytes(old_key)
        secure.call()

        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(pair.key)
        issued.cert_chain_pems[0].write_to_path(pair.certificate)
        server.signal(signal.SIGHUP)
        until(lambda: f"reloaded the TLS certificate {pair.certificate}, valid until" in server.text)
        shown = {served_certificate(port) for port in ports}
        assert len(shown) == 1
        assert shown != {first}
        secure.call(authority.cert_pem.bytes())
        kept.request("GET", "/v2/health/live")
        assert kept.getresponse().status == 200
        kept.close()


def test_sighup_loses_no_request(tmp_path: Path) -> None:
    """A server without certificates and keys goes on, also with a request in flight; SIGTERM twice stops it once."""
    with serving(build(tmp_path / "models"), tmp_path) as server:
        for _ in range(3):
            server.signal(signal.SIGHUP)
            assert server.request("POST", "/v2/models/affine/infer", http_body())[0] == 200
        until(lambda: "SIGHUP: there are no certificates or keys to reload" in server.text)
        for number in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2):
            server.signal(number)
        assert server.request("POST", "/v2/models/affine/infer", http_body())[0] == 200
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
