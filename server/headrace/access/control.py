"""Access control with keys: resolves principals, and keeps them up to date with the keys file.

A thread looks at the file once a second and reads it after a change, or at once after `reload` (SIGHUP). The event loop applies
the new keys. A file that is broken or missing changes nothing: the keys in force stay, and the log has the error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from hmac import compare_digest
from pathlib import Path

from headrace.access.keys_file import ClientEntry, KeysFile, key_hash, parse_time, read_keys
from headrace.access.tokens import TokenVerifier
from headrace.core.access import NO_KEY, Grant, Principal, QuotaBucket
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import ConfigError
from headrace.core.quota import Quota
from headrace.core.threads import start_thread
from headrace.observability.audit import AUDIT, AuditRecord

logger = logging.getLogger("headrace.access")

_POLL_S = 1.0
_BEARER = "bearer"
# A longer text is neither a key nor a token, and is not hashed.
_MAX_CREDENTIAL_CHARS = 16 << 10
_INVALID = "the key is not valid: it is unknown, or was revoked"
_WRONG_SCHEME = "the header Authorization has another scheme: send Authorization: Bearer KEY, or X-API-Key: KEY"


class KeyAccess:
    """`AccessControl` with keys, tokens and client certificates.

    Ownership: the event loop. `reload` may be called from any thread and from a signal handler.

    Args:
        path: keys file; None without one.
        tokens: verifies JSON web tokens; None without them.

    Attributes:
        anonymous, has_keys: see `AccessControl`.

    Raises:
        ConfigError: the keys file cannot be read or is invalid.
    """

    has_keys = True

    def __init__(self, path: Path | None, tokens: TokenVerifier | None = None) -> None:
        self.anonymous = Principal("", None, NO_KEY)
        self._invalid = Principal("", None, _INVALID)
        self._wrong_scheme = Principal("", None, _WRONG_SCHEME)
        self._tokens = tokens
        self._by_hash: dict[bytes, tuple[bytes, Principal]] = {}
        self._by_certificate: dict[str, Principal] = {}
        self._of_certificates: dict[str, Principal] = {}
        self._buckets: dict[str, QuotaBucket] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._watcher = None if path is None else _KeysWatcher(path, self._apply)
        if self._watcher is not None:
            self._apply(self._watcher.read())

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads that follow the keys file and the keys of the token issuer."""
        if self._watcher is not None:
            self._watcher.start(loop)
        if self._tokens is not None:
            self._tokens.start(loop, self._changed)

    def reload(self) -> None:
        """Read the keys file, and the keys of the token issuer, now; returns at once."""
        if self._watcher is not None:
            self._watcher.wake()
        if self._tokens is not None:
            self._tokens.wake()

    def stop(self) -> None:
        """End the threads; keys do not change any more."""
        if self._watcher is not None:
            self._watcher.stop()
        if self._tokens is not None:
            self._tokens.stop()

    def authenticate(self, authorization: str, api_key: str, peer: Principal | None) -> Principal:
        """See `AccessControl`. X-API-Key goes before Authorization, which may be for a proxy."""
        key = api_key
        if not key:
            scheme, _, key = authorization.partition(" ")
            key = key.strip()
            if not key or scheme.lower() != _BEARER:
                return peer or (self._wrong_scheme if authorization else self.anonymous)
        if len(key) > _MAX_CREDENTIAL_CHARS:
            return self._invalid
        digest = key_hash(key)
        stored = self._by_hash.get(digest)
        # The look-up by a hash that the client cannot choose reveals nothing; the comparison takes the same time for all.
        if stored is not None and compare_digest(stored[0], digest):
            return stored[1]
        if self._tokens is not None and key.count(".") == 2:
            return self._tokens.principal(key, digest)
        return self._invalid

    def certificate_principal(self, names: Sequence[str]) -> Principal | None:
        """See `AccessControl`."""
        for name in names:
            principal = self._by_certificate.get(name)
            if principal is not None:
                return principal
        return None

    def on_change(self, callback: Callable[[], None]) -> None:
        """See `AccessControl`."""
        self._callbacks.append(callback)

    def _apply(self, keys: KeysFile) -> None:
        """Update the principals in place; revoke those that are not in the file any more."""
        before = [principal for _, principal in self._by_hash.values()] + list(self._of_certificates.values())
        by_hash: dict[bytes, tuple[bytes, Principal]] = {}
        of_certificates: dict[str, Principal] = {}
        self._by_certificate = {}
        self._buckets = {name: self._bucket(name, client) for name, client in keys.clients.items() if client.quota}
        for name, client in keys.clients.items():
            for key in client.keys:
                digest = bytes.fromhex(key.sha256)
                principal = self._by_hash.get(digest, (digest, Principal(name)))[1]
                if principal.name != name:  # caches have the name
                    principal = Principal(name)
                principal.update(self._grant(name, client, key.expires))
                by_hash[digest] = digest, principal
            if client.certificates:
                principal = of_certificates[name] = self._of_certificates.get(name) or Principal(name)
                principal.update(self._grant(name, client, None))
                self._by_certificate |= dict.fromkeys(client.certificates, principal)
        self._by_hash, self._of_certificates = by_hash, of_certificates
        current = {id(principal) for _, principal in by_hash.values()} | {id(each) for each in of_certificates.values()}
        for principal in before:
            if id(principal) not in current:
                principal.revoke()
        self._changed()

    def _grant(self, name: str, client: ClientEntry, expires: str | None) -> Grant:
        return Grant(frozenset(client.scopes), client.models, _monotonic(expires), self._buckets.get(name))

    def _bucket(self, name: str, client: ClientEntry) -> QuotaBucket:
        assert client.quota is not None
        quota = Quota(client.quota.requests_per_s, client.quota.burst_size)
        bucket = self._buckets.get(name)
        if bucket is None:
            return QuotaBucket(name, quota)
        bucket.set_quota(quota)
        return bucket

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()


