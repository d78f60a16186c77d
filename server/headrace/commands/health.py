"""`headrace health`: exit status 0 while a server is ready. For health checks of containers, which then need no curl.

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


_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the server of this machine listens, by the environment that it is started with.

    Attributes:
        host: as of `headrace serve`; that of every address means the loopback one here.
        port: of HTTP.
        certificate: of the server (PEM), "" without TLS. It is trusted as it is, whatever names and signature it bears.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: str = ""

    @property
    def url(self) -> str:
        """E.g. "http://127.0.0.1:8000"."""
        host = self.host
        try:
            address = ip_address(host)
        except ValueError:
            pass
        else:
            if address.is_unspecified:
                host = "127.0.0.1" if address.version == 4 else "::1"
        return f"{'https' if self.certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"


def main(arguments: Sequence[str], here: Listening) -> int:
    """Run the command.

    Args:
        arguments: of the command line, behind `health`.
        here: the server that is asked where no URL is given.

    Returns:
        0 while the server is ready (with --live: answers at all), 1 if not; standard error says why.
    """
    text = "Exit status 0 while a server is ready, 1 if not: for health checks."
    parser = argparse.ArgumentParser(prog="headrace health", description=text)
    add = parser.add_argument
    add("--url", default=here.url, help="the server's address (%(default)s)")
    add("--live", action="store_true", help="only that it answers, ready or not")
    add("--timeout", type=float, default=3.0, metavar="S", help="for the answer (%(default)s)")
    add("--client-cert", default="", metavar="FILE", help="to show to a server with --tls-client-ca (PEM)")
    add("--client-key", default=None, metavar="FILE", help="private key of --client-cert (PEM)")
    args = parser.parse_args(arguments)
    own = here.certificate if args.url == here.url else ""
    try:
        reason = ask(args.url, args.live, args.timeout, _context(own, args.client_cert, args.client_key))
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


def ask(url: str, live: bool, timeout_s: float, context: ssl.SSLContext) -> str:
    """Why a server is not ready; "" if it is.

    Args:
        url: of the server.
        live: ask only that it answers.
        timeout_s: for every wait.
        context: where the URL is one of TLS.

    Raises:
        OSError: nobody listens, TLS fails, or there is no answer in time.
        ValueError: no URL of HTTP.
        http.client.HTTPException: what listens speaks something else.
    """
    status, body = get(url, f"/v2/health/{'live' if live else 'ready'}", timeout_s, context, _MOST_BYTES)
    return "" if status == 200 else f"{status} {_told(body)}".rstrip()


def _told(body: bytes) -> str:
    """What an answer says, on one line without control characters: it goes to terminals and logs."""
    text = body.decode("utf-8", "replace")
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["error"])
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:500]


def _context(own: str, client_cert: str, client_key: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=own or None)
    if own:
        # The very file that the server shows: neither a name nor an authority can say more.
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if client_cert:
        context.load_cert_chain(client_cert, client_key)
    return context
