"""Load reports of calls: the trailer `endpoint-load-metrics-bin`, which balancers in gRPC clients and proxies read."""

from __future__ import annotations

from headrace.core.clock import monotonic_ns
from headrace.wire.grpc.methods import GrpcCall, StreamCall
from headrace.wire.requests.load_report import LoadReports
from headrace.wire.requests.request_options import RequestOptions
from headrace.wire.requests.service import PendingRequest


class LoadTrailers:
    """Gives calls their load reports. Ownership: the event loop.

    Args:
        reports: of the process.

    Attributes:
        always: every call has a report.
    """

    def __init__(self, reports: LoadReports) -> None:
        self._reports = reports
        self.always = reports.always

    def report(self, call: GrpcCall | StreamCall, pending: PendingRequest | None = None) -> None:
        """Give a call its report: of the server, and of the model of its request if there is one."""
        reports, now_ns = self._reports, monotonic_ns()
        if pending is None or pending.handle is None:
            call.load_report = reports.message(None, now_ns)
        elif pending.load is None:
            call.load_report = reports.cached_message(pending.handle, now_ns)
        else:
            call.load_report = reports.message(pending.load, now_ns)

    def report_requested(self, call: GrpcCall | StreamCall, options: RequestOptions) -> None:
        """Give a call with these options a report of the server, if it has one."""
        if self.always or options.load_format:
            self.report(call)

    def report_failure(self, call: GrpcCall) -> None:
        """Give a failed call a report of the server, if all calls have one and it has none yet."""
        if self.always and not call.load_report:
            self.report(call)
