"""TLS of the connection to Redis (`--cache-config redis,tls=true,ca=FILE`): its files, the handshake, and reasons of failures."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import redis

from headrace.core.cache_options import RedisOptions, RedisTls
from headrace.core.errors import ConfigError, Finding

# OpenSSL's codes of a certificate that has another name, email or IP address, and of one out of its time.
_WRONG_NAME = frozenset({62, 63, 64})
_EXPIRED = 10
# OpenSSL's reasons for an answer that is not TLS; they differ between versions.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
_PASSPHRASE_CURE = "and the passphrase of an encrypted key with key_password or HEADRACE_REDIS_KEY_PASSWORD"
_CLIENT_CURE = "name a certificate that it trusts with cert=FILE,key=FILE"


def tls_context(tls: RedisTls) -> ssl.SSLContext:
    """Read the files of TLS: version 1.2 or later, Redis checked against its authority and name.

    Called for each connection, so renewed files are used by the next one.

    Raises:
        ConfigError: a file cannot be read or used, or settings contradict each other.
    """
    if tls.is_disabled:
        raise _error("has tls=false and other settings of TLS", "remove tls=false, or the other settings")
    if tls.key and not tls.cert:
        raise _error("has a key without a certificate", "name the certificate with cert=FILE")
    if tls.key_password and not tls.cert:
        raise _error("has a key_password without a certificate", "name the certificate with cert=FILE")
    for name, path in (("ca", tls.ca), ("cert", tls.cert), ("key", tls.key)):
        try:
            if path:
                Path(path).read_bytes()
        except OSError as error:
            problem = f"has the {name} {path}, which cannot be read: {error.strerror}"
            raise _error(problem, "write the path of a PEM file that the server may read") from None
    if tls.ca_dir and not Path(tls.ca_dir).is_dir():
        raise _error(f"has the ca_dir {tls.ca_dir}, which is no folder", "write the path of a folder")
    try:
        context = ssl.create_default_context(cafile=tls.ca or None, capath=tls.ca_dir or None)
    except ssl.SSLError as error:
        raise _error(f"has the ca {tls.ca}, which holds no PEM certificate: {error.reason}", "name another") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.ca or tls.ca_dir:
        # A certificate that no CA signed is trusted where it is named itself.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if not tls.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls.cert:
        _load_certificate(context, tls)
    return context


def _load_certificate(context: ssl.SSLContext, tls: RedisTls) -> None:
    """Load the certificate and its private key; raises ConfigError, which never has the passphrase."""
    files = f"the cert {tls.cert} and the key {tls.key or 'in the same file'}"
    try:
        # With an empty passphrase, too: without one OpenSSL would prompt on the terminal.
        context.load_cert_chain(tls.cert, tls.key or None, password=tls.key_password)
    except ssl.SSLError as error:
        passphrase = "the passphrase key_password" if tls.key_password else "no passphrase"
        problem = (
            f"has {files}, which do not belong together: {error.reason or 'the key is no PEM'}, read with {passphrase}"
        )
        raise _error(problem, f"name a PEM certificate and its private key, {_PASSPHRASE_CURE}") from None
    except ValueError:  # of the module ssl: more bytes than OpenSSL takes
        raise _error(f"has {files}, whose key_password is too long", "encrypt the key with one of 1023 bytes") from None


def _error(problem: str, cure: str) -> ConfigError:
    return ConfigError([Finding("--cache-config", None, f"the cache redis {problem}", cure)])


def tls_text(version: str, tls: RedisTls) -> str:
    """Describe a connection for people who read reports, e.g. "TLSv1.3, certificate not checked"."""
    return version if tls.verify else f"{version}, certificate not checked"


def handshake(inner: socket.socket, options: RedisOptions, tls: RedisTls) -> ssl.SSLSocket:
    """Begin TLS on a connected socket, which is closed after an error.

    The handshake as a whole has the time to connect: answers of a busy Redis take less than computing its signature.

    Raises:
        OSError, redis.ConnectionError, ConfigError: there is no connection; `tls_problem` describes it.
    """
    try:
        inner.settimeout(options.connect_timeout_ms / 1000)
        secure = tls_context(tls).wrap_socket(inner, server_hostname=tls.sni or options.host)
        secure.settimeout(options.socket_timeout_ms / 1000)
        return secure
    except TimeoutError:  # Redis without TLS waits for the rest of a line
        inner.close()
        text = f"the handshake of TLS takes longer than {options.connect_timeout_ms} ms: its port may have no TLS"
        raise redis.ConnectionError(text) from None
    except BaseException:
        inner.close()
        raise


def tls_problem(error: Exception, options: RedisOptions) -> str:
    """Describe an error of TLS while a connection is opened, with what to do; "" for other errors.

    Args:
        error: of the client library, which has the error of TLS as its cause or context.
        options: of the connection.
    """
    tls = options.tls
    if tls is None:
        return ""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in _WRONG_NAME:
            return f"its certificate is not for {tls.sni or options.host}: name one that it is for with sni=NAME"
        cure = "renew it" if cause.verify_code == _EXPIRED else "name the authority that signed it with ca=FILE"
        return f"its certificate is refused ({cause.verify_message}): {cure}"
    reason = (cause.reason or "") if isinstance(cause, ssl.SSLError) else ""
    if reason in _NO_TLS:
        return "it does not use TLS on this port: name its TLS port with port=NUMBER"
    if "CERTIFICATE_REQUIRED" in reason:
        return f"it requires a client certificate: {_CLIENT_CURE}"
    if "ALERT" in reason:
        return f"it refuses the connection ({reason}){f': {_CLIENT_CURE}' if tls.cert else ''}"
    # With TLS 1.3 it looks at the client's certificate after the handshake of the client: the alert may be lost.
    if isinstance(cause, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError):
        verb = "does not trust the" if tls.cert else "requires a"
        return f"it closes the connection, probably because it {verb} client certificate: {_CLIENT_CURE}"
    return f"TLS: {reason or cause}" if isinstance(cause, ssl.SSLError) else ""
