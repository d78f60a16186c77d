"""Client certificates as credentials, over HTTP and gRPC; heads are cached over connections, principals not."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme

from tests.support.certificates import Pair
from tests.support.grpc_requests import INFER, message
from tests.support.keys import Keys, until
from tests.support.models import add_model, affine
from tests.support.serving import HOST, Server, serving

BODY = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,16],"data":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}]}'


@dataclass
class Case:
    """A server with keys and client certificates.

    Attributes:
        server: HTTP and gRPC.
        keys: its keys file.
        authority: PEM file of the authority of all certificates.
        clients: certificates by name.
    """

    server: Server
    keys: Keys
    authority: Path
    clients: dict[str, Pair]


def issue(authority: trustme.CA, folder: Path, name: str, common_name: str | None = None) -> Pair:
    issued = authority.issue_cert(name, common_name=common_name)
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    issued.cert_chain_pems[0].write_to_path(pair.certificate)
    issued.private_key_pem.write_to_path(pair.key)
    return pair


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    server = issue(authority, folder, HOST)
    clients = {
        "infer": issue(authority, folder, "infer.example"),
        "read": issue(authority, folder, "read.example", "reader"),
        "unknown": issue(authority, folder, "unknown.example"),
    }
    keys = Keys(folder)
    keys.clients["infer"]["certificates"] = ["infer.example"]
    keys.clients["read"]["certificates"] = ["reader"]
    keys.write()
    add_model(folder / "models", "affine", affine())
    tls = (
        "--tls-cert",
        str(server.certificate),
        "--tls-key",
        str(server.key),
        "--tls-client-ca",
        str(folder / "ca.pem"),
    )
    options = (*tls, "--api-keys-file", str(keys.path), "--request-log", "all")
    with serving(folder / "models", folder, *options) as running:
        yield Case(running, keys, folder / "ca.pem", clients)


class Connection:
    """A kept HTTPS connection with a client certificate."""

    def __init__(self, case: Case, name: str) -> None:
        context = ssl.create_default_context(cafile=str(case.authority))
        context.load_cert_chain(case.clients[name].certificate, case.clients[name].key)
        self._socket = context.wrap_socket(
            socket.create_connection((HOST, case.server.port), timeout=20), server_hostname=HOST
        )

    def infer(self, key: str = "") -> int:
        """Status of a request; without a key its bytes are those of every other connection."""
        header = f"X-API-Key: {key}\r\n" if key else ""
        head = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: {HOST}\r\n{header}Content-Length: {len(BODY)}\r\n\r\n"
        return self._send(head.encode() + BODY)

    def get(self, path: str) -> int:
        return self._send(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())

    def _send(self, request: bytes) -> int:
        self._socket.sendall(request)
        response = http.client.HTTPResponse(self._socket)
        response.begin()
        response.read()
        return response.status

    def close(self) -> None:
        self._socket.close()


def test_equal_heads_of_several_certificates_over_http(case: Case) -> None:
    connections = {name: Connection(case, name) for name in case.clients}
    expected = {"infer": 200, "read": 403, "unknown": 401}
    for _ in range(4):  # from the third on the head is cached
        for name, status in expected.items():
            assert connections[name].infer() == status, name
    # A key goes before the certificate, in both directions.
    for _ in range(3):
        assert connections["unknown"].infer(case.keys.keys["infer"]) == 200
        assert connections["infer"].infer(case.keys.keys["read"]) == 403
        assert connections["infer"].infer("hr_wrong") == 401
        assert (connections["unknown"].infer(), connections["infer"].infer()) == (401, 200)
    assert {name: connections[name].get("/v2") for name in expected} == {"infer": 403, "read": 200, "unknown": 401}
    assert connections["unknown"].get("/v2/health/live") == 200
    for connection in connections.values():
        connection.close()


def channel(case: Case, name: str) -> grpc.Channel:
    pair = case.clients[name]
    credentials = grpc.ssl_channel_credentials(
        case.authority.read_bytes(), pair.key.read_bytes(), pair.certificate.read_bytes()
    )
    return grpc.secure_channel(case.server.grpc_address, credentials)


def unary(open_channel: grpc.Channel, key: str = "") -> str:
    metadata = [("x-api-key", key)] if key else []
    request = message("affine", "1", np.zeros((1, 16), np.float32))
    try:
        open_channel.unary_unary(INFER)(request, metadata=metadata, timeout=20)
        return "OK"
    except grpc.RpcError as error:
        return str(error.code().name)


def test_equal_heads_of_several_certificates_over_grpc(case: Case) -> None:
    channels = {name: channel(case, name) for name in case.clients}
    expected = {"infer": "OK", "read": "PERMISSION_DENIED", "unknown": "UNAUTHENTICATED"}
    for _ in range(4):
        for name, code in expected.items():
            assert unary(channels[name]) == code, name
    for _ in range(3):
        assert unary(channels["unknown"], case.keys.keys["infer"]) == "OK"
        assert unary(channels["infer"], case.keys.keys["read"]) == "PERMISSION_DENIED"
        assert unary(channels["infer"], "hr_wrong") == "UNAUTHENTICATED"
        assert (unary(channels["unknown"]), unary(channels["infer"])) == ("UNAUTHENTICATED", "OK")
    for each in channels.values():
        each.close()


def test_a_withdrawn_certificate_ends_on_open_connections(case: Case) -> None:
    connection, open_channel = Connection(case, "infer"), channel(case, "infer")
    for _ in range(3):
        assert (connection.infer(), unary(open_channel)) == (200, "OK")
    entry = case.keys.clients["infer"]
    entry["certificates"] = ["other.example"]
    case.keys.write()
    until(lambda: connection.infer() == 401, "the certificate still works")
    assert unary(open_channel) == "UNAUTHENTICATED"
    entry["certificates"] = ["infer.example"]
    case.keys.write()
    until(lambda: connection.infer() == 200, "the certificate does not work again")
    assert unary(open_channel) == "OK"
    connection.close()
    open_channel.close()
