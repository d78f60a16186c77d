"""Access control with keys: resolves principals, and keeps them up to date with the keys file.

A thread looks at the file once a second and reads it after a change, or at once after `reload` (SIGHUP). The event loop applies
the new keys. A file that is broken or missing changes nothing: the keys in force stay, and the log has the error.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from typing import TypeVar

from headrace.config.documents import file_signature
from headrace.core.access import NO_KEY, Grant, Principal, QuotaBucket
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import ConfigError
from headrace.core.quota import Quota
from headrace.core.threads import start_thread
from headrace.observability.audit import AUDIT, AuditRecord
from headrace.wire.access.keys_file import ClientEntry, KeysFile, key_hash, parse_keys, parse_time, read_text
from headrace.wire.access.tokens import TokenVerifier

logger = logging.getLogger("headrace.access")

Key = TypeVar("Key", bytes, str)
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
        bucket: class of the quotas.

    Attributes:
        anonymous, has_keys: see `AccessControl`.

    Raises:
        ConfigError: the keys file cannot be read or is invalid.
    """

    has_keys = True

    def __init__(
        self, path: Path | None, tokens: TokenVerifier | None = None, bucket: type[QuotaBucket] = QuotaBucket
    ) -> None:
        self._new_bucket = bucket
        self.anonymous = Principal("", None, NO_KEY)
        self._invalid = Principal("", None, _INVALID)
        self._wrong_scheme = Principal("", None, _WRONG_SCHEME)
        self._tokens = tokens
        self._by_hash: dict[bytes, tuple[bytes, Principal]] = {}
        self._by_certificate: dict[str, Principal] = {}
        self._buckets: dict[str, QuotaBucket] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._watcher = None if path is None else _KeysWatcher(path, self._reload)
        self._sources = [source for source in (self._watcher, tokens) if source is not None]
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
        for source in self._sources:
            source.wake()

    def stop(self) -> None:
        """End the threads; keys do not change any more."""
        for source in self._sources:
            source.stop()

    def authenticate(self, authorization: str, api_key: str, peer: Principal | None) -> Principal:
        """Return the principal of a request; never raises. X-API-Key goes before Authorization, which may be for a proxy."""
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
        """Return the principal of a client certificate by its common name and alternative names; None if no entry has one."""
        for name in names:
            principal = self._by_certificate.get(name)
            if principal is not None:
                return principal
        return None

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop after every change of keys, for caches of principals."""
        self._callbacks.append(callback)

    def _reload(self, keys: KeysFile) -> None:
        """Apply keys that were read from a changed file; writes the audit line."""
        result = "ok"
        try:
            self._apply(keys)
        except Exception:
            result = "internal error"
            logger.exception("the keys of a changed file cannot be applied")
        assert self._watcher is not None
        self._watcher.audit(result)

    def _apply(self, keys: KeysFile) -> None:
        """Update the principals in place; revoke those that are not in the file any more.

        Nothing changes before all rights are computed, so that an error leaves the keys in force.
        """
        buckets = {name: self._bucket(name, client) for name, client in keys.clients.items() if client.quota}
        of_hashes: dict[bytes, tuple[str, Grant]] = {}
        of_subjects: dict[str, tuple[str, Grant]] = {}
        for name, client in keys.clients.items():
            for key in client.keys:
                of_hashes[bytes.fromhex(key.sha256)] = name, _grant(client, key.expires, buckets.get(name))
            for subject in client.certificates:
                of_subjects[subject] = name, _grant(client, None, buckets.get(name))
        principals = {digest: principal for digest, (_, principal) in self._by_hash.items()}
        self._by_hash = {digest: (digest, each) for digest, each in _update(principals, of_hashes).items()}
        self._by_certificate = _update(self._by_certificate, of_subjects)
        self._buckets = buckets
        self._changed()

    def _bucket(self, name: str, client: ClientEntry) -> QuotaBucket:
        assert client.quota is not None
        quota = Quota(client.quota.requests_per_s, client.quota.burst_size)
        return self._new_bucket(name, quota, self._buckets.get(name))

    def charge(self, name: str) -> None:
        """Take a token from the quota of a client, whose rights another process has checked; a no-op without a quota.

        Raises:
            QuotaExceeded: the quota is used up.
        """
        bucket = self._buckets.get(name)
        if bucket is not None:
            bucket.charge(monotonic_ns())

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()


def _update(principals: Mapping[Key, Principal], grants: Mapping[Key, tuple[str, Grant]]) -> dict[Key, Principal]:
    """Update principals in place, and revoke those that are gone or whose name has changed, which caches have.

    Args:
        principals: in force, by hash of the key or by name in a certificate.
        grants: new name and rights of each.

    Returns:
        The principals of `grants`.
    """
    updated: dict[Key, Principal] = {}
    for credential, (name, grant) in grants.items():
        principal = principals.get(credential)
        if principal is None or principal.name != name:
            principal = Principal(name)
        principal.update(grant)
        updated[credential] = principal
    for credential, principal in principals.items():
        if updated.get(credential) is not principal:
            principal.revoke()
    return updated


def _grant(client: ClientEntry, expires: str | None, bucket: QuotaBucket | None) -> Grant:
    return Grant(frozenset(client.scopes), client.models, _monotonic(expires), bucket)


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
        self._signature: tuple[int, ...] | None = None
        self._thread = threading.Thread(target=self._run, name="keys file", daemon=True)
        self._warning = self._error = ""

    def read(self) -> KeysFile:
        """Read the file; raises ConfigError.

        A file that cannot be read, for instance because the process has no descriptors left, is read again at the next poll. One
        with errors in its content is read again when it changes.
        """
        signature, self._signature = file_signature(self._path), None
        text, warning = read_text(self._path)
        self._signature = signature
        if warning and warning != self._warning:
            logger.warning("%s", warning)
        self._warning = warning
        return parse_keys(text, str(self._path))

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

    def audit(self, result: str) -> None:
        """Write the audit line of a reload."""
        AUDIT.write(AuditRecord("reload keys", str(self._path), protocol="file", result=result))

    def _run(self) -> None:
        while not self._closing:
            is_forced = self._wake.wait(_POLL_S)
            self._wake.clear()
            if self._closing:
                return
            if not is_forced and file_signature(self._path) == self._signature:
                continue
            try:
                keys = self.read()
            except ConfigError as error:
                self._report(str(error), error.reason, is_forced)
                continue
            except Exception as error:
                self._signature = None
                self._report(f"{self._path} cannot be read: {error!r}", "internal error", is_forced)
                continue
            self._error = ""
            if self._loop is not None:
                with suppress(RuntimeError):  # the event loop is closed
                    self._loop.call_soon_threadsafe(self._apply, keys)

    def _report(self, error: str, result: str, is_forced: bool) -> None:
        """Log an error, once for each text: an unreadable file is read at every poll."""
        if error != self._error or is_forced:
            self._error = error
            logger.error("the keys in force stay: %s", error)
            self.audit(result)
