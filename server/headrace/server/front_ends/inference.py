"""Inference in a front-end process: versions in the engine's table are served here, all other requests are passed on whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, cast

from headrace.core.access import QuotaBucket
from headrace.core.errors import HeadraceError
from headrace.core.limits import ClientLimits
from headrace.server.front_ends.grpc_proxy import GrpcProxy
from headrace.server.front_ends.proxy import HttpProxy, engine_gone
from headrace.server.front_ends.remote_models import RemoteHandle, RemoteModels
from headrace.wire.grpc.codec import Envelope, scan, sequence_of
from headrace.wire.grpc.infer import GrpcInference
from headrace.wire.grpc.methods import GrpcCall, Message, RequestMessage, StreamCall
from headrace.wire.http.infer_endpoint import InferEndpoint, Receive, Scope, Send
from headrace.wire.http.origins import OriginPolicy
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.load_report import ServerFigures
from headrace.wire.requests.request_options import UNORDERED_PARAMETER
from headrace.wire.requests.service import PendingRequest
from headrace.wire.requests.services import InferenceServices
from headrace.wire.requests.tensor_codec import BodyBytes, allocate_body


class ServedModels:
    """The models of the engine process that runs now; those of an earlier one end with it.

    Ownership: the event loop.

    Args:
        allow_client_shm: requests may name shared memory of clients.

    Attributes:
        current: models of the engine; None without one.
    """

    def __init__(self, allow_client_shm: bool = False) -> None:
        self._allow_client_shm = allow_client_shm
        self.current: RemoteModels | None = None

    def begin(self) -> RemoteModels:
        """Create the models of a new engine process; the caller connects them."""
        self.detach()
        self.current = RemoteModels(asyncio.get_running_loop())
        return self.current

    def allocate_body(self, size_bytes: int, head_bytes: int) -> BodyBytes:
        """Allocate memory for a large body; see `RemoteModels.allocate_body`."""
        models = self.current
        return (allocate_body if models is None else models.allocate_body)(size_bytes, head_bytes)

    def detach(self) -> None:
        """Fail all requests in flight: the engine process has ended."""
        models, self.current = self.current, None
        if models is not None:
            models.detached()

    def flush_counts(self) -> None:
        """Send all counts of requests now."""
        if self.current is not None:
            self.current.flush_counts()

    def apply_table(self, content: bytes) -> None:
        """Replace the table of versions; see `RemoteModels.apply_table`."""
        if self.current is not None:
            self.current.apply_table(content)

    def server_figures(self, now_ns: int) -> ServerFigures | None:
        """Return the load of the server by the engine's page; None while it is unknown."""
        return None if self.current is None else self.current.state.server_figures(now_ns)

    def is_decoupled(self, model: str, version: str) -> bool:
        """Return True for a version in the table that sends any number of responses to a request."""
        return self.current is not None and self.current.is_decoupled(model, version)

    def serves(self, model: str, version: str) -> bool:
        """Return True if a request is served here."""
        models = self.current
        return (
            models is not None
            and models.is_attached
            and models.serves(model, version)
            and (not self._allow_client_shm or models.serves_regions(model, version))
        )

    def lease(self, name: str, version: str) -> RemoteHandle:
        """Lease a version, "" for the latest; raises NotFound, or Unavailable as it does without an engine. The caller
        ends the lease with `release`.
        """
        if self.current is None:
            raise engine_gone()
        return self.current.lease(name, version)

    async def charge(self, bucket: QuotaBucket) -> None:
        """Take a token; raises QuotaExceeded, or Unavailable without an engine."""
        if self.current is None or not self.current.is_attached:
            raise engine_gone()
        await self.current.quotas.charge(bucket)


