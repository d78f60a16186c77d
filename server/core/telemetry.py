"""What the operator wants to be told of requests: traces and a log."""

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
        request_log: off; errors; sampled (errors, what is traced, and one in `request_log_rate`); all.
        request_log_file: "" for standard error.
        request_log_rate: of sampled.
    """

    otlp_endpoint: str = ""
    otlp_protocol: str = "grpc"
    trace_rate: int = 1000
    request_log: RequestLogMode = "errors"
    request_log_file: str = ""
    request_log_rate: int = 100
