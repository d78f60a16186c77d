from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from headrace.tls import certificate_expiry_s


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
