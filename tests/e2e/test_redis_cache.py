"""The response cache with a real Redis server (Debian's, `make tools`), shared by servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.e2e.test_response_cache import CACHED, body, explained, post, statistics
from tests.support import models
from tests.support.certificates import Certificates, Pair
from tests.support.redis_servers import RedisServer, redis_server, wait_for
from tests.support.serving import Server, run_headrace, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


def repository(path: Path, seed: int = 1) -> Path:
    models.add_model(path, "m", models.affine(seed=seed), config=CACHED)
    return path


def remote(server: Server, model: str = "m") -> dict[str, Any]:
    figures: dict[str, Any] = explained(server, model)["cache"]["redis"]
    return figures


def wait_up(server: Server, model: str = "m") -> None:
    wait_for(lambda: remote(server, model)["is_up"])


def test_a_second_server_answers_with_the_response_of_the_first(tmp_path: Path, redis: RedisServer) -> None:
    folder = repository(tmp_path / "repository")
    option = ("--cache-config", redis.patient_option)
    with serving(folder, tmp_path, *option) as first:
        wait_up(first)
        answer = post(first, "m", body(1, rows=3))
        wait_for(lambda: len(redis.values()) == 1)
        assert remote(first)["stored"] == 1
        assert redis.client.ttl(next(iter(redis.values()))) == -1
        # Without `local` the process keeps nothing.
        assert post(first, "m", body(1, rows=3)) == answer
        assert explained(first, "m")["cache"]["entries"] == 0
        assert remote(first)["hits"] == 1
    with serving(folder, tmp_path, *option, "--cache-config", "local,size=1MiB") as second:
        wait_up(second)
        for _ in range(3):
            assert post(second, "m", body(1, rows=3)) == answer
        counts = statistics(second, "m")
        assert (counts["cache_hit"], counts["cache_miss"], counts["execution_count"]) == (3, 0, 0)
        assert remote(second)["hits"] == 1, "the others came from its own memory"
        assert post(second, "m", body(2, rows=3)) != answer
        text = second.request("GET", "/metrics")[2].decode()
        assert 'headrace_cache_redis_up{model="m",version="1"} 1.0' in text
        assert 'headrace_cache_redis_lookups_total{model="m",result="hit",version="1"} 1.0' in text


def test_other_weights_other_configuration_and_another_secret_are_other_keys(
    tmp_path: Path, redis: RedisServer
) -> None:
    (tmp_path / "secret").write_text("other")
    answers = []
    for number, (seed, more) in enumerate(((1, ""), (2, ""), (1, f",secret_file={tmp_path / 'secret'}"), (1, ""))):
        folder = repository(tmp_path / f"repository{number}", seed)
        with serving(folder, tmp_path, "--cache-config", redis.patient_option + more) as server:
            wait_up(server)
            answers.append(post(server, "m", body(1)))
            assert statistics(server, "m")["cache_hit"] == (number == 3)
            expected = min(number + 1, 3)
            wait_for(lambda expected=expected: len(redis.values()) == expected)
    assert answers[0] == answers[2] == answers[3] != answers[1]


def test_responses_expire_in_redis_and_here(tmp_path: Path, redis: RedisServer) -> None:
    limits = "max_batch_size: 8\nresponse_cache: {enable: true}\ncache: {ttl_s: 0.5}\n"
    models.add_model(tmp_path / "repository", "m", models.affine(), files={"config.yaml": limits})
    options = ("--cache-config", redis.patient_option, "--cache-config", "local,size=1MiB")
    with serving(tmp_path / "repository", tmp_path, *options) as server:
        wait_up(server)
        post(server, "m", body(1))
        wait_for(redis.values)
        assert max(map(redis.client.pttl, redis.values()), default=0) <= 500  # type: ignore[type-var]

        def hits() -> int:
            post(server, "m", body(1))
            return int(statistics(server, "m")["cache_hit"])

        wait_for(hits)  # it may have expired on a busy machine
        executions = statistics(server, "m")["execution_count"]
        wait_for(lambda: not redis.values())

        def more_executions() -> int:
            post(server, "m", body(1))
            return int(statistics(server, "m")["execution_count"] - executions)

        wait_for(more_executions)


def test_users_passwords_and_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = repository(tmp_path / "repository")
    with redis_server(tmp_path, password="a secret") as redis:
        redis.client.acl_setuser("writer", enabled=True, passwords=["+word"], keys=["headrace:*"], categories=["+@all"])
        with serving(folder, tmp_path, "--cache-config", redis.patient_option) as server:
            wait_for(lambda: "Authentication required" in remote(server)["problem"])
            post(server, "m", body(1))
        named = f"{redis.patient_option},user=writer,password=word,db=3"
        with serving(folder, tmp_path, "--cache-config", named) as server:
            wait_up(server)
            post(server, "m", body(1))
            wait_for(lambda: redis.client.info("keyspace").get("db3"))  # type: ignore[union-attr]
            assert "word" not in server.text
        monkeypatch.setenv("TRITONCACHE_REDIS_PASSWORD", "a secret")
        with serving(folder, tmp_path, "--cache-config", redis.patient_option) as server:
            wait_up(server)
            assert post(server, "m", body(1))


def test_a_pipeline_is_shared_while_its_models_are_the_same(tmp_path: Path, redis: RedisServer) -> None:
    tensors = {"x": ("TYPE_FP32", (16,))}, {"y": ("TYPE_FP32", (4,))}
    steps = [("m", {"X": "x"}, {"Y": "y"})]
    content, answers = body(1).replace(b'"X"', b'"x"'), []
    for number, seed in enumerate((1, 1, 2)):
        folder = tmp_path / f"repository{number}"
        models.add_model(folder, "m", models.affine(seed=seed), config="max_batch_size: 8")
        config = models.ensemble_config(steps, *tensors, "max_batch_size: 8 response_cache { enable: true }")
        models.add_pipeline(folder, "p", config)
        with serving(folder, tmp_path, "--cache-config", redis.patient_option) as server:
            wait_up(server, "p")
            answers.append(post(server, "p", content))
            assert statistics(server, "p")["cache_hit"] == (number == 1)
            expected = 1 + number // 2
            wait_for(lambda expected=expected: len(redis.values()) == expected)
    assert answers[0] == answers[1] != answers[2]


def test_a_server_without_redis_serves(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository")
    with serving(folder, tmp_path, "--cache-config", "redis,host=127.0.0.1,port=1") as server:
        wait_for(lambda: remote(server)["problem"] and not remote(server)["is_up"])
        begun = time.monotonic()
        for value in range(20):
            post(server, "m", body(value))
        assert time.monotonic() - begun < 10
        assert remote(server)["skipped"] == 20
        assert "Redis at 127.0.0.1:1 is not used: Error 111" in printed_explanation(server)
        assert statistics(server, "m")["execution_count"] == 20


# TLS


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    folder = tmp_path / "certificates"
    folder.mkdir()
    return Certificates(folder)


def printed_explanation(server: Server) -> str:
    done = run_headrace("explain", "m", "--url", server.url)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def pair_option(pair: Pair) -> str:
    return f",cert={pair.certificate},key={pair.key}"


def test_servers_share_responses_over_tls_with_a_password(tmp_path: Path, certificates: Certificates) -> None:
    folder, answers = repository(tmp_path / "repository"), []
    with redis_server(tmp_path, password="a secret", certificates=certificates) as redis:
        option = f"{redis.patient_option},password=a secret"
        # Ours, and Triton's words.
        for number, words in enumerate((f",tls=true,ca={certificates.authority}", f",cacert={certificates.authority}")):
            with serving(folder, tmp_path, "--cache-config", option + words) as server:
                wait_up(server)
                answers.append(post(server, "m", body(1, rows=3)))
                wait_for(lambda: len(redis.values()) == 1)
                assert remote(server)["hits"] == number
                assert remote(server)["tls"] == "TLSv1.3"
                assert f"Redis at 127.0.0.1:{redis.port} (TLSv1.3) is used" in printed_explanation(server)
                assert "a secret" not in server.text
    assert answers[0] == answers[1]


def test_a_redis_with_another_certificate_is_not_used(tmp_path: Path, certificates: Certificates) -> None:
    words = f"ca={certificates.authority},sni=other.example"
    problem = "its certificate is not for other.example: name one that it is for with sni=NAME"
    folder = repository(tmp_path / "repository")
    with redis_server(tmp_path, certificates=certificates) as redis:
        with serving(folder, tmp_path, "--cache-config", f"{redis.patient_option},{words}") as server:
            wait_for(lambda: problem in remote(server)["problem"])
            for value in range(5):
                post(server, "m", body(value))
            assert remote(server)["skipped"] == 5
            assert (remote(server)["is_up"], remote(server)["tls"]) == (False, "TLS")
            assert f"Redis at 127.0.0.1:{redis.port} (TLS) is not used: {problem}" in printed_explanation(server)
            assert statistics(server, "m")["execution_count"] == 5
        assert not redis.values()


def test_verify_false_accepts_any_certificate_with_a_warning(tmp_path: Path, certificates: Certificates) -> None:
    folder = repository(tmp_path / "repository")
    with (
        redis_server(tmp_path, certificates=certificates) as redis,
        serving(folder, tmp_path, "--cache-config", f"{redis.patient_option},verify=false") as server,
    ):
        wait_up(server)
        assert remote(server)["tls"] == "TLSv1.3, certificate not checked"
        assert f"the certificate of Redis at 127.0.0.1:{redis.port} is not checked (verify=false)" in server.text


def test_a_redis_that_requires_client_certificates(tmp_path: Path, certificates: Certificates) -> None:
    folder, authority = repository(tmp_path / "repository"), f",ca={certificates.authority}"
    with redis_server(tmp_path, "--tls-auth-clients", "yes", certificates=certificates) as redis:
        option = redis.patient_option + authority
        with serving(folder, tmp_path, "--cache-config", option) as server:
            wait_for(lambda: " requires a client certificate: " in remote(server)["problem"])
            post(server, "m", body(1))
        with serving(folder, tmp_path, "--cache-config", option + pair_option(certificates.stranger)) as server:
            wait_for(
                lambda: (
                    "it refuses the connection" in remote(server)["problem"]
                    or "does not trust the client" in remote(server)["problem"]
                )
            )
            post(server, "m", body(1))
        assert not redis.values()
        # The passphrase of the key is in the environment.
        locked, key = tmp_path / "locked.key", load_pem_private_key(certificates.client.key.read_bytes(), None)
        passphrase = BestAvailableEncryption(b"open sesame")
        locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, passphrase))
        pair, environment = (
            Pair(certificates.client.certificate, locked),
            {"HEADRACE_REDIS_KEY_PASSWORD": "open sesame"},
        )
        with serving(folder, tmp_path, "--cache-config", option + pair_option(pair), env=environment) as server:
            wait_up(server)
            post(server, "m", body(1))
            wait_for(lambda: len(redis.values()) == 1)
            assert "sesame" not in server.text


def test_a_redis_without_tls_is_not_used_with_tls_nor_one_with_tls_without(
    tmp_path: Path, redis: RedisServer, certificates: Certificates
) -> None:
    folder = repository(tmp_path / "repository")
    with serving(folder, tmp_path, "--cache-config", f"{redis.patient_option},tls_enabled=true") as server:
        wait_for(lambda: remote(server)["problem"].endswith("1000 ms: its port may have no TLS"))
        assert post(server, "m", body(1))
    with (
        redis_server(tmp_path, certificates=certificates) as secure,
        serving(folder, tmp_path, "--cache-config", secure.patient_option) as server,
    ):
        wait_for(lambda: remote(server)["problem"] not in ("", "it has not connected yet"))
        assert post(server, "m", body(1))
        assert (remote(server)["is_up"], remote(server)["tls"]) == (False, "")


def test_certificates_that_were_renewed_are_used_by_the_next_connection(
    tmp_path: Path, certificates: Certificates
) -> None:
    folder = repository(tmp_path / "repository")
    authority = tmp_path / "authority.pem"
    authority.write_bytes(certificates.strange_authority.read_bytes())
    with (
        redis_server(tmp_path, certificates=certificates) as redis,
        serving(folder, tmp_path, "--cache-config", f"{redis.patient_option},ca={authority}") as server,
    ):
        wait_for(lambda: "its certificate is refused (" in remote(server)["problem"])
        assert "): name the authority that signed it with ca=FILE" in remote(server)["problem"]
        authority.write_bytes(certificates.authority.read_bytes())
        wait_up(server)