def _monotonic(expires: str | None) -> int:
    """Return the monotonic time of a time of the calendar in nanoseconds; 0 for None."""
    if expires is None:
        return 0
    return max(1, monotonic_ns() + int((parse_time(expires).timestamp() - time.time()) * NS_PER_S))


class _KeysWatcher:
    """Reads the keys file after changes, on a thread of its own.

    Args:
        path: keys file.
        apply: called on the event loop with new keys.
    """

    def __init__(self, path: Path, apply: Callable[[KeysFile], None]) -> None:
        self._path = path
        self._apply = apply
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake, self._closing = threading.Event(), False
        self._signature: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._run, name="keys file", daemon=True)
        self._warning = ""

    def read(self) -> KeysFile:
        """Read the file; raises ConfigError."""
        self._signature = self._look()
        keys, warning = read_keys(self._path)
        if warning and warning != self._warning:
            logger.warning("%s", warning)
        self._warning = warning
        return keys

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; raises Unavailable if the system starts no further thread."""
        self._loop = loop
        start_thread(self._thread)

    def wake(self) -> None:
        """Read the file now."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _look(self) -> tuple[int, ...]:
        """Return values that differ after a change of the file; empty if it is missing."""
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode

    def _run(self) -> None:
        while not self._closing:
            is_forced = self._wake.wait(_POLL_S)
            self._wake.clear()
            if self._closing:
                return
            if not is_forced and self._look() == self._signature:
                continue
            result = "ok"
            try:
                keys = self.read()
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._apply, keys)
            except ConfigError as error:
                result = error.reason
                logger.error("the keys in force stay: %s", error)
            except RuntimeError:  # the event loop is closed
                return
            except Exception:
                result = "internal error"
                logger.exception("the keys in force stay: %s cannot be read", self._path)
            AUDIT.write(AuditRecord("reload keys", str(self._path), protocol="file", result=result))
