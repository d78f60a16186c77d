"""HTTP/1.1 client of prepared requests: one request in flight on each connection, keep-alive, no pipelining."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, cast

import orjson

from headrace_bench.pool import (
    BROKEN,
    CLOSED,
    ERROR_TEXT_BYTES,
    OK,
    TIMEOUT,
    WRONG,
    Answer,
    Pool,
    PoolOptions,
    now_s,
    timeout_text,
)

_HEAD_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 1 << 16
# Parsed heads that are remembered: most servers send the same one, or one a second with a new date.
_MAX_HEADS = 256
_JSON_BYTES = b"inference-header-content-length"
# Lengths of a body that its head does not give.
_CHUNKED, _UNTIL_CLOSE = -1, -2
_NO_BODY = (b"204", b"304")


class ResponseHead(NamedTuple):
    """Parsed head of a response.

    Attributes:
        status: of HTTP, e.g. 200; 0 if the head is malformed.
        length: of the body in bytes; below 0 for a chunked body and one that ends with the connection.
        closes: True if the connection ends with this response.
        json_bytes: see `Answer`.
    """

    status: int
    length: int
    closes: bool
    json_bytes: int


def parse_head(head: bytes) -> ResponseHead:
    """Parse status line and header fields of a response, without the blank line."""
    first, *lines = head.split(b"\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return ResponseHead(0, 0, True, -1)
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    length, json_bytes = fields.get(b"content-length", b""), fields.get(_JSON_BYTES, b"")
    connection = fields.get(b"connection", b"").lower()
    closes = b"close" in connection or (words[0] == b"HTTP/1.0" and b"keep-alive" not in connection)
    if b"chunked" in fields.get(b"transfer-encoding", b"").lower():
        size = _CHUNKED
    elif words[1] in _NO_BODY:
        size = 0
    else:
        size = int(length) if length.isdigit() else _UNTIL_CLOSE
    return ResponseHead(
        int(words[1]), size, closes or size == _UNTIL_CLOSE, int(json_bytes) if json_bytes.isdigit() else -1
    )


def read_chunks(data: bytes | bytearray, start: int) -> tuple[bytes, int] | None:
    """Decode a chunked body (RFC 9112, section 7.1) that begins at `start`.

    Returns:
        The body and the position after it; None if it is not complete.

    Raises:
        ValueError: the size of a chunk is not a number.
    """
    parts = []
    while True:
        end = data.find(b"\r\n", start)
        if end < 0:
            return None
        size = int(bytes(data[start:end]).partition(b";")[0], 16)
        start = end + 2
        if size == 0:
            break
        if start + size + 2 > len(data):
            return None
        parts.append(bytes(data[start : start + size]))
        start += size + 2
    while (end := data.find(b"\r\n", start)) > start:  # trailer fields
        start = end + 2
    return None if end < 0 else (b"".join(parts), end + 2)


def error_text(body: bytes) -> str:
    """Return the message of an error response: the field `error` or `detail` of JSON, or the beginning of the body."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    text = document.get("error") or document.get("detail") if isinstance(document, dict) else None
    return str(text if text else body.decode("utf-8", "replace"))[:ERROR_TEXT_BYTES]


class HttpPool(Pool):
    """Connections of HTTP/1.1.

    Args:
        requests: bytes of each prepared request, head and body.
        options: of the pool.
    """

    def __init__(self, requests: Sequence[bytes], options: PoolOptions) -> None:
        super().__init__(requests, options)
        self.idle: list[HttpConnection] = []
        self.connections: set[HttpConnection] = set()
        self.heads: dict[bytes, ResponseHead] = {}

    def start(self, index: int, due_s: float) -> bool:
        """Send a request on a free connection; False if there is none. The connection that was used last is the next one."""
        if not self.idle:
            return False
        self.idle.pop().send(index, due_s)
        return True

    def protocol(self) -> asyncio.BufferedProtocol:
        """Return the protocol object of a new connection."""
        return HttpConnection(self)

    def expire(self, oldest_s: float) -> None:
        """End requests that were sent before `oldest_s` with the status `TIMEOUT`. A connection whose answer is missing is
        closed, since the answer may still come.
        """
        for connection in [each for each in self.connections if each.is_busy and each.sent_s < oldest_s]:
            connection.fail(TIMEOUT, timeout_text(self.timeout_s))


