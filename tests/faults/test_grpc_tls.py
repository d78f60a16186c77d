"""Connections to the gRPC server under TLS that do not come to HTTP/2; `tests/e2e/test_grpc_tls.py` has calls."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
import trustme
from headrace.wire.http2.stream import Http2Limits
from headrace.wire.tls import TlsFiles

from tests.support.grpc_echo import HOST, echo_server


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def _files(authority: trustme.CA, folder: Path) -> TlsFiles:
    pair = authority.issue_cert("localhost", HOST)
    (folder / "key.pem").write_bytes(pair.private_key_pem.bytes())
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    return TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"), "")


def test_tls_without_the_agreement_on_http2_is_closed(authority: trustme.CA, tmp_path: Path) -> None:
    with echo_server(tls=_files(authority, tmp_path)) as server:
        context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        with (
            socket.create_connection((HOST, server.port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connected,
        ):
            assert connected.recv(100) == b""


def test_a_missing_tls_handshake_closes_the_connection(authority: trustme.CA, tmp_path: Path) -> None:
    with (
        echo_server(tls=_files(authority, tmp_path), limits=Http2Limits(handshake_s=0.3)) as server,
        socket.create_connection((HOST, server.port), timeout=5) as silent,
    ):
        assert silent.recv(100) == b""
