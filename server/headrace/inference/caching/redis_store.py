"""Responses in a Redis server that several servers share (`--cache-config redis,host=...`).

No request depends on Redis: it waits a few milliseconds for an answer, and is computed without one. After errors or late answers
lookups stop at once, and a thread tries again in the background with growing delays. Every value is checked (`values.decode`).

Two threads, each with a connection of its own, so that a large response that is written delays no lookup:
- the reader takes all waiting lookups and sends them together;
- the writer stores responses from a queue with a limit in bytes, and drops those that do not fit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
from blake3 import blake3
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace.core.cache_options import RedisOptions, RedisTls
from headrace.core.clock import NS_PER_MS, monotonic_ns
from headrace.core.errors import ConfigError, Finding
from headrace.core.request import InferRequest
from headrace.inference.caching.values import (
    MAX_VALUE_BYTES,
    Lookup,
    RemoteWrite,
    StoredResponse,
    ValueRefused,
    decode,
    encode,
)

logger = logging.getLogger("headrace.cache")

# Lookups that are sent together: the answer to each may have `MAX_VALUE_BYTES`.
_BATCH = 16
_MAX_LOOKUPS = 1024
_MAX_WRITES = 1024
_MAX_WRITE_BYTES = 64 << 20
# Late answers in a row after which lookups stop: one alone may be a pause of this process.
_MAX_LATE = 3
_MIN_DELAY_S, _MAX_DELAY_S = 1.0, 60.0
# Connected for this long, an error is a new one: the delay begins again.
_STABLE_S = 10.0
# Bytes of an answer besides its value.
_ANSWER_BYTES = 4096
_IDLE_S = 1.0


class RedisStore:
    """Connection to Redis. `read`, `wait_ns` and `report_late` are called on the event loop, `write` on any thread.

    Args:
        options: server and timeouts.
        loop: event loop on which lookups are resumed.

    Attributes:
        is_up: True while lookups are sent.
        problem: reason why they are not; "" if they are.
        key_secret: 32 bytes, the key of the hash of keys; equal in all servers with the same secret.
        tls: state of TLS: "" without TLS, "TLS", or the version of the last connection, such as "TLSv1.3".

    Raises:
        ConfigError: the file with the secret, or one of TLS, cannot be read or used.
    """

    def __init__(self, options: RedisOptions, loop: asyncio.AbstractEventLoop) -> None:
        secret = _secret(options)
        self.key_secret = blake3(secret, derive_key_context="headrace response cache: keys, 1").digest()
        self._value_secret = blake3(secret, derive_key_context="headrace response cache: values, 1").digest()
        self.is_up, self.problem = False, "it has not connected yet"
        self._options, self._loop = options, loop
        self.tls = ""
        if options.tls is not None:
            tls_context(options.tls)
            self.tls = tls_text("TLS", options.tls)
            if not options.tls.verify:
                logger.warning(
                    "response cache: the certificate of Redis at %s is not checked (verify=false)", self.address
                )
        self._wait_ns = options.wait_timeout_ms * NS_PER_MS
        self._late = 0
        self._lookups: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[RemoteWrite | None] = queue.SimpleQueue()
        self._write_bytes = 0
        self._write_lock = threading.Lock()
        self._closing = threading.Event()
        self._up_s, self._delay_s, self._next_delay_s = 0.0, _MIN_DELAY_S, _MIN_DELAY_S
        self._threads = [
            threading.Thread(target=self._run_reader, name="headrace-cache-read", daemon=True),
            threading.Thread(target=self._run_writer, name="headrace-cache-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self._options.host}:{self._options.port}"

    # On the event loop

    def wait_ns(self, request: InferRequest, now_ns: int) -> int:
        """Return the time for which a request may wait for an answer; 0: it is computed without a lookup."""
        if not self.is_up or self._lookups.qsize() >= _MAX_LOOKUPS:
            return 0
        if request.deadline_ns:  # most of its time is for computing it
            return max(min(self._wait_ns, (request.deadline_ns - now_ns) // 4), 0)
        return self._wait_ns

    def read(self, lookup: Lookup) -> None:
        """Look a key up; `resume` is called on the event loop with the response or None, at any time."""
        self._lookups.put(lookup)

    def report_late(self) -> None:
        """Count a request that did not get its answer in time; several in a row stop lookups."""
        self._late += 1
        if self._late >= _MAX_LATE and self.is_up:
            self._stop(f"answers take longer than {self._options.wait_timeout_ms} ms")

    def _deliver(self, answers: Sequence[tuple[Lookup, StoredResponse | None]]) -> None:
        in_time = False
        for lookup, response in answers:
            in_time |= lookup.resume(response)
        if in_time and self.is_up:
            self._late = 0

    # On any thread

    def write(self, write: RemoteWrite) -> None:
        """Store a response in the background."""
        size_bytes = write.size_bytes
        with self._write_lock:
            fits = self._write_bytes + size_bytes <= _MAX_WRITE_BYTES and self._writes.qsize() < _MAX_WRITES
            if not self.is_up or size_bytes > MAX_VALUE_BYTES or not fits:
                write.totals.dropped += 1
                return
            self._write_bytes += size_bytes
        self._writes.put(write)

    def close(self) -> None:
        """End the threads; responses that are not written yet are dropped."""
        self._closing.set()
        self.is_up, self.problem = False, "the server is stopping"
        self._lookups.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join(1.0)

    # Reader

    def _run_reader(self) -> None:
        connection: _BoundedConnection | None = None
        is_first = True
        while not self._closing.is_set():
            if not self.is_up:
                _disconnect(connection)
                connection = None
                self._skip_lookups()
                if not is_first:
                    self._closing.wait(self._delay_s)
                is_first = False
                connection = self._connect()
                continue
            assert connection is not None
            batch = self._next_lookups()
            if not batch:
                continue
            try:
                values = connection.run([("GETRANGE", _name(each.key), 0, MAX_VALUE_BYTES) for each in batch])
            except Exception as error:  # also what the client raises for answers that are not Redis'
                self._stop(_reason(error))
                self._post([(each, None) for each in batch])
            else:
                self._post([(each, self._checked(each, value)) for each, value in zip(batch, values, strict=True)])
        _disconnect(connection)

    def _connect(self) -> _BoundedConnection | None:
        """Connect, and measure a round trip; None if Redis does not answer in the time for which a request waits."""
        connection = _BoundedConnection(self._options)
        try:
            connection.run([("PING",)])
            begun_ns = monotonic_ns()
            connection.run([("PING",)])
            trip_ns = monotonic_ns() - begun_ns
        except Exception as error:
            _disconnect(connection)
            self._retry_later(tls_problem(error, self._options) or _reason(error))
            return None
        if trip_ns > self._wait_ns:
            _disconnect(connection)
            self._retry_later(f"an answer took {trip_ns / NS_PER_MS:.1f} ms")
            return None
        self._late, self._up_s = 0, time.monotonic()
        if not self._closing.is_set():
            self.is_up, self.problem = True, ""
            if self._options.tls is not None:
                self.tls = tls_text(connection.tls_version(), self._options.tls)
            logger.info(
                "response cache: connected to Redis at %s%s", self.address, f" ({self.tls})" if self.tls else ""
            )
        return connection

    def _stop(self, problem: str) -> None:
        """Send no more lookups until the reader has connected again; the loop and the reader may both call it."""
        if not self.is_up:
            return
        self.is_up = False
        if time.monotonic() - self._up_s > _STABLE_S:
            self._next_delay_s = _MIN_DELAY_S
        self._retry_later(problem)

    def _retry_later(self, problem: str) -> None:
        """Set the reason and the delay of the next attempt, which doubles with each in a row."""
        if problem != self.problem:
            logger.warning("response cache: Redis at %s is not used: %s", self.address, problem)
        self.problem = problem
        self._delay_s, self._next_delay_s = self._next_delay_s, min(self._next_delay_s * 2, _MAX_DELAY_S)

    def _next_lookups(self) -> list[Lookup]:
        batch: list[Lookup] = []
        try:
            lookup = self._lookups.get(timeout=_IDLE_S)
            while lookup is not None:
                batch.append(lookup)
                if len(batch) == _BATCH:
                    break
                lookup = self._lookups.get_nowait()
        except queue.Empty:
            pass
        return batch

    def _skip_lookups(self) -> None:
        skipped: list[tuple[Lookup, StoredResponse | None]] = []
        try:
            while True:
                lookup = self._lookups.get_nowait()
                if lookup is not None:
                    skipped.append((lookup, None))
        except queue.Empty:
            self._post(skipped)

    def _checked(self, lookup: Lookup, value: object) -> StoredResponse | None:
        """Return the response of a value; None for none, and for one that is refused."""
        totals = lookup.totals
        if value == b"":
            totals.misses += 1
            return None
        try:
            if not isinstance(value, bytes):
                raise ValueRefused(_reason(value) if isinstance(value, Exception) else "it is no text")
            response = decode(value, lookup.key, lookup.spec, lookup.rows, lookup.outputs, self._value_secret)
        except ValueRefused as error:
            totals.refused += 1
            if totals.refused == 1:
                message = "model %s: response cache: a value of Redis at %s is refused, and its request computed: %s"
                logger.warning(message, lookup.spec.name, self.address, error)
            return None
        if response.expires_ms and response.expires_ms <= time.time() * 1000:
            totals.misses += 1
            return None
        return response

    def _post(self, answers: Sequence[tuple[Lookup, StoredResponse | None]]) -> None:
        for lookup, response in answers:
            lookup.response, lookup.is_answered = response, True
        try:
            self._loop.call_soon_threadsafe(self._deliver, answers)
        except RuntimeError:  # the loop is closed, so nothing waits
            self._closing.set()

    # Writer

    def _run_writer(self) -> None:
        connection: _BoundedConnection | None = None
        while not self._closing.is_set():
            write = self._writes.get()
            if write is None:
                continue
            with self._write_lock:
                self._write_bytes -= write.size_bytes
            try:
                if not self.is_up:
                    raise ConnectionError(self.problem)
                command = self._command(write)
                if command is None:
                    write.totals.dropped += 1
                    continue
                connection = connection or _BoundedConnection(self._options)
                (answer,) = connection.run([command])
                if isinstance(answer, Exception):  # such as "OOM command not allowed"
                    write.totals.dropped += 1
                else:
                    write.totals.stored += 1
            except Exception as error:
                write.totals.dropped += 1
                logger.debug("response cache: a response was not written to Redis: %s", _reason(error))
                _disconnect(connection)
                connection = None
        _disconnect(connection)

    def _command(self, write: RemoteWrite) -> tuple[Any, ...] | None:
        expires_ms = int(time.time() * 1000) + write.ttl_ms if write.ttl_ms else 0
        value = encode(write.key, write.outputs, write.spec, write.compute_ns, expires_ms, self._value_secret)
        if value is None:
            return None
        expiry = ("PX", write.ttl_ms) if write.ttl_ms else ()
        return ("SET", _name(write.key), value, *expiry)


class _BoundedSocket:
    """A socket that ends a connection whose answer is too long or too slow: what answers may not be Redis.

    Args:
        inner: the socket.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.left_bytes, self.until_ns = _ANSWER_BYTES, 0

    def recv(self, *args: Any) -> bytes:
        """As `socket.recv`."""
        data: bytes = self._inner.recv(*args)
        self._count(len(data))
        return data

    def recv_into(self, *args: Any, **options: Any) -> int:
        """As `socket.recv_into`."""
        size: int = self._inner.recv_into(*args, **options)
        self._count(size)
        return size

    def _count(self, size_bytes: int) -> None:
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise ConnectionError("the answer is too long")
        if self.until_ns and monotonic_ns() > self.until_ns:
            raise ConnectionError("the answer takes too long")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _BoundedConnection(redis.Connection):
    """A connection of one thread whose answers are limited in size and time.

    Args:
        options: server and timeouts.
    """

    def __init__(self, options: RedisOptions) -> None:
        self._limits: _BoundedSocket | None = None
        self._timeout_ms = options.socket_timeout_ms
        self._options = options
        super().__init__(  # type: ignore[no-untyped-call]
            host=options.host,
            port=options.port,
            db=options.db,
            username=options.user or None,
            password=options.password or None,
            socket_timeout=options.socket_timeout_ms / 1000,
            socket_connect_timeout=options.connect_timeout_ms / 1000,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )

    def _connect(self) -> Any:
        inner = super()._connect()  # type: ignore[no-untyped-call]
        if self._options.tls is not None:
            inner = handshake(inner, self._options, self._options.tls)
        self._limits = _BoundedSocket(inner)
        return self._limits

    def tls_version(self) -> str:
        """Return the version of TLS of the open connection, such as "TLSv1.3"."""
        assert self._limits is not None
        return str(self._limits.version())

    def run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands together and return their answers; an error of a single command is an answer.

        Raises:
            redis.RedisError, OSError, and any other: the connection is of no more use.
        """
        self.connect()  # type: ignore[no-untyped-call]  # a no-op while it is connected
        limits = self._limits
        assert limits is not None
        limits.left_bytes = sum(_ANSWER_BYTES + (MAX_VALUE_BYTES if each[0] == "GETRANGE" else 0) for each in commands)
        limits.until_ns = monotonic_ns() + self._timeout_ms * NS_PER_MS
        packed = self.pack_commands(commands)  # type: ignore[no-untyped-call]
        self.send_packed_command(packed, check_health=False)  # type: ignore[no-untyped-call]
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(self.read_response())
            except redis.ResponseError as error:
                answers.append(error)
        limits.until_ns = 0
        return answers


def _disconnect(connection: _BoundedConnection | None) -> None:
    if connection is not None:
        try:
            connection.disconnect()  # type: ignore[no-untyped-call]
        except Exception as error:  # it is of no use any more
            logger.debug("response cache: a connection to Redis was not closed cleanly: %r", error)


def _secret(options: RedisOptions) -> bytes:
    if not options.secret_file:
        return options.password.encode()
    try:
        secret = Path(os.path.expanduser(options.secret_file)).read_bytes().strip()
    except OSError as error:
        message = f"secret_file of the cache redis cannot be read: {error}"
        raise ConfigError(
            [Finding("--cache-config", None, message, "write the path of a file that the server may read")]
        ) from None
    return secret


def _name(key: bytes) -> str:
    return f"headrace:1:{key.hex()}"


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]


# TLS of the connection to Redis (`--cache-config redis,tls=true,ca=FILE`): its files, the handshake, and reasons of failures.

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
