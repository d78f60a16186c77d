"""JSON web tokens (RFC 7519): verifies them with the public keys of an issuer, a JSON Web Key Set (RFC 7517).

Signatures are checked by PyJWT, which is imported only with --jwks. Rules, after RFC 8725:

- Three algorithms, each for one type of key: RS256, ES256 and EdDSA. The type of the key decides, not the header of the token.
- `exp`, `aud`, `iss` and `sub` are required; `exp`, `nbf`, `iat`, `aud` and `iss` are checked.
- A thread of its own reads the key set: periodically, and soon after a token with an unknown `kid`, but rarely. A request never
  waits for it.

A verified token is cached by its hash until it expires. A key that leaves the set withdraws the rights of its tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakSet

from headrace.config.documents import check_permissions, file_signature, open_regular_file, refuse
from headrace.core.access import Grant, Principal, Scope
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.limits import CLIENT_PATTERN
from headrace.core.threads import start_thread

if TYPE_CHECKING:
    from jwt import PyJWK

logger = logging.getLogger("headrace.access")

SCOPE_CLAIM = "scope"
MODELS_CLAIM = "models"
# Interval of periodic reads, shortest interval of reads after an unknown `kid`, and interval after a failure, seconds.
REFRESH_S = 300.0
MIN_REFRESH_S = 10.0
_FILE_POLL_S = 1.0
_FETCH_TIMEOUT_S = 10.0
_MAX_SET_BYTES = 1 << 20
_MAX_KEYS = 100
_MAX_TOKENS = 4096
_MIN_RSA_BITS = 2048
# Allowed difference between the clocks of the issuer and of this machine, seconds.
_LEEWAY_S = 10
# Algorithm by type of key and curve. Not "none", and not HS256: its key would be the public one.
_ALGORITHMS = {"RSA": "RS256", "EC P-256": "ES256", "OKP Ed25519": "EdDSA"}
_REQUIRED = ["exp", "aud", "iss", "sub"]
_NAME = re.compile(CLIENT_PATTERN)


class TokenVerifier:
    """Resolves principals of tokens.

    Ownership: the event loop; the thread only reads the key set and hands it over.

    Args:
        source: file or https:// URL of the key set.
        issuer: required `iss`.
        audience: required `aud`.

    Raises:
        ConfigError: PyJWT is not installed, the source is no file and no https:// URL, or the file is invalid.
    """

    def __init__(self, source: str, issuer: str, audience: str) -> None:
        option = f"--jwks {source}"
        if not issuer or not audience:
            cure = "without them, tokens for other services would be accepted"
            raise refuse(option, None, "needs --jwt-issuer and --jwt-audience", cure)
        try:
            import jwt
        except ImportError as error:
            text = f"needs a package that is not installed ({error.name})"
            raise refuse(option, None, text, "pip install '.[jwt]' in a checkout of Headrace") from error
        self._jwt = jwt
        self._issuer, self._audience = issuer, audience
        self._keys: dict[str, PyJWK] = {}
        self._tokens: OrderedDict[bytes, Principal] = OrderedDict()
        self._of_key: dict[str, WeakSet[Principal]] = {}
        self._on_change: Callable[[], None] = lambda: None
        self._reader = KeySetReader(source, self._apply)
        keys = self._reader.read_file()
        if keys is not None:
            self._apply(keys)

    def start(self, loop: asyncio.AbstractEventLoop, on_change: Callable[[], None]) -> None:
        """Start the thread; `on_change` is called on the event loop after each change of the key set."""
        self._on_change = on_change
        self._reader.start(loop)

    def wake(self) -> None:
        """Read the key set soon."""
        self._reader.wake()

    def stop(self) -> None:
        """End the thread."""
        self._reader.stop()

    def principal(self, token: str, digest: bytes) -> Principal:
        """Return the principal of a token; never raises. That of an invalid token has no rights.

        Args:
            token: in its compact form.
            digest: hash of the token.
        """
        principal = self._tokens.get(digest)
        if principal is not None and principal.is_authenticated:
            self._tokens.move_to_end(digest)
            return principal
        try:
            key_id, claims = self._verify(token)
            principal = self._principal(claims)
        except self._jwt.PyJWTError as error:
            return Principal("", None, f"the token is not valid: {_shorten(error)}")
        except (ValueError, OverflowError) as error:
            return Principal("", None, f"the token is not valid: {error}")
        except RecursionError:  # of the JSON parser, also before the signature is checked
            return Principal("", None, "the token is not valid: its JSON is nested too deeply")
        while len(self._tokens) >= _MAX_TOKENS:
            self._tokens.popitem(last=False)
        self._tokens[digest] = principal
        self._of_key.setdefault(key_id, WeakSet()).add(principal)
        return principal

    def _verify(self, token: str) -> tuple[str, Mapping[str, Any]]:
        """Return the id of the key and the claims; raises PyJWTError or ValueError."""
        header = self._jwt.get_unverified_header(token)
        key_id = header.get("kid")
        if key_id is None and len(self._keys) == 1:
            key_id = next(iter(self._keys))
        key = self._keys.get(key_id) if isinstance(key_id, str) else None
        if key is None or not isinstance(key_id, str):
            self._reader.request_refresh()
            raise ValueError("it is signed by a key that is not in the key set (the server reads the set again)")
        algorithm = key.algorithm_name
        if header.get("alg") != algorithm:
            raise ValueError(f"its algorithm is not {algorithm}, which is that of the key")
        claims = self._jwt.decode(
            token,
            key.key,
            algorithms=[algorithm],
            audience=self._audience,
            issuer=self._issuer,
            leeway=_LEEWAY_S,
            options={"require": _REQUIRED},
        )
        return key_id, claims

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        """Make the principal of verified claims; raises ValueError."""
        name = claims["sub"]
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError("'sub' is not a name of 1 to 128 visible ASCII characters")
        words = _words(claims, SCOPE_CLAIM)
        scopes = frozenset(scope for scope in Scope if scope in words)
        models = _words(claims, MODELS_CLAIM)
        if MODELS_CLAIM in claims and not models:
            raise ValueError(f"'{MODELS_CLAIM}' has no pattern")
        expires_s = float(claims["exp"]) + _LEEWAY_S - time.time()
        return Principal(name, Grant(scopes, models, max(1, monotonic_ns() + int(expires_s * NS_PER_S))))

    def _apply(self, keys: Mapping[str, PyJWK]) -> None:
        """Replace the key set; withdraw the rights of tokens whose key has left or changed."""
        before, self._keys = self._keys, dict(keys)
        for key_id, key in before.items():
            if key_id not in keys or keys[key_id]._jwk_data != key._jwk_data:
                for principal in self._of_key.pop(key_id, ()):
                    principal.revoke("the key that signed the token has left the key set of its issuer")
        self._on_change()


def _words(claims: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the words of a claim, a text with blanks (RFC 8693) or a list of texts; raises ValueError."""
    value = claims.get(name, "")
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"'{name}' is neither text nor a list of texts")
    return tuple(words)


