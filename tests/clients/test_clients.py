"""gRPC clients of other languages, with the libraries of their registries, against the gRPC server.

Each is a program in a folder beside this file. It makes every kind of call, compares values, and prints "ok NAME" for each group.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2, service_pb2

from tests.e2e.conftest import COUNTED, PATIENT
from tests.support import models
from tests.support.certificates import Certificates
from tests.support.serving import Server, serving
from tests.support.toolchains import (
    BUILD_TIMEOUT_S,
    PROTOCOL,
    cpp_client,
    go_client,
    java_client,
    node_client,
    run,
)
from tests.support.tools import tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_TIMEOUT_S)]

CALLS = {
    "live",
    "metadata",
    "raw",
    "typed",
    "gzip",
    "concurrent",
    "stream",
    "deadline",
    "cancel",
    "not_found",
    "details",
    "large",
    "keepalive",
}
ONE_AN_HOUR = "".join(
    f'parameters {{ key: "headrace.rate_limits.default.{key}" value {{ string_value: "{value}" }} }}\n'
    for key, value in {"requests_per_s": "0.0003", "burst": "1"}.items()
)
Build = Callable[[], list[str | Path]]
CLIENTS: dict[str, Build] = {"go": go_client, "java": java_client, "cpp": cpp_client, "node": node_client}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("clients") / "models"
    models.add_model(repository, "sum_difference", models.sum_difference())
    models.add_model(repository, "identity", models.identity())
    models.add_model(repository, "patient", models.affine(), config=PATIENT)
    models.add_model(repository, "limited", models.affine(), config=COUNTED + ONE_AN_HOUR)
    return repository


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def plain(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(repository, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(scope="module")
def tls(repository: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pair = certificates.server
    words = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    with serving(repository, tmp_path_factory.mktemp("log"), *words) as running:
        yield running


@pytest.mark.parametrize("language", CLIENTS)
def test_every_call_of_a_client_is_answered_right(
    language: str, plain: Server, tls: Server, certificates: Certificates
) -> None:
    command = CLIENTS[language]()
    for words in ([plain.grpc_address], [tls.grpc_address, str(certificates.authority)]):
        done = subprocess.run(
            [str(word) for word in (*command, *words)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        lines = done.stdout.splitlines()
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert set(lines) == {f"ok {name}" for name in CALLS}, done.stdout


def test_the_protocol_files_are_those_of_tritonclient(tmp_path: Path) -> None:
    file = tmp_path / "descriptors"
    run([tool("protoc"), "-I.", f"--descriptor_set_out={file}", "grpc_service.proto", "model_config.proto"], PROTOCOL)
    files = descriptor_pb2.FileDescriptorSet.FromString(file.read_bytes()).file
    written = {file.name: _interface(file) for file in files}
    for module in (service_pb2, model_config_pb2):
        expected = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(expected)
        assert written[expected.name] == _interface(expected)


def _interface(file: descriptor_pb2.FileDescriptorProto) -> Message:
    """Remove what is no part of the interface: JSON names, which protoc adds, and empty options."""
    copied = descriptor_pb2.FileDescriptorProto()
    copied.CopyFrom(file)
    open_messages = list(copied.message_type)
    while open_messages:
        message = open_messages.pop()
        open_messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    for service in copied.service:
        for method in service.method:
            method.ClearField("options")
    return copied
