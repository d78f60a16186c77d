"""Option `--cache-config` of the server: where the response cache keeps responses, and its limits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

CacheSetting = tuple[str, str, str]
"""Name of the cache, name of the setting, and its value."""

_SIZE = re.compile(r"(\d{1,15})(KiB|MiB|GiB)?")
_UNITS = {None: 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_USAGE = {
    "local": "write local,size=BYTES, such as local,size=1GiB",
    "redis": "write redis,host=NAME,port=NUMBER and, if needed, user, password, db, secret_file, wait_timeout, "
    "socket_timeout, connect_timeout, tls, ca, ca_dir, cert, key, key_password, sni and verify",
}
# Name of the setting, its largest value, and the smallest.
_NUMBERS = {
    "port": (1, 65535),
    "db": (0, 1 << 20),
    "wait_timeout": (1, 1000),
    "socket_timeout": (0, 60_000),
    "connect_timeout": (0, 60_000),
    "pool_size": (1, 1 << 20),
}
_TEXTS = ("host", "user", "password", "secret_file")
_TLS_TEXTS = ("ca", "ca_dir", "cert", "key", "key_password", "sni")
_SWITCHES = ("tls", "verify")
_SWITCH_VALUES = {"true": True, "1": True, "false": False, "0": False}
# Names of Triton's cache for Redis.
_ALIASES = {"tls_enabled": "tls", "cacert": "ca", "cacert_dir": "ca_dir"}
_REDIS_SETTINGS = (*_TEXTS, *_NUMBERS, *_TLS_TEXTS, *_SWITCHES, *_ALIASES)


@dataclass(frozen=True, slots=True)
class RedisTls:
    """TLS of the connection to Redis; paths are of PEM files.

    Attributes:
        ca: certificates of authorities that may sign the certificate of Redis; with `ca_dir` "": those of the system.
        ca_dir: folder with such certificates, named by their hashes (`openssl rehash`).
        cert: certificate that is sent to Redis, followed by intermediate certificates; "" for none.
        key: its private key; "": it is in the file of the certificate.
        key_password: passphrase of the private key; "" for none.
        sni: name that the certificate of Redis must have; "" for the host.
        verify: False accepts any certificate.
        is_disabled: True for `tls=false` beside settings of TLS, which is refused at the start.
    """

    ca: str = ""
    ca_dir: str = ""
    cert: str = ""
    key: str = ""
    key_password: str = field(default="", repr=False)
    sni: str = ""
    verify: bool = True
    is_disabled: bool = False


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Connection to the Redis server.

    Attributes:
        host: name or address.
        port: TCP port.
        user: name of the user; "" for the default one.
        password: its password; "" for none.
        db: number of the database.
        secret_file: file with the secret of keys and values; "": the password is the secret.
        wait_timeout_ms: maximum time for which a request waits for Redis.
        socket_timeout_ms: time without a complete answer after which the connection is closed.
        connect_timeout_ms: maximum time to connect, and again for the handshake of TLS.
        tls: TLS of the connection; None for none.
    """

    host: str
    port: int = 6379
    user: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    secret_file: str = ""
    wait_timeout_ms: int = 5
    socket_timeout_ms: int = 100
    connect_timeout_ms: int = 1000
    tls: RedisTls | None = None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Response cache of the server.

    Attributes:
        size_bytes: maximum memory of all cached responses in this process; 0 keeps none.
        redis: server that keeps responses for several servers; None for none.
    """

    size_bytes: int
    redis: RedisOptions | None = None


def parse_cache_setting(text: str) -> tuple[CacheSetting, ...]:
    """Parse one value of `--cache-config`, as in Triton: the name of the cache, and settings NAME=VALUE, separated by commas.

    Raises:
        ValueError: it is no such value; has no value of a setting, which may be a password.
    """
    name, *settings = text.split(",")
    usage = _USAGE.get(name)
    if usage is None:
        raise ValueError(f"{name[:80]!r} is not a cache: {'; or '.join(_USAGE.values())}")
    pairs = [setting.partition("=") for setting in settings]
    known = ("size",) if name == "local" else _REDIS_SETTINGS
    # A part without "=" may be the rest of a password.
    wrong = [
        repr(key[:80]) if equals else "a part without ="
        for key, equals, value in pairs
        if key not in known or not value
    ]
    if wrong or not pairs:
        raise ValueError(f"{wrong[0] if wrong else repr('')} is not a setting of the cache {name}: {usage}")
    for key, _, value in pairs:
        if key == "size":
            size_bytes(value)
        elif key in _NUMBERS:
            _number(key, value)
        elif _ALIASES.get(key, key) in _SWITCHES:
            _switch(key, value)
    return tuple((name, _ALIASES.get(key, key), value) for key, _, value in pairs)


def size_bytes(text: str) -> int:
    """Return the bytes of a size such as "1GiB"; raises ValueError for other text."""
    match = _SIZE.fullmatch(text)
    size = 0 if match is None else int(match[1]) * _UNITS[match[2]]
    if size <= 0:
        raise ValueError(f"{text[:80]!r} is not a size: write a number of bytes, or one with KiB, MiB or GiB")
    return size


def _number(key: str, text: str) -> int:
    low, high = _NUMBERS[key]
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not low <= number <= high:
        raise ValueError(f"{text[:80]!r} is not a value of {key}: write a number from {low} to {high}")
    return number


def _switch(key: str, text: str) -> bool:
    value = _SWITCH_VALUES.get(text.lower())
    if value is None:
        raise ValueError(f"{text[:80]!r} is not a value of {key}: write true or false")
    return value


def cache_options(
    settings: Iterable[tuple[CacheSetting, ...]], user: str = "", password: str = "", key_password: str = ""
) -> CacheOptions | None:
    """Return the options of all values together; the last value of a setting counts. None without values.

    The host of Redis is "" if no value has one, which the response cache refuses.

    Args:
        settings: from `parse_cache_setting`.
        user, password: of Redis, if the settings have none.
        key_password: passphrase of the key for Redis, if the settings have a certificate and no passphrase.
    """
    values = {(name, key): value for each in settings for name, key, value in each}
    if not values:
        return None
    size = values.get(("local", "size"))
    memory = 0 if size is None else size_bytes(size)
    redis = {key: value for (name, key), value in values.items() if name == "redis"}
    return CacheOptions(memory, _redis_options(redis, user, password, key_password) if redis else None)


def _redis_options(values: dict[str, str], user: str, password: str, key_password: str) -> RedisOptions:
    # As in Triton 0 stands for no timeout of its own; here a request never waits for one.
    numbers = {key: _number(key, values[key]) for key in _NUMBERS if key in values}
    numbers.pop("pool_size", None)
    names = {key: f"{key}_ms" if key.endswith("_timeout") else key for key in numbers}
    settings = {names[key]: number for key, number in numbers.items() if number or key == "db"}
    texts = {"host": "", "user": user, "password": password} | {key: values[key] for key in _TEXTS if key in values}
    return RedisOptions(**texts, **settings, tls=_redis_tls(values, key_password))  # type: ignore[arg-type]


def _redis_tls(values: dict[str, str], key_password: str) -> RedisTls | None:
    """Return the settings of TLS; as in Triton any of them enables it. None without TLS."""
    texts = {key: values[key] for key in _TLS_TEXTS if key in values}
    is_enabled = _switch("tls", values["tls"]) if "tls" in values else None
    if not is_enabled and not texts and "verify" not in values:
        return None
    if texts.get("cert"):  # the passphrase of the environment alone does not enable TLS
        texts.setdefault("key_password", key_password)
    verify = _switch("verify", values.get("verify", "true"))
    return RedisTls(**texts, verify=verify, is_disabled=is_enabled is False)
