"""JSON web tokens of an issuer whose key set is behind HTTPS, over HTTP and gRPC."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from tests.support.grpc_requests import INFER, message
from tests.support.keys import until
from tests.support.models import add_model, affine
from tests.support.serving import Server, serving
from tests.support.tokens import AUDIENCE, ISSUER, Issuer, KeySetServer, https_key_set

BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}).encode()


@dataclass
class Case:
    """A server and the issuer that it trusts."""

    server: Server
    issuer: Issuer
    key_set: KeySetServer

    def infer(self, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return self.server.request("POST", "/v2/models/affine/infer", BODY, headers)[0]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("tokens")
    issuer = Issuer("RS256", "ES256", "EdDSA")
    add_model(folder / "models", "affine", affine())
    with https_key_set(folder, issuer.key_set()) as key_set:
        options = ("--jwks", key_set.url, "--jwt-issuer", ISSUER, "--jwt-audience", AUDIENCE)
        options += ("--log-format", "json", "--request-log", "all")
        with serving(folder / "models", folder, *options, env={"SSL_CERT_FILE": str(folder / "ca.pem")}) as server:
            yield Case(server, issuer, key_set)
            assert "Traceback" not in server.text


def unary(channel: grpc.Channel, token: str) -> str:
    request = message("affine", "1", np.zeros((1, 16), np.float32))
    try:
        channel.unary_unary(INFER)(request, metadata=[("authorization", f"Bearer {token}")], timeout=20)
        return "OK"
    except grpc.RpcError as error:
        return str(error.code().name)


def test_an_early_token_on_an_open_method_works_later(case: Case) -> None:
    """The check of a model's health needs the scope read, that of the server none: the path is open."""
    with grpc.insecure_channel(case.server.grpc_address) as channel:
        token = case.issuer.token("es256", nbf=int(time.time()) + 13)

        def check() -> str:
            request = health_pb2.HealthCheckRequest(service="affine").SerializeToString()
            try:
                metadata = [("authorization", f"Bearer {token}")]
                channel.unary_unary("/grpc.health.v1.Health/Check")(request, metadata=metadata, timeout=20)
                return "OK"
            except grpc.RpcError as error:
                return str(error.code().name)

        until(lambda: case.infer(case.issuer.token("es256")) == 200, "the key set was not read")
        assert check() == "UNAUTHENTICATED"
        until(lambda: check() == "OK", "a token stays invalid on the connection that sent it too early")


def test_tokens_work_on_every_protocol_and_end_at_their_expiry(case: Case) -> None:
    with grpc.insecure_channel(case.server.grpc_address) as channel:
        until(lambda: case.infer(case.issuer.token("es256")) == 200, "the key set was not read")
        for key_id in ("rs256", "es256", "eddsa"):
            token = case.issuer.token(key_id, sub="alice")
            for _ in range(3):
                assert (case.infer(token), unary(channel, token)) == (200, "OK")
        # Ten seconds of leeway are allowed.
        short = case.issuer.token("es256", exp=int(time.time()) - 8, sub="brief")
        assert (case.infer(short), unary(channel, short)) == (200, "OK")
        until(lambda: case.infer(short) == 401, "an expired token still works")
        assert unary(channel, short) == "UNAUTHENTICATED"
        early = case.issuer.token("es256", nbf=int(time.time()) + 13)
        assert (case.infer(early), unary(channel, early)) == (401, "UNAUTHENTICATED")
        until(lambda: unary(channel, early) == "OK", "a token stays invalid on the connection that sent it too early")
        assert case.infer(early) == 200
        reader = case.issuer.token("es256", scope="read")
        assert (case.infer(reader), unary(channel, reader)) == (403, "PERMISSION_DENIED")
        bound = case.issuer.token("es256", models=["other"])
        assert (case.infer(bound), unary(channel, bound)) == (403, "PERMISSION_DENIED")
        for wrong in (case.issuer.token("es256", aud="x"), "a.b.c", "hr_x"):
            assert (case.infer(wrong), unary(channel, wrong)) == (401, "UNAUTHENTICATED")
    until(lambda: '"client":"alice"' in case.server.text.replace(": ", ":"), "the access log has no name")
    assert token not in case.server.text
    assert token.split(".")[1] not in case.server.text


@pytest.mark.timing
def test_new_keys_of_the_issuer_are_fetched_soon_but_rarely(case: Case) -> None:
    until(lambda: case.infer(case.issuer.token("es256")) == 200, "the key set was not read")
    stranger = Issuer("ES256")
    before = case.key_set.fetches
    case.issuer.add("next", "ES256")
    token = case.issuer.token("next")
    with grpc.insecure_channel(case.server.grpc_address) as channel:
        case.key_set.delay_s = 1.0
        for number in range(200):
            assert case.infer(stranger.token("es256", header={"kid": f"invented-{number}"})) == 401
        assert unary(channel, token) == "UNAUTHENTICATED"
        case.key_set.content = case.issuer.key_set()
        worst_s = 0.0
        deadline = time.monotonic() + 40
        while case.infer(token) == 401:
            assert time.monotonic() < deadline, "the new key was not fetched"
            started_s = time.monotonic()
            assert case.server.request("GET", "/v2/health/live")[0] == 200
            worst_s = max(worst_s, time.monotonic() - started_s)
            time.sleep(0.02)
        assert worst_s < 0.9, "the event loop waited for the key set"
        assert unary(channel, token) == "OK"
    assert case.key_set.fetches - before <= 4


def test_a_failing_key_set_keeps_the_keys(case: Case) -> None:
    until(lambda: case.infer(case.issuer.token("es256")) == 200, "the key set was not read")
    case.key_set.status = 302
    count = case.server.text.count("the token keys in force stay")
    deadline = time.monotonic() + 40
    while case.server.text.count("the token keys in force stay") == count:
        assert time.monotonic() < deadline, case.server.text[-2000:]
        assert case.infer(case.issuer.token("es256", header={"kid": "invented"})) == 401
        time.sleep(0.05)
    assert case.infer(case.issuer.token("es256")) == 200
    case.key_set.status = 200


def test_a_removed_key_ends_its_tokens(tmp_path: Path) -> None:
    issuer = Issuer("ES256", "EdDSA")
    path = tmp_path / "jwks.json"
    path.write_bytes(issuer.key_set())
    add_model(tmp_path / "models", "affine", affine())
    options = ("--jwks", str(path), "--jwt-issuer", ISSUER, "--jwt-audience", AUDIENCE)
    with serving(tmp_path / "models", tmp_path, *options) as server:
        case = Case(server, issuer, KeySetServer(b""))
        token, other = issuer.token("es256"), issuer.token("eddsa")
        assert (case.infer(token), case.infer(other)) == (200, 200)
        del issuer.private_keys["es256"]
        path.write_bytes(issuer.key_set())
        until(lambda: case.infer(token) == 401, "the key still works")
        assert case.infer(other) == 200
        path.write_text("{}")
        until(lambda: "the token keys in force stay" in server.text, "no error")
        assert case.infer(other) == 200
