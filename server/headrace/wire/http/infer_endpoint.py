"""Inference endpoint: `POST /v2/models/{model}[/versions/{version}]/infer` as an ASGI application.

This is the hot path: one coroutine for each request, and no framework between the socket and the codec.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Protocol

import msgspec
import orjson

from headrace.core.access import AccessControl, Principal
from headrace.core.clock import monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import BadRequest, Cancelled, HeadraceError, Unauthenticated, forget_frames
from headrace.core.limits import BodyReservation, ClientLimits
from headrace.core.request import InferResponse
from headrace.core.tensor import BYTES
from headrace.observability.labelled_counter import ERRORS
from headrace.wire.http.codec import IMAGE_BODY, Body, ModelCodec, check_json_bytes
from headrace.wire.http.origins import OriginPolicy
from headrace.wire.requests import compression
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.load_report import LoadHeaders
from headrace.wire.requests.request_options import NO_OPTIONS, RequestOptionsReader
from headrace.wire.requests.response_metadata import Header, Headers, header_lines, timing_headers
from headrace.wire.requests.service import InferenceService, PendingRequest, Wire
from headrace.wire.requests.services import Handle, InferenceServices
from headrace.wire.requests.status import http_status, retry_after_ms, retry_after_s
from headrace.wire.requests.tensor_codec import BodyBytes

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_ENDPOINT_HEADERS = frozenset(
    (
        *(b"accept-encoding", b"content-encoding", b"content-length", b"inference-header-content-length"),
        *(b"content-type", b"origin", b"sec-fetch-site"),
    )
)
_JSON_TYPE = (b"content-type", b"application/json")
_BINARY_TYPE = (b"content-type", b"application/octet-stream")
_STATUS_OK = b"HTTP/1.1 200 OK\r\n"
_JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
_BINARY_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
    b"inference-header-content-length: %d\r\ncontent-length: %d\r\n"
)


# Limits of the cache of parsed heads: number of entries, bytes of one head.
_MAX_HEADS = 256
# Client certificates with a cache of their own.
_MAX_CERTIFICATES = 64
_MAX_HEAD_BYTES = 4096


logger = logging.getLogger("headrace.http.infer_endpoint")


class Connection(Protocol):
    """Fast paths of our HTTP protocol; see `headrace.wire.http.connection`.

    Attributes:
        completion: completion of the running request, which a disconnect abandons; None for none.
        peer_names: names in the client certificate; empty without one.
    """

    completion: LoopCompletion | None
    peer_names: tuple[str, ...]

    @property
    def is_lost(self) -> bool:
        """True once the client has disconnected."""

    async def read_body(self, send: Send) -> bytes | BodyBytes | None:
        """Return the request body; None if the endpoint must call `receive` for it."""

    def remember_head(self, endpoint: InferEndpoint, head: ParsedHead) -> None:
        """Serve the next requests with the head of this request without the parser, if it allows that."""

    def write_response(self, send: Send, head: bytes, parts: Body) -> bool:
        """Write a complete response; returns False if it must be written by `write_response_later`."""

    async def write_response_later(self, send: Send, head: bytes, parts: Body) -> None:
        """Write a complete response after the client has read earlier ones."""


class InferHeaders:
    """Headers of an inference request.

    Attributes:
        accept_encoding: value of Accept-Encoding, several joined by commas; "" for none.
        content_encoding: in lower case, "" for none.
        content_length: bytes, 0 for none.
        cors: headers of the response that let a page of another origin read it.
        from_browser: True if the request has a header that only browsers send.
        header_size: layout of the body: Inference-Header-Content-Length in bytes; without it `IMAGE_BODY` for a content type of
            images, else None.
        options: request options.
    """

    __slots__ = (
        *("accept_encoding", "content_encoding", "content_length", "cors", "from_browser", "header_size", "options"),
    )

    def __init__(
        self,
        headers: list[tuple[bytes, bytes]],
        options_reader: RequestOptionsReader,
        peer: Principal | None = None,
    ) -> None:
        """Parse the headers.

        Args:
            headers: names and values; names in lower case.
            options_reader: parser of the request options.
            peer: principal of the client certificate, None for none.

        Raises:
            BadRequest: a header has an invalid value.
        """
        self.accept_encoding = ""
        self.content_encoding = ""
        self.content_length = 0
        self.cors: list[Header] = []
        self.from_browser = False
        self.header_size: int | None = None
        self.options = options_reader.no_options
        option_values: dict[str, str] = {}
        names = options_reader.wire_names
        is_image = False
        for name, value in headers:
            if name in names:
                options_reader.add(option_values, name, value)
            elif name not in _ENDPOINT_HEADERS:
                continue
            elif name == b"inference-header-content-length":
                self.header_size = _length(name, value)
            elif name == b"content-length":
                self.content_length = _length(name, value)
            elif name == b"content-encoding":
                self.content_encoding = value.decode("latin-1").strip().lower()
            elif name == b"content-type":
                is_image = value[:6].lower() == b"image/"
            elif name in (b"origin", b"sec-fetch-site"):
                self.from_browser = True
            else:
                accepted = value.decode("latin-1")
                self.accept_encoding = f"{self.accept_encoding},{accepted}" if self.accept_encoding else accepted
        if is_image and self.header_size is None:
            self.header_size = IMAGE_BODY
        if option_values or peer is not None:
            self.options = options_reader.read(option_values, peer)

    @property
    def is_repeatable(self) -> bool:
        """True if equal heads of later requests need no parsing."""
        options = self.options
        has_own = options.trace or options.routing or options.forwarded
        return not (self.content_encoding or has_own)


class ParsedHead(msgspec.Struct, frozen=True, eq=False):  # its attributes are read faster than those of a tuple
    """Parsed request line and headers of an inference request.

    Attributes:
        model: name.
        version: "" for the latest.
        headers: parsed headers.
        has_views: its inputs are views of the body, behind JSON that is small: decoding a large body takes no time.
    """

    model: str
    version: str
    headers: InferHeaders
    has_views: bool = False


WIRE = Wire("http", "200", lambda error: str(http_status(error)), load_in_parameters=False)


class InferEndpoint:
    """Serves inference requests over HTTP.

    Args:
        services: models, shared memory regions and the destination of request records.
        client_limits: limits of all requests.
        origins: checks requests of browsers; None allows the pages of the server only.

    Attributes:
        service: the steps of a request.
        origins: see Args.
    """

    def __init__(
        self, services: InferenceServices, client_limits: ClientLimits, origins: OriginPolicy | None = None
    ) -> None:
        self.origins = origins or OriginPolicy()
        regions, max_bytes = services.regions, client_limits.limits.max_body_bytes
        self.service = InferenceService(
            services, WIRE, lambda spec: ModelCodec(spec, regions, max_bytes, client_limits)
        )
        self._client_limits = client_limits
        self._options_reader = services.options_reader
        # Results of parsing, by the bytes of the head, for each client certificate: a head without a key has its principal.
        self._heads: dict[tuple[str, ...], dict[bytes, ParsedHead]] = {}
        services.access.on_change(self.forget_heads)
        self._load_reports = services.load_reports
        services.options_reader.on_change(self.forget_heads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, model: str, version: str) -> None:
        """Serve one request; never raises for an invalid request.

        Args:
            scope, receive, send: of ASGI.
            model: name.
            version: "" for the latest.
        """
        service = self.service
        pending = PendingRequest(model, version, monotonic_ns())
        connection: Connection | None = scope.get("headrace.connection")
        headers: InferHeaders | None = None

        def check() -> None:
            nonlocal headers
            headers = headers or self.parse_headers(scope)
            self.check_origin(scope, headers)
            pending.options = headers.options
            self.check_length(headers)
            if connection is not None and headers.is_repeatable and not service.needs_charge(headers.options):
                connection.remember_head(self, ParsedHead(model, version, headers, _has_views(pending, headers)))

        try:
            # `admit` checks the permission, and selects the version by a sticky header.
            if self._options_reader.access.has_keys or self._options_reader.routing_headers:
                headers = self.parse_headers(scope)
                pending.options = headers.options
                if service.needs_charge(headers.options):
                    await self._charge(pending, connection)
            # The deadline starts with the first bytes: the client's timeout includes the upload of the body.
            handle = service.admit(pending, check=check)
            assert headers is not None
            body = await self.read_body(send, receive, connection, headers, scope.get("headrace.reservation"))
            pending.received_ns = monotonic_ns()
            content = None
            if len(body) > LARGE_BYTES or service.has_shared_memory:
                content = await service.read_large(handle, body, headers.header_size)
                if connection is not None and connection.is_lost:
                    raise Cancelled("the client disconnected")
            completion = service.enqueue(pending, body, headers.header_size, parts=content)
            await _wait(completion, connection, receive)
            if service.is_large(pending, bool(headers.accept_encoding)):
                size, parts, extra_headers = await self.finish_large(pending)
            else:
                size, parts, extra_headers = self.finish(pending)
            if headers.cors:
                extra_headers = extra_headers.with_pairs(headers.cors)
        except (Exception, asyncio.CancelledError) as error:
            await self.respond_error(scope, send, error, pending)
            return
        try:
            await self.respond(send, connection, size, parts, headers.accept_encoding, extra_headers)
        except (Exception, asyncio.CancelledError) as error:
            await self.respond_error(scope, send, error, pending)

    async def respond_error(self, scope: Scope, send: Send, error: BaseException, pending: PendingRequest) -> None:
        """Respond with an error and count it."""
        if pending.options is NO_OPTIONS:  # failed before the headers were parsed
            try:
                pending.options = self.parse_headers(scope).options
            except Exception as second:  # the client gets the first error
                logger.debug("the headers of a failed request cannot be parsed: %r", second)
        failure, load_headers = self.fail(pending, error)
        forget_frames(error)
        if not isinstance(failure, Cancelled):
            await send_error(send, failure, [*load_headers, *self.origins.response_headers(scope["headers"])])

    def finish(
        self, pending: PendingRequest, encoded: tuple[int | None, Body] | None = None
    ) -> tuple[int | None, Body, Headers]:
        """Encode the response of a request whose completion is settled.

        Args:
            pending: the request.
            encoded: from `InferenceService.encode_large`, None to encode the response here.

        Returns:
            Size of the JSON header in front of binary tensors, None if there are none; parts of the body; further headers.

        Raises:
            HeadraceError: the request failed; the error is for the caller.
        """
        size, parts = self.service.finish(pending, encoded)
        assert pending.handle is not None
        handle = pending.handle
        load: LoadHeaders = handle.protocol_cache.get(self) or self._new_load_headers(handle)
        extra_headers = load.at(pending.done_ns, handle)
        if pending.options is not NO_OPTIONS or pending.template.timing:
            extra_headers = self.requested_headers(pending, extra_headers)
        return size, parts, extra_headers

    async def finish_large(self, pending: PendingRequest) -> tuple[int | None, Body, Headers]:
        """Encode a large response on a codec thread; see `finish`."""
        return self.finish(pending, await self.service.encode_large(pending))

    async def respond_large(
        self,
        pending: PendingRequest,
        headers: InferHeaders,
        write: Callable[[bytes, Body], None],
        fail: Callable[[PendingRequest, Exception], None],
    ) -> None:
        """Encode and compress a large response on codec threads, and write it.

        Args:
            pending: the request.
            headers: of the request.
            write: writes status line, headers and body.
            fail: responds with an error instead.
        """
        accept_encoding = headers.accept_encoding
        try:
            size, parts, extra_headers = await self.finish_large(pending)
            if headers.cors:
                extra_headers = extra_headers.with_pairs(headers.cors)
            run = self.service.codec_threads.run
            write(*await run(success_head, size, parts, accept_encoding, extra_headers))
        except asyncio.CancelledError as error:  # the drain timeout has passed
            self.fail(pending, error)
            raise
        except Exception as error:
            fail(pending, error)

    def fail(self, pending: PendingRequest, error: BaseException) -> tuple[HeadraceError, Sequence[Header]]:
        """Record a failed request; returns the error for the caller and further headers of its response."""
        failure = self.service.fail(pending, error)
        if pending.handle is None or failure is not error:
            return failure, ()
        return failure, self.load_headers(pending.handle, monotonic_ns()).pairs

    def heads(self, peer_names: tuple[str, ...]) -> dict[bytes, ParsedHead]:
        """Return the cache of parsed heads of a client certificate; empty names for connections without one."""
        if not self._options_reader.access.has_keys:
            peer_names = ()
        heads = self._heads.get(peer_names)
        if heads is None:
            if len(self._heads) >= _MAX_CERTIFICATES:
                self.forget_heads()
            heads = self._heads[peer_names] = {}
        return heads

    def keep_head(self, content: bytes, head: ParsedHead, heads: dict[bytes, ParsedHead]) -> None:
        """Cache the result of parsing a head in one of the caches; it is bounded and cleared when it is full."""
        if len(content) <= _MAX_HEAD_BYTES:
            if len(heads) >= _MAX_HEADS:
                heads.clear()
            heads[content] = head

    def forget_heads(self) -> None:
        """Empty all caches of heads, which connections hold: their principals or models have changed."""
        for heads in self._heads.values():
            heads.clear()
        self._heads.clear()

    def parse_headers(self, scope: Scope) -> InferHeaders:
        """Parse the headers of a request; raises BadRequest."""
        reader = self._options_reader
        return InferHeaders(scope["headers"], reader, peer_principal(scope, reader.access))

    def load_headers(self, handle: Handle, now_ns: int) -> Headers:
        """Return the headers with the load of a version; `now_ns` is monotonic."""
        return (handle.protocol_cache.get(self) or self._new_load_headers(handle)).at(now_ns, handle)

    def _new_load_headers(self, handle: Handle) -> LoadHeaders:
        load = handle.protocol_cache[self] = LoadHeaders(self._load_reports)
        return load

    def requested_headers(self, pending: PendingRequest, extra_headers: Headers) -> Headers:
        """Add the headers that a request enables: timing, and a load report in place of one in another format."""
        pairs = timing_headers(pending.parameters) if pending.parameters else []
        if pending.load is not None:
            report = self._load_reports.headers(pending.load, pending.done_ns, pending.options.load_format)
            if report:
                assert pending.handle is not None
                extra_headers, pairs = pending.handle.protocol_cache[self].brief, pairs + report
        return extra_headers.with_pairs(pairs) if pairs else extra_headers

    async def respond(
        self,
        send: Send,
        connection: Connection | None,
        header_size: int | None,
        parts: Body,
        accept_encoding: str,
        extra_headers: Headers,
    ) -> None:
        """Write a complete response, compressed if the client accepts it and it pays off.

        Args:
            send: of ASGI.
            connection: of the request; None under another ASGI server.
            header_size: size of the JSON in front of binary tensors, None for JSON alone.
            parts: of the body.
            accept_encoding: header of the request.
            extra_headers: of the response.
        """
        run, is_large = self.service.codec_threads.run, False
        if accept_encoding:
            is_large = sum(map(len, parts)) > LARGE_BYTES
            compress = partial(_success_headers, header_size, parts, accept_encoding)
            headers, parts = await run(compress) if is_large else compress()
            head = _STATUS_OK + header_lines(headers) + extra_headers.lines
        else:
            head, parts = success_head(header_size, parts, "", extra_headers)
        if connection is not None:
            if not connection.write_response(send, head, parts):
                await connection.write_response_later(send, head, parts)
            return
        if not accept_encoding:
            headers, parts = _success_headers(header_size, parts, "")
            is_large = sum(map(len, parts)) > LARGE_BYTES
        body = await run(b"".join, parts) if is_large else b"".join(parts)
        await _send(send, 200, [*headers, *extra_headers.pairs], body)

    async def _charge(self, pending: PendingRequest, connection: Connection | None) -> None:
        """Charge a request to a quota that another process keeps; raises as `InferenceService.charge`, and Cancelled."""
        await self.service.charge(pending)
        if connection is not None and connection.is_lost:
            raise Cancelled("the client disconnected")

    def check_origin(self, scope: Scope, headers: InferHeaders) -> None:
        """Check the origin of a request from a browser, and set the headers of its response; raises Forbidden."""
        if headers.from_browser:
            self.origins.check_inference(scope["headers"])
            headers.cors = self.origins.response_headers(scope["headers"])

    def check_length(self, headers: InferHeaders) -> None:
        """Check the size of a body before it is read; raises TooLarge."""
        limit = self._client_limits.limits.max_body_bytes
        if headers.content_length > limit:
            text = f"the body has {headers.content_length} bytes, at most {limit} are allowed"
            raise self._client_limits.too_large("max_body_bytes", text)
        if headers.header_size is None and not headers.content_encoding:
            check_json_bytes(headers.content_length, self._client_limits)

    async def read_body(
        self,
        send: Send,
        receive: Receive,
        connection: Connection | None,
        headers: InferHeaders,
        reservation: BodyReservation | None,
    ) -> bytes | BodyBytes:
        """Read and decompress the body of a request; raises TooLarge, BadRequest or Cancelled."""
        limit = self._client_limits.limits.max_body_bytes
        body = None if connection is None else await connection.read_body(send)
        if body is None:
            parts = await _receive_all(receive, self._client_limits)
            is_large = sum(map(len, parts)) > LARGE_BYTES
            body = await self.service.codec_threads.run(b"".join, parts) if is_large else b"".join(parts)
        elif len(body) > limit:
            raise self._client_limits.too_large("max_body_bytes", f"the body is larger than {limit} bytes")
        if headers.content_encoding:
            arguments = body, headers.content_encoding, self._client_limits
            if len(body) <= compression.MAX_INLINE_BYTES:
                body = compression.decompress(*arguments)
            else:
                body = await self.service.codec_threads.run(compression.decompress, *arguments)
            if reservation is not None:
                reservation.grow(len(body))
        return body


def _has_views(pending: PendingRequest, headers: InferHeaders) -> bool:
    assert pending.handle is not None
    is_binary = headers.header_size is not None and 0 <= headers.header_size <= LARGE_BYTES
    return is_binary and all(spec.datatype is not BYTES for spec in pending.handle.spec.inputs.values())


def peer_principal(scope: Scope, access: AccessControl) -> Principal | None:
    """Return the principal of the client certificate of a connection; None for none."""
    connection: Connection | None = scope.get("headrace.connection")
    if connection is None or not connection.peer_names or not access.has_keys:
        return None
    return access.certificate_principal(connection.peer_names)


def request_principal(scope: Scope, reader: RequestOptionsReader) -> Principal:
    """Return the principal of any HTTP request; raises BadRequest if it has two keys."""
    access = reader.access
    if not access.has_keys:
        return access.anonymous
    return reader.principal(reader.values(scope["headers"]), peer_principal(scope, access))


async def _receive_all(receive: Receive, client_limits: ClientLimits) -> list[bytes]:
    """Return the body in parts."""
    limit = client_limits.limits.max_body_bytes
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Cancelled("the client disconnected before its request was complete")
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            raise client_limits.too_large("max_body_bytes", f"the body is larger than {limit} bytes")
        if not message.get("more_body", False):
            return parts


async def _wait(completion: LoopCompletion, connection: Connection | None, receive: Receive) -> InferResponse:
    if connection is None:
        with abandoned_on_disconnect(completion, receive):
            return await completion
    connection.completion = completion
    try:
        return await completion
    except asyncio.CancelledError:  # the drain timeout of the shutdown has passed
        completion.abandon()
        raise
    finally:
        connection.completion = None


@contextmanager
def abandoned_on_disconnect(completion: LoopCompletion, receive: Receive) -> Iterator[None]:
    """Abandon a completion under another ASGI server.

    A task waits for the disconnect message. Some servers (Ray Serve) cancel the request instead.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        completion.abandon()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        completion.abandon()
        raise
    finally:
        watcher.cancel()


