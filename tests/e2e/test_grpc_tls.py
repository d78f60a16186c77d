"""TLS and mutual TLS on the gRPC port, with certificates made for the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.support.certificates import Certificates, Pair
from tests.support.models import add_model, row_sums
from tests.support.serving import Server, serving, start


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("tls_models") / "models"
    add_model(repository, "row_sums", row_sums())
    return repository


def options(files: Certificates) -> list[str]:
    return ["--tls-cert", str(files.server.certificate), "--tls-key", str(files.server.key)]


@pytest.fixture(scope="module")
def tls_server(
    one_model: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with serving(one_model, tmp_path_factory.mktemp("log"), *options(certificates)) as running:
        yield running


@pytest.fixture(scope="module")
def mutual_server(
    one_model: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    more = ["--tls-client-ca", str(certificates.authority)]
    with serving(one_model, tmp_path_factory.mktemp("log"), *options(certificates), *more) as running:
        yield running


def double(client: triton.InferenceServerClient, length: int = 3) -> None:
    x = np.arange(length, dtype=np.float32).reshape(1, -1)
    request_input = triton.InferInput("X", [1, length], "FP32").set_data_from_numpy(x)
    assert (
        client.infer("row_sums", [request_input], client_timeout=20).as_numpy("DOUBLE").tobytes() == (2 * x).tobytes()
    )


def refused(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.is_server_live(client_timeout=5)
    assert caught.value.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")


def connect(server: Server, authority: Path, pair: Pair | None = None) -> triton.InferenceServerClient:
    """A client that trusts `authority` and shows the certificate of `pair`."""
    return triton.InferenceServerClient(
        server.grpc_address,
        ssl=True,
        root_certificates=str(authority),
        private_key=str(pair.key) if pair else None,
        certificate_chain=str(pair.certificate) if pair else None,
    )


def test_tls(tls_server: Server, certificates: Certificates) -> None:
    with connect(tls_server, certificates.authority) as client:
        double(client)
        double(client, 500_000)


def test_plain_text_on_the_port_of_tls(tls_server: Server, certificates: Certificates) -> None:
    with triton.InferenceServerClient(tls_server.grpc_address) as client:
        refused(client)
    test_tls(tls_server, certificates)


def test_mutual_tls(mutual_server: Server, certificates: Certificates) -> None:
    with connect(mutual_server, certificates.authority, certificates.client) as client:
        double(client)


@pytest.mark.parametrize("shown", ["nothing", "stranger"])
def test_mutual_tls_without_a_trusted_certificate(
    mutual_server: Server, certificates: Certificates, shown: str
) -> None:
    pair = certificates.stranger if shown == "stranger" else None
    with connect(mutual_server, certificates.authority, pair) as client:
        refused(client)


@pytest.mark.parametrize("wrong", ["absent.pem", "ca.pem"])
def test_files_that_are_wrong_end_the_start(
    one_model: Path, certificates: Certificates, tmp_path: Path, wrong: str
) -> None:
    key = certificates.authority.with_name(wrong)
    words = ["--tls-cert", str(certificates.server.certificate), "--tls-key", str(key)]
    server = start(one_model, tmp_path / "log", *words)
    assert server.wait() != 0
    assert "TLS" in server.text
    assert "Traceback" not in server.text
