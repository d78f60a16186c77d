"""The API page (OpenAPI 3.1), made of the table that the server serves by."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from server.frontends import http_bodies, openapi_infer
from server.frontends.http_routes import JSON, PATTERNS, Route

_REFERENCE = "#/components/schemas/{name}"
_NAME_EXAMPLES = {"model": "densenet_onnx", "version": "1", "region": "input_0"}
_TAGS = {
    "inference": "Open Inference Protocol V2, with Triton's binary tensor data, classification and shared memory",
    "health": "Open Inference Protocol V2",
    "server": "Open Inference Protocol V2",
    "model": "Open Inference Protocol V2, with Triton's model configuration",
    "repository": "Triton's model repository extension",
    "statistics": "Triton's statistics extension",
    "profile": "Headrace's own",
    "load": "Headrace's own",
    "system shared memory": "Triton's extension; needs --allow-client-shm",
    "cuda shared memory": "Triton's extension; needs --allow-client-shm and a GPU",
    "trace": "Triton's trace extension",
    "logging": "Triton's logging extension",
    "pages": "About this server",
}
_ERRORS = {
    400: "The request is wrong; the text says what, where and what was expected",
    403: "The operator has not switched this on; the text says which option does",
    404: "There is no such model, version or region",
    409: "At odds with what is there",
    413: "The body is larger than the server takes",
    429: "The client asks for more than its quota; others are served",
    431: "The request's headers are larger than the server takes",
    500: "The server or the model failed; the log has the cause under the reference in the text",
    503: "Right request, wrong moment: overloaded, would be answered too late, loading, not available or draining",
    504: "The deadline that the request carried has passed",
}
# What any request may get: bytes that are no HTTP, headers without end, a fault of the server.
_ANYWHERE = (400, 431, 500)


def page(table: Sequence[Route], version: str) -> dict[str, Any]:
    """The page as JSON values.

    Args:
        table: every route but inference.
        version: of Headrace.
    """
    table = [route for route in table if route.described]
    types = [kind for route in table for kind in (route.body, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components([*types, http_bodies.Error], ref_template=_REFERENCE)
    for component in components.values():
        component["description"] = inspect.cleandoc(component["description"])
    by_type = {repr(kind): schema for kind, schema in zip(types, schemas, strict=False)}
    paths: dict[str, dict[str, Any]] = {path: {"post": _infer(path)} for path in openapi_infer.PATHS}
    for route in table:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "summary": "An inference server that speaks the Open Inference Protocol V2.",
        },
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {"schemas": {**components, **openapi_infer.SCHEMAS}},
    }


def _operation(route: Route, by_type: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": route.summary}
    if route.answer is not None:
        # The page names a media type without its parameters.
        media_type = route.media_type.partition(";")[0]
        answer["content"] = {media_type: {"schema": by_type[repr(route.answer)]}}
    statuses = {*route.statuses, *((413,) if route.body is not None else ()), *((404,) if "{" in route.path else ())}
    operation: dict[str, Any] = {
        "tags": [route.tag],
        "operationId": _operation_id(route.method, route.path),
        "summary": route.summary,
        "parameters": _path_parameters(route.path),
        "responses": {"200": answer, **_errors(statuses)},
    }
    if route.body is not None:
        content = {JSON: {"schema": by_type[repr(route.body)]}}
        operation["requestBody"] = {"required": route.body_required, "content": content}
    return operation


def _infer(path: str) -> dict[str, Any]:
    return {
        **openapi_infer.OPERATION,
        "operationId": _operation_id("post", path),
        "parameters": [*_path_parameters(path), *openapi_infer.HEADERS],
        "responses": {"200": openapi_infer.ANSWER, **_errors(openapi_infer.STATUSES)},
    }


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": PATTERNS[name], "examples": [_NAME_EXAMPLES[name]]},
        }
        for name in re.findall(r"{(\w+)}", path)
    ]


def _errors(statuses: Iterable[int]) -> dict[str, Any]:
    return {str(status): _error(status) for status in sorted({*_ANYWHERE, *statuses})}


def _error(status: int) -> dict[str, Any]:
    described: dict[str, Any] = {
        "description": _ERRORS[status],
        "content": {JSON: {"schema": {"$ref": _REFERENCE.format(name="Error")}}},
    }
    if status in (429, 503):
        described["headers"] = {
            "Retry-After": {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 1}},
            "Retry-After-Ms": {
                "description": "the same in milliseconds",
                "required": True,
                "schema": {"type": "integer", "minimum": 0},
            },
        }
    return described
