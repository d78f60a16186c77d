"""Options of telemetry (traces, access log, metrics under Triton's names), values of metrics, and W3C trace contexts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

RequestLogMode = Literal["off", "errors", "sampled", "all"]
REQUEST_LOG_MODES: tuple[RequestLogMode, ...] = ("off", "errors", "sampled", "all")
OTLP_PROTOCOLS = ("grpc", "http")
PHASES = ("decode", "queue", "assemble", "compute", "split", "encode")
"""Phases of a request in the order in which they happen, named alike in metrics, spans, logs and headers."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Options of spans and the access log; each field is an option of `headrace serve`.

    Attributes:
        otlp_endpoint: URL of an OTLP receiver for spans, "" for none.
        otlp_protocol: grpc or http.
        trace_rate: of requests without a trace context, one in `trace_rate` is recorded as spans; 0 for none.
        request_log: off; errors; sampled (errors, traced requests, and one in a hundred of the others); all.
        request_log_file: path of the access log, "" for standard error.
    """

    otlp_endpoint: str = ""
    otlp_protocol: str = "grpc"
    trace_rate: int = 1000
    request_log: RequestLogMode = "errors"
    request_log_file: str = ""


@dataclass(frozen=True, slots=True)
class TritonMetrics:
    """Switches of the metrics under Triton's names: `--metrics-config NAME=VALUE`, as in Triton.

    Summaries and histograms are on by default: they are computed during a scrape, at no cost for requests.

    Attributes:
        preset: "lean" exports of each model one histogram, its counters and gauges, and nothing under Triton's names.
        counter_latencies: export nv_inference_..._duration_us.
        summary_latencies: export nv_inference_..._summary_us.
        histogram_latencies: export nv_inference_first_response_histogram_ms.
        summary_quantiles: quantiles of the summaries, from 0 to 1.
    """

    preset: Literal["full", "lean"] = "full"
    counter_latencies: bool = True
    summary_latencies: bool = True
    histogram_latencies: bool = True
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


class StoreStatus(NamedTuple):
    """State of a repository that is mirrored from a store.

    Attributes:
        url: of the store; it has no secrets.
        error: why the last comparison with the store failed; "" if it succeeded.
        compared_ns: monotonic time of the last comparison that succeeded, ns; 0 before the first.
    """

    url: str
    error: str = ""
    compared_ns: int = 0


@dataclass(slots=True)
class GpuReading:
    """Current state of one GPU; None for figures that it does not support.

    Attributes:
        gpu: CUDA's number of the GPU; NVML's number without PyCUDA.
        name, uuid, driver: identity, "" if unknown.
        up: the driver responds for this GPU, and it has not failed in this process.
        utilization: share of the last sampling period in which a kernel ran, 0 to 1.
        memory_used_bytes, memory_total_bytes: device memory.
        power_w, power_limit_w: present and enforced power in watts.
        energy_j: since the driver was loaded, in joules.
        temperature_c: of the GPU, in degrees Celsius.
        clocks_hz: by clock domain: sm, memory.
        ecc_errors: by kind, since the driver was loaded: corrected, uncorrected.
        slowed: by reason, whether it reduces the clocks now.
    """

    gpu: int
    name: str = ""
    uuid: str = ""
    driver: str = ""
    up: bool = False
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    clocks_hz: Mapping[str, float] = field(default_factory=dict)
    ecc_errors: Mapping[str, int] = field(default_factory=dict)
    slowed: Mapping[str, bool] = field(default_factory=dict)


@dataclass(slots=True)
class LoadCounts:
    """Load and eviction counters of one version.

    Attributes:
        count: number of loads.
        time_ns: total load time.
        last_ns: time of the last load.
        on_demand: loads caused by a request.
        evictions: evictions that made room for another version.
    """

    count: int = 0
    time_ns: int = 0
    last_ns: int = 0
    on_demand: int = 0
    evictions: int = 0


TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"

# Later versions may append fields after another dash; version ff is invalid.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MAX_STATE = 512
_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16


class TraceContext(NamedTuple):
    """Trace context of the caller (W3C Trace Context).

    Attributes:
        trace_id: 32 hexadecimal digits, lower case.
        span_id: span id of the caller, 16 hexadecimal digits.
        sampled: True if the caller records its spans.
        state: value of the header `tracestate`, "" without one.
    """

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""


def trace_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse the two headers of a trace context.

    Args:
        traceparent: value of the header `traceparent`, "" without one.
        tracestate: value of the header `tracestate`, "" without one.

    Returns:
        The context. None for invalid headers, which are ignored (W3C Trace Context, section 3.2): a request never fails
        because of its trace context.
    """
    match = _TRACEPARENT.fullmatch(traceparent.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = tracestate if len(tracestate) <= _MAX_STATE and tracestate.isascii() and tracestate.isprintable() else ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)
