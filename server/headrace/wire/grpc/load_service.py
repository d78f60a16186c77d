"""Out-of-band load reports: xds.service.orca.v3.OpenRcaService, which balancers in gRPC clients read in place of trailers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, text_format
from google.protobuf.message import DecodeError

from headrace.core.access import AccessControl, Scope
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import BadRequest, Overloaded, Unavailable
from headrace.wire.grpc.methods import StreamCall
from headrace.wire.requests.load_report import LoadReports
from headrace.wire.requests.operations import grpc_operation

LOAD_SERVICE = "xds.service.orca.v3.OpenRcaService"
LOAD_METHOD = f"/{LOAD_SERVICE}/StreamCoreMetrics"
# Reports cover two seconds, so that faster ones have little news.
MIN_INTERVAL_S = 1.0
_MAX_INTERVAL_S = 3600.0
# Time until a waiting stream sees that the server stops.
_STOP_INTERVAL_S = 1.0
# Of one process; each takes a task and a stream of its connection.
MAX_REPORT_STREAMS = 1024
_MAX_REQUEST_BYTES = 16 << 10


def add_files(pool: Any) -> None:
    """Add the protocol's files, and that of Duration, to a descriptor pool."""
    pool.AddSerializedFile(duration_pb2.DESCRIPTOR.serialized_pb)
    text = Path(__file__).with_name("orca.txtpb").read_text(encoding="utf-8")
    for file in text_format.Parse(text, descriptor_pb2.FileDescriptorSet()).file:
        pool.Add(file)


class LoadService:
    """Streams load reports of the whole server. Ownership: the event loop.

    Args:
        reports: of the process.
        access: keys and scopes.

    Attributes:
        pool: descriptors of the protocol, for reflection.
    """

    def __init__(self, reports: LoadReports, access: AccessControl) -> None:
        self._reports, self._access = reports, access
        self._scope: Scope | None = grpc_operation(LOAD_METHOD).scope
        self._streams = 0
        self.pool: Any = descriptor_pool.DescriptorPool()
        add_files(self.pool)
        request = self.pool.FindMessageTypeByName("xds.service.orca.v3.OrcaLoadReportRequest")
        self._request_type: Any = message_factory.GetMessageClass(request)

    async def stream(self, call: StreamCall) -> None:
        """StreamCoreMetrics: one OrcaLoadReportRequest in, then an OrcaLoadReport at once and one in each interval.

        The interval is that of the request, at least `MIN_INTERVAL_S`.

        Raises:
            BadRequest: the request is invalid.
            Cancelled: the client disconnected.
            Overloaded: `MAX_REPORT_STREAMS` streams are open.
            Unavailable: the server stops.
            Unauthenticated, Forbidden: the caller may not read reports, or not any more.
        """
        message = await call.read()
        if message is None:
            return
        interval_s = self._interval_s(message)
        if self._streams >= MAX_REPORT_STREAMS:
            raise Overloaded(f"{MAX_REPORT_STREAMS} streams of load reports are open: use the reports of responses")
        self._streams += 1
        try:
            while True:
                self._check_permission(call)
                await call.write([self._reports.message(None, monotonic_ns())])
                await self._wait(call, interval_s)
        finally:
            self._streams -= 1

    async def _wait(self, call: StreamCall, interval_s: float) -> None:
        """Wait for an interval; raises Unavailable once the server stops."""
        end_ns = monotonic_ns() + int(interval_s * NS_PER_S)
        while True:
            if call.stopping:
                raise Unavailable("the server is shutting down")
            rest_s = (end_ns - monotonic_ns()) / NS_PER_S
            if rest_s <= 0:
                return
            await asyncio.sleep(min(rest_s, _STOP_INTERVAL_S))

    def _interval_s(self, message: bytes) -> float:
        """Return the interval that a request names, within the bounds."""
        if len(message) > _MAX_REQUEST_BYTES:
            text = f"an OrcaLoadReportRequest has at most {_MAX_REQUEST_BYTES} bytes, not {len(message)}"
            raise BadRequest(f"{text}: leave out its names")
        try:
            interval = self._request_type.FromString(message).report_interval
        except DecodeError:
            raise BadRequest("the message is not an OrcaLoadReportRequest: send one") from None
        requested_s = float(interval.seconds + interval.nanos / NS_PER_S)
        return min(max(requested_s, MIN_INTERVAL_S), _MAX_INTERVAL_S)

    def _check_permission(self, call: StreamCall) -> None:
        access = self._access
        principal = call.options.principal if access.has_keys else None
        if self._scope is not None:
            (principal or access.anonymous).require(self._scope)
