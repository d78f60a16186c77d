"""`headrace health`: exit status 0 while a server is ready. Health checks of containers then need no curl.

It runs every few seconds, so this module imports only the standard library.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit


def get(
    url: str, path: str, timeout_s: float, context: ssl.SSLContext | None = None, max_bytes: int | None = None
) -> tuple[int, bytes]:
    """Send a GET request and return the response's status and body.

    Args:
        url: address of the server, e.g. "http://127.0.0.1:8000"; the scheme may be missing, a path is a prefix of
            every route.
        path: route, quoted.
        timeout_s: for connecting, and for every wait for bytes.
        context: TLS settings for an https URL; None trusts the system's authorities.
        max_bytes: number of bytes of the body to read; None reads all.

    Raises:
        ValueError: the URL is not one of HTTP.
        OSError: no server listens, TLS fails, or no response comes in time.
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


_MAX_BODY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """HTTP address of the server on this machine, from the settings that it is started with.

    Attributes:
        host: value of `headrace serve --host`; an unspecified address (0.0.0.0, ::) stands for loopback here.
        port: HTTP port.
        certificate: path of the server's certificate (PEM), "" without TLS. It is trusted whatever names and
            signature it has.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: str = ""

    @property
    def url(self) -> str:
        """Base URL, e.g. "http://127.0.0.1:8000"."""
        host = self.host
        try:
            address = ip_address(host)
        except ValueError:
            pass
        else:
            if address.is_unspecified:
                host = "127.0.0.1" if address.version == 4 else "::1"
        return f"{'https' if self.certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"


def main(arguments: Sequence[str], address: ListenAddress) -> int:
    """Run the command.

    Args:
        arguments: command line after `health`.
        address: default server if no URL is given.

    Returns:
        0 if the server is ready (with --live: if it responds at all), else 1; standard error has the reason.
    """
    text = "Exit status 0 while a server is ready, 1 if not: for health checks."
    parser = argparse.ArgumentParser(prog="headrace health", description=text)
    add = parser.add_argument
    add("--url", default=address.url, help="the server's address (%(default)s)")
    add("--live", action="store_true", help="check only that the server is live")
    add("--timeout", type=float, default=3.0, metavar="S", help="timeout of the check in seconds (%(default)s)")
    add("--client-cert", default="", metavar="FILE", help="client certificate for a server with --tls-client-ca (PEM)")
    add("--client-key", default=None, metavar="FILE", help="private key of --client-cert (PEM)")
    args = parser.parse_args(arguments)
    certificate = address.certificate if args.url == address.url else ""
    try:
        reason = readiness_error(
            args.url, args.live, args.timeout, _context(certificate, args.client_cert, args.client_key)
        )
    except ssl.SSLError as error:
        reason = f"TLS: {error.reason or error}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
    word = "live" if args.live else "ready"
    if reason:
        print(f"{args.url} is not {word}: {reason}", file=sys.stderr)  # noqa: T201
        return 1
    print(word)  # noqa: T201
    return 0


def readiness_error(url: str, live: bool, timeout_s: float, context: ssl.SSLContext) -> str:
    """Return the reason why a server is not ready, "" if it is.

    Args:
        url: address of the server.
        live: check only that it responds.
        timeout_s: for every wait.
        context: TLS settings of an https URL.

    Raises:
        OSError: no server listens, TLS fails, or no response comes in time.
        ValueError: the URL is not one of HTTP.
        http.client.HTTPException: the peer does not speak HTTP.
    """
    status, body = get(url, f"/v2/health/{'live' if live else 'ready'}", timeout_s, context, _MAX_BODY_BYTES)
    return "" if status == 200 else f"{status} {_error_text(body)}".rstrip()


def _error_text(body: bytes) -> str:
    """Error message of a response body, on one line without control characters: it is printed to terminals and logs."""
    text = body.decode("utf-8", "replace")
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["error"])
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:500]


def _context(certificate: str, client_cert: str, client_key: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate or None)
    if certificate:
        # Trust exactly the certificate that the server sends, whatever its names and issuer.
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if client_cert:
        context.load_cert_chain(client_cert, client_key)
    return context