def success_head(
    header_size: int | None, parts: Body, accept_encoding: str, extra_headers: Headers
) -> tuple[bytes, Body]:
    """Status line and headers of a response with status 200, without the empty line; and the parts of its body, compressed if
    that pays off."""
    if accept_encoding:
        headers, parts = _success_headers(header_size, parts, accept_encoding)
        return _STATUS_OK + header_lines(headers) + extra_headers.lines, parts
    size = sum(map(len, parts))
    return _head_of_sizes(header_size, size) + extra_headers.lines, parts


@lru_cache(_MAX_HEADS)
def _head_of_sizes(header_size: int | None, size: int) -> bytes:
    return _JSON_HEAD % size if header_size is None else _BINARY_HEAD % (header_size, size)


def _success_headers(header_size: int | None, parts: Body, accept_encoding: str) -> tuple[list[Header], Body]:
    size = sum(map(len, parts))
    encoding = compression.select_encoding(accept_encoding, size) if accept_encoding else ""
    headers = [_JSON_TYPE]
    if header_size is not None:
        headers = [_BINARY_TYPE, (b"inference-header-content-length", b"%d" % header_size)]
    if encoding:
        parts = [compression.compress(parts, encoding)]
        size = len(parts[0])
        headers.append((b"content-encoding", encoding.encode()))
    headers.append((b"content-length", b"%d" % size))
    return headers, parts


