"""Every route of the HTTP control plane in one table: what is served, and what the API page says, come from here."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from server.core.names import REGION_PATTERN
from server.frontends import http_bodies as bodies
from server.frontends import status_bodies
from server.frontends.control_plane import ControlPlane
from server.frontends.models import Services

# Of a request to the control plane that carries no model.
MAX_CONTROL_BYTES = 65536
JSON = "application/json"
# Names as they stand in paths. Those of models are checked where models are looked up; clients give the regions'.
PATTERNS = {
    "model": r"^[A-Za-z0-9_](?:\.?[A-Za-z0-9_-]){0,63}$",
    "version": "^[A-Za-z0-9_-]{1,64}$",
    "region": REGION_PATTERN,
}


@dataclass(frozen=True, slots=True)
class Call:
    """What a route is asked.

    Attributes:
        model, version, region: out of the path; "" where the route has none.
        body: decoded, None where the route takes none.
        accept: the header of that name.
    """

    model: str
    version: str
    region: str
    body: Any
    accept: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """What a route gives that answers in a form of the client's choice.

    Attributes:
        media_type: of the form.
        content: as it is sent.
    """

    media_type: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    Attributes:
        method: GET or POST; HEAD is taken wherever GET is.
        path: with its parameters in braces: model, version, region.
        tag: under which the API page shows it.
        summary: one line.
        run: gives what is to be sent: bytes or a Page as they are, None for an empty body, anything else as JSON.
        answer: type of what is sent, as the page describes it; None for an empty body.
        body: type of the request's body, None if it takes none.
        body_required: False where an empty body stands for one without fields.
        max_body_bytes: of the request.
        media_type: of the answer.
        headers: of the answer, beside its media type.
        statuses: of the errors that can come, beside 400 and 500.
        described: on the API page.
    """

    method: str
    path: str
    tag: str
    summary: str
    run: Callable[[Call], object | Awaitable[object]]
    answer: Any = None
    body: type[msgspec.Struct] | None = None
    body_required: bool = False
    max_body_bytes: int = MAX_CONTROL_BYTES
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = ()
    described: bool = True


def routes(services: Services, max_body_bytes: int) -> list[Route]:
    """The whole table; where two paths match, the first counts.

    Args:
        services: of the server.
        max_body_bytes: of a request that may carry a model's files.
    """
    control = ControlPlane(services)
    return [
        *_server(control),
        *_repository(control, max_body_bytes),
        *_models(control),
        *_shared_memory(services),
        *_settings(control),
    ]


READY_TEXT = (
    "200 while a model serves, with --ready-when all while every model that should be served is READY; 503 until the first "
    "loading is over, while the server drains, and while a model that served has lost all its instances; "
    "a server with nothing to serve is ready"
)


def _server(control: ControlPlane) -> Iterator[Route]:
    yield Route(
        "GET",
        "/v2/health/live",
        "health",
        "200 while the process answers",
        lambda call: control.live(),
        bodies.ServerLive,
    )
    yield Route(
        "GET",
        "/v2/health/ready",
        "health",
        READY_TEXT,
        lambda call: control.require_ready(),
        bodies.ServerReady,
        statuses=(503,),
    )
    yield Route(
        "GET",
        "/v2",
        "server",
        "Name, version and protocol extensions of the server",
        lambda call: control.server_metadata(),
        bodies.ServerMetadata,
    )
    yield Route(
        "GET",
        "/v2/status",
        "server",
        "Every version with its state, counts and gauges, for who watches: rates follow from two answers",
        lambda call: control.status(),
        status_bodies.Status,
    )


def _repository(control: ControlPlane, max_body_bytes: int) -> Iterator[Route]:
    yield Route(
        "POST",
        "/v2/repository/index",
        "repository",
        "Every version found, its state and, where it is not served, the reason",
        lambda call: control.index(call.body.ready),
        list[bodies.IndexRow],
        bodies.IndexRequest,
    )
    yield Route(
        "POST",
        "/v2/repository/models/{model}/load",
        "repository",
        "Load a model, or load it anew; answers when the new versions serve",
        lambda call: control.load(call.model, call.body.parameters),
        body=bodies.LoadRequest,
        max_body_bytes=max_body_bytes,
        statuses=(403, 404, 409, 503),
    )
    yield Route(
        "POST",
        "/v2/repository/models/{model}/unload",
        "repository",
        "Stop serving a model once its requests in flight are answered",
        lambda call: control.unload(call.model, msgspec.to_builtins(call.body.parameters)),
        body=bodies.UnloadRequest,
        statuses=(403, 404, 409, 503),
    )


