"""Requests as spans of OpenTelemetry, sent by OTLP. Imported only where the operator has named a receiver.

    infer MODEL          of one request, in its caller's trace or one of its own; linked to its batch
    |- decode, queue, assemble, compute, split, encode     see `access_log.phases`
    batch MODEL          of one batch, in a trace of its own, linked to every traced request in it

Nothing of this happens on the event loop: it hands over records, and a thread makes spans of them.
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
from headrace.observability.background import CAPACITY, BackgroundWorker
from headrace.observability.counters import DROPPED
from headrace.observability.logs import redact

logger = logging.getLogger("headrace.trace")

_KIND = "spans"
_MAX_TEXT = 256
_MAX_LINKS = 1024
# How long the members of a batch may take to be answered: whoever comes later has no link to it.
_HOLD_S = 1.0
_MAX_HELD = 1024
_EXPORT_SPANS = 512
_EXPORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _HeldBatch:
    """A batch whose members are still coming.

    Attributes:
        span: not ended.
        times: by whose identity it is known.
        links: members so far.
        due_ns: monotonic, when it is ended.
        end_ns: since 1970.
    """

    span: Span
    times: BatchTimes
    links: int
    due_ns: int
    end_ns: int


class _Ids(IdGenerator):
    """Random ids, but for the trace that is begun next.

    Attributes:
        next_trace_id: of that trace, 0 for a random one.
    """

    next_trace_id = 0

    def generate_span_id(self) -> int:
        return random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        chosen, self.next_trace_id = self.next_trace_id, 0
        return chosen or random.getrandbits(128) or 1


class _Ended(SpanProcessor):
    """Keeps the spans that have ended.

    Attributes:
        spans: since somebody took them.
    """

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanWriter:
    """Makes spans and sends them.

    `put` and `close` are called on the event loop (`close` by who ends it), everything else on the thread.

    Args:
        exporter: sends them; may block, on the thread.
        version: of Headrace.
        shown: where the spans go, for the log.
        hold_s: how long a batch's members are waited for.
        capacity: requests that may wait.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        version: str = "",
        shown: str = "the receiver",
        hold_s: float = _HOLD_S,
        capacity: int = CAPACITY,
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
        self._held: dict[int, _HeldBatch] = {}
        self._refused = False
        self._closing = False
        self._last_words = _LastWords()
        self._records: BackgroundWorker[tuple[AccessRecord, str]] = BackgroundWorker(
            "headrace-spans", _KIND, self._work, capacity, gather_s=0.2
        )

    @property
    def failed(self) -> bool:
        """No spans are made any more; the log says why."""
        return self._records.failed

    def put(self, record: AccessRecord, trace_id: str) -> None:
        """A request is over that is traced under `trace_id`, 32 hexadecimal digits."""
        self._records.put((record, trace_id))

    def close(self) -> None:
        """Send what waits; waits a few seconds at most for a receiver that does not take it."""
        self._closing = True
        if not self._records.close(_CLOSE_TIMEOUT_S):
            logger.warning("spans are lost: %s did not take them in time", self._shown)
        self._exporter.shutdown()

    def _work(self, records: list[tuple[AccessRecord, str]]) -> float | None:
        """Make spans of records, end the batches that are due, send all of it."""
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
        if record.error:
            span.set_status(Status(StatusCode.ERROR, redact(_text(record.error))))
        span.end(record.ended_ns + offset_ns)
        if batch is not None and batch.links < _MAX_LINKS:
            batch.span.add_link(span.get_span_context(), {"headrace.link": "member"})
            batch.links += 1

    def _batch(self, record: AccessRecord, now_ns: int, offset_ns: int) -> _HeldBatch | None:
        """The batch of an answered request; its members share one object for their times."""
        times = record.times
        if times is None:
            return None
        held = self._held.get(id(times))
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
            self._held[id(times)] = held
        return held

    def _end_batches(self, now_ns: int) -> float | None:
        """End those that are due, or too many; seconds until the next one is."""
        for key, held in list(self._held.items()):  # in the order in which they came
            if not self._closing and held.due_ns > now_ns and len(self._held) <= _MAX_HELD:
                return (held.due_ns - now_ns) / NS_PER_S
            held.span.end(held.end_ns)
            del self._held[key]
        return None

    def _send(self, spans: list[ReadableSpan]) -> None:
        try:
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
            reason = "" if sent else self._last_words.text
        except Exception as error:  # whatever a transport raises: the next batch is tried anew
            sent, reason = False, repr(error)
        if not sent:
            DROPPED.count(_KIND, by=len(spans))
        if sent and self._refused:
            logger.info("spans are delivered again to %s", self._shown)
        elif not sent and not self._refused:
            logger.warning("spans are lost, they cannot be delivered to %s: %s", self._shown, redact(reason))
        self._refused = not sent


class _LastWords(logging.Handler):
    """What the exporter logged last: it says so with every batch that it loses, where we say it once.

    Attributes:
        text: of the last record.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = "no reason given"
        theirs = logging.getLogger("opentelemetry.exporter")
        theirs.handlers[:] = [self]
        theirs.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def otlp_exporter(endpoint: str, protocol: str) -> SpanExporter:
    """What sends spans to a receiver; headers, certificates and compression by OpenTelemetry's own OTEL_EXPORTER_OTLP_ variables.

    Args:
        endpoint: URL; over HTTP without a path it is that of the specification, /v1/traces.
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
    """What sends: named by OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, or headrace."""
    found = Resource.create({"service.version": version} if version else {})
    if str(found.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "headrace"}))
    return found


def _parent(record: AccessRecord) -> Context:
    """The caller's span, or nothing: then a trace begins."""
    context = record.context
    if context is None:
        return Context()
    state = TraceState.from_header([context.state]) if context.state else None
    flags = TraceFlags(TraceFlags.SAMPLED)
    parent = SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags, state)
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _attributes(record: AccessRecord) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "headrace.protocol": record.protocol,
        "headrace.model": _text(record.model),
        "headrace.version": _text(record.version),
        "headrace.rows": record.rows,
    }
    if record.protocol == "http":
        found |= {"http.request.method": "POST", "http.response.status_code": int(record.status)}
        found["http.route"] = "/v2/models/{model}/infer"
    else:
        found |= {"rpc.system": "grpc", "rpc.service": "inference.GRPCInferenceService", "rpc.method": "ModelInfer"}
        found["rpc.response.status_code"] = record.status
    if record.request_id:
        found["headrace.request_id"] = redact(_text(record.request_id))
    if record.client:
        found["headrace.client"] = _text(record.client)
    if record.error:
        found["error.type"] = record.reason
    if record.times is not None:
        found |= {"headrace.batch.rows": record.batch_rows, "headrace.batch.closed": record.closed}
        found["headrace.batch.id"] = record.batch_id
    return found


def _text(text: str) -> str:
    """What a client sent, short and as Unicode has it: a lone surrogate would spoil the message for all spans in it."""
    return text[:_MAX_TEXT].encode("utf-8", "replace").decode()