class FrontEndHttp:
    """ASGI application of the HTTP port of a front end.

    Args:
        services: of the front end; its models are `models`.
        models: served here.
        client_limits: limits of the HTTP port.
        origins: checks requests of browsers.
        proxy: passes other requests on.
    """

    def __init__(
        self,
        services: InferenceServices,
        models: ServedModels,
        client_limits: ClientLimits,
        origins: OriginPolicy,
        proxy: HttpProxy,
    ) -> None:
        self.endpoint = InferEndpoint(services, client_limits, origins)
        self._models = models
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; other ASGI scopes (lifespan, WebSocket) are ignored."""
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            if path.endswith("/infer") and path.startswith("/v2/models/"):
                parts = path.split("/")
                if len(parts) == 5 or (len(parts) == 7 and parts[4] == "versions" and parts[5]):
                    version = parts[5] if len(parts) == 7 else ""
                    if self._models.serves(parts[3], version):
                        await self.endpoint(scope, receive, send, parts[3], version)
                        return
        await self._proxy(scope, receive, send)


class FrontEndInference:
    """ModelInfer of a front end; a `DirectMethod`.

    Args:
        services: of the front end; its models are `models`.
        models: served here.
        max_message_bytes: largest request.
        proxy: passes other requests on.
        path: of the method.

    Attributes:
        inference: serves the requests that are not passed on.
    """

    def __init__(
        self, services: InferenceServices, models: ServedModels, max_message_bytes: int, proxy: GrpcProxy, path: str
    ) -> None:
        self.inference = self._infer = GrpcInference(services, max_message_bytes)
        self._models = models
        self._pass_on = proxy.unary_method(path)

    async def infer(self, message: RequestMessage, call: GrpcCall) -> Message:
        """Serve a request, or pass it on."""
        try:
            envelope = scan(message)
            is_served = self._models.serves(envelope.model_name, envelope.model_version)
        except HeadraceError:  # the engine counts the error
            is_served = False
        if is_served:
            return await self._infer.infer(message, call)
        response = cast(Message, await self._pass_on(message, call))
        self._infer.trailers.report_requested(call, call.options)
        return response

    def start(self, message: RequestMessage, call: GrpcCall) -> PendingRequest | None:
        """Start a request; None if it needs the coroutine in `Methods.unary`, or is passed on. Raises as the coroutine."""
        try:
            envelope = scan(message)
        except HeadraceError:
            return None
        name, infer = envelope.model_name, self._infer
        if not self._models.serves(name, envelope.model_version) or name in infer.large_responses:
            return None
        if len(message) > LARGE_BYTES and infer.needs_thread(message, envelope):
            return None
        if infer.service.needs_charge(call.options):
            return None
        try:
            return infer.begin(message, envelope, call.received_ns, call.deadline_ns, call.options)
        except HeadraceError:
            infer.trailers.report_failure(call)
            raise

    def end(self, request: Any, call: GrpcCall) -> Message | Awaitable[Message]:
        """Return the response to a started request of `call` whose completion is settled, once; raises as the coroutine."""
        return self._infer.end(request, call)


class StreamForwarder:
    """Requests of ModelStreamInfer for models that are not served here; see `headrace.wire.grpc.forwarder.Forwarder`.

    Args:
        models: served here.
        proxy: passes the requests on, each in a call of its own.
        path: of the method.
    """

    def __init__(self, models: ServedModels, proxy: GrpcProxy, path: str) -> None:
        self._models = models
        self._proxy = proxy
        self._path = path

    def takes(self, envelope: Envelope) -> bool:
        """Return True for a request that the other process serves."""
        return not self._models.serves(envelope.model_name, envelope.model_version)

    def is_unordered(self, envelope: Envelope) -> bool:
        """Return True if the responses to a request need not have its place in the order, as the engine sends them."""
        is_decoupled = self._models.is_decoupled(envelope.model_name, envelope.model_version)
        return is_decoupled or UNORDERED_PARAMETER.encode() in envelope.header

    def sequence_of(self, envelope: Envelope) -> object:
        """Return the sequence of a request, whose requests are sent one after the other; None without one: name of the
        model and `sequence_id`.
        """
        return sequence_of(envelope)

    def responses(self, message: bytes, call: StreamCall) -> AsyncGenerator[Message]:
        """Send a request; yields each ModelStreamInferResponse."""
        return self._proxy.responses(self._path, message, call)
