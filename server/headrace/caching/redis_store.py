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
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
from blake3 import blake3
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace.caching.redis_tls import handshake, tls_context, tls_problem, tls_text
from headrace.caching.values import MAX_VALUE_BYTES, Lookup, RemoteWrite, StoredResponse, ValueRefused, decode, encode
from headrace.core.cache_options import RedisOptions
from headrace.core.clock import NS_PER_MS, monotonic_ns
from headrace.core.errors import ConfigError, Finding
from headrace.core.request import InferRequest

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
