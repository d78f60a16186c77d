"""Every route of the HTTP control plane in one table: FastAPI serves and documents what is listed here."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from headrace.core.limits import REGION_PATTERN
from headrace.http import bodies as bodies
from headrace.inference.control_plane import ControlPlane
from headrace.inference.models import Services

# Limit of a control request that carries no model files.
MAX_CONTROL_BYTES = 65536
JSON = "application/json"
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
    max_body_bytes: int = MAX_CONTROL_BYTES
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = ()
    documented: bool = True
    openapi_extra: Mapping[str, Any] = field(default_factory=dict)


def routes(services: Services, max_body_bytes: int) -> list[Route]:
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


READY_TEXT = (
    "200 while a model serves, with --ready-when all while every model that should be served is READY; 503 until the first "
    "loading is over, while the server drains, and while a model that served has lost all its instances; "
    "a server with nothing to serve is ready"
)


def _server(control: ControlPlane) -> Iterator[Route]:
    health, server = partial(Route, "health"), partial(Route, "server")
    yield health("/v2/health/live", "200 while the process answers", control.live, bodies.ServerLive)
    yield health("/v2/health/ready", READY_TEXT, control.require_ready, bodies.ServerReady, statuses=(503,))
    yield server(
        "/v2", "Name, version and protocol extensions of the server", control.server_metadata, bodies.ServerMetadata
    )
    summary = "Every version with its state, counts and gauges, for monitoring: rates follow from two responses"
    yield server("/v2/status", summary, control.status, bodies.ServerStatus)


def _repository(control: ControlPlane, max_body_bytes: int) -> Iterator[Route]:
    post = partial(Route, "repository", method="POST")
    yield post(
        "/v2/repository/index",
        "Every version in the repository, its state and, if it is not served, the reason",
        control.index,
        list[bodies.IndexRow],
        body=bodies.IndexRequest,
        example={"ready": True},
    )
    yield post(
        "/v2/repository/models/{model}/load",
        "Load or reload a model; answers when the new versions serve",
        control.load,
        body=bodies.LoadRequest,
        example={"parameters": {}},
        max_body_bytes=max_body_bytes,
        statuses=(403, 404, 409, 503),
    )
    yield post(
        "/v2/repository/models/{model}/unload",
        "Stop serving a model once its requests in flight are answered",
        control.unload,
        body=bodies.UnloadRequest,
        example={"parameters": {"unload_dependents": True}},
        statuses=(403, 404, 409, 503),
    )
    summary = "Every model with its platform and the state of its versions"
    yield Route("repository", "/v2/models", summary, control.list_models, bodies.ModelList)


def _models(control: ControlPlane) -> Iterator[Route]:
    statistics = bodies.Statistics
    yield Route("statistics", "/v2/models/stats", "Statistics of every model", control.statistics, statistics)
    of_model: tuple[tuple[str, str, str, Callable[..., object], type], ...] = (
        ("model", "", "Inputs, outputs and versions", control.model_metadata, bodies.ModelMetadata),
        ("health", "/ready", "200 while the model can serve requests", control.require_model_ready, bodies.ModelReady),
        (
            "model",
            "/config",
            "The configuration in force, with derived fields",
            control.config,
            bodies.ServedModelConfig,
        ),
        ("statistics", "/stats", "Exact counts and times since the model was loaded", control.statistics, statistics),
        ("profile", "/profile", "Compute times of each batch size", control.profile, bodies.ProfileResponse),
        (
            "load",
            "/load",
            "Queue, running batches and predicted wait of the model",
            control.model_load,
            bodies.LoadResponse,
        ),
        ("profile", "/explain", "What limits the model now, and what would help", control.explain, bodies.Explanation),
        (
            "profile",
            "/layers",
            "Layer times measured by `headrace inspect --publish`",
            control.layers,
            bodies.LayerTimes,
        ),
    )
    for tag, suffix, summary, run, response in of_model:
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            yield Route(tag, prefix + suffix, summary, run, response, statuses=(404, 503))


def _system_regions(services: Services) -> Iterator[Route]:
    def register(region: str, key: str, offset: int, byte_size: int) -> None:
        services.regions.register_system(region, key, offset, byte_size)

    example = {"key": "/input_0", "byte_size": 64}
    yield from _regions(services, "system", register, bodies.SystemRegionRequest, bodies.SystemRegionStatus, example)


def _cuda_regions(services: Services) -> Iterator[Route]:
    def register(region: str, raw_handle: Mapping[str, str], device_id: int, byte_size: int) -> None:
        services.regions.register_cuda(region, base64.b64decode(raw_handle["b64"]), device_id, byte_size)

    # No example: a handle is valid only while the process that exported it lives.
    yield from _regions(services, "cuda", register, bodies.CudaRegionRequest, bodies.CudaRegionStatus, None)


def _regions(
    services: Services,
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
    yield post(
        f"{base}{region}/register",
        "Register memory of the client",
        register,
        body=body,
        body_required=True,
        example=example,
        statuses=(403, 409, 503),
    )
    yield post(f"{base}{region}/unregister", "Unregister a region", unregister, statuses=(403,))
    yield post(f"{base}/unregister", "Unregister all regions", unregister, statuses=(403,))


def _settings(control: ControlPlane) -> Iterator[Route]:
    def update_traces(model: str = "", **changes: object) -> object:
        return control.trace_settings(model, changes)

    def update_logs(**changes: object) -> object:
        return logs.update(changes)

    trace, response, statuses = partial(Route, "trace"), bodies.TraceSettings, (404, 503)
    traces_update = partial(
        trace,
        method="POST",
        body=bodies.TraceSettingsRequest,
        example={"trace_level": ["TIMESTAMPS"], "trace_rate": 100},
    )
    path, text = "/v2/trace/setting", "Change trace settings of {}; returns the settings in force"
    yield trace(path, "Trace settings of all models", control.trace_settings, response)
    yield traces_update(path, text.format("all models"), update_traces, response, statuses=(403, 503))
    path = "/v2/models/{model}/trace/setting"
    yield trace(path, "Trace settings of one model", control.trace_settings, response, statuses=statuses)
    yield traces_update(path, text.format("one model"), update_traces, response, statuses=(403, *statuses))
    logs = control.services.logs
    logging, settings = partial(Route, "logging", "/v2/logging"), bodies.LogSettingsResponse
    yield logging("Log settings", logs.settings, settings)
    yield logging(
        "Change log settings; returns the settings in force",
        update_logs,
        settings,
        method="POST",
        body=bodies.LogSettingsRequest,
        example={"log_verbose_level": 1},
        statuses=(403,),
    )
