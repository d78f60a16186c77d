"""The gRPC server under TLS and mutual TLS."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import grpc
import pytest
import trustme
from headrace.http2.stream import Http2Limits
from headrace.tls import TlsFiles

from tests.support.grpc_echo import HOST, echo_server


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


def test_a_missing_tls_handshake_closes_the_connection(authority: trustme.CA, tmp_path: Path) -> None:
    with (
        echo_server(tls=_files(authority, tmp_path, mutual=False), limits=Http2Limits(handshake_s=0.3)) as server,
        socket.create_connection((HOST, server.port), timeout=5) as silent,
    ):
        assert silent.recv(100) == b""
