"""Scopes, principals and the interface of access control. No I/O: `headrace.wire.access` reads keys, tokens and certificates.

A principal is the caller of a request. The protocols resolve it when they parse a head (HTTP) or a header block (gRPC), and
cache it with that. So one object stands for one key, and a change of the keys file changes the object: cached heads and open
streams follow at once, and a request needs no other check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import Forbidden, QuotaExceeded, Unauthenticated
from headrace.core.quota import Quota

Row = TypeVar("Row", bound=Mapping[str, object])


class Scope(StrEnum):
    """Group of operations that a key may run.

    Attributes:
        INFER: inference, also on streams.
        READ: metadata, configuration, statistics, index, status, explanation, OpenAPI document, reflection, settings in force.
        METRICS: /metrics.
        CONTROL: load and unload models, register shared memory.
        ADMIN: change logging and trace settings.
    """

    INFER = "infer"
    READ = "read"
    METRICS = "metrics"
    CONTROL = "control"
    ADMIN = "admin"


ALL_SCOPES = frozenset(Scope)
NO_KEY = "this needs a key: send the header Authorization: Bearer KEY, or X-API-Key: KEY"
REVOKED = "the key was revoked, or its rights were withdrawn: create another with headrace keys new"
EXPIRED = "the key or token has expired: create another"
# Names of models whose permission a principal caches; clients choose the names.
_MAX_CACHED_MODELS = 1024
_MAX_MODEL_CHARS = 128


class QuotaBucket:
    """Token bucket of one name over the whole server; the keys of a name share it.

    Ownership: the event loop.

    Args:
        name: of the client, for the error.
        quota: rate and burst.
        previous: bucket that this one replaces; its level is taken over. A wait that the old rate has caused is not longer than
            that of an empty bucket with the new one.

    Attributes:
        name: see Args.
    """

    __slots__ = ("_burst_ns", "_full_ns", "_quota", "_token_ns", "name")

    def __init__(self, name: str, quota: Quota, previous: QuotaBucket | None = None) -> None:
        self.name = name
        self._quota = quota
        self._token_ns = max(1, int(NS_PER_S / quota.rate_hz))
        self._burst_ns = (quota.burst - 1) * self._token_ns
        empty_ns = monotonic_ns() + self._burst_ns + self._token_ns
        self._full_ns: int = 0 if previous is None else min(previous._full_ns, empty_ns)

    def charge(self, now_ns: int) -> None:
        """Take a token, as `headrace.core.quota.charge`; raises QuotaExceeded if there is none."""
        full_ns = self._full_ns
        if full_ns < now_ns:
            full_ns = now_ns
        wait_ns = full_ns - now_ns - self._burst_ns
        if wait_ns <= 0:
            self._full_ns = full_ns + self._token_ns
        else:
            raise self._refusal(wait_ns)

    def _refusal(self, wait_ns: int) -> QuotaExceeded:
        quota = self._quota
        message = (
            f"client '{self.name}' exceeded the quota of its key, {quota.rate_hz:g} requests/s (burst {quota.burst}): "
            "retry later, or raise its quota in the keys file"
        )
        return QuotaExceeded(message, wait_ns / NS_PER_S, self.name)


class RemoteBucket(QuotaBucket):
    """Bucket of a front-end process: the engine process keeps the tokens, and takes one before the request is leased.

    Args:
        name, quota, previous: see `QuotaBucket`.
    """

    __slots__ = ("_empty_until_ns",)

    def __init__(self, name: str, quota: Quota, previous: QuotaBucket | None = None) -> None:
        super().__init__(name, quota)
        self._empty_until_ns = 0

    def charge(self, now_ns: int) -> None:
        """Do nothing: the engine process has taken the token."""

    def check(self, now_ns: int) -> None:
        """Raise QuotaExceeded while the bucket has no token for any process, by the last refusal of the engine process."""
        if now_ns < self._empty_until_ns:
            raise self._refusal(self._empty_until_ns - now_ns)

    def mark_empty(self, until_ns: int) -> None:
        """Note a refusal of the engine process: requests only take tokens, so there is none before `until_ns`."""
        self._empty_until_ns = max(self._empty_until_ns, until_ns)


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights of a principal.

    Attributes:
        scopes: operations that it may run.
        models: patterns (fnmatch) of the models that it may infer with, read and control; empty for all.
        expires_ns: monotonic time of its end; 0 for none.
        bucket: quota over the whole server; None for none.
        cure: text for the caller of an operation whose scope is missing; "" for the usual one.
    """

    scopes: frozenset[Scope] = frozenset()
    models: tuple[str, ...] = ()
    expires_ns: int = 0
    bucket: QuotaBucket | None = None
    cure: str = ""


