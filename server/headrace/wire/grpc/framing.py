"""Wire format of gRPC on HTTP/2: request headers, length-prefixed messages, status trailers.

Follows the gRPC project's documents "gRPC over HTTP2" (PROTOCOL-HTTP2.md), "Compression" and "Status codes".
"""

from __future__ import annotations

import re
from binascii import b2a_base64
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from headrace.core.errors import GRPC_CODES, BadRequest
from headrace.core.limits import ClientLimits
from headrace.wire.grpc.message_memory import MIN_DIRECT_BYTES, AllocateMessage
from headrace.wire.grpc.methods import DirectMethod, Methods, StreamMethod, UnaryMethod
from headrace.wire.grpc.status import ErrorStatus, error_status
from headrace.wire.http2.connection import MalformedHeadersError
from headrace.wire.http2.frames import DATA, END_HEADERS, END_STREAM, FRAME_HEADER, HEADERS, HeaderField, encode
from headrace.wire.requests.codec_threads import CodecThreads
from headrace.wire.requests.compression import MAX_INLINE_BYTES, decompress
from headrace.wire.requests.load_report import LOAD_TRAILER
from headrace.wire.requests.request_options import NO_OPTIONS, RequestOptions

_ENCODINGS = frozenset((b"identity", b"gzip", b"deflate"))
_ACCEPTED_ENCODINGS = "identity, deflate, gzip"
_UNIT_NS = {
    b"H": 3600 * NS_PER_S,
    b"M": 60 * NS_PER_S,
    b"S": NS_PER_S,
    b"m": NS_PER_MS,
    b"u": NS_PER_US,
    b"n": 1,
}
# A longer timeout counts as none.
_MAX_TIMEOUT_NS = 365 * 24 * 3600 * NS_PER_S
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BLANKS = (b" ", b"\t")
_PSEUDO = frozenset((b":method", b":scheme", b":authority", b":path"))
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))

_HTTP_BODY = b"this port serves gRPC: send POST with content-type application/grpc, or use the HTTP port\n"

PREFIX = Struct(">BI")
PREFIX_BYTES = PREFIX.size
# Memory of a received message besides its bytes: a client may send thousands of empty ones.
MESSAGE_OVERHEAD_BYTES = 64
unpack_prefix = PREFIX.unpack_from

# --- Responses ---------------------------------------------------------------------------------------------------------

_OK_STATUS: list[HeaderField] = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_INITIAL_HEADERS = encode([*_OK_STATUS, (b"grpc-accept-encoding", _ACCEPTED_ENCODINGS.encode())])
_OK = encode([(b"grpc-status", b"0")])
# A unary response: the HEADERS frame, the header of the DATA frame and the message's prefix; the message; the trailers.
# *_WORD: length and kind of a frame.
_RESPONSE_HEAD = Struct(f">IBI{len(_INITIAL_HEADERS)}sIBIBI")
_MESSAGE_HEAD = Struct(">IBIBI")
_TRAILERS = Struct(f">IBI{len(_OK)}s")
_HEADERS_WORD = len(_INITIAL_HEADERS) << 8 | HEADERS
_TRAILERS_WORD = len(_OK) << 8 | HEADERS


def unary_response(stream_id: int, message: bytes) -> tuple[bytes, bytes, bytes]:
    """Encode HEADERS, DATA and trailers of a successful unary call whose message fits into one frame."""
    size_bytes = len(message)
    data_word = size_bytes + PREFIX_BYTES << 8 | DATA
    return (
        _RESPONSE_HEAD.pack(
            _HEADERS_WORD, END_HEADERS, stream_id, _INITIAL_HEADERS, data_word, 0, stream_id, 0, size_bytes
        ),
        message,
        _TRAILERS.pack(_TRAILERS_WORD, END_HEADERS | END_STREAM, stream_id, _OK),
    )


def message_head(stream_id: int, size_bytes: int) -> bytes:
    """Encode the header of a DATA frame that has one message of `size_bytes`, and the prefix of the message."""
    return _MESSAGE_HEAD.pack(size_bytes + PREFIX_BYTES << 8 | DATA, 0, stream_id, 0, size_bytes)


def initial_headers(stream_id: int) -> bytes:
    """Encode the HEADERS frame before the first message."""
    return FRAME_HEADER.pack(_HEADERS_WORD, END_HEADERS, stream_id) + _INITIAL_HEADERS


def ok_trailers(stream_id: int, load_report: bytes = b"") -> bytes:
    """Encode the HEADERS frame that ends a successful call; `load_report` is serialized, b"" for none."""
    if load_report:
        return _trailers_frame(stream_id, [(b"grpc-status", b"0"), _report_field(load_report)])
    return _TRAILERS.pack(_TRAILERS_WORD, END_HEADERS | END_STREAM, stream_id, _OK)


