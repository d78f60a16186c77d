"""JSON web tokens: algorithms, claims, key sets, and the rights that follow from them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from headrace.config.documents import file_signature
from headrace.core.access import Principal, Scope
from headrace.core.errors import ConfigError, Forbidden, Unauthenticated
from headrace.wire.access import tokens
from headrace.wire.access.keys_file import key_hash
from headrace.wire.access.tokens import TokenVerifier, parse_key_set

from tests.support.tokens import AUDIENCE, ISSUER, Issuer, new_private_key

ALGORITHMS = ["RS256", "ES256", "EdDSA"]


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer(*ALGORITHMS)


@pytest.fixture
def verifier(issuer: Issuer, tmp_path: Path) -> TokenVerifier:
    path = tmp_path / "jwks.json"
    path.write_bytes(issuer.key_set())
    return TokenVerifier(str(path), ISSUER, AUDIENCE)


def resolve(verifier: TokenVerifier, token: str) -> Principal:
    return verifier.principal(token, key_hash(token))


def encoded(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def refused(verifier: TokenVerifier, token: str, *words: str) -> None:
    principal = resolve(verifier, token)
    assert principal.grant is None
    with pytest.raises(Unauthenticated) as error:
        principal.admit("tiny")
    for word in words:
        assert word in str(error.value)
    assert token not in str(error.value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_token_has_the_rights_of_its_claims(verifier: TokenVerifier, issuer: Issuer, algorithm: str) -> None:
    token = issuer.token(algorithm.lower(), sub="alice", scope="infer profile openid", models=["tiny", "res*"])
    principal = resolve(verifier, token)
    assert principal.name == "alice"
    principal.admit("resnet")
    with pytest.raises(Forbidden):
        principal.admit("secret")
    with pytest.raises(Forbidden):
        principal.require(Scope.READ)
    assert resolve(verifier, token) is principal


def test_scopes_and_models_may_be_lists_or_words(verifier: TokenVerifier, issuer: Issuer) -> None:
    for fields in (
        {"scope": ["infer", "read"], "models": "tiny res*"},
        {"scope": "read infer", "models": ["tiny", "res*"]},
    ):
        principal = resolve(verifier, issuer.token("es256", **fields))
        assert principal.grant is not None
        assert (principal.grant.scopes, principal.grant.models) == ({"infer", "read"}, ("tiny", "res*"))
    for fields in ({"scope": {"a": 1}}, {"scope": [1]}, {"models": []}, {"models": ""}, {"models": 5}):
        refused(verifier, issuer.token("es256", **fields), "the token is not valid")
    principal = resolve(verifier, issuer.token("es256", scope=None))
    with pytest.raises(Forbidden, match="has no scope"):
        principal.admit("tiny")


@pytest.mark.parametrize(
    ("claims", "word"),
    [
        ({"exp": int(time.time()) - 60}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "never"}, "exp"),
        ({"exp": 1e308}, "infinity"),
        ({"exp": 10**400}, "too large"),
        ({"nbf": int(time.time()) + 86_400}, "not yet valid"),
        ({"iat": int(time.time()) + 86_400}, "not yet valid"),
        ({"aud": "another service"}, "udience"),
        ({"aud": None}, "aud"),
        ({"iss": "https://stranger.example"}, "ssuer"),
        ({"iss": None}, "iss"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "sub"),
        ({"sub": "two words"}, "sub"),
        ({"sub": "x" * 129}, "sub"),
        ({"sub": "a\nb"}, "sub"),
    ],
)
def test_invalid_claims_are_refused(verifier: TokenVerifier, issuer: Issuer, claims: dict[str, Any], word: str) -> None:
    refused(verifier, issuer.token("es256", **claims), "the token is not valid", word)


def test_forged_tokens_are_refused(verifier: TokenVerifier, issuer: Issuer) -> None:
    good = issuer.token("rs256")
    header, body, signature = good.split(".")
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "web", "scope": "admin", "exp": int(time.time()) + 600}
    # No signature.
    for name in ("none", "None", "NONE"):
        for end in ("", signature):
            refused(verifier, f"{encoded({'alg': name, 'kid': 'rs256'})}.{encoded(claims)}.{end}")
    # The public key as the key of an HMAC.
    public = jwt.algorithms.RSAAlgorithm.to_jwk(issuer.private_keys["rs256"][1].public_key()).encode()
    text = f"{encoded({'alg': 'HS256', 'kid': 'rs256'})}.{encoded(claims)}"
    forged = base64.urlsafe_b64encode(hmac.new(public, text.encode(), hashlib.sha256).digest()).rstrip(b"=").decode()
    refused(verifier, f"{text}.{forged}", "algorithm is not RS256")
    # Other claims, another key under the same id, a key of another type, a key within the token.
    refused(verifier, f"{header}.{encoded(claims)}.{signature}", "ignature")
    stranger = Issuer("RS256", "ES256")
    refused(verifier, stranger.token("rs256"), "ignature")
    refused(verifier, stranger.token("es256", header={"kid": "rs256"}), "algorithm is not RS256")
    jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(stranger.private_keys["rs256"][1].public_key()))
    refused(verifier, stranger.token("rs256", header={"kid": "other", "jwk": jwk}), "not in the key set")
    refused(verifier, stranger.token("rs256", header={"kid": "rs256", "jwk": jwk}), "ignature")
    # A stronger or weaker variant of the algorithm.
    strong = jwt.encode(claims, issuer.private_keys["rs256"][1], algorithm="RS512", headers={"kid": "rs256"})
    refused(verifier, strong, "algorithm is not RS256")
    for broken in (
        "a.b.c",
        "..",
        f"{header}..{signature}",
        f"{header}.{body}",
        "a." * 100,
        f"{body}.{header}.{signature}",
    ):
        refused(verifier, broken)
    refused(verifier, issuer.token("rs256", header={"crit": ["exp"]}), "the token is not valid")


def test_a_token_without_an_id_of_its_key_needs_a_set_of_one(
    issuer: Issuer, verifier: TokenVerifier, tmp_path: Path
) -> None:
    single = Issuer("ES256")
    path = tmp_path / "single.json"
    path.write_bytes(single.key_set())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "web", "exp": int(time.time()) + 600}
    token = jwt.encode(claims, single.private_keys["es256"][1], algorithm="ES256")
    assert resolve(TokenVerifier(str(path), ISSUER, AUDIENCE), token).name == "web"
    refused(verifier, jwt.encode(claims, issuer.private_keys["es256"][1], algorithm="ES256"), "not in the key set")


def test_the_cache_of_tokens_is_bounded(
    verifier: TokenVerifier, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_MAX_TOKENS", 3)
    for number in range(10):
        resolve(verifier, issuer.token("eddsa", sub=f"client-{number}"))
        resolve(verifier, f"{number}.b.c")
    assert len(verifier._tokens) == 3


def test_a_key_that_leaves_the_set_ends_its_tokens(verifier: TokenVerifier, issuer: Issuer) -> None:
    token, other = issuer.token("es256"), issuer.token("eddsa")
    principal, other_principal = resolve(verifier, token), resolve(verifier, other)
    keys = parse_key_set(issuer.key_set())
    del keys["es256"]
    verifier._apply(keys)
    with pytest.raises(Unauthenticated, match="left the key set"):
        principal.admit("tiny")
    other_principal.admit("tiny")
    refused(verifier, token, "not in the key set")
    verifier._apply(parse_key_set(issuer.key_set()))
    resolve(verifier, token).admit("tiny")
    changed = Issuer("ES256", "EdDSA")
    verifier._apply(parse_key_set(changed.key_set()))
    assert other_principal.grant is None


def test_key_sets_are_read_strictly(tmp_path: Path) -> None:
    small = {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(new_private_key("RS256").public_key())), "kid": "x"}
    row = json.loads(Issuer("ES256").key_set())["keys"][0]
    symmetric = {"kty": "oct", "k": "c2VjcmV0", "kid": "s"}
    assert list(parse_key_set(json.dumps({"keys": [row, symmetric, {**small, "use": "enc"}, 5]}).encode())) == ["es256"]
    for content in (b"", b"[]", b"{}", b'{"keys": 1}', b'{"keys": []}', json.dumps({"keys": [symmetric]}).encode()):
        with pytest.raises(ValueError, match=r"key|Expecting"):
            parse_key_set(content)
    for broken in ({**row, "x": "AA"}, {**row, "x": 5}, {"kty": "EC", "crv": "P-256", "kid": "b"}):
        with pytest.raises(ValueError, match="invalid"):
            parse_key_set(json.dumps({"keys": [broken]}).encode())
    with pytest.raises(ValueError, match="with up to"):
        parse_key_set(json.dumps({"keys": [row] * 101}).encode())
    for algorithm in ("HS256", "none", "RS512"):
        with pytest.raises(ValueError, match="no key for"):
            parse_key_set(json.dumps({"keys": [{**row, "alg": algorithm}]}).encode())
    path = tmp_path / "jwks.json"
    path.write_text("{}")
    for source, words in (
        (str(path), "cannot be read"),
        (str(tmp_path / "missing"), "cannot be read"),
        ("http://issuer.example/keys", "not a URL with TLS"),
        ("file:///etc/passwd", "not a URL with TLS"),
    ):
        with pytest.raises(ConfigError, match=words):
            TokenVerifier(source, ISSUER, AUDIENCE)
    for issuer, audience in (("", "x"), ("x", "")):
        with pytest.raises(ConfigError, match="--jwt-issuer and --jwt-audience"):
            TokenVerifier(str(path), issuer, audience)


def test_rsa_keys_below_2048_bits_are_left_out() -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa

    weak = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key()))
    with pytest.raises(ValueError, match="no key for"):
        parse_key_set(json.dumps({"keys": [weak]}).encode())


def test_deeply_nested_tokens_are_refused(
    verifier: TokenVerifier, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is parsed before the signature is checked. Earlier versions of PyJWT raise RecursionError."""
    header = base64.urlsafe_b64encode(b'{"kid":' + b"[" * 5000).rstrip(b"=").decode()
    refused(verifier, f"{header}.e30.e30", "the token is not valid")

    def nest(token: str) -> Any:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(verifier._jwt, "get_unverified_header", nest)
    refused(verifier, issuer.token("es256"), "nested too deeply")


