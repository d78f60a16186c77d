"""TLS files: what is loaded, and what the operator reads when a file is wrong."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from headrace.wire.tls import ServerTls, TlsFiles, certificate_expiry_s


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


@pytest.mark.parametrize("field", ["certificate", "key", "client_ca"])
@pytest.mark.parametrize("wrong", ["absent", "garbage"])
def test_a_wrong_file_is_named(files: TlsFiles, tmp_path: Path, field: str, wrong: str) -> None:
    path = tmp_path / "wrong.pem"
    if wrong == "garbage":
        path.write_text("no PEM")
    paths = {"certificate": files.certificate, "key": files.key, "client_ca": files.client_ca, field: str(path)}
    with pytest.raises(OSError, match="TLS") as caught:
        TlsFiles(**paths).ssl_context(())
    assert str(path) in str(caught.value.strerror)


def test_a_key_of_another_certificate_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(tmp_path / "other.pem")
    with pytest.raises(OSError, match="belong together"):
        TlsFiles(files.certificate, str(tmp_path / "other.pem")).ssl_context(())


def replace_files(files: TlsFiles, name: str = "127.0.0.1") -> None:
    pair = trustme.CA().issue_cert(name)
    pair.cert_chain_pems[0].write_to_path(files.certificate)
    pair.private_key_pem.write_to_path(files.key)


def test_reload_replaces_all_contexts(files: TlsFiles) -> None:
    tls = ServerTls(files)
    before = {name: tls.context(name) for name in ("h2", "http/1.1")}
    assert tls.context("h2") is before["h2"]
    replace_files(files)
    assert files.certificate in tls.reload()
    for name, context in before.items():
        assert tls.context(name) is not context
    assert tls.expiry_s is not None


def test_a_broken_file_keeps_all_contexts(files: TlsFiles) -> None:
    tls = ServerTls(files)
    before, expiry_s = tls.context("h2"), tls.expiry_s
    Path(files.key).write_text("no PEM")
    with pytest.raises(OSError, match="TLS"):
        tls.reload()
    assert tls.context("h2") is before
    assert tls.expiry_s == expiry_s


@pytest.mark.parametrize("expires", [datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2055, 1, 1, tzinfo=UTC)])
def test_the_expiry_time_of_a_certificate(expires: datetime, tmp_path: Path) -> None:
    """Years from 2050 on are written in another way."""
    leaf = trustme.CA().issue_cert("localhost", not_after=expires)
    chain = tmp_path / "chain.pem"
    chain.write_bytes(b"some words before it\n" + b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    assert certificate_expiry_s(str(chain)) == expires.timestamp()


@pytest.mark.parametrize(
    "content",
    ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "-----BEGIN CERTIFICATE-----\n", "\xff"],
)
def test_invalid_certificates_have_no_expiry_time(content: str, tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text(content, "latin-1")
    assert certificate_expiry_s(str(path)) is None
    assert certificate_expiry_s(str(tmp_path / "none")) is None
