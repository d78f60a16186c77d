"""GET requests of the command line over HTTP, with the standard library alone.

One connection a request: for a command, a fresh connection costs nothing and cannot be stale.
"""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit


def get(
    url: str, path: str, timeout_s: float, context: ssl.SSLContext | None = None, max_bytes: int | None = None
) -> tuple[int, bytes]:
    """Send a GET request and return the response's status and body.

    Args:
        url: of the server, e.g. "http://127.0.0.1:8000"; the scheme may be missing, a path is a prefix of every route.
        path: of the route, quoted.
        timeout_s: for connecting, and for every wait for bytes.
        context: for a URL with TLS; None trusts the system's authorities.
        max_bytes: of the body to read; None reads all.

    Raises:
        ValueError: not a URL of HTTP.
        OSError: no server listens, TLS fails, or there is no answer in time.
        http.client.HTTPException: the peer does not speak HTTP, or closes the connection early.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("no URL of an HTTP server")
    connection = (
        http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        if parts.scheme == "http"
        else http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
    )
    try:
        connection.request("GET", parts.path.rstrip("/") + path)
        response = connection.getresponse()
        return response.status, response.read(max_bytes)
    finally:
        connection.close()