def test_an_invalid_key_leaves_the_others_in_force(caplog: pytest.LogCaptureFixture) -> None:
    rows = json.loads(Issuer("EdDSA", "ES256").key_set())["keys"]
    broken = {**rows[0], "x": "AA", "kid": "broken"}
    assert set(parse_key_set(json.dumps({"keys": [broken, *rows]}).encode())) == {"eddsa", "es256"}
    assert "the key 'broken' is invalid" in caplog.text


def test_a_key_set_that_any_user_may_write_is_refused(
    issuer: Issuer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(issuer.key_set())
    path.chmod(0o646)
    with pytest.raises(ConfigError, match=r"every user of this machine.*chmod 600"):
        TokenVerifier(str(path), ISSUER, AUDIENCE)
    path.chmod(0o664)
    TokenVerifier(str(path), ISSUER, AUDIENCE)
    assert "can be written by its group" in caplog.text


def test_a_key_set_file_that_cannot_be_read_once_is_read_at_the_next_poll(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(issuer.key_set())
    reader = tokens.KeySetReader(str(path), lambda keys: None)
    reader.read_file()
    assert file_signature(reader._source) == reader._signature
    opened = tokens.open_regular_file

    def fail(path: Path) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tokens, "open_regular_file", fail)
    assert not reader._refresh()
    assert not reader._refresh()
    assert file_signature(reader._source) != reader._signature, "the next poll reads it again"
    assert caplog.text.count("Too many open files") == 1
    monkeypatch.setattr(tokens, "open_regular_file", opened)
    assert reader._refresh()
    assert file_signature(reader._source) == reader._signature
    path.chmod(0o640)
    assert file_signature(reader._source) != reader._signature