class Principal:
    """Caller of requests, and its rights.

    Ownership: the event loop.

    Args:
        name: for quotas, fair shares, logs and metrics; "" if anonymous.
        grant: its rights; None for none, so that every operation but the open ones fails.
        refusal: text of Unauthenticated without a grant.
    """

    __slots__ = ("__weakref__", "_is_unbounded", "_may_infer", "_models", "grant", "name", "refusal")

    def __init__(self, name: str = "", grant: Grant | None = None, refusal: str = NO_KEY) -> None:
        self.name = name
        self.refusal = refusal
        self.update(grant)

    def update(self, grant: Grant | None) -> None:
        """Replace the rights; None withdraws them, also for cached heads and open streams."""
        self.grant = grant
        self._models: dict[str, bool] = {}
        self._may_infer = grant is not None and Scope.INFER in grant.scopes
        self._is_unbounded = (
            grant is not None and self._may_infer and not grant.models and not grant.expires_ns and grant.bucket is None
        )

    def revoke(self, refusal: str = REVOKED) -> None:
        """Withdraw all rights."""
        self.refusal = refusal
        self.update(None)

    @property
    def is_authenticated(self) -> bool:
        """True if the principal has rights that have not expired."""
        grant = self.grant
        return grant is not None and (not grant.expires_ns or monotonic_ns() < grant.expires_ns)

    def admit(self, model: str) -> None:
        """Check an inference request and charge it to the quota: `require` for the hot path.

        Args:
            model: name.

        Raises:
            HeadraceError: as `require`.
        """
        if self._is_unbounded:
            return
        grant = self.grant
        if grant is not None and self._may_infer and (not grant.models or self._models.get(model)):
            now_ns = monotonic_ns()
            if not grant.expires_ns or now_ns < grant.expires_ns:
                if grant.bucket is not None:
                    grant.bucket.charge(now_ns)
                return
        self.require(Scope.INFER, model)

    def require(self, scope: Scope, model: str = "") -> None:
        """Check an operation and charge it to the quota.

        Args:
            scope: of the operation.
            model: name; "" for an operation on no model, or on all. The error does not depend on whether the model exists.

        Raises:
            Unauthenticated: there is no key, or it was revoked or has expired.
            Forbidden: the key has not this scope, or not for this model.
            QuotaExceeded: the quota of the key is used up.
        """
        self.check(scope, model)
        if self.grant is not None and self.grant.bucket is not None:
            self.grant.bucket.charge(monotonic_ns())

    def check(self, scope: Scope, model: str = "") -> None:
        """Check an operation as `require`, without a charge: for the further steps of a call."""
        grant = self.authenticate()
        if scope not in grant.scopes:
            cure = grant.cure or f"the key of '{self.name}' has {', '.join(sorted(grant.scopes)) or 'no scope'}"
            raise Forbidden(f"this needs the scope '{scope}': {cure}")
        if model:
            self.check_model(model)

    def authenticate(self) -> Grant:
        """Return the rights; raises Unauthenticated if there are none, or if they have expired."""
        grant = self.grant
        if grant is None:
            raise Unauthenticated(self.refusal)
        if grant.expires_ns and monotonic_ns() >= grant.expires_ns:
            raise Unauthenticated(EXPIRED)
        return grant

    def check_model(self, model: str) -> None:
        """Check the model patterns; raises Forbidden. The error does not depend on whether the model exists."""
        if not self.allows_model(model):
            raise Forbidden(f"the key of '{self.name}' is not for a model of this name: its patterns do not match")

    def allows_model(self, model: str) -> bool:
        """Return True if the model patterns allow a model."""
        grant = self.grant
        if grant is None or not grant.models:
            return grant is not None
        allowed = self._models.get(model)
        if allowed is None:
            if len(model) > _MAX_MODEL_CHARS:  # no model has such a name, and it must not stay in memory
                return False
            if len(self._models) >= _MAX_CACHED_MODELS:
                self._models.clear()
            allowed = self._models[model] = any(fnmatchcase(model, pattern) for pattern in grant.models)
        return allowed

    def filter_models(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of a list whose model is allowed; each has the name of its model as "name"."""
        if self.grant is not None and not self.grant.models:
            return list(rows)
        return [row for row in rows if self.allows_model(str(row["name"]))]


class AccessControl(Protocol):
    """Resolves the principal of a request.

    Ownership: the event loop calls all methods.

    Attributes:
        anonymous: principal of requests without credentials.
        has_keys: True if callers need a key, token or certificate. False: every request is anonymous.
    """

    anonymous: Principal
    has_keys: bool

    def authenticate(self, authorization: str, api_key: str, peer: Principal | None) -> Principal:
        """Return the principal of a request; never raises.

        The principal of invalid credentials has no rights. Open operations, such as liveness, do not check it.

        Args:
            authorization: value of the header; "" for none.
            api_key: value of the header X-API-Key; "" for none.
            peer: principal of the client certificate, None for none. Credentials of the request go before it.
        """

    def certificate_principal(self, names: Sequence[str]) -> Principal | None:
        """Return the principal of a client certificate by its common name and alternative names; None if no entry has one."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop after every change of keys, for caches of principals."""


# Rights of every caller of a server without keys on a network address: what changes the server needs a key.
NETWORK_SCOPES = ALL_SCOPES - {Scope.CONTROL, Scope.ADMIN}
NETWORK_CURE = (
    "this server has no keys and listens on a network address: create keys (headrace keys new) and start it with "
    "--api-keys-file FILE, or allow this to every client with --insecure-control"
)


class OpenAccess:
    """`AccessControl` of a server without keys: all requests are anonymous.

    Args:
        anonymous: the principal; None for one with all scopes.

    Attributes:
        anonymous, has_keys: see `AccessControl`.
    """

    has_keys = False

    def __init__(self, anonymous: Principal | None = None) -> None:
        self.anonymous = anonymous or Principal("", Grant(ALL_SCOPES))

    def authenticate(self, authorization: str, api_key: str, peer: Principal | None) -> Principal:
        """Return the principal of a request; never raises."""
        return self.anonymous

    def certificate_principal(self, names: Sequence[str]) -> Principal | None:
        """Return the principal of a client certificate by its common name and alternative names; None if no entry has one."""
        return None

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop after every change of keys, for caches of principals. Keys never change."""


def certificate_names(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the common name and the alternative names of a client certificate.

    Args:
        certificate: as `ssl.SSLSocket.getpeercert` returns it; None or empty without one.
    """
    if not certificate:
        return ()
    subject = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    return tuple(dict.fromkeys([*subject, *(value for _, value in certificate.get("subjectAltName", ()))]))