def error_trailers(status: ErrorStatus, stream_id: int, headers_sent: bool, load_report: bytes = b"") -> bytes:
    """Encode the HEADERS frame that ends a failed call.

    Args:
        status: of the call.
        stream_id: of the call.
        headers_sent: True if `initial_headers` was sent before.
        load_report: serialized, b"" for none.
    """
    fields = _error_fields(status, headers_sent)
    if load_report:
        fields.append(_report_field(load_report))
    return _trailers_frame(stream_id, fields)


def _report_field(load_report: bytes) -> HeaderField:
    """Encode the trailer of a load report: base64 with padding, without which older releases of Envoy refuse it."""
    return LOAD_TRAILER.encode(), b2a_base64(load_report, newline=False)


def _error_fields(status: ErrorStatus, headers_sent: bool) -> list[HeaderField]:
    fields: list[HeaderField] = [] if headers_sent else [*_OK_STATUS]
    fields.append((b"grpc-status", b"%d" % GRPC_CODES[status.code]))
    if status.text:
        fields.append((b"grpc-message", percent_encode(status.text)))
    for name, value in status.metadata:  # binary values are sent in base64 without padding
        content = value.encode() if isinstance(value, str) else b2a_base64(value, newline=False).rstrip(b"=")
        fields.append((name.encode(), content))
    return fields


def percent_encode(text: str) -> bytes:
    """Encode a grpc-message: printable ASCII except "%" unchanged, every other byte of the UTF-8 text as %XX."""
    coded = bytearray()
    for byte in text.encode("utf-8", "replace"):
        coded += b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
    return bytes(coded)


def _trailers_frame(stream_id: int, fields: Iterable[HeaderField]) -> bytes:
    block = encode(fields)
    return FRAME_HEADER.pack(len(block) << 8 | HEADERS, END_HEADERS | END_STREAM, stream_id) + block


