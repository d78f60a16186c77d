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
from dataclasses import replace

from headrace.core.errors import BadRequest
from headrace.server.commands.connection import (
    ConnectionOptions,
    ServerAddress,
    add_arguments,
    connection_error_text,
    host_of,
    request,
)

_MAX_BODY_BYTES = 4096


def main(arguments: Sequence[str], address: ServerAddress, api_key: str = "") -> int:
    """Run the command.

    Args:
        arguments: command line after `health`.
        address: default server if no URL is given.
        api_key: value of HEADRACE_API_KEY. The server's health routes need no key, a proxy in front may.

    Returns:
        0 if the server is ready (with --live: if it responds at all), else 1; standard error has the reason.
    """
    text = "Exit status 0 while a server is ready, 1 if not: for health checks."
    parser = argparse.ArgumentParser(prog="headrace health", description=text)
    add = parser.add_argument
    add("--url", default=address.url, help="the server's address (%(default)s)")
    add("--live", action="store_true", help="check only that the server is live")
    add("--timeout", type=float, default=3.0, metavar="S", help="timeout of the check in seconds (%(default)s)")
    add_arguments(parser, api_key, prefix="--client-")  # names of earlier versions
    args = parser.parse_args(arguments)
    certificate = address.certificate if args.url == address.url and not args.ca else ""
    options = ConnectionOptions()
    try:
        host, is_tls = host_of(args.url)
        options = ConnectionOptions.from_arguments(args)
        warning = "" if is_tls else options.clear_text_warning(host)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)  # noqa: T201
        reason = readiness_error(args.url, args.live, args.timeout, options, certificate)
    except (OSError, http.client.HTTPException) as error:
        reason = connection_error_text(error, args.url, options)
    except (BadRequest, ValueError) as error:  # after OSError, because a certificate that is not trusted is both
        reason = str(error)
    word = "live" if args.live else "ready"
    if reason:
        print(f"{args.url} is not {word}: {reason}", file=sys.stderr)  # noqa: T201
        return 1
    print(word)  # noqa: T201
    return 0


def readiness_error(url: str, live: bool, timeout_s: float, options: ConnectionOptions, certificate: str = "") -> str:
    """Return the reason why a server is not ready, "" if it is.

    Args:
        url: address of the server.
        live: check only that it responds.
        timeout_s: for every wait.
        options: TLS files and key of the client.
        certificate: path of the server's own certificate (PEM), trusted whatever names it has; "" to check the name.

    Raises:
        BadRequest: a TLS file is invalid.
        OSError: no server listens, TLS fails, or no response comes in time.
        ValueError: the URL is not one of HTTP.
        http.client.HTTPException: the peer does not speak HTTP.
    """
    host, is_tls = host_of(url)
    context = _context(certificate, options) if is_tls else None
    path = f"/v2/health/{'live' if live else 'ready'}"
    status, body = request(url, path, timeout_s, options, context=context, max_bytes=_MAX_BODY_BYTES)
    if status == 200:
        return ""
    cure = options.refusal_cure(status, host)
    return f"{status} {_error_text(body)}".rstrip() + (f": {cure}" if cure else "")


def _error_text(body: bytes) -> str:
    """Error message of a response body, on one line without control characters: it is printed to terminals and logs."""
    text = body.decode("utf-8", "replace")
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["error"])
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:500]


def _context(certificate: str, options: ConnectionOptions) -> ssl.SSLContext:
    context = (replace(options, ca=certificate) if certificate else options).ssl_context()
    # Trust exactly the certificate that the server sends, whatever its names and issuer.
    context.check_hostname = not certificate
    return context