def _shorten(error: Exception) -> str:
    return str(error)[:200]


class KeySetReader:
    """Reads a key set from a file or URL, on a thread of its own.

    Args:
        source: file or https:// URL.
        apply: called on the event loop with each new key set.
    """

    def __init__(self, source: str, apply: Callable[[Mapping[str, PyJWK]], None]) -> None:
        self._source = source
        self._apply = apply
        self._is_url = "://" in source
        if self._is_url and (urlsplit(source).scheme != "https" or not urlsplit(source).hostname):
            raise refuse(f"--jwks {source}", None, "is not a URL with TLS", "write https://..., or the path of a file")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._is_forced = False
        self._signature: tuple[int, ...] | None = None
        self._content = b""
        self._error = self._warning = ""
        self._thread = threading.Thread(target=self._run, name="token keys", daemon=True)

    def read_file(self) -> Mapping[str, PyJWK] | None:
        """Read the set if it is a file, else None: a server starts while its issuer is down. Raises ConfigError."""
        if self._is_url:
            return None
        try:
            return self._read()
        except (OSError, ValueError, RecursionError) as error:
            raise refuse(f"--jwks {self._source}", None, f"cannot be read: {error}", "check the file") from None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; raises Unavailable if the system starts no further thread."""
        self._loop = loop
        start_thread(self._thread)

    def wake(self) -> None:
        """Read the set now."""
        self._is_forced = True
        self._wake.set()

    def request_refresh(self) -> None:
        """Fetch a URL soon, for a token with an unknown key. A file is looked at once a second anyway."""
        if self._is_url:
            self._wake.set()

    def stop(self) -> None:
        """End the thread; a fetch in progress ends by itself."""
        self._closing.set()
        self._wake.set()

    def _run(self) -> None:
        is_failed = self._is_url and not self._refresh()
        while not self._closing.is_set():
            started_s = time.monotonic()
            self._wake.wait(_FILE_POLL_S if not self._is_url else MIN_REFRESH_S if is_failed else REFRESH_S)
            if self._is_url and not self._is_forced:
                # Tokens with an invented `kid` are cheap to send: fetches have a shortest interval.
                self._closing.wait(max(0.0, started_s + MIN_REFRESH_S - time.monotonic()))
            self._wake.clear()
            is_forced, self._is_forced = self._is_forced, False
            if not self._closing.is_set() and (
                self._is_url or is_forced or file_signature(self._source) != self._signature
            ):
                is_failed = not self._refresh()

    def _refresh(self) -> bool:
        """Read the set and hand it over if it has changed; returns False after a failure, which is logged."""
        before = self._content
        try:
            keys = self._read()
        except Exception as error:
            self._content = before
            text = f"{error}"
            if text != self._error:  # once for each text: a file that cannot be read is read every second
                logger.error("the token keys in force stay: --jwks %s: %s", self._source, text)
            self._error = text
            return False
        self._error = ""
        if self._content != before and self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._apply, keys)
        return True

    def _read(self) -> Mapping[str, PyJWK]:
        """Read and parse the set; raises OSError or ValueError."""
        if self._is_url:
            content = _fetch(self._source)
        else:
            signature = file_signature(self._source)
            self._signature = None  # a failed read is repeated at the next poll
            with open_regular_file(Path(self._source)) as stream:
                mode = os.fstat(stream.fileno()).st_mode
                content = stream.read(_MAX_SET_BYTES + 1)
            self._signature = signature
            warning = check_permissions(f"--jwks {self._source}", Path(self._source), mode)
            if warning and warning != self._warning:
                logger.warning("%s", warning)
            self._warning = warning
        if len(content) > _MAX_SET_BYTES:
            raise ValueError(f"it is larger than {_MAX_SET_BYTES} bytes")
        keys = parse_key_set(content)
        self._content = content
        return keys


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which could lead away from TLS or to another host."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def _fetch(url: str) -> bytes:
    """Fetch a URL with TLS; raises OSError or ValueError."""
    opener = urllib.request.build_opener(_NoRedirects)
    request = urllib.request.Request(url, headers={"accept": "application/json"})
    with opener.open(request, timeout=_FETCH_TIMEOUT_S) as response:
        content: bytes = response.read(_MAX_SET_BYTES + 1)
        return content


def parse_key_set(content: bytes) -> dict[str, PyJWK]:
    """Parse a JSON Web Key Set; keys of other types and purposes are left out, and so are invalid ones, with a warning.

    Returns:
        Keys by id; a single key without `kid` has the id "".

    Raises:
        ValueError: it is not a key set, or it has no usable key.
    """
    from jwt import PyJWK
    from jwt.exceptions import PyJWTError

    document = json.loads(content)
    rows = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(rows, list) or len(rows) > _MAX_KEYS:
        raise ValueError(f"it is not a JSON Web Key Set with up to {_MAX_KEYS} keys")
    keys: dict[str, PyJWK] = {}
    problem = "it has no key for RS256, ES256 or EdDSA"
    for row in rows:
        algorithm = _algorithm(row)
        if algorithm is None:
            continue
        try:
            key = PyJWK({name: value for name, value in row.items() if name not in ("alg", "d")}, algorithm)
        except (PyJWTError, ValueError, TypeError, KeyError) as error:
            # The other keys stay in force: an issuer may publish a key that this library cannot read.
            problem = f"the key {str(row.get('kid'))[:80]!r} is invalid: {_shorten(error)}"
            logger.warning("--jwks: %s", problem)
            continue
        if algorithm == "RS256" and key.key.key_size < _MIN_RSA_BITS:
            continue
        keys[str(row.get("kid", ""))] = key
    if not keys:
        raise ValueError(problem)
    return keys


def _algorithm(row: Any) -> str | None:
    """Return the only algorithm of a key by its type; None for a key that is not used: symmetric, for encryption, or other."""
    if not isinstance(row, dict) or row.get("use", "sig") != "sig":
        return None
    curve = "" if row.get("kty") == "RSA" else row.get("crv")
    algorithm = _ALGORITHMS.get(f"{row.get('kty')} {curve}".strip())
    return algorithm if row.get("alg", algorithm) in (algorithm, "Ed25519") else None
