"""The TLS files of the operator, as each server wants them; with a client CA, clients must show a certificate of it."""

from __future__ import annotations

import errno
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files.

    Attributes:
        certificate: of the server, with the intermediate ones after it.
        key: of the certificate, without a passphrase.
        client_ca: who signs the clients' certificates; "" if clients need none.
    """

    certificate: str
    key: str
    client_ca: str = ""

    def ssl_context(self, alpn: tuple[str, ...]) -> ssl.SSLContext:
        """For a server on Python's own TLS: TLS 1.2 at least, compression off (both are RFC 9113, section 9.2).

        Args:
            alpn: the protocols offered, e.g. ("h2",) or ("http/1.1",), the preferred one first; none if it is empty.

        Raises:
            OSError: a file cannot be read or is not what it should be; `strerror` says which.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        _read("certificate", self.certificate)
        _read("key", self.key)
        try:
            # Without the empty passphrase OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except ssl.SSLError as error:
            raise _unusable(
                f"the TLS certificate {self.certificate} and key {self.key} are no pair of PEM files that belong together"
                " (the key must have no passphrase)",
                error,
            ) from error
        if self.client_ca:
            _read("client CA", self.client_ca)
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise _unusable(f"the TLS client CA {self.client_ca} holds no PEM certificate", error) from error
            context.verify_mode = ssl.CERT_REQUIRED
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a server of grpcio; raises what `ssl_context` raises."""
        import grpc  # only here: who serves HTTP alone does without the library

        self.ssl_context(())  # grpcio says no more than "failed to bind" of files that are wrong
        authority = _read("client CA", self.client_ca) if self.client_ca else None
        pair = (_read("key", self.key), _read("certificate", self.certificate))
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def _read(what: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OSError(error.errno, f"the TLS {what} {path} cannot be read: {error.strerror}") from error


def _unusable(text: str, error: ssl.SSLError) -> OSError:
    return OSError(errno.EINVAL, f"{text}: {error.reason or 'no reason given'}")
