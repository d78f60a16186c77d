"""Options of telemetry (traces, access log, metrics under Triton's names), and W3C trace contexts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

RequestLogMode = Literal["off", "errors", "sampled", "all"]
REQUEST_LOG_MODES: tuple[RequestLogMode, ...] = ("off", "errors", "sampled", "all")
OTLP_PROTOCOLS = ("grpc", "http")
PHASES = ("decode", "queue", "assemble", "compute", "split", "encode")
"""Phases of a request in the order in which they happen, named alike in metrics, spans, logs and headers."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Every field is an option of `headrace serve`.

    Attributes:
        otlp_endpoint: URL of who takes spans by OTLP, "" for nobody.
        otlp_protocol: grpc or http.
        trace_rate: one in so many requests is traced as spans of those that bring no trace of their own; 0: none.
        request_log: off; errors; sampled (errors, what is traced, and one in a hundred of the rest); all.
        request_log_file: "" for standard error.
    """

    otlp_endpoint: str = ""
    otlp_protocol: str = "grpc"
    trace_rate: int = 1000
    request_log: RequestLogMode = "errors"
    request_log_file: str = ""


@dataclass(frozen=True, slots=True)
class TritonMetrics:
    """Which metrics under Triton's names there are: `--metrics-config NAME=VALUE`, with Triton's names.

    Summaries and histograms are on: they are computed when Prometheus scrapes, and cost requests nothing.

    Attributes:
        counter_latencies: nv_inference_..._duration_us.
        summary_latencies: nv_inference_..._summary_us.
        histogram_latencies: nv_inference_first_response_histogram_ms.
        summary_quantiles: of the summaries, 0 to 1.
    """

    counter_latencies: bool = True
    summary_latencies: bool = True
    histogram_latencies: bool = True
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"

# Later versions may append fields behind another dash; version ff is forbidden.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MAX_STATE = 512
_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16


class TraceContext(NamedTuple):
    """The caller's trace.

    Attributes:
        trace_id: 32 hexadecimal digits, lower case.
        span_id: of the caller's span, 16 hexadecimal digits.
        sampled: the caller records its spans.
        state: what vendors have put there, the header `tracestate` as it came; "" if there is none.
    """

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""


def trace_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context that the two headers tell, None if they tell none.

    Headers that are wrong are as good as none (section 3.2 of the recommendation): a request does not fail by its tracing.
    """
    found = _TRACEPARENT.fullmatch(traceparent.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = tracestate if len(tracestate) <= _MAX_STATE and tracestate.isascii() and tracestate.isprintable() else ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)