# --- Requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Parsed request headers of a call.

    Attributes:
        method: the method, None if the request has an immediate response.
        is_stream: True for a streaming method.
        timeout_ns: grpc-timeout; -1 for none.
        encoding: of messages with the compressed flag; "" for none.
        content_length: body size in bytes from content-length; -1 for none.
        options: request options from the metadata.
        rejection: header block of the immediate response, b"" if the call can be served. It is encoded once: a client may repeat
            the request at no cost of its own.
        exceeded_limit: name of the limit that the headers exceed, "" for none.
        direct: the method for calls without a task, None for none.
        needs_key: True if callers without rights are refused before the body is read.
        http_status: HTTP status of the response to a request that is not gRPC, 0 for none.
        http_body: text of that response; b"" for HEAD.
        option_headers: the metadata of `options`, by name.
    """

    method: UnaryMethod | StreamMethod | None = None
    is_stream: bool = False
    timeout_ns: int = -1
    encoding: str = ""
    content_length: int = -1
    options: RequestOptions = NO_OPTIONS
    rejection: bytes = b""
    http_status: int = 0
    http_body: bytes = b""
    exceeded_limit: str = ""
    needs_key: bool = False
    direct: DirectMethod | None = None
    option_headers: Mapping[str, str] = field(default_factory=dict)

    def http_headers(self, stream_id: int) -> bytes:
        """Encode the HEADERS frame of the response to a request that is not gRPC; `http_body` follows."""
        fields: list[HeaderField] = [
            (b":status", b"%d" % self.http_status),
            (b"content-type", b"text/plain; charset=utf-8"),
        ]
        if self.http_status == 405:
            fields.append((b"allow", b"POST"))
        block = encode(fields)
        return FRAME_HEADER.pack(len(block) << 8 | HEADERS, END_HEADERS, stream_id) + block

    def rejection_frame(self, stream_id: int) -> bytes:
        """Return the frame of the immediate response."""
        block = self.rejection
        return FRAME_HEADER.pack(len(block) << 8 | HEADERS, END_HEADERS | END_STREAM, stream_id) + block


def rejected(status: ErrorStatus, exceeded_limit: str = "") -> RequestHead:
    """Return the head of a call with an immediate error."""
    return RequestHead(rejection=encode(_error_fields(status, headers_sent=False)), exceeded_limit=exceeded_limit)


def parse_request_head(methods: Methods, fields: Sequence[HeaderField] | None) -> RequestHead:
    """Parse the header fields of a request.

    Args:
        methods: served methods.
        fields: header fields in order; None if they are too large.

    Raises:
        MalformedHeadersError: the fields are no HTTP/2 request.
    """
    if fields is None:
        return rejected(ErrorStatus("RESOURCE_EXHAUSTED", "the request's metadata are too large"), "max_header_bytes")
    headers = _validate_headers(fields)
    length = headers.get(b"content-length", b"")
    if length and not (length.isdigit() and len(length) < 20):
        raise MalformedHeadersError("content-length is not a number")
    content_length = int(length) if length else -1
    if headers[b":method"] != b"POST":
        body = b"" if headers[b":method"] == b"HEAD" else _HTTP_BODY
        return RequestHead(http_status=405, http_body=body, content_length=content_length)
    kind = headers.get(b"content-type", b"").lower()
    if not kind.startswith(b"application/grpc") or kind[16:17] not in (b"", b"+", b";"):
        return RequestHead(http_status=415, http_body=_HTTP_BODY, content_length=content_length)
    try:
        return _parse_grpc_headers(methods, fields, headers, content_length)
    except Exception as error:  # an error of the server ends the call, not the connection
        return rejected(error_status(error))


def _validate_headers(fields: Sequence[HeaderField]) -> dict[bytes, bytes]:
    """Check header fields (RFC 9113, sections 8.2 and 8.3); returns the last value of each name."""
    headers: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if name.startswith(b":"):
            if regular or name not in _PSEUDO or name in headers:
                raise MalformedHeadersError("a pseudo-header field is unknown, repeated or after other fields")
        else:
            regular = True
            if not _NAME.fullmatch(name) or name in _HOP_BY_HOP or (name == b"te" and value != b"trailers"):
                raise MalformedHeadersError("a header field that HTTP/2 does not allow")
        if _is_forbidden(value):
            raise MalformedHeadersError("a header value with forbidden characters")
        headers[name] = value
    if not (headers.get(b":method") and headers.get(b":scheme") and headers.get(b":path")):
        raise MalformedHeadersError("a pseudo-header field is missing")
    return headers


def _is_forbidden(value: bytes) -> bool:
    """Return True for a field value with NUL, CR, LF or a blank at its ends; a regular expression takes 29 ns for each byte."""
    if b"\0" in value or b"\r" in value or b"\n" in value:
        return True
    return value.startswith(_BLANKS) or value.endswith(_BLANKS)


def _parse_grpc_headers(
    methods: Methods, fields: Sequence[HeaderField], headers: dict[bytes, bytes], content_length: int
) -> RequestHead:
    path = headers[b":path"].decode("latin-1")
    unary, stream = methods.unary.get(path), methods.streams.get(path)
    if unary is None and stream is None:
        return rejected(ErrorStatus("UNIMPLEMENTED", f"no such method: {path[:256]}"))
    if b"te" not in headers:
        raise BadRequest(
            "the header 'te: trailers' is missing: check that every proxy in front of the server supports gRPC"
        )
    encoding = headers.get(b"grpc-encoding", b"identity")
    if encoding not in _ENCODINGS:
        text = f"grpc-encoding {encoding[:32].decode('latin-1')!r} is not supported: use identity, deflate or gzip"
        return rejected(ErrorStatus("UNIMPLEMENTED", text, (("grpc-accept-encoding", _ACCEPTED_ENCODINGS),)))
    reader = methods.options_reader
    options = reader.values(fields)
    return RequestHead(
        unary or stream,
        stream is not None,
        _timeout_ns(headers.get(b"grpc-timeout")),
        "" if encoding == b"identity" else encoding.decode(),
        content_length,
        reader.read(options),
        needs_key=path not in methods.open_paths,
        direct=methods.direct.get(path),
        option_headers=options,
    )


def _timeout_ns(value: bytes | None) -> int:
    if value is None:
        return -1
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise BadRequest("grpc-timeout is not 1 to 8 digits with one of the units H, M, S, m, u, n")
    timeout_ns = int(match[1]) * _UNIT_NS[match[2]]
    return timeout_ns if timeout_ns <= _MAX_TIMEOUT_NS else -1


class MessageReader:
    """Assembles the length-prefixed messages of one call from parts of its body.

    Args:
        encoding: see `RequestHead`.
        client_limits: limits of a message, both as received and decompressed.
        allocate: returns memory for large messages that are not compressed; None joins them as bytes.

    Attributes:
        missing_bytes: of the incomplete message; 0 if there is none or its prefix is incomplete.
    """

    def __init__(self, encoding: str, client_limits: ClientLimits, allocate: AllocateMessage | None = None) -> None:
        self._client_limits = client_limits
        self._allocate = allocate
        self._memory: memoryview | None = None  # of the incomplete message
        self._encoding = encoding
        self._prefix = b""
        self._compressed = self._is_direct = False
        self._parts: list[bytes | bytearray] = []
        self._messages: deque[tuple[bytes | memoryview, bool]] = deque()
        self.missing_bytes = 0

    @property
    def complete(self) -> int:
        """Number of complete messages to `pop`."""
        return len(self._messages)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to `pop`, and no message has begun."""
        return not (self._messages or self.missing_bytes or self._prefix)

    @property
    def partial(self) -> bool:
        """True if a message has begun and is incomplete."""
        return bool(self.missing_bytes or self._prefix)

    @property
    def is_large_compressed(self) -> bool:
        """True if the oldest complete message takes long to decompress: `pop_large` removes it."""
        return bool(self._messages) and self._messages[0][1] and len(self._messages[0][0]) > MAX_INLINE_BYTES

    def feed(self, data: bytes, start: int, stop: int) -> None:
        """Read bytes `start` to `stop` of `data`; raises TooLarge and BadRequest."""
        while start < stop:
            if not self.missing_bytes:
                if not self._prefix:
                    start = self._feed_complete(data, start, stop)
                    if start == stop:
                        return
                end = min(stop, start + PREFIX_BYTES - len(self._prefix))
                self._prefix += data[start:end]
                start = end
                if len(self._prefix) < PREFIX_BYTES:
                    return
                self._begin()
            end = min(stop, start + self.missing_bytes)
            if end > start:
                self._add(data, start, end)
                self.missing_bytes -= end - start
                start = end
            if not self.missing_bytes:
                memory, self._memory = self._memory, None
                self._messages.append((b"".join(self._parts) if memory is None else memory, self._compressed))
                self._parts.clear()

    def _feed_complete(self, data: bytes, start: int, stop: int) -> int:
        """Read the messages that are complete in `data`; returns the position after them. 0.4 us for each, else 3 us."""
        messages, limit, encoding = self._messages, self._client_limits.limits.max_body_bytes, self._encoding
        while stop - start >= PREFIX_BYTES:
            flag, length = unpack_prefix(data, start)
            end = start + PREFIX_BYTES + length
            if end > stop or length > limit or (flag and (flag > 1 or not encoding)):
                break
            messages.append((data[start + PREFIX_BYTES : end], flag == 1))
            start = end
        return start

    def _begin(self) -> None:
        flag, self.missing_bytes = unpack_prefix(self._prefix)
        self._prefix = b""
        if flag > 1 or (flag and not self._encoding):
            raise BadRequest(f"a message has the compressed flag {flag}, which its grpc-encoding does not allow")
        limit = self._client_limits.limits.max_body_bytes
        if self.missing_bytes > limit:
            text = f"a message of {self.missing_bytes} bytes; the limit is {limit}"
            raise self._client_limits.too_large("max_body_bytes", text)
        self._compressed = flag == 1
        self._is_direct = not flag and self._allocate is not None and self.missing_bytes > MIN_DIRECT_BYTES

    def _begin_direct(self, data: bytes, start: int, stop: int) -> memoryview:
        """Allocate memory for the message that begins with a piece."""
        assert self._allocate is not None
        return self._allocate(self.missing_bytes, memoryview(data)[start:stop])

    def _add(self, data: bytes, start: int, stop: int) -> None:
        """Store a piece of a message. Small pieces are merged, so that a million of them are not a million objects."""
        parts, memory = self._parts, self._memory
        if memory is None and self._is_direct and not parts:
            memory = self._memory = self._begin_direct(data, start, stop)
        if memory is not None:
            position = len(memory) - self.missing_bytes
            memory[position : position + stop - start] = memoryview(data)[start:stop]
            return
        if stop - start >= 8192:
            parts.append(data[start:stop])
        elif parts and type(parts[-1]) is bytearray:
            parts[-1] += data[start:stop]
        else:
            parts.append(bytearray(data[start:stop]))

    def pop(self) -> tuple[bytes | memoryview, int]:
        """Remove the oldest complete message; it is decompressed only now, when a reader needs it.

        Returns:
            The message, and its size in bytes as received, with `MESSAGE_OVERHEAD_BYTES`.

        Raises:
            TooLarge: the decompressed message exceeds the limit.
            BadRequest: the message cannot be decompressed.
        """
        message, compressed = self._messages.popleft()
        wire_bytes = PREFIX_BYTES + len(message) + MESSAGE_OVERHEAD_BYTES
        return decompress(message, self._encoding, self._client_limits) if compressed else message, wire_bytes

    async def pop_large(self, threads: CodecThreads) -> tuple[bytes, int]:
        """Remove the oldest complete message, which is compressed, and decompress it on a codec thread; see `pop`."""
        message, _ = self._messages.popleft()
        decompressed = await threads.run(decompress, message, self._encoding, self._client_limits)
        return decompressed, PREFIX_BYTES + len(message)
