"""TLS of the server: its files, contexts that follow them, and the expiry time of its certificate.

Python's TLS reports the expiry time of a peer's certificate only, so the certificate file is parsed here. A certificate is nested
values, each a tag, a length and content (DER, X.690). Only the validity field is read: the fifth field (RFC 5280, section 4.1),
or the fourth in a certificate without a version.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_END = "-----END CERTIFICATE-----"
_VERSION = 0xA0
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18


def certificate_expiry_s(path: str) -> float | None:
    """Return the expiry time of the first certificate in a PEM file, in seconds since 1970; None if it cannot be read."""
    try:
        first, end, _ = Path(path).read_text("ascii", "replace").partition(_END)
        begin = first.index("-----BEGIN CERTIFICATE-----")
        return _not_after(ssl.PEM_cert_to_DER_cert(first[begin:] + end)).timestamp()
    except (OSError, ValueError, IndexError):
        return None


def _not_after(certificate: bytes) -> datetime:
    """Return the end of validity; raises ValueError or IndexError if the bytes are not a certificate."""
    (_, whole), *_ = _values(certificate)
    (_, signed), *_ = _values(whole)
    fields = list(_values(signed))
    _, validity = fields[4 if fields[0][0] == _VERSION else 3]
    _, (tag, text) = _values(validity)
    digits = text.decode("ascii")
    if tag == _UTC_TIME:  # two-digit year: 50 and later are 1950 to 1999
        digits = ("19" if int(digits[:2]) >= 50 else "20") + digits
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _values(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each value."""
    at = 0
    while at < len(content):
        tag, length = content[at], content[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(content[at : at + size], "big")
            at += size
        yield tag, content[at : at + length]
        at += length


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files.

    Attributes:
        certificate: certificate of the server, followed by intermediate certificates.
        key: private key of the certificate, without a passphrase.
        client_ca: CA certificates that sign client certificates; "" if clients need none.
    """

    certificate: str
    key: str
    client_ca: str = ""

    def ssl_context(self, alpn: tuple[str, ...]) -> ssl.SSLContext:
        """Create a context for Python's TLS: TLS 1.2 or later, compression off (RFC 9113, section 9.2).

        Args:
            alpn: offered protocols, preferred first, e.g. ("h2",) or ("http/1.1",); empty for none.

        Raises:
            OSError: a file cannot be read or is invalid; `strerror` names it.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        _check_readable("certificate", self.certificate)
        _check_readable("key", self.key)
        try:
            # Without the empty passphrase OpenSSL would prompt on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except ssl.SSLError as error:
            raise _unusable(
                f"the TLS certificate {self.certificate} and key {self.key} are no pair of PEM files that belong together"
                " (the key must have no passphrase)",
                error,
            ) from error
        if self.client_ca:
            _check_readable("client CA", self.client_ca)
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise _unusable(f"the TLS client CA {self.client_ca} holds no PEM certificate", error) from error
            context.verify_mode = ssl.CERT_REQUIRED
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context


class ServerTls:
    """TLS of all listeners: contexts for new connections, which `reload` replaces together.

    Ownership: the event loop. `reload` reads files and may run on any thread, one call at a time; it replaces attributes as a
    whole.

    Args:
        files: paths of the files; the listeners' first contexts raise the errors of `TlsFiles.ssl_context`.

    Attributes:
        files: see Args.
        expiry_s: expiry time of the certificate in force, in seconds since 1970; None if it cannot be read.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.expiry_s = certificate_expiry_s(files.certificate)
        self._contexts: dict[tuple[str, ...], ssl.SSLContext] = {}

    def context(self, *alpn: str) -> ssl.SSLContext:
        """Return the context for new connections of a listener; see `TlsFiles.ssl_context`."""
        context = self._contexts.get(alpn)
        if context is None:
            context = self._contexts[alpn] = self.files.ssl_context(alpn)
        return context

    def reload(self) -> str:
        """Read the files again for new connections; open connections keep their certificate.

        Returns:
            What was reloaded, for the log.

        Raises:
            OSError: a file cannot be read or is invalid; the certificates in force stay.
        """
        self._contexts = {alpn: self.files.ssl_context(alpn) for alpn in self._contexts}
        self.expiry_s = certificate_expiry_s(self.files.certificate)
        expiry = (
            ""
            if self.expiry_s is None
            else f", valid until {datetime.fromtimestamp(self.expiry_s, UTC):%Y-%m-%d %H:%M} UTC"
        )
        return f"the TLS certificate {self.files.certificate}{expiry}"


def _check_readable(what: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise OSError(error.errno, f"the TLS {what} {path} cannot be read: {error.strerror}") from error


def _unusable(text: str, error: ssl.SSLError) -> OSError:
    return OSError(errno.EINVAL, f"{text}: {error.reason or 'no reason given'}")
