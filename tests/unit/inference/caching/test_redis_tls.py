"""TLS of the connection to Redis: errors of its files at the start, and handshakes that fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from headrace.core.cache_options import CacheOptions, RedisOptions, RedisTls
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError
from headrace.inference.caching.redis_store import _BoundedConnection, tls_context, tls_problem
from headrace.inference.caching.response_caches import ResponseCaches
from headrace.inference.caching.values import MAX_VALUE_BYTES

from tests.support.certificates import Certificates
from tests.support.redis_servers import Reply, false_redis, redis_server
from tests.support.serving import HOST


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def start_error(tls: RedisTls) -> str:
    """The error of a server that starts with the settings."""

    async def start() -> None:
        ResponseCaches(CacheOptions(0, RedisOptions(HOST, 1, tls=tls)), Mailbox(asyncio.get_running_loop()))

    with pytest.raises(ConfigError) as caught:
        asyncio.run(start())
    (finding,) = caught.value.findings
    assert finding.path == "--cache-config"
    assert finding.cure
    return finding.message


@pytest.mark.parametrize(
    ("tls", "message"),
    [
        (RedisTls(is_disabled=True, ca="{ca}"), "the cache redis has tls=false and other settings of TLS"),
        (RedisTls(key="{key}"), "the cache redis has a key without a certificate"),
        (RedisTls(ca="{folder}/none.pem"), "none.pem, which cannot be read: No such file or directory"),
        (RedisTls(ca="{folder}"), ", which cannot be read: Is a directory"),
        (RedisTls(ca="{key}"), "client.example.key, which holds no PEM certificate"),
        (RedisTls(ca_dir="{folder}/none"), "none, which is no folder"),
        (RedisTls(cert="{folder}/none.pem"), "has the cert {folder}/none.pem, which cannot be read"),
        (RedisTls(cert="{cert}", key="{folder}/none.key"), "has the key {folder}/none.key, which cannot be read"),
        (RedisTls(cert="{cert}"), "and the key in the same file, which do not belong together"),
        (RedisTls(cert="{cert}", key="{strange}"), "which do not belong together: KEY_VALUES_MISMATCH"),
        (RedisTls(cert="{cert}", key="{ca}"), "which do not belong together"),
        (RedisTls(cert="{cert}", key="{folder}/locked.key"), "read with no passphrase"),
        (
            RedisTls(cert="{cert}", key="{folder}/locked.key", key_password="other"),
            "read with the passphrase key_password",
        ),
        (RedisTls(cert="{cert}", key="{folder}/locked.key", key_password="x" * 2000), "whose key_password is too long"),
        (RedisTls(ca="{ca}", key_password="word"), "the cache redis has a key_password without a certificate"),
    ],
)
def test_settings_that_cannot_be_used_are_errors_at_the_start(
    certificates: Certificates, tmp_path: Path, tls: RedisTls, message: str
) -> None:
    key = load_pem_private_key(certificates.client.key.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    (tmp_path / "locked.key").write_bytes(locked)
    paths = {
        "folder": tmp_path,
        "ca": certificates.authority,
        "cert": certificates.client.certificate,
        "key": certificates.client.key,
        "strange": certificates.stranger.key,
    }
    names = ("ca", "ca_dir", "cert", "key")
    tls = replace(tls, **{name: getattr(tls, name).format(**paths) for name in names})  # type: ignore[arg-type]
    error = start_error(tls)
    assert message.format(**paths) in error
    assert not tls.key_password or tls.key_password not in error.replace("key_password", "")
    tls_context(RedisTls(cert=str(paths["cert"]), key=str(tmp_path / "locked.key"), key_password="word"))


def test_certificate_and_key_in_one_file(certificates: Certificates, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(certificates.client.key.read_bytes() + certificates.client.certificate.read_bytes())
    tls_context(RedisTls(ca=str(certificates.authority), cert=str(both)))


def options(port: int, certificates: Certificates, **changes: object) -> RedisOptions:
    tls = RedisTls(ca=str(certificates.authority))
    return replace(RedisOptions(HOST, port, tls=tls), **changes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_largest_value_is_read_over_tls_and_a_larger_one_ends_the_connection(
    certificates: Certificates, tmp_path: Path
) -> None:
    value = os.urandom(MAX_VALUE_BYTES)
    with redis_server(tmp_path, certificates=certificates) as server:
        # On a busy machine 4 MiB may take more than the 100 ms by default.
        connection = _BoundedConnection(options(server.port, certificates, socket_timeout_ms=20_000))
        assert connection.run([("SET", "a", value), ("GETRANGE", "a", 0, MAX_VALUE_BYTES)]) == [b"OK", value]
        server.client.append("a", value)
        with pytest.raises(redis.ConnectionError, match="the answer is too long"):
            connection.run([("GET", "a")])
        connection.disconnect()  # type: ignore[no-untyped-call]


def failure(port: int, certificates: Certificates, timeout_ms: int = 30_000) -> str:
    """The reason why a connection is not opened, which takes the time to connect at most."""
    chosen = options(port, certificates, connect_timeout_ms=timeout_ms)
    connection = _BoundedConnection(chosen)
    begun = time.monotonic()
    with pytest.raises((redis.RedisError, OSError)) as caught:
        connection.run([("PING",)])
    assert time.monotonic() - begun < 20
    connection.disconnect()  # type: ignore[no-untyped-call]
    return tls_problem(caught.value, chosen) or str(caught.value)


ANSWERS: dict[str, tuple[Reply, str]] = {
    "nothing": (lambda _: b"", "the handshake of TLS takes longer than 300 ms: its port may have no TLS"),
    "an error of Redis": (lambda _: b"-ERR unknown command\r\n", "it does not use TLS on this port"),
    "text": (lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n", "it does not use TLS on this port"),
    "a huge record": (lambda _: b"\x16\x03\x03\xff\xff" + b"x" * 70_000, "it does not use TLS on this port"),
    "a handshake of one byte": (lambda _: b"\x16\x03\x03\x40\x00" + b"\xff" * 0x4000, "TLS: "),
    "an alert": (
        lambda _: b"\x15\x03\x03\x00\x02\x02\x28",
        "it refuses the connection (SSLV3_ALERT_HANDSHAKE_FAILURE)",
    ),
    "the end": (lambda _: None, "it closes the connection, probably because it requires a client certificate"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_is_no_handshake_ends_the_connection(answer: str, certificates: Certificates) -> None:
    reply, problem = ANSWERS[answer]
    with false_redis(reply) as port:
        assert failure(port, certificates, 300 if answer == "nothing" else 30_000).startswith(problem)


def test_a_handshake_in_single_bytes_has_the_time_to_connect(certificates: Certificates) -> None:
    listener, end = socket.create_server((HOST, 0)), threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.sendall(b"\x16\x03\x03\x40\x00")
            while not end.wait(0.05):
                connection.sendall(b"x")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    assert failure(listener.getsockname()[1], certificates, 300).startswith(
        "the handshake of TLS takes longer than 300 ms"
    )
    end.set()
    thread.join(60)
    listener.close()
