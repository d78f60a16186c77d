"""Operations of a server without keys: everything on a loopback address, nothing that changes the server on a network address."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from headrace.server.banner import describe_access
from headrace.server.listen import is_loopback
from headrace.server.settings import Settings

from tests.support.attacks import Attacked, attack, grpc_request, http_body, http_changes, pb

# The values that the server has.
HTTP_CHANGES = http_changes(log_verbose_level=0, trace_rate="1000")
READS = (
    "/v2",
    "/v2/status",
    "/v2/models",
    "/v2/models/affine/config",
    "/v2/logging",
    "/v2/trace/setting",
    "/metrics",
    "/",
)


def settings_change(kind: type) -> object:
    request = kind()
    if kind is pb.LogSettingsRequest:
        request.settings["log_verbose_level"].uint32_param = 0
    else:
        request.settings["trace_rate"].value.append("1000")
    return request


GRPC_CHANGES = {
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest(model_name="affine"),
    "RepositoryModelUnload": pb.RepositoryModelUnloadRequest(model_name="none"),
    "SystemSharedMemoryRegister": pb.SystemSharedMemoryRegisterRequest(name="r", key="/r", byte_size=1),
    "SystemSharedMemoryUnregister": pb.SystemSharedMemoryUnregisterRequest(name="r"),
    "CudaSharedMemoryRegister": pb.CudaSharedMemoryRegisterRequest(name="r", byte_size=1),
    "CudaSharedMemoryUnregister": pb.CudaSharedMemoryUnregisterRequest(name="r"),
    "LogSettings": settings_change(pb.LogSettingsRequest),
    "TraceSetting": settings_change(pb.TraceSettingRequest),
}
GRPC_READS = {
    "ServerMetadata": pb.ServerMetadataRequest(),
    "RepositoryIndex": pb.RepositoryIndexRequest(),
    "ModelConfig": pb.ModelConfigRequest(name="affine"),
    "LogSettings": pb.LogSettingsRequest(),
    "TraceSetting": pb.TraceSettingRequest(),
    "SystemSharedMemoryStatus": pb.SystemSharedMemoryStatusRequest(),
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server on all addresses, without keys."""
    with attack(tmp_path_factory.mktemp("network"), "--host", "0.0.0.0") as server:
        yield server


def change(server: Attacked, path: str) -> tuple[int, str]:
    body = HTTP_CHANGES[path]
    return server.post(path, b"" if body is None else json.dumps(body).encode())


def test_a_network_address_serves_but_changes_nothing(network: Attacked) -> None:
    for path in HTTP_CHANGES:
        status, text = change(network, path)
        assert (status, "--api-keys-file" in text, "--insecure-control" in text) == (403, True, True), path
    for method, message in GRPC_CHANGES.items():
        code, text = network.call(message, method)
        assert (code, "--api-keys-file" in text, "--insecure-control" in text) == ("PERMISSION_DENIED", True, True), (
            method
        )
    for path in READS:
        assert network.server.request("GET", path)[0] == 200, path
    for method, message in GRPC_READS.items():
        assert network.call(message, method) == ("OK", ""), method
    assert network.post("/v2/repository/index", b"{}")[0] == 200
    assert network.infer(http_body()) == (200, "")
    assert network.call(grpc_request()) == ("OK", "")
    network.still_serves()


def test_a_network_address_answers_to_every_host(network: Attacked) -> None:
    assert network.server.request("GET", "/v2", None, {"Host": "models.example"})[0] == 200
    assert network.server.request("POST", "/v2/logging", b"{}", {"Origin": "http://evil.example"})[0] == 403


def test_control_is_open_by_option(tmp_path: Path) -> None:
    with attack(tmp_path, "--host", "0.0.0.0", "--insecure-control") as server:
        for path in HTTP_CHANGES:
            status, text = change(server, path)
            assert status not in (401, 403), (path, text)
        for method, message in GRPC_CHANGES.items():
            assert server.call(message, method)[0] != "PERMISSION_DENIED", method
        assert server.post("/v2/logging", b'{"log_verbose_level": 0}')[0] == 200


def test_addresses() -> None:
    for host in ("127.0.0.1", "127.8.9.10", "::1", "localhost", "::ffff:127.0.0.1"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "", "192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1", "no-such-name.invalid"):
        assert not is_loopback(host), host


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "every program on this machine may use every operation; keys"),
        (
            {"host": "0.0.0.0"},
            "every client that reaches 0.0.0.0 may run models, read and scrape metrics without a key; keys",
        ),
        ({"host": "0.0.0.0", "insecure_control": True}, "also load models and change settings (--insecure-control)"),
        ({"host": "0.0.0.0", "tls_client_ca": "ca.pem"}, "every client with a certificate that reaches 0.0.0.0"),
        ({"api_keys_file": "keys.yaml"}, "every operation needs a key"),
        ({"host": "0.0.0.0", "jwks": "keys.json"}, "Keys travel unencrypted"),
    ],
)
def test_the_banner_says_what_is_open(options: dict[str, object], words: str) -> None:
    settings = Settings(model_repository=(), **options)  # type: ignore[arg-type]
    assert words in describe_access(settings, is_loopback(settings.host))


def test_the_banner_of_a_server(network: Attacked) -> None:
    (line,) = re.findall("^Access: .*", network.server.text, re.MULTILINE)
    assert "every client that reaches 0.0.0.0 may run models" in line
    assert "--insecure-control" in line


def test_the_json_log_says_what_is_open(tmp_path: Path) -> None:
    with attack(tmp_path, "--log-format", "json") as server:
        lines = [json.loads(line) for line in server.server.text.splitlines() if '"listening"' in line]
    assert lines[0]["access"].startswith("every program on this machine may use every operation")