def error_response(error: HeadraceError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Encode and count an error.

    Returns:
        Status, headers and JSON body `{"error": text}`. Headers have Retry-After and Retry-After-Ms if a retry can succeed,
        and WWW-Authenticate (RFC 9110, section 11.6.1) if a key is missing.
    """
    ERRORS.count("http", error.reason)
    body = orjson.dumps({"error": str(error).encode("utf-8", "replace").decode()})
    headers = [_JSON_TYPE, (b"content-length", b"%d" % len(body))]
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    delay_ms = retry_after_ms(error)
    if delay_ms is not None:
        headers += [
            (b"retry-after", b"%d" % (retry_after_s(error) or 1)),
            (b"retry-after-ms", b"%d" % delay_ms),
        ]
    return http_status(error), headers, body


async def send_error(send: Send, error: HeadraceError, extra_headers: Sequence[Header] = ()) -> None:
    """Respond with an error and extra headers."""
    status, headers, body = error_response(error)
    await _send(send, status, [*headers, *extra_headers], body)


async def send_method_not_allowed(send: Send) -> None:
    """Respond 405 to any method except POST."""
    body = orjson.dumps({"error": "method not allowed: send inference requests with POST"})
    headers = [_JSON_TYPE, (b"allow", b"POST"), (b"content-length", b"%d" % len(body))]
    await _send(send, 405, headers, body)


async def _send(send: Send, status: int, headers: Sequence[Header], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _length(name: bytes, value: bytes) -> int:
    # Digits only: int() accepts signs, blanks and underscores. No size has more than twenty digits.
    if not value.isdigit() or len(value) > 20:
        raise BadRequest(f"{name.decode()}: {value[:32]!r} is not a number of bytes")
    return int(value)


def content_length(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Return the Content-Length in bytes, 0 for none or an invalid one."""
    return _number(headers, b"content-length")


def json_length(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Return the size of the JSON in front of binary tensors in bytes, 0 for none or an invalid one."""
    return _number(headers, b"inference-header-content-length")


def _number(headers: Sequence[tuple[bytes, bytes]], header: bytes) -> int:
    for name, value in headers:
        if name == header and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
