"""Hosts and origins without a server: options, and what the policies cache and expose."""

from __future__ import annotations

import pytest
from headrace.core.errors import ConfigError, Forbidden
from headrace.server.listen import origin_policy
from headrace.server.settings import Settings
from headrace.wire.http.origins import HostPolicy, OriginPolicy, allowed_names

APP = "https://app.example"


@pytest.mark.parametrize(
    "origin",
    [
        *("app.example", "https://", "https://app.example/", "https://app.example/path", "HTTPS://app.example"),
        *("null", "", "https://a b", "*.example"),
    ],
)
def test_origins_that_are_none(origin: str) -> None:
    with pytest.raises(ConfigError, match="is not an origin"):
        origin_policy(Settings(model_repository=(), cors_origin=(origin,)), ())


def test_every_origin_with_client_certificates() -> None:
    with pytest.raises(ConfigError, match="client certificates"):
        origin_policy(Settings(model_repository=(), cors_origin=(APP, "*"), tls_client_ca="ca.pem"), ())


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, False),  # any client may infer there
        ({"api_keys_file": "keys.yaml"}, False),  # a page has no key
        ({"host": "0.0.0.0", "tls_client_ca": "ca.pem"}, True),  # the browser sends the certificate for any page
        ({"cors_origin": ("*",)}, False),
        ({"cors_origin": ("http://evil.example",)}, False),
    ],
)
def test_inference_of_another_origin(options: dict[str, object], refused: bool) -> None:
    policy = origin_policy(Settings(model_repository=(), **options), ())  # type: ignore[arg-type]
    headers = [(b"host", b"localhost:8000"), (b"origin", b"http://evil.example"), (b"sec-fetch-site", b"cross-site")]
    if refused:
        with pytest.raises(Forbidden):
            policy.check_inference(headers)
    else:
        policy.check_inference(headers)


def test_host_of_an_origin() -> None:
    """A browser that sends no Sec-Fetch-Site, behind a proxy that ends TLS and keeps Host."""
    own = [(b"host", b"Models.example:8443"), (b"origin", b"https://models.example:8443")]
    OriginPolicy().check_control("POST", own)
    for host in (b"models.example", b"models.example:8444", b"", b"evil.example:8443"):
        with pytest.raises(Forbidden):
            OriginPolicy().check_control("POST", [(b"host", host), own[1]])


def test_allowed_names() -> None:
    assert allowed_names("127.0.0.1", True, ()) == ["localhost", "127.0.0.1"]
    assert allowed_names("0.0.0.0", False, ()) is None
    assert allowed_names("0.0.0.0", False, ("a.example",)) == ["localhost", "0.0.0.0", "a.example"]
    assert allowed_names("127.0.0.1", True, ("*",)) is None


def test_the_cache_of_hosts_is_bounded() -> None:
    policy = HostPolicy(["localhost"])
    for number in range(2000):
        assert policy.refusal(b"/", [(b"host", b"localhost:%d" % number)], "1.1") is None
        assert policy.refusal(b"/", [(b"host", b"evil%d.example" % number)], "1.1") is not None
    assert len(policy._accepted) <= 256
