"""Secrets are removed from log texts, and little else."""

from __future__ import annotations

import pytest
from headrace.observability.logs import Pseudonyms, is_secret, redact
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    "text",
    [
        "api_key=S3CRET",
        "X-Api-Key: S3CRET",
        '{"password": "S3CRET"}',
        "'client_secret' = 'S3CRET'",
        "Authorization: Bearer S3CRET.x-y_z",
        "authorization: Basic S3CRET==",
        "a bearer S3CRET was sent",
        "https://user:S3CRET@host/path",
        "?access_token=S3CRET&more=1",
        "eyJhbGciOiJIUzI1NiJ9.S3CRET.sig",
        "-----BEGIN RSA PRIVATE KEY-----\nS3CRET\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nS3CRET",
    ],
)
def test_secrets_are_removed(text: str) -> None:
    assert "S3CRET" not in redact(text)
    assert "[redacted]" in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "input 'X' has shape [1, 3], expected [-1, 16]",
        "model 'tokenizer' is not found",
        "http://host:4317/v1",
        "id 42",
    ],
)
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


@given(st.text())
def test_nothing_raises(text: str) -> None:
    assert isinstance(redact(text), str)


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        ("x-api-key", True),
        ("authorization", True),
        ("x-auth", True),
        ("cookie", True),
        ("x-session-id", True),
        ("x-headrace-client", False),
        ("x-tenant", False),
        ("x-author", False),
        ("x-monkey", False),
    ],
)
def test_headers_that_carry_secrets(header: str, secret: bool) -> None:
    assert is_secret(header) is secret


def test_a_pseudonym_distinguishes_secrets_without_revealing_them() -> None:
    names = Pseudonyms()
    assert names.name("") == ""
    assert names.name("a") == names.name("a") != names.name("b")
    assert Pseudonyms().name("a") != names.name("a")
