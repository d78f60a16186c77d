"""TLS and the API key of every command that talks to a server: `--ca`, `--cert`, `--key`, `--api-key-file`.

The key is read from a file or from HEADRACE_API_KEY, never from the command line, which other users of the machine can
read. It is never printed. `headrace health` runs every few seconds, so this module imports only the standard library.
"""

from __future__ import annotations

import argparse
import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from headrace.core.errors import BadRequest, Unavailable

if TYPE_CHECKING:
    import grpc

API_KEY_VARIABLE = "HEADRACE_API_KEY"

# A key has 46 characters, a JSON Web Token with many claims a few thousand.
_MAX_API_KEY_BYTES = 16 * 1024
# OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH, X509_V_ERR_CERT_HAS_EXPIRED.
_WRONG_NAME, _EXPIRED = (62, 64), 10
_NAME_CURE = "write one of its names in the URL, or give the server a certificate for this name"
_CA_CURE = "name the CA that signed it, or the certificate itself, with --ca FILE"
_CLIENT_CURE = "send a client certificate that its --tls-client-ca signed: --cert FILE --key FILE"
_KEY_CURE = "--api-key-file FILE or the variable HEADRACE_API_KEY"


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """TLS files and the API key of a client.

    Attributes:
        ca: CA certificates (PEM) that sign the server's certificate, or that certificate itself; "" for the system's.
        cert: client certificate (PEM), with intermediate certificates after it; "" for none.
        key: private key of `cert` (PEM); "" if it stands in the same file.
        api_key: API key or JSON Web Token; "" for none.
        api_key_source: file or variable of the key, for messages.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    api_key: str = field(default="", repr=False)
    api_key_source: str = ""

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> ConnectionOptions:
        """Create options from arguments of `add_arguments`, and read the key's file.

        Raises:
            BadRequest: the file cannot be read, or holds no key.
        """
        if args.key and not args.cert:
            raise BadRequest("--key is the private key of a client certificate: name that one with --cert FILE")
        if args.api_key_file:
            return cls(args.ca, args.cert, args.key, read_api_key(args.api_key_file), args.api_key_file)
        api_key = _checked(args.api_key, API_KEY_VARIABLE) if args.api_key else ""
        return cls(args.ca, args.cert, args.key, api_key, API_KEY_VARIABLE if api_key else "")

    def headers(self) -> dict[str, str]:
        """Return the header that carries the key over HTTP, which is gRPC's metadata too; empty without a key."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def ssl_context(self) -> ssl.SSLContext:
        """Create a context for Python's TLS that checks the server's certificate and its name.

        Raises:
            BadRequest: a file cannot be read or is invalid.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:
            raise BadRequest(_unreadable("--ca", self.ca, "PEM certificates", error)) from None
        if self.ca:
            # A certificate that no CA signed is trusted where it is named itself.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if self.cert:
            try:
                # Without the empty passphrase OpenSSL would prompt on the terminal.
                context.load_cert_chain(self.cert, self.key or None, password="")
            except OSError as error:
                files = self.cert + (f" and {self.key}" if self.key else "")
                contents = "a PEM certificate and its private key without a passphrase"
                raise BadRequest(_unreadable("--cert", files, contents, error)) from None
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Create TLS credentials for grpcio, which only reports a failed connection for invalid files.

        Raises:
            BadRequest: a file cannot be read or is invalid.
        """
        import grpc  # commands of HTTP do not load it

        self.ssl_context()
        authorities = self.ca or ssl.get_default_verify_paths().cafile
        return grpc.ssl_channel_credentials(
            Path(authorities).read_bytes() if authorities else None,
            Path(self.key or self.cert).read_bytes() if self.cert else None,
            Path(self.cert).read_bytes() if self.cert else None,
        )

    def clear_text_warning(self, host: str) -> str:
        """Return a warning if the key would travel without TLS to another machine, else "".

        Args:
            host: name or address of the server, of a URL without TLS.
        """
        if not self.api_key or is_loopback(host):
            return ""
        return (
            f"the API key is sent to {host} without TLS, so everybody on the way can read it: "
            "use https:// (grpcs:// for gRPC) if the server has TLS"
        )

    def refusal_cure(self, status: int | str, host: str) -> str:
        """Return what to do about a status that refuses this client; "" for other statuses.

        Args:
            status: of HTTP, or the name of a gRPC status code.
            host: name or address that the client sent.
        """
        if status in (401, "UNAUTHENTICATED"):
            if not self.api_key:
                return f"the server needs an API key: name one with {_KEY_CURE}"
            return f"the server does not accept the API key of {self.api_key_source}: `headrace keys list` has the valid ones"
        if status in (403, "PERMISSION_DENIED") and self.api_key:
            return f"the API key of {self.api_key_source} does not allow it: use a key with that scope and model"
        if status == 421:
            return f"start the server with --allowed-host {host}, or write a name or address that it accepts in the URL"
        return ""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of the server that a command talks to unless its options name another: that of the settings on this machine.

    Attributes:
        host: value of `headrace serve --host`; an unspecified address (0.0.0.0, ::) stands for loopback here.
        port: HTTP port.
        certificate: path of the server's certificate (PEM), "" without TLS; `headrace health` trusts it whatever names and
            signature it has.
        grpc_port: gRPC port.
        named_url: URL of HEADRACE_URL, in place of host, port and TLS; "" without it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: str = ""
    grpc_port: int = 8001
    named_url: str = ""

    @property
    def url(self) -> str:
        """Base URL, e.g. "http://127.0.0.1:8000"."""
        if self.named_url:
            return self.named_url
        return f"{'https' if self.certificate else 'http'}://{self._bracketed_host()}:{self.port}"

    @property
    def grpc_target(self) -> str:
        """Address over gRPC, e.g. "127.0.0.1:8001"; with TLS "grpcs://127.0.0.1:8001"."""
        try:
            host, is_tls = (
                host_of(self.named_url) if self.named_url else (self._bracketed_host(), bool(self.certificate))
            )
        except ValueError:  # the request names the wrong URL
            return self.named_url
        return f"{'grpcs://' * is_tls}{host}:{self.grpc_port}"

    def _bracketed_host(self) -> str:
        host = self.host
        try:
            address = ip_address(host)
        except ValueError:
            pass
        else:
            if address.is_unspecified:
                host = "127.0.0.1" if address.version == 4 else "::1"
        return f"[{host}]" if ":" in host else host


