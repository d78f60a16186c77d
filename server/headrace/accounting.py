"""Creates the tracer, the span exporter and the request log from the settings."""

from __future__ import annotations

import sys
from importlib.metadata import version
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError, Finding
from headrace.core.telemetry import Telemetry
from headrace.observability.access_log import RequestLog, open_stream
from headrace.observability.logs import is_secret, redact
from headrace.observability.tracing import RequestObserver, Spans, Tracer
from headrace.settings import Settings

_EXTRA = "pip install 'headrace[otel]'"


def open_observer(settings: Settings) -> tuple[Tracer, RequestObserver]:
    """Create the tracer and the observer that front ends report requests to.

    Args:
        settings: settings of the server.

    Raises:
        ConfigError: an option has an invalid value, or its file cannot be written.
    """
    telemetry = settings.telemetry
    tracer = Tracer(settings.trace_file, spans=_spans(telemetry), rate=telemetry.trace_rate)
    return tracer, RequestObserver(tracer, _request_log(settings), is_secret(settings.client_header))


def _request_log(settings: Settings) -> RequestLog:
    telemetry = settings.telemetry
    try:
        stream = open_stream(telemetry.request_log_file)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise _error(f"--request-log-file {telemetry.request_log_file}", reason, "name another file") from error
    text = not telemetry.request_log_file and settings.log_format == "text" and sys.stderr.isatty()
    return RequestLog(telemetry.request_log, stream, text=text)


def _spans(telemetry: Telemetry) -> Spans | None:
    endpoint, redacted = telemetry.otlp_endpoint, redact(telemetry.otlp_endpoint)
    if not endpoint:
        return None
    option = f"--otlp-endpoint {redacted}"
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise _error(option, "is not a URL of a receiver", "write http://host:4317, or http://host:4318 over HTTP")
    try:
        from headrace.observability.spans import SpanWriter, otlp_exporter

        return SpanWriter(otlp_exporter(endpoint, telemetry.otlp_protocol), version("headrace"), redacted)
    except ImportError as error:
        raise _error(option, f"needs a package that is not installed ({error.name})", _EXTRA) from error
    except Exception as error:  # the exporter's own variables (OTEL_EXPORTER_OTLP_...) can be wrong in many ways
        raise _error(
            option, f"cannot be used: {redact(str(error))}", "check the OTEL_ environment variables"
        ) from error


def _error(option: str, message: str, cure: str) -> ConfigError:
    return ConfigError([Finding(option, None, message, cure)])
