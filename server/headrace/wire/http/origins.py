"""Hosts and origins: the names that the server answers to, and the web pages that may send requests to it.

A browser sends requests for any page to any address that it reaches, also to a server on 127.0.0.1. Two attacks follow:

- DNS rebinding. The name of a page is made to resolve to the server's address, so that the browser takes both for one origin.
  Only the Host of the request shows it: `HostPolicy`.
- Cross-site requests. A form, `sendBeacon` or `fetch` with the mode no-cors sends a POST whose response the page cannot read,
  but which takes effect. Origin and Sec-Fetch-Site, which a page cannot set, show it: `OriginPolicy`.

`OriginPolicy` also answers CORS, the exception from the second rule. Specifications: RFC 9110 (Host), RFC 9112 (request target),
https://fetch.spec.whatwg.org (Origin, CORS), https://www.w3.org/TR/fetch-metadata (Sec-Fetch-Site).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence

from headrace.core.errors import Forbidden
from headrace.wire.requests.response_metadata import Header

# Number of Host values whose check is cached; clients repeat a few.
_MAX_CACHED = 256
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9._-]+)(?::[0-9]{0,5})?")
_ABSOLUTE_TARGET = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
# An exact origin, as browsers write it.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_MAX_SHOWN_CHARS = 100

RawHeaders = Iterable[tuple[bytes, bytes]]


class HostPolicy:
    """Refuses requests to a host that is not one of the server's names.

    Address literals are always allowed: a page whose address is a literal was loaded from that address.

    Args:
        names: allowed names, without port; None allows every name.
    """

    def __init__(self, names: Iterable[str] | None) -> None:
        self._names = None if names is None else frozenset(filter(None, map(_normalize, names)))
        self._accepted: set[bytes] = set()

    def refusal(self, target: bytes, headers: RawHeaders, http_version: str) -> tuple[int, str] | None:
        """Check the host of a request.

        Args:
            target: of the request line; in its absolute form it has a host of its own.
            headers: names in lower case.
            http_version: such as "1.1"; only "1.0" needs no Host.

        Returns:
            Status (400 or 421) and text of the error; None if the request is allowed.
        """
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) == 1 and hosts[0] in self._accepted and target.startswith(b"/"):
            return None
        if len(hosts) > 1:
            return 400, f"the request has {len(hosts)} Host headers: send one"
        if not hosts and http_version != "1.0":
            return 400, "the request has no Host header: HTTP/1.1 requires one"
        absolute = _ABSOLUTE_TARGET.match(target)
        for authority in (*hosts, *([absolute[1]] if absolute else ())):
            refusal = self._check(authority)
            if refusal is not None:
                return refusal
        if hosts:
            if len(self._accepted) >= _MAX_CACHED:
                self._accepted.clear()
            self._accepted.add(hosts[0])
        return None

    def _check(self, authority: bytes) -> tuple[int, str] | None:
        text = authority.decode("latin-1")
        name = _host(text)
        if name is None:
            return 400, f"Host {text[:_MAX_SHOWN_CHARS]!r} is not a name or an address with an optional port"
        if self._names is None or name in self._names or _is_literal(name):
            return None
        shown = name[:_MAX_SHOWN_CHARS]
        cure = f"use localhost or the server's IP address, or start the server with --allowed-host {shown}"
        return 421, f"the server does not answer to the host {shown!r}: {cure}"


ANY_HOST = HostPolicy(None)


def allowed_names(bound: str, is_open: bool, allowed: Sequence[str]) -> Sequence[str] | None:
    """Return the names for `HostPolicy`; None for all.

    A server on a network address has names of any kind, and a page has no key: there, only `allowed`
    makes the server check names.

    Args:
        bound: value of --host.
        is_open: True if the server is on a loopback address and needs no keys, so that every local program may use it.
        allowed: values of --allowed-host; "*" allows all.
    """
    if "*" in allowed or not (is_open or allowed):
        return None
    return ["localhost", bound, *allowed]


# --- Origins -----------------------------------------------------------------------------------------------------------

# Methods that change nothing: a page of another origin may cause them, but cannot read their response.
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_OWN_SITES = frozenset((b"same-origin", b"none"))  # "none": the user's own action, such as a bookmark
_BROWSER_HEADERS = frozenset((b"origin", b"sec-fetch-site"))
# Response headers that pages of other origins may read, besides those that CORS always allows.
_EXPOSED = (
    "Endpoint-Load-Metrics, Headrace-Predicted-Wait-Us, Headrace-Queue-Depth, Headrace-Timing, "
    "Inference-Header-Content-Length, Retry-After, Retry-After-Ms, Server-Timing, Traceparent"
)
# Request headers that pages of other origins may send, besides the options of inference requests.
_REQUEST_HEADERS = (
    *("accept", "authorization", "content-encoding", "content-type", "inference-header-content-length", "x-api-key"),
)
_PREFLIGHT_S = 600
_VARY = (b"vary", b"Origin")


class OriginPolicy:
    """Refuses cross-site requests that change state, except those of allowed origins, to which it sends the headers of CORS.

    Credentials of the browser (cookies, client certificates) are never allowed: pages send a key in a header of their own.

    Args:
        allowed: values of --cors-origin; "*" allows inference and reading to every page, but not changes of state.
        checks_inference: refuse inference requests of other origins too.
        request_headers: further headers that pages of allowed origins may send, in lower case.

    Attributes:
        has_cors: at least one origin is allowed.
    """

    def __init__(
        self, allowed: Iterable[str] = (), checks_inference: bool = True, request_headers: Iterable[str] = ()
    ) -> None:
        self._allowed = frozenset(origin.encode() for origin in allowed)
        self._checks_inference = checks_inference and b"*" not in self._allowed
        self._request_headers = ", ".join(sorted({*_REQUEST_HEADERS, *request_headers})).encode()
        self.has_cors = bool(self._allowed)

    def check_control(self, method: str, headers: RawHeaders) -> None:
        """Check a request of the control plane; raises Forbidden if a page of another origin causes a change of state."""
        if method in _SAFE_METHODS:
            return
        values = dict(headers)
        if _BROWSER_HEADERS.isdisjoint(values):
            return
        self._require_allowed_origin(values)
        # A type other than JSON needs no permission of the server (CORS): no page of ours sends it.
        media_type = values.get(b"content-type", b"").partition(b";")[0].strip().lower()
        is_empty = values.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in values
        if media_type != b"application/json" and (media_type or not is_empty):
            shown = media_type[:_MAX_SHOWN_CHARS].decode("latin-1")
            raise Forbidden(f"a browser sent the content-type {shown!r}: send application/json to this route")

    def check_inference(self, headers: RawHeaders) -> None:
        """Check an inference request of a browser; raises Forbidden if a page of another origin sends it."""
        if self._checks_inference:
            self._require_allowed_origin(dict(headers))

    def _require_allowed_origin(self, values: Mapping[bytes, bytes]) -> None:
        origin = values.get(b"origin", b"")
        if origin in self._allowed:
            return
        site = values.get(b"sec-fetch-site")
        # Browsers send Sec-Fetch-Site to servers on loopback and with TLS, old browsers send only Origin. The scheme is not
        # compared: a proxy may end TLS.
        if site in _OWN_SITES or (site is None and (not origin or _is_same_host(origin, values.get(b"host", b"")))):
            return
        shown = origin[:_MAX_SHOWN_CHARS].decode("latin-1") or "another origin"
        raise Forbidden(
            f"a page of {shown} sent this request, which only the server's own pages may send: "
            "start the server with --cors-origin ORIGIN to allow the pages of an origin"
        )

    def response_headers(self, headers: RawHeaders) -> list[Header]:
        """Return the headers of CORS for the response to a request; [] without --cors-origin."""
        if not self._allowed:
            return []
        allowed = self._allowed_origin(dict(headers).get(b"origin", b""))
        if not allowed:
            return [_VARY]
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", _EXPOSED.encode()),
            _VARY,
        ]

    def preflight(self, method: str, headers: RawHeaders) -> list[Header] | None:
        """Return the headers of the response to a preflight request; None if the request is none.

        Raises:
            Forbidden: the origin is not allowed.
        """
        if method != "OPTIONS" or not self._allowed:
            return None
        values = dict(headers)
        if b"origin" not in values or b"access-control-request-method" not in values:
            return None
        allowed = self._allowed_origin(values[b"origin"])
        if not allowed:
            shown = values[b"origin"][:_MAX_SHOWN_CHARS].decode("latin-1")
            raise Forbidden(
                f"pages of {shown!r} may not read responses: start the server with --cors-origin for this origin"
            )
        permissions = [
            (b"access-control-allow-origin", allowed),
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", self._request_headers),
            (b"access-control-max-age", b"%d" % _PREFLIGHT_S),
            (b"vary", b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers"),
        ]
        if b"access-control-request-private-network" in values:
            permissions.append((b"access-control-allow-private-network", b"true"))
        return permissions

    def _allowed_origin(self, origin: bytes) -> bytes:
        if origin in self._allowed and origin != b"*":
            return origin
        return b"*" if b"*" in self._allowed else b""


def _is_same_host(origin: bytes, host: bytes) -> bool:
    """Return True if the host and port of an origin (scheme://host:port) are those of the header Host."""
    authority = origin.lower().partition(b"://")[2]
    return bool(authority) and authority == host.lower()


def _host(authority: str) -> str | None:
    """Return the host of an authority (host:port) in lower case; None if it is invalid, such as with user information."""
    match = _AUTHORITY.fullmatch(authority)
    return None if match is None else _normalize(match[1])


def _normalize(name: str) -> str:
    """Return a name or address literal in the form that is compared."""
    return name.lower().removesuffix(".").removeprefix("[").removesuffix("]")


def _is_literal(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