class HttpConnection(asyncio.BufferedProtocol):
    """A connection with one request in flight at most.

    Attributes:
        is_busy: True from sending a request to its outcome.
        sent_s: time at which the last request was sent.
    """

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self._index = 0
        self._due_s = self.sent_s = 0.0
        self.is_busy = False
        # Bytes of a response that did not come in one read, and the number of them that it needs at least.
        self._partial = bytearray()
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport and send a waiting request."""
        self._transport = cast(asyncio.Transport, transport)
        self._pool.connections.add(self)
        self._pool.idle.append(self)
        self._pool.start_next()

    def send(self, index: int, due_s: float) -> None:
        """Send a request."""
        self._index, self._due_s = index, due_s
        self.is_busy = True
        self.sent_s = now_s()
        self._transport.write(self._pool.requests[index])

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the pool's buffer."""
        return self._pool.view

    def buffer_updated(self, nbytes: int) -> None:
        """Parse a response; most come in one read."""
        pool = self._pool
        if self._partial:
            self._partial += pool.view[:nbytes]
            if len(self._partial) >= self._needed:
                self._parse(self._partial)
            return
        buffer = pool.buffer
        end = buffer.find(_HEAD_END, 0, nbytes)
        if end > 0:
            raw = bytes(pool.view[:end])
            head = pool.heads.get(raw) or self._parse_head(raw)
            if head.length >= 0 and end + 4 + head.length == nbytes and head.status >= 200:
                if head.status == 200 and pool.check is None:
                    self._finish(head, OK, "")
                else:
                    self._answer(head, bytes(pool.view[end + 4 : nbytes]))
                return
        self._partial += pool.view[:nbytes]
        self._parse(self._partial)

    def eof_received(self) -> bool:
        """Let the transport close."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in flight, unless the end of the connection is the end of its response."""
        pool = self._pool
        if self not in pool.connections:
            return
        pool.connections.discard(self)
        if self in pool.idle:
            pool.idle.remove(self)
        pool.lost()
        if self.is_busy:
            end = self._partial.find(_HEAD_END)
            head = self._parse_head(bytes(self._partial[:end])) if end > 0 else None
            if head is not None and head.length == _UNTIL_CLOSE and exc is None:
                self._answer(head, bytes(self._partial[end + 4 :]))
                return
            self.is_busy = False
            text = str(exc) if exc is not None else "the server closed the connection before it answered"
            pool.finished(self._index, self._due_s, self.sent_s, CLOSED, text)

    def fail(self, status: str, text: str) -> None:
        """End the request in flight with an error, and close the connection."""
        self.is_busy = False
        self.abort()
        self._pool.lost()
        self._pool.finished(self._index, self._due_s, self.sent_s, status, text)

    def abort(self) -> None:
        """Close the connection at once."""
        self._pool.connections.discard(self)
        if self in self._pool.idle:
            self._pool.idle.remove(self)
        self._transport.abort()

    def _parse_head(self, raw: bytes) -> ResponseHead:
        heads = self._pool.heads
        if len(heads) >= _MAX_HEADS:
            heads.clear()
        head = heads[raw] = parse_head(raw)
        return head

    def _parse(self, data: bytearray) -> None:
        """Parse a response from the bytes received so far."""
        end = data.find(_HEAD_END)
        if end < 0:
            if len(data) > _MAX_HEAD_BYTES or not data.startswith(b"HTTP/"[: len(data)]):
                self.fail(BROKEN, "the server does not speak HTTP/1.1")
            return
        head = self._parse_head(bytes(data[:end]))
        start = end + 4
        if 100 <= head.status < 200:
            del data[:start]
            if data:
                self._parse(data)
            return
        if head.status == 0 or not self.is_busy:
            self._refuse()
        elif head.length == _CHUNKED:
            self._parse_chunks(head, data, start)
        elif head.length >= 0:
            self._needed = start + head.length
            if len(data) > self._needed:
                self.fail(BROKEN, f"the response has {len(data) - self._needed} bytes more than its content-length")
            elif len(data) == self._needed:
                self._answer(head, bytes(data[start:]))

    def _parse_chunks(self, head: ResponseHead, data: bytearray, start: int) -> None:
        try:
            decoded = read_chunks(data, start)
        except ValueError:
            self.fail(BROKEN, "the size of a chunk is not a number")
            return
        if decoded is not None:
            self._answer(head, decoded[0])

    def _refuse(self) -> None:
        """Close a connection with bytes that are no response to a request."""
        if self.is_busy:
            self.fail(BROKEN, "the server does not speak HTTP/1.1")
        else:  # e.g. a 408 of a server that closes an idle connection
            self.abort()
            self._pool.lost()

    def _answer(self, head: ResponseHead, body: bytes) -> None:
        """End the request with a response."""
        if head.status != 200:
            self._finish(head, str(head.status), error_text(body))
            return
        check = self._pool.check
        is_right = check is None or check(self._index, Answer(body, head.json_bytes))
        self._finish(head, OK if is_right else WRONG, "" if is_right else "differs from the first answer")

    def _finish(self, head: ResponseHead, status: str, text: str) -> None:
        pool = self._pool
        index, due_s, sent_s = self._index, self._due_s, self.sent_s
        self.is_busy = False
        if self._partial:
            self._partial.clear()
            self._needed = 0
        if head.closes:
            if self in pool.connections:
                self._transport.close()
                pool.connections.discard(self)
                pool.lost()
        else:
            pool.idle.append(self)
            if pool.backlog:
                pool.start_next()
        pool.finished(index, due_s, sent_s, status, text)