DEFAULT_ADDRESS = ServerAddress()


def add_arguments(parser: argparse.ArgumentParser, api_key: str = "", prefix: str = "") -> None:
    """Declare `--ca`, `--cert`, `--key` and `--api-key-file`.

    Args:
        parser: of a command.
        api_key: value of HEADRACE_API_KEY, the key if no file is named.
        prefix: of second names of `--cert` and `--key`, e.g. "--client-"; "" for none.
    """
    add = parser.add_argument
    add("--ca", default="", metavar="FILE", help="CA that signed the server's certificate (PEM; the system's CAs)")
    certificate, key = (
        (["--cert"], ["--key"]) if not prefix else (["--cert", f"{prefix}cert"], ["--key", f"{prefix}key"])
    )
    add(*certificate, default="", metavar="FILE", help="client certificate (PEM)")
    add(*key, default="", metavar="FILE", help="private key of --cert (PEM)")
    add("--api-key-file", default="", metavar="FILE", help=f"file with the API key ({API_KEY_VARIABLE})")
    # Not as a default of an option, which --help would print.
    parser.set_defaults(api_key=api_key)


def read_api_key(file: str) -> str:
    """Read the key of a file with one line.

    Raises:
        BadRequest: the file cannot be read, or does not hold one word.
    """
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(_MAX_API_KEY_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"the API key file {file} cannot be read: {error.strerror}") from None
    return _checked(content.decode("latin-1"), f"the file {file}")


def _checked(text: str, source: str) -> str:
    """Strip a key; a message about another text does not contain it."""
    key = text.strip()
    if not key or len(text) > _MAX_API_KEY_BYTES or not all("!" <= letter <= "~" for letter in key):
        raise BadRequest(f"{source} holds no API key: expected one word, as `headrace keys new` prints it")
    return key


def is_loopback(host: str) -> bool:
    """True for a name or an address of this machine."""
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def host_of(url: str) -> tuple[str, bool]:
    """Return the host of an HTTP URL without its port, and whether the URL has TLS; a missing scheme is http.

    Raises:
        ValueError: the URL is not one of HTTP.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("no URL of an HTTP server")
    return parts.hostname, parts.scheme == "https"


def model_path(model: str, version: str = "") -> str:
    """Return the route of a model."""
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


def request(
    url: str,
    path: str,
    timeout_s: float,
    options: ConnectionOptions,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
    max_bytes: int | None = None,
) -> tuple[int, bytes]:
    """Send a request and return the response's status and body. Redirects are not followed: they would carry the key.

    Args:
        url: address of the server, e.g. "http://127.0.0.1:8000"; the scheme may be missing, a path is a prefix of
            every route.
        path: route, quoted.
        timeout_s: for connecting, and for every wait for bytes.
        options: TLS files and key.
        method: e.g. "POST".
        body: JSON of the request; None for none.
        headers: further headers.
        context: TLS settings in place of those of `options`.
        max_bytes: number of bytes of the body to read; None reads all.

    Raises:
        BadRequest: a TLS file is invalid.
        ValueError: the URL is not one of HTTP.
        OSError: no server listens, TLS fails, or no response comes in time.
        http.client.HTTPException: the peer does not speak HTTP, or closes the connection early.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    host, is_tls = host_of(url)
    connection = (
        http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=context or options.ssl_context())
        if is_tls
        else http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
    )
    content = {} if body is None else {"content-type": "application/json"}
    every_header = {**content, **options.headers(), **(headers or {})}
    try:
        connection.request(method, parts.path.rstrip("/") + path, body, every_header)
        response = connection.getresponse()
        return response.status, response.read(max_bytes)
    finally:
        connection.close()


