"""Routes of the HTTP port: the table of the control plane, the web pages, and the OpenAPI 3.1 document.

FastAPI serves and documents every route in the table. It generates the document from the table; the schemas are those of
the types of `headrace.core.response_bodies` and `bodies`.
"""

from __future__ import annotations

import base64
import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from headrace.core import response_bodies as responses
from headrace.core.limits import REGION_PATTERN
from headrace.wire.http import bodies
from headrace.wire.requests.control_plane import MAX_LISTED_MODELS, ControlPlane
from headrace.wire.requests.operations import http_operation
from headrace.wire.requests.services import ControlServices

# Limit of a control request that carries no model files.
MAX_CONTROL_BYTES = 65536
JSON = "application/json"
EVENTS = "text/event-stream"
_OF_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
# Path parameters. Model names are checked when the model is looked up; region names are checked by the route.
PATTERNS = {
    "model": r"^[A-Za-z0-9_](?:\.?[A-Za-z0-9_-]){0,63}$",
    "version": "^[A-Za-z0-9_-]{1,64}$",
    "region": REGION_PATTERN,
}


@dataclass(frozen=True, slots=True)
class Page:
    """Response whose media type depends on the request.

    Attributes:
        media_type: of the content.
        content: response body.
    """

    media_type: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    Attributes:
        tag: section of the OpenAPI document.
        path: with its parameters in braces: model, version, region.
        summary: one line.
        run: takes the path parameters and the fields of the body as keyword arguments. It returns bytes or a Page, which are
            sent as they are, None for an empty body, or a value that is sent as JSON.
        response: type that documents the response body; None for an empty body.
        method: GET or POST; HEAD is accepted wherever GET is.
        body: type of the request body; None if the route takes no body.
        body_required: False if an empty body stands for a body without fields.
        example: request body for the OpenAPI document.
        negotiates: `run` takes the request header Accept as `accept`.
        filters: `run` takes the principal of the request as `principal`, and lists only models that it may read.
        query: query parameters that `run` takes as keyword arguments: text, "" for one that is absent.
        permit: takes the model, and raises Forbidden before the body is read if the operator has disabled the route; None for a
            route that is always enabled.
        max_body_bytes: of the request.
        media_type: of the response.
        headers: of the response, besides its media type.
        statuses: of the errors that can occur, besides 400, 431 and 500.
        documented: in the OpenAPI document.
        openapi_extra: other fields of the OpenAPI operation.
    """

    tag: str
    path: str
    summary: str
    run: Callable[..., object | Awaitable[object]]
    response: Any = None
    method: str = "GET"
    body: type[msgspec.Struct] | None = None
    body_required: bool = False
    example: Mapping[str, object] | None = None
    negotiates: bool = False
    filters: bool = False
    query: tuple[str, ...] = ()
    permit: Callable[[str], None] | None = None
    max_body_bytes: int = MAX_CONTROL_BYTES
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = ()
    documented: bool = True
    openapi_extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_json(self) -> bool:
        """True if the response has a body of JSON."""
        return self.response is not None and self.media_type == JSON


def routes(services: ControlServices, max_body_bytes: int) -> list[Route]:
    """List every route of the control plane; the first that matches a path serves it.

    Args:
        services: of the server.
        max_body_bytes: limit of a request that may carry a model's files.
    """
    control = ControlPlane(services)
    return [
        *_server(control),
        *_repository(control, max_body_bytes),
        *_models(control),
        *_system_regions(services),
        *_cuda_regions(services),
        *_settings(control),
    ]


_LIST_PARAMETERS = (
    {
        "name": "limit",
        "in": "query",
        "description": "maximum models of the response; absent for all",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED_MODELS},
    },
    {
        "name": "after",
        "in": "query",
        "description": "`next` of the page before; absent for the first page",
        "schema": {"type": "string"},
    },
)
READY_TEXT = (
    "200 while a model serves, with --ready-when all while every model that should be served is READY; 503 until the first "
    "loading is over, while the server drains, and while a model that served has lost all its instances; "
    "a server with nothing to serve is ready"
)


def _server(control: ControlPlane) -> Iterator[Route]:
    health, server = partial(Route, "health"), partial(Route, "server")
    yield health("/v2/health/live", "200 while the process answers", control.live, responses.ServerLive)
    yield health("/v2/health/ready", READY_TEXT, control.require_ready, responses.ServerReady, statuses=(503,))
    yield server(
        "/v2", "Name, version and protocol extensions of the server", control.server_metadata, responses.ServerMetadata
    )
    summary = "Every version with its state, counts and gauges, for monitoring: rates follow from two responses"
    yield server("/v2/status", summary, control.status, responses.ServerStatus, filters=True)


def _repository(control: ControlPlane, max_body_bytes: int) -> Iterator[Route]:
    repository, traffic = control.services.repository, control.services.traffic
    base, post = "/v2/repository/models/{model}", partial(Route, "repository", method="POST")
    summary = "Every version in the repository, its state and, if it is not served, the reason"
    index = partial(post, body=bodies.IndexRequest, example={"ready": True}, filters=True)
    yield index("/v2/repository/index", summary, control.index, list[responses.IndexRow])
    change = partial(post, permit=repository.check_control, statuses=(403, 404, 409, 503))
    max_bytes = max_body_bytes if repository.allows_files else MAX_CONTROL_BYTES
    load = partial(change, body=bodies.LoadRequest, example={"parameters": {}}, max_body_bytes=max_bytes)
    yield load(base + "/load", "Load or reload a model; answers when the new versions serve", control.load)
    unload = partial(change, body=bodies.UnloadRequest, example={"parameters": {"unload_dependents": True}})
    yield unload(base + "/unload", "Stop serving a model once its requests in flight are answered", control.unload)
    path, report, summary = base + "/traffic", responses.TrafficReport, "Shares, states and figures of the versions"
    yield Route("repository", path, summary, traffic.show, report, statuses=(404, 503))
    summary = "Change the shares of the versions, promote a version, or return to the configuration; returns the traffic in force"
    share = partial(post, body=bodies.TrafficRequest, body_required=True, example={"versions": {"2": "5%"}})

    def run(model: str, **changes: object) -> object:
        return traffic.change(model, changes)

    yield share(path, summary, run, report, statuses=(403, 404, 409, 503))


def _models(control: ControlPlane) -> Iterator[Route]:
    services, statistics = control.services, responses.Statistics
    summary = "Every model with its platform and the state of its versions, by name; with `limit` in pages"
    listing = partial(Route, filters=True, query=("limit", "after"), openapi_extra={"parameters": _LIST_PARAMETERS})
    yield listing("repository", "/v2/models", summary, control.list_models, responses.ModelList)
    summary = "Statistics of every model"
    yield Route("statistics", "/v2/models/stats", summary, control.all_statistics, statistics, filters=True)
    config, layers = services.models.config, services.overview.layers
    of_model: tuple[tuple[str, str, str, Callable[..., object], type], ...] = (
        ("model", "", "Inputs, outputs and versions", control.model_metadata, responses.ModelMetadata),
        (
            "health",
            "/ready",
            "200 while the model can serve requests",
            control.require_model_ready,
            responses.ModelReady,
        ),
        ("model", "/config", "The configuration in force, with derived fields", config, bodies.ServedModelConfig),
        ("statistics", "/stats", "Exact counts and times since the model was loaded", control.statistics, statistics),
        ("profile", "/profile", "Compute times of each batch size", control.profile, responses.ProfileResponse),
        (
            "load",
            "/load",
            "Queue, running batches and predicted wait of the model",
            control.model_load,
            responses.LoadResponse,
        ),
        (
            "profile",
            "/explain",
            "What limits the model now, and what would help",
            services.explain,
            responses.Explanation,
        ),
        ("profile", "/layers", "Layer times measured by `headrace inspect --publish`", layers, responses.LayerTimes),
    )
    for tag, suffix, summary, run, response in of_model:
        for prefix in _OF_MODEL:
            yield Route(tag, prefix + suffix, summary, run, response, statuses=(404, 503))


def _system_regions(services: ControlServices) -> Iterator[Route]:
    def register(region: str, key: str, offset: int, byte_size: int) -> None:
        services.regions.register_system(region, key, offset, byte_size)

    example = {"key": "/input_0", "byte_size": 64}
    yield from _regions(services, "system", register, bodies.SystemRegionRequest, responses.SystemRegionStatus, example)


def _cuda_regions(services: ControlServices) -> Iterator[Route]:
    def register(region: str, raw_handle: Mapping[str, str], device_id: int, byte_size: int) -> None:
        services.regions.register_cuda(region, base64.b64decode(raw_handle["b64"]), device_id, byte_size)

    # No example: a handle is valid only while the process that exported it lives.
    yield from _regions(services, "cuda", register, bodies.CudaRegionRequest, responses.CudaRegionStatus, None)


def _regions(
    services: ControlServices,
    kind: str,
    register: Callable[..., None],
    body: type[msgspec.Struct],
    status: Any,
    example: Mapping[str, object] | None,
) -> Iterator[Route]:
    def list_regions(region: str = "") -> object:
        return services.regions.status(kind, region)

    def unregister(region: str = "") -> None:
        services.regions.unregister(kind, region)

    route, base, region = partial(Route, f"{kind} shared memory"), f"/v2/{kind}sharedmemory", "/region/{region}"
    yield route(f"{base}/status", "List all regions", list_regions, list[status])
    yield route(f"{base}{region}/status", "Show one region", list_regions, list[status], statuses=(404,))
    post = partial(route, method="POST")
    registering = partial(post, body=body, body_required=True, example=example, statuses=(403, 409, 503))
    yield registering(f"{base}{region}/register", "Register memory of the client", register)
    yield post(f"{base}{region}/unregister", "Unregister a region", unregister, statuses=(403,))
    yield post(f"{base}/unregister", "Unregister all regions", unregister, statuses=(403,))


def _settings(control: ControlPlane) -> Iterator[Route]:
    def update_traces(model: str = "", **changes: object) -> object:
        return control.trace_settings(model, changes)

    trace, response, statuses = partial(Route, "trace"), responses.TraceSettings, (404, 503)
    example = {"trace_level": ["TIMESTAMPS"], "trace_rate": 100}
    traces_update = partial(trace, method="POST", body=bodies.TraceSettingsRequest, example=example)
    path, text = "/v2/trace/setting", "Change trace settings of {}; returns the settings in force"
    yield trace(path, "Trace settings of all models", control.trace_settings, response)
    yield traces_update(path, text.format("all models"), update_traces, response, statuses=(403, 503))
    path = "/v2/models/{model}/trace/setting"
    yield trace(path, "Trace settings of one model", control.trace_settings, response, statuses=statuses)
    yield traces_update(path, text.format("one model"), update_traces, response, statuses=(403, *statuses))
    logs = control.services.logs
    logging, settings = partial(Route, "logging", "/v2/logging"), responses.LogSettingsResponse
    yield logging("Log settings", logs.settings, settings)
    change = partial(logging, method="POST", body=bodies.LogSettingsRequest, example={"log_verbose_level": 1})
    summary = "Change log settings; returns the settings in force"
    yield change(summary, lambda **changes: logs.update(changes), settings, statuses=(403,))


# --- Web pages: static files of this package, which load nothing from other hosts --------------------------------------
#
# Pages show text from untrusted sources: names of models, reasons, labels. Three measures keep such text from becoming a script:
# pages have no inline scripts, the Content-Security-Policy forbids them, and Trusted Types reject text that is inserted as HTML.

_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Pages change with the version of the server and are small: browsers revalidate them at each visit.
    "cache-control": "no-cache",
}
_METRICS_LINK = b' <a href="metrics">Metrics</a>'
_PAGES = {
    "/": ("index.html", "What the models do, live, and a form to try them; for people"),
    "/docs": ("docs.html", "This page, for people"),
}


def page_routes(metrics: bool) -> Iterator[Route]:
    """List the routes of all pages and of the files that they load.

    Args:
        metrics: True if /metrics is served on the same port; otherwise the link to it is removed.
    """
    for path, (name, summary) in _PAGES.items():
        content = (_FOLDER / name).read_bytes()
        yield _route(path, summary, content if metrics else content.replace(_METRICS_LINK, b""), _MEDIA_TYPES[".html"])
    for file in sorted(_FOLDER.iterdir()):
        if file.suffix in _MEDIA_TYPES and file.suffix != ".html":
            part = _route(f"/page/{file.name}", "", file.read_bytes(), _MEDIA_TYPES[file.suffix])
            yield replace(part, documented=False)


def _route(path: str, summary: str, content: bytes, media_type: str) -> Route:
    return Route("pages", path, summary, lambda: content, str, media_type=media_type, headers=HEADERS)


# --- OpenAPI document --------------------------------------------------------------------------------------------------

TAGS = {
    "inference": "Open Inference Protocol V2, with Triton's binary tensor data, classification and shared memory",
    "generate": "Triton's generate extension",
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
    401: "No valid key; only on a server with keys",
    403: (
        "Disabled by the operator, closed without keys, a scope or model that the key does not have, or a web page of another "
        "origin; the text says which, and what opens it"
    ),
    404: "No such model, version or region",
    409: "Conflict with the present state",
    413: "Request body too large",
    421: "Host that the server does not answer to; see --allowed-host",
    429: "Quota of this client exceeded; other clients are served",
    431: "Request headers too large",
    500: "The server or the model failed; the log has the cause under the reference in the text",
    503: "Overloaded, deadline would be missed, loading, not available or draining; another replica may serve the request",
    504: "Deadline of the request exceeded",
}
# Possible at any route: malformed HTTP, a foreign host, headers that never end, a fault of the server.
_EVERYWHERE = (400, 421, 431, 500)
# Possible at any route that needs a scope.
_WITH_SCOPE = (401, 403, 429)
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of this server, or a JSON web token (--jwks)"},
    "api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "A key of this server"},
}
_CHALLENGE = {"WWW-Authenticate": {"description": "Bearer", "required": True, "schema": {"type": "string"}}}
_RETRY_HEADERS = {
    "Retry-After": {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 1}},
    "Retry-After-Ms": {"description": "milliseconds", "required": True, "schema": {"type": "integer", "minimum": 0}},
}
_EXAMPLE_NAMES = {"model": "tiny", "version": "1", "region": "input_0"}
_REFERENCE = "#/components/schemas/{name}"
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_IMAGES = {f"image/{kind}": {"schema": {"type": "string", "format": "binary"}} for kind in ("jpeg", "png", "webp")}
_INFER_EXAMPLE = {
    "id": "42",
    "inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}],
    "outputs": [{"name": "output"}],
    "parameters": {"headrace_timing": True},
}
_GENERATE_EXAMPLE = {"id": "42", "input": [0.5] * 16}
_INFERENCE_STATUSES = (403, 404, 413, 429, 503, 504)


def add_route(app: FastAPI, route: Route, endpoint: Any) -> None:
    """Add a route to the application and its OpenAPI document.

    Args:
        app: FastAPI application.
        route: documentation, method and path.
        endpoint: takes the request and returns the response. It reads and validates the request itself, FastAPI does not.
    """
    answers: dict[int | str, dict[str, Any]] = {200: {"description": route.summary}}
    if route.response is not None and not route.is_json:  # without the parameters of the media type
        answers[200]["content"] = {route.media_type.partition(";")[0]: {"schema": {"type": "string"}}}
    for status in sorted(_error_statuses(route)):
        headers = {"headers": _CHALLENGE if status == 401 else _RETRY_HEADERS} if status in (401, 429, 503) else {}
        answers[status] = {"description": _ERRORS[status], "content": _json_body(responses.Error), **headers}
    parameters = [_path_parameter(name) for name in re.findall(r"{(\w+)}", route.path)]
    extra = {**route.openapi_extra, "parameters": [*parameters, *route.openapi_extra.get("parameters", ())]}
    if route.body is not None:
        extra["requestBody"] = {"required": route.body_required, "content": _json_body(route.body, route.example)}
    app.add_api_route(
        route.path,
        endpoint,
        methods=[route.method],
        response_model=None,
        response_class=JSONResponse if route.is_json else Response,
        tags=[route.tag],
        summary=route.summary,
        operation_id="_".join([route.method.lower(), *re.findall(r"\w+", route.path)]),
        responses=answers,
        openapi_extra=extra,
        include_in_schema=route.documented,
    )


def _error_statuses(route: Route) -> set[int]:
    """Return the statuses of all errors that a route can return."""
    statuses = {*_EVERYWHERE, *route.statuses}
    if route.body is not None:
        statuses.add(413)
    if "{" in route.path:
        statuses.add(404)
    if http_operation(route.method, route.path).scope is not None:
        statuses.update(_WITH_SCOPE)
    return statuses


def document(app: FastAPI, table: Sequence[Route], has_keys: bool) -> dict[str, Any]:
    """The OpenAPI document of an application whose routes were added by `add_route`.

    Args:
        app: FastAPI application.
        table: its routes; the types of their request bodies become components.
        has_keys: True if callers need a key.
    """
    documented = [route for route in table if route.documented]
    requests = [route.body for route in documented if route.body is not None]
    inference = [bodies.InferenceRequest, bodies.GenerateRequest]
    answers = [route.response if route.is_json else responses.Error for route in documented]
    schemas, components = msgspec.json.schema_components([*answers, *requests, *inference], ref_template=_REFERENCE)
    openapi = app.openapi()
    openapi["components"] = {
        "schemas": {name: _described(name, schema) for name, schema in sorted(components.items())},
        "securitySchemes": _SECURITY_SCHEMES,
    }
    keys: list[dict[str, list[str]]] = [{name: []} for name in _SECURITY_SCHEMES]
    for route, schema in zip(documented, schemas, strict=False):
        operation = openapi["paths"][route.path][route.method.lower()]
        is_open = http_operation(route.method, route.path).scope is None
        # An empty entry: a key is optional.
        operation["security"] = [] if is_open else keys if has_keys else [*keys, {}]
        if route.is_json:
            operation["responses"]["200"]["content"][JSON]["schema"] = schema
    return openapi


def infer_routes() -> Iterator[Route]:
    """List the inference routes for the document only: `HttpApplication` serves them before FastAPI."""
    extra = {
        "description": (
            "The body is JSON, or JSON followed by the bytes of tensors; then `Inference-Header-Content-Length` has the size "
            "of the JSON, in the request and in the response. Numbers are little-endian; each BYTES element is preceded by its "
            "length in four bytes. Any other media type of a request than `image/*` is ignored. A raw binary request is the data "
            "of the model's single input, with the header `Inference-Header-Content-Length: 0`: one row, at most one dynamic "
            "dimension, all outputs binary. A body of type `image/*` is an image file for a model whose only required input is "
            "one element of BYTES, such as a pipeline that decodes images: the file as it is, all outputs JSON. NaN and "
            "infinities in JSON numbers are `NaN`, `Infinity` and `-Infinity`."
        ),
        "parameters": [{"name": name, "in": "header", **header} for name, header in _headers(bodies.InferenceHeaders)],
        "requestBody": {
            "required": True,
            "content": {**_json_body(bodies.InferenceRequest, _INFER_EXAMPLE), **_BINARY, **_IMAGES},
        },
        "responses": {"200": {"headers": dict(_headers(bodies.InferenceResponseHeaders)), "content": _BINARY}},
    }
    infer = partial(_inference, "inference", openapi_extra=extra)
    for prefix in _OF_MODEL:
        yield infer(f"{prefix}/infer", "Run a model", response=bodies.InferenceResponse)
    yield from _generate_routes()


def _generate_routes() -> Iterator[Route]:
    """List the routes of the generate extension for the document only."""
    names = ("content_encoding", "accept_encoding", "x_request_timeout_ms", "x_headrace_client")
    headers = {name.replace("_", "-").title() for name in names}
    described = [(name, header) for name, header in _headers(bodies.InferenceHeaders) if name in headers]
    of_stream = (
        "Each response of the model is an event of the body (server-sent events): `data: ` and a JSON object as of `/generate`. "
        "A comment (`:`) comes while the model sends nothing. An error before the first event is the status; a later one is an "
        "event with the field `error`, and the last event."
    )
    of_one = "Returns the one response of the model, and an error if the model sends none or several."
    content = _json_body(bodies.GenerateRequest, _GENERATE_EXAMPLE)
    extra = {
        "parameters": [{"name": name, "in": "header", **header} for name, header in described],
        "requestBody": {"required": True, "content": content},
    }
    for action, summary, text, response, media_type in (
        ("generate", "Run a model on fields of JSON", of_one, bodies.GenerateResponse, JSON),
        ("generate_stream", "Run a model on fields of JSON, response by response", of_stream, str, EVENTS),
    ):
        generate = partial(_inference, "generate", media_type=media_type, openapi_extra={"description": text, **extra})
        for prefix in _OF_MODEL:
            yield generate(f"{prefix}/{action}", summary, response=response)


def _inference(tag: str, path: str, summary: str, **fields: Any) -> Route:
    return Route(tag, path, summary, _not_reached, method="POST", statuses=_INFERENCE_STATUSES, **fields)


def _not_reached(**names: str) -> NoReturn:
    raise NotImplementedError("the HTTP application serves inference before FastAPI")


def _described(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type with the descriptions of its docstring, and its fields in their order."""
    text, _, attributes = inspect.cleandoc(schema["description"]).partition("\n\nAttributes:\n")
    properties: dict[str, dict[str, Any]] = schema["properties"]
    for line in attributes.replace("\n        ", " ").splitlines():
        field_name, _, description = line.strip().partition(": ")
        properties[field_name]["description"] = description.removesuffix(".")
    kind = getattr(responses, name, None) or getattr(bodies, name)
    if name in vars(responses):
        schema["additionalProperties"] = False
    if is_dataclass(kind):  # a default is for the server's code: a response has every field
        schema["required"] = list(properties)
        for field_schema in properties.values():
            field_schema.pop("default", None)
    return schema | {"description": text, "properties": {name: properties[name] for name in kind.__annotations__}}


def _json_body(kind: type, example: Mapping[str, object] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}
    return {JSON: body if example is None else {**body, "example": example}}


def _path_parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "pattern": PATTERNS[name], "examples": [_EXAMPLE_NAMES[name]]}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _headers(kind: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and OpenAPI definitions of the headers that are the fields of a type."""
    _, components = msgspec.json.schema_components([kind])
    for name, schema in _described(kind.__name__, components[kind.__name__])["properties"].items():
        yield name.replace("_", "-").title(), {"description": schema.pop("description", ""), "schema": schema}