def _models(control: ControlPlane) -> Iterator[Route]:
    yield Route(
        "GET",
        "/v2/models",
        "repository",
        "Every model with its platform and the state of its versions",
        lambda call: control.list_models(),
        bodies.ModelList,
    )
    yield Route(
        "GET",
        "/v2/models/stats",
        "statistics",
        "Statistics of every model",
        lambda call: control.statistics("", ""),
        bodies.Statistics,
    )
    of_model = (
        Route(
            "GET",
            "",
            "model",
            "Inputs, outputs and versions",
            lambda call: control.model_metadata(call.model, call.version),
            bodies.ModelMetadata,
        ),
        Route(
            "GET",
            "/ready",
            "health",
            "200 while requests for the model can be served",
            lambda call: control.require_model_ready(call.model, call.version),
            bodies.ModelReady,
        ),
        Route(
            "GET",
            "/config",
            "model",
            "The configuration as it is in force, derived fields included",
            lambda call: control.config(call.model, call.version),
            bodies.ModelConfig,
        ),
        Route(
            "GET",
            "/stats",
            "statistics",
            "Exact counts and times since the model was loaded",
            lambda call: control.statistics(call.model, call.version),
            bodies.Statistics,
        ),
        *_scheduling(control),
        _layers(control),
    )
    for route in of_model:
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            yield replace(route, path=prefix + route.path, statuses=(404, 503))


def _scheduling(control: ControlPlane) -> Iterator[Route]:
    """Of one model, without the path in front."""
    yield Route(
        "GET",
        "/profile",
        "profile",
        "How long the model computes on batches of each size",
        lambda call: control.profile(call.model, call.version),
        bodies.Profile,
    )
    yield Route(
        "GET",
        "/load",
        "load",
        "How busy the model is: what waits, what runs, how long a request that came now would wait",
        lambda call: control.load_of(call.model, call.version),
        bodies.Load,
    )
    yield Route(
        "GET",
        "/explain",
        "profile",
        "What limits the model now, in words, and what would help",
        lambda call: control.explain(call.model, call.version),
        bodies.Explanation,
    )


def _layers(control: ControlPlane) -> Route:
    return Route(
        "GET",
        "/layers",
        "profile",
        "How long each layer takes, as `headrace inspect --publish` has measured it",
        lambda call: control.layers(call.model, call.version),
        status_bodies.Layers,
    )


def _shared_memory(services: Services) -> Iterator[Route]:
    regions = services.regions

    def register_system(call: Call) -> None:
        regions.register_system(call.region, call.body.key, call.body.offset, call.body.byte_size)

    def register_cuda(call: Call) -> None:
        handle = base64.b64decode(call.body.raw_handle.b64)
        regions.register_cuda(call.region, handle, call.body.device_id, call.body.byte_size)

    kinds: Mapping[str, tuple[Callable[[Call], None], Any, Any]] = {
        "system": (register_system, bodies.SystemRegionRequest, list[bodies.SystemRegion]),
        "cuda": (register_cuda, bodies.CudaRegionRequest, list[bodies.CudaRegion]),
    }
    for kind, (register, body, answer) in kinds.items():
        yield from _regions(services, kind, register, body, answer)


def _regions(
    services: Services, kind: str, register: Callable[[Call], None], body: type[msgspec.Struct], answer: Any
) -> Iterator[Route]:
    regions, base, tag = services.regions, f"/v2/{kind}sharedmemory", f"{kind} shared memory"

    def status(call: Call) -> object:
        return regions.status(kind, call.region)

    def unregister(call: Call) -> None:
        regions.unregister(kind, call.region)

    region = base + "/region/{region}"
    yield Route("GET", f"{base}/status", tag, "All regions", status, answer)
    yield Route("GET", f"{region}/status", tag, "One region", status, answer, statuses=(404,))
    yield Route(
        "POST",
        f"{region}/register",
        tag,
        "Take on memory of the client",
        register,
        body=body,
        body_required=True,
        statuses=(403, 409, 503),
    )
    for path, summary in ((region, "Let go of a region"), (base, "Let go of all regions")):
        yield Route("POST", f"{path}/unregister", tag, summary, unregister, statuses=(403,))


def _settings(control: ControlPlane) -> Iterator[Route]:
    logs = control.services.logs

    def trace_settings(call: Call) -> object:
        return control.trace_settings(call.model)

    def trace_update(call: Call) -> object:
        return control.trace_settings(call.model, msgspec.to_builtins(call.body))

    model_path, update = "/v2/models/{model}/trace/setting", bodies.TraceSettingsRequest
    for path, whose, statuses in (("/v2/trace/setting", "all models", ()), (model_path, "one model", (404, 503))):
        yield Route(
            "GET", path, "trace", f"Trace settings of {whose}", trace_settings, bodies.TraceSettings, statuses=statuses
        )
        yield Route(
            "POST",
            path,
            "trace",
            f"Change trace settings of {whose}; answers with those in force then",
            trace_update,
            bodies.TraceSettings,
            update,
            statuses=tuple(sorted({403, 503, *statuses})),
        )
    yield Route("GET", "/v2/logging", "logging", "Log settings", lambda call: logs.settings(), bodies.LogSettings)
    yield Route(
        "POST",
        "/v2/logging",
        "logging",
        "Change log settings; answers with those in force then",
        lambda call: logs.update(msgspec.to_builtins(call.body)),
        bodies.LogSettings,
        bodies.LogSettingsRequest,
        statuses=(403,),
    )