def explained_request(
    url: str, path: str, timeout_s: float, options: ConnectionOptions, *, start: str, wait: str = "", **parts: Any
) -> tuple[int, bytes]:
    """Send a request as `request` does, with failures of the connection as errors that name a cure.

    Args:
        url, path, timeout_s, options: see `request`.
        start: cure if no server listens.
        wait: further cure if no response comes in time.
        parts: further arguments of `request`.

    Raises:
        Unavailable: no server listens, TLS fails, no response comes in time, or the peer does not speak HTTP.
        BadRequest: a TLS file is invalid.
        ValueError: the URL is not one of HTTP.
    """
    try:
        return request(url, path, timeout_s, options, **parts)
    except ConnectionRefusedError:
        raise Unavailable(f"no server answers at {url}: {start}") from None
    except TimeoutError:
        cure = f"the server may be busy or stopped; read its log{wait}"
        raise Unavailable(f"no answer from {url} within {timeout_s:g} s: {cure}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = connection_error_text(error, url, options)
        cure = "" if isinstance(error, ssl.SSLError) else "; check the address, and read the server's log"
        raise Unavailable(f"the connection to {url} failed: {reason}{cure}") from None


def connection_error_text(error: Exception, url: str, options: ConnectionOptions) -> str:
    """Describe a failed HTTP connection: the reason, and what to do where the reason is one of TLS.

    Args:
        error: OSError or HTTPException of `request`.
        url: address of the server.
        options: of the client.
    """
    host, is_tls = host_of(url)
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _WRONG_NAME:
            return f"the server's certificate is not for {host}: {_NAME_CURE}"
        if error.verify_code == _EXPIRED:
            return "the server's certificate has expired: renew it"
        return f"the server's certificate is not trusted ({error.verify_message}): {_CA_CURE}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED":
            return f"the server requires a client certificate: {_CLIENT_CURE}"
        if reason == "TLSV1_ALERT_UNKNOWN_CA":
            return f"the server does not trust the client certificate: {_CLIENT_CURE}"
        if reason == "WRONG_VERSION_NUMBER":
            return "the server does not speak TLS on this port: write http://"
        if not isinstance(error, ssl.SSLEOFError):
            return f"TLS: {reason or error}"
    text = str(error) or type(error).__name__
    if not is_tls and isinstance(error, ConnectionResetError | http.client.BadStatusLine):
        return f"{text}: if the server has TLS, write https://"
    # With TLS 1.3 the server looks at the client's certificate after the client has sent its request: the alert may be lost.
    if is_tls and isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError):
        return _closed_text(options)
    return text


def channel_error_text(details: str, options: ConnectionOptions, is_tls: bool) -> str:
    """Describe a failed gRPC connection by the text of grpcio, which has no code of the reason.

    Args:
        details: of the status UNAVAILABLE.
        options: of the client.
        is_tls: whether it used TLS.

    Returns:
        The reason and what to do; "" for other reasons than TLS.
    """
    if "Hostname Verification Check failed" in details:
        return f"the server's certificate is not for this host: {_NAME_CURE}"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        if "certificate has expired" in details:
            return "the server's certificate has expired: renew it"
        return f"the server's certificate is not trusted: {_CA_CURE}"
    if "WRONG_VERSION_NUMBER" in details:
        return "the server does not speak TLS on this port: write HOST:PORT without grpcs://"
    if "Expected SETTINGS frame" in details:
        return "the server speaks no gRPC on this port, but perhaps HTTP: write its gRPC port, 8001 by default"
    # The server's alert is lost: grpcio only reports that the connection was closed, or reset if data were on their way.
    is_closed = "Socket closed" in details or "Connection reset by peer" in details
    if is_closed and is_tls:
        return _closed_text(options)
    if is_closed:
        return "the server closed the connection: if it has TLS, write grpcs://HOST:PORT"
    return ""


def _closed_text(options: ConnectionOptions) -> str:
    reason = "does not trust the client certificate" if options.cert else "requires a client certificate"
    return f"the server closed the connection, probably because it {reason}: {_CLIENT_CURE}"


def _unreadable(option: str, files: str, contents: str, error: OSError) -> str:
    reason = f" ({error.reason or error})" if isinstance(error, ssl.SSLError) else f": {error.strerror}"
    if isinstance(error, ssl.SSLError):
        return f"{option} {files} holds no {contents.removeprefix('a ')}{reason}"
    return f"{option} {files} cannot be read{reason}: expected {contents}"
