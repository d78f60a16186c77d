"""The standard health service, grpc.health.v1: of the server (""), of the inference service, and of every model by its name."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from headrace.core.errors import NotFound, Unavailable
from headrace.grpc.control import parse
from headrace.grpc.methods import Call, Message, StreamCall
from headrace.inference.models import Models

pb: Any = health_pb2

SERVICE: str = pb.DESCRIPTOR.services_by_name["Health"].full_name

# Readiness is a question, not an event: a watcher learns of a change this much later at most.
WATCH_INTERVAL_S = 1.0


class HealthService:
    """Answers Check and Watch.

    Args:
        models: the registry.
        service: full name of the inference service, which is as healthy as the server.
        interval_s: how often Watch looks.
    """

    def __init__(self, models: Models, service: str, interval_s: float = WATCH_INTERVAL_S) -> None:
        self._models = models
        self._service = service
        self._interval_s = interval_s

    async def check(self, message: bytes, call: Call) -> Message:
        """The method: one HealthCheckRequest in, one HealthCheckResponse out; raises NotFound for an unknown name."""
        name = parse(pb.HealthCheckRequest, message).service
        status = self._status(name)
        if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound(f"service {name[:128]!r} is not found; it is '', {self._service!r} or a model's name")
        return [pb.HealthCheckResponse(status=status).SerializeToString()]

    async def watch(self, call: StreamCall) -> None:
        """The method: one HealthCheckRequest in, then a HealthCheckResponse at once and at each change, until the client leaves.

        Raises:
            Cancelled: the client has left.
            Unavailable: the server stops.
        """
        message = await call.read()
        if message is None:
            return
        name = parse(pb.HealthCheckRequest, message).service
        told = None
        while True:
            status = self._status(name)
            if status != told:
                await call.write([pb.HealthCheckResponse(status=status).SerializeToString()])
                told = status
            if call.stopping:
                raise Unavailable("the server is shutting down")
            await asyncio.sleep(self._interval_s)

    def _status(self, name: str) -> int:
        kind = pb.HealthCheckResponse
        if name in ("", self._service):
            return int(kind.SERVING if self._models.ready() else kind.NOT_SERVING)
        try:
            handle = self._models.lease(name, "")
        except NotFound:
            return int(kind.SERVICE_UNKNOWN)
        except Unavailable:
            return int(kind.NOT_SERVING)
        try:
            handle.admit()
        except Unavailable:
            return int(kind.NOT_SERVING)
        finally:
            handle.release()
        return int(kind.SERVING)
