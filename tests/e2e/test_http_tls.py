"""HTTP over TLS: with Triton's client, with large bodies past the parser, and with clients that must show a certificate."""

from __future__ import annotations

import fcntl
import http.client
import json
import socket
import ssl
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from tests.support import models
from tests.support.certificates import Certificates, Pair
from tests.support.serving import HOST, Server, serving
from tests.support.waiting import at_rest, until


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("tls") / "models"
    models.add_model(repository, "identity", models.identity("UINT8"))
    return repository


def options(certificates: Certificates, *more: str) -> tuple[str, ...]:
    pair = certificates.server
    return "--tls-cert", str(pair.certificate), "--tls-key", str(pair.key), "--no-grpc", *more


@pytest.fixture(scope="module")
def secure(repository: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(repository, tmp_path_factory.mktemp("log"), *options(certificates)) as running:
        yield running
        assert "Traceback" not in running.text


@pytest.fixture(scope="module")
def mutual(repository: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    authority = ("--tls-client-ca", str(certificates.authority))
    with serving(repository, tmp_path_factory.mktemp("log"), *options(certificates, *authority)) as running:
        yield running
        assert "Traceback" not in running.text


def context(certificates: Certificates, pair: Pair | None = None) -> ssl.SSLContext:
    tls_context = ssl.create_default_context(cafile=str(certificates.authority))
    if pair is not None:
        tls_context.load_cert_chain(pair.certificate, pair.key)
    return tls_context


def client(server: Server, certificates: Certificates, pair: Pair | None = None) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(
        server.address, ssl=True, ssl_context_factory=lambda: context(certificates, pair), concurrency=4
    )


def picture(size_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (1, size_bytes), np.uint8)


def test_the_banner_names_the_scheme(secure: Server) -> None:
    assert f"https://{secure.address}" in secure.text


@pytest.mark.parametrize("size_bytes", [1, 65535, 65536, 65537, 150_528, 1 << 20, 16 << 20])
def test_triton_client_sends_and_gets_tensors_of_any_size(
    secure: Server, certificates: Certificates, size_bytes: int
) -> None:
    array = picture(size_bytes)
    tensor = triton.InferInput("X", list(array.shape), "UINT8").set_data_from_numpy(array)
    with client(secure, certificates) as connected:
        for _ in range(3):  # one connection: what follows a large body must be read by the parser again
            answer = connected.infer("identity", [tensor]).as_numpy("Y")
            assert np.array_equal(answer, array)
            assert connected.is_model_ready("identity")


def infer_request(array: np.ndarray) -> bytes:
    inputs = [
        {"name": "X", "datatype": "UINT8", "shape": list(array.shape), "parameters": {"binary_data_size": array.size}}
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/identity/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(header) + array.size}\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\n\r\n"
    )
    return head.encode() + header + array.tobytes()


def read_answer(stream: socket.socket) -> np.ndarray:
    answer = http.client.HTTPResponse(stream)
    answer.begin()
    content = answer.read()
    assert answer.status == 200, content[:200]
    return np.frombuffer(content, np.uint8, offset=int(answer.headers["inference-header-content-length"]))


@pytest.mark.parametrize("piece_bytes", [1000, 16_384, 16_385, 70_000, 1 << 20])
def test_a_large_body_in_records_of_any_size(secure: Server, certificates: Certificates, piece_bytes: int) -> None:
    array = picture(300_000)
    request = infer_request(array)
    with (
        socket.create_connection((HOST, secure.port), timeout=20) as plain,
        context(certificates).wrap_socket(plain, server_hostname=HOST) as stream,
    ):
        for _ in range(2):
            for start in range(0, len(request), piece_bytes):
                stream.sendall(request[start : start + piece_bytes])
            assert np.array_equal(read_answer(stream), array[0])


def test_the_next_request_in_the_record_that_ends_a_large_body(secure: Server, certificates: Certificates) -> None:
    array = picture(100_000)
    with (
        socket.create_connection((HOST, secure.port), timeout=20) as plain,
        context(certificates).wrap_socket(plain, server_hostname=HOST) as stream,
    ):
        stream.sendall(infer_request(array) + infer_request(array[:, ::-1]))
        assert np.array_equal(read_answer(stream), array[0])
        assert np.array_equal(read_answer(stream), array[0, ::-1])


def unread(stream: ssl.SSLSocket) -> int:
    """Bytes in the receive buffer of a socket."""
    return int.from_bytes(fcntl.ioctl(stream, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_client_that_reads_slowly_gets_its_whole_answer(secure: Server, certificates: Certificates) -> None:
    array = picture(8 << 20)
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        plain.settimeout(20)
        plain.connect((HOST, secure.port))
        with context(certificates).wrap_socket(plain, server_hostname=HOST) as stream:
            stream.sendall(infer_request(array))
            until(lambda: unread(stream) > 0)
            at_rest(lambda: unread(stream))
            assert np.array_equal(read_answer(stream), array[0])


def test_a_disconnect_in_the_middle_of_a_body_affects_no_other_client(
    secure: Server, certificates: Certificates
) -> None:
    request = infer_request(picture(1 << 20))
    for size in (100, 66_000, 500_000):
        plain = socket.create_connection((HOST, secure.port), timeout=20)
        stream = context(certificates).wrap_socket(plain, server_hostname=HOST)
        stream.sendall(request[:size])
        stream.close()
    with client(secure, certificates) as connected:
        assert connected.is_server_ready()


def test_without_tls_nothing_is_served(secure: Server) -> None:
    with socket.create_connection((HOST, secure.port), timeout=20) as plain:
        plain.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with suppress(ConnectionResetError):
            assert b"HTTP" not in plain.recv(4096)


def status(server: Server, certificates: Certificates, pair: Pair | None) -> int:
    connection = http.client.HTTPSConnection(HOST, server.port, timeout=20, context=context(certificates, pair))
    try:
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_client_with_a_certificate_is_served(mutual: Server, certificates: Certificates) -> None:
    assert status(mutual, certificates, certificates.client) == 200
    array = picture(200_000)
    tensor = triton.InferInput("X", list(array.shape), "UINT8").set_data_from_numpy(array)
    with client(mutual, certificates, certificates.client) as connected:
        assert np.array_equal(connected.infer("identity", [tensor]).as_numpy("Y"), array)


@pytest.mark.parametrize("who", ["nobody", "a stranger"])
def test_a_client_without_a_trusted_certificate_is_refused(
    mutual: Server, certificates: Certificates, who: str
) -> None:
    # With TLS 1.3 the client believes the handshake done when the server refuses its certificate.
    with pytest.raises((ssl.SSLError, ConnectionError)):
        status(mutual, certificates, certificates.stranger if who == "a stranger" else None)
    assert status(mutual, certificates, certificates.client) == 200
