"""TLS files: what is loaded, and what the operator reads when a file is wrong."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme
from headrace.tls import TlsFiles


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return TlsFiles(str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem"), str(tmp_path / "ca.pem"))


def test_a_client_ca_makes_a_client_certificate_necessary(files: TlsFiles) -> None:
    assert files.ssl_context(("h2",)).verify_mode == ssl.CERT_REQUIRED
    assert TlsFiles(files.certificate, files.key).ssl_context(()).verify_mode == ssl.CERT_NONE
    assert files.ssl_context(()).minimum_version == ssl.TLSVersion.TLSv1_2


def test_grpcio_accepts_the_files(files: TlsFiles) -> None:
    assert files.grpc_credentials() is not None
    assert TlsFiles(files.certificate, files.key).grpc_credentials() is not None


@pytest.mark.parametrize("field", ["certificate", "key", "client_ca"])
@pytest.mark.parametrize("wrong", ["absent", "garbage"])
def test_a_wrong_file_is_named(files: TlsFiles, tmp_path: Path, field: str, wrong: str) -> None:
    path = tmp_path / "wrong.pem"
    if wrong == "garbage":
        path.write_text("no PEM")
    paths = {"certificate": files.certificate, "key": files.key, "client_ca": files.client_ca, field: str(path)}
    for use in (lambda: TlsFiles(**paths).ssl_context(()), lambda: TlsFiles(**paths).grpc_credentials()):
        with pytest.raises(OSError, match="TLS") as caught:
            use()
        assert str(path) in str(caught.value.strerror)


def test_a_key_of_another_certificate_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(tmp_path / "other.pem")
    with pytest.raises(OSError, match="belong together"):
        TlsFiles(files.certificate, str(tmp_path / "other.pem")).ssl_context(())
