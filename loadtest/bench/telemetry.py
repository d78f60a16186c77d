"""Cost of traces and the request log: processor time of the event loop a request, and of the threads behind it.

python -m loadtest.bench.telemetry
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable

from headrace.core.clock import monotonic_ns
from headrace.core.request import BatchTimes, InferResponse
from headrace.core.telemetry import RequestLogMode, trace_context
from headrace.http.infer_endpoint import WIRE
from headrace.inference.service import PendingRequest
from headrace.observability.access_log import AccessRecord, RequestLog, as_json, fields
from headrace.observability.counters import Recorder
from headrace.observability.tracing import RequestObserver, Tracer

_ROUNDS = 5
_TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class _Nowhere:
    """Spans that are never created."""

    failed = False

    def put(self, account: AccessRecord, trace_id: str) -> None:
        pass

    def close(self) -> None:
        pass


def cpu_us(work: Callable[[], object], times: int) -> float:
    """Processor time of this thread for one call, the least of some rounds."""
    found = []
    for _ in range(_ROUNDS):
        begin_ns = time.thread_time_ns()
        for _ in range(times):
            work()
        found.append((time.thread_time_ns() - begin_ns) / times / 1000)
    return min(found)


def on_the_loop(mode: RequestLogMode, rate: int = 0) -> float:
    """The front end's part for one request; one in `rate` is traced if that is not 0."""
    log = RequestLog(mode, io.BytesIO(), capacity=1)
    accounts = RequestObserver(Tracer("", spans=_Nowhere() if rate else None, rate=rate), log)
    response, recorder = InferResponse({}, BatchTimes(2, 3, 4, 5), 8, "full"), Recorder()

    def request() -> None:
        choice, queued_ns = None, 0
        if accounts.active:
            choice = accounts.sample("resnet50", None)
            queued_ns = monotonic_ns()
        if choice:
            account = _pending(1, queued_ns, 6).access_record(WIRE, monotonic_ns(), response)
            accounts.record_success(choice, account, recorder)

    found = cpu_us(request, 20_000)
    accounts.close()
    return found


def _pending(received_ns: int, queued_ns: int, done_ns: int) -> PendingRequest:
    """A request of one row whose response is there."""
    pending = PendingRequest("resnet50", "1", received_ns)
    pending.id, pending.rows, pending.queued_ns, pending.done_ns = "id", 1, queued_ns, done_ns
    return pending


def behind_it() -> list[tuple[str, float]]:
    """The threads' part for a request that is logged, or traced."""
    now_ns = monotonic_ns()
    pending = _pending(now_ns, now_ns + 1_000, now_ns + 6_000)
    times = BatchTimes(*(now_ns + step * 1_000 for step in range(2, 6)))
    account = pending.access_record(WIRE, now_ns + 7_000, InferResponse({}, times, 8, "full"))
    found = [("a line of the request log", cpu_us(lambda: as_json(fields(account, "", 0)), 5_000))]
    try:
        from headrace.observability.spans import SpanWriter
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    except ImportError:
        return found

    class Encoder(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            encode_spans(spans).SerializeToString()
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            pass

    writer = SpanWriter(Encoder(), hold_s=0)
    some = [(account._replace(times=BatchTimes(*times)), f"{number:032x}") for number in range(1, 257)]
    spent_us = cpu_us(lambda: writer._work(some), 1) / len(some)
    writer.close()
    return [*found, ("the spans of a request, encoded", spent_us)]


def main() -> None:
    """Print a table."""
    rows = [
        ("`--request-log off`", on_the_loop("off")),
        ("the default: errors, no traces", on_the_loop("errors")),
        ("a `traceparent` header, read", cpu_us(lambda: trace_context(_TRACEPARENT), 20_000)),
        ("`--otlp-endpoint`, one in 1000", on_the_loop("errors", 1000)),
        ("`--request-log sampled`, one in 100", on_the_loop("sampled")),
        ("traced, each", on_the_loop("errors", 1)),
        ("`--request-log all`", on_the_loop("all")),
    ]
    print("| the event loop, a request | CPU us |\n|---|---|")
    for name, spent_us in rows:
        print(f"| {name} | {spent_us:.2f} |")
    print("\n| a thread of their own | CPU us |\n|---|---|")
    for name, spent_us in behind_it():
        print(f"| {name} | {spent_us:.0f} |")


if __name__ == "__main__":
    main()
