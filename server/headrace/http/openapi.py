"""OpenAPI 3.1 document of the HTTP API: FastAPI generates it from the route table and the types of `bodies`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from starlette.responses import JSONResponse, Response

from headrace.http import bodies as bodies
from headrace.http.routes import JSON, PATTERNS, Route

TAGS = {
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
    400: "Invalid request; the text names the field, its value and what is allowed",
    403: "Disabled by the operator; the text names the option that enables it",
    404: "No such model, version or region",
    409: "Conflict with the present state",
    413: "Request body too large",
    429: "Quota of this client exceeded; other clients are served",
    431: "Request headers too large",
    500: "The server or the model failed; the log has the cause under the reference in the text",
    503: "Overloaded, deadline would be missed, loading, not available or draining; another replica may serve the request",
    504: "Deadline of the request exceeded",
}
# Possible at any route: malformed HTTP, headers that never end, a fault of the server.
_EVERYWHERE = (400, 431, 500)
_RETRY_HEADERS = {
    "Retry-After": {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 1}},
    "Retry-After-Ms": {"description": "milliseconds", "required": True, "schema": {"type": "integer", "minimum": 0}},
}
_EXAMPLE_NAMES = {"model": "tiny", "version": "1", "region": "input_0"}
_REFERENCE = "#/components/schemas/{model}"
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_INFER_EXAMPLE = {
    "id": "42",
    "inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}],
    "outputs": [{"name": "output"}],
    "parameters": {"headrace_timing": True},
}


def add_route(app: FastAPI, route: Route, endpoint: Any) -> None:
    """Add a route to the application and its OpenAPI document.

    Args:
        app: FastAPI application.
        route: documentation, method and path.
        endpoint: takes the request and returns the response. It reads and validates the request itself, FastAPI does not.
    """
    is_json = route.response is not None and route.media_type == JSON
    responses: dict[int | str, dict[str, Any]] = {200: {"description": route.summary}}
    if route.response is not None and not is_json:  # without the parameters of the media type
        responses[200]["content"] = {route.media_type.partition(";")[0]: {"schema": {"type": "string"}}}
    statuses = (
        {*_EVERYWHERE, *route.statuses} | ({413} if route.body else set()) | ({404} if "{" in route.path else set())
    )
    for status in sorted(statuses):
        headers = {"headers": _RETRY_HEADERS} if status in (429, 503) else {}
        responses[status] = {"description": _ERRORS[status], "content": _json_body(bodies.Error), **headers}
    parameters = [_path_parameter(name) for name in re.findall(r"{(\w+)}", route.path)]
    extra = {**route.openapi_extra, "parameters": [*parameters, *route.openapi_extra.get("parameters", ())]}
    if route.body is not None:
        extra["requestBody"] = {"required": route.body_required, "content": _json_body(route.body, route.example)}
    app.add_api_route(
        route.path,
        endpoint,
        methods=[route.method],
        response_model=route.response if is_json else None,
        response_class=JSONResponse if is_json else Response,
        tags=[route.tag],
        summary=route.summary,
        operation_id="_".join([route.method.lower(), *re.findall(r"\w+", route.path)]),
        responses=responses,
        openapi_extra=extra,
        include_in_schema=route.documented,
    )


def document(app: FastAPI, table: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI document of an application whose routes were added by `add_route`.

    Args:
        app: FastAPI application.
        table: its routes; the types of their request bodies become components.
    """
    requests = {route.body for route in table if route.body is not None}
    _, structs = msgspec.json.schema_components(requests, ref_template=_REFERENCE.format(model="{name}"))
    for schema in structs.values():
        schema["description"] = inspect.cleandoc(schema["description"])
    models: Any = [(bodies.Error, "serialization"), (bodies.InferenceRequest, "validation")]
    _, schemas = models_json_schema(models, ref_template=_REFERENCE, schema_generator=_Schema)
    openapi = app.openapi()
    openapi["components"]["schemas"] |= {**structs, **schemas["$defs"]}
    return openapi


def infer_routes() -> Iterator[Route]:
    """List the inference routes for the document only: `HttpApplication` serves them before FastAPI."""
    extra = {
        "description": (
            "The body is JSON, or JSON followed by the bytes of tensors; then `Inference-Header-Content-Length` has the size "
            "of the JSON, in the request and in the response. Numbers are little-endian; each BYTES element is preceded by its "
            "length in four bytes. The media type of a request is ignored. A raw binary request is the data of the model's "
            "single input, with the header `Inference-Header-Content-Length: 0`: one row, at most one dynamic dimension, all "
            "outputs binary. NaN and infinities in JSON numbers are `NaN`, `Infinity` and `-Infinity`."
        ),
        "parameters": [{"name": name, "in": "header", **header} for name, header in _headers(bodies.InferenceHeaders)],
        "requestBody": {
            "required": True,
            "content": {**_json_body(bodies.InferenceRequest, _INFER_EXAMPLE), **_BINARY},
        },
        "responses": {"200": {"headers": dict(_headers(bodies.InferenceResponseHeaders)), "content": _BINARY}},
    }
    for path in ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"):
        yield Route(
            "inference",
            path,
            "Run a model",
            _not_reached,
            bodies.InferenceResponse,
            method="POST",
            statuses=(403, 404, 413, 429, 503, 504),
            openapi_extra=extra,
        )


class _Schema(GenerateJsonSchema):
    """JSON schema without default values: a default only marks a field as optional, it is never sent."""

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


def _not_reached(**names: str) -> NoReturn:
    raise NotImplementedError("the HTTP application serves inference before FastAPI")


def _json_body(kind: type, example: Mapping[str, object] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": {"$ref": _REFERENCE.format(model=kind.__name__)}}
    return {JSON: body if example is None else {**body, "example": example}}


def _path_parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "pattern": PATTERNS[name], "examples": [_EXAMPLE_NAMES[name]]}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _headers(model: type[BaseModel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and OpenAPI definitions of the headers that are the fields of a model."""
    for name, schema in model.model_json_schema()["properties"].items():
        yield name.replace("_", "-").title(), {"description": schema.pop("description", ""), "schema": schema}
