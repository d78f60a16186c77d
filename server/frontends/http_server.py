"""The HTTP application: FastAPI for the control plane, the raw callable for inference in front of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from server.core.errors import BadRequest, Cancelled, HeadraceError, TooLarge, Unavailable
from server.core.tensor import ModelSpec, TensorSpec
from server.frontends.http_infer import InferEndpoint, Receive, Scope, Send, send_method_not_allowed
from server.frontends.models import Models, Services
from server.frontends.openapi import INFER_PATHS
from server.frontends.status import http_status, retry_after_s

# Of a request to the control plane.
_MAX_CONTROL_BYTES = 65536


class HttpApplication:
    """The ASGI callable that the server runs: sorts inference from everything else by its path.

    Args:
        services: of the server.
        max_body_bytes: of an inference request, or of a model's files in a load request.
        metrics: gives the page for Prometheus as (content type, body), or None if it is served elsewhere.
    """

    def __init__(
        self, services: Services, max_body_bytes: int, metrics: Callable[[], tuple[str, bytes]] | None
    ) -> None:
        self._infer = InferEndpoint(services, max_body_bytes)
        self.control = control_application(services, metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "http":
            path: str = scope["path"]
            if path.endswith("/infer") and path.startswith("/v2/models/"):
                parts = path.split("/")
                if len(parts) == 5 or (len(parts) == 7 and parts[4] == "versions" and parts[5]):
                    if scope["method"] != "POST":
                        await send_method_not_allowed(send)
                        return
                    await self._infer(scope, receive, send, parts[3], parts[5] if len(parts) == 7 else "")
                    return
        await self.control(scope, receive, send)


def control_application(services: Services, metrics: Callable[[], tuple[str, bytes]] | None = None) -> FastAPI:
    """The control plane: health, metadata, configuration, statistics, repository index, API docs."""
    app = FastAPI(
        title="Headrace",
        version=services.version,
        summary="An inference server that speaks the Open Inference Protocol V2.",
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_errors(app)
    _add_health(app, services.models)
    _add_metadata(app, services)
    _add_models(app, services.models)
    if metrics is not None:
        _add_metrics(app, metrics)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            schema["paths"].update(INFER_PATHS)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HeadraceError)
    async def known(_request: Request, error: HeadraceError) -> JSONResponse:
        seconds = retry_after_s(error)
        headers = None if seconds is None else {"retry-after": str(seconds)}
        return JSONResponse({"error": str(error)}, http_status(error), headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        text = str(error.detail)
        if error.status_code == 404:
            text = "no such path; /docs lists what there is"
        elif error.status_code == 405:
            text = f"{request.method} is not allowed here"
        return JSONResponse({"error": text}, error.status_code, error.headers)


def _add_health(app: FastAPI, models: Models) -> None:
    @app.get("/v2/health/live", tags=["health"])
    async def live() -> Response:
        """200 while the process answers."""
        return Response()

    @app.get("/v2/health/ready", tags=["health"])
    async def ready() -> Response:
        """200 while every model that should be served can be."""
        if not models.ready():
            raise Unavailable("the server is not ready: it is starting, draining, or a model is not available")
        return Response()


def _add_metadata(app: FastAPI, services: Services) -> None:
    @app.get("/v2", tags=["server"])
    async def server() -> dict[str, object]:
        """Name, version and protocol extensions of the server."""
        return {"name": "headrace", "version": services.version, "extensions": list(services.extensions)}

    @app.post("/v2/repository/index", tags=["repository"])
    async def index(request: Request) -> list[Mapping[str, object]]:
        """Every model found, its state and, where it is not served, the reason."""
        rows = list(services.models.index())
        wants = await _wants_ready(request)
        return [row for row in rows if row["state"] == "READY"] if wants else rows


async def _wants_ready(request: Request) -> bool:
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MAX_CONTROL_BYTES:
                raise TooLarge(f"the body is larger than {_MAX_CONTROL_BYTES} bytes")
    except ClientDisconnect:
        raise Cancelled("the client left before its request had arrived") from None
    try:
        wanted = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise BadRequest("the body must be empty or a JSON object") from None
    return isinstance(wanted, dict) and wanted.get("ready") is True


def _add_models(app: FastAPI, models: Models) -> None:
    @app.get("/v2/models/stats", tags=["statistics"])
    async def all_statistics() -> dict[str, object]:
        """Statistics of every model."""
        return {"model_stats": models.statistics("", "")}

    @app.get("/v2/models/{model}", tags=["model"])
    @app.get("/v2/models/{model}/versions/{version}", tags=["model"])
    async def metadata(model: str, version: str = "") -> dict[str, object]:
        """Inputs, outputs and versions."""
        handle = models.lease(model, version)
        try:
            return describe(handle.spec, list(models.versions(model)))
        finally:
            handle.release()

    @app.get("/v2/models/{model}/ready", tags=["health"])
    @app.get("/v2/models/{model}/versions/{version}/ready", tags=["health"])
    async def ready(model: str, version: str = "") -> Response:
        """200 while requests for the model can be served."""
        handle = models.lease(model, version)
        try:
            handle.admit()
        finally:
            handle.release()
        return Response()

    @app.get("/v2/models/{model}/config", tags=["model"])
    @app.get("/v2/models/{model}/versions/{version}/config", tags=["model"])
    async def config(model: str, version: str = "") -> Mapping[str, object]:
        """The configuration as it is in force, derived fields included."""
        return models.config(model, version)

    @app.get("/v2/models/{model}/stats", tags=["statistics"])
    @app.get("/v2/models/{model}/versions/{version}/stats", tags=["statistics"])
    async def statistics(model: str, version: str = "") -> dict[str, object]:
        """Exact counts and times since the model was loaded."""
        return {"model_stats": models.statistics(model, version)}


def _add_metrics(app: FastAPI, metrics: Callable[[], tuple[str, bytes]]) -> None:
    @app.get("/metrics", tags=["metrics"])
    async def page() -> Response:
        """For Prometheus."""
        content_type, body = metrics()
        return Response(body, headers={"content-type": content_type})


def describe(spec: ModelSpec, versions: list[str]) -> dict[str, object]:
    """Model metadata of the protocol."""
    return {
        "name": spec.name,
        "versions": versions,
        "platform": spec.platform,
        "inputs": [_describe_tensor(tensor) for tensor in spec.inputs.values()],
        "outputs": [_describe_tensor(tensor) for tensor in spec.outputs.values()],
    }


def _describe_tensor(tensor: TensorSpec) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype.name, "shape": list(tensor.shape)}
