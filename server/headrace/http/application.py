"""The HTTP application: FastAPI for the control plane, the raw callable for inference in front of it."""

from __future__ import annotations

from headrace.core.errors import HeadraceError
from headrace.core.limits import ClientLimits
from headrace.http.control_api import Metrics, check_path, control_application
from headrace.http.infer_endpoint import InferEndpoint, Receive, Scope, Send, send_error, send_method_not_allowed
from headrace.inference.models import Services
from headrace.inference.request_options import RequestOptionsReader


class HttpApplication:
    """The ASGI callable that the server runs: sorts inference from everything else by its path.

    Args:
        services: of the server.
        client_limits: the limits on requests.
        metrics: given the header Accept, gives the page for Prometheus as (content type, body), on any thread; None if it is
            served elsewhere.
        options_reader: what is read of inference requests besides.
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
        """One ASGI connection."""
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
