"""Options of telemetry: traces, the request log, metrics under Triton's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RequestLogMode = Literal["off", "errors", "sampled", "all"]
REQUEST_LOG_MODES: tuple[RequestLogMode, ...] = ("off", "errors", "sampled", "all")
OTLP_PROTOCOLS = ("grpc", "http")


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
