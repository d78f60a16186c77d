"""Response caches of all model versions of a server."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.config.cache_config import CacheLimits
from headrace.config.model_config import ModelConfig
from headrace.core.cache_options import CacheOptions, RedisOptions
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, Finding
from headrace.inference.caching.key import KEY_BYTES, KeyFactory
from headrace.inference.caching.local import LocalStore
from headrace.inference.caching.response_cache import RemoteEntries, VersionCache
from headrace.inference.scheduling.version_handle import VersionHandle

if TYPE_CHECKING:
    from headrace.inference.caching.redis_store import RedisStore


class ResponseCaches:
    """Creates the response caches of model versions, which share one store.

    Args:
        options: limits of the store.
        mailbox: mailbox of the event loop on which callers wait.

    Attributes:
        is_shared: True if other servers can have the responses: then versions need their digests.

    Raises:
        ConfigError: Redis is configured without a host, or its client is not installed.
    """

    def __init__(self, options: CacheOptions, mailbox: Mailbox) -> None:
        self.store = LocalStore(options.size_bytes)
        self.is_shared = options.redis is not None
        self._mailbox = mailbox
        self._redis = None if options.redis is None else _open_redis(options.redis, mailbox)
        # A new secret for each process: keys say nothing about inputs, and no client can construct two inputs with one key.
        self._secret = secrets.token_bytes(KEY_BYTES) if self._redis is None else self._redis.key_secret
        self._hash_thread = ThreadPoolExecutor(
            1, "headrace-cache-hash"
        )  # its thread starts with the first large request

    def close(self) -> None:
        """End the connections to Redis; call it after the last model is closed."""
        if self._redis is not None:
            self._redis.close()
        self._hash_thread.shutdown(wait=False, cancel_futures=True)

    def open(self, handle: VersionHandle, config: ModelConfig) -> VersionCache | None:
        """Create the cache of a version; None if its configuration enables none.

        Args:
            handle: the version.
            config: its complete configuration.
        """
        if config.response_cache is None or not config.response_cache.enable:
            return None
        limits = config.cache or CacheLimits()
        ttl_ns = int((limits.ttl_s or 0) * NS_PER_S)
        # Each load has entries of its own: a Python model may read files that are not part of its folder.
        remote = None
        if self._redis is not None and handle.digest:
            identity = f"files {handle.digest}"
            remote = RemoteEntries(self._redis, handle.spec, -(-ttl_ns // NS_PER_MS))
        else:
            identity = f"load {handle.serial}"
        keys = KeyFactory(
            handle.spec, identity, self._secret, reads_parameters=handle.policy.by_member or bool(handle.calls)
        )
        entries = self.store.open(limits.max_bytes, ttl_ns)
        return VersionCache(handle, keys, entries, self._mailbox, self._hash_thread, remote=remote)


def _open_redis(options: RedisOptions, mailbox: Mailbox) -> RedisStore:
    problem = cure = ""
    if not options.host:
        problem, cure = "the cache redis has no host", "write redis,host=NAME,port=NUMBER"
    elif find_spec("redis") is None:
        problem, cure = (
            "the cache redis needs the package redis, which is not installed",
            "pip install '.[redis]' in a checkout of Headrace",
        )
    if problem:
        raise ConfigError([Finding("--cache-config", None, problem, cure)])
    from headrace.inference.caching.redis_store import RedisStore

    return RedisStore(options, mailbox.loop)
