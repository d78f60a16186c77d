"""An engine's data path with front ends on one event loop, connected by socket pairs: all of it but the processes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.limits import ClientLimits, Limits
from headrace.core.request import InferResponse
from headrace.models.shared_memory import SharedMemoryRegions
from headrace.server.data_plane import DataPlane
from headrace.server.front_ends.front_end_requests import FrontEndRequests
from headrace.server.front_ends.remote_models import RemoteModels
from headrace.server.settings import Settings
from headrace.wire.grpc.codec import scan
from headrace.wire.grpc.infer import GrpcInference
from headrace.wire.http.infer_endpoint import InferEndpoint
from headrace.wire.requests.request_options import RequestOptions
from headrace.wire.requests.services import InferenceServices, Models

from tests.support.access_recorder import AccessRecorder

Answer = tuple[int, dict[str, str], bytes]
# Differ between two answers of the same server.
_VARYING = ("headrace-queue-depth", "headrace-predicted-wait-us")


@dataclass
class Pair:
    """A data plane with its front ends.

    Attributes:
        plane: the engine's data plane.
        engine: the engine's end of the streams.
        front_ends: their models.
        regions: shared memory of clients.
    """

    plane: DataPlane
    engine: FrontEndRequests
    front_ends: list[RemoteModels]
    regions: SharedMemoryRegions

    def apply_table(self) -> None:
        """Send the table to all front ends."""
        table = self.engine.table_bytes()
        for front_end in self.front_ends:
            front_end.apply_table(table)

    async def attach(self, number: int) -> None:
        """Connect a front end, again if it was detached."""
        engine_end, front_end_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        arena = os.dup(self.front_ends[number].new_arena())
        await self.engine.attach(number, arena).open(engine_end)
        await self.front_ends[number].attached(front_end_end)


@asynccontextmanager
async def open_pair(repository: Path, front_ends: int = 1, **options: Any) -> AsyncIterator[Pair]:
    """Load a repository, and connect front ends to it; `options` are fields of `Settings`."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[BaseException | None] = loop.create_future()
    settings = Settings(model_repository=(repository,), state_dir="", profile_s=0, poll_interval_s=0, **options)
    plane = DataPlane(settings, loop, loaded.set_result, {})
    plane.reconciler.start()
    error = await loaded
    assert error is None, error
    failures = plane.registry.failures()
    if failures:
        await asyncio.to_thread(plane.stop, 10.0)
        raise AssertionError(failures)
    regions = SharedMemoryRegions(True, None)
    engine = FrontEndRequests(plane.registry, regions=regions)
    pair = Pair(plane, engine, [RemoteModels(loop) for _ in range(front_ends)], regions)
    try:
        pair.apply_table()
        for number in range(front_ends):
            await pair.attach(number)
        yield pair
    finally:
        for number in range(front_ends):
            pair.engine.detach(number)
            pair.front_ends[number].detached()
        await asyncio.to_thread(plane.stop, 10.0)


def services(models: Any, regions: Any = None) -> InferenceServices:
    """Services for inference alone; with `regions` requests may name shared memory."""
    extensions = () if regions is None else ("system_shared_memory",)
    return InferenceServices(models=models, regions=regions, observer=AccessRecorder(), extensions=extensions)


async def over_http(
    models: Models | RemoteModels,
    model: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    version: str = "",
    regions: Any = None,
) -> Answer:
    """One HTTP request to an inference endpoint: status, headers without load figures, body."""
    endpoint = InferEndpoint(services(models, regions), ClientLimits(Limits()))
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0) if incoming else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(dict(message))

    lines = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await asyncio.wait_for(endpoint({"headers": lines}, receive, send, model, version), 60)
    start, content = sent
    answer = {name.decode(): value.decode() for name, value in start["headers"] if name.decode() not in _VARYING}
    return start["status"], answer, content["body"]


async def over_grpc(
    models: Models | RemoteModels, messages: Sequence[bytes], options: RequestOptions | None = None
) -> list[bytes]:
    """gRPC messages that arrive in one turn of the event loop; returns their responses."""
    from headrace.core.clock import monotonic_ns

    inference = GrpcInference(services(models), 1 << 20)
    pending = [
        inference.begin(message, scan(message), monotonic_ns(), 0, options or RequestOptions()) for message in messages
    ]
    for each in pending:
        assert isinstance(await asyncio.wait_for(_done(each.completion), 60), InferResponse)
    return [b"".join(inference.finish(each)) for each in pending]


async def _done(completion: Any) -> Any:
    return await completion
