"""OpenTelemetry spans of requests and batches, sent by OTLP. Imported only with `--otlp-endpoint`.

    infer MODEL          one request, in its caller's trace or a new one; linked to its batch
    |- decode, queue, assemble, compute, split, encode     see `access_log.phases`
    batch MODEL          one batch, in a trace of its own; linked to every traced request in it

The event loop queues access records; a thread makes spans of them.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.request import BatchTimes
from headrace.observability.access_log import AccessRecord, phases
from headrace.observability.background import BackgroundWorker
from headrace.observability.labelled_counter import DROPPED
from headrace.observability.logs import escape, redact

logger = logging.getLogger("headrace.trace")

_KIND = "spans"
_MAX_TEXT = 256
_MAX_LINKS = 1024
# A batch's span ends this long after its first request. Requests that end later have no link to it.
_HOLD_S = 1.0
_MAX_HELD = 1024
_EXPORT_SPANS = 512
_EXPORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _HeldBatch:
    """A batch whose span waits for records of further requests."""

    span: Span  # not ended
    times: BatchTimes  # shared by the records of all its requests; its identity is the key of the batch
    links: int  # number of linked requests
    due_ns: int  # monotonic time at which the span is ended
    end_ns: int  # end of the span, nanoseconds since 1970


class _Ids(IdGenerator):
    """Generates random ids, except for the next trace."""

    next_trace_id = 0

    def generate_span_id(self) -> int:
        return random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        chosen, self.next_trace_id = self.next_trace_id, 0  # id of the next trace, 0 for a random one
        return chosen or random.getrandbits(128) or 1


class _Ended(SpanProcessor):
    """Collects ended spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []  # ended since `SpanWriter` last sent them

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanWriter:
    """Makes spans of access records and sends them.

    `put` and `close` are called on the event loop, `close` also after its end; all other methods run on the writer thread.

    Args:
        exporter: sends spans; may block the writer thread.
        version: of Headrace.
        shown: name of the receiver in the log.
        hold_s: seconds after its first request until the span of a batch ends.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        version: str = "",
        shown: str = "the receiver",
        hold_s: float = _HOLD_S,
    ) -> None:
        self._exporter = exporter
        self._shown = shown
        self._hold_ns = int(hold_s * NS_PER_S)
        self._ids = _Ids()
        self._ended = _Ended()
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=_resource(version),
            id_generator=self._ids,
            span_limits=SpanLimits(max_links=_MAX_LINKS),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("headrace", version)
        self._held: dict[tuple[str, str, BatchTimes], _HeldBatch] = {}
        self._refused = False
        self._closing = False
        self._exporter_log = _ExporterLog()
        self._records: BackgroundWorker[tuple[AccessRecord, str]] = BackgroundWorker(
            "headrace-spans", _KIND, self._work, gather_s=0.2
        )

    @property
    def failed(self) -> bool:
        """True after an unexpected exception, which is in the log; no more spans are made."""
        return self._records.failed

    def put(self, record: AccessRecord, trace_id: str) -> None:
        """Queue the record of a finished request; `trace_id` has 32 hexadecimal digits."""
        self._records.put((record, trace_id))

    def close(self) -> None:
        """Send the queued spans; waits at most 5 s for the receiver."""
        self._closing = True
        if not self._records.close(_CLOSE_TIMEOUT_S):
            logger.warning("spans are lost: %s did not accept them in time", self._shown)
        self._exporter.shutdown()

    def _work(self, records: list[tuple[AccessRecord, str]]) -> float | None:
        """Make spans of records, end due batches and send all ended spans; return the seconds until the next batch is due."""
        now_ns = monotonic_ns()
        offset_ns = time.time_ns() - now_ns
        for record, trace_id in records:
            self._request(record, trace_id, now_ns, offset_ns)
        due_s = self._end_batches(now_ns)
        spans, self._ended.spans = self._ended.spans, []
        for start in range(0, len(spans), _EXPORT_SPANS):
            self._send(spans[start : start + _EXPORT_SPANS])
        return due_s

    def _request(self, record: AccessRecord, trace_id: str, now_ns: int, offset_ns: int) -> None:
        batch = self._batch(record, now_ns, offset_ns)
        self._ids.next_trace_id = int(trace_id, 16)
        span = self._tracer.start_span(
            f"infer {_text(record.model)}",
            _parent(record),
            SpanKind.SERVER,
            _attributes(record),
            [] if batch is None else [Link(batch.span.get_span_context(), {"headrace.link": "batch"})],
            record.received_ns + offset_ns,
        )
        within = set_span_in_context(span, Context())
        for name, begin_ns, end_ns in phases(record):
            part = self._tracer.start_span(name, within, start_time=begin_ns + offset_ns)
            part.end(end_ns + offset_ns)
        for step in record.steps:
            attributes: dict[str, str | int] = {
                "headrace.model": step.model,
                "headrace.version": step.version,
                "headrace.step.outcome": step.outcome,
                "headrace.batch.rows": step.batch_rows,
            }
            part = self._tracer.start_span(
                f"step {step.step}", within, attributes=attributes, start_time=step.queued_ns + offset_ns
            )
            part.end(step.done_ns + offset_ns)
        if record.error:
            span.set_status(Status(StatusCode.ERROR, redact(_text(record.error))))
        span.end(record.ended_ns + offset_ns)
        if batch is not None and batch.links < _MAX_LINKS:
            batch.span.add_link(span.get_span_context(), {"headrace.link": "member"})
            batch.links += 1

    def _batch(self, record: AccessRecord, now_ns: int, offset_ns: int) -> _HeldBatch | None:
        """Return the batch of a successful request; all requests of a batch have equal times, those of front ends too."""
        times = record.times
        if times is None:
            return None
        key = (record.model, record.version, times)
        held = self._held.get(key)
        if held is None:
            span = self._tracer.start_span(
                f"batch {_text(record.model)}",
                Context(),
                attributes={
                    "headrace.model": _text(record.model),
                    "headrace.version": _text(record.version),
                    "headrace.batch.id": record.batch_id,
                    "headrace.batch.rows": record.batch_rows,
                    "headrace.batch.closed": record.closed,
                    "headrace.batch.assemble_us": (times.assembled_ns - times.taken_ns) // 1000,
                    "headrace.batch.compute_us": (times.computed_ns - times.assembled_ns) // 1000,
                },
                start_time=times.taken_ns + offset_ns,
            )
            held = _HeldBatch(span, times, 0, now_ns + self._hold_ns, times.split_ns + offset_ns)
            self._held[key] = held
        return held

    def _end_batches(self, now_ns: int) -> float | None:
        """End the batches that are due or too many; return the seconds until the next one is due."""
        for key, held in list(self._held.items()):  # oldest first
            if not self._closing and held.due_ns > now_ns and len(self._held) <= _MAX_HELD:
                return (held.due_ns - now_ns) / NS_PER_S
            held.span.end(held.end_ns)
            del self._held[key]
        return None

    def _send(self, spans: list[ReadableSpan]) -> None:
        try:
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
            reason = "" if sent else self._exporter_log.text
        except Exception as error:  # transports raise anything; the next export is tried regardless
            sent, reason = False, repr(error)
        if not sent:
            DROPPED.count(_KIND, by=len(spans))
        if sent and self._refused:
            logger.info("spans are delivered again to %s", self._shown)
        elif not sent and not self._refused:
            logger.warning("spans are lost, they cannot be delivered to %s: %s", self._shown, redact(reason))
        self._refused = not sent


class _ExporterLog(logging.Handler):
    """Captures the last log message of the exporter, which logs every failed export; `SpanWriter` logs the first only."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = "no reason given"  # of the last message
        exporter_logger = logging.getLogger("opentelemetry.exporter")
        exporter_logger.handlers[:] = [self]
        exporter_logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def otlp_exporter(endpoint: str, protocol: str) -> SpanExporter:
    """Create an OTLP exporter; OpenTelemetry's OTEL_EXPORTER_OTLP_ variables set headers, certificates and compression.

    Args:
        endpoint: URL; over HTTP, /v1/traces (the path of the specification) is added to a URL without a path.
        protocol: grpc or http.
    """
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return OverHttp(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)


