"""ASGI application of the HTTP port: inference goes to `InferEndpoint`, every other path to the control plane on FastAPI.

FastAPI serves the route table of `routes`. Sizes of bodies, JSON depth and media types are checked before a handler runs.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from headrace.core.errors import BadRequest, Cancelled, HeadraceError
from headrace.core.limits import REGION_PATTERN, ClientLimits
from headrace.observability.metrics import canonical_accept
from headrace.wire.http.generate_endpoint import GenerateEndpoint
from headrace.wire.http.infer_endpoint import (
    InferEndpoint,
    Message,
    Receive,
    Scope,
    Send,
    error_response,
    request_principal,
    send_error,
    send_method_not_allowed,
)
from headrace.wire.http.json_text import check_json, check_size_without_strings, parse_json
from headrace.wire.http.origins import OriginPolicy
from headrace.wire.http.routes import JSON, TAGS, Page, Route, add_route, document, infer_routes, page_routes, routes
from headrace.wire.requests.codec_threads import LARGE_BYTES, CodecThreads
from headrace.wire.requests.operations import OperationCall, http_operation
from headrace.wire.requests.request_options import RequestOptionsReader
from headrace.wire.requests.response_metadata import Header
from headrace.wire.requests.service import internal_error
from headrace.wire.requests.services import ControlServices
from headrace.wire.requests.shared_runs import SharedRuns

logger = logging.getLogger("headrace.http")

Metrics = Callable[[str], tuple[str, bytes]]

# Ends of the paths of inference.
INFERENCE_PATHS = ("/infer", "/generate", "/generate_stream")
# JSON; media types of clients that name none (Triton's clients among them); and the default of `curl --data`.
_MEDIA_TYPES = ("", JSON, "text/plain", "application/octet-stream", "application/x-www-form-urlencoded")
# A percent-encoded slash, backslash or control character within one segment of the path: no name contains one.
_HIDDEN = re.compile(rb"%(?:2f|5c|[01][0-9a-f]|7f)", re.IGNORECASE)
# Characters of a decoder's message in an error: the message may repeat a key of the client's JSON.
_MAX_MESSAGE_CHARS = 200


def control_application(services: ControlServices, client_limits: ClientLimits, metrics: Metrics | None) -> FastAPI:
    """Create the FastAPI application of all routes except inference, which it only documents.

    Args:
        services: of the server.
        client_limits: limits of all requests; the full body size is allowed only for requests that may carry model files.
        metrics: renders /metrics: takes the header Accept, returns (content type, body), and may run on any thread. None if
            metrics have a port of their own.
    """
    app = FastAPI(
        title="Headrace",
        version=services.version,
        summary="An inference server that speaks the Open Inference Protocol V2.",
        openapi_tags=[{"name": name, "description": text} for name, text in TAGS.items()],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(HTTPException, _no_route)

    @functools.cache
    def openapi() -> bytes:
        return orjson.dumps(document(app, table, services.access.has_keys))

    table = [*infer_routes(), *routes(services, client_limits.limits.max_body_bytes), *_pages(metrics, openapi)]
    for route in table:
        add_route(app, route, _endpoint(route, client_limits, services.options_reader, services.codec_threads))
    return app


def check_path(raw_path: bytes) -> None:
    """Raise BadRequest for a path with a percent-encoded slash, backslash or control character."""
    if b"%" in raw_path and _HIDDEN.search(raw_path):
        raise BadRequest(
            "no such path: a name in it has a slash, a backslash or a control character, which names never have"
        )


def _endpoint(
    route: Route, client_limits: ClientLimits, reader: RequestOptionsReader, threads: CodecThreads
) -> Callable[[Request], Awaitable[Response]]:
    """Make the function that runs a route and encodes its result or error; it never raises for an invalid request.

    Raises:
        LookupError: the route has no scope.
    """
    operation = http_operation(route.method, route.path)
    has_keys = reader.access.has_keys

    async def run(request: Request) -> object:
        parameters = request.path_params
        target = parameters.get("model", "") or parameters.get("region", "")
        principal = request_principal(request.scope, reader)
        with OperationCall(operation, principal, "http", _peer(request), target) as call:
            call.require(parameters.get("model", ""))  # before the body is read
            if route.permit is not None:
                route.permit(parameters.get("model", ""))
            arguments = await _arguments(route, request, client_limits, threads)
            if route.filters:
                arguments["principal"] = principal
            result = route.run(**arguments)
            return await result if isinstance(result, Awaitable) else result

    async def endpoint(request: Request) -> Response:
        response = await respond(request)
        if has_keys:  # an answer to one key must not be stored for others
            response.headers.setdefault("cache-control", "no-store")
        return response

    async def respond(request: Request) -> Response:
        try:
            result = await run(request)
            if result is None:
                return Response()
            if isinstance(result, Page):
                return Response(result.content, headers={"content-type": result.media_type})
            content = result if isinstance(result, bytes) else _json(result)
            return Response(content, headers={**route.headers, "content-type": route.media_type})
        except HeadraceError as error:
            return _error(error)
        except Exception as error:
            return _error(internal_error(error, logger))

    return endpoint


async def _arguments(
    route: Route, request: Request, client_limits: ClientLimits, threads: CodecThreads
) -> dict[str, Any]:
    """Collect the keyword arguments of `Route.run`: path parameters, fields of the body, the header Accept."""
    arguments: dict[str, Any] = dict(request.path_params)
    if re.fullmatch(REGION_PATTERN, arguments.get("region", "_")) is None:
        region = arguments["region"][:64]
        raise BadRequest(f"{region!r} is not a valid name of a region: it must match {REGION_PATTERN}")
    if route.body is not None:
        _check_media_type(request)
        parts = await _read(request, route.max_body_bytes, client_limits)
        if sum(map(len, parts)) <= LARGE_BYTES:
            body = _decode(parts, route, client_limits)
        else:
            body = await threads.run(_decode, parts, route, client_limits)
        arguments |= msgspec.to_builtins(body)
    for name in route.query:
        arguments[name] = request.query_params.get(name, "")
    if route.negotiates:
        arguments["accept"] = request.headers.get("accept", "")
    return arguments


def _peer(request: Request) -> str:
    """Return the address of the client as in a URL; "" if the server does not report it."""
    client = request.client
    return (
        ""
        if client is None
        else f"[{client.host}]:{client.port}"
        if ":" in client.host
        else f"{client.host}:{client.port}"
    )


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _MEDIA_TYPES:
        raise BadRequest(f"content-type {media_type[:64]!r} is not supported on this route: send {JSON}")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise BadRequest("content-encoding is not supported on this route: send the JSON uncompressed")


async def _read(request: Request, limit: int, client_limits: ClientLimits) -> list[bytes]:
    """Read the body in parts: to join 60 MiB takes 50 ms. Raises TooLarge or Cancelled."""
    declared = request.headers.get("content-length", "")
    parts: list[bytes] = []
    size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    if size <= limit:
        size = 0
        try:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limit:
                    break
        except ClientDisconnect:
            raise Cancelled("the client disconnected before its request was complete") from None
    if size > limit:
        raise client_limits.too_large(
            "max_body_bytes", f"the body is larger than {limit} bytes, the limit of this route"
        )
    return parts


def _decode(parts: list[bytes], route: Route, client_limits: ClientLimits) -> Any:
    """Decode the body as the type of the route; raises BadRequest."""
    content = b"".join(parts)  # of a large body, on a codec thread and without the interpreter lock
    parts.clear()
    if not content and not route.body_required:
        content = b"{}"
    if len(content) > LARGE_BYTES:
        check_size_without_strings(content)
    check_json(content, client_limits)
    try:
        return msgspec.convert(parse_json(content, parse_float=_number, parse_constant=_no_constant), route.body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body does not match the schema of this route: {_shorten(error)}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
        raise BadRequest(f"the body is not valid JSON: {_shorten(error)}") from None


def _number(text: str) -> float | int:
    # In JSON Schema, and so in the OpenAPI document, 1.0 is an integer.
    number = float(text)
    return int(number) if number.is_integer() else number


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")


def _shorten(error: Exception) -> str:
    text = str(error)
    return (
        text
        if len(text) <= _MAX_MESSAGE_CHARS
        else f"{text[: _MAX_MESSAGE_CHARS // 2]}...{text[-_MAX_MESSAGE_CHARS // 2 :]}"
    )


def _json(result: object) -> bytes:
    try:
        return orjson.dumps(result, default=_to_dict)
    except TypeError:  # a file name that is not UTF-8, or an integer beyond 64 bits
        return json.dumps(result, default=_to_dict, ensure_ascii=False).encode("utf-8", "replace")


def _to_dict(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _error(error: HeadraceError) -> Response:
    status, headers, content = error_response(error)
    return Response(content, status, {name.decode(): value.decode() for name, value in headers})


async def _no_route(request: Request, error: Exception) -> Response:
    """Respond 404 or 405 to a request for which Starlette has no endpoint."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text, headers = "no such path; /docs lists all routes", {"content-type": JSON}
    if status == 405:
        matches = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
        methods = {method for route in matches for method in route.methods}
        headers["allow"] = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
        text = f"method not allowed: use {headers['allow']}"
    return Response(orjson.dumps({"error": text}), status, headers)


