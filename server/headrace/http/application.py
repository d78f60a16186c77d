"""ASGI application of the HTTP port: inference goes to `InferEndpoint`, every other path to FastAPI."""

from __future__ import annotations

from headrace.core.errors import HeadraceError
from headrace.core.limits import ClientLimits
from headrace.http.control_api import Metrics, check_path, control_application
from headrace.http.infer_endpoint import InferEndpoint, Receive, Scope, Send, send_error, send_method_not_allowed
from headrace.inference.models import Services
from headrace.inference.request_options import RequestOptionsReader


class HttpApplication:
    """ASGI application that dispatches requests by path: inference requests bypass FastAPI.

    Args:
        services: of the server.
        client_limits: limits of all connections and requests.
        metrics: see `control_application`.
        options_reader: parser of the request options in the headers of inference requests.
    """

    def __init__(
        self,
        services: Services,
        client_limits: ClientLimits,
        metrics: Metrics | None,
        options_reader: RequestOptionsReader | None = None,
    ) -> None:
        self._infer = InferEndpoint(services, client_limits, options_reader)
        self._control = control_application(services, client_limits, metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; other ASGI scopes (lifespan, WebSocket) are ignored."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if path.endswith("/infer") and path.startswith("/v2/models/"):
            parts = path.split("/")
            if len(parts) == 5 or (len(parts) == 7 and parts[4] == "versions" and parts[5]):
                if scope["method"] != "POST":
                    await send_method_not_allowed(send)
                    return
                await self._infer(scope, receive, send, parts[3], parts[5] if len(parts) == 7 else "")
                return
        try:
            check_path(scope["raw_path"])
        except HeadraceError as error:
            await send_error(send, error)
            return
        if scope["method"] == "HEAD":  # the protocol drops the body by the method in its own scope
            scope = {**scope, "method": "GET"}
        await self._control(scope, receive, send)