def _resource(version: str) -> Resource:
    """Resource of all spans: named by OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES, else headrace."""
    resource = Resource.create({"service.version": version} if version else {})
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "headrace"}))
    return resource


def _parent(record: AccessRecord) -> Context:
    """Return the caller's span as parent; an empty context starts a new trace."""
    context = record.context
    if context is None:
        return Context()
    state = TraceState.from_header([context.state]) if context.state else None
    flags = TraceFlags(TraceFlags.SAMPLED)
    parent = SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags, state)
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _attributes(record: AccessRecord) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "headrace.protocol": record.protocol,
        "headrace.model": _text(record.model),
        "headrace.version": _text(record.version),
        "headrace.rows": record.rows,
    }
    if record.protocol == "http":
        attributes |= {"http.request.method": "POST", "http.response.status_code": int(record.status)}
        attributes["http.route"] = "/v2/models/{model}/infer"
    else:
        attributes |= {
            "rpc.system": "grpc",
            "rpc.service": "inference.GRPCInferenceService",
            "rpc.method": "ModelInfer",
        }
        attributes["rpc.response.status_code"] = record.status
    if record.request_id:
        attributes["headrace.request_id"] = redact(_text(record.request_id))
    if record.client:
        attributes["headrace.client"] = _text(record.client)
    if record.error:
        attributes["error.type"] = record.reason
    if record.times is not None:
        attributes |= {"headrace.batch.rows": record.batch_rows, "headrace.batch.closed": record.closed}
        attributes["headrace.batch.id"] = record.batch_id
    if record.cached:
        attributes["headrace.cached"] = True
    return attributes


def _text(text: str) -> str:
    """Shorten and sanitise text from clients.

    A lone surrogate would make the whole export fail; control characters would drive the terminal of a reader of spans.
    """
    return escape(text[:_MAX_TEXT].encode("utf-8", "replace").decode())