def _pages(metrics: Metrics | None, openapi: Callable[[], bytes]) -> Iterator[Route]:
    async def describe() -> bytes:
        # In a thread: the first request generates the document, which takes about 0.1 s.
        return await asyncio.to_thread(openapi)

    yield Route("pages", "/openapi.json", "This document, for programs", describe, dict[str, Any])
    yield from page_routes(metrics is not None)
    if metrics is not None:
        scrapes, media_type = SharedRuns(metrics), metrics("")[0]

        async def scrape(accept: str) -> Page:
            # In a thread: with many models, rendering would delay inference requests.
            return Page(*await scrapes.result(canonical_accept(accept)))

        yield Route("pages", "/metrics", "For Prometheus", scrape, str, media_type=media_type, negotiates=True)


class HttpApplication:
    """ASGI application that dispatches requests by path: inference requests bypass FastAPI.

    Args:
        services: of the server.
        client_limits: limits of all connections and requests.
        metrics: see `control_application`.
        origins: checks requests of browsers; None allows the pages of the server only.
    """

    def __init__(
        self,
        services: ControlServices,
        client_limits: ClientLimits,
        metrics: Metrics | None,
        origins: OriginPolicy | None = None,
    ) -> None:
        self._origins = origins or OriginPolicy()
        infer = InferEndpoint(services, client_limits, self._origins)
        generate = GenerateEndpoint(services, client_limits, infer)
        self._inference: dict[str, Callable[[Scope, Receive, Send, str, str], Awaitable[None]]] = {
            "infer": infer,
            "generate": generate.respond_once,
            "generate_stream": generate.respond_each,
        }
        self._control = control_application(services, client_limits, metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; other ASGI scopes (lifespan, WebSocket) are ignored."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if path.endswith(INFERENCE_PATHS) and path.startswith("/v2/models/"):
            parts = path.split("/")
            if len(parts) == 5 or (len(parts) == 7 and parts[4] == "versions" and parts[5]):
                if scope["method"] == "OPTIONS" and await self._answer_preflight(scope, send):
                    return
                if scope["method"] != "POST":
                    await send_method_not_allowed(send)
                    return
                serve = self._inference[parts[-1]]
                await serve(scope, receive, send, parts[3], parts[5] if len(parts) == 7 else "")
                return
        if self._origins.has_cors:
            if await self._answer_preflight(scope, send):
                return
            send = _with_headers(send, self._origins.response_headers(scope["headers"]))
        try:
            self._origins.check_control(scope["method"], scope["headers"])
            check_path(scope["raw_path"])
        except HeadraceError as error:
            await send_error(send, error)
            return
        if scope["method"] == "HEAD":  # the protocol drops the body by the method in its own scope
            scope = {**scope, "method": "GET"}
        await self._control(scope, receive, send)

    async def _answer_preflight(self, scope: Scope, send: Send) -> bool:
        """Respond to a preflight request of CORS, which has no key; returns False if the request is none."""
        try:
            headers = self._origins.preflight(scope["method"], scope["headers"])
        except HeadraceError as error:
            await send_error(send, error)
            return True
        if headers is None:
            return False
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return True


def _with_headers(send: Send, headers: Sequence[Header]) -> Send:
    """Return a `send` that adds headers to the response."""

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return sender
