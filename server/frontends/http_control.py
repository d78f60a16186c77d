"""The HTTP control plane: the routes of `http_routes` behind FastAPI, with bounds on all that comes in."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server.core.errors import BadRequest, Cancelled, HeadraceError, ModelFailed
from server.core.limits import Door
from server.core.names import REGION_PATTERN
from server.frontends.http_infer import error_answer
from server.frontends.http_routes import JSON, Call, Page, Route, routes
from server.frontends.json_bounds import check_json, unique
from server.frontends.models import Services
from server.frontends.openapi import page
from server.frontends.pages import page_routes

logger = logging.getLogger("headrace.http")

Metrics = Callable[[str], tuple[str, bytes]]

# JSON by its name; what clients send that name none (Triton's among them); and what curl sends if it is not told better.
_MEDIA_TYPES = ("", JSON, "text/plain", "application/octet-stream", "application/x-www-form-urlencoded")
# A slash, a backslash or a control character that hides in one segment of the path: nothing here has such a name.
_HIDDEN = re.compile(rb"%(?:2f|5c|[01][0-9a-f]|7f)", re.IGNORECASE)
# As much of a decoder's message as is shown: it may repeat a key that the client has chosen.
_MAX_SHOWN = 200


def control_application(services: Services, door: Door, metrics: Metrics | None) -> FastAPI:
    """Everything but inference.

    Args:
        services: of the server.
        door: the limits on requests; the whole of a body only for what may carry a model's files.
        metrics: given the header Accept, gives the page for Prometheus as (content type, body), on any thread; None if it is
            served elsewhere.
    """
    app = FastAPI(title="Headrace", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _no_route)
    described = b""
    table = [*routes(services, door.limits.max_body_bytes), *_pages(metrics, lambda call: described)]
    described = orjson.dumps(page(table, services.version))
    by_path: dict[str, list[Route]] = {}
    for route in table:
        by_path.setdefault(route.path, []).append(route)
    for path, of_path in by_path.items():
        methods = [route.method for route in of_path]
        app.add_api_route(path, _endpoint(of_path, door), methods=["HEAD", *methods] if "GET" in methods else methods)
    return app


def check_path(raw_path: bytes) -> None:
    """Refuse a path whose segments are not what they seem; raises BadRequest."""
    if b"%" in raw_path and _HIDDEN.search(raw_path):
        raise BadRequest(
            "no such path: a name in it has a slash, a backslash or a control character, and none here has"
        )


def _endpoint(of_path: Sequence[Route], door: Door) -> Callable[[Request], Awaitable[Response]]:
    by_method = {route.method: route for route in of_path}
    if "GET" in by_method:
        by_method["HEAD"] = by_method["GET"]  # the protocol sends the head alone

    async def endpoint(request: Request) -> Response:
        return await _answer(by_method[request.method], request, door)

    return endpoint


async def _answer(route: Route, request: Request, door: Door) -> Response:
    """Run a route; never raises for what the client did."""
    try:
        result = route.run(await _call(route, request, door))
        if isinstance(result, Awaitable):
            result = await result
        if result is None:
            return Response()
        if isinstance(result, Page):
            return Response(result.content, headers={"content-type": result.media_type})
        content = result if isinstance(result, bytes) else _json(result)
        return Response(content, headers={**route.headers, "content-type": route.media_type})
    except HeadraceError as error:
        return _error(error)
    except Exception:
        reference = uuid.uuid4().hex[:12]
        logger.exception("request failed in the control plane (reference %s)", reference)
        return _error(ModelFailed(f"the server failed on this request; its log has the cause ({reference})"))


async def _call(route: Route, request: Request, door: Door) -> Call:
    names: Mapping[str, str] = request.path_params
    if re.fullmatch(REGION_PATTERN, names.get("region", "_")) is None:
        raise BadRequest(f"{names['region'][:64]!r} cannot be the name of a region: it must match {REGION_PATTERN}")
    body = None
    if route.body is not None:
        _check_media_type(request)
        body = _decode(await _read(request, route.max_body_bytes, door), route, door)
    accept = request.headers.get("accept", "")
    return Call(names.get("model", ""), names.get("version", ""), names.get("region", ""), body, accept)


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _MEDIA_TYPES:
        raise BadRequest(f"content-type {media_type[:64]!r} is not taken here: send {JSON}")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise BadRequest("content-encoding is not taken here: send the JSON as it is")


async def _read(request: Request, limit: int, door: Door) -> bytes:
    """The body; raises TooLarge or Cancelled."""
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
            raise Cancelled("the client left before its request had arrived") from None
    if size > limit:
        raise door.too_large("max_body_bytes", f"the body is larger than the {limit} bytes that are taken here")
    return b"".join(parts)


def _decode(content: bytes, route: Route, door: Door) -> Any:
    """The body as the route's type; raises BadRequest."""
    if not content and not route.body_required:
        content = b"{}"
    check_json(content, door)
    try:
        parsed = json.loads(
            content.decode(), object_pairs_hook=unique, parse_float=_number, parse_constant=_no_constant
        )
        if b"\\u" in content:  # halves of surrogate pairs: no text in UTF-8 has them
            json.dumps(parsed, ensure_ascii=False).encode()
        return msgspec.convert(parsed, route.body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body is not what is expected here: {_shown(error)}") from None
    except (ValueError, RecursionError) as error:  # the codec's errors are ValueErrors too
        raise BadRequest(f"the body is not valid JSON: {_shown(error)}") from None


def _number(text: str) -> float | int:
    # To JSON Schema, which the page is written in, 1.0 is an integer.
    number = float(text)
    return int(number) if number.is_integer() else number


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")


def _shown(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]}...{text[-_MAX_SHOWN // 2 :]}"


def _json(result: object) -> bytes:
    try:
        return orjson.dumps(result, default=_plain)
    except TypeError:  # a name that is not UTF-8, as a file system may have it, or a number beyond 64 bits
        return json.dumps(result, default=_plain, ensure_ascii=False).encode("utf-8", "replace")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _error(error: HeadraceError) -> Response:
    status, headers, content = error_answer(error)
    return Response(content, status, {name.decode(): value.decode() for name, value in headers})


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer what Starlette's router found no endpoint for."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text, headers = "no such path; /docs lists what there is", {"content-type": JSON}
    if status == 405 and isinstance(error, HTTPException) and error.headers:
        headers["allow"] = ", ".join(sorted(error.headers["Allow"].split(", ")))
        text = f"this path takes {headers['allow']}"
    return Response(orjson.dumps({"error": text}), status, headers)


def _pages(metrics: Metrics | None, described: Callable[[Call], bytes]) -> list[Route]:
    found = [
        Route("GET", "/openapi.json", "pages", "This page, for programs", described, dict[str, Any]),
        *page_routes(metrics is not None),
    ]
    if metrics is not None:
        text = metrics("")[0]

        async def scraped(call: Call) -> Page:
            # Not on the loop: with many models it takes longer than requests should wait.
            return Page(*await asyncio.to_thread(metrics, call.accept))

        found.append(Route("GET", "/metrics", "pages", "For Prometheus", scraped, str, media_type=text))
    return found
