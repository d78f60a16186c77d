"""Telemetry options of the operator, and errors of invalid ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from headrace.core.errors import ConfigError
from headrace.core.telemetry import Telemetry
from headrace.server.settings import Settings
from headrace.server.wiring import open_observer


def settings(telemetry: Telemetry, **more: str) -> Settings:
    return Settings(model_repository=(), telemetry=telemetry, **more)  # type: ignore[arg-type]


def test_the_default_logs_errors_and_traces_nothing() -> None:
    tracer, observer = open_observer(settings(Telemetry()))
    assert not tracer.active
    assert not observer.active
    observer.close()


def test_spans_are_enabled_from_the_start_with_an_endpoint() -> None:
    tracer, observer = open_observer(settings(Telemetry(otlp_endpoint="http://127.0.0.1:9", trace_rate=7)))
    assert observer.active
    assert tracer.settings("")["trace_rate"] == "7"
    observer.close()


def test_a_missing_package_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(sys.modules, "headrace.observability.spans", raising=False)
    with pytest.raises(ConfigError, match=r"opentelemetry\.sdk\.resources.*pip install '\.\[otel\]' in a checkout"):
        open_observer(settings(Telemetry(otlp_endpoint="http://h:4317")))


def test_invalid_variables_of_the_exporter_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli")
    with pytest.raises(ConfigError, match="OTEL_"):
        open_observer(settings(Telemetry(otlp_endpoint="http://h:4317")))


@pytest.mark.parametrize("endpoint", ["nonsense", "ftp://me:hunter2@h", "http://", "http://h:99999"])
def test_an_invalid_endpoint_is_reported_without_its_password(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-endpoint.*http://host:4317") as caught:
        open_observer(settings(Telemetry(otlp_endpoint=endpoint)))
    assert "hunter2" not in str(caught.value)


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("before\n")
    _, observer = open_observer(settings(Telemetry(request_log="all", request_log_file=str(file))))
    observer.close()
    assert file.read_text() == "before\n"
